"""Background tasks of an object, and the waiters that it wakes."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from shoal import sim
from shoal.base.tasks import Changes, Tasks, WhileMoving
from shoal.sim import run


async def _forever() -> None:
    await asyncio.Event().wait()


async def _fail() -> None:
    raise ValueError("no")


def test_a_failure_is_told_and_a_cancellation_is_not() -> None:
    """The owner hears of errors; a cancelled task has not failed."""

    async def main() -> list[BaseException]:
        failures: list[BaseException] = []
        tasks = Tasks(failures.append)
        tasks.spawn(_fail())
        tasks.spawn(_forever())
        await sim.sleep(1)
        await tasks.cancel()
        assert not tasks
        return failures

    (error,) = run(main())
    assert isinstance(error, ValueError)


def test_a_running_task_is_not_collected() -> None:
    """The loop has only weak references to a task; its owner has a strong one."""

    class Waiter:
        def __init__(self) -> None:
            self.gate = asyncio.get_running_loop().create_future()  # nobody else refers to it

        async def wait(self) -> None:
            await self.gate

    async def main() -> None:
        tasks, waiter = Tasks(lambda error: None), Waiter()
        seen = weakref.ref(waiter)
        tasks.spawn(waiter.wait())
        await sim.sleep(1)
        del waiter
        gc.collect()
        assert seen() is not None, "a task was collected while it ran"
        await tasks.cancel()

    run(main())


def test_all_tasks_end_in_the_order_of_their_beginning_but_the_callers() -> None:
    """`cancel` may be called by one of the tasks."""

    async def main() -> None:
        tasks, ended = Tasks(lambda error: None), list[str]()

        async def work(name: str) -> None:
            try:
                await _forever()
            finally:
                ended.append(name)

        async def end_all() -> None:
            await sim.sleep(1)
            await tasks.cancel()
            ended.append("caller")

        for name in ("a", "b", "c"):
            tasks.spawn(work(name))
        await tasks.spawn(end_all())
        assert ended == ["a", "b", "c", "caller"]

    run(main())


def test_waiting_for_tasks_ends_with_them_or_in_time() -> None:
    """`wait` returns when the tasks of now have ended, or after its time."""

    async def main() -> None:
        tasks, loop = Tasks(lambda error: None), asyncio.get_running_loop()
        began = loop.time()
        await tasks.wait(5)
        assert loop.time() == began
        tasks.spawn(sim.sleep(2))
        await tasks.wait(5)
        assert loop.time() == pytest.approx(began + 2)
        tasks.spawn(_forever())
        await tasks.wait(5)
        assert loop.time() == pytest.approx(began + 7)
        await tasks.cancel()

    run(main())


def test_a_change_that_comes_while_a_waiter_looks_is_not_missed() -> None:
    """A waiter that read `count` before it looked is woken at once."""

    async def main() -> None:
        changes, loop = Changes(), asyncio.get_running_loop()

        async def look_slowly() -> float:
            seen = changes.count
            await sim.sleep(2)
            await changes.after(seen)
            return loop.time()

        began = loop.time()
        waiter = loop.create_task(look_slowly())
        await sim.sleep(1)
        changes.notify()
        assert await waiter == pytest.approx(began + 2)

    run(main())


def test_a_change_before_a_task_that_waits_has_begun_is_not_missed() -> None:
    """A task begins a turn of the loop after it was made. What counts is the moment at which `next` was called."""

    async def main() -> None:
        changes, loop = Changes(), asyncio.get_running_loop()
        waiter = loop.create_task(changes.next(timeout_s=1))
        changes.notify()
        assert await waiter

    run(main())


def test_a_change_wakes_every_waiter_once() -> None:
    """Every waiter is woken; a later one waits for the next change."""

    async def main() -> None:
        changes = Changes()
        woken: list[int] = []

        async def wait(number: int) -> None:
            assert await changes.next()
            woken.append(number)

        waiters = [asyncio.ensure_future(wait(number)) for number in range(3)]
        await sim.sleep(0)
        changes.notify()
        await asyncio.gather(*waiters)
        assert woken == [0, 1, 2]
        assert not await changes.next(timeout_s=1), "an old change woke a new waiter"

    run(main())


def test_an_object_and_its_tasks_need_no_cycle_collector() -> None:
    """The object holds its tasks; they hold its method only weakly."""

    class Owner:
        def __init__(self) -> None:
            self.errors: list[BaseException] = []
            self.tasks = Tasks(self.failed)

        def failed(self, error: BaseException) -> None:
            self.errors.append(error)

    async def main() -> None:
        owner = Owner()
        owner.tasks.spawn(_fail())
        await sim.sleep(1)
        assert len(owner.errors) == 1
        seen = weakref.ref(owner)
        gc.disable()
        try:
            owner.errors.clear()
            del owner
            assert seen() is None
        finally:
            gc.enable()

    run(main())


def test_tasks_are_cancelled_also_if_nobody_can_wait_for_their_end() -> None:
    """An owner that is cancelled while it ends one group of tasks has cancelled the others already."""

    async def main() -> None:
        groups = [Tasks(lambda error: None) for _ in range(3)]
        tasks = [group.spawn(_forever()) for group in groups]

        async def end_all() -> None:
            await asyncio.gather(*(group.cancel() for group in groups))

        ending = asyncio.ensure_future(end_all())
        await sim.sleep(0)
        ending.cancel()
        await sim.sleep(1)
        assert all(task.cancelled() for task in tasks)

    run(main())


def test_a_wait_leaves_nothing_behind() -> None:
    """A waiter that is woken, that waits in vain, or that is cancelled is forgotten, with its timer."""

    async def main() -> None:
        changes, loop = Changes(), asyncio.get_running_loop()
        woken, late = loop.create_task(changes.next(timeout_s=9)), loop.create_task(changes.next(timeout_s=0.5))
        cancelled = loop.create_task(changes.next(timeout_s=9))
        await sim.sleep(1)
        cancelled.cancel()
        changes.notify()
        assert (await woken, await late) == (True, False)
        assert (await asyncio.gather(cancelled, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        assert not changes._waiters

    run(main())


def test_what_moves_is_not_called_dead_and_what_stands_still_is() -> None:
    """However long a message takes; a few bytes now and then are no progress."""

    async def main() -> list[float]:
        moved, ends = 0, []
        for step, times in ((8_000, 60), (100, 60), (8_000, 7)):
            try:
                async with WhileMoving(5.0, lambda: moved):  # noqa: B023 (the present value)
                    for _ in range(times):
                        await sim.sleep(1.0)
                        moved += step
                    if times < 60:
                        await asyncio.Event().wait()
            except TimeoutError:
                pass
            ends.append(asyncio.get_running_loop().time())
        return ends

    assert run(main()) == [60.0, 65.0, 77.5]
