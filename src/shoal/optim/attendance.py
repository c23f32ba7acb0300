"""Who comes to the rounds: nobody is waited for again and again in vain. Pure bookkeeping.

A peer says that it stands at our state, and is not in the groups: others cannot reach it, or it cannot find them. Each
round would wait a whole window for it. Who missed two rounds in a row is waited for no more for four windows, then one
round long, and for twice as long after each further one. It is in a round again as soon as it comes to one.

Keys are free: peers that have been in none of our rounds are one here, with one count of the rounds that one of them
missed. So who says under ever new keys that it is coming is waited for as rarely as one that keeps its name.

It missed a round only if that waited for it, half a window at least. A group may form at once without somebody whom we
expect: its leader has not heard yet that it is here. It comes to the next one, if that waits for it.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.peer import PeerID

__all__ = ["Attendance"]

_FORGIVEN = 1
_LONGEST_WINDOWS = 64
_MAX_REMEMBERED = 1024


class Attendance:
    """Remembers who missed rounds.

    Args:
        window_s: how long a group waits for those who are expected, seconds.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._awaited: dict[PeerID, float] = {}
        self._missed: dict[PeerID | None, tuple[int, float]] = {}  # None: whoever has been in no round
        self._came: dict[PeerID, None] = {}  # who has been in a round, the last ones at the end

    def search(self) -> None:
        """A search for a group begins."""
        self._awaited = {}

    def awaited(self, expected: frozenset[PeerID], now: float) -> frozenset[PeerID]:
        """Who of these the group is to wait for (`now`: local time, seconds). Called often."""
        coming = expected - self.absent(expected, now)
        self._awaited = {peer: self._awaited.get(peer, now) for peer in coming}
        return coming

    def absent(self, peers: Collection[PeerID], now: float) -> frozenset[PeerID]:
        """Who of these is waited for no more."""
        if not self._missed:
            return frozenset()
        return frozenset(peer for peer in peers if self._missed.get(self._name(peer), (0, now))[1] > now)

    def _name(self, peer: PeerID) -> PeerID | None:
        return peer if peer in self._came or not self._came else None

    def formed(self, members: Collection[PeerID], now: float) -> list[tuple[PeerID, int]]:
        """A round was made by these. Returns who is waited for no more, and how many rounds in a row it has missed."""
        for peer in members:
            self._missed.pop(peer, None)
            self._came.pop(peer, None)
            self._came[peer] = None
        late = sorted(self._awaited.keys() - set(members))
        late = [peer for peer in late if now >= self._awaited[peer] + self._window_s / 2]
        given_up = []
        for name, peer in {self._name(peer): peer for peer in late}.items():
            missed = self._missed.pop(name, (0, now))[0] + 1
            windows = min(2**missed, _LONGEST_WINDOWS) if missed > _FORGIVEN else 0
            self._missed[name] = missed, now + windows * self._window_s
            if windows:
                given_up.append((peer, missed))
        while len(self._missed) > _MAX_REMEMBERED:
            del self._missed[next(iter(self._missed))]
        while len(self._came) > _MAX_REMEMBERED:
            del self._came[next(iter(self._came))]
        self._awaited = {}
        return given_up
