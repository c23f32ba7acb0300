"""Pauses for peers that fail the others several times in a row: ever longer ones. Pure bookkeeping."""

from __future__ import annotations

from shoal.bounded import bound
from shoal.peer import PeerID

__all__ = ["Pauses"]

_FORGIVEN = 1
_LONGEST_WINDOWS = 64
_MAX_REMEMBERED = 1024


class Pauses:
    """Remembers which peers have failed the others, and until when nobody counts on them.

    The first time may be chance. After the second one in a row there is a pause of four windows, in which nobody counts
    on the peer. Then it has another chance. After each further failure the pause is twice as long, 64 windows at most.

    Args:
        window_s: seconds.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._failed: dict[PeerID, tuple[int, float]] = {}

    def failed(self, peer: PeerID, now: float) -> int:
        """A peer failed (`now`: local time, seconds). Returns how many times in a row, if a pause begins; else 0."""
        times = self._failed.pop(peer, (0, now))[0] + 1
        windows = min(2**times, _LONGEST_WINDOWS) if times > _FORGIVEN else 0
        self._failed[peer] = times, now + windows * self._window_s
        bound(self._failed, _MAX_REMEMBERED)
        return times if windows else 0

    def forgive(self, peer: PeerID) -> None:
        """A peer did what it should."""
        self._failed.pop(peer, None)

    def now(self, now: float) -> frozenset[PeerID]:
        """The peers whose pause is not over."""
        return frozenset(peer for peer, (_, until) in self._failed.items() if until > now)
