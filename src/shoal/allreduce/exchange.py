"""The data of a round: contributions out, averages in; and for the parts owned here, the other way round.

Each member opens one stream to each owner. On it go the member's values of the owner's parts; back come the averages,
each as soon as it is done, so both directions are busy. A stream that breaks costs the round nothing by itself: the
owner counts the sender out of what is not done yet, the sender tells the decider whom it cannot reach, and is given
another source or another owner.

One lock for each part keeps what is summed, finished or received in its place apart. Nothing waits under such a lock
but the bytes of that part.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, Protocol, TypeVar

from shoal.allreduce.commit import Ask, Average, Contribute, MemberAction, MemberRules
from shoal.allreduce.partition import Part
from shoal.allreduce.reducer import ReducerRules
from shoal.allreduce.vector import Vector, is_weight
from shoal.clock import Env
from shoal.errors import PeerError, PeerProtocolError, PeerRefused
from shoal.events import PeerDropped
from shoal.rpc import Endpoint, Stream
from shoal.transport.base import Buffer
from shoal.wire import Held, Member, PartAbsent, PartAverage, PartData, PartRequest, Reduce

__all__ = ["Exchange", "RoundView"]

_INLINE_ELEMENTS = 1 << 14
"""Smaller parts are computed in the loop: a hop to another thread would cost more."""

_LIGHT_ELEMENTS = 1 << 19
"""Up to this size the same holds for what takes little more than a copy: adding, looking for NaN. A hop there and back
costs the loop 0.1 ms, adding 1 MiB takes as long."""

_FAREWELL_S = 1.0
"""How long the end of a round waits for the others to end their streams."""

P = ParamSpec("P")
T = TypeVar("T")

UpStream = Stream[PartData | PartRequest, PartAverage | PartAbsent]
DownStream = Stream[PartAverage | PartAbsent, PartData | PartRequest]


class RoundView(Protocol):
    """What the exchange knows of its round."""

    endpoint: Endpoint
    env: Env
    round_id: bytes
    members: list[Member]
    me: int
    parts: list[Part]
    rules: MemberRules
    vector: Vector
    weight: float

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task of this round."""
        ...

    def news(self) -> None:
        """Something is held that was not held before."""
        ...

    def source_lost(self, member: int, part: int | None) -> None:
        """This member does not give what it was asked for (`part`, or anything)."""
        ...


class Exchange:
    """The data plane of one round, of one member.

    Args:
        round_: the round.
        contributors: indices of the members that contribute values.
        silence_s: how long an owner waits for a silent sender.
    """

    def __init__(self, round_: RoundView, contributors: list[int], *, silence_s: float) -> None:
        self._round = round_
        self._loop = asyncio.get_running_loop()
        self.reducer = ReducerRules(round_.me, contributors, silence_s=silence_s, now=self._loop.time())
        self._locks = [asyncio.Lock() for _ in round_.parts]
        self._weights: dict[tuple[int, int], float] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        self._inbound: dict[int, _Inbound] = {}
        self._moved_closed = 0
        self._assigned = asyncio.Event()
        self._begun: dict[tuple[int, int], asyncio.Event] = {}
        self._serving: set[DownStream] = set()
        self._served = asyncio.Event()
        self._jobs: set[asyncio.Future[Any]] = set()
        self._over = False

    # -------------------------------------------------------------------------------------------------------- start

    def start(self) -> None:
        """Contribute everywhere, and begin to average what is owned here."""
        for part in self._round.parts:
            if part.owner == self._round.me:
                self._own(part.number, 0)
            else:
                self._to(part.owner).put(Contribute(part.number, 0, part.owner))

    def act(self, actions: list[MemberAction]) -> None:
        """Do what the decider's assignment asks for."""
        for action in actions:
            match action:
                case Average(part, attempt):
                    self._free(part)
                    self._own(part, attempt)
                case Contribute(part, _, owner) | Ask(part, _, owner):
                    self._free(part)
                    self._to(owner).put(action)
        self._assigned.set()
        self._assigned = asyncio.Event()

    def ask(self, part: int, attempt: int, source: int) -> None:
        """Ask a member for an average that it should hold."""
        self._to(source).put(Ask(part, attempt, source))

    def _free(self, part: int) -> None:
        """Stop to receive older bytes of a part: whoever sends them may be stuck, and its place is needed."""
        for outgoing in self._outgoing.values():
            if outgoing.landing == part:
                outgoing.abort()

    def _to(self, owner: int) -> _Outgoing:
        outgoing = self._outgoing.get(owner)
        if outgoing is None or outgoing.done:
            if outgoing is not None:
                self._moved_closed += outgoing.moved_bytes
            outgoing = self._outgoing[owner] = _Outgoing(self, self._round, owner)
            self._round.spawn(outgoing.run())
        return outgoing

    @property
    def moved_bytes(self) -> int:
        """Bytes sent and received so far."""
        return (
            self._moved_closed
            + sum(outgoing.moved_bytes for outgoing in self._outgoing.values())
            + sum(inbound.moved_bytes for inbound in self._inbound.values())
        )

    # --------------------------------------------------------------------------------------------------- parts I own

    def _own(self, part: int, attempt: int) -> None:
        self._weights[part, attempt] = 0.0
        self._begun[part, attempt] = asyncio.Event()
        self.reducer.own(part, attempt, self._loop.time())
        self._round.spawn(self._begin(self._round.parts[part], attempt))

    async def _begin(self, part: Part, attempt: int) -> None:
        round_, work = self._round, (part.number, attempt)
        counts = round_.weight > 0
        try:
            async with self._locks[part.number]:
                if round_.rules.attempt[part.number] != attempt:
                    return  # it has another owner already
                await self.light(part, round_.vector.begin_sum, part)
                if counts:
                    await self.light(part, round_.vector.add_mine, part, round_.weight)
        finally:
            self._begun[work].set()  # in any case: streams wait for it
        self._weights[work] += round_.weight
        self._finish(self.reducer.contributed(*work, round_.me, counts=counts, now=self._loop.time()))

    def _finish(self, ready: list[tuple[int, int]]) -> None:
        for work in ready:
            self._round.spawn(self._finish_part(*work))

    async def _finish_part(self, number: int, attempt: int) -> None:
        round_, part = self._round, self._round.parts[number]
        contributors = _mask(self.reducer.contributors[number, attempt], len(round_.members))
        async with self._locks[number]:
            if round_.rules.attempt[number] != attempt or not round_.rules.wants(number, attempt):
                return  # it has another owner by now
            total = self._weights[number, attempt]
            digest = bytes(32)
            if any(contributors):
                digest = await self.compute(part, round_.vector.finish, part, total)
            held = Held(number, attempt, contributors, total, digest)
            news = round_.rules.averaged(held)
        if news:
            if any(contributors):
                for inbound in self._inbound.values():
                    inbound.offer(number)
            round_.news()

    def exclude(self, member: int) -> None:
        """Wait for this member's contributions no longer."""
        self._finish(self.reducer.exclude(member))

    def tick(self, now: float) -> None:
        """Look who trickles, and who is silent."""
        for sender, inbound in self._inbound.items():
            if inbound.grew():
                self.reducer.heard(sender, now)
        for sender in self.reducer.stalled(now):
            self._drop(sender, "too slow: left out of the parts that are not averaged yet")
            self.exclude(sender)

    def _drop(self, member: int, reason: str) -> None:
        peer = self._round.members[member].contact.peer
        self._round.env.events.emit(PeerDropped(peer=peer, where="all-reduce", reason=reason))

    # ------------------------------------------------------------------------------------------------------- serving

    async def serve(self, stream: DownStream, sender: int) -> None:
        """Serve a member's stream: take its contributions, give it averages."""
        if self._over:
            raise PeerRefused("the round is over")
        inbound = _Inbound(self._round, stream, self)
        if (older := self._inbound.get(sender)) is not None:
            self._moved_closed += older.moved_bytes
        self._inbound[sender] = inbound
        self._serving.add(stream)
        for part, held in enumerate(self._round.rules.held):
            if held is not None and self._round.rules.owner[part] == self._round.me:
                inbound.offer(part)
        pump = self._round.spawn(inbound.pump())
        try:
            while (received := await stream.recv()) is not None:
                message, nbytes = received
                if isinstance(message, PartData):
                    await self._take(inbound, sender, message, nbytes)
                else:
                    self._requested(inbound, message, nbytes)
            inbound.close()
            await asyncio.wait((pump,))  # not `await pump`: it may have been cancelled with the round
        except PeerProtocolError as error:
            self._drop(sender, error.message)
            self.exclude(sender)
            raise
        except PeerError:
            self.exclude(sender)
            raise
        finally:
            pump.cancel()
            self._serving.discard(stream)
            self._served.set()

    def _part(self, number: int, attempt: int, sender: Stream[Any, Any]) -> Part:
        # There is at most one new attempt for each member that is lost.
        if not 0 <= number < len(self._round.parts) or not 0 <= attempt <= len(self._round.members):
            raise PeerProtocolError(f"part {number} attempt {attempt} is not in this round", sender.peer_id)
        return self._round.parts[number]

    async def _take(self, inbound: _Inbound, sender: int, message: PartData, nbytes: int) -> None:
        stream, round_ = inbound.stream, self._round
        part = self._part(message.part, message.attempt, stream)
        weight, work = message.weight, (message.part, message.attempt)
        if not is_weight(weight):
            raise PeerProtocolError(f"weight {weight}", stream.peer_id)
        if nbytes != (round_.vector.encoded_bytes(part) if weight > 0 else 0):
            raise PeerProtocolError(f"{nbytes} bytes for part {part.number}", stream.peer_id)
        while message.attempt > round_.rules.attempt[part.number] and not self._over:
            await self._assigned.wait()  # the sender heard of the new attempt before us
        data = await inbound.read(nbytes)
        if not self.reducer.expects(*work, sender):
            return
        if weight == 0:
            self._finish(self.reducer.contributed(*work, sender, counts=False, now=self._loop.time()))
            return
        try:
            values = await self.light(part, round_.vector.decoded, part, data, weight)
        except PeerProtocolError as error:
            raise PeerProtocolError(error.message, stream.peer_id) from None
        if not self.reducer.expects(*work, sender):
            return
        await self._begun[work].wait()
        # Counted before it is added; the part cannot be finished in between, because that needs the lock too.
        async with self._locks[part.number]:
            # A newer attempt may be in its place already: what is summed and what is received share their memory.
            if round_.rules.attempt[part.number] != message.attempt or not self.reducer.expects(*work, sender):
                return
            self._weights[work] += weight
            ready = self.reducer.contributed(*work, sender, counts=True, now=self._loop.time())
            await self.light(part, round_.vector.add, part, values, weight)
        self._finish(ready)

    def _requested(self, inbound: _Inbound, message: PartRequest, nbytes: int) -> None:
        part = self._part(message.part, message.attempt, inbound.stream)
        if nbytes:
            raise PeerProtocolError("a request with a payload", inbound.stream.peer_id)
        rules = self._round.rules
        held = rules.held[part.number]
        if held is not None and held.attempt >= message.attempt:
            inbound.offer(part.number)
        elif rules.owner[part.number] != self._round.me or rules.failed is not None or rules.commit is not None:
            inbound.refuse(part.number, message.attempt)
        # else it is made here, and given to everybody when it is done

    # ------------------------------------------------------------------------------------------------------ receiving

    async def land(self, outgoing: _Outgoing, stream: UpStream, held: Held, nbytes: int) -> None:
        """Receive an average into its place, if it is wanted."""
        round_ = self._round
        part = self._part(held.part, held.attempt, stream)
        if nbytes != round_.vector.encoded_bytes(part) or len(held.contributors) != (len(round_.members) + 7) // 8:
            raise PeerProtocolError(f"a malformed average of part {part.number}", stream.peer_id)
        if round_.rules.wants(part.number, held.attempt):
            async with self._locks[part.number]:
                if round_.rules.wants(part.number, held.attempt):
                    await self._land(outgoing, stream, part, held, nbytes)
                    return
        await stream.readinto(outgoing.scratch(nbytes))

    async def _land(self, outgoing: _Outgoing, stream: UpStream, part: Part, held: Held, nbytes: int) -> None:
        round_ = self._round
        round_.rules.expect(part.number, held.attempt)
        outgoing.landing = part.number
        try:
            place = round_.vector.landing(part)
            data = outgoing.scratch(nbytes) if place is None else place
            await stream.readinto(data)
            await self.light(part, round_.vector.land, part, data)
        except PeerProtocolError as error:
            raise PeerProtocolError(error.message, stream.peer_id) from None
        finally:
            outgoing.landing = None
        if round_.rules.averaged(held):
            round_.news()

    # --------------------------------------------------------------------------------------------------------- ending

    async def finish(self) -> None:
        """The round is over: end our streams in order, and give the others a moment to end theirs."""
        await asyncio.gather(*(outgoing.finish() for outgoing in self._outgoing.values()))
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self._all_served()
        except TimeoutError:
            pass  # who still wants something asks another member

    def stop(self) -> None:
        """Take nothing and give nothing any more."""
        self._over = True
        for stream in list(self._serving):
            stream.abort()
        self._assigned.set()
        for begun in self._begun.values():
            begun.set()

    async def settle(self) -> None:
        """After `stop`, and when the tasks of the round have ended: wait until nothing uses the vector any more."""
        await self._all_served()
        await asyncio.gather(*self._jobs, return_exceptions=True)

    async def _all_served(self) -> None:
        while self._serving:
            self._served.clear()
            await self._served.wait()

    async def light(self, part: Part, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `compute`, for what is little work where the codec is little work."""
        if part.numel <= _LIGHT_ELEMENTS and self._round.vector.is_light(part):
            return function(*args, **kwargs)
        return await self.compute(part, function, *args, **kwargs)

    async def compute(self, part: Part, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on a part: in the loop or in another thread, as its size advises."""
        if part.numel <= _INLINE_ELEMENTS:
            return function(*args, **kwargs)
        # A function that runs in another thread cannot be stopped: who closes the round waits for it.
        job = asyncio.ensure_future(self._round.env.executor.run(function, *args, **kwargs))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return await asyncio.shield(job)


class _Outgoing:
    """Our stream to one owner: contributions and questions out, averages in."""

    def __init__(self, exchange: Exchange, round_: RoundView, owner: int) -> None:
        self._exchange, self._round, self._owner = exchange, round_, owner
        self._due: deque[Contribute | Ask] = deque()
        self._changed = asyncio.Event()
        self._stream: UpStream | None = None
        self._reader: asyncio.Task[None] | None = None
        self._scratch = bytearray()
        self.landing: int | None = None
        self.done = False

    @property
    def moved_bytes(self) -> int:
        return self._stream.bytes_sent + self._stream.bytes_received if self._stream is not None else 0

    def put(self, action: Contribute | Ask) -> None:
        self._due.append(action)
        self._changed.set()

    def scratch(self, nbytes: int) -> memoryview:
        if len(self._scratch) < nbytes:
            self._scratch = bytearray(nbytes)
        return memoryview(self._scratch)[:nbytes]

    def abort(self) -> None:
        if self._stream is not None:
            self._stream.abort()

    async def run(self) -> None:
        round_ = self._round
        try:
            opening = Reduce(round_.round_id)
            stream = await round_.endpoint.open(round_.members[self._owner].contact, opening, timeout_s=10.0)
            self._stream = stream
            self._reader = asyncio.ensure_future(self._read(stream))
            await self._write(stream, self._reader)
        except PeerError as error:
            if isinstance(error, PeerProtocolError):
                peer = round_.members[self._owner].contact.peer
                round_.env.events.emit(PeerDropped(peer=peer, where="all-reduce", reason=error.message))
            self.done = True
            round_.source_lost(self._owner, None)
        finally:
            self.done = True
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.gather(self._reader, return_exceptions=True)
            self.abort()  # does nothing after a clean end

    async def _write(self, stream: UpStream, reader: asyncio.Task[None]) -> None:
        reader.add_done_callback(lambda _: self._changed.set())
        while not reader.done():
            if self._due:
                await self._send(stream, self._due.popleft())
            else:
                self._changed.clear()
                await self._changed.wait()
        reader.result()  # raises what ended it

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
            message, nbytes = received
            if isinstance(message, PartAverage):
                await self._exchange.land(self, stream, message.held, nbytes)
            elif nbytes or not 0 <= message.part < len(self._round.parts):
                raise PeerProtocolError(f"no part {message.part}", stream.peer_id)
            else:
                self._round.source_lost(self._owner, message.part)

    async def finish(self) -> None:
        """The round is over: end the stream in order, so that its connection can be used again."""
        if self._stream is None or self.done or self._reader is None:
            return
        try:
            async with asyncio.timeout(1.0):
                await self._stream.end()
                await asyncio.shield(self._reader)
        except (PeerError, TimeoutError):
            self._stream.abort()


class _Inbound:
    """A member's stream to us: what it still has to be sent."""

    def __init__(self, round_: RoundView, stream: DownStream, exchange: Exchange) -> None:
        self.stream = stream
        self._round, self._exchange = round_, exchange
        # Part -> the attempt that it was refused for, None if it is to be given. One entry for each part, in order:
        # however often a member asks, no more is remembered.
        self._due: OrderedDict[int, int | None] = OrderedDict()
        self._changed = asyncio.Event()
        self._closed = False
        self._buffer = bytearray()
        self._seen = 0

    @property
    def moved_bytes(self) -> int:
        return self.stream.bytes_sent + self.stream.bytes_received

    def grew(self) -> bool:
        before, self._seen = self._seen, self.stream.bytes_received
        return self._seen > before

    async def read(self, nbytes: int) -> memoryview:
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        data = memoryview(self._buffer)[:nbytes]
        if nbytes:
            await self.stream.readinto(data)
        return data

    def offer(self, part: int) -> None:
        self._due[part] = None
        self._changed.set()

    def refuse(self, part: int, attempt: int) -> None:
        self._due.setdefault(part, attempt)
        self._changed.set()

    def close(self) -> None:
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
                data = await self._exchange.compute(part, self._round.vector.average_bytes, part, held.digest)
            if data is None:
                await self.stream.send(PartAbsent(number, held.attempt))
            else:
                await self.stream.send(PartAverage(held), data)


def _mask(members: set[int], count: int) -> bytes:
    """Bit i for member i."""
    return sum(1 << member for member in members).to_bytes((count + 7) // 8, "little")
