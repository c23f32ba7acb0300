"""The two ends of a stream of data: its messages, and their order.

Each member opens one stream to each reducer. The member sends on it its values of the reducer's tiles, and asks for
averages that it lacks; averages come back on it, each as soon as it is done, so both directions are busy.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from shoal.averaging.allreduce.commit import Ask, Contribute
from shoal.base.ordered import OrderedSet
from shoal.base.tasks import Changes
from shoal.errors import PeerError, PeerUnreachable
from shoal.protocol.wire import CommitDigest, Contact, PartAbsent, PartAverage, PartData, PartRequest, Reduce
from shoal.rpc import Endpoint, Stream
from shoal.transport.base import Buffer

__all__ = ["Answer", "DownStream", "ReducerStream", "SenderStream", "UpStream"]

_OPEN_TIMEOUT_S = 10.0
_FAREWELL_S = 1.0
"""The longest time for our streams of values to end in order."""

Answer = PartAverage | PartAbsent | CommitDigest
UpStream = Stream[PartData | PartRequest | CommitDigest, Answer]
DownStream = Stream[Answer, PartData | PartRequest | CommitDigest]
Receive = Callable[["SenderStream", UpStream, Answer, int], Awaitable[None]]


class SenderStream:
    """Our stream to one reducer: contributions and questions out, averages in.

    Args:
        endpoint: opens the stream.
        contact: the reducer.
        opening: names the round.
        values: gives our values of a tile and attempt, as they are sent; None if that attempt is over.

    Attributes:
        landing: the tile whose place is being filled from this stream.
        done: whether the stream is over.
        retired: set it before `abort`, if that is not the reducer's fault.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        contact: Contact,
        opening: Reduce,
        *,
        values: Callable[[int, int], tuple[PartData, Buffer | None] | None],
    ) -> None:
        self._endpoint, self._contact, self._opening, self._values = endpoint, contact, opening, values
        # Each once, in order: however often a coordinator names us a source, no more is remembered.
        self._due, self._said = OrderedDict[Contribute | Ask, None](), OrderedSet[Contribute | Ask]()
        self._answered = False
        self._changed = Changes()
        self._stream: UpStream | None = None
        self._reader: asyncio.Task[None] | None = None
        self._scratch = bytearray()
        self.retired = False
        self.landing: int | None = None
        self.done = False

    @property
    def moved_bytes(self) -> int:
        """Sent and received so far."""
        return self._stream.bytes_sent + self._stream.bytes_received if self._stream is not None else 0

    def put(self, action: Contribute | Ask) -> None:
        """Send this next."""
        self._due.setdefault(action)
        self._changed.notify()

    def scratch(self, nbytes: int) -> memoryview:
        """Memory for bytes that cannot be received in place."""
        if len(self._scratch) < nbytes:
            self._scratch = bytearray(nbytes)
        return memoryview(self._scratch)[:nbytes]

    def abort(self) -> None:
        """Give the stream up."""
        if self._stream is not None:
            self._stream.abort()

    async def run(self, receive: Receive) -> None:
        """Open the stream and use it until it ends.

        Once more if it breaks before anything came on it: it may be on a connection that waits since an earlier round,
        and that the other side has given up since.

        Args:
            receive: takes an answer in: reads its payload of so many bytes, even if it is not wanted.

        Raises:
            PeerError: it broke.
        """
        try:
            try:
                await self._use(receive)
            except PeerUnreachable:
                if self.retired or self._answered:
                    raise
                self._endpoint.drop_idle(self._contact.peer)
                self._due = OrderedDict.fromkeys((*self._said, *self._due))
                await self._use(receive)
        finally:
            self.done = True

    async def _use(self, receive: Receive) -> None:
        self._said.clear()
        stream = await self._endpoint.open(self._contact, self._opening, timeout_s=_OPEN_TIMEOUT_S)
        self._stream = stream
        self._reader = asyncio.ensure_future(self._read(stream, receive))
        try:
            await self._write(stream, self._reader)
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None  # its traceback knows us
            self.abort()  # does nothing after a clean end

    async def _write(self, stream: UpStream, reader: asyncio.Task[None]) -> None:
        reader.add_done_callback(lambda _: self._changed.notify())
        while not reader.done():
            if self._due:
                action, _ = self._due.popitem(last=False)
                if not self._answered:
                    self._said.add(action)  # before the first answer
                await self._send(stream, action)
            else:
                await self._changed.next()
        try:
            reader.result()  # raises the error that ended it
        finally:
            del reader  # it holds its exception, whose traceback holds this frame

    async def _send(self, stream: UpStream, action: Contribute | Ask) -> None:
        if isinstance(action, Ask):
            await stream.send(PartRequest(action.tile, action.attempt))
        elif (values := self._values(action.tile, action.attempt)) is not None:
            await stream.send(*values)

    async def _read(self, stream: UpStream, receive: Receive) -> None:
        while (received := await stream.recv()) is not None:
            self._answered = True
            await receive(self, stream, *received)

    async def finish(self, commit: CommitDigest | None) -> None:
        """The round is over: tell our commit, and end the stream in order, so that its connection can be used again."""
        if self._stream is None or self.done or self._reader is None:
            return
        self._due.clear()  # nobody waits for it any more, and nothing may be sent after the end
        try:
            async with asyncio.timeout(_FAREWELL_S):
                if commit is not None:
                    await self._stream.send(commit)
                await self._stream.end()
                await asyncio.wait([self._reader])
        except (PeerError, TimeoutError):
            self._stream.abort()


class ReducerStream:
    """A member's stream to us, and the averages that we still have to send on it.

    Args:
        stream: the stream.
        average: gives the average of a tile, as it is sent; None if there is none to send.
    """

    def __init__(
        self,
        stream: DownStream,
        average: Callable[[int], Awaitable[tuple[PartAverage | PartAbsent, Buffer | None] | None]],
    ) -> None:
        self.stream, self._average = stream, average
        # Tile -> the attempt that it was refused for, None if it is to be given. One entry for each tile, in order:
        # however often a member asks, no more is remembered.
        self._due: OrderedDict[int, int | None] = OrderedDict()
        self._changed = Changes()
        self._closed = False
        self._buffer = bytearray()
        self._seen = 0

    @property
    def moved_bytes(self) -> int:
        """Sent and received so far."""
        return self.stream.bytes_sent + self.stream.bytes_received

    def grew(self) -> bool:
        """Return whether bytes came since the last call."""
        before, self._seen = self._seen, self.stream.bytes_received
        return self._seen > before

    async def read(self, nbytes: int) -> memoryview:
        """The payload; it is overwritten by the next one."""
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        data = memoryview(self._buffer)[:nbytes]
        await self.stream.readinto(data)
        return data

    def offer(self, tile: int) -> None:
        """Give the member the average of this tile."""
        self._due[tile] = None
        self._changed.notify()

    def refuse(self, tile: int, attempt: int) -> None:
        """Tell the member that it does not get this tile from us."""
        self._due.setdefault(tile, attempt)
        self._changed.notify()

    def close(self) -> None:
        """The member asks for nothing more."""
        self._closed = True
        self._changed.notify()

    async def pump(self) -> None:
        """Send averages, in the order in which they were done; after `close`, those that are done already."""
        try:
            while self._due or not self._closed:
                if self._due:
                    await self._give(*self._due.popitem(last=False))
                else:
                    await self._changed.next()
        except PeerError:
            self.stream.abort()  # the reading side of this stream notices and says so

    async def _give(self, number: int, refused: int | None) -> None:
        if refused is not None:
            await self.stream.send(PartAbsent(number, refused))
        elif (average := await self._average(number)) is not None:
            await self.stream.send(*average)
