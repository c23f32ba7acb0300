"""The lock of the averaged tensors, which the user's threads and the loop take in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

__all__ = ["Lock", "TensorLock"]

_LOCK_PAUSE_S = (0.0005, 0.01)


class Lock(Protocol):
    """A lock that other threads may hold: `threading.Lock` has this shape."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool:
        """Take it; False if it could not be taken."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...


class TensorLock:
    """The lock of the averaged tensors, taken by the user's threads and by the loop.

    Args:
        lock: the lock itself.

    Attributes:
        generation: grows whenever a holder may have changed the tensors.
    """

    def __init__(self, lock: Lock) -> None:
        self.lock, self.generation = lock, 0

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold it, from the loop: waits without blocking the loop."""
        pause_s, longest_s = _LOCK_PAUSE_S
        while not self.lock.acquire(blocking=False):
            await asyncio.sleep(pause_s)
            pause_s = min(longest_s, 2 * pause_s)
        try:
            yield
        finally:
            self.lock.release()
