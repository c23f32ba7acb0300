"""The background tasks of one object, the waiters that it wakes, and limits on what moves. Loop only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from types import MethodType, TracebackType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakMethod

__all__ = ["LEAST_BYTES_PER_S", "Changes", "Tasks", "WhileMoving", "in_turns", "stopped", "weakly"]

_LOOKS = 4

LEAST_BYTES_PER_S = 1 << 10
"""What comes or goes slower than this is not taken for progress where somebody else would have to wait for it."""

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Call this method, without keeping its object: so an object has no cycle with a part of its own that calls it.

    Memory in cycles is freed late.

    Raises:
        ReferenceError: when it is called, and the object is gone.
    """
    found = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if (alive := found()) is None:
            raise ReferenceError("its object is gone")
        return alive(*args, **kwargs)

    return call


class Tasks:
    """The background tasks of one object. asyncio alone may forget a running task, and keeps quiet if it fails.

    Args:
        on_failure: called with the error of each task that failed. A cancelled task has not failed. A method is held
            weakly: it is usually one of the object that holds these tasks, which then needs no cycle collector.
    """

    def __init__(self, on_failure: Callable[[BaseException], object]) -> None:
        self._on_failure = WeakMethod(on_failure) if isinstance(on_failure, MethodType) else lambda: on_failure
        self._running: dict[asyncio.Task[Any], None] = {}  # a set would cancel them in another order in each process

    def spawn(self, work: Coroutine[Any, Any, T], /) -> asyncio.Task[T]:
        """Start a task that `cancel` ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None and (tell := self._on_failure()):
            tell(error)

    def __bool__(self) -> bool:
        return bool(self._running)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the tasks of now have ended, at most for so many seconds; None: however long it takes."""
        if others := self._others():
            await asyncio.wait(others, timeout=timeout_s)

    def cancel(self) -> Coroutine[Any, Any, None]:
        """Cancel all tasks except the caller's own. They are cancelled at once; await the result for their end."""
        others = self._others()
        for task in others:
            task.cancel()
        return self._end(others)

    async def _end(self, tasks: list[asyncio.Task[Any]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)

    def _others(self) -> list[asyncio.Task[Any]]:
        current = asyncio.current_task()
        return [task for task in self._running if task is not current]


async def stopped(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait for its end; what it failed with concerns nobody.

    An object that keeps a task, and is known to the task, is freed only by the cycle collector: a task keeps its error,
    and the error's traceback all that its frames know, such as a state that was being sent. So let go of the task
    first: `task, self._task = self._task, None`, or `del self._task` after the last use.
    """
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # else asyncio complains that nobody asked for it


class WhileMoving:
    """A time limit that counts progress: a long message on a slow line takes as long as it takes.

    Args:
        stall_s: the time within which something has to move, seconds; up to a quarter more passes before the end.
        moved: returns how many bytes have moved so far.

    Raises:
        TimeoutError: fewer bytes have moved within `stall_s` than at `LEAST_BYTES_PER_S`.
    """

    def __init__(self, stall_s: float, moved: Callable[[], int]) -> None:
        self._stall_s, self._moved, self._limit = stall_s, moved, asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._seen, self._at = self._moved(), self._loop.time()
        self._timer = self._loop.call_later(self._stall_s / _LOOKS, self._look)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _look(self) -> None:
        now, moved = self._loop.time(), self._moved()
        if moved - self._seen >= LEAST_BYTES_PER_S * self._stall_s:
            self._seen, self._at = moved, now
        if now >= self._at + self._stall_s:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(min(now + self._stall_s / _LOOKS, self._at + self._stall_s), self._look)


class Changes:
    """Counts the changes of something, and wakes the tasks that wait for the next one.

    A task that reads `count` before it looks cannot miss a change that comes while it looks::

        while True:
            seen = changes.count
            if await look():
                break
            await changes.after(seen)

    Attributes:
        count: the number of changes so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order in which they are woken

    def notify(self) -> None:
        """Something has changed."""
        self.count += 1
        for waiter in self._waiters:
            _wake(waiter)

    async def after(self, seen: int, timeout_s: float | None = None) -> bool:
        """Wait until `count` is above `seen`.

        Args:
            seen: a value of `count`.
            timeout_s: the longest wait, seconds; None: no limit.

        Returns:
            Whether `count` is above `seen`; False after `timeout_s`.
        """
        if self.count <= seen:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()  # an event and `asyncio.timeout` would do, at several times the cost
            timer = loop.call_later(timeout_s, _wake, waiter) if timeout_s is not None else None
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                del self._waiters[waiter]
                if timer is not None:
                    timer.cancel()
        return self.count > seen

    def next(self, timeout_s: float | None = None) -> Coroutine[Any, Any, bool]:
        """Wait for a change after this call, also if it is awaited, or begun as a task, later; see `after`."""
        return self.after(self.count, timeout_s)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def in_turns(
    items: Iterable[T], most: int, most_bytes: int = 0, size: Callable[[T], int] = lambda _: 0
) -> AsyncIterator[T]:
    """These items, with a turn for others after so many of them, or after so many bytes by their `size`."""
    count = nbytes = 0
    for item in items:
        if count == most or nbytes > most_bytes:
            await asyncio.sleep(0)
            count = nbytes = 0
        count, nbytes = count + 1, nbytes + size(item)
        yield item
