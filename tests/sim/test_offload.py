"""Peers whose optimizers step on the CPU, beside others; `test_late.py` has them in all weathers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from shoal import sim
from tests.sim.optimizer_kit import Run, reference

PEERS, EPOCHS, BATCH = 2, 6, 4


@pytest.mark.parametrize("mode", [{}, {"late": True}, {"average_state_every": 2}], ids=str)
def test_an_offloaded_run_equals_one_process(mode: dict[str, Any]) -> None:
    """Bit for bit with two peers, of which one is offloaded; and so is a newcomer, which downloads."""

    async def main() -> list[torch.Tensor]:
        run = Run(target=PEERS * BATCH)
        for peer in range(PEERS):
            await run.add(f"p{peer}", offload=peer == 1, **mode)
        await sim.sleep(3.0)

        async def train(name: str) -> None:
            trainer = run.swarm.peer(name)
            for epoch in range(EPOCHS):
                await trainer.take_batch(BATCH, number=epoch, duration_s=0.1)
                await trainer.finish_epoch(epoch + 1)

        names = [f"p{peer}" for peer in range(PEERS)]
        await asyncio.gather(*(run.swarm.run_on(name, train, name) for name in names))
        late = await run.add("late", seed=7, offload=True, **mode)
        await sim.sleep(3.0)
        await run.swarm.run_on("late", late.take_turn)
        assert late.downloads == 1
        assert run.agree([*names, "late"])
        assert not run.warnings, run.warnings
        await run.close()
        return [parameter.detach() for parameter in late.parameters]

    for got, want in zip(sim.run(main, seed=1), reference(PEERS, EPOCHS, 1, BATCH, torch.float64), strict=True):
        assert torch.equal(got, want)
