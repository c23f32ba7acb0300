"""The parts that all pipes of a simulated network share: links, lines, chance, the trace of deliveries."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import math
import random
import struct
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from shoal.errors import ConfigError
from shoal.sim.loop import VirtualLoop, world_time

if TYPE_CHECKING:
    from shoal.sim.pipes import Host

__all__ = ["PACKET_BYTES", "SMALL_BYTES", "Delivery", "Line", "Link", "Medium"]

SMALL_BYTES = 2048
"""A message of at most this size goes ahead of bulk."""

PACKET_BYTES = 1460
_RETRANSMIT_S = 0.2

_NOBODY = contextvars.Context()
_TRACE = struct.Struct("<dIIQI")


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The way between two hosts.

    Attributes:
        latency_s: the latency one way, seconds.
        jitter_s: each segment takes up to this much longer, evenly distributed, seconds.
        loss: the share of packets that is lost, from 0 to below 1. No bytes go missing: lost packets come later.
        bandwidth_bytes_s: the rate of each pipe there, each way, in addition to the limits of the hosts' own lines;
            None for no limit.

    Raises:
        ConfigError: a number is out of its range.
    """

    latency_s: float = 0.01
    jitter_s: float = 0.0
    loss: float = 0.0
    bandwidth_bytes_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("latency_s", self.latency_s), ("jitter_s", self.jitter_s)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be 0 or more seconds, got {value}")
        if not 0 <= self.loss < 1:
            raise ConfigError(f"loss must be from 0 to below 1, got {self.loss}")
        if self.bandwidth_bytes_s is not None and not self.bandwidth_bytes_s > 0:
            raise ConfigError(f"bandwidth_bytes_s must be above 0, or None, got {self.bandwidth_bytes_s}")


class Delivery(NamedTuple):
    """One line of the trace: bytes that arrived."""

    time_s: float
    source: str
    target: str
    nbytes: int
    crc32: int


class Medium:
    """The parts that all flows of a network share: loop, chance, window, the size of small messages, and trace."""

    __slots__ = (
        "_backs_off",
        "_digest",
        "delivered_bytes",
        "deliveries",
        "log",
        "loop",
        "mischief",
        "rng",
        "small_bytes",
        "window_bytes",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        window_bytes: int,
        *,
        fair: bool,
        backs_off: bool,
        log: bool,
    ) -> None:
        self.loop, self.rng, self.window_bytes = loop, rng, window_bytes
        self.mischief = loop.mischief if isinstance(loop, VirtualLoop) else None
        self.small_bytes = SMALL_BYTES if fair else 0
        self._backs_off = backs_off
        self.deliveries = self.delivered_bytes = 0
        self.log: list[Delivery] | None = [] if log else None
        self._digest = hashlib.blake2b(digest_size=16)

    def at(self, when: float, callback: Callable[[], object]) -> None:
        """Call back at a time, without an owner: a host that is frozen or killed does not stop its network."""
        if isinstance(self.loop, VirtualLoop):
            self.loop.call_at_world_time(when, callback, _NOBODY)
        else:
            self.loop.call_at(when, callback, context=_NOBODY)

    def time(self) -> float:
        """The network's own time, which no frozen host holds up."""
        return world_time(self.loop)

    def delay_s(self, link: Link, nbytes: int, slowness: float) -> float:
        """The time of flight of a segment: latency, jitter, the delay of a lost packet, and whims."""
        latency_s = delay_s = link.latency_s * slowness
        if self.mischief is not None:
            delay_s += self.mischief.late_s()
        if link.jitter_s:
            delay_s += self.rng.random() * link.jitter_s
        if link.loss and self.rng.random() > (1.0 - link.loss) ** (1 + nbytes // PACKET_BYTES):
            # Later packets show that one is missing, but nothing follows a small message: only a timeout tells.
            delay_s += 2 * latency_s if nbytes > SMALL_BYTES else max(_RETRANSMIT_S, 2 * latency_s)
        return delay_s

    def tried_again_at(self, since: float) -> float:
        """The time at which bytes that were lost since then are sent anew: now, or at TCP's next try."""
        now, pause_s, at = self.time(), _RETRANSMIT_S, since
        while self._backs_off and at < now:
            at, pause_s = at + pause_s, 2 * pause_s
        return max(now, at)

    def delivered(self, source: Host, target: Host, data: bytes) -> None:
        """Write a delivery into the trace."""
        now, nbytes, crc32 = self.time(), len(data), zlib.crc32(data)
        self.deliveries += 1
        self.delivered_bytes += nbytes
        source.bytes_out += nbytes
        target.bytes_in += nbytes
        self._digest.update(_TRACE.pack(now, source.index, target.index, nbytes, crc32))
        if self.log is not None:
            self.log.append(Delivery(now, source.name, target.name, nbytes, crc32))

    def digest(self) -> str:
        """The hash of the trace so far."""
        return self._digest.hexdigest()


class Line:
    """One direction of a host's access to the network.

    Attributes:
        rate: bytes per second; None for no limit.
        ahead_s: how long all segments took so far that went ahead, seconds. The others that wait come later by that.
    """

    __slots__ = ("ahead_s", "busy_until", "rate", "small_from", "small_until")

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.busy_until = self.small_from = self.small_until = self.ahead_s = 0.0

    def occupy(self, start: float, nbytes: int, *, ahead: bool) -> float:
        """Use the line for so many bytes, from `start` on at the earliest; returns the time at which all are through.

        A segment that goes `ahead` waits only for others that do.
        """
        taken_s = nbytes / self.rate if self.rate is not None else 0.0
        self.busy_until = max(self.busy_until, start) + taken_s
        if not ahead:
            return self.busy_until
        self.ahead_s += taken_s
        if start < self.small_from:
            return start + taken_s  # it comes before one that was sent earlier, over a longer way
        self.small_from = start
        self.small_until = max(self.small_until, start) + taken_s
        return self.small_until

    def stretch(self, now: float, ratio: float) -> None:
        """Segments on the line take longer by `ratio` from now on."""
        self.busy_until = max(now, now + (self.busy_until - now) * ratio)
        self.small_until = max(now, now + (self.small_until - now) * ratio)
