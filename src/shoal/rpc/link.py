"""A call link: one connection that carries calls, replies, notes and heartbeats, either way.

Small frames that are ready at the same time leave in one write. A link notices its own end (the transport says so) and
the other side's silence (heartbeat), and fails every call that still waits on it.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from shoal.base.bounded import put_last
from shoal.base.clock import seconds_text
from shoal.base.peer import PeerID
from shoal.base.tasks import LEAST_BYTES_PER_S, Tasks
from shoal.errors import PeerError, PeerProtocolError, PeerRefused, PeerTimeout, PeerUnreachable
from shoal.protocol.wire import MAX_DURATION_S, Beat, BeatReply, Bye, Call, Failure, Note, Reply, decode, encode
from shoal.rpc.allowance import call_cost
from shoal.rpc.framing import Kind, Limits, pack, read_frame
from shoal.transport.base import Connection

if TYPE_CHECKING:
    from shoal.rpc.connections import Connections
    from shoal.rpc.links import Links
    from shoal.rpc.serving import Services

__all__ = ["THE_PEER_LEFT", "CallLink", "LinkRetired"]

THE_PEER_LEFT = "the peer left"
"""The reason of a loss that was announced."""

_FAREWELL_S = 1.0
"""The longest time for a `Bye` to leave."""

_OUTBOX_OF_EACH = 256 << 10
"""So much may always wait on a link, whatever waits on others: strangers that do not read cost honest peers nothing."""

_HANDLED_AT_ONCE = 32
"""After so many messages of one link the other tasks have their turn."""

_ASK_TIME_S = 60.0
"""The longest time between two comparisons of clocks."""

_MOST_ASKED = 32
"""So many questions for the time are remembered: on a slow line answers come late."""

_CallMessage: TypeAlias = Call | Reply | Failure | Note | Beat | BeatReply | Bye


class LinkRetired(PeerUnreachable):
    """The other side closed the link as idle, and did not see this call: the call may be made again."""


class CallLink:
    """One end of a call link.

    Args:
        connection: the connection, used by nobody else.
        links: have what all links of the endpoint share, and are told what becomes of this one.
        connections: the endpoint's: say what else is open with the peer.
        services: the endpoint's: take calls and notes.
        tasks: the endpoint's.

    Attributes:
        heard: set once a message has come.
        process: the name of the process on the other side; empty until it has said it.
        outbox_bytes: small frames that wait to be sent, or are being sent.
    """

    def __init__(
        self, connection: Connection, links: Links, connections: Connections, services: Services, tasks: Tasks
    ) -> None:
        self.connection = connection
        self.serving = 0
        self._asked_time_at = 0.0
        # The times of our own clock at which we asked; its jumps before each, and the loop's time.
        self._asked: dict[float, tuple[int, float]] = {}
        self._links, self._open, self._services, self._tasks = links, connections, services, tasks
        self._limits: Limits = links.limits
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}  # of those
        self._next_id = 1
        self._outbox: list[bytes] = []
        self.outbox_bytes = 0
        self._more: asyncio.Future[None] | None = None  # the writer waits on it for something to send
        self._closed = False
        self._said_bye: Bye | None = None
        self._last_heard = self._last_used = self._loop.time()
        self.heard, self.process = asyncio.Event(), b""
        self._received = self._acked = 0
        self._read = 0  # bytes that had come when the frame was begun that is read now
        self._asked_at: float | None = None  # when the first Beat left that nothing has come after
        self._next_tick = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def peer_id(self) -> PeerID:
        """The peer on the other side."""
        return self.connection.peer_id

    @property
    def closed(self) -> bool:
        """True once the link can carry no more calls: it is lost, or one side has said Bye."""
        return self._closed or self._said_bye is not None

    @property
    def leaves(self) -> bool:
        """Whether one side has said that it leaves."""
        return self._said_bye is not None and self._said_bye.leaving

    def start(self) -> None:
        """Start to read and to watch."""
        self._tasks.spawn(self._read_loop())
        self._tasks.spawn(self._write_loop())
        self._ask_time()
        self.watch()

    def _ask_time(self) -> None:
        self._asked_time_at, clock = self._loop.time(), self._links.clocks.ours
        clock.time()  # notices a jump
        asked = clock.own.time()
        put_last(self._asked, asked, (clock.jumps, self._asked_time_at), _MOST_ASKED)
        self.post(Beat(asked, self._open.is_doubled(self.peer_id)))

    def used(self) -> None:
        """The link is not idle: a call was served, or a stream began or ended beside it."""
        self._last_used = self._loop.time()

    def ask(self) -> None:
        """Ask for a sign of life and the time."""
        self._acked = self.connection.bytes_acked
        with suppress(PeerUnreachable):  # too much waits to be sent: that is answered first
            self._ask_time()

    def spend(self, cost: float) -> float:
        """Count what the peer asks of us, in small calls; returns how long this link is not to be read, seconds."""
        return self._links.allowances.spend(self.connection.remote_host, self, cost, self._loop.time())

    @property
    def pending(self) -> bool:
        """Whether a call has not been answered yet."""
        return bool(self._waiting)

    @property
    def stuck(self) -> bool:
        """Whether, as far as we can tell, nothing has reached the other machine since we last asked it."""
        return self.connection.bytes_acked <= self._acked

    # -------------------------------------------------------------------------------------------------------- calls

    async def call(self, method: str, body: bytes, timeout_s: float) -> msgspec.Raw:
        """Send a call and wait for the body of its reply.

        Raises:
            PeerTimeout: no reply within `timeout_s`, and no long message comes meanwhile.
            PeerUnreachable: the link broke first.
            LinkRetired: the link was closed as idle before the peer saw the call.
            PeerRefused: the peer said no, and why.
            LocalError: the request is too long.
        """
        if self.closed:
            raise PeerUnreachable("the link is closed", self.peer_id)
        number = self._next_id
        self._next_id += 1
        self._last_used = self._loop.time()
        reply: asyncio.Future[msgspec.Raw] = self._loop.create_future()
        self._waiting[number] = reply
        try:
            self.post(Call(number, method, min(timeout_s, MAX_DURATION_S), msgspec.Raw(body)))
            self._wait_for(number, method, timeout_s)
            return await reply
        finally:
            if (timer := self._timers.pop(number, None)) is not None:
                timer.cancel()
            del self._waiting[number], reply  # it holds its exception, whose traceback holds this frame
            self._last_used = self._loop.time()

    def _wait_for(self, number: int, method: str, timeout_s: float) -> None:
        # Not `asyncio.timeout`, which costs several times as much.
        seen = self.connection.bytes_received
        self._timers[number] = self._loop.call_later(timeout_s, self._late, number, method, timeout_s, seen)

    def _late(self, number: int, method: str, timeout_s: float, seen: int) -> None:
        """A reply has not come in time. On a slow line it may be coming, or what is before it."""
        received = self.connection.bytes_received
        if received > self._read and received - seen >= LEAST_BYTES_PER_S * timeout_s:
            self._wait_for(number, method, timeout_s)
        elif not (waiting := self._waiting[number]).done():
            waiting.set_exception(PeerTimeout(f"no reply to {method} within {seconds_text(timeout_s)}", self.peer_id))

    def tell(self, frame: bytes) -> None:
        """Queue the frame of a note.

        Raises:
            PeerUnreachable: the link is closed, or the peer does not read.
        """
        if self.closed:
            raise PeerUnreachable("the link is closed", self.peer_id)
        self._last_used = self._loop.time()
        self._queue(frame)

    def post(self, message: _CallMessage) -> None:
        """Queue a small message; never waits.

        Raises:
            PeerUnreachable: too much is queued already; the peer does not read.
            LocalError: the message is too long.
        """
        self._queue(pack(Kind.CALL, message, limits=self._limits))

    def _queue(self, frame: bytes) -> None:
        waiting, limits = self.outbox_bytes + len(frame), self._limits
        if waiting > limits.outbox_bytes or (
            waiting > _OUTBOX_OF_EACH and self._open.outbox_bytes + len(frame) > limits.outboxes_bytes
        ):
            raise PeerUnreachable("the peer does not read: too many small messages wait", self.peer_id)
        self._outbox.append(frame)
        self.outbox_bytes = waiting
        self._wake_writer()

    def _wake_writer(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def _write_loop(self) -> None:
        """One task for the life of the link: one for each message would cost more than the message."""
        try:
            while not self._closed:
                if not self._outbox:
                    self._more = self._loop.create_future()
                    await self._more
                    continue
                frames, self._outbox = self._outbox, []
                data = frames[0] if len(frames) == 1 else b"".join(frames)
                del frames
                await self.connection.write(data)
                self.outbox_bytes -= len(data)
        except PeerError:
            pass  # the connection has ended: the reader first reads all that came (it may be a Bye), then ends the link

    # ------------------------------------------------------------------------------------------------------- reading

    async def _read_loop(self) -> None:
        handled = 0
        try:
            while not self._closed:  # earlier messages of a lost peer no longer count, not against its host either
                handled += 1
                if handled % _HANDLED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # bytes that are here are read without a wait: let others go on
                self._read = self.connection.bytes_received
                frame = await read_frame(self.connection, self._limits)
                if frame.kind is not Kind.CALL:
                    raise PeerProtocolError(f"{frame.kind.name} frame on a call link", self.peer_id)
                # mypy cannot see a union as a type argument; msgspec can.
                message: _CallMessage = decode(frame.header, _CallMessage)  # type: ignore[arg-type]
                wanted = isinstance(message, Reply | Failure) and message.id in self._waiting
                self._handle(message)
                if self.serving:
                    await asyncio.sleep(0)  # the answer may be ready: it counts before the next call is read
                if not wanted and (pause_s := self.spend(call_cost(len(frame.header)))) > 0.0:
                    await asyncio.sleep(pause_s)
                    if self.connection.closed:  # else a flood goes on, for minutes, after its sender is gone
                        raise PeerUnreachable("it ended while it was not read", self.peer_id)
        except msgspec.MsgspecError as error:
            self._lose(PeerProtocolError(f"undecodable message on a call link: {error}", self.peer_id))
        except PeerError as error:
            if self._said_bye is None:  # else `_say_bye` ends the link, once the Bye has left
                self._lose(error)

    def _handle(self, message: _CallMessage) -> None:
        self._last_heard, self._asked_at = self._loop.time(), None
        self.heard.set()
        match message:
            case Call():
                self._last_used = self._last_heard
                if self._said_bye is None:  # after an idle Bye the caller dials again
                    self._services.serve_call(self, message)
            case Note():
                self._last_used = self._last_heard
                self._services.take_note(self.peer_id, message)
            case Reply(id=number, body=body):
                if (waiting := self._waiting.get(number)) and not waiting.done():
                    waiting.set_result(body)
            case Failure(id=number, code=code, text=text):
                if (waiting := self._waiting.get(number)) and not waiting.done():
                    waiting.set_exception(PeerRefused(text or code, self.peer_id, code=code))
            case Beat():
                self._answer_beat(message)
            case BeatReply():
                self._take_beat(message)
            case Bye():
                self._said_bye = message
                self._lose(PeerUnreachable(THE_PEER_LEFT if message.leaving else "idle link closed", self.peer_id))

    def _answer_beat(self, beat: Beat) -> None:
        self.post(BeatReply(beat.time, self._links.clocks.ours.known_time(), self._links.twins.process))
        self._links.twins.told(self.peer_id, has_twin=beat.twin)

    def _take_beat(self, reply: BeatReply) -> None:
        jumps, asked_at = self._asked.pop(reply.asked, (None, -math.inf))
        self.process = reply.process
        self._links.twins.answered(self.peer_id, reply.process, asked_at)
        clock = self._links.clocks.ours
        clock.time()
        if jumps != clock.jumps:
            return  # it answers nothing that we asked, or our clock has jumped since: the times are not comparable
        if reply.time is None:
            self._links.clocks.abstained(self.peer_id)
        else:
            self._compare_clocks(reply.asked, reply.time)

    def _compare_clocks(self, asked: float, theirs: float) -> None:
        """Compare clocks. Differences below the time of the answer do not count: either side may have stood still."""
        now = self._links.clocks.ours.own.time()
        offset_s, error_s = theirs - (asked + now) / 2, abs(now - asked) / 2
        self._links.clocks.told(self.connection, math.copysign(max(0.0, abs(offset_s) - error_s), offset_s))

    # ------------------------------------------------------------------------------------------------------ watching

    def watch(self) -> None:
        """Look again when the next heartbeat is due. Call this when the peer became more important."""
        if self.closed:
            return
        period_s = self._limits.beat_s if self._open.matters(self.peer_id) else self._limits.idle_beat_s
        now = self._loop.time()
        if self._timer is not None:
            if self._next_tick <= now + period_s:
                return
            self._timer.cancel()
        self._next_tick = now + period_s
        self._timer = self._loop.call_at(self._next_tick, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._links.clocks.look()
        now, limits = self._loop.time(), self._limits
        busy = self._open.matters(self.peer_id)
        period_s = limits.beat_s if busy else limits.idle_beat_s
        limit_s = limits.silence_s if busy else 3 * limits.idle_beat_s
        # Its answer may be waiting behind what it sends: on a line that is full, for many seconds. But if two processes
        # have its key, what one of them sends is no sign of life of the other.
        mute = self._open.is_mute(self.peer_id)
        received = self.connection.bytes_received if mute else self._open.bytes_received(self.peer_id)
        if received > self._received:
            self._last_heard, self._asked_at = now, None
        self._received = received
        silent_s = now - self._last_heard
        # Silence counts from when we asked: a peer that was idle, and so not asked, is not lost when it gets busy.
        if self._asked_at is not None and now - self._asked_at >= limit_s - 1.05 * period_s:
            self._lose(PeerUnreachable(f"silent for {silent_s:.1f} s", self.peer_id))
            return
        if not busy and not self._waiting and not self.serving and now - self._last_used > limits.idle_close_s:
            self._said_bye = Bye(leaving=False)
            self._tasks.spawn(self._say_bye(self._said_bye))
            return
        unknown = self._links.clocks.ours.offset_s(self.peer_id) is None
        if silent_s >= period_s * 0.9 or unknown or now - self._asked_time_at >= _ASK_TIME_S:
            try:
                self._ask_time()
            except PeerUnreachable as error:
                self._lose(error)
                return
            self._asked_at = now if self._asked_at is None else self._asked_at
        self.watch()

    # ------------------------------------------------------------------------------------------------------- closing

    async def close(self, *, leaving: bool) -> None:
        """Say `Bye` and close. Calls that still wait fail."""
        if not self._closed:
            self._said_bye = Bye(leaving)
            await self._say_bye(self._said_bye)

    async def _say_bye(self, bye: Bye) -> None:
        if self._timer is not None:
            self._timer.cancel()
        frames, self._outbox = self._outbox, []
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self.connection.write(b"".join([*frames, pack(Kind.CALL, bye)]))
                await self.connection.close()
        except (PeerError, TimeoutError):
            pass  # the other side is gone already: nothing left to say to it
        self._lose(PeerUnreachable("the link was closed", self.peer_id))

    def abort(self) -> None:
        """Close at once, without a `Bye`."""
        self._lose(PeerUnreachable("the link was closed", self.peer_id))

    def _lose(self, error: PeerError) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.connection.abort()
        self._wake_writer()
        expected = self._said_bye is not None and not self._said_bye.leaving
        kind = LinkRetired if expected else PeerUnreachable
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(kind(f"connection lost: {error.message}", self.peer_id))
        self._links.closed(self, error, expected)


def reply_frame(number: int, message: object) -> Reply:
    """The reply to call `number`."""
    return Reply(number, msgspec.Raw(encode(message)))
