"""A stream: typed messages with raw payloads, both ways, in order, on a connection of its own.

Because a stream has its connection to itself, a reader that does not read slows its own writer and nobody else, and a
payload is received straight into the buffer that it is meant for. When both sides have said END the connection goes
back to the pool for the next stream; a stream that ends in any other way takes its connection with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from shoal.base.peer import PeerID
from shoal.errors import LocalError, PeerError, PeerProtocolError, PeerRefused, PeerUnreachable
from shoal.protocol.wire import Failure, Message, decode
from shoal.rpc.framing import Frame, Kind, Limits, pack, payload_size, read_frame
from shoal.transport.base import Buffer, Connection

__all__ = ["Stream"]

_FAREWELL_S = 5.0
"""`fail` waits so long for a peer that does not read."""

Sent = TypeVar("Sent", bound=Message)
Received = TypeVar("Received", bound=Message)


class Stream(Generic[Sent, Received]):
    """One end of a stream. Made by `Endpoint.open`, or handed to a stream handler.

    Args:
        connection: the connection, used by nobody else.
        received_type: the message type (or union) that the other side sends.
        limits: bounds on what is read.
        on_release: called once, with True if the connection can carry another stream.
    """

    def __init__(
        self, connection: Connection, received_type: type[Received], limits: Limits, on_release: Callable[[bool], None]
    ) -> None:
        self._connection = connection
        self._received_type = received_type
        self._limits = limits
        self._on_release = on_release
        self._ahead: asyncio.Task[Frame] | None = None
        self._unread = 0
        self._sent_end = False
        self._got_end = False
        self._released = False

    @property
    def peer_id(self) -> PeerID:
        """The peer on the other side."""
        return self._connection.peer_id

    @property
    def bytes_received(self) -> int:
        """Bytes that arrived on the connection so far: it grows while a large payload trickles in."""
        return self._connection.bytes_received

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the connection so far."""
        return self._connection.bytes_sent

    @property
    def bytes_acked(self) -> int:
        """Bytes that the other machine has taken so far; 0 if this cannot be known."""
        return self._connection.bytes_acked

    @property
    def bytes_moved(self) -> int:
        """Bytes that came, that were handed to the connection, or that the other machine took: progress of any kind."""
        return self.bytes_received + self.bytes_sent + self.bytes_acked

    @property
    def closed(self) -> bool:
        """True once the stream was finished, aborted or lost."""
        return self._released or self._connection.closed

    async def send(self, message: Sent, payload: Buffer | None = None) -> None:
        """Send a message, and its payload if it has one. When this returns, the payload's buffer may be reused.

        Raises:
            PeerUnreachable: the stream is lost, or was aborted by the other side; `recv` may know why.
            LocalError: `end` was called before, or the message or the payload is too long.
        """
        if self._sent_end:
            raise LocalError("send() after end(): nothing can follow END on a stream")
        nbytes = payload_size(payload)
        if nbytes > self._limits.payload_bytes:
            raise LocalError(f"payload of {nbytes} bytes, a frame holds {self._limits.payload_bytes}: cut it")
        head = pack(Kind.DATA, message, nbytes, limits=self._limits)
        if payload is None:
            await self._connection.write(head)
        else:
            await self._connection.write(head, payload)

    async def ready(self) -> None:
        """Wait until `recv` would not wait: a message, the end, or the loss of the stream is there.

        This takes nothing and may be cancelled at any time, so a watcher can hand the stream over to another reader.
        """
        if self._got_end or self._unread:
            return
        if self._ahead is None:
            self._ahead = asyncio.get_running_loop().create_task(read_frame(self._connection, self._limits))
            self._ahead.add_done_callback(_retrieve)
        if not self._ahead.done():
            await asyncio.wait((self._ahead,))

    async def _next_frame(self) -> Frame:
        if self._ahead is None:
            return await read_frame(self._connection, self._limits)
        await self.ready()
        ahead, self._ahead = self._ahead, None
        try:
            return ahead.result()
        finally:
            del ahead  # it holds its exception, whose traceback holds this frame

    async def recv(self) -> tuple[Received, int] | None:
        """The next message and the size of its payload in bytes; None at END. Read the payload with `readinto` first.

        Raises:
            PeerUnreachable: the stream is lost.
            PeerRefused: the other side gave the stream up and said why.
            PeerProtocolError: the other side sent something that is no message of the stream.
        """
        if self._unread:
            raise LocalError(f"recv() before the payload of {self._unread} bytes was read")
        if self._got_end:
            return None
        try:
            frame = await self._next_frame()
            if frame.kind is Kind.DATA:
                message = decode(frame.header, self._received_type)
                self._unread = frame.payload_bytes
                return message, frame.payload_bytes
            if frame.kind is Kind.FAULT:
                failure = decode(frame.header, Failure)
                self.abort()
                raise PeerRefused(failure.text or failure.code, self.peer_id, code=failure.code)
            if frame.kind is not Kind.END:
                raise PeerProtocolError(f"{frame.kind.name} frame within a stream", self.peer_id)
        except msgspec.MsgspecError as error:
            self.abort()
            raise PeerProtocolError(f"undecodable message on a stream: {error}", self.peer_id) from error
        except PeerError:
            self.abort()
            raise
        self._got_end = True
        self._maybe_release()
        return None

    async def readinto(self, buffer: bytearray | memoryview) -> None:
        """Fill `buffer` with the next bytes of the payload that `recv` announced, all of it or piece by piece.

        Raises:
            PeerUnreachable: the stream is lost.
            LocalError: the payload has fewer bytes left.
        """
        nbytes = payload_size(buffer)
        if nbytes > self._unread:
            raise LocalError(f"buffer of {nbytes} bytes, but only {self._unread} of the payload are left")
        if not nbytes:
            return
        try:
            await self._connection.readinto(buffer)
        except PeerError:
            self.abort()
            raise
        self._unread -= nbytes

    async def end(self) -> None:
        """Say that nothing more will be sent. Receiving goes on. Safe to call twice."""
        if not self._sent_end:
            self._sent_end = True
            await self._connection.write(pack(Kind.END))
            self._maybe_release()

    async def finish(self) -> None:
        """End in order: say END and wait for the other side's. Any message before that breaks the protocol."""
        if self._unread:
            raise LocalError(f"finish() before the payload of {self._unread} bytes was read")
        await self.end()
        if await self.recv() is not None:
            self.abort()
            raise PeerProtocolError("a message came where the stream should have ended", self.peer_id)

    async def fail(self, code: str, text: str) -> None:
        """Give the stream up and tell the other side why (best effort), then drop the connection."""
        try:
            if not self.closed:
                async with asyncio.timeout(_FAREWELL_S):
                    await self._connection.write(pack(Kind.FAULT, Failure(0, code, text[:1000])))
                    await self._connection.close()
        except (PeerUnreachable, TimeoutError):
            pass  # the other side need not be told any more, or does not listen
        self.abort()

    def abort(self) -> None:
        """Give the stream up at once; both sides lose the connection. Does nothing after a clean end."""
        if not self._released:
            self._released = True
            self._connection.abort()
            self._on_release(False)

    def _maybe_release(self) -> None:
        if self._sent_end and self._got_end and not self._released:
            self._released = True
            self._on_release(not self._connection.closed)


def _retrieve(task: asyncio.Task[Frame]) -> None:
    """Take the exception of a read that nobody waits for any more: it is no failure."""
    if not task.cancelled():
        task.exception()
