"""The lock of the averaged tensors, which the user's threads and the loop have in the order in which they asked for it.

They stand in one line, and the first of them has it; whoever leaves the line makes the next one the first. So a thread
that comes again at once waits behind the others, and neither a round nor a snapshot starves. To join the line, to leave
it and to tell the first can each be done twice as well as once: an interrupt (Ctrl+C) between any two steps of a thread
costs nobody the lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

__all__ = ["TensorLock"]


class _Turn:
    """A place in the line.

    Attributes:
        holder: who stands there, in words.
        thread: which thread that is; None: the loop.
    """

    __slots__ = ("_tell", "_told", "holder", "thread")

    def __init__(self, holder: str, thread: int | None, tell: Callable[[], object]) -> None:
        self.holder, self.thread, self._tell = holder, thread, tell
        self._told = False

    def come(self) -> None:
        if not self._told:
            self._tell()
            self._told = True


class TensorLock:
    """A lock for threads (`holding`) and for coroutines (`held`). Who has it must not ask again.

    Attributes:
        generation: grows whenever a holder may have changed the tensors.
    """

    def __init__(self) -> None:
        self.generation = 0
        # Of the line; never held while anything is waited for. Again in the same thread: by a finalizer of `holding`.
        self._guard = threading.RLock()
        self._line: list[_Turn] = []

    @property
    def holder(self) -> str:
        """Who has it, in words; empty: nobody."""
        with self._guard:
            return self._line[0].holder if self._line else ""

    @property
    def mine(self) -> bool:
        """Whether the calling thread has it, by `holding`."""
        with self._guard:
            return bool(self._line) and self._line[0].thread == threading.get_ident()

    @contextmanager
    def holding(self, holder: str = "", timeout_s: float | None = None) -> Iterator[bool]:
        """Have it, in a thread; yields False, without it, if others had it for all of `timeout_s`.

        Args:
            holder: who asks, in words that others can be told; empty: the thread, by its name.
            timeout_s: longest wait, seconds; None: without limit.
        """
        first = threading.Event()
        turn = _Turn(holder or f"thread {threading.current_thread().name!r}", threading.get_ident(), first.set)
        try:
            self._join(turn)
            first.wait(timeout_s)
            yield self._has_come(turn)
        finally:
            try:
                self._leave(turn)
            finally:
                self._leave(turn)  # an interrupt may have come in between

    @asynccontextmanager
    async def held(self, timeout_s: float | None = None) -> AsyncIterator[bool]:
        """Have it, in the loop, which goes on meanwhile; yields False, without it, if others had it for `timeout_s`.

        Args:
            timeout_s: longest wait, seconds; None: without limit.
        """
        loop, first = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop has ended, and who waited in it
                loop.call_soon_threadsafe(first.set)

        turn = _Turn("shoal itself", None, tell)
        try:
            self._join(turn)
            if not self._has_come(turn):
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await first.wait()
            yield self._has_come(turn)
        finally:
            self._leave(turn)

    def _has_come(self, turn: _Turn) -> bool:
        with self._guard:  # who is being told may be here before whoever tells it has gone on
            return self._line[:1] == [turn]

    def _join(self, turn: _Turn) -> None:
        with self._guard:
            self._line.append(turn)
            self._line[0].come()

    def _leave(self, turn: _Turn) -> None:
        with self._guard:
            if turn in self._line:
                self._line.remove(turn)
            if self._line:
                self._line[0].come()
