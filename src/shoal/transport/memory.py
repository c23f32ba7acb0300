"""A transport without sockets: connections over a `Network` of named hosts, such as the simulated one of `shoal.sim`.

It runs on any asyncio loop, real or virtual. The network decides when bytes travel and which are lost; this module
keeps the connection's promises: bytes in order, writers that wait while too much is queued, readers that wait until
their buffer is full, an end that both sides see.

The side that opens a pipe greets with two peer ids, its own and the one it wants; the listening side greets with its
own. Nothing is signed: all peers on such a network live in this process. Bytes are copied twice, out of the writer's
buffer and into the reader's.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Sequence

from shoal.base.peer import PEER_ID_BYTES, Address, PeerID
from shoal.errors import ClosedError, LocalError, PeerRefused, PeerTimeout, PeerUnreachable
from shoal.protocol.identity import Identity
from shoal.transport.base import HIGH_WATER_BYTES, Acceptor, Buffer, Network, Pipe
from shoal.transport.uplink import Uplink
from shoal.transport.upload_limit import SMALL_BYTES

__all__ = ["MemoryConnection", "MemoryTransport"]

SEGMENT_BYTES = 64 << 10
"""A longer write travels in pieces of this size, so that others get their turn between them."""

CLOSE_TIMEOUT_S = 5.0
"""`close` waits so long for queued bytes to leave."""

_CLOSED_HERE = "closed on this side"


class MemoryConnection:
    """One end of a connection; made by `MemoryTransport` only. Also the user of its `Pipe`."""

    def __init__(self, transport: MemoryTransport, peer_id: PeerID, *, dialed: bool) -> None:
        self._transport, self.peer_id, self.dialed = transport, peer_id, dialed
        self.bulk = False
        self._pipe: Pipe | None = None
        self._closing = False
        self._lost: str | None = None
        self._hosts = ("", "")
        self.bytes_sent = self._received = 0
        # Writing: one writer at a time; the others queue at the lock, so that no two writes mix.
        self._turn = asyncio.Lock()
        self._room: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] | None = None
        # Reading: bytes that nobody took yet, from byte `_head` of the first piece on; or the buffer that waits.
        self._pieces: deque[bytes] = deque()
        self._head = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._full: asyncio.Future[None] | None = None

    @property
    def local_host(self) -> str:
        return self._hosts[0]

    @property
    def remote_host(self) -> str:
        return self._hosts[1]

    @property
    def bytes_received(self) -> int:
        return self._received + (self._filled if self._target is not None else 0)

    @property
    def bytes_acked(self) -> int:
        return self._pipe.acked_bytes if self._pipe is not None else 0

    @property
    def closed(self) -> bool:
        return self._closing or self._lost is not None

    def __repr__(self) -> str:
        state = f"closed: {self._lost}" if self.closed else "open"
        return f"<MemoryConnection to {self.peer_id.short()}, {state}>"

    # ------------------------------------------------------------------------------------------------------- writing

    async def write(self, *buffers: Buffer) -> None:
        pipe, uplink = self._open_pipe(), self._transport.uplink
        at_once = not uplink.limited and not self._turn.locked()
        if at_once and pipe.queued_bytes <= HIGH_WATER_BYTES and _nbytes(buffers) <= SEGMENT_BYTES:
            if data := b"".join(buffers):  # a copy, except of bytes that are alone
                self._send(pipe, data)
            if pipe.queued_bytes <= HIGH_WATER_BYTES:
                return
            buffers = ()
        async with self._turn:
            torn, bulk = False, self.bulk or _nbytes(buffers) > SMALL_BYTES
            most = uplink.piece_bytes(SEGMENT_BYTES)
            try:
                for buffer in buffers:
                    view = memoryview(buffer).cast("B")
                    for start in range(0, len(view), most):
                        await uplink.admit(len(view[start : start + most]), bulk=bulk)
                        await self._wait_for_room(pipe)
                        self._send(pipe, bytes(view[start : start + most]))
                        torn = True
                torn = False
                await self._wait_for_room(pipe)
            except asyncio.CancelledError:
                if torn:
                    self._abort("a write was cancelled half-way")
                raise

    def _send(self, pipe: Pipe, data: bytes) -> None:
        self.bytes_sent += len(data)
        pipe.send(data)

    async def _wait_for_room(self, pipe: Pipe) -> None:
        self._open_pipe()
        while pipe.queued_bytes > HIGH_WATER_BYTES:
            self._room = asyncio.get_running_loop().create_future()
            try:
                await self._room
            finally:
                self._room = None
            self._open_pipe()

    def _open_pipe(self) -> Pipe:
        if self._pipe is None or self.closed:
            raise self._end_error()
        return self._pipe

    def _end_error(self) -> PeerUnreachable:
        return PeerUnreachable(f"the connection has ended: {self._lost or _CLOSED_HERE}", self.peer_id)

    # ------------------------------------------------------------------------------------------------------- reading

    async def readinto(self, buffer: bytearray | memoryview) -> None:
        if self._target is not None:
            raise LocalError("another read of this connection is waiting: one reader at a time")
        target = memoryview(buffer).cast("B")
        filled = self._take(target) if self._pieces else 0
        if filled < len(target):
            if self.closed:
                raise self._end_error()
            self._target, self._filled = target, filled
            self._full = asyncio.get_running_loop().create_future()
            try:
                await self._full
            except asyncio.CancelledError:
                self._abort("a read was cancelled")
                raise
            finally:
                self._target = self._full = None
                self._received += self._filled
        else:
            self._received += filled

    def _take(self, target: memoryview) -> int:
        """Move waiting bytes to `target`, as many as fit; returns the number."""
        pieces, head, filled, space = self._pieces, self._head, 0, len(target)
        while pieces and space:
            piece = pieces[0]
            size = len(piece) - head
            if size <= space:
                target[filled : filled + size] = memoryview(piece)[head:] if head else piece
                pieces.popleft()
                head = 0
            else:
                size = space
                target[filled:] = memoryview(piece)[head : head + size]
                head += size
            filled += size
            space -= size
        self._head = head
        if self._pipe is not None:
            self._pipe.consumed(filled)
        return filled

    # -------------------------------------------------------------------------------------------------------- ending

    async def close(self) -> None:
        if self._lost is None and self._pipe is not None:
            if not self._closing:
                self._closing = True
                self._fail_waiters()
                self._pipe.finish()
            # pipe_lost may have been called within finish().
            if self._lost is None:
                if self._gone is None:
                    self._gone = asyncio.get_running_loop().create_future()
                await asyncio.wait((self._gone,), timeout=CLOSE_TIMEOUT_S)
        self.abort()

    def abort(self) -> None:
        self._abort(_CLOSED_HERE)

    def _abort(self, reason: str) -> None:
        if self._lost is None and self._pipe is not None:
            self._closing = True
            self._pipe.abort(reason)
        self._pieces.clear()
        self._head = 0

    def _fail_waiters(self) -> None:
        for waiter in (self._room, self._full):
            if waiter is not None and not waiter.done():
                waiter.set_exception(self._end_error())

    # ------------------------------------------------------------------------------------------ called by the network

    def pipe_opened(self, pipe: Pipe, greeting: bytes) -> None:
        self._pipe, self._hosts = pipe, pipe.hosts
        self._transport.connected(self)

    def data_received(self, data: bytes) -> None:
        target = self._target
        if target is None or self._full is None or self._full.done():
            self._pieces.append(data)
            return
        filled, size = self._filled, len(data)
        if filled + size <= len(target):
            target[filled : filled + size] = data
            if self._pipe is not None:
                self._pipe.consumed(size)
        else:
            self._pieces.append(data)
            size = self._take(target[filled:])
        self._filled = filled = filled + size
        if filled == len(target):
            self._full.set_result(None)

    def resume_writing(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def pipe_lost(self, reason: str) -> None:
        self._lost = reason
        self._pipe = None  # no cycle: a connection that nobody uses any more is freed at once
        self._fail_waiters()
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        self._transport.disconnected(self)


def _nbytes(buffers: Sequence[Buffer]) -> int:
    size = 0
    for buffer in buffers:
        size += buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
    return size


class MemoryTransport:
    """`Transport` over a `Network`.

    Args:
        identity: our identity, or the id alone.
        network: the network; all transports on it are in this process.
        host: the name of our host. Our address is `/dns/HOST/tcp/PORT/p2p/PEERID`.
        port: where to listen; 0 takes a free port.
        client_mode: only dial: `listen` does nothing and there are no addresses.
    """

    def __init__(
        self,
        identity: Identity | PeerID,
        network: Network,
        *,
        host: str,
        port: int = 0,
        client_mode: bool = False,
    ) -> None:
        self.peer_id = identity if isinstance(identity, PeerID) else identity.peer_id
        self._network, self._host, self._port, self._client_mode = network, host, port, client_mode
        self.uplink = Uplink()  # what a simulated line carries is not measured
        self._acceptor: Acceptor | None = None
        self._context: contextvars.Context | None = None
        self.addresses: tuple[Address, ...] = ()
        self._connections: dict[MemoryConnection, None] = {}
        self._dials: dict[asyncio.Timeout, None] = {}
        self._closed = False

    async def listen(self, acceptor: Acceptor) -> None:
        self._check_open()
        if self._acceptor is not None:
            raise LocalError("this transport listens already")
        if self._client_mode:
            self._acceptor = acceptor
            return
        port = self._network.listen(self._host, self._port, self._accept, greeting=self.peer_id)
        # Tasks that the acceptor starts belong to the listener, not to the network that calls it.
        self._acceptor, self._context = acceptor, contextvars.copy_context()
        self.addresses = (Address(self._host, port, self.peer_id),)

    async def dial(self, peer_id: PeerID, addresses: Sequence[Address], *, timeout_s: float) -> MemoryConnection:
        self._check_open()
        deadline = asyncio.get_running_loop().time() + timeout_s
        failures: list[PeerUnreachable | PeerRefused | PeerTimeout] = []
        others = 0  # failures that are not: nobody listens there
        for index, address in enumerate(addresses):
            # An address that does not answer uses up its share of the time, not that of the others.
            share_s = (deadline - asyncio.get_running_loop().time()) / (len(addresses) - index)
            try:
                async with asyncio.timeout(max(0.0, share_s)) as limit:
                    self._dials[limit] = None
                    try:
                        return await self._open(peer_id, address)
                    finally:
                        del self._dials[limit], limit  # it holds our task, whose exception will hold this frame
            except TimeoutError:
                self._check_open()
                others += 1
                failures.append(PeerTimeout(f"no answer from {address.where} in {share_s:.3g} s", peer_id))
            except (PeerUnreachable, PeerRefused) as error:
                others += isinstance(error, PeerRefused) or not error.nobody_listens
                failures.append(type(error)(f"{error.message} ({address.where})", peer_id))
        for kind in (PeerRefused, PeerUnreachable, PeerTimeout):
            for failure in failures:
                if isinstance(failure, kind):
                    if isinstance(failure, PeerUnreachable) and not others:
                        raise PeerUnreachable(failure.message, peer_id, nobody_listens=True)
                    raise failure
        raise PeerUnreachable("no address to dial is known", peer_id)

    async def _open(self, peer_id: PeerID, address: Address) -> MemoryConnection:
        connection = MemoryConnection(self, peer_id, dialed=True)
        await self._network.open(
            self._host, address.host, address.port, greeting=self.peer_id + peer_id, user=connection
        )
        if self._closed:
            connection.abort()
            self._check_open()
        return connection

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.uplink.close()
        for address in self.addresses:
            self._network.unlisten(self._host, address.port)
        self.addresses = ()
        for connection in list(self._connections):
            connection.abort()
        for limit in self._dials:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this transport was closed")

    def _accept(self, greeting: bytes) -> MemoryConnection | None:
        dialer, wanted = greeting[:PEER_ID_BYTES], greeting[PEER_ID_BYTES:]
        if wanted != self.peer_id or len(dialer) != PEER_ID_BYTES:
            return None
        return MemoryConnection(self, PeerID(dialer), dialed=False)

    def connected(self, connection: MemoryConnection) -> None:
        """A connection of ours is open: hand an incoming one to the acceptor."""
        self._connections[connection] = None
        if not connection.dialed and self._acceptor is not None and self._context is not None:
            self._context.copy().run(self._acceptor, connection)

    def disconnected(self, connection: MemoryConnection) -> None:
        """A connection of ours has ended."""
        self._connections.pop(connection, None)
