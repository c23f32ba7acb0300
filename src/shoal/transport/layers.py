"""What lies between the bytes of a connection's user and the bytes on its socket.

A connection begins with TLS, inside which both sides prove who they are and give each other keys (`handshake`). Then
its data goes sealed under those keys, or in the clear where both sides asked for that. Here is what a layer is; `tls`,
`sealed` and `clear` are the three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import ref

from shoal.transport.base import Buffer

__all__ = ["BUNCH_BYTES", "RECORD_BYTES", "BrokenLayer", "Held", "Layer", "Scratch"]

RECORD_BYTES = 512 << 10
"""The longest record's plaintext. Each one costs a call, and a moment in which another thread can take the interpreter:
then its lock is had back only after `sys.getswitchinterval()`."""

BUNCH_BYTES = (1 << 20) + (16 << 10)
"""At most this much is written in one turn of the loop, about 0.7 ms: a part of the usual size with its header."""

_AHEAD_BYTES = 64 << 10
_RECEIVE_BYTES = BUNCH_BYTES + _AHEAD_BYTES + 2 * RECORD_BYTES
"""What the other side writes in one turn fits, with its tags and with what was read ahead of it; and there is room for
the rest of a record behind its beginning, which came last, so that it seldom has to be moved."""

_LENT_ROOM = RECORD_BYTES + 1024
"""Where less is left, the rest of a record might not fit."""

_LENT_BYTES = 32 << 10
"""Less is copied, in no time, rather than that memory is lent for it."""

_NOTHING = memoryview(b"")


def _nobody() -> None:
    """Memory that is not lent."""


class BrokenLayer(Exception):
    """What came cannot be what the other side sent: the connection has to end."""


class Scratch:
    """Memory that all connections of one loop share: nothing stays in it when a callback of the loop returns.

    It is lent to one connection at a time, beside which there is another of 2 MiB: enough where one has the loop to
    itself, as in a state download. In rounds more of them made no difference that could be measured.

    Attributes:
        receiving: where the socket's bytes come to.
        sending: where what goes to the socket is made.
    """

    def __init__(self) -> None:
        self.receiving = memoryview(bytearray(_RECEIVE_BYTES))
        self.sending = memoryview(bytearray(BUNCH_BYTES + 1024))
        self._spare: memoryview | None = None
        self._lent_to: Callable[[], Held | None] = _nobody

    def lend_sending(self) -> None:
        """The socket's transport may have kept a view of `sending`: it keeps that memory, and others get another."""
        self.sending = memoryview(bytearray(len(self.sending)))

    def lend_receiving(self, held: Held) -> memoryview | None:
        """Leave the memory of `receiving` to whom its bytes are for; others get another. None if somebody has one."""
        if self._lent_to() is not None:
            return None
        self._lent_to = ref(held)  # who is gone has none any more
        lent, self.receiving = self.receiving, self._spare or memoryview(bytearray(_RECEIVE_BYTES))
        self._spare = None
        return lent

    def give_back(self, lent: memoryview) -> None:
        """It is needed no more."""
        self._lent_to, self._spare = _nobody, lent


class Held:
    """Received bytes that wait, for a reader or for the rest of their record.

    Many stay where they came, and that memory is lent to them: most of the next ones come right behind. A few are
    copied to memory of their own size, and go in front of what comes next, in the shared memory. Where little comes at
    a time that would copy every byte many times: then they get memory with room, and the next ones come into that. So
    no byte is copied more than a few times, and a connection on which nothing waits has no memory.

    Args:
        scratch: shared memory.
        received: what has come already.
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
        """All that waits, until the next call."""
        return self._memory[self._start : self._end]

    @property
    def _has_room(self) -> bool:
        return len(self._memory) - self._end >= (_LENT_ROOM if self._lent else 1)

    def receive_buffer(self, wanted: int) -> memoryview:
        """Where the socket's next bytes may be written, not empty; `wanted`: how many a reader waits for.

        There is room for little more than those: what comes behind them has to be kept.
        """
        room = min(wanted, BUNCH_BYTES) + _AHEAD_BYTES
        if self._has_room:
            return self._memory[self._end : self._end + room]
        there = len(self)
        self._scratch.receiving[:there] = self.view
        return self._scratch.receiving[there : there + room]

    def received(self, nbytes: int) -> memoryview:
        """So many were written there. Returns a view of all that waits; `keep` says how much of it still does."""
        self._came = nbytes
        if self._has_room:
            self._end += nbytes
            return self.view
        return self._scratch.receiving[: len(self) + nbytes]

    def keep(self, rest: memoryview) -> None:
        """All but this end of what `received` or `view` returned was taken."""
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
        """The socket is not read while this much waits for a reader. More than any record."""
        ...

    @property
    def pending(self) -> int:
        """How many received bytes wait for a reader."""
        ...

    def receive_buffer(self, target: memoryview) -> memoryview:
        """Where the socket's next bytes may be written, not empty. `target`: what the reader still waits for."""
        ...

    def received(self, nbytes: int, target: memoryview) -> int:
        """So many bytes were written there. Returns how many bytes of `target` are filled now, from its beginning.

        Raises:
            BrokenLayer: they cannot have been sent like this.
        """
        ...

    def read(self, target: memoryview) -> int:
        """Fill `target` from what waits, as far as that goes. Returns how many bytes.

        Raises:
            BrokenLayer: what waits cannot have been sent like this.
        """
        ...

    def protect(self, bunch: Sequence[memoryview]) -> Sequence[Buffer]:
        """What to send for these few buffers, at most `BUNCH_BYTES` in all. Only good until the next call.

        Raises:
            BrokenLayer: the layer cannot go on.
        """
        ...
