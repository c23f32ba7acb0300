"""Rounds whose tensors somebody else holds: they wait in line, until the step's timeout, and say who it was."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal import sim
from shoal.averaging import StepRequest, TensorLock
from shoal.errors import RoundFailed
from shoal.events import Event, GroupFormed, RoundAborted
from tests.sim.averaging_kit import SETTINGS, Trial, same_bits, seize

HOLDER = "a get_tensors() block in thread 'worker'"


async def _three(trial: Trial, numel: int = 3) -> list[list[torch.Tensor]]:
    values = [[torch.full((numel,), 3.0 * peer)] for peer in range(3)]
    for peer in range(3):
        await trial.add(f"p{peer}", values[peer], target_group_size=3)
    return values


def _now() -> float:
    return asyncio.get_running_loop().time()


def test_coroutines_have_the_lock_in_the_order_of_asking() -> None:
    """One that gives up in the moment in which it gets it, or before, keeps nothing."""

    async def main() -> None:
        lock, had = TensorLock(), list[str]()

        async def work(name: str) -> None:
            async with lock.acquire():
                had.append(name)
                await sim.sleep(1.0)

        async def impatient(timeout_s: float) -> None:
            async with lock.acquire(timeout_s) as has_come:
                assert not has_come

        release = seize(lock, "the test")
        tasks = [asyncio.ensure_future(work("a")), asyncio.ensure_future(impatient(0.5))]
        tasks += [asyncio.ensure_future(work(name)) for name in "bcd"]
        await sim.sleep(1.0)
        assert lock.holder == "the test"
        assert had == []
        release()
        again = asyncio.ensure_future(work("e"))
        await sim.sleep(1.5)  # b has it
        tasks[3].cancel()  # c
        await sim.sleep(0.5)
        tasks[4].cancel()  # d, which was given it in this moment
        await asyncio.gather(again, *tasks, return_exceptions=True)
        assert had == ["a", "b", "e"]
        assert lock.holder == ""

    sim.run(main)


def test_a_step_whose_tensors_are_held_fails_at_its_timeout_and_names_the_holder() -> None:
    """Nothing is touched; the others go on without, and when the tensors are free again the step works."""

    async def main() -> None:
        trial = Trial()
        values = await _three(trial)
        averager, aborted = trial.swarm.peer("p0"), list[RoundAborted]()
        averager.core.env.events.subscribe(
            lambda event: aborted.append(event) if isinstance(event, RoundAborted) else None
        )
        release = seize(averager.lock, HOLDER)
        began = _now()
        others = asyncio.gather(*(trial.step(f"p{peer}", timeout_s=60.0) for peer in (1, 2)))
        with pytest.raises(RoundFailed, match=r"no access to the tensors .*get_tensors\(\) block in thread 'worker'"):
            await trial.step("p0", timeout_s=4.0)
        assert 3.9 <= _now() - began <= 4.1
        assert [HOLDER in event.reason for event in aborted] == [True]
        await others
        assert values[0][0].tolist() == [0.0] * 3
        assert values[1][0].tolist() == values[2][0].tolist() == [4.5] * 3
        release()
        await asyncio.gather(*(trial.step(f"p{peer}") for peer in range(3)))
        assert same_bits(values)
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=1)


@pytest.mark.parametrize("decides", [False, True])
def test_who_has_a_group_and_no_values_keeps_it_waiting_no_longer_than_a_silent_member(decides: bool) -> None:
    """The tensors are taken just after the group was formed: the step leaves that round, and makes another one later.

    Also where it was to decide: then nobody can go on without it.
    """

    async def main() -> None:
        trial = Trial()
        values = await _three(trial)
        averager, formed = trial.swarm.peer("p0"), list[float]()

        def hear(event: Event) -> None:
            if isinstance(event, GroupFormed):
                formed.append(_now())
                if len(formed) == 1:
                    assert decides == (event.coordinator == averager.core.peer_id)
                    asyncio.get_running_loop().call_later(10.0, seize(averager.lock, HOLDER))

        averager.core.env.events.subscribe(hear)
        steps = {}
        for peer in (0, 1, 2) if decides else (1, 2, 0):  # who comes first decides
            steps[peer] = asyncio.ensure_future(trial.step(f"p{peer}", timeout_s=60.0))
            await sim.sleep(0.001)
        await asyncio.gather(steps[1], steps[2])
        assert _now() < formed[0] + SETTINGS.silence_s + 1.0
        assert values[1][0].tolist() == values[2][0].tolist() == [4.5] * 3
        await sim.sleep(formed[0] + 10.0 - _now())
        await asyncio.gather(steps[0], *(trial.step(f"p{peer}") for peer in (1, 2)))
        assert formed[0] + 10.0 <= formed[1] < formed[0] + 11.0
        assert same_bits(values)
        await trial.close()

    sim.run(main, seed=6)


def test_a_holder_that_comes_again_and_again_starves_no_round() -> None:
    """It gives the tensors back, and asks for them at once: the round, which has asked before, has them first."""

    async def main() -> None:
        trial = Trial()
        values = await _three(trial)
        lock = trial.swarm.peer("p0").lock

        async def busy() -> None:
            while True:
                async with lock.acquire():
                    await sim.sleep(0.02)

        holding = asyncio.ensure_future(busy())
        began = _now()
        await asyncio.gather(*(trial.step(f"p{peer}", timeout_s=8.0) for peer in range(3)))
        assert _now() - began < 1.0
        assert same_bits(values)
        holding.cancel()
        await trial.close()

    sim.run(main, seed=3)


@pytest.mark.parametrize("held_s", [2.0, 30.0])
def test_an_average_is_applied_before_the_timeout_or_not_at_all(held_s: float) -> None:
    """The verdict comes while the user holds the tensors: they are waited for until the step's timeout.

    A member that could not apply the average is as one that never learned of it: untouched, with the reason.
    """

    async def main() -> None:
        trial = Trial(bandwidth_bytes_s=200_000)
        values = await _three(trial, numel=30_000)
        lock, request, began = trial.swarm.peer("p0").lock, StepRequest(), _now()
        steps = [asyncio.ensure_future(trial.step("p0", request=request, timeout_s=10.0))]
        steps += [asyncio.ensure_future(trial.step(f"p{peer}", timeout_s=10.0)) for peer in (1, 2)]
        while not request.began:
            await sim.sleep(0.01)
        asyncio.get_running_loop().call_later(held_s, seize(lock, HOLDER))
        await asyncio.gather(*steps[1:])
        assert _now() < 2.0
        [ended] = await asyncio.gather(steps[0], return_exceptions=True)
        if held_s > 10.0:
            assert isinstance(ended, RoundFailed)
            assert "the average was agreed on, but not applied" in ended.reason
            assert HOLDER in ended.reason
            assert 10.0 <= _now() - began < 10.1
            assert values[0][0].tolist() == [0.0] * 30_000
            assert values[1][0].tolist() == [3.0] * 30_000
            await sim.sleep(held_s)
            await asyncio.gather(*(trial.step(f"p{peer}") for peer in range(3)))
        assert same_bits(values)
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=4)


@pytest.mark.parametrize("stage", ["values", "average"])
def test_a_step_that_waits_for_its_tensors_can_be_given_up(stage: str) -> None:
    """It ends at once, untouched, whoever still holds them; afterwards the next step works."""

    async def main() -> None:
        trial = Trial(bandwidth_bytes_s=200_000)
        values = await _three(trial, numel=30_000)
        averager, request = trial.swarm.peer("p0"), StepRequest()
        if stage == "values":
            release = seize(averager.lock, HOLDER)
        step = trial.swarm.spawn("p0", averager.step(request, timeout_s=60.0))
        others = asyncio.gather(*(trial.step(f"p{peer}") for peer in (1, 2)))
        if stage == "average":
            while not request.began:
                await sim.sleep(0.01)
            release = seize(averager.lock, HOLDER)
        await others
        await sim.sleep(1.0)
        step.cancel()
        await asyncio.wait([step], timeout=0.01)
        assert step.cancelled()
        assert values[0][0].tolist() == [0.0] * 30_000
        release()
        await asyncio.gather(*(trial.step(f"p{peer}") for peer in range(3)))
        assert same_bits(values)
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=5)
