"""What a peer of a run holds in memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest
import torch

from shoal import sim
from tests.sim.optimizer_kit import FEATURES, Run, Trainer

WIDTH = 20_000
PARAMETERS = (FEATURES + 1) * WIDTH


def live_bytes() -> int:
    """Of all tensors that there are; memory that several share counts once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):  # to ask the object itself wakes deprecated ones
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("average_state_every", [0, 2])
def test_36_bytes_of_live_tensors_per_parameter(average_state_every: int) -> None:
    """With AdamW, in float32: 16 as plain torch, 4 for sums of gradients, and 8 for the rounds, of both kinds."""

    async def main() -> None:
        before = live_bytes()
        run = Run(target=16, dtype=torch.float32, width=WIDTH, average_state_every=average_state_every)
        trainers = [await run.add(name) for name in ("p0", "p1")]

        def done(trainer: Trainer) -> Callable[[], bool]:
            return lambda: trainer.collaboration.epoch >= 5

        await asyncio.gather(
            *(
                run.swarm.run_on(f"p{index}", trainer.train, 4, duration_s=0.5, until=done(trainer))
                for index, trainer in enumerate(trainers)
            )
        )
        assert all(each.collaboration.training.steps_before() == 5 for each in trainers)
        per_parameter = (live_bytes() - before) / (2 * PARAMETERS)
        assert 27.9 < per_parameter < 28.1
        await run.close()

    sim.run(main, seed=41)
