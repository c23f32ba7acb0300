"""One connection: a pipe of bytes over TLS 1.3, on an asyncio socket transport.

Why not asyncio's own TLS (`asyncio.sslproto`, as it is in Python 3.11 to 3.13)? When the TCP stream ends while received
data waits for a slow reader, it decrypts one more buffer and drops the rest: of 300 KiB sent by a peer that then ended,
45 KiB were lost. It also keeps a receive buffer of 256 KiB per connection, silent strangers included. (In speed the two
are equal.) So the TLS object is driven here, through two memory BIOs, by one `BufferedProtocol`:

- *In.* Ciphertext is received into one buffer that all connections of a transport share (the event loop fills it and
  calls `buffer_updated` in one go), goes to the BIO, and is decrypted straight into the buffer that the reader gave to
  `readinto`. Without a reader it stays in the BIO as ciphertext, and from `PAUSE_BYTES` on the socket is not read.
- *Out.* Plaintext is encrypted at most `CHUNK_BYTES` at a time, with a turn of the loop between chunks. OpenSSL copies
  all of it into the BIO before `SSLObject.write` returns, and the socket transport sends or keeps that ciphertext, so
  no reference to a caller's buffer is left when `write` returns. (`SSLProtocol` gives the same once its handshake is
  done; before, its `_write_backlog` keeps the caller's buffers themselves.)
- *End.* `close` flushes, sends TLS close_notify and TCP FIN, then reads and throws away until the other side's FIN: a
  socket closed with unread bytes would send RST, which destroys what the other side has not read yet. A FIN ends the
  pipe in both directions; the side that sees it first drops its socket, but what it had received stays readable.

Invariant: a message is never followed by anything but its own rest. A `write` cancelled between two of its chunks, and
a `readinto` cancelled while it waits, abort the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator, Sequence
from typing import cast

from shoal.errors import LocalError, PeerUnreachable
from shoal.peer import PeerID
from shoal.transport.base import Buffer

__all__ = ["CHUNK_BYTES", "CLOSE_S", "PAUSE_BYTES", "QUEUE_BYTES", "TlsConnection"]

CHUNK_BYTES = 128 << 10
"""At most this much is encrypted in one turn of the loop (about 0.1 ms); more only cools the CPU's caches."""

QUEUE_BYTES = 1 << 20
"""A writer waits while more ciphertext than this is queued here (the kernel queues a few MiB more). A quarter of what
`HIGH_WATER_BYTES` allows moves as much on every link: the kernel's buffer is what covers the round-trip time."""

PAUSE_BYTES = 256 << 10
"""The socket is not read while this much received ciphertext waits for a reader."""

CLOSE_S = 5.0
"""Longest time that `close` sends what is queued, and that the other side's FIN is waited for after it."""

_RECORD_BYTES = 16 << 10


class TlsConnection(asyncio.BufferedProtocol):
    """A pipe to one peer (`shoal.transport.base.Connection`), and the asyncio protocol that drives it.

    Args:
        context: TLS settings of this side.
        dialed: this side dialed.
        scratch: receive buffer; may be shared by all connections of one loop.
        alive: holds this connection from when it gets its socket until the socket is gone.
    """

    def __init__(
        self, context: ssl.SSLContext, *, dialed: bool, scratch: memoryview, alive: set[TlsConnection]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not dialed)
        self._dialed, self._scratch, self._alive = dialed, scratch, alive
        self._transport: asyncio.Transport | None = None
        self._peer_id: PeerID | None = None
        self._protocol_version = 0
        self._bytes_sent = self._bytes_received = 0
        self._end_reason: str | None = None
        self._discarding = False
        self._closing = False
        self._lost = self._loop.create_future()
        # reading
        self._target: memoryview | None = None
        self._filled = 0
        self._reader: asyncio.Future[None] | None = None
        self._reading_paused = False
        # writing
        self._write_lock = asyncio.Lock()
        self._writing_paused = False
        self._drained: asyncio.Future[None] | None = None
        self._linger: asyncio.TimerHandle | None = None

    # What `Connection` asks for

    @property
    def peer_id(self) -> PeerID:
        if self._peer_id is None:
            raise LocalError("this connection is not authenticated yet")
        return self._peer_id

    @property
    def proved_peer_id(self) -> PeerID | None:
        """Who is on the other side, or None before it has proved it."""
        return self._peer_id

    @property
    def protocol_version(self) -> int:
        """The version of shoal's protocol that both sides agreed on; 0 before that."""
        return self._protocol_version

    @property
    def dialed(self) -> bool:
        return self._dialed

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._bytes_received + (self._filled if self._target is not None else 0)

    @property
    def closed(self) -> bool:
        return self._closing or self._end_reason is not None

    async def write(self, *buffers: Buffer) -> None:
        """Send the buffers one after another; wait while more than `QUEUE_BYTES` is queued.

        When it returns, the buffers may be reused. Writers take turns in the order of their calls. Cancelled before its
        first byte was taken it has no effect; cancelled after its last one it was sent; in between the pipe is aborted.

        """
        async with self._write_lock:
            await self._wait_drained()
            if self._closing:
                raise self._unreachable()
            chunks = _cut(buffers)
            chunk = next(chunks, None)
            while chunk is not None:
                self._encrypt(chunk)
                chunk = next(chunks, None)
                if chunk is not None:
                    await self._between_chunks()
            await self._wait_drained()

    async def readinto(self, buffer: bytearray | memoryview) -> None:
        """Fill all of `buffer` (writable, contiguous) with the next bytes. One reader at a time.

        Cancelled while it waits it aborts the pipe: nobody could tell which bytes come next.
        """
        if self._reader is not None:
            raise LocalError("another readinto() waits on this connection: one reader at a time")
        view = memoryview(buffer).cast("B")
        self._target, self._filled = view, 0
        try:
            self._decrypt()
            if self._incoming.pending < PAUSE_BYTES:
                self._resume_reading()
            if self._filled < len(view):
                await self._wait_readable()
        finally:
            self._target = None
            self._bytes_received += self._filled

    async def close(self) -> None:
        """Send what is queued (for `CLOSE_S` at most), then end the pipe. Safe to call twice."""
        if self.closed:
            return
        self._closing = True
        try:
            async with asyncio.timeout(CLOSE_S), self._write_lock:
                self._discard()
                with contextlib.suppress(ssl.SSLError):  # "want read": the other side's close_notify is not here yet
                    self._tls.unwrap()
                self._flush()
                if self._transport is not None:
                    self._transport.set_write_buffer_limits(0)
                await self._wait_drained()
                self._end("closed by this side")
                self._half_close()
        except (TimeoutError, PeerUnreachable):
            self.abort()
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self, reason: str = "aborted by this side") -> None:
        """End the pipe at once; what is queued is lost. Safe to call twice.

        Args:
            reason: what waiting readers and writers are told.
        """
        self._discard()
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    # For the code that makes connections

    async def start_tls(self) -> bytes:
        """Do the TLS handshake.

        Returns:
            The server's certificate as this side sees it, DER; empty on the server's side, which knows its own.

        Raises:
            PeerUnreachable: the other side does not speak TLS 1.3, or is gone.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                await self._wait_readable()
            except ssl.SSLError as error:
                self._flush()  # TLS tells the other side why
                self.abort(f"TLS handshake failed: {error}")
                raise self._unreachable() from error
            else:
                self._flush()
                return self._tls.getpeercert(binary_form=True) or b""

    def authenticated(self, peer_id: PeerID, protocol_version: int) -> None:
        """Set who the other side has proved to be."""
        self._peer_id, self._protocol_version = peer_id, protocol_version

    def start_counting(self) -> None:
        """Forget what the proofs of identity took."""
        self._bytes_sent = self._bytes_received = 0

    async def wait_lost(self) -> None:
        """Wait until the socket is gone."""
        await asyncio.shield(self._lost)

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(QUEUE_BYTES)
        self._alive.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._discarding:
            return
        self._incoming.write(self._scratch[:nbytes])
        if self._target is not None:
            self._decrypt()
        elif self._reader is not None:
            _wake(self._reader)
        if self._incoming.pending >= PAUSE_BYTES and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._end("closed by the other side")
        if self._transport is not None:
            self._transport.abort()  # nobody reads what we still have queued; all that was sent to us is here

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
        return PeerUnreachable(self._end_reason or "closed by this side", self._peer_id)

    def _end(self, reason: str) -> None:
        """No byte can be written any more; a waiting reader or writer fails."""
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
        there = self._incoming.pending > 0 if self._target is None else self._filled == len(self._target)
        if self._discarding or (self._end_reason is not None and not there):
            raise self._unreachable()

    def _decrypt(self) -> None:
        """Move what is there into the target; wake the reader when it is full or no more will come."""
        target = self._target
        if target is None or self._discarding:
            return
        size, filled = len(target), self._filled
        try:
            while filled < size:
                count = cast(int, self._tls.read(size - filled, target[filled:]))  # typeshed: bytes
                if not count:
                    self._end("closed by the other side")
                    break
                filled += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.abort(f"TLS failed: {error}")
        finally:
            self._filled = filled
        if self._outgoing.pending:  # an answer of TLS itself, as to a key update
            self._flush()
        if filled == size:
            _wake(self._reader)

    def _encrypt(self, chunk: Sequence[Buffer]) -> None:
        try:
            for buffer in chunk:
                view = memoryview(buffer)
                while view:
                    view = view[self._tls.write(view) :]
                self._bytes_sent += len(buffer)
        except ssl.SSLError as error:
            self.abort(f"TLS failed: {error}")
            raise self._unreachable() from error
        self._flush()

    def _flush(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and (data := self._outgoing.read()):
            self._transport.write(memoryview(data))  # a view: asyncio slices what the socket did not take at once

    async def _between_chunks(self) -> None:
        try:
            await asyncio.sleep(0)
            await self._wait_drained()
        except asyncio.CancelledError:
            self.abort("a write was cancelled")
            raise

    async def _wait_drained(self) -> None:
        while self._writing_paused and self._end_reason is None:
            self._drained = self._loop.create_future()
            try:
                await self._drained
            finally:
                self._drained = None
        if self._end_reason is not None:
            raise self._unreachable()

    def _discard(self) -> None:
        """From now on throw away what comes in, read or not."""
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


def _cut(buffers: Sequence[Buffer]) -> Iterator[Sequence[Buffer]]:
    """Group and cut buffers into chunks of at most `CHUNK_BYTES`; a few small ones become one TLS record."""
    views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
    if len(views) > 1 and sum(map(len, views)) <= _RECORD_BYTES:
        views = [memoryview(b"".join(views))]
    chunk: list[memoryview] = []
    room = CHUNK_BYTES
    for view in views:
        offset = 0
        while offset < len(view):
            piece = view[offset : offset + room]
            chunk.append(piece)
            offset += len(piece)
            room -= len(piece)
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk
