"""What a peer of a run holds in memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensor

from shoal import sim
from tests.sim.optimizer_kit import FEATURES, Run, Trainer

WIDTH = 20_000
PARAMETERS = (FEATURES + 1) * WIDTH


def live_bytes() -> int:
    """Of all tensors that there are; memory that several share counts once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        # To ask an object of another kind for its class wakes deprecated ones.
        kind = type(each)
        if not issubclass(kind, torch.Tensor) or issubclass(kind, FakeTensor) or torch.nn.parameter.is_lazy(each):
            continue  # fake ones, of a compiled step, have no memory
        if each.layout is torch.strided:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def at_epoch(trainer: Trainer, epoch: int) -> Callable[[], bool]:
    """Whether it has come so far."""
    return lambda: trainer.participant.epoch >= epoch


@pytest.mark.parametrize("average_state_every", [0, 2])
def test_36_bytes_of_live_tensors_per_parameter(average_state_every: int) -> None:
    """With AdamW, in float32: 16 as plain torch, 4 for sums of gradients, and 8 for the rounds, of both kinds."""

    async def main() -> None:
        before = live_bytes()
        run = Run(target=16, dtype=torch.float32, width=WIDTH, average_state_every=average_state_every)
        trainers = [await run.add(name) for name in ("p0", "p1")]

        await asyncio.gather(
            *(
                run.swarm.run_on(f"p{index}", trainer.train, 4, duration_s=0.5, until=at_epoch(trainer, 5))
                for index, trainer in enumerate(trainers)
            )
        )
        assert all(each.participant.training.local.kept.steps_taken == 5 for each in trainers)
        per_parameter = (live_bytes() - before) / (2 * PARAMETERS)
        assert 27.9 < per_parameter < 28.1
        await run.close()

    sim.run(main, seed=41)


def test_a_newcomer_holds_no_more_once_it_takes_part() -> None:
    """What it received, kept and followed is gone, and so is the donors' copy."""

    async def main() -> None:
        before = live_bytes()
        run = Run(target=16, dtype=torch.float32, average_state_every=2, width=WIDTH)
        for name in ("p0", "p1"):
            await run.add(name)
        tasks = [
            asyncio.create_task(run.swarm.run_on(name, each.train, 4, duration_s=0.5, until=at_epoch(each, 14)))
            for name, each in run.trainers.items()
        ]
        await sim.sleep(8.0)
        late = await run.add("late")
        await asyncio.gather(*tasks, run.swarm.run_on("late", late.train, 4, duration_s=0.5, until=at_epoch(late, 14)))
        assert late.participant.takeover.downloads
        await sim.sleep(60.0)
        assert 27.9 < (live_bytes() - before) / (3 * PARAMETERS) < 28.1
        await run.close()

    sim.run(main, seed=42)
