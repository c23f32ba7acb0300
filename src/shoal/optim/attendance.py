"""Who comes to the rounds: nobody is waited for again and again in vain. Pure bookkeeping.

A peer says that it stands at our state, and is not in the groups: others cannot reach it, or it cannot find them. Each
round would wait a whole window for it. Who missed two rounds in a row is waited for no more for four windows, then one
round long, and for twice as long after each further one. It is in a round again as soon as it comes to one.

It missed a round only if that waited for it, half a window at least. A group may form at once without somebody whom we
expect: its leader has not heard yet that it is here. It comes to the next one, if that waits for it.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.peer import PeerID

__all__ = ["Attendance"]

_FORGIVEN = 1
_LONGEST_WINDOWS = 64
_MAX_ABSENT = 1024


class Attendance:
    """Remembers who missed rounds.

    Args:
        window_s: how long a group waits for those who are expected, seconds.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._awaited: dict[PeerID, float] = {}
        self._missed: dict[PeerID, tuple[int, float]] = {}

    def search(self) -> None:
        """A search for a group begins."""
        self._awaited = {}

    def awaited(self, expected: frozenset[PeerID], now: float) -> frozenset[PeerID]:
        """Who of these the group is to wait for (`now`: local time, seconds). Called often."""
        coming = [peer for peer in expected if peer not in self._missed or self._missed[peer][1] <= now]
        self._awaited = {peer: self._awaited.get(peer, now) for peer in coming}
        return frozenset(coming)

    def formed(self, members: Collection[PeerID], now: float) -> list[tuple[PeerID, int]]:
        """A round was made by these. Returns who is waited for no more, and how many rounds in a row it has missed."""
        for peer in members:
            self._missed.pop(peer, None)
        given_up = []
        for peer in sorted(self._awaited.keys() - set(members)):
            if now < self._awaited[peer] + self._window_s / 2:
                continue
            missed = self._missed.pop(peer, (0, now))[0] + 1
            windows = min(2**missed, _LONGEST_WINDOWS) if missed > _FORGIVEN else 0
            self._missed[peer] = missed, now + windows * self._window_s
            if windows:
                given_up.append((peer, missed))
        while len(self._missed) > _MAX_ABSENT:
            self._missed.pop(next(iter(self._missed)))
        self._awaited = {}
        return given_up
