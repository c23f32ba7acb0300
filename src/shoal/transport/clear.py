"""Data as it is: for networks that are trusted, where both sides asked for it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.transport.base import Buffer
from shoal.transport.layers import Scratch

__all__ = ["ClearLayer"]

_DIRECT_BYTES = 16 << 10


class ClearLayer:
    """Nothing is changed; long reads go straight from the socket to the reader's buffer.

    Args:
        scratch: shared memory.
        received: what has come already and was not read.
    """

    def __init__(self, scratch: Scratch, received: bytes = b"") -> None:
        self._scratch, self._waiting, self._direct = scratch, memoryview(received), False

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def receive_buffer(self, target: memoryview) -> memoryview:
        self._direct = len(target) >= _DIRECT_BYTES
        if self._direct:
            return target
        there = len(self._waiting)
        self._scratch.receiving[:there] = self._waiting
        return self._scratch.receiving[there:]

    def received(self, nbytes: int, target: memoryview) -> int:
        if self._direct:
            return nbytes
        came = self._scratch.receiving[: len(self._waiting) + nbytes]
        filled = min(len(came), len(target))
        if filled:
            target[:filled] = came[:filled]
        self._waiting = memoryview(bytes(came[filled:]))
        return filled

    def read(self, target: memoryview) -> int:
        filled = min(len(self._waiting), len(target))
        if filled:
            target[:filled], self._waiting = self._waiting[:filled], self._waiting[filled:]
        return filled

    def protect(self, bunch: Sequence[memoryview]) -> Sequence[Buffer]:
        return bunch
