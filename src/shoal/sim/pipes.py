"""How bytes move in the simulated network: hosts, their access lines, and the two flows of each pipe.

The model, per direction of a pipe (a `Flow`):

- A write leaves the host when its uplink is free, flies for the link's latency, and arrives when the downlink has had
  time for it. Segments of several pipes take turns on the uplink. Short messages of one pipe that wait there travel
  together, as a pipe knows only bytes: else a pipe would carry one of them in each turn. On the downlink segments come
  in the order in which they were sent. Messages of at most `SMALL_BYTES` on a pipe with nothing queued go ahead of
  bulk, as fair queueing does for sparse flows; the bulk that waits for the line comes later by that. In a network that
  is not `fair` they do not go ahead.
- At most `window_bytes` (and one segment) are in flight or unread at the other side. The rest waits in the sender's
  queue, and so the writer waits. Credit comes back after one latency, a quarter of the window at a time.
- Jitter and losses delay; nothing is lost, and nothing overtakes within a pipe.
- Whims (`shoal.sim.whims`) deliver bytes in pieces or late, and break a pipe now and then.
- A closed path (partition, stall, a machine that is gone) holds bytes that would leave or arrive. It ends nothing. When
  it opens again, all bytes come in order.
- When a host gets slower or faster, so do bytes under way: their remaining time is stretched.

Costs: one timer per segment, two when the uplink has a rate; no work per byte but the checksum of the trace.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from shoal.errors import PeerError
from shoal.sim.medium import PACKET_BYTES, Line, Link, Medium
from shoal.sim.owner import Owner
from shoal.transport.base import HIGH_WATER_BYTES, PipeAcceptor, PipeUser

__all__ = ["Dial", "Flow", "Host", "PipeEnd"]

_SOON_S = 1e-9  # a real loop may fire a timer this much early

_SEGMENT_S = 1.0
"""What is written at once arrives in pieces of so many seconds, at the rate of the slowest line."""

_TURN_BYTES = 16 << 10
"""Short messages that wait for the uplink travel together up to this size, and up to `_SEGMENT_S`."""


class Host:
    """A machine, and the process on it.

    Attributes:
        life: the owner of the process's tasks; a new one after each restart.
        alive: whether the process runs, perhaps stalled.
        up: whether the machine answers: a crash leaves it up, and a vanished machine is not up.
        stalled_until: the host neither sends nor receives before this time; None if it is not stalled.
        awake: whether it takes part in the network: the machine is up and not stalled.
        group: its side of the partition.
        walled: True: new connections from other hosts are refused; False: they get no answer; None: they come in.
        slowness: its lines are slower, and its latencies longer, by this factor.
    """

    def __init__(self, medium: Medium, name: str, index: int, *, up: float | None, down: float | None) -> None:
        self.name, self.index = name, index
        self.life = Owner(name)
        self.alive = True
        self.up = True
        self.stalled_until: float | None = None
        self.awake = True
        self.group = 0
        self.walled: bool | None = None
        self.slowness = 1.0
        self.rates = (up, down)
        self.uplink, self.downlink = Line(up), Line(down)
        self.listeners: dict[int, tuple[PipeAcceptor, bytes]] = {}
        self.next_port = 4000
        self.ends: dict[PipeEnd, None] = {}
        self.ghosts: list[PipeEnd] = []
        self.bytes_out = self.bytes_in = 0
        self._medium = medium
        self._queue: deque[Flow] = deque()  # flows with something to send, in turn
        self._pump_at: float | None = None

    def set_state(self, *, alive: bool, up: bool, stalled_until: float | None) -> None:
        """Change whether the host is alive, up or stalled."""
        self.alive, self.up, self.stalled_until = alive, up, stalled_until
        self.awake = up and stalled_until is None

    def slow_down(self, factor: float) -> None:
        """Make both lines and all latencies slower by `factor`, compared with their normal values."""
        now, ratio = self._medium.time(), factor / self.slowness
        self.slowness = factor
        for line, rate in zip((self.uplink, self.downlink), self.rates, strict=True):
            line.rate = None if rate is None else rate / factor
            line.stretch(now, ratio)
        if self._pump_at is not None:
            self._pump_later()

    def reopen(self, *, at_once: bool) -> None:
        """Let bytes go on: paths to and from this host may be open again. See `Flow.reopen`."""
        for end in list(self.ends):
            end.into.reopen(at_once=at_once)
            end.out.reopen(at_once=at_once)

    def want_turn(self, flow: Flow) -> None:
        """Queue for the uplink."""
        if not flow.in_turn:
            flow.in_turn = True
            self._queue.append(flow)
        if self._pump_at is None:
            self._pump_at = self._medium.time()
            self._pump()

    def _pump(self) -> None:
        """Let the flows send a segment each, one after another, at the rate of the uplink."""
        now = self._medium.time() + _SOON_S
        if self._pump_at is None or self._pump_at > now:
            return  # this timer is from before the rate changed; there is another
        queue, line = self._queue, self.uplink
        while queue and (line.rate is None or line.busy_until <= now):
            flow = queue.popleft()
            flow.in_turn = False
            if flow.send_next() and not flow.in_turn:
                flow.in_turn = True
                queue.append(flow)
        if queue:
            self._pump_later()
        else:
            self._pump_at = None

    def _pump_later(self) -> None:
        self._pump_at = self.uplink.busy_until
        self._medium.at(self._pump_at, self._pump)


class PipeEnd:
    """One end of a pipe, as the transport sees it (`Pipe`)."""

    __slots__ = ("finishing", "host", "into", "open", "opened", "out", "user")

    def __init__(self, host: Host, user: PipeUser) -> None:
        self.host, self.user = host, user
        self.open, self.opened, self.finishing = True, False, False
        self.out: Flow
        self.into: Flow
        host.ends[self] = None

    @property
    def hosts(self) -> tuple[str, str]:
        """The names of this host and of the other one."""
        return self.out.src.name, self.out.dst.name

    @property
    def queued_bytes(self) -> int:
        """The bytes that have not left this host."""
        return self.out.queued_bytes if self.open else 0

    @property
    def acked_bytes(self) -> int:
        """The bytes that the other machine is known to have, read or not."""
        return self.out.acked_bytes() if self.open else 0

    def send(self, data: bytes) -> None:
        """Send bytes; see `Pipe`. A pipe that has ended drops them."""
        if self.open and not self.finishing:
            self.out.send(data)

    def consumed(self, nbytes: int) -> None:
        """Give credit back to the other side."""
        if self.open:
            self.into.consumed(nbytes)

    def finish(self) -> None:
        """End the pipe after the queued bytes."""
        if self.open and not self.finishing:
            self.finishing = True
            self.out.end_if_empty()

    def abort(self, reason: str) -> None:
        """End the pipe now."""
        if self.open:
            self.out.reset("the connection was reset by the other side")
            self.lose(reason)

    def lose(self, reason: str) -> None:
        """End this end of the pipe."""
        if self.open:
            self.open = False
            del self.host.ends[self]
            self.out.clear()
            if self.opened:
                self.user.pipe_lost(reason)

    def forget(self) -> None:
        """Drop the flows: this end is over, and the other one knows."""
        if hasattr(self, "out"):
            del self.out, self.into


class _Flying(NamedTuple):
    """A segment or a signal under way.

    Attributes:
        at: the time of its arrival, if nothing more goes ahead of it.
        item: its content.
        through: when the downlink has had time for it, less `Line.ahead_s`. That grows while it is under way.
    """

    at: float
    item: bytes | Callable[[], None]
    through: float = -math.inf


class Flow:
    """One direction of a pipe."""

    __slots__ = (
        "_acked",
        "_acks",
        "_again_at",
        "_credit_held",
        "_end_sent",
        "_flying",
        "_held_until",
        "_line",
        "_lost_since",
        "_medium",
        "_owed",
        "_queue",
        "_unread",
        "dst",
        "in_turn",
        "link",
        "queued_bytes",
        "receiver",
        "sender",
        "src",
    )

    def __init__(self, medium: Medium, sender: PipeEnd, receiver: PipeEnd, link: Link) -> None:
        self.sender, self.receiver = sender, receiver
        self.src, self.dst = sender.host, receiver.host
        self.link = link
        self.queued_bytes = 0
        self.in_turn = False
        self._medium = medium
        self._queue: deque[bytes] = deque()
        self._flying: deque[_Flying] = deque()
        self._held_until = 0.0
        self._line = Line(None)  # of this pipe alone: the way between the two hosts, where it is narrower than theirs
        self._unread = 0  # bytes sent for which no credit has come back
        self._owed = 0  # bytes read there for which no credit was sent
        self._credit_held = 0
        self._end_sent = False
        self._lost_since: float | None = None  # when the first byte met a closed path
        self._again_at = 0.0  # when it is sent anew; until then nothing else leaves
        self._acks: deque[tuple[float, int]] = deque()  # when an acknowledgement is back, and of how many bytes
        self._acked = 0

    # ------------------------------------------------------------------------------------------------------- leaving

    def _may_leave(self) -> bool:
        src, medium = self.src, self._medium
        if src.awake and src.group != self.dst.group and self._lost_since is None:
            self._lost_since = medium.time()
        way = src.awake and src.group == self.dst.group and self._again_at <= medium.time() + _SOON_S
        return way and self._unread < medium.window_bytes

    def _unlimited(self) -> bool:
        return self.src.uplink.rate is None or self.src is self.dst

    def _is_small(self, nbytes: int) -> bool:
        return nbytes <= self._medium.small_bytes

    def send(self, data: bytes) -> None:
        """Send the bytes: those of a slow line one after another, as they come there."""
        most = self._segment_bytes()
        if len(data) <= most:
            self._send(data)
            return
        for start in range(0, len(data), most):
            self._send(data[start : start + most])

    def _segment_bytes(self) -> int:
        """The most that arrives at once."""
        if self.src is self.dst:
            return sys.maxsize
        rates = (self.src.uplink.rate, self.dst.downlink.rate, self.link.bandwidth_bytes_s)
        slowest = min((rate for rate in rates if rate is not None), default=math.inf)
        return sys.maxsize if slowest == math.inf else max(PACKET_BYTES, int(slowest * _SEGMENT_S))

    def _send(self, data: bytes) -> None:
        """Send a segment now if that is possible; otherwise queue it."""
        if not self._queue and (self._is_small(len(data)) or self._unlimited()) and self._may_leave():
            self._leave(data)
            return
        self._queue.append(data)
        self.queued_bytes += len(data)
        self.kick()

    def kick(self) -> None:
        """Send all bytes that can be sent, after a change."""
        if self._queue and self._may_leave():
            if self._unlimited():
                while self.send_next():
                    pass
            else:
                self.src.want_turn(self)
        elif self.sender.finishing:
            self.end_if_empty()

    def send_next(self) -> bool:
        """Send the first segment of the queue; returns whether another can follow."""
        if not self._queue or not self._may_leave():
            return False
        data = self._next_segment()
        before = self.queued_bytes
        self.queued_bytes = before - len(data)
        self._leave(data)
        if self.queued_bytes <= HIGH_WATER_BYTES < before:
            self.sender.user.resume_writing()
        if not self._queue:
            if self.sender.finishing:
                self.end_if_empty()
            return False
        return self._may_leave()

    def _next_segment(self) -> bytes:
        """Take the next segment from the queue: messages that wait for the uplink travel together."""
        queue, parts = self._queue, [self._queue.popleft()]
        size, most = len(parts[0]), 0 if self._unlimited() else min(self._segment_bytes(), _TURN_BYTES)
        while queue and size + len(queue[0]) <= most:
            size += len(queue[0])
            parts.append(queue.popleft())
        return b"".join(parts)

    def _leave(self, data: bytes) -> None:
        src, dst, medium, nbytes = self.src, self.dst, self._medium, len(data)
        arrival = now = medium.time()
        ahead, through = self._is_small(nbytes), -math.inf
        self._unread += nbytes
        if src is not dst:
            delay_s = medium.delay_s(self.link, nbytes, max(src.slowness, dst.slowness))
            arrival += delay_s
            if src.uplink.rate is not None:
                arrival = src.uplink.occupy(now, nbytes, ahead=ahead) + delay_s
            if dst.downlink.rate is not None:
                # The first byte is there one latency after it left: both lines are busy with it at the same time.
                through = dst.downlink.occupy(now + delay_s, nbytes, ahead=ahead)
                arrival = max(arrival, through)
                through = -math.inf if ahead else through - dst.downlink.ahead_s
            if self.link.bandwidth_bytes_s is not None:
                self._line.rate = self.link.bandwidth_bytes_s
                arrival = max(arrival, self._line.occupy(now + delay_s, nbytes, ahead=ahead))
        self._fly(_Flying(arrival, data, through))

    def _fly(self, flying: _Flying) -> None:
        # A segment that jitter would let overtake waits behind earlier ones: only the first in flight can arrive.
        self._flying.append(flying)
        self._medium.at(flying.at, self._arrive)

    def _latency_s(self) -> float:
        """The time of flight of a signal without bytes."""
        if self.src is self.dst:
            return 0.0
        return self._medium.delay_s(self.link, 0, max(self.src.slowness, self.dst.slowness))

    def signal(self, callback: Callable[[], None]) -> None:
        """Send a signal: a function that is called at the other side when it arrives, in its place among the bytes."""
        self._fly(_Flying(self._medium.time() + self._latency_s(), callback))

    # ------------------------------------------------------------------------------------------------------ arriving

    def _arrive(self) -> None:
        """Deliver what is due. If the path is closed it waits for `reopen`."""
        now, dst, flying = self._medium.time() + _SOON_S, self.dst, self._flying
        if dst.awake and self.src.group == dst.group and self._held_until <= now:
            while flying and flying[0].at <= now:
                first = flying.popleft()
                if (through := first.through + dst.downlink.ahead_s) > now:  # others went ahead of it
                    flying.appendleft(first._replace(at=through))
                    self._medium.at(through, self._arrive)
                else:
                    self._deliver(first.item)

    def _deliver(self, item: bytes | Callable[[], None]) -> None:
        if not isinstance(item, bytes):
            item()
        elif self.receiver.open:
            self._medium.delivered(self.src, self.dst, item)
            self._acks.append((self._medium.time() + self._ack_s(), len(item)))
            self._note_acks()
            if (mischief := self._medium.mischief) is None or self.src is self.dst:
                self.receiver.user.data_received(item)
                return
            for piece in mischief.pieces(item):
                if self.receiver.open:
                    self.receiver.user.data_received(piece)
            if self.receiver.open and mischief.breaks():
                self.receiver.abort("the connection broke")

    def reopen(self, *, at_once: bool) -> None:
        """Let bytes move on, as the path may be open again: at once, or after one more latency."""
        now = again_at = self._medium.time()
        late = bool(self._flying) and self._flying[0].at < now
        if self.src.group == self.dst.group and not at_once:
            since = min(self._flying[0].at if late else now, now if self._lost_since is None else self._lost_since)
            again_at = self._again_at = max(self._again_at, self._medium.tried_again_at(since))
            self._lost_since = None
        if late or self._credit_held or again_at > now:
            until = now if at_once else again_at + self._latency_s()
            if late:
                self._held_until = until
            self._medium.at(again_at, self.kick)
            self._medium.at(until, self._catch_up)
        self.kick()

    def _catch_up(self) -> None:
        self._arrive()
        if self._credit_held:
            count, self._credit_held = self._credit_held, 0
            self._credit(count)

    def stretch(self, ratio: float) -> None:
        """Segments in flight take longer by `ratio` from now on (below 1: they arrive sooner)."""
        now, ahead_s = self._medium.time(), self.dst.downlink.ahead_s

        def stretched(at: float) -> float:
            return now + (at - now) * ratio if at > now else at

        self._flying = deque(
            _Flying(stretched(at), item, stretched(through + ahead_s) - ahead_s) for at, item, through in self._flying
        )
        for each in self._flying:
            if each.at > now:
                self._medium.at(each.at, self._arrive)

    def acked_bytes(self) -> int:
        """The bytes that the other machine is known to have taken, even for a process that stands still."""
        self._note_acks()
        if not self.dst.up or self.src.group != self.dst.group or self._held_until > self._medium.time():
            return self._acked
        since = self._medium.time() - self._ack_s()
        return self._acked + sum(
            len(each.item) for each in self._flying if each.at <= since and isinstance(each.item, bytes)
        )

    def _ack_s(self) -> float:
        """The time that an acknowledgement takes: without jitter, because it is seldom asked for."""
        return 0.0 if self.src is self.dst else self.link.latency_s * max(self.src.slowness, self.dst.slowness)

    def _note_acks(self) -> None:
        now, acks = self._medium.time(), self._acks
        while acks and acks[0][0] <= now:
            self._acked += acks.popleft()[1]

    # ---------------------------------------------------------------------------------------------- credit and the end

    def consumed(self, nbytes: int) -> None:
        """Count the bytes that the receiver has taken, and tell the sender now and then."""
        self._owed += nbytes
        if self._owed * 4 >= self._medium.window_bytes:
            nbytes, self._owed = self._owed, 0
            self._medium.at(self._medium.time() + self._latency_s(), partial(self._credit, nbytes))

    def _credit(self, nbytes: int) -> None:
        if not self.src.awake or self.src.group != self.dst.group:
            self._credit_held += nbytes
            return
        self._unread -= nbytes
        self.kick()

    def end_if_empty(self) -> None:
        """Send the end of the pipe if all bytes have left."""
        if not self._queue and not self._end_sent and self.src.awake and self.src.group == self.dst.group:
            self.reset("the connection was closed by the other side")
            self.sender.lose("closed on this side")

    def reset(self, reason: str) -> None:
        """Send the end of the pipe now; queued bytes are dropped, bytes in flight arrive before it."""
        if not self._end_sent:
            self._end_sent = True
            self.clear()
            self.signal(partial(self._end_arrives, reason))

    def _end_arrives(self, reason: str) -> None:
        self.receiver.lose(reason)
        # Both ends are over. Without their cycles they are freed at once, and not by the garbage collector.
        for end in (self.sender, self.receiver):
            end.forget()

    def clear(self) -> None:
        """Drop the queued bytes."""
        self._queue.clear()
        self.queued_bytes = 0


class Dial:
    """An attempt to open a pipe."""

    __slots__ = ("dst", "end", "future", "greeting", "life", "port", "src", "user")

    def __init__(self, src: Host, dst: Host, port: int, greeting: bytes, user: PipeUser) -> None:
        self.src, self.dst, self.port, self.greeting, self.user = src, dst, port, greeting, user
        self.life = src.life
        self.end: PipeEnd | None = None
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: PeerError) -> None:
        """End the attempt."""
        if not self.future.done():
            self.future.set_exception(error)
