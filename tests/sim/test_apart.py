"""Peers that trained apart: the state with more samples counts, whoever can be dialed, and nobody loses in silence."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shoal import sim
from shoal.events import Warned
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
            await train(run, name, 120.0, duration_s)
        await sim.sleep(60.0)
        a, b = (run.swarm.peer(name).participant for name in "ab")
        best, worse = a.state, b.state
        assert best.epoch > worse.epoch + 10 > 20
        fresh: Trainer = await run.add("fresh", auxiliary=auxiliary)
        await train(run, "fresh", 120.0, 0.7)
        await sim.sleep(40.0)
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
        await sim.sleep(20.0)
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
        await sim.sleep(20.0)
        shared = run.swarm.peer("client").participant.state
        run.swarm.partition([["client"], ["trainer"]])
        await sim.sleep(40.0)
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


def test_a_client_whose_state_is_not_taken_goes_back_to_others_that_stand_still() -> None:
    """After a minute, with a warning, and once. It kept its own state all the same, and warned at each look."""

    async def main() -> None:
        run, told = Run(target=8), list[str]()
        await entered(run)
        await run.add("trainer")
        await run.add("client", client_mode=True, **warnings_of(told))
        for name in ("trainer", "client"):
            await train(run, name, 400.0)
        await sim.sleep(20.0)
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
        await sim.sleep(20.0)
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
