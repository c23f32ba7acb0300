"""The lock of the averaged tensors, which the user's threads and the loop have in the order in which they asked for it.

Whoever gives it back hands it to the one that has waited for longest. So a thread that comes again at once waits behind
the others, and neither a round nor a snapshot starves.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Self

__all__ = ["TensorLock"]


class TensorLock:
    """A lock for threads (`acquire`, `with`) and for coroutines (`take`, `held`). Who holds it must not ask again.

    Attributes:
        holder: who holds it, in words; empty: nobody.
        generation: grows whenever a holder may have changed the tensors.
    """

    def __init__(self) -> None:
        self.holder, self.generation = "", 0
        self._guard = threading.Lock()  # of the line; never held while anything is waited for
        self._line: deque[tuple[Future[None], str]] = deque()

    def acquire(self, holder: str, timeout_s: float | None = None) -> bool:
        """Take it, from a thread; False if others had it for all of `timeout_s` (None: wait without limit).

        Args:
            holder: who asks, in words that others can be told.
            timeout_s: longest wait, seconds.
        """
        turn = self._ask(holder)
        try:
            turn.result(timeout_s)
        except TimeoutError:
            return not turn.cancel()  # its turn may have come in this moment
        except BaseException:
            self._leave(turn)
            raise
        return True

    async def take(self, timeout_s: float | None = None) -> None:
        """Take it, from the loop, which goes on meanwhile.

        Raises:
            TimeoutError: others had it for all of `timeout_s`. None: wait without limit.
        """
        turn = self._ask("shoal itself")
        if not turn.done():
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.wrap_future(turn)
            except BaseException:
                self._leave(turn)
                raise

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold it, from the loop."""
        await self.take()
        try:
            yield
        finally:
            self.release()

    def __enter__(self) -> Self:
        self.acquire(f"thread {threading.current_thread().name!r}")
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give it to whoever has waited for longest."""
        with self._guard:
            self.holder = ""
            while self._line and not self.holder:
                self._give(*self._line.popleft())

    def _ask(self, holder: str) -> Future[None]:
        """A place in the line; done when it is its turn."""
        turn: Future[None] = Future()
        with self._guard:
            if self.holder:
                self._line.append((turn, holder))
            else:
                self._give(turn, holder)
        return turn

    def _give(self, turn: Future[None], holder: str) -> None:
        if turn.set_running_or_notify_cancel():  # else nobody waits for it any more
            self.holder = holder
            turn.set_result(None)

    def _leave(self, turn: Future[None]) -> None:
        if not turn.cancel():  # its turn has come meanwhile
            self.release()
