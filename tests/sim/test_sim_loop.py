"""The virtual loop: time, limits, failures, and owners that are frozen or killed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from shoal import sim
from shoal.errors import ClosedError, ConfigError, SimulationError
from shoal.sim import Owner, VirtualLoop, current_owner


def virtual_loop() -> VirtualLoop:
    """The running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


async def forever() -> None:
    """Wait for what never comes."""
    await asyncio.get_running_loop().create_future()


# ----------------------------------------------------------------------------------------------------------------- time


def test_time_starts_at_zero_and_jumps_to_each_timer() -> None:
    """A month of hourly waits takes a few turns each, and lands on exact times."""

    async def main() -> tuple[list[float], int]:
        loop, times = virtual_loop(), []
        for _ in range(24 * 7 - 1):
            await sim.sleep(3600)
            times.append(loop.time())
        return times, loop.turns

    times, turns = sim.run(main)
    assert times == [3600.0 * hour for hour in range(1, 24 * 7)]
    assert turns < 10 * len(times)


def test_run_takes_a_coroutine_or_a_function_and_returns_its_result() -> None:
    """Both forms of `main`."""

    async def main() -> str:
        return "done"

    assert sim.run(main) == "done"
    assert sim.run(main()) == "done"


def test_a_cancelled_timer_does_not_move_time() -> None:
    """Neither as the next timer nor as the last one left."""

    async def main() -> float:
        loop = virtual_loop()
        for delay in range(1, 300):
            loop.call_later(delay, lambda: None).cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await forever()
        loop.call_later(5000, lambda: None).cancel()
        await asyncio.gather(*(sim.sleep(0) for _ in range(3)))
        return loop.time()

    assert sim.run(main) == 1000.0


def test_only_cancelled_timers_left_is_a_deadlock() -> None:
    """What will not run keeps nothing going."""

    async def main() -> None:
        virtual_loop().call_later(1, lambda: None).cancel()
        await forever()

    with pytest.raises(SimulationError, match="deadlock at 0 s"):
        sim.run(main)


def test_timers_of_one_instant_fire_in_the_order_they_were_set() -> None:
    """Also when some between them are cancelled, and with enough of them to sweep the heap."""

    async def main() -> list[int]:
        loop, fired = virtual_loop(), list[int]()
        timers = [loop.call_at(1.0, fired.append, number) for number in range(500)]
        for timer in timers[::2] + timers[1::4]:
            timer.cancel()
        await sim.sleep(2)
        return fired

    assert sim.run(main) == list(range(3, 500, 4))


def test_timeouts_conditions_and_task_groups_of_asyncio_work() -> None:
    """The stock tools, on virtual time."""

    async def main() -> tuple[float, list[str]]:
        seen: list[str] = []
        queue: asyncio.Queue[str] = asyncio.Queue()

        async def producer() -> None:
            for word in ("a", "b"):
                await sim.sleep(10)
                await queue.put(word)

        async with asyncio.TaskGroup() as group:
            group.create_task(producer())
            seen.append(await asyncio.wait_for(queue.get(), 15))
            seen.append(await asyncio.wait_for(queue.get(), 15))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 80)
        return virtual_loop().time(), seen

    assert sim.run(main) == (100.0, ["a", "b"])


def test_sets_of_tasks_have_the_same_order_in_every_run() -> None:
    """A task group cancels its tasks in the order of a set: that must not depend on addresses."""

    def order() -> list[int]:
        async def main() -> list[int]:
            ended: list[int] = []

            async def wait(number: int) -> None:
                try:
                    await forever()
                finally:
                    ended.append(number)

            async def fail() -> None:
                await sim.sleep(1)
                raise ValueError

            async def group() -> None:
                async with asyncio.TaskGroup() as tasks:
                    for number in range(50):
                        tasks.create_task(wait(number))
                    tasks.create_task(fail())

            with pytest.raises(ExceptionGroup):
                await group()
            return ended

        return sim.run(main)

    first, keep = order(), [object() for _ in range(1000)]
    assert all(order() == first for _ in range(5))
    assert sorted(first) == list(range(50))
    assert keep


# --------------------------------------------------------------------------------------------------------------- limits


def test_a_deadlock_says_who_waits_where() -> None:
    """The message names the task, its owner and its line."""

    async def main() -> None:
        virtual_loop().spawn(Owner("host-a"), forever(), name="reader")
        await sim.sleep(3)
        await forever()

    with pytest.raises(SimulationError, match=r"deadlock at 3 s") as caught:
        sim.run(main, seed=11)
    assert "host-a: reader at " in str(caught.value)
    assert "in forever" in str(caught.value)
    assert "simulation seed: 11" in caught.value.__notes__


def test_a_background_crash_is_the_cause_of_the_deadlock_it_leaves() -> None:
    """The report of a deadlock shows the crash that made it."""

    async def main() -> None:
        async def fail() -> None:
            raise ValueError("the real reason")

        task = asyncio.create_task(fail())
        await forever()
        await task

    with pytest.raises(SimulationError, match="deadlock") as caught:
        sim.run(main)
    assert isinstance(caught.value.__cause__, ValueError)


def test_virtual_time_is_limited() -> None:
    """A swarm whose heartbeats go on for ever while the test waits ends with an error."""

    async def main() -> None:
        while True:
            await sim.sleep(7)

    with pytest.raises(SimulationError, match="did not end within 100 virtual seconds"):
        sim.run(main, max_time_s=100)


def test_turns_without_time_are_limited() -> None:
    """Polling without waiting is a loop without progress."""

    async def main() -> None:
        await sim.sleep(1)
        while True:
            await sim.sleep(0)

    with pytest.raises(SimulationError, match="no progress: 1000 turns of the loop and it is still 1 s"):
        sim.run(main, max_turns_at_one_instant=1000)


def test_turns_are_limited_altogether() -> None:
    """Also when time passes."""

    async def main() -> None:
        while True:
            await sim.sleep(0.001)

    with pytest.raises(SimulationError, match="within 500 turns"):
        sim.run(main, max_turns=500)


def test_threads_are_refused() -> None:
    """A thread takes real time."""

    async def main() -> None:
        with pytest.raises(SimulationError, match=r"Env\.executor"):
            await asyncio.to_thread(print)
        with pytest.raises(SimulationError, match="no threads"):
            await asyncio.get_running_loop().getaddrinfo("localhost", 80)

    sim.run(main)


def test_run_refuses_what_it_cannot_run() -> None:
    """Not a coroutine; within a running loop; `sim.sleep` on a real loop."""
    with pytest.raises(ConfigError, match="main must be a coroutine"):
        sim.run(lambda: 3)  # type: ignore[arg-type, return-value]

    async def nested() -> None:
        with pytest.raises(ConfigError, match="while an event loop runs"):
            sim.run(sim.sleep(1))

    sim.run(nested)

    async def real() -> None:
        with pytest.raises(SimulationError, match="virtual time only"):
            await sim.sleep(0)

    asyncio.run(real())


# ------------------------------------------------------------------------------------------------------------- failures


def test_the_exception_of_main_comes_out_with_the_seed() -> None:
    """As raised, with a note."""

    async def main() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        sim.run(main, seed=5)
    assert caught.value.__notes__ == ["simulation seed: 5"]


def test_an_exception_in_a_task_that_nobody_awaited_fails_the_run() -> None:
    """Even if main ends well, and even if the task is not referenced any more."""

    async def main() -> None:
        async def fail() -> None:
            raise ValueError("unseen")

        asyncio.create_task(fail())  # noqa: RUF006 (that is the point)
        await sim.sleep(1)

    with pytest.raises(ValueError, match="unseen") as caught:
        sim.run(main)
    assert "which nobody awaited" in caught.value.__notes__[0]


def test_an_exception_in_a_callback_fails_the_run() -> None:
    """A callback has nobody else to tell."""

    async def main() -> None:
        virtual_loop().call_later(1, dict[str, int]().__getitem__, "missing")
        await sim.sleep(2)

    with pytest.raises(KeyError, match="missing"):
        sim.run(main)


def test_several_unseen_failures_come_as_a_group() -> None:
    """None hides another."""

    async def main() -> None:
        async def fail(error: Exception) -> None:
            raise error

        tasks = [asyncio.create_task(fail(error)) for error in (ValueError("a"), KeyError("b"))]
        await sim.sleep(1)
        assert all(task.done() for task in tasks)

    with pytest.raises(ExceptionGroup) as caught:
        sim.run(main)
    assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError]


def test_an_exception_that_somebody_looked_at_does_not_fail_the_run() -> None:
    """It was handled."""

    async def main() -> str:
        async def fail() -> None:
            raise ValueError

        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        return type(task.exception()).__name__

    assert sim.run(main) == "ValueError"


def test_what_is_left_is_cancelled_and_unwinds() -> None:
    """Cleanup runs, on virtual time, after main has returned."""
    ended: list[float] = []

    async def main() -> None:
        async def serve() -> None:
            try:
                await forever()
            finally:
                await sim.sleep(2)
                ended.append(virtual_loop().time())

        asyncio.create_task(serve())  # noqa: RUF006 (that is the point)
        await sim.sleep(1)

    sim.run(main)
    assert ended == [3.0]


def test_a_failure_while_unwinding_fails_the_run() -> None:
    """A shutdown that crashes is a crash."""

    async def main() -> None:
        async def serve() -> None:
            try:
                await forever()
            finally:
                raise ValueError("in cleanup")

        asyncio.create_task(serve())  # noqa: RUF006 (that is the point)
        await sim.sleep(1)

    with pytest.raises(ValueError, match="in cleanup"):
        sim.run(main)


def test_a_task_that_will_not_end_fails_the_run() -> None:
    """Cancellation must not be ignored."""

    async def main() -> None:
        async def stubborn() -> None:
            while True:
                try:
                    await sim.sleep(1)
                except asyncio.CancelledError:
                    continue

        asyncio.create_task(stubborn(), name="mule")  # noqa: RUF006 (that is the point)
        await sim.sleep(1)

    with pytest.raises(SimulationError, match="does not end when it is cancelled: mule"):
        sim.run(main)


# --------------------------------------------------------------------------------------------------------------- owners


def test_what_a_task_starts_belongs_to_its_owner() -> None:
    """Tasks, timers and callbacks inherit the owner; main has none."""

    async def main() -> list[str | None]:
        loop, seen = virtual_loop(), list[Owner | None]()

        def note() -> None:
            seen.append(current_owner())

        async def child() -> None:
            note()

        async def parent() -> None:
            note()
            loop.call_later(1, note)
            loop.call_soon(note)
            await asyncio.create_task(child())

        await loop.spawn(Owner("a"), parent())
        await sim.sleep(2)
        note()
        return [owner.name if owner else None for owner in seen]

    assert sim.run(main) == ["a", "a", "a", "a", None]


def ticking(seen: list[float], period_s: float = 1.0) -> Coroutine[Any, Any, None]:
    """Note the time every second."""

    async def tick() -> None:
        while True:
            await sim.sleep(period_s)
            seen.append(virtual_loop().time())

    return tick()


def test_a_frozen_owner_stands_still_and_so_does_its_clock() -> None:
    """3 s are one turn of its loop, which counts as half a second; others are not delayed."""

    async def main() -> tuple[list[float], list[float]]:
        loop, frozen, free = virtual_loop(), list[float](), list[float]()
        owner = Owner("a")
        loop.spawn(owner, ticking(frozen))
        loop.spawn(Owner("b"), ticking(free))
        await sim.sleep(2.5)
        loop.freeze(owner)
        await sim.sleep(3)
        loop.thaw(owner)
        await sim.sleep(1.25)
        return frozen, free

    frozen, free = sim.run(main)
    assert frozen == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert free == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_frozen_owner_does_not_wake_for_a_result() -> None:
    """What others finish reaches it only when it is thawed; a timer it had cancelled stays cancelled."""

    async def main() -> float:
        loop, owner = virtual_loop(), Owner("a")
        result: asyncio.Future[float] = loop.create_future()

        async def wait() -> float:
            async with asyncio.timeout(10):
                await result
            return loop.world_time()

        task = loop.spawn(owner, wait())
        await sim.sleep(1)
        loop.freeze(owner)
        result.set_result(1.0)
        await sim.sleep(50)
        assert not task.done()
        loop.thaw(owner)
        return await task

    # The timeout of 10 s has not passed for the owner.
    assert sim.run(main) == 51.0


def test_frozen_timers_do_not_keep_the_clock_going() -> None:
    """If only a frozen owner has timers, nothing will ever happen: that is a deadlock, found at once."""

    async def main() -> None:
        loop, owner = virtual_loop(), Owner("a")
        loop.spawn(owner, ticking([]))
        await sim.sleep(0.5)
        loop.freeze(owner)
        await forever()

    with pytest.raises(SimulationError, match=r"deadlock at 0\.5 s"):
        sim.run(main)


def test_a_killed_owner_runs_nothing_more() -> None:
    """No tick, no timer, no callback after the kill; the others go on."""

    async def main() -> tuple[list[float], list[float], list[str]]:
        loop, killed, free, fired = virtual_loop(), list[float](), list[float](), list[str]()
        owner = Owner("a")

        async def serve() -> None:
            loop.call_later(5, fired.append, "timer")
            await ticking(killed)

        loop.spawn(owner, serve())
        loop.spawn(Owner("b"), ticking(free))
        await sim.sleep(2.5)
        loop.kill(owner)
        await sim.sleep(5)
        assert owner.ended is not None
        assert owner.ended.done()
        with pytest.raises(ClosedError, match="a was killed"):
            loop.spawn(owner, forever())
        return killed, free, fired

    killed, free, fired = sim.run(main)
    assert killed == [1.0, 2.0]
    assert free == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert fired == []


def test_a_killed_task_unwinds_without_time_and_without_waiting() -> None:
    """`finally` blocks run at the instant of the kill; one that waits is never resumed."""

    async def main() -> tuple[list[str], float]:
        loop, owner, steps = virtual_loop(), Owner("a"), list[str]()

        async def stubborn() -> None:
            for attempt in range(100):
                try:
                    await sim.sleep(3)
                    steps.append("woke")
                except asyncio.CancelledError:
                    steps.append(f"cancelled {attempt}")
                    loop.call_later(0, steps.append, "woke")
                    await sim.sleep(0)

        async def orderly() -> None:
            try:
                await forever()
            finally:
                await sim.sleep(0)
                steps.append("orderly")

        loop.spawn(owner, stubborn())
        loop.spawn(owner, orderly())
        await sim.sleep(1)
        loop.kill(owner)
        assert owner.ended is not None
        await owner.ended
        at = loop.time()
        await sim.sleep(100)
        return steps, at

    steps, at = sim.run(main)
    assert at == 1.0
    assert "orderly" in steps
    assert "woke" not in steps
    assert sum(step.startswith("cancelled") for step in steps) < 10


def test_what_a_killed_task_raises_is_nobodys_concern_but_earlier_crashes_are() -> None:
    """A failure from before the kill still fails the run."""

    def kill_after(delay_s: float) -> None:
        async def main() -> None:
            loop, owner = virtual_loop(), Owner("a")

            async def fail() -> None:
                try:
                    await sim.sleep(1)
                finally:
                    raise ValueError("failed")

            loop.spawn(owner, fail())
            await sim.sleep(delay_s)
            loop.kill(owner)
            await sim.sleep(5)

        sim.run(main)

    kill_after(0.5)
    with pytest.raises(ValueError, match="failed"):
        kill_after(2.0)


def test_a_frozen_owner_can_be_killed() -> None:
    """As SIGKILL works on a stopped process."""

    async def main() -> bool:
        loop, owner = virtual_loop(), Owner("a")
        task = loop.spawn(owner, forever())
        await sim.sleep(1)
        loop.freeze(owner)
        loop.kill(owner)
        await sim.sleep(1)
        return task.cancelled()

    assert sim.run(main)
