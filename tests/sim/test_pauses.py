"""Stopped is not dead: processes that stand still for seconds or for half an hour, one or all of them, and go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal import sim
from shoal.base.clock import LONGEST_TURN_S
from shoal.events import Event, Warned
from shoal.sim.loop import VirtualLoop, world_time
from tests.sim.optimizer_kit import Run, Trainer

NAMES = ["p0", "p1", "p2"]
LAST = 12


async def train(trainer: Trainer, batch_s: float) -> None:
    """To the last epoch; a program at its defaults, that lets through whatever `step` raises."""
    await trainer.train(4, duration_s=batch_s, until=lambda: trainer.participant.epoch >= LAST)


async def stop_and_go(stopped: list[str], after_s: float, duration_s: float) -> list[str]:
    """Three train; some stand still for so long. Returns what was warned of clocks, and of errors."""
    run = Run(target=24)
    warned: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Warned) and event.where == "clock":
            warned.append(event.message)

    for name in NAMES:
        await run.add(name, events=note)
    # Slowly, so that the others have not reached the end when somebody wakes after half an hour.
    batch_s = max(0.25, duration_s / 20)
    tasks = [run.swarm.spawn(name, train(run.swarm.peer(name), batch_s)) for name in NAMES]
    await sim.sleep(4 * batch_s + after_s)
    for name in stopped:
        run.swarm.stall(name, duration_s)
    await asyncio.gather(*tasks)
    for name in NAMES:
        await run.swarm.run_on(name, run.swarm.peer(name).finish_epoch, LAST)
    await sim.sleep(2.0)
    for _ in range(3):
        for name in NAMES:
            await run.swarm.run_on(name, run.swarm.peer(name).take_turn)
        await sim.sleep(1.0)
    assert run.agree(NAMES)
    await run.close()
    return [*warned, *run.warnings]


STOPS = {("one", 1.0), ("one", 200.0), ("two", 12.0), ("two", 70.0), ("all", 12.0), ("all", 200.0)}
"""In the sample of long tests: each of them, and each duration."""

WHO = {"one": ["p1"], "two": ["p0", "p2"], "all": NAMES}


@pytest.mark.parametrize(
    ("who", "duration_s"), [("one", 70.0), pytest.param("all", 70.0, marks=pytest.mark.long(full=True))]
)
def test_a_peer_that_was_stopped_goes_on_when_it_wakes(who: str, duration_s: float) -> None:
    """Its next calls go on, and all agree at the end."""
    assert sim.run(stop_and_go(WHO[who], 0.05, duration_s), seed=51) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("who", "duration_s"),
    [
        pytest.param(who, duration_s, marks=pytest.mark.long(full=(who, duration_s) not in STOPS))
        for who in WHO
        for duration_s in (1.0, 12.0, 70.0, 200.0, 1800.0)
    ],
)
def test_stopped_at_any_moment_is_not_dead(who: str, duration_s: float, soak: Callable[[int, int], int]) -> None:
    """While they compute, look for a group, average or step."""
    for moment in range(soak(1, 12)):
        assert sim.run(stop_and_go(WHO[who], 0.013 * moment, duration_s), seed=moment) == [], moment


@pytest.mark.parametrize("duration_s", [12.0, pytest.param(1800.0, marks=pytest.mark.long(full=True))])
def test_a_newcomer_that_was_stopped_during_its_download_goes_on(duration_s: float) -> None:
    """It has its state afterwards, from the same donor or another one."""

    async def main() -> None:
        run = Run(target=8, width=4096)
        for name in ("p0", "p1"):
            await run.add(name)
        both = [run.swarm.spawn(n, run.swarm.peer(n).train(4, duration_s=2.0, until=lambda: False)) for n in NAMES[:2]]
        await sim.sleep(20.0)
        late = await run.add("p2")
        for each in ("p0", "p1"):
            run.swarm.network.set_link(each, "p2", bandwidth_bytes_s=200_000.0)
        loading = run.swarm.spawn("p2", late.take_turn())
        await sim.sleep(1.0)
        assert not loading.done()
        run.swarm.stall("p2", duration_s)
        await asyncio.wait([loading])
        await run.swarm.run_on("p2", late.train, 4, duration_s=2.0, until=lambda: late.epochs[-1:] != [])
        assert late.downloads >= 1
        for task in both:
            task.cancel()
        await run.close()

    sim.run(main, seed=52)


@pytest.mark.parametrize("duration_s", [12.0, pytest.param(1800.0, marks=pytest.mark.long(full=True))])
def test_a_peer_that_was_stopped_while_it_leaves_has_left_when_it_wakes(duration_s: float) -> None:
    """Nothing of it waits for ever."""

    async def main() -> None:
        run = Run(target=24)
        for name in NAMES:
            await run.add(name)
        tasks = [run.swarm.spawn(n, run.swarm.peer(n).train(4, duration_s=0.5, until=lambda: False)) for n in NAMES]
        await sim.sleep(5.0)
        leaving = run.swarm.spawn("p1", run.swarm.peer("p1").participant.close())
        await sim.sleep(0.005)
        run.swarm.stall("p1", duration_s)
        await sim.sleep(duration_s + 10.0)
        assert leaving.done()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await run.close()

    sim.run(main, seed=53)


def test_the_clock_of_a_host_stands_still_with_it() -> None:
    """Its limits count one long turn of its loop at most; the network and the others' time go on."""

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        owner, seen = sim.Owner("host"), list[tuple[float, float]]()

        async def work() -> None:
            began = loop.time()
            try:
                async with asyncio.timeout(10.0):
                    await asyncio.Event().wait()
            except TimeoutError:
                seen.append((loop.time() - began, world_time(loop)))

        task = loop.spawn(owner, work())
        await sim.sleep(4.0)
        loop.freeze(owner)
        await sim.sleep(100.0)
        loop.thaw(owner)
        await task
        ((felt_s, at_s),) = seen
        assert felt_s == pytest.approx(10.0)
        assert at_s == pytest.approx(110.0 - LONGEST_TURN_S)

    sim.run(main)
