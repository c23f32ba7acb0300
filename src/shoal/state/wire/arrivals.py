"""How fast what a download asked for arrives, and the consequences. Pure logic: `now` is an argument.

`ArrivalRate` is the pace of one donor's chunks. It says how many chunks to ask for ahead, so that the donor never waits
for our next message. And it says when a chunk will be here, which tells whether to ask another donor for it too.

`Line` says whether our own line is the limit: then a chunk comes no sooner if another donor is asked for it, too.

`Intake` is what a whole download receives, for its owner: whether it may be complete in time at its pace. Bytes count
when they arrive. Those of a donor that has broken the protocol count no more. The pace is that of the last `_WINDOW_S`
to twice as long, or since the beginning: a donor that stops giving cannot live on what it gave before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from shoal.base.peer import PeerID

__all__ = ["HOPE", "MIN_AHEAD", "ArrivalRate", "Intake", "Line"]

_AHEAD_S = 0.5
"""Chunks for this long are asked for ahead: more than any round trip takes."""

MIN_AHEAD = 2
"""Chunks that are asked for ahead beside those of `_AHEAD_S`."""

MAX_AHEAD = 64
"""The most chunks that are asked for ahead."""

_WEIGHT = 0.3
"""The weight of the latest gap between two chunks in the mean."""


class ArrivalRate:
    """The pace of one donor's chunks. `asked` and `arrived` say what happens, in order."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._since = 0.0

    def asked(self, now: float) -> None:
        """The donor, which had nothing to send, was asked for chunks."""
        self._since = now

    def arrived(self, now: float) -> None:
        """A whole chunk has come."""
        gap_s = max(now - self._since, 1e-6)
        self._mean_s = gap_s if self._mean_s is None else (1 - _WEIGHT) * self._mean_s + _WEIGHT * gap_s
        self._since = now

    def ahead(self) -> int:
        """Return how many chunks should be under way."""
        if self._mean_s is None:
            return MIN_AHEAD
        return min(MAX_AHEAD, MIN_AHEAD + int(_AHEAD_S / self._mean_s))

    def takes_s(self, chunks: int) -> float:
        """Return how long so many chunks take in general; 0 if none has come yet."""
        return chunks * (self._mean_s or 0.0)

    def due_s(self, place: int, now: float) -> float:
        """Return how long until the chunk at this place of the queue is here: 0 is the one that comes now.

        A donor that is late is taken to be later still, by as long as it has been late.
        """
        waited_s, mean_s = now - self._since, self._mean_s or 0.0
        return max(mean_s, waited_s) * (place + 1) - min(mean_s, waited_s)


_EVEN = 0.5
"""Our line is the limit for a donor that has at least this part of an even share of the best pace seen so far."""

_IDLE_S = 0.75
"""Our line is no limit if it has carried nothing for so long."""

_PACE_S, _PACE_BYTES = 1.0, 1 << 20
"""The paces of the donors are compared over so long at least, and so many bytes: bytes come in large pieces."""


class Line:
    """Our line, as far as a download uses it, and the parts that its donors have of it."""

    def __init__(self) -> None:
        self._mark: tuple[float, int, Mapping[PeerID, int]] | None = None
        self._paces: dict[PeerID, float] = {}  # bytes per second, before the mark
        self._best = 0.0  # of all together
        self._sending = 0
        self._total, self._since = 0, math.inf  # the bytes so far, and the time of the last ones

    def look(self, each: Mapping[PeerID, int], total: int, now: float) -> None:
        """Take in how much has come, several times a second.

        Args:
            each: bytes of the streams of now.
            total: bytes of all streams, those that have ended included.
            now: seconds.
        """
        self._sending = len(each)
        if total != self._total or now < self._since:
            self._total, self._since = total, now
        if self._mark is None:
            self._mark = now, total, each
        since, before, each_before = self._mark
        if now >= since + _PACE_S and total >= before + _PACE_BYTES:
            self._mark = now, total, each
            known = each.keys() & each_before.keys()
            self._paces = {peer: (each[peer] - each_before[peer]) / (now - since) for peer in known}
            self._best = max(self._best, (total - before) / (now - since))

    def is_limit(self, peer: PeerID, now: float) -> bool:
        """Whether the line is the limit for this donor, as far as can be seen (`now`: seconds)."""
        has_share = self._paces.get(peer, math.inf) * self._sending >= _EVEN * self._best
        return has_share and now < self._since + _IDLE_S


HOPE = 4.0
"""A download may become so many times as fast as it was: other traffic goes first on our line, others are through."""

_WINDOW_S = 10.0


class Intake:
    """What one download has received so far.

    Args:
        now: when it begins, seconds.

    Attributes:
        missing_bytes: the bytes that are not verified yet; None while no state is chosen.
        asked: the donors that were asked for parts of a state which they had described.
    """

    def __init__(self, now: float) -> None:
        self.missing_bytes: int | None = None
        self.asked: set[PeerID] = set()
        self._from: Counter[PeerID] = Counter()
        self._marks = [(now, 0), (now, 0)]  # the pace is counted from the first one

    def received(self, peer: PeerID, nbytes: int) -> None:
        """A donor sent so many bytes of the state."""
        self._from[peer] += nbytes

    def dropped(self, peer: PeerID) -> None:
        """This donor has broken the protocol."""
        del self._from[peer]

    @property
    def received_bytes(self) -> int:
        """The bytes that count, verified or not."""
        return self._from.total()

    @property
    def donors(self) -> frozenset[PeerID]:
        """The donors whose bytes count."""
        return frozenset(self._from)

    def in_time(self, now: float, until: float) -> bool:
        """Whether the rest may have come by then, at `HOPE` times the pace of the last seconds.

        Args:
            now: seconds.
            until: the same clock.
        """
        received, (since, before) = self.received_bytes, self._marks[0]
        if now - self._marks[1][0] >= _WINDOW_S:
            self._marks = [self._marks[1], (now, received)]
        if self.missing_bytes is None or received <= before:
            return False
        return HOPE * (received - before) * (until - now) >= self.missing_bytes * (now - since)
