"""A loss curve for each mode, as it was when the mode was made: a change of one says that training has changed.

`python -m tests.sim.test_golden_curves` writes the curves anew. Do that only where training is meant to change.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.compression import CompressionBase, Float16Compression
from tests.sim.optimizer_kit import Run, Trainer, batch

CURVES = Path(__file__).parents[1] / "data" / "golden_curves.json"
PEERS, EPOCHS, BATCH = 2, 8, 4  # two peers: the order in which more are summed is not fixed

LOCAL = {"use_local_updates": True, "check_every": 0}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "late": {"late": True},
    "delayed": {"late": True, "delay_grad_averaging": True},
    "states averaged": {"average_state_every": 2},
    "offloaded": {"offload": True},
    "clipped": {"max_grad_norm": 0.05},
    "low rank": {"rank": 1},
    "16 bits": {"compression": Float16Compression()},
    "local updates": {**LOCAL, "delay_grad_averaging": False},
    "local updates, statistics": {**LOCAL, "delay_grad_averaging": False, "statistics": ["exp_avg_sq"]},
}


def curve(compression: CompressionBase | None = None, max_grad_norm: float | None = None, **mode: Any) -> list[float]:
    """The loss of a batch that nobody trains, after each epoch. A batch takes a second, a round far less."""

    async def main() -> list[float]:
        run = Run(target=PEERS * BATCH, compression=compression)
        for peer in range(PEERS):
            trainer = await run.add(f"p{peer}", **mode)
            trainer.participant.training.max_grad_norm = max_grad_norm
        await sim.sleep(3.0)
        inputs, targets = batch(9, 0, 64, torch.float64)
        losses: list[float] = []

        def loss(trainer: Trainer) -> float:
            with torch.no_grad():
                weights = trainer.parameters
                return float(((inputs @ weights[0]).tanh() @ weights[1] - targets).square().mean())

        async def train(trainer: Trainer) -> None:
            for epoch in range(EPOCHS):
                await trainer.take_batch(BATCH, number=epoch, duration_s=1.0)
                if not mode.get("delay_grad_averaging"):
                    await trainer.finish_epoch(epoch + 1)
                    await sim.sleep(1.0)  # an average of states is taken at the next step
                if trainer.index == 0:
                    losses.append(loss(trainer))

        await asyncio.gather(*(run.swarm.run_on(f"p{peer}", train, run.trainers[f"p{peer}"]) for peer in range(PEERS)))
        assert not run.warnings, run.warnings
        await run.close()
        return losses

    return sim.run(main, seed=1)


@pytest.mark.parametrize("name", MODES)
def test_a_mode_trains_as_it_did(name: str) -> None:
    """To rounding: other processors sum in other orders."""
    golden = json.loads(CURVES.read_text())[name]
    assert len(golden) == EPOCHS
    assert golden[-1] < 0.9 * golden[0]
    assert curve(**MODES[name]) == pytest.approx(golden, rel=1e-6)


def test_modes_that_are_to_equal_another_do_so() -> None:
    """Of the curves themselves: what is not late, clipped, or local changes nothing."""
    golden = json.loads(CURVES.read_text())
    for name in ("late", "states averaged", "offloaded"):
        assert golden[name] == pytest.approx(golden["synchronous"], rel=1e-9)
    assert golden["16 bits"] == pytest.approx(golden["synchronous"], rel=1e-2)
    for name in ("delayed", "clipped", "low rank", "local updates"):
        assert golden[name] != pytest.approx(golden["synchronous"], rel=1e-3)


if __name__ == "__main__":
    CURVES.write_text(json.dumps({name: curve(**mode) for name, mode in MODES.items()}, indent=1) + "\n")
