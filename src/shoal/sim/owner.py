"""The owners of running code: the lives of simulated processes, and their tasks.

An `Owner` is one life of one simulated process. A context variable names it; tasks and timers inherit their context
from the code that makes them. So everything that a process starts is known as its own, and stops with it.
"""

# ruff: noqa: SLF001 (an event loop works on the inside of asyncio's tasks: that is its side of the contract)

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, TypeVar

__all__ = ["Owner", "current_owner"]

T = TypeVar("T")

_Coro = Generator[Any, None, T] | Coroutine[Any, Any, T]

_SWEEP_ABOVE = 64
_ASYNCIO = f"{os.sep}asyncio{os.sep}"

OWNER: contextvars.ContextVar[Owner | None] = contextvars.ContextVar("shoal.sim.owner", default=None)


def current_owner() -> Owner | None:
    """The owner of the running code: None outside of simulated processes."""
    return OWNER.get()


class Handle(asyncio.Handle):
    """A callback that waits for its turn. It sets its base's fields itself: each message makes two of these."""

    __slots__ = ()
    _context: contextvars.Context

    def __init__(
        self,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._source_traceback = self._repr = None

    def owner(self) -> Owner | None:
        """The owner of the code that this would run."""
        return self._context.get(OWNER)


class Timer(asyncio.TimerHandle):
    """A callback that waits for its time; `scheduled` while it is in the loop's queue."""

    __slots__ = ()
    _context: contextvars.Context
    _scheduled: bool

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._source_traceback = self._repr = None
        self._when = when
        self._scheduled = True

    def owner(self) -> Owner | None:
        """The owner of the code that this would run."""
        return self._context.get(OWNER)


class Task(asyncio.Task[T]):
    """A task whose hash is a number, so that sets of tasks (a TaskGroup has one) have the same order in every run."""

    __slots__ = ("owner", "serial")
    _log_destroy_pending: bool

    def __init__(self, serial: int, owner: Owner | None, coro: _Coro[T], **kwargs: Any) -> None:
        self.serial, self.owner = serial, owner  # first: the base class already puts the task into a set
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self.serial

    def describe(self) -> str:
        """The owner, the name, and where it waits: the innermost line that is not asyncio's."""
        where = ""
        awaited: Coroutine[Any, Any, Any] | Generator[Any, Any, Any] | None = self.get_coro()
        while awaited is not None:
            frame = getattr(awaited, "cr_frame", None)
            if frame is not None and _ASYNCIO not in frame.f_code.co_filename:
                where = f" at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            awaited = getattr(awaited, "cr_await", None)
        whose = f"{self.owner.name}: " if self.owner is not None else ""
        return f"{whose}{self.get_name()}{where}"


class Tasks:
    """Tasks in the order of their creation. Tasks that ended well are dropped now and then."""

    __slots__ = ("_sweep_at", "_tasks")

    def __init__(self) -> None:
        self._tasks: list[Task[Any]] = []
        self._sweep_at = _SWEEP_ABOVE

    def add(self, task: Task[Any]) -> None:
        """Keep the task until it ended and its exception, if any, was looked at."""
        self._tasks.append(task)
        if len(self._tasks) > self._sweep_at:
            self._tasks = [kept for kept in self._tasks if not kept.done() or kept._log_traceback]
            self._sweep_at = 2 * len(self._tasks) + _SWEEP_ABOVE

    def __iter__(self) -> Iterator[Task[Any]]:
        return iter(self._tasks)

    def pending(self) -> list[Task[Any]]:
        """The tasks that have not ended."""
        return [task for task in self._tasks if not task.done()]

    def failed(self) -> list[Task[Any]]:
        """The tasks that ended in an exception which nobody has looked at."""
        return [task for task in self._tasks if task.done() and task._log_traceback]


class Owner:
    """One life of a simulated process, to which its tasks and timers belong.

    Args:
        name: a name for messages.

    Attributes:
        running: whether its code runs: it is neither frozen nor killed.
        killed: whether it was killed. It may still run code while it unwinds.
        buried: whether it was killed and has unwound, so that its code never runs again.
        ended: a future that is done when it is buried; None before its first task.
        tasks: its tasks.
        held_ready: callbacks that it would have run while it was frozen.
        held_timers: its timers that came first in the queue while it was frozen, with their time and number.
        frozen_at: the simulation's time at which it was frozen last.
        stood_s: how long its clock has stood still in all, seconds.
    """

    __slots__ = (
        "buried",
        "ended",
        "frozen_at",
        "held_ready",
        "held_timers",
        "killed",
        "name",
        "running",
        "stood_s",
        "tasks",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.running = True
        self.frozen_at = self.stood_s = 0.0
        self.killed = False
        self.buried = False
        self.ended: asyncio.Future[None] | None = None
        self.tasks = Tasks()
        self.held_ready: list[Handle | Timer] = []
        self.held_timers: list[tuple[float, int, Timer]] = []
