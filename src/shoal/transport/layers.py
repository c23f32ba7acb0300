"""The layers between the bytes of a connection's user and the bytes on its socket.

A connection begins with TLS, inside which both sides prove their identities and give each other keys (`handshake`).
Then its data goes sealed under those keys, or in the clear if both sides asked for that. This module defines a layer;
`tls`, `sealed` and `clear` are the three layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import ref

from shoal.transport.base import Buffer

__all__ = ["BUNCH_BYTES", "RECORD_BYTES", "BrokenLayer", "Layer", "ReceiveBuffer", "Scratch"]

RECORD_BYTES = 512 << 10
"""The longest plaintext of a record. Each record costs a call, and a moment in which another thread can take the
interpreter's lock: this thread then gets it back only after `sys.getswitchinterval()`."""

BUNCH_BYTES = (1 << 20) + (16 << 10)
"""At most this much is written in one turn of the loop, about 0.7 ms: a tile of the usual size with its header."""

_AHEAD_BYTES = 64 << 10
_RECEIVE_BYTES = BUNCH_BYTES + _AHEAD_BYTES + 2 * RECORD_BYTES
"""This has room for all bytes that the other side writes in one turn, with tags, and for bytes that were read before.
It also has room for the rest of a record behind its beginning, which came last, so that the beginning seldom moves."""

_LENT_ROOM = RECORD_BYTES + 1024
"""If less room is left, the rest of a record might not fit."""

_LENT_BYTES = 32 << 10
"""Fewer bytes are copied, which is quick; memory is lent only for more."""

_NOTHING = memoryview(b"")


def _nobody() -> None:
    """The borrower of memory that is not lent."""


class BrokenLayer(Exception):
    """The received bytes cannot be those that the other side sent: the connection has to end."""


class Scratch:
    """Memory that all connections of one loop share: nothing stays in it when a callback of the loop returns.

    It is lent to one connection at a time; meanwhile there is another block of 2 MiB. This is enough if one connection
    has the loop to itself, as in a state download. In rounds more of them made no difference that could be measured.

    Attributes:
        receiving: memory for the socket's bytes.
        sending: memory in which the bytes for the socket are made.
    """

    def __init__(self) -> None:
        self.receiving = memoryview(bytearray(_RECEIVE_BYTES))
        self.sending = memoryview(bytearray(BUNCH_BYTES + 1024))
        self._spare: memoryview | None = None
        self._lent_to: Callable[[], ReceiveBuffer | None] = _nobody

    def close(self) -> None:
        """No connection is left. A peer that was shut down is in cycles, and is freed long after: its memory is not."""
        self.receiving = self.sending = memoryview(b"")
        self._spare, self._lent_to = None, _nobody

    def lend_sending(self) -> None:
        """Leave the memory of `sending` to the socket's transport, which may have a view of it; make new memory."""
        self.sending = memoryview(bytearray(len(self.sending)))

    def lend_receiving(self, held: ReceiveBuffer) -> memoryview | None:
        """Lend the memory of `receiving` to the owner of its bytes, and make new memory; None if it is lent already."""
        if self._lent_to() is not None:
            return None
        self._lent_to = ref(held)  # a borrower that is gone holds no memory
        lent, self.receiving = self.receiving, self._spare or memoryview(bytearray(_RECEIVE_BYTES))
        self._spare = None
        return lent

    def give_back(self, lent: memoryview) -> None:
        """Give the lent memory back."""
        self._lent_to, self._spare = _nobody, lent


class ReceiveBuffer:
    """Received bytes that wait for a reader, or for the rest of their record.

    Many bytes stay where they came: that memory is lent to them, and most of the next bytes come right behind. A few
    bytes are copied to memory of their own size, and later in front of the next bytes in the shared memory. If only
    little comes at a time, that would copy every byte many times: then the bytes get memory with room, into which the
    next ones come. So no byte is copied more than a few times, and a connection on which nothing waits has no memory.

    Args:
        scratch: shared memory.
        received: bytes that came before.
    """

    def __init__(self, scratch: Scratch, received: bytes) -> None:
        self._scratch = scratch
        self._memory, self._start, self._end = memoryview(received), 0, len(received)
        self._lent = False
        self._came = 0

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def view(self) -> memoryview:
        """All bytes that wait. Only valid until the next call."""
        return self._memory[self._start : self._end]

    @property
    def _has_room(self) -> bool:
        return len(self._memory) - self._end >= (_LENT_ROOM if self._lent else 1)

    def receive_buffer(self, wanted: int) -> memoryview:
        """Memory for the socket's next bytes, not empty. `wanted`: how many bytes a reader waits for.

        There is room for little more than these, because bytes behind them have to be kept.
        """
        room = min(wanted, BUNCH_BYTES) + _AHEAD_BYTES
        if self._has_room:
            return self._memory[self._end : self._end + room]
        there = len(self)
        self._scratch.receiving[:there] = self.view
        return self._scratch.receiving[there : there + room]

    def received(self, nbytes: int) -> memoryview:
        """So many bytes were written there. Returns a view of all bytes that wait; then call `keep`."""
        self._came = nbytes
        if self._has_room:
            self._end += nbytes
            return self.view
        return self._scratch.receiving[: len(self) + nbytes]

    def keep(self, rest: memoryview) -> None:
        """The bytes that `received` or `view` returned were taken, except so many at the end."""
        if rest and rest.obj is self._memory.obj:
            self._start = self._end - len(rest)
            return
        end = len(self) + self._came
        if self._lent:
            self._lent = False
            self._scratch.give_back(self._memory)
        self._memory, self._start, self._end = _NOTHING, 0, 0
        if not rest:
            return
        slow = len(rest) > 2 * self._came
        if len(rest) >= _LENT_BYTES and not slow and (lent := self._scratch.lend_receiving(self)) is not None:
            self._memory, self._start, self._end, self._lent = lent, end - len(rest), end, True
        else:
            memory = bytearray(len(rest) + (RECORD_BYTES if slow else 0))
            memory[: len(rest)] = rest
            self._memory, self._start, self._end = memoryview(memory), 0, len(rest)


class Layer(Protocol):
    """The state of both directions of one connection.

    Receiving is one step in two calls, with nothing in between: `receive_buffer`, then `received`.
    """

    @property
    def pause_bytes(self) -> int:
        """The socket is not read while so many bytes wait for a reader. This is more than any record."""

    @property
    def pending(self) -> int:
        """How many received bytes wait for a reader."""

    def receive_buffer(self, target: memoryview) -> memoryview:
        """Memory for the socket's next bytes, not empty. `target`: the buffer that a reader waits for."""

    def received(self, nbytes: int, target: memoryview) -> int:
        """So many bytes were written there. Returns how many bytes of `target` are filled now, from its beginning.

        Raises:
            BrokenLayer: the other side cannot have sent these bytes.
        """

    def read(self, target: memoryview) -> int:
        """Fill `target` from the waiting bytes, as far as they go. Returns the number of bytes.

        Raises:
            BrokenLayer: the other side cannot have sent the waiting bytes.
        """

    def protect(self, bunch: Sequence[memoryview]) -> Sequence[Buffer]:
        """The bytes to send for these few buffers, at most `BUNCH_BYTES` in all. Only valid until the next call.

        Raises:
            BrokenLayer: the layer cannot go on.
        """
