"""Pauses for peers that fail the others several times in a row: ever longer ones. Pure bookkeeping."""

from __future__ import annotations

import math
from typing import NamedTuple

from shoal.base.bounded import bound
from shoal.base.peer import PeerID

__all__ = ["Pauses"]

_FORGIVEN = 1
_LONGEST_WINDOWS = 64
_MAX_REMEMBERED = 1024

_OUTWEIGHED_S = 10.0
"""A failure that cost a second is forgiven so many seconds later at the earliest: a peer that fails every other time
costs the others a tenth of their time at most."""


class _Record(NamedTuple):
    """The failures of a peer: how many, until when it pauses, and from when on it can be forgiven."""

    times: int = 0
    until: float = -math.inf
    forgivable: float = -math.inf


class Pauses:
    """Remembers which peers have failed the others, and until when nobody counts on them.

    The first time may be chance. After the second one there is a pause of four windows, in which nobody counts on the
    peer. Then it has another chance. After each further failure the pause is twice as long, 64 windows at most. A peer
    that does what it should is forgiven, once ten times as much time has passed as it has cost.

    Args:
        window_s: seconds.
        strict: half of a window is too much to lose for the first time, too, and a pause lasts until the failure can be
            forgiven: for peers that the others can do without in the same role, as in leading.
    """

    def __init__(self, window_s: float, *, strict: bool = False) -> None:
        self._window_s, self._strict = window_s, strict
        self._failed: dict[PeerID, _Record] = {}

    def failed(self, peer: PeerID, now: float, cost_s: float = 0.0) -> int:
        """A peer failed, and that cost so much time (`now`: local time, seconds).

        Returns:
            How many times it has failed and was not forgiven, if a pause begins; else 0.
        """
        before = self._failed.pop(peer, _Record())
        times, forgivable = before.times + 1, max(before.forgivable, now + _OUTWEIGHED_S * cost_s)
        costly = self._strict and cost_s >= self._window_s / 2
        windows = min(2**times, _LONGEST_WINDOWS) if times > _FORGIVEN or costly else 0
        until = now + windows * self._window_s
        self._failed[peer] = _Record(times, max(until, forgivable) if costly else until, forgivable)
        bound(self._failed, _MAX_REMEMBERED)
        return times if windows else 0

    def forgive(self, peer: PeerID, now: float) -> None:
        """A peer did what it should."""
        if peer in self._failed and now >= self._failed[peer].forgivable:
            del self._failed[peer]

    def now(self, now: float) -> frozenset[PeerID]:
        """The peers whose pause is not over."""
        return frozenset(peer for peer, failed in self._failed.items() if failed.until > now)

    @property
    def unforgiven(self) -> frozenset[PeerID]:
        """The peers that have failed and were not forgiven, whether their pause is over or not."""
        return frozenset(self._failed)
