"""How fast bulk data may leave, so that it does not fill the queues of a slow line. Pure logic: no loop, no socket.

A line has a queue, and TCP fills it: the more connections, the fuller, also with BBR, each of whose connections keeps
as much under way as it believes to have alone. Small messages then wait behind megabytes, and where the queue is full
they are dropped as often as bulk is, which costs them a timeout of TCP each time.

So a peer looks ten times a second at its connections for bulk data. All of them share its line up: the shortest of
their queues is the line's, and what they deliver together while it is there is the line's rate. If the queue is longer
than `QUEUE_S`, they may together send what the line delivers, less what empties the queue; if it is shorter, a little
more each time. Each gets an equal share; one that is slower for another reason leaves the rest to the others. The
kernel sends at that pace (`SO_MAX_PACING_RATE`), which also holds for what it was given before. On a line without a
queue there is no limit.

Delay as a sign of congestion is as old as TCP Vegas (Brakmo et al. 1994) and as in LEDBAT (RFC 6817). Here the kernel's
own congestion control is still at work below, so this can only make a peer more polite. If that does not help for
`_PATIENCE_S`, the queue is not ours but somebody else's who shares the line: then there is no limit for a while, or the
peer would wait for as long as the other one sends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

__all__ = ["LOOK_S", "Flow", "Pacing"]

LOOK_S = 0.1
"""The time between two looks."""

QUEUE_S = 0.06
"""The queue that is allowed. Below 40 ms a delayed acknowledgement would look like one."""

_DRAIN_S = 0.5
"""What the queue has too much is to be gone after this time."""

_GROWTH, _RETURN = 0.05, 0.5
"""The rate grows by this part in each look on an empty queue; faster up to what the line has carried before."""

_FORGET = 0.998
"""What the line has carried counts so much less in each look: half of it after half a minute of sending."""

_WINDOW_S = 0.55
"""Rates are measured over this time."""

_PATIENCE_S, _APART_S = 5.0, 10.0
"""After so long with a queue the limit goes, for so long."""

_LEAST_PART, _LEAST_BYTES_PER_S = 0.3, 16 << 10

K = TypeVar("K")


class Flow(NamedTuple):
    """What the system knows of the way of one connection.

    Attributes:
        waits: whether written bytes have not been sent yet.
        delivered_bytes: acknowledged by the other system so far, in any order.
        queue_s: by how much the round trip is longer now than it was at best.
        round_trip_s: the present one, smoothed.
    """

    waits: bool
    delivered_bytes: int
    queue_s: float
    round_trip_s: float


class Pacing(Generic[K]):
    """The pace of all bulk data of one peer.

    Attributes:
        rate: what all may send together, bytes per second; None without a limit.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self._best, self._was_full = 0.0, False
        self._seen: deque[tuple[float, Mapping[K, Flow]]] = deque()
        self._next_drain = self._apart_until = -math.inf
        self._queue_since = math.inf

    @property
    def line_bytes_per_s(self) -> float | None:
        """What the line up carries, as far as it was ever full; None as long as no queue was seen."""
        return self._best if self._was_full else None

    def look(self, now: float, flows: Mapping[K, Flow]) -> dict[K, float]:
        """Look at all connections for bulk data; to be called every `LOOK_S` while any of them has something to send.

        Args:
            now: seconds.
            flows: what is known of each.

        Returns:
            How fast each of those that are busy may send from now on, bytes per second; infinity, or nothing, for no
            limit.
        """
        last = self._seen[-1][1] if self._seen else {}
        busy = [key for key, flow in flows.items() if flow.waits and key in last and last[key].waits]
        if not busy:
            self._seen.clear()  # a pause says nothing about the line
        self._seen.append((now, dict(flows)))
        while self._seen[0][0] < now - _WINDOW_S:
            self._seen.popleft()
        if now < self._apart_until:
            return dict.fromkeys(busy, math.inf)
        if len(self._seen) > 2:
            rates = {key: self._rate(key) for key in flows}
            queue_s, at = min((flows[key].queue_s, flows[key].round_trip_s) for key in busy)
            self._adapt(now, sum(rates.values()), queue_s, at)
            return self._shares({key: rates[key] for key in busy})
        return self._shares(dict.fromkeys(busy, math.inf))

    def _rate(self, key: K) -> float:
        steps = [
            max(0, after[key].delivered_bytes - before[key].delivered_bytes)
            for (_, before), (_, after) in pairwise(self._seen)
            if key in before and key in after
        ]
        return sum(steps) / (self._seen[-1][0] - self._seen[0][0])

    def _adapt(self, now: float, delivered: float, queue_s: float, round_trip_s: float) -> None:
        self._best = max(delivered, self._best * _FORGET)
        self._queue_since = min(self._queue_since, now) if queue_s > QUEUE_S else math.inf
        if now > self._queue_since + _PATIENCE_S:
            self.rate, self._queue_since, self._apart_until = None, math.inf, now + _APART_S
        elif queue_s > QUEUE_S:
            if now >= self._next_drain:  # the effect shows after a round trip
                self._next_drain = now + round_trip_s
                part = max(_LEAST_PART, 1.0 - (queue_s - QUEUE_S) / _DRAIN_S)
                self.rate, self._was_full = max(delivered * part, _LEAST_BYTES_PER_S), True
        elif self.rate is not None and delivered > 0.7 * self.rate:
            growth = _RETURN if self.rate < 0.8 * self._best else _GROWTH
            self.rate *= 1.0 + growth * (1.0 - queue_s / QUEUE_S)

    def _shares(self, rates: dict[K, float]) -> dict[K, float]:
        """Equal shares, except that those which use less leave the rest to the others."""
        shares: dict[K, float] = {}
        if self.rate is None:
            return shares
        left = self.rate
        for count, key in enumerate(sorted(rates, key=lambda each: rates[each])):
            shares[key] = left / (len(rates) - count)
            left -= min(shares[key], 1.2 * rates[key])
        return shares
