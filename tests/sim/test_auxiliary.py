"""Members that only assist: they reduce shares of others, contribute nothing, want nothing, and touch no tensor.

Groups are written as a word, one letter for each member in order: `t` contributes and reduces (a trainer), `c`
contributes and only dials (a client), `a` is auxiliary. The first decides.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shoal.averaging.allreduce.round import Outcome, Round, RoundOptions
from shoal.compression import CompressionBase, Float16Compression
from shoal.errors import ConfigError, PeerRefused, RoundFailed
from shoal.events import PeerDropped, PeerSilent, Warned
from shoal.protocol.wire import Abort, Assign, Commit, Member, Reduce
from shoal.rpc import Stream
from shoal.sim import sleep
from shoal.transport import memory
from tests.sim.round_kit import OPTIONS, ROUND, RoundPeer, gather_group
from tests.sim.rpc_kit import SimNet, on_sim, together

NUMEL = 20_000
SLOW_BYTES_S = 60_000.0
"""With this bandwidth a round of NUMEL elements takes about two seconds."""


class Untouchable(torch.Tensor):
    """A tensor that nothing may be done with."""

    armed = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not cls.armed, f"an auxiliary member's tensor was used: {func}"
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@dataclass
class Result:
    """What came of a round for one member: `None` while it goes on, or if its host died."""

    outcome: Outcome | None = None
    failure: RoundFailed | None = None


class Trial:
    """One round of a group.

    Attributes:
        values: what each member had at first.
        results: one for each member.
    """

    def __init__(self, net: SimNet, word: str, members: list[RoundPeer], values: list[torch.Tensor]) -> None:
        self.net, self.word, self.members, self.values = net, word, members, values
        self.weights = [0.0 if kind == "a" else 1.0 + i / 2 for i, kind in enumerate(word)]
        self.names = [f"{kind}{i}" for i, kind in enumerate(word)]
        self.rounds: list[Round] = []
        self.running: list[asyncio.Task[None]] = []
        self.results = [Result() for _ in word]

    @classmethod
    async def make(
        cls, net: SimNet, word: str, *, seed: int = 1, numel: int = NUMEL, codec: CompressionBase | None = None
    ) -> Trial:
        """Start the members, each with values of its own."""
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(numel, generator=generator) for _ in word]
        members = []
        Untouchable.armed = False
        for i, kind in enumerate(word):
            mine = values[i].clone()
            tensor = mine.as_subclass(Untouchable) if kind == "a" else mine
            member = await RoundPeer.make(net, f"{kind}{i}", tensor, codec, auxiliary=kind == "a", client=kind == "c")
            members.append(member)
        Untouchable.armed = True
        return cls(net, word, members, values)

    async def begin(
        self, shares: Sequence[int] | None = None, *, options: RoundOptions = OPTIONS, tile_bytes: int = 4096
    ) -> None:
        """Form the group, and start the rounds in it, each on its own host."""
        await gather_group(self.members)
        shares = shares or even([kind != "c" for kind in self.word], self.values[0].numel())
        for member, weight in zip(self.members, self.weights, strict=True):
            self.rounds.append(
                member.round(self.members, shares, weight=weight, options=options, tile_bytes=tile_bytes)
            )

    def start(self, indices: Sequence[int] | None = None) -> None:
        """Let these members take part, by default all."""
        for i in indices if indices is not None else range(len(self.word)):
            self.running.append(self.net.swarm.spawn(self.names[i], self._run(i)))

    async def _run(self, index: int) -> None:
        round_, member = self.rounds[index], self.members[index]
        try:
            self.results[index].outcome = await round_.run()
            if not member.auxiliary:
                member.vector.overwrite()
        except RoundFailed as failure:
            self.results[index].failure = failure
        await round_.close(orderly=self.results[index].outcome is not None)

    async def wait(self) -> None:
        """Until all that live are done."""
        async with asyncio.timeout(120.0):
            for error in await together(*self.running):
                if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                    raise error

    def check(self) -> Commit | None:
        """Hold what must always hold; returns the verdict, if anybody learned one.

        Who succeeded holds the float64 mean of the members that the verdict names, tile by tile, all the same bits; who
        did not is untouched.
        """
        commits = [result.outcome.commit for result in self.results if result.outcome is not None]
        assert all(commit == commits[0] for commit in commits)
        expected = self.reference(commits[0]) if commits else torch.empty(0)
        done = []
        for i, (member, result) in enumerate(zip(self.members, self.results, strict=True)):
            assert not member.peer.seen(Warned)
            assert not member.auxiliary or not self.rounds[i]._exchange._senders  # it asks for nothing
            tensor = member.vector.tensors[0]
            if member.auxiliary or result.outcome is None:
                Untouchable.armed = False
                assert torch.equal(tensor.as_subclass(torch.Tensor), self.values[i])
                Untouchable.armed = True
            else:
                torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
                done.append(tensor)
            if result.outcome is not None:
                assert [m.contributes for m in result.outcome.members] == [kind != "a" for kind in self.word]
                assert not {self.members[j].peer.peer_id for j in self.auxiliaries} & set(result.outcome.left_out)
        assert all(torch.equal(tensor, done[0]) for tensor in done)
        return commits[0] if commits else None

    @property
    def auxiliaries(self) -> list[int]:
        """The members that only assist."""
        return [i for i, kind in enumerate(self.word) if kind == "a"]

    def reference(self, commit: Commit) -> torch.Tensor:
        """The weighted mean in float64 of those whom the verdict names."""
        mean = torch.zeros(self.values[0].numel(), dtype=torch.float64)
        for tile, held in zip(self.rounds[0].tiling.tiles, commit.tiles, strict=True):
            counted = [i for i in range(len(self.word)) if held.contributors[i // 8] >> i % 8 & 1]
            assert not set(counted) & set(self.auxiliaries)
            total = sum(self.weights[i] for i in counted)
            assert held.weight == pytest.approx(total)
            for i in counted:
                mean[tile.start : tile.stop] += (
                    self.weights[i] / total * self.values[i][tile.start : tile.stop].double()
                )
        return mean

    def contributors(self, commit: Commit) -> set[int]:
        """The members that count in every tile."""
        return {
            i for i in range(len(self.word)) if all(held.contributors[i // 8] >> i % 8 & 1 for held in commit.tiles)
        }


def even(reduces: Sequence[bool], numel: int) -> list[int]:
    """Shares of nearly equal size for those who reduce."""
    able = [i for i, can in enumerate(reduces) if can]
    shares = [numel // len(able) if can else 0 for can in reduces]
    shares[able[-1]] += numel - sum(shares)
    return shares


# ---------------------------------------------------------------------------------------------------------- in order

WORDS = ["ta", "tta", "att", "tat", "tttaa", "atata", "acc", "tcca", "accc", "aacc"]


@pytest.mark.parametrize("codec", [None, Float16Compression()], ids=["none", "float16"])
@pytest.mark.parametrize("word", WORDS)
def test_the_average_is_of_those_who_contribute(word: str, codec: CompressionBase | None) -> None:
    """Trainers, clients and auxiliary members in any order, also as coordinators: the contributors' exact mean."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, word, codec=codec)
        await trial.begin()
        trial.start()
        await trial.wait()
        if codec is None:
            commit = trial.check()
        else:
            commit = trial.results[0].outcome.commit if trial.results[0].outcome else None
            tensors = [m.vector.tensors[0] for m in trial.members if not m.auxiliary]
            assert commit is not None
            assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
            torch.testing.assert_close(tensors[0].double(), trial.reference(commit), rtol=4e-3, atol=4e-3)
        assert commit is not None
        assert all(result.outcome is not None for result in trial.results)
        assert trial.contributors(commit) == {i for i, kind in enumerate(word) if kind != "a"}
        assert all(result.outcome is not None and not result.outcome.left_out for result in trial.results)

    on_sim(scenario)


@pytest.mark.parametrize("word", ["tta", "att", "tttaa", "acc", "tcca"])
def test_no_byte_is_sent_in_vain(word: str) -> None:
    """Contributors send each reducer its tiles, reducers send averages to contributors; nothing else is sent."""

    async def scenario(net: SimNet) -> None:
        numel = 100_000
        trial = await Trial.make(net, word, numel=numel)
        shares = even([kind != "c" for kind in word], numel)
        await trial.begin(shares, tile_bytes=1 << 15)
        before = [member.peer.endpoint.traffic for member in trial.members]
        trial.start()
        await trial.wait()
        trial.check()
        contributors = sum(kind != "a" for kind in word)
        for i, (kind, size) in enumerate(zip(word, shares, strict=True)):
            others = contributors - (kind != "a")  # who contributes to the share of this member, and gets its averages
            away = 0 if kind == "a" else numel - size
            sent, received = (4 * (size * others + away),) * 2
            now = trial.members[i].peer.endpoint.traffic
            overhead = [now[0] - before[i][0] - sent, now[1] - before[i][1] - received]
            assert all(0 <= extra < 20_000 for extra in overhead), (i, overhead, sent)

    on_sim(scenario)


def test_rounds_follow_each_other() -> None:
    """What an auxiliary member summed in one round is not in the next one, also with other shares."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, "tta", codec=Float16Compression())
        for number, shares in enumerate(([0, 0, NUMEL], [5000, 5000, 10_000], [0, NUMEL, 0], [0, 0, NUMEL])):
            for member in trial.members[:2]:
                member.vector.tensors[0].fill_(1.0 + number)
            await gather_group(trial.members)
            rounds = [
                member.round(trial.members, shares, round_id=bytes([number]) * 16, tile_bytes=4096)
                for member in trial.members
            ]
            assert not trial.members[2].vector._wire
            await asyncio.gather(*(round_.run() for round_ in rounds))
            await asyncio.gather(*(round_.close() for round_ in rounds))
            for member in trial.members[:2]:
                member.vector.overwrite()
                assert torch.equal(member.vector.tensors[0], torch.full((NUMEL,), 1.0 + number))
            for member in trial.members:
                member.release()

    on_sim(scenario)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("word", ["aa", "aaa"])
def test_a_group_of_auxiliary_members_does_not_average(word: str) -> None:
    """Nobody has values: each of them says so at once, without a word to the others."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, word)
        await trial.begin()
        began = asyncio.get_running_loop().time()
        trial.start()
        await trial.wait()
        assert asyncio.get_running_loop().time() == began
        for result in trial.results:
            assert result.failure is not None
            assert "auxiliary" in result.failure.reason
        trial.check()

    on_sim(scenario)


def test_all_contributors_with_weight_zero() -> None:
    """With nothing to average the round fails, by name; the auxiliary reducer and coordinator fail with it."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, "att")
        trial.weights = [0.0] * 3
        await trial.begin()
        trial.start()
        await trial.wait()
        for result in trial.results:
            assert result.failure is not None
            assert "total weight of the group is zero" in result.failure.reason
            assert "values that are not finite or too large to be summed" in result.failure.reason
        trial.check()

    on_sim(scenario)


def test_an_auxiliary_member_has_weight_zero() -> None:
    """Its values are not there to be counted."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, "ta")
        await trial.begin()
        member = trial.members[1]
        with pytest.raises(ConfigError, match="weight must be 0 for an auxiliary member"):
            Round(member.table, _formed(trial), member.vector, weight=1.0, options=OPTIONS)

    on_sim(scenario)


def _formed(trial: Trial) -> Any:
    """The group as the second member sees it."""

    class Group:
        round_id, my_index, coordinator, tile_bytes = ROUND, 1, 0, 4096
        shares = (0, NUMEL)
        controls = trial.members[1].controls
        members: tuple[Member, ...] = tuple(member.member() for member in trial.members)

    return Group()


def test_an_auxiliary_member_is_given_no_averages() -> None:
    """One that opens a stream all the same is refused: it has nothing to send, and nothing is sent to it."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, "tta")
        await trial.begin([NUMEL, 0, 0])
        trial.start([0])
        stream = await trial.members[2].peer.endpoint.open(trial.members[0].peer.contact, Reduce(ROUND), timeout_s=5.0)
        with pytest.raises(PeerRefused, match="contributes"):
            await stream.recv()
        trial.start([1, 2])
        await trial.wait()
        assert trial.check() is not None

    on_sim(scenario)


# ------------------------------------------------------------------------------------------------- who is waited for


@pytest.mark.parametrize("word", ["att", "tat", "aact"])
def test_contributors_may_begin_later(word: str) -> None:
    """An auxiliary member has nothing to prepare and is there first: it counts nobody as silent before they begin."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, word)
        await trial.begin()
        trial.start(trial.auxiliaries)
        await sleep(5 * OPTIONS.silence_s)
        trial.start([i for i in range(len(word)) if i not in trial.auxiliaries])
        await trial.wait()
        commit = trial.check()
        assert commit is not None
        assert trial.contributors(commit) == {i for i, kind in enumerate(word) if kind != "a"}
        assert not any(held.attempt for held in commit.tiles)

    on_sim(scenario)


@pytest.mark.parametrize("word", ["att", "tat"])
def test_an_auxiliary_member_does_not_wait_for_ever(word: str) -> None:
    """Nobody begins: its own deadline ends the round."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, word)
        await trial.begin(options=RoundOptions(timeout_s=9.0))
        trial.start(trial.auxiliaries)
        await trial.wait()
        [failure] = [trial.results[i].failure for i in trial.auxiliaries]
        assert failure is not None
        assert "not decided within 9 s" in failure.reason

    on_sim(scenario)


def test_an_idle_auxiliary_member_holds_nobody_up() -> None:
    """It moves nothing and holds nothing, while averages go to a slow contributor: that is no lack of progress."""

    async def scenario(net: SimNet) -> None:
        net.swarm.network.add_host("t1", down_bytes_s=30_000.0)
        trial = await Trial.make(net, "tta", numel=100_000)
        await trial.begin([100_000, 0, 0])
        began = asyncio.get_running_loop().time()
        trial.start()
        await trial.wait()
        assert asyncio.get_running_loop().time() - began > 3 * OPTIONS.silence_s + 3 * OPTIONS.report_s
        assert trial.check() is not None
        assert all(result.outcome is not None for result in trial.results)
        assert not any(member.peer.seen(PeerDropped) for member in trial.members)

    on_sim(scenario)


# ------------------------------------------------------------------------------------------------------------- failures


MOMENTS_S = (0.0, 0.03, 0.3, 0.8, 1.2, 1.6, 1.8, 1.85, 1.9, 1.95, 2.1, 3.0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["crash", "vanish", "stall"])
@pytest.mark.parametrize("after_s", MOMENTS_S)
def test_an_auxiliary_reducer_dies(after_s: float, way: str) -> None:
    """At any moment: its tiles get another reducer, and the contributors get the mean of all of them."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, "tta")
        await trial.begin([5000, 5000, 10_000])
        trial.start()
        await sleep(after_s)
        getattr(net.swarm, way)("a2")
        await asyncio.wait(trial.running[:2], timeout=60.0)
        if way == "stall":
            net.swarm.unstall("a2")
        await trial.wait()
        commit = trial.check()
        assert commit is not None
        assert trial.contributors(commit) == {0, 1}
        assert all(result.outcome is not None for result in trial.results[:2])
        again = [
            held.attempt
            for reducer, held in zip(trial.rounds[0].tiling.owners, commit.tiles, strict=True)
            if reducer == 2
        ]
        assert all(again) or after_s > 0.1
        assert any(again) or after_s > 1.0
        assert not any(again) or after_s < 2.0

    on_sim(scenario, bandwidth_bytes_s=SLOW_BYTES_S)


@pytest.mark.parametrize("word", ["tttt", "ttta", "atcc", "tctc"])
def test_who_dies_before_the_others_knew_it_is_not_waited_for(word: str) -> None:
    """The last one is dead when the round begins; only the coordinator had a link to it, and tells the others."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, word)
        await trial.begin()
        net.swarm.crash(trial.names[-1])
        began = asyncio.get_running_loop().time()
        trial.start(range(len(word) - 1))
        await trial.wait()
        assert asyncio.get_running_loop().time() - began < 0.5
        commit = trial.check()
        assert commit is not None
        assert all(result.outcome is not None for result in trial.results[:-1])

    on_sim(scenario)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("after_s", MOMENTS_S)
@pytest.mark.parametrize("word", ["att", "atta"])
def test_an_auxiliary_coordinator_dies(after_s: float, word: str) -> None:
    """The others learn the verdict from each other, or all fail promptly: nothing in between."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, word)
        await trial.begin()
        trial.start()
        await sleep(after_s)
        net.swarm.crash("a0")
        died = asyncio.get_running_loop().time()
        await trial.wait()
        commit = trial.check()
        for result in trial.results[1:]:
            assert (result.outcome is not None) == (commit is not None)
            assert result.failure is None or "outcome unknown" in result.failure.reason
        assert commit is not None or asyncio.get_running_loop().time() - died < 5.0

    on_sim(scenario, bandwidth_bytes_s=SLOW_BYTES_S)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("after_s", MOMENTS_S)
@pytest.mark.parametrize(("word", "victim"), [("tta", 1), ("att", 2), ("ttta", 2), ("acc", 1)])
def test_a_contributor_dies_while_an_auxiliary_member_reduces(word: str, victim: int, after_s: float) -> None:
    """Its values count in the tiles that were done; the survivors agree, and the auxiliary member learns it too."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, word)
        await trial.begin([0 if kind != "a" else NUMEL for kind in word])
        trial.start()
        await sleep(after_s)
        net.swarm.crash(trial.names[victim])
        await trial.wait()
        commit = trial.check()
        assert commit is not None
        living = [i for i in range(len(word)) if i != victim]
        assert all(trial.results[i].outcome is not None for i in living)
        assert trial.contributors(commit) >= {i for i in living if word[i] != "a"}

    on_sim(scenario, bandwidth_bytes_s=SLOW_BYTES_S)


@pytest.mark.parametrize("word", ["att", "atac", "aact"])
def test_the_last_contributors_die(word: str) -> None:
    """Enough auxiliary members live, but nobody is left to average for: they say so, and do not wait."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, word)
        await trial.begin(options=RoundOptions(min_group_size=1))
        trial.start()
        await sleep(0.3)
        for i, kind in enumerate(word):
            if kind != "a":
                net.swarm.crash(trial.names[i])
        died = asyncio.get_running_loop().time()
        await trial.wait()
        assert asyncio.get_running_loop().time() - died < 2.0
        for i in trial.auxiliaries:
            failure = trial.results[i].failure
            assert failure is not None
            assert "contribute" in failure.reason

    on_sim(scenario, bandwidth_bytes_s=SLOW_BYTES_S)


def test_an_auxiliary_member_takes_over_the_tiles_of_the_dead() -> None:
    """A trainer that owns tiles dies: an auxiliary member averages them again, as anybody could."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, "ttca")
        await trial.begin([0, NUMEL, 0, 0])
        trial.start()
        await sleep(0.3)
        net.swarm.crash("t1")
        await trial.wait()
        commit = trial.check()
        assert commit is not None
        assert trial.contributors(commit) == {0, 2}
        assert any(held.attempt == 1 for held in commit.tiles)
        assert 3 in trial.rounds[0].machine.rules.reducer

    on_sim(scenario, bandwidth_bytes_s=SLOW_BYTES_S)


def test_a_reducer_that_no_values_reach_hands_its_tiles_over() -> None:
    """It lives and is told nothing: rather than report an average of nobody, which would end the round, it gives up."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, "atta")
        await trial.begin()

        async def deaf(stream: Stream[Any, Any], sender: int) -> None:
            await asyncio.Event().wait()

        trial.rounds[3]._exchange.serve = deaf  # type: ignore[method-assign]
        trial.start()
        await trial.wait()
        commit = trial.check()
        assert commit is not None
        assert trial.contributors(commit) == {1, 2}
        assert any(held.attempt for held in commit.tiles)
        failure = trial.results[3].failure
        assert failure is not None
        assert "no values with a weight came" in failure.reason

    on_sim(scenario)


def test_tiles_that_come_when_everybody_was_counted_out() -> None:
    """An auxiliary member that is given a tile when it waits for nobody any more says so at once."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, "tta")
        await trial.begin([NUMEL, 0, 0])
        trial.start([2])
        await sleep(0.1)
        for sender in (0, 1):
            trial.rounds[2]._do(trial.rounds[2].machine.contributions.exclude(sender))
        await trial.members[0].controls[trial.members[2].peer.peer_id].send(Assign([0, 1], 1, 2))
        await asyncio.wait({trial.running[0]}, timeout=5.0)
        failure = trial.results[2].failure
        assert failure is not None
        assert "no values with a weight came" in failure.reason

    on_sim(scenario)


def test_weights_of_zero_are_told_apart_from_being_cut_off() -> None:
    """All that is left says that it has nothing; who has something is dead: nobody reports an average of nobody."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, "tta")
        trial.weights = [0.0, 1.0, 0.0]
        await trial.begin([0, 0, NUMEL])
        net.swarm.crash("t1")
        trial.start([0, 2])
        await trial.wait()
        failures = [trial.results[i].failure for i in (0, 2)]
        assert [f is not None and f.reason for f in failures] == [
            "too few members are left",
            "no values with a weight came: members that contribute are lost or too slow",
        ]
        trial.check()


def test_a_reducer_that_only_weights_of_zero_reach_hands_its_tiles_over() -> None:
    """The members with values cannot reach it: another one averages its tiles, and the round succeeds."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, "ttta")
        trial.weights = [0.0, 1.0, 2.0, 0.0]
        await trial.begin([0, 5000, 5000, 10_000])
        for sender in (1, 2):
            trial.rounds[3]._do(trial.rounds[3].machine.contributions.exclude(sender))
        trial.start()
        await trial.wait()
        commit = trial.check()
        assert commit is not None
        assert trial.contributors(commit) == {1, 2}
        assert any(held.attempt for held in commit.tiles)
        assert all(trial.results[i].outcome is not None for i in range(3))
        failure = trial.results[3].failure
        assert failure is not None
        assert "no values with a weight came" in failure.reason

    on_sim(scenario)


@pytest.mark.parametrize("word", ["attt", "tttt"])
def test_a_slow_coordinator_without_weight_hands_its_tiles_on_and_goes_on_deciding(word: str) -> None:
    """An auxiliary helper (or a trainer without samples) at 1% of the others' speed: the round succeeds without it."""

    async def scenario(net: SimNet) -> None:
        slow = f"{word[0]}0"
        trial = await Trial.make(net, word, numel=200 * NUMEL)
        trial.weights[0] = 0.0
        await trial.begin(tile_bytes=1 << 17)
        net.swarm.slow(slow, 100.0)
        trial.start()
        await trial.wait()
        commit = trial.check()
        assert commit is not None
        assert trial.contributors(commit) >= {1, 2, 3}
        assert all(result.outcome is not None for result in trial.results[1:])
        assert any(held.attempt for held in commit.tiles)
        blamed = {event.peer for event in trial.members[0].peer.seen(PeerDropped)}
        assert trial.members[0].peer.peer_id in blamed

    on_sim(scenario, bandwidth_bytes_s=12.5e6, latency_s=0.001)


def test_a_coordinator_whose_line_is_busy_with_what_others_send_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers wait for seconds behind their values, which its machine goes on to acknowledge."""
    monkeypatch.setattr(memory, "SEGMENT_BYTES", 8192)  # a line carries packets, not 64 KB at once

    async def scenario(net: SimNet) -> None:
        net.swarm.network.add_host("a0", up_bytes_s=125_000.0, down_bytes_s=125_000.0)
        trial = await Trial.make(net, "attt", numel=400_000)
        await trial.begin(tile_bytes=1 << 17)
        trial.start()
        await trial.wait()
        assert trial.check() is not None
        assert all(result.outcome is not None for result in trial.results)
        assert not any(member.peer.seen(PeerSilent) for member in trial.members)

    on_sim(scenario, bandwidth_bytes_s=12.5e6, fair=False, window_bytes=150_000)


def test_an_abort_reaches_an_auxiliary_member() -> None:
    """The coordinator's reason is its reason."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, "tta")
        await trial.begin()
        trial.start([1, 2])
        await trial.members[0].controls[trial.members[2].peer.peer_id].send(Abort(ROUND, "too few members are left"))
        await asyncio.wait({trial.running[1]})
        failure = trial.results[2].failure
        assert failure is not None
        assert failure.reason == "too few members are left"
        net.swarm.crash("t0")
        await trial.wait()
        trial.check()

    on_sim(scenario)


def _plan(seed: int) -> tuple[str, list[tuple[float, str, int]]]:
    rng = random.Random(seed)
    word = rng.choice("ta") + "".join(rng.choice("ttcaa") for _ in range(rng.randint(2, 5)))
    word = word if set(word) - {"a"} else word + "t"
    faults = [
        (rng.uniform(0.0, 3.0), rng.choice(["crash", "vanish", "stall"]), rng.randrange(len(word)))
        for _ in range(rng.randint(1, 2))
    ]
    return word, sorted(faults)


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(each, marks=pytest.mark.long(full=True)) for each in range(20, 60))]
)
def test_any_group_any_fault(seed: int) -> None:
    """Drawn groups, shares and faults: agreement, the float64 reference, untouched tensors, and an end in time."""
    word, faults = _plan(seed)

    async def scenario(net: SimNet) -> None:
        rng = random.Random(seed)
        trial = await Trial.make(net, word, seed=seed)
        cuts = sorted(rng.randrange(NUMEL) for _ in range(sum(kind != "c" for kind in word) - 1))
        sizes = iter([b - a for a, b in zip([0, *cuts], [*cuts, NUMEL], strict=True)])
        await trial.begin([0 if kind == "c" else next(sizes) for kind in word])
        trial.start()
        loop = asyncio.get_running_loop()
        began = loop.time()
        for after_s, way, victim in faults:
            await sleep(max(0.0, began + after_s - loop.time()))
            getattr(net.swarm, way)(trial.names[victim])
        victims = {victim for _, _, victim in faults}
        others = [task for i, task in enumerate(trial.running) if i not in victims]
        if others:
            await asyncio.wait(others, timeout=60.0)
            assert all(task.done() for task in others), (word, faults)
        for _, way, victim in faults:
            if way == "stall":
                net.swarm.unstall(trial.names[victim])
        await trial.wait()
        trial.check()
        if 0 not in victims:
            done = {trial.results[i].outcome is not None for i in range(len(word)) if i not in victims}
            assert len(done) == 1, (word, faults)

    on_sim(scenario, bandwidth_bytes_s=SLOW_BYTES_S)
