"""What lies between the bytes of a connection's user and the bytes on its socket.

A connection begins with TLS, inside which both sides prove who they are and give each other keys (`handshake`). Then
its data goes sealed under those keys, or in the clear where both sides asked for that. Here is what a layer is; `tls`,
`sealed` and `clear` are the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.transport.base import Buffer

__all__ = ["BUNCH_BYTES", "RECORD_BYTES", "BrokenLayer", "Layer", "Scratch"]

RECORD_BYTES = 128 << 10
"""The longest record's plaintext. Longer ones cost fewer calls, and cool the processor's caches."""

BUNCH_BYTES = 512 << 10
"""At most this much is written in one turn of the loop: about 0.3 ms."""

_RECEIVE_BYTES = 512 << 10


class BrokenLayer(Exception):
    """What came cannot be what the other side sent: the connection has to end."""


class Scratch:
    """Memory that all connections of one loop share: nothing stays in it when a callback of the loop returns.

    Attributes:
        receiving: where the socket's bytes come to.
        sending: where what goes to the socket is made.
    """

    def __init__(self) -> None:
        self.receiving = memoryview(bytearray(_RECEIVE_BYTES))
        self.sending = memoryview(bytearray(BUNCH_BYTES + 1024))

    def lend_sending(self) -> None:
        """The socket's transport may have kept a view of `sending`: it keeps that memory, and others get another."""
        self.sending = memoryview(bytearray(len(self.sending)))


class Layer(Protocol):
    """The state of both directions of one connection.

    Receiving is one step in two calls, with nothing in between: `receive_buffer`, then `received`.
    """

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
