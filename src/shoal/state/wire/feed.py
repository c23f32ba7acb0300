"""One donor's stream of chunks into a download that several donors feed.

A feed asks for missing chunks of the plan about half a second ahead, at its donor's pace. When no chunks are missing
any more, it *doubles* chunks that other donors are late with, so that a slow donor does not delay the end.

Invariants:

- Only the owner of a chunk receives it into its final place, if it owned it when the chunk began. A feed that doubles a
  chunk receives it into other memory, and copies it to its place once its hash was found right and the owner has
  stopped.
- A chunk is verified by its digest, whichever donor it comes from; a wrong one is the fault of its sender.
- A feed that ends has nothing in flight, and nothing of it writes into the state any more.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from itertools import chain

from shoal.base.clock import Env, seconds_text
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Changes
from shoal.compression import populate
from shoal.errors import PeerError, PeerProtocolError, PeerTimeout
from shoal.protocol.wire import Chunk, Contact, FetchChunks, MoreChunks
from shoal.rpc import LOOK_S, Endpoint, Stream
from shoal.state.digest import hasher
from shoal.state.wire.arrivals import MIN_AHEAD, ArrivalRate, Intake, Line
from shoal.state.wire.assembly import Assembly
from shoal.state.wire.manifest import Manifest
from shoal.state.wire.plan import ChunkPlan

__all__ = ["Feed", "MayRead", "Target"]

_QUEUED_BYTES = 64 << 10
"""The queue of a slow line, which may be full of other traffic when a donor's next bytes come."""

_READ_AT_ONCE = 32 << 10
"""Awaited before a read when other traffic may have to come first."""

MayRead = Callable[[], Awaitable[None]]

END_WITHIN_S = 1.0
"""Time for a stream to end in order, when all chunks have come."""
_LOOK_AGAIN_S = 0.1
"""A donor with nothing to send looks this often whether another one is late."""

_FASTER = 2.0
"""A chunk is doubled if it comes this many times sooner than from its owner, and our line is not the limit (`Line`)."""


class Target:
    """The snapshot that is being fetched, and its feeds.

    Args:
        manifest: the snapshot to fetch. Donors of an equal content may feed it.
        changes: wakes whoever waits for chunks that are verified, or given back.
        intake: told what comes.
    """

    def __init__(self, manifest: Manifest, changes: Changes, intake: Intake) -> None:
        self.changes, self._intake = changes, intake
        self.plan: ChunkPlan[PeerID] = ChunkPlan(manifest)
        self.assembly = Assembly(manifest)
        self.feeds: dict[PeerID, Feed] = {}
        self.streams: dict[PeerID, Stream[MoreChunks, Chunk]] = {}  # of the feeds
        self._ended_bytes = 0  # that came on streams that have ended
        self.line = Line()
        self.bytes_received = 0
        self._claiming = asyncio.Lock()
        self._count_missing()

    @property
    def manifest(self) -> Manifest:
        """The snapshot."""
        return self.plan.manifest

    def move_to(self, manifest: Manifest) -> None:
        """Fetch this snapshot from now on, and keep equal chunks; no feed may be running."""
        assert not self.feeds, "move_to() while donors feed"
        if not self.plan.move_to(manifest):
            self.assembly.clear()  # freed before the next one takes memory
            self.assembly = Assembly(manifest)
        self._count_missing()

    def received(self, peer: PeerID, nbytes: int) -> None:
        """So many bytes of a chunk have come from this donor."""
        self.bytes_received += nbytes
        self._intake.received(peer, nbytes)

    def ended(self, peer: PeerID) -> None:
        """The stream of this donor has ended."""
        self._ended_bytes += self.streams.pop(peer).bytes_received

    def look(self, now: float) -> int:
        """Look how many bytes have come, those of unfinished pieces included (`now`: seconds); returns it."""
        each = {peer: stream.bytes_received for peer, stream in self.streams.items()}
        total = self._ended_bytes + sum(each.values())
        self.line.look(each, total, now)
        return total

    @property
    def missing_bytes(self) -> int:
        """Return how many bytes are not verified yet."""
        return max(0, self.manifest.total_bytes - self.plan.verified * self.manifest.chunk_bytes)

    def _count_missing(self) -> None:
        self._intake.missing_bytes = self.missing_bytes

    def verified(self, chunk: int, peer: PeerID) -> None:
        """A chunk is in its place, and right."""
        self.plan.verify(chunk, peer)
        self._count_missing()
        if self.plan.complete or not self.plan.missing:
            self.changes.notify()

    async def claim(self, chunk: int, peer: PeerID, data: memoryview) -> bool:
        """Put a doubled chunk, which was found right, into its place. False if the owner was first."""
        async with self._claiming:
            owner = self.plan.owner(chunk)
            if owner is not None and owner != peer and owner in self.feeds:
                sometimes("a second donor is faster with a chunk than the first")
                await self.feeds[owner].yield_place(chunk)
            if self.plan.is_verified(chunk):
                return False
            start = 0
            for place in self.assembly.buffers(chunk):
                place[:] = data[start : start + place.nbytes]
                start += place.nbytes
            self.verified(chunk, peer)
            return True


class Feed:
    """One turn of one donor, which has the content of the target.

    Args:
        endpoint: reaches the donor.
        env: executor (memory).
        prefix: which state.
        contact: the donor.
        snapshot: the snapshot's name at this donor.
        target: the snapshot to feed.
        stall_s: a donor is dropped if nothing comes for this long, neither from it nor from others.
        may_read: awaited before every read, so that other traffic can come first on our line; None: nothing has to.

    Attributes:
        chunks_brought: chunks that were verified, from this donor, in this turn.
        was_giving: whether bytes came in it.
        beaten: another donor was faster with the chunk that was coming, so this turn was ended.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        env: Env,
        prefix: str,
        contact: Contact | PeerID,
        snapshot: bytes,
        target: Target,
        *,
        stall_s: float,
        may_read: MayRead | None = None,
    ) -> None:
        self._endpoint, self._env, self._prefix, self._stall_s = endpoint, env, prefix, stall_s
        self._may_read = may_read
        self._contact, self._snapshot, self._target, self._plan = contact, snapshot, target, target.plan
        self._peer = contact.peer if isinstance(contact, Contact) else contact
        self._rate = ArrivalRate()
        self._queue: deque[int] = deque()
        self._writing: int | None = None  # the chunk that goes straight into its place now
        self._beside = bytearray()
        self._rooms: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.chunks_brought = 0
        self.was_giving = False
        self.beaten = False

    async def run(self) -> None:
        """Feed until the state is complete, or another donor was faster (`beaten`).

        Raises:
            PeerError: the donor failed, or has broken the protocol.
        """
        self._plan.offer(self._peer, self._plan.manifest)
        self._target.feeds[self._peer] = self
        self._task = asyncio.get_running_loop().create_task(self._feed())
        try:
            await self._task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not self.beaten or (current is not None and current.cancelling()):
                self._task.cancel()
                await asyncio.wait((self._task,))
                raise
        finally:
            self._task = None  # it keeps its error, whose traceback knows us
            for task in self._rooms:
                task.cancel()
            del self._target.feeds[self._peer]
            self._plan.release(self._peer)
            self._ended.set()
            self._target.changes.notify()

    @property
    def idle(self) -> bool:
        """Return whether all chunks that were asked for have come."""
        return not self._queue

    def due_s(self, chunk: int, now: float) -> float:
        """Return how long until this chunk, which was asked for, is here."""
        place = self._queue.index(chunk) if chunk in self._queue else 0
        return self._rate.due_s(place, now)

    async def yield_place(self, chunk: int) -> None:
        """Write no more into the place of this chunk: another donor was faster."""
        if self._writing == chunk and self._task is not None:
            self.beaten = True
            self._task.cancel()
            await self._ended.wait()

    # ---------------------------------------------------------------------------------------------------- what to fetch

    def _choose(self) -> list[int]:
        """Chunks to ask for now: missing ones, otherwise one that another donor is late with."""
        plan, ahead = self._plan, self._rate.ahead()
        if len(self._queue) > ahead // 2:
            return []
        # Towards the end each feed asks for fewer chunks ahead, so that all end at about the same time.
        feeds = len(self._target.feeds)
        ahead = min(ahead, max(MIN_AHEAD if plan.missing >= feeds else 1, plan.missing // feeds))
        if chunks := plan.take(self._peer, max(0, ahead - len(self._queue))):
            return chunks
        if plan.missing or len(self._queue) >= MIN_AHEAD:
            return []
        return self._double()

    def _double(self) -> list[int]:
        now, feeds = asyncio.get_running_loop().time(), self._target.feeds
        doubtful, line = self._plan.doubtful(self._peer), self._target.line
        late = ((feeds[owner].due_s(chunk, now), chunk) for chunk, owner in doubtful if not line.is_limit(owner, now))
        due_s, chunk = max(late, default=(0.0, -1))
        if due_s <= _FASTER * self._rate.takes_s(len(self._queue) + 1):
            return []
        sometimes("a late chunk is asked for from a second donor")
        self._plan.double(self._peer, chunk)
        return [chunk]

    # ---------------------------------------------------------------------------------------------------------- streams

    async def _feed(self) -> None:
        while not self._plan.complete:
            if chunks := self._choose():
                await self._stream(chunks)
            else:
                await self._target.changes.next(_LOOK_AGAIN_S)

    async def _stream(self, chunks: list[int]) -> None:
        """One stream, until there is nothing more to ask this donor for."""
        opening = FetchChunks(self._prefix, self._snapshot, chunks)
        self._expect(chunks)
        self._rate.asked(asyncio.get_running_loop().time())
        stream = await self._endpoint.open(self._contact, opening, timeout_s=self._stall_s)
        self._target.streams[self._peer] = stream
        before = stream.bytes_received
        try:
            await self._receive(stream)
            await self._finish(stream)
        finally:
            self.was_giving |= stream.bytes_received > before
            self._target.ended(self._peer)
            self._writing = None
            stream.abort()  # nothing to do after an orderly end

    def _expect(self, chunks: list[int]) -> None:
        """While these chunks are on their way, another thread makes the system provide memory for them."""
        self._queue.extend(chunks)
        places = [self._target.assembly.buffers(chunk) for chunk in chunks if self._plan.owner(chunk) == self._peer]
        if places:  # a doubled chunk has no place of its own
            populating = self._env.executor.run(populate, chain.from_iterable(places))
            task = asyncio.get_running_loop().create_task(populating)
            self._rooms.add(task)
            task.add_done_callback(self._rooms.discard)

    async def _receive(self, stream: Stream[MoreChunks, Chunk]) -> None:
        loop, queue = asyncio.get_running_loop(), self._queue
        try:
            async with asyncio.timeout(None) as limit:
                with closing(_Patience(self._target, limit, self._stall_s, self._is_silent)) as patience:
                    while queue:
                        chunk = queue[0]
                        digest = await self._receive_chunk(stream, chunk, patience)
                        queue.popleft()
                        self._rate.arrived(loop.time())
                        patience.pause()  # another feed of this chunk takes our time, not the donor's
                        await self._check(chunk, digest)
                        patience.renew()
                        if chunks := self._choose():
                            self._expect(chunks)
                            await stream.send(MoreChunks(chunks))
        except TimeoutError as error:
            if isinstance(error, PeerError):
                raise
            what = "fell silent" if self._is_silent() else f"sent nothing for {seconds_text(patience.limit_s)}"
            raise PeerTimeout(what, self._peer) from None

    def _is_silent(self) -> bool:
        return self._endpoint.is_silent(self._peer)

    async def _finish(self, stream: Stream[MoreChunks, Chunk]) -> None:
        """End in order, so that the connection can carry the next stream. Bytes that still come do not matter."""
        with suppress(PeerError, TimeoutError):
            async with asyncio.timeout(min(self._stall_s, END_WITHIN_S)):
                await stream.finish()

    async def _receive_chunk(self, stream: Stream[MoreChunks, Chunk], chunk: int, patience: _Patience) -> bytes:
        """Return the digest of the arrived bytes: each piece is hashed while it is in the processor's cache."""
        found = hasher()
        start, stop = self._plan.manifest.chunk_range(chunk)
        places = deque(self._places(chunk, stop - start))
        received = announced = 0
        while received < stop - start:
            if not announced:
                announced = await self._next_piece(stream, chunk, received, stop - start)
            place = places.popleft()
            part = place[:announced]
            if self._may_read is not None:
                part = part[:_READ_AT_ONCE]
                patience.pause()  # the donor waits for us
                await self._may_read()
                patience.renew()
            if part.nbytes < place.nbytes:
                places.appendleft(place[part.nbytes :])
            await stream.readinto(part)
            found.update(part)
            received, announced = received + part.nbytes, announced - part.nbytes
            self._target.received(self._peer, part.nbytes)
            patience.renew()
        return found.digest()

    def _places(self, chunk: int, nbytes: int) -> list[memoryview]:
        if self._plan.owner(chunk) == self._peer:
            self._writing = chunk
            return self._target.assembly.buffers(chunk)
        self._writing = None
        if not self._beside:
            self._beside = bytearray(self._plan.manifest.chunk_bytes)
        return [memoryview(self._beside)[:nbytes]]

    async def _next_piece(self, stream: Stream[MoreChunks, Chunk], chunk: int, received: int, total: int) -> int:
        piece = await stream.recv()
        if piece is None:
            raise PeerProtocolError(f"ended before chunk {chunk}", self._peer)
        message, nbytes = piece
        if message.index != chunk or message.offset != received or not 0 < nbytes <= total - received:
            raise PeerProtocolError(
                f"sent {nbytes} bytes of chunk {message.index} at {message.offset}, "
                f"expected chunk {chunk} at {received}",
                self._peer,
            )
        return nbytes

    async def _check(self, chunk: int, digest: bytes) -> None:
        direct, self._writing = self._writing == chunk, None
        if digest != self._plan.manifest.hashes[chunk] and (direct or not self._plan.is_verified(chunk)):
            raise PeerProtocolError(f"chunk {chunk} does not match its hash", self._peer)
        if direct:
            self._target.verified(chunk, self._peer)
            self.chunks_brought += 1
        elif not self._plan.is_verified(chunk):
            start, stop = self._plan.manifest.chunk_range(chunk)
            self.chunks_brought += await self._target.claim(chunk, self._peer, memoryview(self._beside)[: stop - start])


class _Patience:
    """Ends a read `stall_s` after bytes came last, from this donor or from others, or on silence.

    Others count, as a donor may wait until our line has carried what they sent. Any byte does: on a slow line a piece
    takes long. There the time is that of `_QUEUED_BYTES` at the pace so far, if that is longer, as other traffic may
    come first. A donor that gives a few bytes now and then is bounded by the pace of the whole download.

    Args:
        target: has the bytes of all donors.
        limit: the timeout around the read.
        stall_s: longest time without an arrival, as long as the pace allows no longer one.
        is_silent: whether the donor gives no sign of life (`Endpoint.is_silent`).

    Attributes:
        limit_s: longest time without an arrival now.
    """

    def __init__(self, target: Target, limit: asyncio.Timeout, stall_s: float, is_silent: Callable[[], bool]) -> None:
        self._target, self._limit, self._stall_s, self._is_silent = target, limit, stall_s, is_silent
        self._loop = asyncio.get_running_loop()
        self._began, self._before, self.limit_s = self._loop.time(), target.look(self._loop.time()), stall_s
        self.renew()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def renew(self) -> None:
        """Give the donor its time again."""
        now = self._loop.time()
        self._seen = self._target.look(now)
        if came := self._seen - self._before:
            self.limit_s = max(self._stall_s, _QUEUED_BYTES / came * (now - self._began))
        self._until = now + self.limit_s  # the timer checks it: moving the timer takes longer

    def pause(self) -> None:
        """Do not count time against the donor until `renew`."""
        self._until = math.inf

    def _look(self) -> None:
        now, waits = self._loop.time(), self._until < math.inf
        if self._target.look(now) > self._seen and waits:
            self.renew()
        if now >= self._until or (waits and self._is_silent()):
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(min(now + LOOK_S, self._until), self._look)

    def close(self) -> None:
        """Stop watching."""
        self._timer.cancel()
