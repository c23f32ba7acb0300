"""Averagers that only assist: `auxiliary=True`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.errors import RoundFailed
from tests.sim.averaging_kit import Trial, same_bits


async def _trial(contributors: int, assistants: int, **options: Any) -> tuple[Trial, list[list[torch.Tensor]]]:
    trial = Trial()
    values = [[torch.full((3000,), float(peer)), torch.arange(7.0) * peer] for peer in range(contributors + assistants)]
    size = contributors + assistants
    await trial.add("first", [torch.zeros(3000), torch.zeros(7)])  # only a place to join at
    for peer in range(size):
        changes = {"auxiliary": True} if peer >= contributors else options
        await trial.add(f"p{peer}", values[peer], target_group_size=size, **changes)
    return trial, values


@pytest.mark.parametrize(("contributors", "assistants"), [(2, 1), (3, 2), (1, 1)])
def test_an_assistant_reduces_and_is_left_alone(contributors: int, assistants: int) -> None:
    """The mean is that of the contributors; the assistant's tensors are neither read nor changed."""

    async def main() -> None:
        trial, values = await _trial(contributors, assistants)
        for tensors in values[contributors:]:
            tensors[0].fill_(float("nan"))  # would spoil the average if it was read
        names = [f"p{peer}" for peer in range(contributors + assistants)]
        results = await asyncio.gather(*(trial.step(name, gather=name) for name in names))
        mean = sum(range(contributors)) / contributors
        assert same_bits(values[:contributors])
        torch.testing.assert_close(values[0][0], torch.full((3000,), mean))
        torch.testing.assert_close(values[0][1], torch.arange(7.0) * mean)
        for peer in range(contributors, contributors + assistants):
            assert values[peer][0].isnan().all()
            assert torch.equal(values[peer][1], torch.arange(7.0) * peer)
        for result in results:
            assert sorted(result.gathered.values()) == names
            assert result.outcome.weight == contributors
            assert not result.outcome.left_out
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=contributors)


def test_clients_average_through_an_assistant() -> None:
    """None of them could reduce; the assistant reduces everything."""

    async def main() -> None:
        trial, values = await _trial(3, 1, client_mode=True)
        await asyncio.gather(*(trial.step(f"p{peer}") for peer in range(4)))
        assert same_bits(values[:3])
        torch.testing.assert_close(values[0][0], torch.full((3000,), 1.0))
        assert values[3][0].tolist() == [3.0] * 3000
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=8)


def test_a_dead_assistant_costs_nobody_the_round() -> None:
    """Killed while it reduces: the contributors take its part over, and have the exact mean."""

    async def main() -> None:
        for after_s in (0.01, 0.05, 0.1, 0.2):
            trial, values = await _trial(3, 1)
            steps = [asyncio.ensure_future(trial.step(f"p{peer}", timeout_s=60.0)) for peer in range(3)]
            trial.swarm.spawn("p3", trial.swarm.peer("p3").step(timeout_s=60.0))
            await sim.sleep(after_s)
            trial.swarm.crash("p3")
            await asyncio.gather(*steps)
            assert same_bits(values[:3])
            torch.testing.assert_close(values[0][0], torch.full((3000,), 1.0))
            await trial.close()
            assert not trial.warnings

    sim.run(main, seed=9)


def test_assistants_alone_average_nothing() -> None:
    """There is nobody to assist: the round fails with that reason."""

    async def main() -> None:
        trial, _ = await _trial(0, 2)
        results = await asyncio.gather(
            *(trial.step(f"p{peer}", timeout_s=8.0, allow_retries=False) for peer in range(2)), return_exceptions=True
        )
        assert all(isinstance(result, RoundFailed) for result in results), results
        assert all("auxiliary" in str(result) for result in results), results
        await trial.close()

    sim.run(main, seed=10)
