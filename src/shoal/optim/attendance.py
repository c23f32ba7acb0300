"""Attendance: which peers come to the rounds, so that rounds do not wait in vain again and again. Pure bookkeeping.

A peer may say that it is at our state and yet be in none of the groups: others cannot reach it, or it cannot find them.
Each round would wait a whole window for it. So once a peer has missed two rounds in a row, rounds do not wait for it
for four windows. Then one round waits for it again. After each further miss the pause is twice as long. The peer is in
a round again as soon as it comes to one.

Keys are free. So all peers that have been in none of our rounds count as one here, with one count of missed rounds. A
liar that says under ever new keys that it is coming is waited for as rarely as one that keeps its name. One search
waits for such strangers for a third of a window at most, counted from the first of them.

A peer missed a round only if the round waited for it, for at least half of the time that it may take. A group may form
at once without an expected peer, because its leader has not heard yet that the peer is here. The peer comes to the next
round, if that waits for it.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.peer import PeerID

__all__ = ["Attendance"]

_FORGIVEN = 1
_STRANGERS_PART = 3
"""A window is for slow peers. A newcomer that lives needs a few round trips: it was told of the round as it began."""
_LONGEST_WINDOWS = 64
_MAX_REMEMBERED = 1024


class Attendance:
    """Remembers which peers missed rounds.

    Args:
        window_s: how long a group waits for expected peers, seconds.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._awaited: Collection[PeerID] = ()
        self._since: dict[PeerID | None, float] = {}
        self._missed: dict[PeerID | None, tuple[int, float]] = {}  # None: all peers that have been in no round
        self._came: dict[PeerID, None] = {}  # peers that have been in a round, the last ones at the end

    def search(self) -> None:
        """A search for a group begins."""
        self._awaited, self._since = (), {}

    def awaited(self, expected: frozenset[PeerID], now: float) -> frozenset[PeerID]:
        """The peers among these that the group is to wait for (`now`: local time, seconds). Called often."""
        self._awaited = expected - self.absent(expected, now)
        names = {None, *map(self._name, self._awaited)}
        self._since = {name: since for name, since in self._since.items() if name in names}
        return frozenset(
            peer
            for peer in self._awaited
            if now <= self._since.setdefault(name := self._name(peer), now) + self._patience_s(name)
        )

    def _patience_s(self, name: PeerID | None) -> float:
        return self._window_s / (_STRANGERS_PART if name is None else 1)

    def _waited_for(self, name: PeerID | None, now: float) -> bool:
        return now >= self._since[name] + self._patience_s(name) / 2

    def absent(self, peers: Collection[PeerID], now: float) -> frozenset[PeerID]:
        """The peers among these that rounds no longer wait for."""
        names = {name for name, (_, until) in self._missed.items() if until > now}
        return frozenset(peer for peer in peers if self._name(peer) in names) if names else frozenset()

    def _name(self, peer: PeerID) -> PeerID | None:
        return peer if peer in self._came or not self._came else None

    def formed(self, members: Collection[PeerID], now: float) -> list[tuple[PeerID, int]]:
        """These peers made a round. Returns the peers that rounds no longer wait for, with their misses in a row."""
        late = [peer for peer in sorted(set(self._awaited) - set(members)) if self._waited_for(self._name(peer), now)]
        for peer in members:
            self._missed.pop(peer, None)
            self._came.pop(peer, None)
            self._came[peer] = None
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
        self.search()
        return given_up
