"""Whose word counts on what this peer cannot see itself: its own address, its time, whether others get in.

Keys and hosts are cheap, so the number of those that say something proves nothing. A peer believes first those that its
user gave it (`initial_peers`), then those that contributed to a run of its own, or that it met before its last start
(`peers_file`). What strangers say is a hint: it may make this peer look for itself, and decides nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable

from shoal.base.peer import PeerID

__all__ = ["Rank", "Trust"]


class Rank(enum.IntEnum):
    """How much a peer's word counts; lower ones come first."""

    GIVEN = 0
    KNOWN = 1
    STRANGER = 2


class Trust:
    """The peers whose word counts here.

    Attributes:
        given: the peers that the user named, in that order.
    """

    def __init__(self) -> None:
        self.given: dict[PeerID, None] = {}
        self._remembered: set[PeerID] = set()
        self._contributors: list[Callable[[], Collection[PeerID]]] = []

    def give(self, peers: Iterable[PeerID]) -> None:
        """The user names these peers."""
        self.given.update(dict.fromkeys(peers))

    def remember(self, peers: Iterable[PeerID]) -> None:
        """This peer has met these in an earlier life."""
        self._remembered.update(peers)

    def add_contributors(self, contributors: Callable[[], Collection[PeerID]]) -> Callable[[], None]:
        """Count the peers that this returns as contributors, as long as it does. Returns a function that ends it."""
        self._contributors.append(contributors)

        def end() -> None:
            if contributors in self._contributors:
                self._contributors.remove(contributors)

        return end

    def ranks(self, peers: Iterable[PeerID]) -> dict[PeerID, Rank]:
        """How much the word of each of these peers counts; those first whose word counts more, else in their order."""
        known = self._known()

        def rank(peer: PeerID) -> Rank:
            if peer in self.given:
                return Rank.GIVEN
            return Rank.KNOWN if peer in known else Rank.STRANGER

        return dict(sorted(((peer, rank(peer)) for peer in peers), key=lambda each: each[1]))

    def among(self, peers: Iterable[PeerID]) -> set[PeerID]:
        """Those of these peers whose word counts."""
        known = self._known()
        return {peer for peer in peers if peer in self.given or peer in known}

    def _known(self) -> set[PeerID]:
        return self._remembered.union(*(found() for found in self._contributors))
