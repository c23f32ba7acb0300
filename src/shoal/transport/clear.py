"""The layer that sends data as it is: for trusted networks, where both sides asked for it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.transport.base import Buffer
from shoal.transport.layers import ReceiveBuffer, Scratch

__all__ = ["PAUSE_BYTES", "ClearLayer"]

PAUSE_BYTES = 256 << 10
"""The socket is not read while this much waits for a reader."""

_DIRECT_BYTES = 16 << 10


class ClearLayer:
    """Changes nothing. Long reads go straight from the socket to the reader's buffer.

    Args:
        scratch: shared memory.
        received: bytes that came before and were not read.
    """

    pause_bytes = PAUSE_BYTES

    def __init__(self, scratch: Scratch, received: bytes = b"") -> None:
        self._held, self._direct = ReceiveBuffer(scratch, received), False

    @property
    def pending(self) -> int:
        return len(self._held)

    def receive_buffer(self, target: memoryview) -> memoryview:
        self._direct = len(target) >= _DIRECT_BYTES
        return target if self._direct else self._held.receive_buffer(len(target))

    def received(self, nbytes: int, target: memoryview) -> int:
        return nbytes if self._direct else self._take(self._held.received(nbytes), target)

    def read(self, target: memoryview) -> int:
        return self._take(self._held.view, target)

    def _take(self, waiting: memoryview, target: memoryview) -> int:
        filled = min(len(waiting), len(target))
        if filled:
            target[:filled] = waiting[:filled]
        self._held.keep(waiting[filled:])
        return filled

    def protect(self, bunch: Sequence[memoryview]) -> Sequence[Buffer]:
        return bunch
