"""The two ends of a stream of data: its messages, and their order.

Each member opens one stream to each owner. The member sends on it its values of the owner's parts, and asks for
averages that it lacks; averages come back on it. `exchange` and `owner` decide how these are used.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from shoal.allreduce.commit import Ask, Contribute, MemberRules
from shoal.allreduce.digest import PartDigests
from shoal.allreduce.part_work import PartWork
from shoal.allreduce.partition import Part
from shoal.allreduce.vector import Vector
from shoal.clock import Env
from shoal.errors import PeerError, PeerProtocolError, PeerUnreachable
from shoal.rpc import Endpoint, Stream
from shoal.transport.base import Buffer
from shoal.wire import Held, Member, PartAbsent, PartAverage, PartData, PartRequest, Reduce

__all__ = ["DownStream", "Inbound", "Outgoing", "RoundView", "UpStream", "check_part"]

_OPEN_TIMEOUT_S = 10.0

UpStream = Stream[PartData | PartRequest, PartAverage | PartAbsent]
DownStream = Stream[PartAverage | PartAbsent, PartData | PartRequest]


class RoundView(Protocol):
    """The side of a round that the data plane uses."""

    endpoint: Endpoint
    env: Env
    round_id: bytes
    members: list[Member]
    me: int
    parts: list[Part]
    rules: MemberRules
    vector: Vector
    weight: float
    digests: PartDigests

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task of this round."""
        ...

    def news(self) -> None:
        """This member holds a part that it did not hold before."""
        ...

    def source_lost(self, member: int, absent: PartAbsent | None) -> None:
        """This member does not give a part that it was asked for (None: it gives no part at all)."""
        ...

    def blame(self, member: int, reason: str) -> None:
        """A member did not do its part."""
        ...

    def cut_off(self, reason: str) -> None:
        """The values of the others do not come here: another member must average the parts owned here."""
        ...


def check_part(round_: RoundView, number: int, attempt: int, sender: Stream[Any, Any]) -> Part:
    """The part that a message names.

    Raises:
        PeerProtocolError: there is none.
    """
    # There is at most one new attempt for each member that is lost.
    if not 0 <= number < len(round_.parts) or not 0 <= attempt <= len(round_.members):
        raise PeerProtocolError(f"part {number} attempt {attempt} is not in this round", sender.peer_id)
    return round_.parts[number]


class Outgoing:
    """Our stream to one owner: contributions and questions out, averages in.

    Args:
        round_: the round.
        owner: index of the member that the stream is opened to.
        land: takes an average in: reads its payload of so many bytes, even if it is not wanted.

    Attributes:
        landing: the part whose place is being filled from this stream.
        done: whether the stream is over.
    """

    def __init__(
        self,
        round_: RoundView,
        owner: int,
        land: Callable[[Outgoing, UpStream, Held, int], Awaitable[None]],
    ) -> None:
        self._round, self._owner, self._land = round_, owner, land
        self._due: deque[Contribute | Ask] = deque()
        self._said: list[Contribute | Ask] = []  # before the first answer
        self._answered = False
        self._changed = asyncio.Event()
        self._stream: UpStream | None = None
        self._reader: asyncio.Task[None] | None = None
        self._scratch = bytearray()
        self._retired = False
        self.landing: int | None = None
        self.done = False

    @property
    def moved_bytes(self) -> int:
        """Sent and received so far."""
        return self._stream.bytes_sent + self._stream.bytes_received if self._stream is not None else 0

    def put(self, action: Contribute | Ask) -> None:
        """Send this next."""
        self._due.append(action)
        self._changed.set()

    def scratch(self, nbytes: int) -> memoryview:
        """Memory for bytes that cannot be received in place."""
        if len(self._scratch) < nbytes:
            self._scratch = bytearray(nbytes)
        return memoryview(self._scratch)[:nbytes]

    def abort(self) -> None:
        """Give the stream up."""
        if self._stream is not None:
            self._stream.abort()

    def retire(self) -> None:
        """As `abort`, without blaming the owner."""
        self._retired = True
        self.abort()

    async def run(self) -> None:
        """Open the stream and use it until it ends.

        Once more if it breaks before anything came on it: it may be on a connection that waits since an earlier round,
        and that the other side has given up since.
        """
        round_ = self._round
        try:
            try:
                await self._use()
            except PeerUnreachable:
                if self._retired or self._answered:
                    raise
                round_.endpoint.drop_idle(round_.members[self._owner].contact.peer)
                self._due.extendleft(reversed(self._said))
                await self._use()
        except PeerError as error:
            if isinstance(error, PeerProtocolError):
                round_.blame(self._owner, error.message)
            self.done = True
            if not self._retired:
                round_.source_lost(self._owner, None)
        finally:
            self.done = True

    async def _use(self) -> None:
        contact = self._round.members[self._owner].contact
        self._said.clear()
        stream = await self._round.endpoint.open(contact, Reduce(self._round.round_id), timeout_s=_OPEN_TIMEOUT_S)
        self._stream = stream
        self._reader = asyncio.ensure_future(self._read(stream))
        try:
            await self._write(stream, self._reader)
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None  # its traceback knows us
            self.abort()  # does nothing after a clean end

    async def _write(self, stream: UpStream, reader: asyncio.Task[None]) -> None:
        reader.add_done_callback(lambda _: self._changed.set())
        while not reader.done():
            if self._due:
                action = self._due.popleft()
                if not self._answered:
                    self._said.append(action)
                await self._send(stream, action)
            else:
                self._changed.clear()
                await self._changed.wait()
        try:
            reader.result()  # raises the error that ended it
        finally:
            del reader  # it holds its exception, whose traceback holds this frame

    async def _send(self, stream: UpStream, action: Contribute | Ask) -> None:
        round_ = self._round
        if isinstance(action, Ask):
            await stream.send(PartRequest(action.part, action.attempt))
        elif round_.rules.attempt[action.part] == action.attempt:
            part = round_.parts[action.part]
            message = PartData(action.part, action.attempt, round_.weight)
            if round_.weight > 0:
                await stream.send(message, round_.vector.contribution(part))
            else:
                await stream.send(message)

    async def _read(self, stream: UpStream) -> None:
        while (received := await stream.recv()) is not None:
            self._answered = True
            message, nbytes = received
            if isinstance(message, PartAverage):
                await self._land(self, stream, message.held, nbytes)
            elif nbytes or not 0 <= message.part < len(self._round.parts):
                raise PeerProtocolError(f"no part {message.part}", stream.peer_id)
            else:
                self._round.source_lost(self._owner, message)

    async def finish(self) -> None:
        """The round is over: end the stream in order, so that its connection can be used again."""
        if self._stream is None or self.done or self._reader is None:
            return
        self._due.clear()  # nobody waits for it any more, and nothing may be sent after the end
        try:
            async with asyncio.timeout(1.0):
                await self._stream.end()
                await asyncio.wait([self._reader])
        except (PeerError, TimeoutError):
            self._stream.abort()


class Inbound:
    """A member's stream to us, and the averages that we still have to send on it.

    Args:
        round_: the round.
        stream: the stream.
        work: computes parts.
    """

    def __init__(self, round_: RoundView, stream: DownStream, work: PartWork) -> None:
        self.stream = stream
        self._round, self._work = round_, work
        # Part -> the attempt that it was refused for, None if it is to be given. One entry for each part, in order:
        # however often a member asks, no more is remembered.
        self._due: OrderedDict[int, int | None] = OrderedDict()
        self._changed = asyncio.Event()
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
        if nbytes:
            await self.stream.readinto(data)
        return data

    def offer(self, part: int) -> None:
        """Give the member the average of this part."""
        self._due[part] = None
        self._changed.set()

    def refuse(self, part: int, attempt: int) -> None:
        """Tell the member that it does not get this part from us."""
        self._due.setdefault(part, attempt)
        self._changed.set()

    def close(self) -> None:
        """The member asks for nothing more."""
        self._closed = True
        self._changed.set()

    async def pump(self) -> None:
        """Send averages, in the order in which they were done; after `close`, those that are done already."""
        try:
            while self._due or not self._closed:
                if self._due:
                    await self._give(*self._due.popitem(last=False))
                else:
                    self._changed.clear()
                    await self._changed.wait()
        except PeerError:
            self.stream.abort()  # the reading side of this stream notices and says so

    async def _give(self, number: int, refused: int | None) -> None:
        held, part = self._round.rules.held[number], self._round.parts[number]
        if refused is not None:
            await self.stream.send(PartAbsent(number, refused))
        elif held is not None and any(held.contributors):
            data: Buffer | None = self._round.vector.ready_bytes(part)
            if data is None:
                round_ = self._round
                data = await self._work.compute(part, round_.vector.average_bytes, part, held.digest, round_.digests)
            if data is None:
                await self.stream.send(PartAbsent(number, held.attempt))
            else:
                await self.stream.send(PartAverage(held), data)
