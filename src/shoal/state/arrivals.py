"""How fast what a download asked for arrives, and the consequences. Pure logic: `now` is an argument.

`ArrivalRate` is the pace of one donor's chunks. It says how many chunks to ask for ahead, so that the donor never waits
for our next message. And it says when a chunk will be here, which tells whether to ask another donor for it too.

`Intake` is what a whole download receives, for its owner: whether it may be complete in time at its pace. Bytes count
when they arrive. Those of a donor that has broken the protocol count no more. The pace is that of the last `_WINDOW_S`
to twice as long, or since the beginning: a donor that stops giving cannot live on what it gave before.
"""

from __future__ import annotations

from collections import Counter

from shoal.peer import PeerID

__all__ = ["HOPE", "MIN_AHEAD", "ArrivalRate", "Intake"]

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


HOPE = 4.0
"""A download may become so many times as fast as it was: other traffic goes first on our line, others are through."""

_WINDOW_S = 10.0


class Intake:
    """What one download has received so far.

    Args:
        now: when it begins, seconds.

    Attributes:
        missing_bytes: the bytes that are not verified yet; None while no state is chosen.
    """

    def __init__(self, now: float) -> None:
        self.missing_bytes: int | None = None
        self._from: Counter[PeerID] = Counter()
        self._marks = [(now, 0), (now, 0)]  # the pace is counted from the first one

    def received(self, peer: PeerID, nbytes: int) -> None:
        """A donor sent so many bytes of the state."""
        self._from[peer] += nbytes

    def dropped(self, peer: PeerID) -> None:
        """This donor has broken the protocol."""
        del self._from[peer]

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
        received, (since, before) = self._from.total(), self._marks[0]
        if now - self._marks[1][0] >= _WINDOW_S:
            self._marks = [self._marks[1], (now, received)]
        if self.missing_bytes is None or received <= before:
            return False
        return HOPE * (received - before) * (until - now) >= self.missing_bytes * (now - since)
