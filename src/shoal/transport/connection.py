"""One connection: a pipe of bytes on an asyncio socket transport, through the layers of `shoal.transport.layers`.

Why not asyncio's own TLS (`asyncio.sslproto`, as it is in Python 3.11 to 3.13)? When the TCP stream ends while received
data waits for a slow reader, it decrypts one more buffer and drops the rest: of 300 KiB sent by a peer that then ended,
45 KiB were lost. It also keeps a receive buffer of 256 KiB per connection, silent strangers included. So the layers are
driven here, by one `BufferedProtocol`:

- *In.* Bytes are received into one buffer that all connections of a transport share (the event loop fills it and calls
  `buffer_updated` in one go), and are decrypted straight into the buffer that the reader gave to `readinto`. Without a
  reader they stay as they came, and from the layer's `pause_bytes` on the socket is not read.
- *Out.* At most `BUNCH_BYTES` are encrypted and sent at a time, once the socket took the bytes before them and the line
  (`uplink`) admits them; then the loop has a turn, even if the socket takes all of one piece after another. Bytes that
  the socket did not take are kept, but no reference to a caller's buffer is left when `write` returns.
- *End.* `close` sends the queued bytes, then TCP FIN, then reads and throws away bytes until the other side's FIN. A
  socket closed with unread bytes would send RST, which destroys bytes that the other side has not read yet. A FIN ends
  the pipe in both directions; the side that sees it first drops its socket, but the bytes that it had received stay
  readable. Nobody signs a FIN: the protocols above say themselves that they are complete (END, Bye).

Invariant: a message is never followed by anything but its own rest. A `write` cancelled between two of its pieces, and
a `readinto` cancelled while it waits, abort the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from collections.abc import Iterator, Sequence
from typing import cast

from shoal.base.peer import PeerID
from shoal.errors import LocalError, PeerUnreachable
from shoal.transport.base import Buffer
from shoal.transport.clear import ClearLayer
from shoal.transport.layers import BUNCH_BYTES, BrokenLayer, Layer, Scratch
from shoal.transport.pacing import Flow
from shoal.transport.sealed import SealedLayer
from shoal.transport.sockets import acked_bytes, flow, pace, packet_bytes
from shoal.transport.tls import TlsLayer
from shoal.transport.uplink import Uplink
from shoal.transport.upload_limit import SMALL_BYTES

__all__ = ["CLOSE_S", "TcpConnection"]

CLOSE_S = 5.0
"""The longest time in which `close` sends queued bytes, and again the longest wait for the other side's FIN."""

_JOINED_BYTES = 16 << 10
_TRANSPORT_KEEPS_VIEWS = sys.version_info >= (3, 12)
"""From Python 3.12 on, asyncio keeps a view of bytes that the socket did not take at once; before, it copied them."""

_NOTHING = memoryview(b"")


class TcpConnection(asyncio.BufferedProtocol):
    """A pipe to one peer (`shoal.transport.base.Connection`), and the asyncio protocol that drives it.

    Args:
        context: TLS settings of this side.
        dialed: whether this side dialed.
        scratch: memory shared by all connections of one loop.
        uplink: the line that all connections of one peer share.
        alive: holds this connection from when it gets its socket until the socket is gone.

    Attributes:
        proved_peer_id: the peer on the other side; None before it has proved its identity.
        protocol_version: the version of the protocol that both sides agreed on; 0 before that.
    """

    def __init__(
        self, context: ssl.SSLContext, *, dialed: bool, scratch: Scratch, uplink: Uplink, alive: set[TcpConnection]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._tls: TlsLayer | None = TlsLayer(context, server_side=not dialed, scratch=scratch)
        self._layer: Layer = self._tls
        self.dialed, self._scratch, self._uplink, self._alive = dialed, scratch, uplink, alive
        self.bulk = False
        self.local_host = self.remote_host = ""
        self._transport: asyncio.Transport | None = None
        self.proved_peer_id: PeerID | None = None
        self.protocol_version = 0
        self.bytes_sent = self._bytes_received = 0
        self.opened_at = self._loop.time()
        self._end_reason: str | None = None
        self._discarding = False
        self._closing = False
        self._lost = self._loop.create_future()
        # reading
        self._target = _NOTHING  # the part of the buffer that the reader waits for
        self._reader: asyncio.Future[None] | None = None
        self._reading_paused = False
        # writing
        self._write_lock = asyncio.Lock()
        self._writing_paused = False
        self._in_this_turn = 0  # bytes sent since a writer last let others have the loop
        self._drained: asyncio.Future[None] | None = None
        self._linger: asyncio.TimerHandle | None = None

    # The interface of `Connection`

    @property
    def peer_id(self) -> PeerID:
        if self.proved_peer_id is None:
            raise LocalError("this connection is not authenticated yet")
        return self.proved_peer_id

    @property
    def bytes_received(self) -> int:
        # This includes bytes that wait for the rest of their record. On a slow line that takes long, but is no silence.
        return self._bytes_received + self._layer.pending

    @property
    def bytes_acked(self) -> int:
        return acked_bytes(self._transport.get_extra_info("socket")) if self._transport is not None else 0

    @property
    def closed(self) -> bool:
        return self._closing or self._end_reason is not None

    async def write(self, *buffers: Buffer) -> None:
        """Writers take turns in the order of their calls, and wait while the socket takes no more."""
        async with self._write_lock:
            if self._in_this_turn >= BUNCH_BYTES // 2:  # a reader that keeps up would let nobody else have the loop
                self._in_this_turn = 0
                await asyncio.sleep(0)
            await self._wait_drained()
            if self._closing:
                raise self._unreachable()
            # An empty buffer of several dimensions cannot be cast.
            views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
            nbytes = sum(map(len, views))
            bulk = self.bulk or nbytes > SMALL_BYTES
            for number, bunch in enumerate(_bunches(views, nbytes, self._uplink.piece_bytes(BUNCH_BYTES))):
                if number:
                    await self._next_turn()
                await self._admit(bunch, bulk=bulk, begun=number > 0)
                self._send(bunch)
            await self._wait_drained()

    async def _admit(self, bunch: Sequence[memoryview], *, bulk: bool, begun: bool) -> None:
        """Wait until the line may take these bytes."""
        try:
            await self._uplink.admit(sum(map(len, bunch)), bulk=bulk)
        except asyncio.CancelledError:
            if begun:
                self.abort("a write was cancelled")
            raise
        if self.closed and not (self._closing and begun):  # `close` lets a message that has begun go on
            raise self._unreachable()

    async def readinto(self, buffer: bytearray | memoryview) -> None:
        if self._reader is not None:
            raise LocalError("another readinto() waits on this connection: one reader at a time")
        self._target = memoryview(buffer).cast("B")
        try:
            if self._layer.pending:
                self._filled(self._layer.read(self._target))
                if self._reading_paused and self._layer.pending < self._layer.pause_bytes:
                    self._resume_reading()
            if self._target:
                await self._wait_readable()
        except BrokenLayer as error:
            self.abort(str(error))
            raise self._unreachable() from error
        finally:
            self._target = _NOTHING

    async def close(self) -> None:
        if self.closed:
            return
        self._closing = True
        try:
            async with asyncio.timeout(CLOSE_S), self._write_lock:
                self._discard()
                await self._wait_drained()
                self._end("closed by this side")
                self._half_close()
        except (TimeoutError, PeerUnreachable):
            self.abort()
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self, reason: str = "aborted by this side") -> None:
        """End the pipe at once; queued bytes are lost. Safe to call twice.

        Args:
            reason: the text of the error that waiting readers and writers get.
        """
        self._discard()
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    # For the line

    def flow(self) -> Flow | None:
        return flow(self._transport.get_extra_info("socket")) if self._transport is not None else None

    def pace(self, bytes_per_s: float) -> None:
        if self._transport is not None:
            pace(self._transport.get_extra_info("socket"), bytes_per_s)

    def packet_bytes(self) -> int:
        return packet_bytes(self._transport.get_extra_info("socket")) if self._transport is not None else 0

    # For the code that makes connections

    async def start_tls(self) -> bytes:
        """Do the TLS handshake.

        Returns:
            The server's certificate as this side sees it, DER; empty on the server's side, which knows its own.

        Raises:
            PeerUnreachable: the other side does not speak TLS 1.3, or is gone.
        """
        tls = self._in_tls()
        try:
            while not tls.handshake():
                self._flush(tls.to_send())
                await self._wait_readable()
        except BrokenLayer as error:
            self._flush(tls.to_send())  # TLS tells the other side why
            self.abort(str(error))
            raise self._unreachable() from error
        self._flush(tls.to_send())
        return tls.certificate

    def authenticated(self, peer_id: PeerID, protocol_version: int) -> None:
        """Set the identity that the other side has proved."""
        self.proved_peer_id, self.protocol_version = peer_id, protocol_version

    def seal(self, sending_key: bytes, receiving_key: bytes) -> None:
        """Leave TLS: from now on data is sealed with these keys. No read or write may be under way."""
        self._layer = SealedLayer(sending_key, receiving_key, self._scratch, self._in_tls().unread())
        self._tls = None

    def unseal(self) -> None:
        """Leave TLS: from now on data goes as it is."""
        self._layer = ClearLayer(self._scratch, self._in_tls().unread())
        self._tls = None

    def _in_tls(self) -> TlsLayer:
        assert self._tls is not None, "the handshake is over"
        return self._tls

    def start_counting(self) -> None:
        """Free the memory of the proofs of identity."""
        self.bytes_sent = self._bytes_received = 0

    async def wait_lost(self) -> None:
        """Wait until the socket is gone."""
        await asyncio.shield(self._lost)

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)
        self.local_host = _host(transport.get_extra_info("sockname"))
        self.remote_host = _host(transport.get_extra_info("peername"))
        self._alive.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch.receiving if self._discarding else self._layer.receive_buffer(self._target)

    def buffer_updated(self, nbytes: int) -> None:
        if self._discarding:
            return
        try:
            self._filled(self._layer.received(nbytes, self._target))
        except BrokenLayer as error:
            self.abort(str(error))
            return
        if self._reader is not None and not self._target:
            _wake(self._reader)
        if not self._reading_paused and self._layer.pending >= self._layer.pause_bytes and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._end("closed by the other side")
        if self._transport is not None:
            self._transport.abort()  # nobody reads our queued bytes; all bytes sent to us are here

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}" if exc is not None else "connection lost")
        if self._linger is not None:
            self._linger.cancel()
        self._transport = None
        self._alive.discard(self)
        _wake(self._lost)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        _wake(self._drained)

    def _unreachable(self) -> PeerUnreachable:
        return PeerUnreachable(self._end_reason or "closed by this side", self.proved_peer_id)

    def _end(self, reason: str) -> None:
        """End writing: no byte can be written any more, and a waiting reader or writer fails."""
        if self._end_reason is None:
            self._end_reason = reason
        _wake(self._reader)
        _wake(self._drained)

    async def _wait_readable(self) -> None:
        """Wait until the target is full (without a target: for any bytes). Raises `PeerUnreachable` at the end."""
        if self._end_reason is not None or self._discarding:
            raise self._unreachable()
        self._reader = self._loop.create_future()
        try:
            await self._reader
        except asyncio.CancelledError:
            self.abort("a read was cancelled")
            raise
        finally:
            self._reader = None
        if self._target or self._discarding or (self._end_reason is not None and not self._layer.pending):
            raise self._unreachable()

    def _filled(self, nbytes: int) -> None:
        """The reader got so many more bytes."""
        if nbytes:
            self._target = self._target[nbytes:]
            self._bytes_received += nbytes

    def _send(self, bunch: Sequence[memoryview]) -> None:
        try:
            for data in self._layer.protect(bunch):
                self._flush(data)
        except BrokenLayer as error:
            self.abort(str(error))
            raise self._unreachable() from error
        nbytes = sum(map(len, bunch))
        self.bytes_sent += nbytes
        self._in_this_turn += nbytes

    def _flush(self, data: Buffer) -> None:
        if self._transport is not None and not self._transport.is_closing() and data:
            self._transport.write(memoryview(data))  # a view: asyncio slices what the socket did not take at once
            if _TRANSPORT_KEEPS_VIEWS and self._transport.get_write_buffer_size():
                self._scratch.lend_sending()

    async def _next_turn(self) -> None:
        self._in_this_turn = 0
        try:
            await asyncio.sleep(0)
            await self._wait_drained()
        except asyncio.CancelledError:
            self.abort("a write was cancelled")
            raise

    async def _wait_drained(self) -> None:
        # A broken socket takes everything and sends nothing, until the loop calls `connection_lost` with the reason.
        while (self._writing_paused or self._broken()) and self._end_reason is None:
            self._in_this_turn = 0
            self._drained = self._loop.create_future()
            try:
                await self._drained
            finally:
                self._drained = None
        if self._end_reason is not None:
            raise self._unreachable()

    def _broken(self) -> bool:
        return self._transport is not None and self._transport.is_closing()

    def _discard(self) -> None:
        """From now on throw away all incoming bytes."""
        self._discarding = True
        _wake(self._reader)
        self._resume_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()

    def _half_close(self) -> None:
        if self._transport is not None:
            with contextlib.suppress(OSError):  # already reset: `connection_lost` is on its way
                self._transport.write_eof()
            self._linger = self._loop.call_later(CLOSE_S, self._transport.abort)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _bunches(views: Sequence[memoryview], nbytes: int, most: int) -> Iterator[Sequence[memoryview]]:
    """Cut and group so many bytes into bunches of at most `most`. A few small views become one."""
    if len(views) > 1 and nbytes <= _JOINED_BYTES:
        views = [memoryview(b"".join(views))]
    if 0 < nbytes <= most:
        yield views
        return
    bunch: list[memoryview] = []
    room = most
    for view in views:
        start = 0
        while start < len(view):
            piece = view[start : start + room]
            bunch.append(piece)
            start += len(piece)
            room -= len(piece)
            if not room:
                yield bunch
                bunch, room = [], most
    if bunch:
        yield bunch


def _host(sockaddr: object) -> str:
    """The IP address of a socket's end, without the scope of a link-local one; an IPv4 address within IPv6 as such."""
    host = str(sockaddr[0]).partition("%")[0] if isinstance(sockaddr, tuple) and sockaddr else ""
    return host.removeprefix("::ffff:") if "." in host else host
