"""Peers of a run without data: they reduce for the others, take their steps, and keep the state."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.events import Event, Warned
from shoal.strategies import Decoupled
from tests.sim.optimizer_kit import Run, Trainer, reference

BATCH = 4


async def helper(run: Run, name: str = "aux", **changes: Any) -> Trainer:
    """An auxiliary peer, and the loop in which it waits for steps; its first parameters are others."""
    trainer = await run.add(name, seed=7, auxiliary=True, **changes)
    run.swarm.spawn(name, trainer.help())
    return trainer


def test_it_takes_the_steps_of_the_others_and_changes_none() -> None:
    """The run equals one process; the helper has its parameters, and its shares of the rounds."""
    epochs = 6

    async def main() -> list[torch.Tensor]:
        run = Run(target=2 * BATCH)
        names = ["p0", "p1"]
        for name in names:
            await run.add(name)
        aux = await helper(run)
        await sim.sleep(3.0)
        run.announce_end(epochs)

        async def train(name: str) -> None:
            trainer = run.swarm.peer(name)
            for epoch in range(epochs):
                await trainer.take_batch(BATCH)
                await trainer.finish_epoch(epoch + 1)

        await asyncio.gather(*(run.swarm.run_on(name, train, name) for name in names))
        while not aux.participant.finished:
            await sim.sleep(0.1)
        assert run.agree([*names, "aux"])
        assert aux.downloads <= 1  # its own beginning was another one
        last = aux.participant.swarm_step.last_round
        assert last is not None
        assert aux.participant.core.peer_id in {member.contact.peer for member in last.outcome.members}
        assert aux.participant.core.peer_id not in last.outcome.contributors
        assert aux.participant.contribution.contributed == 0
        assert not run.warnings, run.warnings
        await run.close()
        return [parameter.detach() for parameter in run.trainers["p0"].parameters]

    for got, want in zip(sim.run(main, seed=1), reference(2, epochs, 1, BATCH, torch.float64), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_helper_that_announces_no_end_was_warned_of_that_of_the_trainers() -> None:
    """It ends with them, without a word: that is what it is there for."""

    async def main() -> None:
        run, told = Run(target=2 * BATCH), list[Event]()
        trainer, aux = await run.add("p0"), await helper(run, events=told.append)
        await sim.sleep(3.0)
        trainer.participant.announce_end(3)
        await run.swarm.run_on("p0", partial(trainer.train, BATCH, duration_s=0.2, until=lambda: False))
        while not aux.participant.finished:
            await sim.sleep(0.1)
        assert aux.participant.epoch == 3
        assert not [each for each in told if isinstance(each, Warned)]
        await run.close()

    sim.run(main, seed=1)


@pytest.mark.long
def test_it_costs_the_others_no_time() -> None:
    """Epochs with two helpers are as long as without."""

    async def main(helpers: int) -> int:
        run = Run(target=20 * BATCH)
        for name in ("p0", "p1"):
            await run.add(name)
        for number in range(helpers):
            await helper(run, f"aux{number}")
        await sim.sleep(3.0)
        for name in ("p0", "p1"):
            run.swarm.spawn(name, run.trainers[name].train(BATCH, duration_s=0.1, until=lambda: False))
        await sim.sleep(60.0)
        epoch = run.trainers["p0"].participant.epoch
        assert {trainer.participant.epoch for trainer in run.trainers.values()} <= {epoch, epoch - 1}
        await run.close()
        return epoch

    without, with_two = (sim.run(partial(main, helpers), seed=2) for helpers in (0, 2))
    assert with_two >= 0.97 * without


def test_it_keeps_the_state_when_all_trainers_are_gone() -> None:
    """It takes no step alone; a trainer that comes later goes on from there."""

    async def main() -> None:
        run = Run(target=2 * BATCH)
        for name in ("p0", "p1"):
            await run.add(name)
        aux = await helper(run)
        await sim.sleep(3.0)
        for name in ("p0", "p1"):
            run.swarm.spawn(name, run.trainers[name].train(BATCH, duration_s=0.5, until=lambda: False))
        while aux.participant.epoch < 5:
            await sim.sleep(0.1)
        for name in ("p0", "p1"):
            run.swarm.crash(name)
        await sim.sleep(60.0)
        epoch = aux.participant.epoch
        assert epoch in (5, 6)
        late = await run.add("late", seed=9)
        run.swarm.spawn("late", late.train(BATCH, duration_s=0.5, until=lambda: False))
        while late.participant.epoch < epoch + 3:
            await sim.sleep(0.5)
        assert late.epochs[0][1] == epoch + 1
        assert not late.alone, "the helper was not in its first rounds"
        assert aux.participant.epoch >= epoch + 2
        await run.close()

    sim.run(main, seed=3, max_time_s=1000.0)


def test_it_follows_local_updates() -> None:
    """Its parameters are the averages."""

    async def main() -> None:
        run = Run(target=4 * BATCH)
        local: dict[str, Any] = {"use_local_updates": True, "check_every": 0}
        for name in ("p0", "p1"):
            await run.add(name, **local)
        aux = await run.add("aux", auxiliary=True, **local)
        run.swarm.spawn("aux", aux.help())
        await sim.sleep(3.0)
        run.announce_end(5)
        for name in ("p0", "p1"):
            run.swarm.spawn(name, run.trainers[name].train(BATCH, duration_s=0.2, until=lambda: False))
        while not all(trainer.participant.finished for trainer in run.trainers.values()):
            await sim.sleep(0.5)
        assert run.agree(["p0", "p1", "aux"])
        await run.close()

    sim.run(main, seed=4)


def test_it_turned_without_rest_while_it_fetched_a_better_state() -> None:
    """Where nobody waits for anybody, trainers train on meanwhile. It has no batches: it waits for the state."""
    strategy = Decoupled(4, fragments=2, quorum=2)

    async def main() -> None:
        run = Run(target=1)
        trainers = [await run.add(name, strategy=strategy) for name in ("p0", "p1")]
        aux = await helper(run, strategy=strategy)
        for trainer, name in zip(trainers, ("p0", "p1"), strict=True):
            run.swarm.spawn(name, trainer.train(BATCH, duration_s=0.2, until=lambda: False))
        while aux.participant.epoch < 3:
            await sim.sleep(0.1)
        run.swarm.partition([["aux"]])
        await sim.sleep(15.0)
        assert aux.participant.epoch < trainers[0].participant.epoch - 2
        run.swarm.heal()
        await sim.sleep(8.0)
        assert aux.participant.epoch >= trainers[0].participant.epoch - 1
        await run.close()

    sim.run(main, seed=1)
