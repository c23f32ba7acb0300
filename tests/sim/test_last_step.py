"""What the last step of a run has left is compared: who differs is mended while somebody gives it, or is told.

No round follows the last step, so its result was compared with nobody's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from shoal import sim
from shoal.base.peer import PeerID
from shoal.events import Event, Warned
from shoal.run.decide.check import Check
from shoal.run.gossip import ProgressGossip
from shoal.run.parameter_check import ParameterCheck
from shoal.strategies import Strategy, Synchronous
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.test_left_behind import END, STRATEGIES, TARGET

PATIENCE_S = 15.0


class Last:
    """Peers that train to the end of a run; some may be wrong at its last step.

    Args:
        strategy: of all.
        peers: their number.
        written: whether shoal can see that the parameters are not what the step has left.
        of_peers: options of the peers, by number.

    Attributes:
        run: the swarm.
        said: what each has warned of its check.
        stepped_at: when each took its last step; the same time is kept for the last average.
        ended_at: when each was through.
    """

    def __init__(
        self,
        strategy: Strategy,
        peers: int,
        *,
        written: bool = False,
        of_peers: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        self.run, self._strategy, self._written = Run(target=TARGET, trainer=_Noting), strategy, written
        self.names = [f"p{number}" for number in range(peers)]
        self.said = {name: list[str]() for name in self.names}
        self.of_peers = of_peers or {}
        self.ended_at: dict[str, float] = {}
        self.work: dict[str, asyncio.Task[None]] = {}

    async def begin(self, wrong: Sequence[int] = (), **changes: Any) -> None:
        """All train; those of these numbers end with a wrong value."""
        for number, name in enumerate(self.names):
            options = {"strategy": self._strategy, **changes, **self.of_peers.get(number, {})}
            trainer = await self.run.add(name, events=partial(self._note, name), **options)
            assert isinstance(trainer, _Noting)
            trainer.is_wrong, trainer.written = number in wrong, self._written
        await sim.sleep(3.0)
        self.run.announce_end(END)
        self.work = {name: self.run.swarm.spawn(name, self._train(name)) for name in self.names}

    async def end(self, wrong: Sequence[int] = (), **changes: Any) -> None:
        """As `begin`, to the end of the run on all peers."""
        await self.begin(wrong, **changes)
        async with asyncio.timeout(120.0):
            await asyncio.gather(*self.work.values())

    async def _train(self, name: str) -> None:
        trainer = self.run.swarm.peer(name)
        while not trainer.finished:
            if trainer.participant.settings.auxiliary:
                for fragment in trainer.fragments:
                    await trainer.take_turn(fragment)
                await sim.sleep(0.1)
            else:
                await trainer.take_batch(4, duration_s=0.25 + trainer.index / 100)
        self.ended_at[name] = asyncio.get_running_loop().time()

    def _note(self, name: str, event: Event) -> None:
        if isinstance(event, Warned) and "check of the parameters" in event.message:
            self.said[name].append(event.message)

    def peer(self, name: str) -> _Noting:
        """A peer, also one that has left."""
        trainer = self.run.trainers[name]
        assert isinstance(trainer, _Noting)
        return trainer

    @property
    def waited_s(self) -> float:
        """From the last step, or average, of the slowest peer until the last peer was through."""
        return max(self.ended_at.values()) - max(self.peer(name).stepped_at for name in self.names)

    @property
    def are_equal(self) -> bool:
        """Whether all hold the same under the same names: what they share, and what they train with."""
        held = [
            [each for fragment in self.peer(name).fragments for each in fragment.training.parameters]
            for name in self.names
        ]
        first, *others = held
        same = all(all(map(torch.equal, first, other)) for other in others)
        return same and self.run.agree(self.names)

    @property
    def downloads(self) -> list[int]:
        """Of each peer."""
        return [self.peer(name).downloads for name in self.names]

    async def leave(self, names: Sequence[str]) -> None:
        """These leave the run, and their programs end."""
        for name in names:
            for fragment in self.run.swarm.peer(name).fragments:
                await self.run.swarm.run_on(name, fragment.close)
            await self.run.swarm.run_on(name, self.run.swarm.peer(name).participant.core.close)


class _Noting(Trainer):
    """A trainer that may be wrong at the last step of each fragment, and at the average that follows it."""

    is_wrong = written = False
    stepped_at = 0.0

    async def step(self, participant: Any) -> None:
        """See `Trainer`."""
        async with participant.own.hold():
            participant.own.step()
        if participant.epoch == END:
            self.stepped_at = asyncio.get_running_loop().time()
            if self.is_wrong:
                training = participant.training
                training.parameters[0].data.view(-1)[0] += 0.25
                if not self.written:
                    training.weights.note()
        await participant.stepped()


def hidden(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, said: Callable[[bytes | None], bytes | None]) -> None:
    """Let a peer say something else of what it ends with."""
    real: Any = vars(ParameterCheck)["said"].fget
    checks = [fragment._check for fragment in trainer.fragments]
    ours = property(lambda check: said(real(check)) if check in checks else real(check))
    monkeypatch.setattr(ParameterCheck, "said", ours)


def forged(said: bytes | None) -> bytes | None:
    """Another digest than the peer has."""
    if not said:
        return said
    check = msgspec.msgpack.decode(said, type=Check)
    return msgspec.msgpack.encode(msgspec.structs.replace(check, digest=bytes(16)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("peers", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_all_that_end_equal_lose_no_time_and_say_nothing(strategy: Strategy, peers: int) -> None:
    """They end as soon as without a comparison, but for a few times the way between them."""

    async def main() -> float:
        last = Last(strategy, peers)
        await last.end(check_every=check_every)
        assert last.are_equal
        assert not any(last.said.values())
        for fragment in last.peer("p0").fragments:
            check = fragment.progress().check
            assert check is None if not check_every else check is not None and check[0] == END
        await last.leave(last.names)
        return last.waited_s

    waited_s = {}
    for check_every in (0, 10):
        waited_s[check_every] = sim.run(main, seed=3)
    assert waited_s[10] < waited_s[0] + 0.3


@pytest.mark.one_in(2)
@pytest.mark.parametrize("written", [False, True], ids=["computed wrongly", "written to"])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_one_of_four_whose_last_step_is_wrong_ended_with_other_weights(strategy: Strategy, written: bool) -> None:
    """It takes over those of the others, and says so."""

    async def main() -> None:
        last = Last(strategy, 4, written=written)
        await last.end(wrong=[3])
        assert last.are_equal
        assert last.downloads[:3] == [0, 0, 0]
        assert last.waited_s < PATIENCE_S / 2
        for name in last.names[:3]:  # some had heard of it, and said nothing, as it was mended when they concluded
            assert sum("held other parameters" in each for each in last.said[name]) >= 1, name
        ours = last.said["p3"]
        assert any("ours differ from those of 3 peers" in each for each in ours)
        sees = written and not last.peer("p3").participant.training.keeps_anchor  # nothing else has the anchor
        assert all(("Something else than shoal" in each) == sees for each in ours)
        await last.leave(last.names)

    sim.run(main, seed=4)


def test_weights_that_were_written_after_the_last_step_were_told_to_be_trained_on() -> None:
    """The run is over: nobody trains on with anything."""

    async def main() -> None:
        last, told = Last(Synchronous(TARGET), 2, written=True), list[str]()
        await last.begin(wrong=[1])
        events = last.peer("p1").participant.core.env.events
        events.subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
        async with asyncio.timeout(120.0):
            await asyncio.gather(*last.work.values())
        (said,) = (each for each in told if "the trained parameters were changed" in each)
        assert "changed after the last step" in said
        assert "trains on" not in said
        assert last.are_equal
        await last.leave(last.names)

    sim.run(main, seed=4)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_two_that_differ_after_the_last_step_end_equal(strategy: Strategy) -> None:
    """One takes over the other's, and says so."""

    async def main() -> None:
        last = Last(strategy, 2)
        await last.end(wrong=[1])
        assert last.are_equal
        assert last.waited_s < PATIENCE_S / 2
        assert any(last.said.values())
        await last.leave(last.names)

    sim.run(main, seed=5)


def test_peers_of_other_arithmetic_are_told_once_at_the_end() -> None:
    """They end with weights that differ by rounding."""

    async def main() -> None:
        last = Last(Synchronous(TARGET), 2)
        await last.begin(check_every=100)
        for number, name in enumerate(last.names):
            for group in last.peer(name).participant.training.optimizer.param_groups:
                group["foreach"] = number == 1
        trainer = last.peer("p1")

        def rounds(*_: object) -> None:
            trainer.parameters[0].data.mul_(1 + 1e-9)

        trainer.participant.training.optimizer.register_step_post_hook(rounds)
        async with asyncio.timeout(120.0):
            await asyncio.gather(*last.work.values())
        assert last.waited_s < 1.0
        assert not any(last.downloads)
        assert [len(each) for each in last.said.values()] == [1, 1]
        assert all("to rounding only" in each for said in last.said.values() for each in said)
        await last.leave(last.names)

    sim.run(main, seed=6)


def test_a_liar_that_names_another_digest_is_followed_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it as for any peer that is late, and end with what they have."""

    async def main() -> None:
        last = Last(Synchronous(TARGET), 3)
        await last.begin()
        hidden(monkeypatch, last.peer("p2"), forged)
        async with asyncio.timeout(120.0):
            await asyncio.gather(*(last.work[name] for name in last.names[:2]))
        assert last.downloads == [0, 0, 0]
        assert last.waited_s < PATIENCE_S + 1.0
        assert any("held other parameters" in each for each in last.said["p0"])
        await last.leave(last.names)

    sim.run(main, seed=7)


@pytest.mark.parametrize("said", [lambda _: None, forged, lambda _: b"what", lambda _: b""], ids=list("abcd"))
def test_a_peer_whose_word_counts_for_nothing_holds_nobody_up_at_the_end(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[bytes | None], bytes | None]
) -> None:
    """It has given no samples, and says nothing of what it holds, or something else."""

    async def main() -> None:
        last = Last(Synchronous(TARGET), 3, of_peers={2: {"auxiliary": True}})
        await last.begin()
        hidden(monkeypatch, last.peer("p2"), said)
        async with asyncio.timeout(120.0):
            await asyncio.gather(*(last.work[name] for name in last.names[:2]))
        assert last.waited_s < 1.0
        assert last.downloads[:2] == [0, 0]
        assert not last.said["p0"] + last.said["p1"]
        await last.leave(last.names)

    sim.run(main, seed=8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("kind", ["client", "auxiliary"])
def test_a_client_and_an_auxiliary_peer_end_with_the_weights_of_all(kind: str, wrong: int) -> None:
    """Whether it is wrong, or one of the others."""

    async def main() -> None:
        options: dict[str, Any] = {"client": {"client_mode": True}, "auxiliary": {"auxiliary": True}}[kind]
        last = Last(Synchronous(TARGET), 3, of_peers={2: options}, written=True)
        await last.end(wrong=[wrong])
        assert last.are_equal
        assert last.said[f"p{wrong}"]
        await last.leave(last.names)

    sim.run(main, seed=9)


STAR: dict[int, dict[str, Any]] = {number: {"client_mode": True} for number in (1, 2, 3)}
"""Three peers that only dial, and one that they dial."""


@pytest.mark.parametrize("wrong", [0, 3])
@pytest.mark.parametrize("strategy", ["drop", pytest.param("LocalSGD", marks=pytest.mark.long)])
def test_clients_that_met_one_peer_only_took_over_its_wrong_weights(strategy: str, wrong: int) -> None:
    """Each client saw two peers that differ. They learn of each other, and who is wrong takes what most hold."""

    async def main() -> None:
        last = Last(STRATEGIES[strategy], 4, of_peers=STAR)
        await last.end(wrong=[wrong])
        assert last.are_equal
        assert last.downloads == [int(number == wrong) for number in range(4)]
        assert last.waited_s < 3.0
        assert any("ours differ from those of 3 peers" in each for each in last.said[f"p{wrong}"])
        assert last.said["p0"]  # a right client need not hear of one that is mended before
        await last.leave(last.names)

    sim.run(main, seed=20)


def test_a_wrong_peer_between_clients_that_keeps_back_their_words_is_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot change them, as they are signed. The clients keep what they have, and are told."""
    real = ProgressGossip._look

    async def look(gossip: ProgressGossip) -> dict[PeerID, float]:
        return {} if gossip._next_word().parameters else await real(gossip)

    async def main() -> None:
        last = Last(Synchronous(TARGET), 4, of_peers=STAR)
        await last.begin(wrong=[0])
        monkeypatch.setattr(ProgressGossip, "_look", look)
        first = last.peer("p0").participant._check
        monkeypatch.setattr(first, "_mends", lambda _: False)
        async with asyncio.timeout(120.0):
            await asyncio.gather(*last.work.values())
        assert last.downloads == [0, 0, 0, 0]
        assert last.waited_s < PATIENCE_S + 1.0
        assert all(last.said.values())
        await last.leave(last.names)

    sim.run(main, seed=21)


def test_who_leaves_before_it_says_what_it_holds_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it is."""

    async def main() -> None:
        last = Last(Synchronous(TARGET), 3)
        await last.begin()
        trainer = last.peer("p2")
        hidden(monkeypatch, trainer, lambda _: None)
        while not all(last.peer(name).participant.at_end for name in last.names):
            await sim.sleep(0.01)
        await sim.sleep(2.0)
        assert last.ended_at.keys() <= {"p2"}
        last.names.remove("p2")
        await last.leave(["p2"])
        async with asyncio.timeout(120.0):
            await asyncio.gather(*(last.work[name] for name in last.names))
        assert 2.0 <= last.waited_s < 3.0
        assert last.are_equal
        assert not last.said["p0"] + last.said["p1"]
        await last.leave(last.names)

    sim.run(main, seed=10)


def test_who_finds_that_it_differs_once_the_others_have_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have waited for it, and said at their farewell what they hold."""
    real: Any = vars(ParameterCheck)["_done"].fget
    released = list[bool]()

    async def main() -> None:
        last = Last(Synchronous(TARGET), 3, written=True)
        await last.begin(wrong=[2])
        slow = last.peer("p2").participant._check
        done = property(lambda check: real(check) if check is not slow or released else None)
        monkeypatch.setattr(ParameterCheck, "_done", done)
        async with asyncio.timeout(120.0):
            await asyncio.gather(*(last.work[name] for name in last.names[:2]))
        await last.leave(["p0", "p1"])
        released.append(True)
        await sim.sleep(3.0)
        (said,) = last.said["p2"]
        assert "ours differ from those of 2 peers" in said
        assert "take those that most peers hold, from one of their checkpoints" in said
        await last.leave(["p2"])

    sim.run(main, seed=11)


def test_one_peer_alone_ends_at_once() -> None:
    """There is nobody to compare with."""

    async def main() -> None:
        last = Last(Synchronous(TARGET), 1)
        await last.end()
        assert last.waited_s < 0.1
        assert not last.said["p0"]
        await last.leave(last.names)

    sim.run(main, seed=12)


@pytest.mark.parametrize("wrong", [pytest.param((), marks=pytest.mark.long), (17,)], ids=["all equal", "one is wrong"])
def test_eighteen_peers_compare_themselves_with_sixteen(wrong: Sequence[int]) -> None:
    """More than are told of everything: who lacks a word asks for it, and who is wrong is mended."""

    async def main() -> None:
        last = Last(Synchronous(5 * TARGET), 18)
        await last.end(wrong=wrong)
        assert last.are_equal
        assert sum(last.downloads) == len(wrong)
        assert bool(last.said["p17"]) == bool(wrong)
        assert last.waited_s < 3.0
        await last.leave(last.names)

    sim.run(main, seed=13)
