"""Averagers that only assist: `auxiliary=True`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.errors import NobodyContributes
from tests.sim.averaging_kit import Trial, same_bits
from tests.situations import reaches

ALL = -1


async def _trial(
    contributors: int, assistants: int, *, target: int | None = ALL, **options: Any
) -> tuple[Trial, list[list[torch.Tensor]]]:
    trial = Trial()
    values = [[torch.full((3000,), float(peer)), torch.arange(7.0) * peer] for peer in range(contributors + assistants)]
    size = contributors + assistants
    target = size if target == ALL else target
    await trial.add("first", [torch.zeros(3000), torch.zeros(7)])  # only a place to join at
    for peer in range(size):
        changes = {"auxiliary": True} if peer >= contributors else options
        await trial.add(f"p{peer}", values[peer], target_group_size=target, **changes)
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


@pytest.mark.parametrize(("assistants", "target"), [(2, 2), (3, None), (4, 4), (2, 8), (6, 3)])
def test_a_group_of_auxiliaries_only_never_forms_and_hangs(assistants: int, target: int | None) -> None:
    """Not any more: with nobody to assist each fails within seconds, says why, and does not try again."""

    async def main() -> None:
        trial, _ = await _trial(0, assistants, target=target)
        began = asyncio.get_running_loop().time()
        steps = (trial.step(f"p{peer}", timeout_s=300.0) for peer in range(assistants))
        results = await asyncio.gather(*steps, return_exceptions=True)
        assert all(isinstance(result, NobodyContributes) for result in results), results
        assert all("are auxiliary: nobody has values" in str(result) for result in results), results
        assert asyncio.get_running_loop().time() - began < 10.0
        await trial.close()

    sim.run(main, seed=10)


@pytest.mark.parametrize("order", ["01234", "12340", "40123"])
def test_one_with_values_that_comes_with_many_assistants_is_in_the_group(order: str) -> None:
    """No matter who is first: no place is kept for it (p0), and it has one."""

    async def main() -> None:
        trial, values = await _trial(1, 4, target=3)
        steps = [asyncio.ensure_future(trial.step(f"p{peer}", timeout_s=8.0)) for peer in order]
        results = await asyncio.gather(*steps, return_exceptions=True)
        done = [result for result in results if not isinstance(result, BaseException)]
        assert len(done) == 3
        assert all(trial.swarm.peer("p0").core.peer_id in result.gathered for result in done)
        assert values[0][0].tolist() == [0.0] * 3000
        await trial.close()

    full = ["a peer with values takes the place of an auxiliary one"] if order[-1] == "0" else []
    with reaches(*full):
        sim.run(main, seed=2)


def test_assistants_that_call_again_at_once_are_in_the_next_group() -> None:
    """Their failures keep nobody from finding them: all assist as soon as there is somebody with values."""

    async def main() -> None:
        trial, values = await _trial(2, 3, target=None)
        met: list[int] = []

        async def assist(name: str) -> None:
            while True:
                try:
                    met.append(len((await trial.step(name)).gathered))
                except NobodyContributes:
                    continue

        helpers = [asyncio.ensure_future(assist(f"p{peer}")) for peer in range(2, 5)]
        for turn in range(1, 3):
            await sim.sleep(5.0)
            await asyncio.gather(*(trial.step(f"p{peer}") for peer in range(2)))
            await sim.sleep(1.0)
            assert met == [5] * 3 * turn
        assert same_bits(values[:2])
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        await trial.close()

    sim.run(main, seed=3)
