"""The lock of the averaged tensors, which the user's threads and the loop get in the order in which they ask for it.

All of them stand in one line, and the first of them has the lock. So a thread that comes again at once waits behind the
others, and neither a round nor a snapshot starves.

An interrupt (Ctrl+C) at any moment costs nobody the lock. A place in the line is over as soon as its mark is set, and a
`with` statement sets it by one call of C: Python looks for signals when a function of Python begins, and after calls,
so an `__exit__` in Python might never run. No thread is notified: waiting threads look every few milliseconds at most.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING

__all__ = ["TensorLock", "Turn"]

_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.005

_Line = list["Turn"]


class Turn(queue.SimpleQueue[object]):
    """A place in the line; in a `with` statement of a thread it waits there, and leaves at the end.

    An item in its queue means that the place is over.

    Args:
        line: the line of the lock.
        holder: the name of the holder of the place, in words.
        timeout_s: longest wait, seconds.

    Attributes:
        thread: the thread that holds the place; None: the loop.
    """

    def __init__(self, line: _Line, holder: str, timeout_s: float, *, in_loop: bool = False) -> None:
        super().__init__()
        self._line, self.holder, self.timeout_s = line, holder, timeout_s
        self.thread = None if in_loop else threading.get_ident()

    def __enter__(self) -> bool:
        """Wait; False, without the lock, if others had it all that time."""
        try:
            return self.wait_in_line()
        except BaseException:
            self.leave()
            raise

    if TYPE_CHECKING:

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
        ) -> None: ...

    else:
        __exit__ = queue.SimpleQueue.put  # takes three arguments: all that matters is that the queue is not empty

    def leave(self) -> None:
        """Leave the line. A second call has no effect."""
        self.put(None)

    def wait_in_line(self) -> bool:
        """Join the line, and wait there; returns whether the place became the first."""
        waited_s = 0.0
        for pause_s in self.pauses():
            if waited_s >= self.timeout_s:
                break
            waited_s += pause_s
            time.sleep(pause_s)
        return self.claim()

    def claim(self) -> bool:
        """Leave the line unless the place is the first in it; returns whether it is."""
        if first(self._line) is self:
            return True
        self.leave()
        return False

    def pauses(self) -> Iterator[float]:
        """Join the line; yields how long to wait until the next look, as long as the place is not the first."""
        self._line.append(self)
        pause_s = _PAUSE_S
        while first(self._line) is not self:
            yield pause_s
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def first(line: _Line) -> Turn | None:
    """The place that has the lock; removes places that are over. Works in any thread, and interrupted anywhere."""
    for turn in list(line):
        if turn.empty():
            return turn
        with suppress(ValueError):  # another thread removed it at the same time
            line.remove(turn)
    return None


class TensorLock:
    """A lock for threads (`acquire_in_thread`) and for coroutines (`acquire`). A holder must not ask for it again.

    Attributes:
        generation: grows whenever a holder may change the tensors.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._line: _Line = []

    def may_change(self) -> None:
        """The holder may change the tensors from now on."""
        self.generation += 1

    @property
    def holder(self) -> str:
        """The name of the holder; empty if nobody has the lock."""
        turn = first(self._line)
        return "" if turn is None else turn.holder

    @property
    def held_by_this_thread(self) -> bool:
        """Whether the calling thread has the lock, by `acquire_in_thread`."""
        turn = first(self._line)
        return turn is not None and turn.thread == threading.get_ident()

    def acquire_in_thread(
        self, holder: str = "", timeout_s: float | None = None, kind: Callable[..., Turn] = Turn
    ) -> Turn:
        """Hold the lock in a `with` statement of a thread; yields False if others had it for all of `timeout_s`.

        Args:
            holder: a name for the holder that others can read; empty: the name of the thread.
            timeout_s: longest wait, seconds; None: without limit.
            kind: the class of the place.
        """
        name = holder or f"thread {threading.current_thread().name!r}"
        return kind(self._line, name, float("inf") if timeout_s is None else timeout_s)

    @asynccontextmanager
    async def acquire(self, timeout_s: float | None = None) -> AsyncIterator[bool]:
        """Hold the lock in a coroutine, while the loop goes on; yields False if others had it for `timeout_s`.

        Args:
            timeout_s: longest wait, seconds; None: without limit.
        """
        loop = asyncio.get_running_loop()
        until = float("inf") if timeout_s is None else loop.time() + timeout_s
        turn = Turn(self._line, "shoal itself", 0.0, in_loop=True)
        try:
            for pause_s in turn.pauses():
                if loop.time() >= until:
                    break
                await asyncio.sleep(min(pause_s, until - loop.time()))
            yield turn.claim()
        finally:
            turn.leave()
