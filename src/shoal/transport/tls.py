"""TLS 1.3 as the first layer of a connection: for the handshake, and for the proofs of identity inside it."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import cast

from shoal.transport.base import Buffer
from shoal.transport.layers import BrokenLayer, Scratch

__all__ = ["TlsLayer"]

_RECEIVE_BYTES = 64 << 10  # a stranger's handshake and proof need less


class TlsLayer:
    """An `ssl.SSLObject` between two memory BIOs.

    Args:
        context: TLS settings of this side.
        server_side: this side accepted the connection.
        scratch: shared memory.
    """

    pause_bytes = 2 * _RECEIVE_BYTES

    def __init__(self, context: ssl.SSLContext, *, server_side: bool, scratch: Scratch) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._scratch = scratch

    @property
    def pending(self) -> int:
        return self._incoming.pending + self._tls.pending()

    def handshake(self) -> bool:
        """Go on with the handshake; True when it is done, False when more bytes have to come first.

        Send the bytes of `to_send` after each call.

        Raises:
            BrokenLayer: the other side does not speak TLS 1.3.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise BrokenLayer(f"TLS handshake failed: {error}") from error
        return True

    @property
    def certificate(self) -> bytes:
        """The server's certificate as the client sees it, DER; empty on the server's side, which knows its own."""
        return self._tls.getpeercert(binary_form=True) or b""

    def to_send(self) -> bytes:
        """The bytes that TLS itself has to send."""
        return self._outgoing.read()

    def unread(self) -> bytes:
        """The bytes behind the last TLS record that was read: OpenSSL takes at most one record from its BIO."""
        return self._incoming.read()

    def receive_buffer(self, target: memoryview) -> memoryview:
        return self._scratch.receiving[:_RECEIVE_BYTES]

    def received(self, nbytes: int, target: memoryview) -> int:
        self._incoming.write(self._scratch.receiving[:nbytes])
        return self.read(target)

    def read(self, target: memoryview) -> int:
        filled = 0
        try:
            while filled < len(target):
                count = cast(int, self._tls.read(len(target) - filled, target[filled:]))  # typeshed: bytes
                if not count:
                    raise BrokenLayer("TLS was ended")
                filled += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise BrokenLayer(f"TLS failed: {error}") from error
        return filled

    def protect(self, bunch: Sequence[memoryview]) -> Sequence[Buffer]:
        try:
            for data in bunch:
                while data:
                    data = data[self._tls.write(data) :]
        except ssl.SSLError as error:
            raise BrokenLayer(f"TLS failed: {error}") from error
        return (self._outgoing.read(),)
