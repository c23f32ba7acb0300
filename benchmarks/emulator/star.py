"""What happens to packets between hosts that each hang on a line up and a line down. Pure: times go in and come out.

A line is what a home router has: a queue that takes packets in order and drops those for which there is no room, a rate
at which the queue empties, and a delay. A packet goes over the sender's line up and then over the receiver's line down;
whether it is lost on the way (not for want of room) is drawn once, after the line up has carried it.

What comes and goes are trains (see `train`): each is carried as the packets that it stands for, some of which may be
dropped or lost, and arrives when its last packet does. Times are seconds on any clock that does not go backwards, sizes
are bytes of IP packets, headers included.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.emulator.train import Train, cut, measure

__all__ = ["Line", "Shape", "Star"]


class Shape(NamedTuple):
    """What every host's lines are like.

    Attributes:
        rate_mbit: of each line, 10^6 bits per second.
        delay_ms: of each line; a round trip takes four of them.
        loss: the part of packets that is lost between two hosts, 0 to below 1.
        queue_ms: a packet that would wait longer than this for a line is dropped.
    """

    rate_mbit: float = 100.0
    delay_ms: float = 10.0
    loss: float = 0.0
    queue_ms: float = 100.0


class Line:
    """One direction of a host's access to the network.

    Attributes:
        carried: packets that were carried.
        dropped: packets for which there was no room.
    """

    def __init__(self, shape: Shape) -> None:
        self._byte_s = 8e-6 / shape.rate_mbit
        self._delay_s, self._queue_s = shape.delay_ms / 1e3, shape.queue_ms / 1e3
        self._free_at = 0.0
        self.carried = self.dropped = 0

    def offer(self, now: float, wire_bytes: int, count: int = 1) -> tuple[float, int]:
        """A train of `count` packets comes to the line.

        Returns:
            When the last byte of those that are carried is at the other end, and how many they are: the first ones.
        """
        start = max(now, self._free_at)
        each_s = wire_bytes * self._byte_s / count
        room_s = self._queue_s - (start - now)
        taken = min(count, 1 + int(room_s / each_s)) if room_s >= 0 else 0
        self.carried += taken
        self.dropped += count - taken
        if taken:
            self._free_at = start + taken * each_s
        return self._free_at + self._delay_s, taken


class Star:
    """Hosts around a switch that is never busy.

    Args:
        hosts: how many.
        shape: of every host's lines.
        seed: draws which packets are lost.
        up_mbit: the rates of the first hosts' lines up, in place of that of the shape.

    Attributes:
        up: the lines to the switch.
        down: the lines from it.
        lost: packets that were lost by chance.
    """

    def __init__(self, hosts: int, shape: Shape, seed: int = 0, up_mbit: Sequence[float] = ()) -> None:
        self.up, self.down = [Line(shape) for _ in range(hosts)], [Line(shape) for _ in range(hosts)]
        self.up[: len(up_mbit)] = [Line(shape._replace(rate_mbit=rate)) for rate in up_mbit]
        self.lost = 0
        self._loss, self._rng = shape.loss, random.Random(seed)
        self._spared = self._draw()
        # (when, order of coming, target, train, its measure until it has left the switch): the first two are compared
        self._under_way: list[tuple[float, int, int, bytes, Train | None]] = []
        self._number = 0

    def send(self, now: float, source: int, target: int, data: bytes) -> int:
        """A host sends a train. Returns its bytes, as packets."""
        train = measure(data)
        when, taken = self.up[source].offer(now, train.wire_bytes, train.packets)
        if taken == train.packets <= self._spared:
            self._spared -= taken
            self._push(when, target, data, train)
            return train.wire_bytes
        begin = 0
        while begin < taken:
            spared = int(min(taken - begin, self._spared))
            if spared:
                piece = cut(data, begin, begin + spared)
                self._push(when, target, piece, measure(piece))
            self._spared -= spared
            begin += spared
            if begin < taken:  # this one is lost
                self.lost += 1
                self._spared = self._draw()
                begin += 1
        return train.wire_bytes

    def arrivals(self, now: float) -> Iterator[tuple[int, bytes]]:
        """The trains that have arrived by now and were not told of before, with the host, in order of time."""
        under_way = self._under_way
        while under_way and under_way[0][0] <= now:
            when, _, target, data, train = heapq.heappop(under_way)
            if train is None:
                yield target, data
                continue
            arrival, taken = self.down[target].offer(when, train.wire_bytes, train.packets)
            if taken:
                self._push(arrival, target, data if taken == train.packets else cut(data, 0, taken), None)

    @property
    def next_at(self) -> float | None:
        """When `arrivals` should be asked next; None if nothing is under way."""
        return self._under_way[0][0] if self._under_way else None

    def _push(self, when: float, target: int, data: bytes, train: Train | None) -> None:
        self._number += 1
        heapq.heappush(self._under_way, (when, self._number, target, data, train))

    def _draw(self) -> float:
        """How many packets come through before the next one is lost."""
        if not self._loss:
            return math.inf
        return math.floor(math.log(1.0 - self._rng.random()) / math.log1p(-self._loss))
