"""The seam of a transport: a way to listen, to dial, and to get an authenticated pipe of bytes.

The seam is small on purpose. A `Connection` is a reliable, ordered pipe of bytes, both ways, to *one proven peer*.
Messages, calls and streams are built on it in `shoal.rpc`, once for all transports. A stream of tensor data has a
connection of its own, so flow control is the transport's own backpressure and bulk data never delays calls.

Rules that every transport keeps (held by one conformance suite, `tests/conformance`):

- `write` returns when its buffers may be reused and the queue is below the high-water mark.
- `readinto` fills the whole buffer or raises; bytes come in order, none twice, none lost.
- `close` delivers all written bytes, then ends the pipe: the other side reads it all, then gets `PeerUnreachable`.
- `abort` ends it at once, also for a writer or reader that waits; both sides notice.
- The other side's identity was proved before `dial` returned or the acceptor was called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.base.peer import Address, PeerID
from shoal.transport.uplink import Uplink

__all__ = [
    "HIGH_WATER_BYTES",
    "Acceptor",
    "Buffer",
    "Connection",
    "Network",
    "Pipe",
    "PipeAcceptor",
    "PipeUser",
    "Transport",
]

HIGH_WATER_BYTES = 4 << 20
"""A writer waits while more than this is queued, so that the memory of a connection is bounded."""

Buffer = bytes | bytearray | memoryview


class Connection(Protocol):
    """An authenticated, reliable, ordered pipe of bytes to one peer. Used from the loop thread only.

    Attributes:
        bulk: whether megabytes go on it, which leave room for all other connections. Its user sets this.
    """

    bulk: bool

    @property
    def peer_id(self) -> PeerID:
        """The peer on the other side (proved)."""

    @property
    def dialed(self) -> bool:
        """True if this side dialed, False if it accepted."""

    @property
    def local_host(self) -> str:
        """The address of this machine that the connection uses; empty if unknown."""

    @property
    def remote_host(self) -> str:
        """The address of the other machine, as seen from here; empty if unknown."""

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to `write` so far."""

    @property
    def bytes_received(self) -> int:
        """Bytes that came so far: those that `readinto` took, and perhaps those that wait for a reader."""

    @property
    def bytes_acked(self) -> int:
        """Bytes that the other machine has acknowledged, including those of the encryption; 0 if this is unknown.

        The other process may not have read them, and may stand still: its system takes bytes until its buffers are
        full.
        """

    @property
    def closed(self) -> bool:
        """True once no more bytes can be written."""

    async def write(self, *buffers: Buffer) -> None:
        """Send the buffers one after another; wait while more than `HIGH_WATER_BYTES` is queued.

        When this returns, the buffers may be reused. Two writes at once never mix their bytes. A write that is
        cancelled half-way ends the pipe, so that half a message is never followed by another. A write that is cancelled
        before its first byte does nothing.

        Raises:
            PeerUnreachable: the pipe is closed or broke.
        """

    async def readinto(self, buffer: bytearray | memoryview) -> None:
        """Fill all of `buffer` (writable, contiguous) with the next bytes. One reader at a time.

        If this is cancelled while it waits, the pipe ends: nobody could tell where in a message the next bytes belong.

        Raises:
            PeerUnreachable: the pipe ended or broke before the buffer was full.
            LocalError: another `readinto` is waiting.
        """

    async def close(self) -> None:
        """Send the queued bytes (for a few seconds at most), then end the pipe. Safe to call twice."""

    def abort(self) -> None:
        """End the pipe at once; queued bytes are lost. Safe to call twice."""


Acceptor = Callable[[Connection], None]
"""A function that is called in the loop, once for each authenticated incoming connection."""


class Transport(Protocol):
    """A way to reach peers, with one identity."""

    @property
    def peer_id(self) -> PeerID:
        """Our own identity."""

    @property
    def addresses(self) -> Sequence[Address]:
        """Where others can dial us; empty before `listen` and for a peer that only dials."""

    @property
    def uplink(self) -> Uplink:
        """Our line up: what it carries, and the limit on what is sent."""

    async def listen(self, acceptor: Acceptor) -> None:
        """Start to accept connections.

        Raises:
            ConfigError: the host or port cannot be listened on; the message names it.
            LocalError: it listens already.
            ClosedError: it is closed.
        """

    async def dial(self, peer_id: PeerID, addresses: Sequence[Address], *, timeout_s: float) -> Connection:
        """Connect to `peer_id` at the first of `addresses` that answers and proves to be it.

        Raises:
            PeerUnreachable: nobody answered at any address.
            PeerRefused: a peer answered, but with another identity or another protocol version, or it refused.
            PeerTimeout: no connection within `timeout_s`.
            ClosedError: this transport is closed, or was closed while it dialed.
        """

    async def close(self) -> None:
        """Stop listening and abort every connection. Safe to call twice."""


# ----------------------------------------------------------------------------------------- below an in-memory transport


class Pipe(Protocol):
    """One end of a reliable, ordered pipe between two hosts of a `Network`, without identity or a reader's buffer."""

    @property
    def hosts(self) -> tuple[str, str]:
        """The names of this host and of the other one."""

    @property
    def queued_bytes(self) -> int:
        """Bytes handed to `send` that have not left this host."""

    @property
    def acked_bytes(self) -> int:
        """Bytes that are known to have come to the other host, even while its process stands still."""

    def send(self, data: bytes) -> None:
        """Send these bytes. Never waits: the sender must watch `queued_bytes`."""

    def consumed(self, nbytes: int) -> None:
        """The user has taken so many of the received bytes: the other side may send as many more."""

    def finish(self) -> None:
        """Send the queued bytes, then end the pipe. `pipe_lost` is called here once all left, there once all came."""

    def abort(self, reason: str) -> None:
        """End the pipe at once. `pipe_lost` is called here now, and there as soon as the news comes."""


class PipeUser(Protocol):
    """The user of one end of a `Pipe`. The network calls these in the loop, one after another."""

    def pipe_opened(self, pipe: Pipe, greeting: bytes) -> None:
        """The pipe is open. `greeting` is the value that the other side gave to `open` or `listen`."""

    def data_received(self, data: bytes) -> None:
        """The next bytes came."""

    def resume_writing(self) -> None:
        """The queue has sunk to `HIGH_WATER_BYTES` or less."""

    def pipe_lost(self, reason: str) -> None:
        """The pipe has ended; nothing more comes or goes. Called once, after `pipe_opened`."""


PipeAcceptor = Callable[[bytes], PipeUser | None]
"""A function that is called with the greeting of the side that opens a pipe. It returns the user of our end, or None to
refuse."""


class Network(Protocol):
    """Hosts by name, ports, and pipes between them: the base of `transport.memory`. `shoal.sim` has one."""

    def listen(self, host: str, port: int, acceptor: PipeAcceptor, *, greeting: bytes) -> int:
        """Accept pipes at this port of `host` (0: any free port); returns the port.

        Raises:
            ConfigError: the port is taken.
        """

    def unlisten(self, host: str, port: int) -> None:
        """Accept no more pipes there."""

    async def open(self, source: str, host: str, port: int, *, greeting: bytes, user: PipeUser) -> None:
        """Open a pipe from host `source` to a port of `host`; returns after `user.pipe_opened` was called.

        This waits until an answer comes: the caller sets the deadline, and cancels to give up.

        Raises:
            PeerUnreachable: there is no such host, or nobody listens there.
            PeerRefused: the acceptor refused.
        """
