"""What a download receives, for its owner: whether it may be complete in time at its pace. Pure logic: no loop.

Bytes count when they arrive. Those of a donor that has broken the protocol count no more. The pace is that of the last
`_WINDOW_S` to twice as long, or since the beginning: a donor that stops giving cannot live on what it gave before.
"""

from __future__ import annotations

from collections import Counter

from shoal.peer import PeerID

__all__ = ["HOPE", "Intake"]

HOPE = 4.0
"""A download may become so many times as fast as it was: other traffic goes first on our line, others are through."""

_WINDOW_S = 10.0


class Intake:
    """What one download has received so far.

    Args:
        now: when it begins, seconds.

    Attributes:
        missing_bytes: that are not verified; None while no state is chosen.
    """

    def __init__(self, now: float) -> None:
        self.missing_bytes: int | None = None
        self._from: Counter[PeerID] = Counter()
        self._marks = [(now, 0), (now, 0)]  # the pace is counted from the first one

    def came(self, peer: PeerID, nbytes: int) -> None:
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
