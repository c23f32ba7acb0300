"""Peers that trained apart: the state with more samples counts, whoever can be dialed, and nobody loses in silence."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shoal import sim
from shoal.events import Warned
from shoal.strategies import Decoupled, Strategy
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.test_alone import entered, until
from tests.situations import reaches


def warnings_of(told: list[str]) -> dict[str, Any]:
    """For `Run.add`: note what it is warned of."""
    return {"events": lambda event: told.append(event.message) if isinstance(event, Warned) else None}


def gave_up(told: list[str]) -> list[tuple[int, ...]]:
    """The numbers in each warning of it: epoch and samples taken, epoch and samples given up, samples lost."""
    pattern = (
        r"goes on from epoch (\d+) of the others \((\d+) samples\) and gives up its own epoch (\d+) "
        r"\((\d+) samples\): the (\d+) samples"
    )
    return [tuple(map(int, found.groups())) for each in told if (found := re.search(pattern, each))]


async def train(run: Run, name: str, until_s: float, duration_s: float = 0.5) -> None:
    """Let it train until then, in the background."""
    trainer = run.swarm.peer(name)
    run.swarm.spawn(name, trainer.train(4, duration_s=duration_s, until=until(until_s)))


def epochs(run: Run, *names: str) -> list[int]:
    """Where these are."""
    return [run.swarm.peer(name).participant.epoch for name in names]


@pytest.mark.parametrize("auxiliary", [False, True], ids=["trainer", "auxiliary"])
def test_two_clients_that_trained_alone_took_the_first_step_of_a_fresh_peer_in_silence(auxiliary: bool) -> None:
    """They were at epoch 440 and took its epoch 1. It takes the better one of theirs; the other client is told."""

    async def main() -> None:
        run, told = Run(target=8), dict[str, list[str]](a=[], b=[])
        await entered(run)
        for name, duration_s in (("a", 0.5), ("b", 0.8)):
            await run.add(name, client_mode=True, **warnings_of(told[name]))
            await train(run, name, 80.0, duration_s)
        await sim.sleep(40.0)
        a, b = (run.swarm.peer(name).participant for name in "ab")
        best, worse = a.state, b.state
        assert best.epoch > worse.epoch + 10 > 20
        fresh: Trainer = await run.add("fresh", auxiliary=auxiliary)
        await train(run, "fresh", 80.0, 0.7)
        await sim.sleep(20.0)
        found = [run.swarm.peer(name).participant.state for name in ("a", "b", "fresh")]
        assert all(each.epoch >= best.epoch and each.samples >= best.samples for each in found)
        assert fresh.participant.own.committed.samples.keys() >= {a.core.peer_id, b.core.peer_id}
        assert not gave_up(told["a"])
        ((taken, _, own, samples, lost),) = gave_up(told["b"])
        assert taken >= best.epoch > own >= worse.epoch
        assert samples == lost >= worse.samples

    sim.run(main, seed=41)


def test_fresh_clients_take_the_state_of_a_peer_that_trained_alone() -> None:
    """The mirror image: nobody has anything to lose, and nobody is told anything."""

    async def main() -> None:
        run, told = Run(target=8), list[str]()
        await run.add("old", **warnings_of(told))
        await train(run, "old", 60.0)
        await sim.sleep(30.0)
        before = run.swarm.peer("old").participant.state
        for name in ("a", "b"):
            await run.add(name, client_mode=True, **warnings_of(told))
            await train(run, name, 60.0)
        await sim.sleep(15.0)
        assert all(run.swarm.peer(name).participant.state.samples > before.samples for name in ("old", "a", "b"))
        assert min(epochs(run, "old", "a", "b")) > before.epoch
        assert not gave_up(told)
        await run.close()

    sim.run(main, seed=42)


def test_a_client_and_a_trainer_that_came_back_anew_trained_side_by_side() -> None:
    """At epochs 638 and 57, for as long as one watched. The trainer takes the client's state, and is told."""

    async def main() -> None:
        run, told = Run(target=8), dict[str, list[str]](client=[], trainer=[])
        await entered(run)
        await run.add("trainer", **warnings_of(told["trainer"]))
        await run.add("client", client_mode=True, **warnings_of(told["client"]))
        for name in told:
            await train(run, name, 200.0)
        await sim.sleep(10.0)
        run.swarm.crash("trainer")
        await sim.sleep(20.0)
        run.swarm.partition([["client"], ["trainer", "entry"]])
        again = await run.swarm.restart("trainer")
        run.swarm.spawn("trainer", again.train(4, duration_s=0.5, until=until(200.0)))
        await sim.sleep(12.0)
        ahead, behind = run.swarm.peer("client").participant.state, again.participant.state
        assert ahead.epoch > behind.epoch + 10 > 12
        run.swarm.heal()
        await sim.sleep(30.0)
        after = [run.swarm.peer(name).participant.state for name in told]
        assert all(each.samples > ahead.samples and each.epoch > ahead.epoch for each in after)
        assert not gave_up(told["client"])
        ((taken, _, own, samples, lost),) = gave_up(told["trainer"])
        assert taken >= ahead.epoch > own >= behind.epoch
        assert samples == lost >= behind.samples

    sim.run(main, seed=43)


def test_a_client_that_trained_less_apart_takes_the_state_of_the_others_and_is_told() -> None:
    """The mirror image: its line was down, and the trainer has made more samples meanwhile."""

    async def main() -> None:
        run, told = Run(target=8), dict[str, list[str]](client=[], trainer=[])
        await run.add("trainer", **warnings_of(told["trainer"]))
        await run.add("client", client_mode=True, **warnings_of(told["client"]))
        for name, duration_s in (("trainer", 0.4), ("client", 1.0)):
            await train(run, name, 200.0, duration_s)
        await sim.sleep(5.0)
        shared = run.swarm.peer("client").participant.state
        run.swarm.partition([["client"], ["trainer"]])
        await sim.sleep(30.0)
        ahead, behind = (run.swarm.peer(name).participant.state for name in ("trainer", "client"))
        assert ahead.epoch > behind.epoch + 10 > shared.epoch + 12
        run.swarm.heal()
        await sim.sleep(30.0)
        after = [run.swarm.peer(name).participant.state for name in told]
        assert all(each.samples > ahead.samples and each.epoch > ahead.epoch for each in after)
        assert not gave_up(told["trainer"])
        ((taken, _, own, samples, lost),) = gave_up(told["client"])
        assert taken >= ahead.epoch > own >= behind.epoch
        assert samples - shared.samples >= lost >= behind.samples - shared.samples - 16 > 0
        await run.close()

    sim.run(main, seed=43)


def lost_here(told: list[str]) -> list[int]:
    """How many of the samples that are given up each warning says to be of the peer that is warned."""
    found = (re.search(r"samples that were trained apart from them \((\d+) here\)", each) for each in told)
    return [int(each[1]) for each in found if each]


def test_a_branch_of_two_peers_that_lost_against_three_was_told_nothing() -> None:
    """Only a peer that was alone was told. Each of the two is, once, and the numbers are those of their branch."""

    async def main() -> None:
        names, run = "abcde", Run(target=8)
        told = {name: list[str]() for name in names}
        for name in names:
            await run.add(name, **warnings_of(told[name]))
            await train(run, name, 60.0, 1.0)
        await sim.sleep(5.0)
        run.swarm.partition([["a", "b"], ["c", "d", "e"]])
        await sim.sleep(8.0)
        gone = {name: run.swarm.peer(name).participant.own for name in names}
        before = {name: own.name for name, own in gone.items()}
        given = {name: own.lineage.contributed for name, own in gone.items()}
        assert all(own.shared for own in gone.values())
        marks = {mark.digest: mark for mark in gone["a"].lineage.held}
        fork = next(marks[digest] for digest in reversed(gone["c"].lineage.history) if digest in marks)
        assert before["a"].epoch > fork.epoch + 3
        run.swarm.heal()
        await sim.sleep(15.0)
        assert len({own.name for own in gone.values()}) == 1
        assert gone["a"].name.samples > before["c"].samples > before["a"].samples
        for name in "cde":
            assert not gave_up(told[name])
        for name in "ab":
            ((taken, _, epoch, samples, lost),) = gave_up(told[name])
            assert taken >= before["c"].epoch
            assert epoch >= before[name].epoch
            assert lost == samples - fork.samples >= before[name].samples - fork.samples
            (own,) = lost_here(told[name])
            mine = next(mark for mark in gone[name].lineage.held if mark.digest == fork.digest)
            assert given[name] - mine.contributed <= own < lost
        lost = min(gave_up(told[name])[0][-1] for name in "ab")
        assert lost <= sum(lost_here(told["a"]) + lost_here(told["b"])) <= lost + 16  # one may be a step ahead
        await run.close()

    with reaches("a peer gives up steps of its own and of others for those of a fork"):
        sim.run(main, seed=46)


@pytest.mark.parametrize("parts_s", [3.0, 20.0], ids=["one-fragment", "both"])
def test_a_branch_that_lost_in_one_fragment_only_was_told_nothing(parts_s: float) -> None:
    """One merge held 160 samples of a peer, and only the first fragment told. It is one warning for all of them."""

    async def main() -> None:
        run, told = Run(target=1), dict[str, list[str]](a=[], b=[])
        strategy: Strategy = Decoupled(every=40, fragments=2, quorum=1)
        for name, duration_s in (("a", 0.1), ("b", 0.12)):
            await run.add(name, strategy=strategy, **warnings_of(told[name]))
            await train(run, name, 120.0, duration_s)
        fragments = run.swarm.peer("b").fragments
        while not fragments[0].epoch == fragments[1].epoch == 3:
            await sim.sleep(0.05)
        before = [each.epoch for each in fragments]
        run.swarm.partition([["a"], ["b"]])
        await sim.sleep(parts_s)
        parted = [each.epoch - old for each, old in zip(fragments, before, strict=True)]
        assert sorted(parted) == [0, 1] if parts_s == 3.0 else min(parted) > 2
        run.swarm.heal()
        await sim.sleep(20.0)
        (loser,) = (each for each in told.values() if gave_up(each))  # by this seed one peer loses in both
        assert len(gave_up(loser)) == 1, told
        assert sum(lost_here(loser)) >= 10 * 4
        await run.close()

    sim.run(main, seed=52)


def test_a_peer_that_stood_still_gives_nothing_up() -> None:
    """Its state is one from which the others have gone on: all that it has trained is in theirs."""

    async def main() -> None:
        run, told = Run(target=8), list[str]()
        await run.add("a", **warnings_of(told))
        for name in "bc":
            await run.add(name)
            await train(run, name, 60.0)
        a = run.swarm.peer("a")
        run.swarm.spawn("a", a.train(4, duration_s=0.5, until=until(4.0)))
        await sim.sleep(16.0)
        before = a.participant.epoch
        run.swarm.spawn("a", a.train(4, duration_s=0.5, until=until(60.0)))
        await sim.sleep(10.0)
        assert a.participant.epoch > before + 10
        assert not gave_up(told)
        await run.close()

    sim.run(main, seed=47)


def test_a_client_whose_state_is_not_taken_goes_back_to_others_that_stand_still() -> None:
    """After a minute, with a warning, and once. It kept its own state all the same, and warned at each look."""

    async def main() -> None:
        run, told = Run(target=8), list[str]()
        await entered(run)
        await run.add("trainer")
        await run.add("client", client_mode=True, **warnings_of(told))
        for name in ("trainer", "client"):
            await train(run, name, 400.0)
        await sim.sleep(8.0)
        run.swarm.crash("trainer")
        await sim.sleep(20.0)
        client = run.swarm.peer("client").participant
        client._states.sharing.disable()  # as one of an older version
        run.swarm.partition([["client"], ["trainer", "entry"]])
        again = await run.swarm.restart("trainer")
        run.swarm.spawn("trainer", again.train(4, duration_s=0.5, until=lambda: again.participant.epoch == 3))
        await sim.sleep(12.0)
        there, before = again.participant.state, client.state
        assert before.epoch > there.epoch == 3
        run.swarm.heal()
        await sim.sleep(120.0)
        assert sum("this client goes back from epoch" in each for each in told) == 1
        assert client.state == there or client.state.epoch > there.epoch
        ((taken, _, own, *_),) = gave_up(told)
        assert taken == there.epoch < before.epoch <= own

    with reaches("a client goes back to a state that others can have"):
        sim.run(main, seed=45)


def test_who_has_trained_more_says_so_if_its_state_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a client's state cannot be had, both keep on asking, and it is told with both numbers and what to do."""

    async def main() -> None:
        run, told = Run(target=8), dict[str, list[str]](client=[], trainer=[])
        await entered(run)
        await run.add("trainer", **warnings_of(told["trainer"]))
        await run.add("client", client_mode=True, **warnings_of(told["client"]))
        for name in ("trainer", "client"):
            await train(run, name, 300.0)
        await sim.sleep(8.0)
        run.swarm.crash("trainer")
        await sim.sleep(25.0)
        client = run.swarm.peer("client").participant
        client._states.sharing.disable()  # as one of an older version
        assert any("training alone" in each for each in told["client"])
        again = await run.swarm.restart("trainer")
        run.swarm.spawn("trainer", again.train(4, duration_s=0.5, until=until(300.0)))
        before = client.epoch
        await sim.sleep(90.0)
        assert client.epoch >= before
        texts = [each for each in told["client"] if "have not taken the state of this client" in each]
        assert len(texts) == 1
        found = re.search(r"are at epoch (\d+) only, .* which is at epoch (\d+): look whether", texts[0])
        assert found is not None
        assert int(found[1]) < before <= int(found[2])
        assert any("no peer gives it now" in each and "waits for it, up to 600 s" in each for each in told["trainer"])

    sim.run(main, seed=44)
