"""The peers that are expected to join a search: which of them are gone? Sans-IO."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from shoal.base.peer import PeerID
from shoal.rpc.rhythm import LOOK_S

__all__ = ["LOOKED_AT", "Expected"]

LOOKED_AT = 32
"""Of more peers than this only a leader looks at all."""

_POLL_S = 0.1


class Expected:
    """The peers that are expected to join one search, and what is seen of them.

    Args:
        peers: returns them, None if not known; None if they are never known.
        is_silent: see `GroupMachine`.
        followers: the peers that follow us; others change it.
    """

    def __init__(
        self,
        peers: Callable[[], frozenset[PeerID] | None] | None,
        is_silent: Callable[[PeerID, bool], bool],
        followers: Mapping[PeerID, object],
    ) -> None:
        self._peers, self._is_silent, self._followers = peers, is_silent, followers
        self._lost: set[PeerID] = set()  # in this search: one that was lost before may be here again

    def peers(self) -> frozenset[PeerID] | None:
        """The peers that are expected; None if nobody knows them."""
        return self._peers() if self._peers is not None else None

    def all(self) -> frozenset[PeerID]:
        """The peers that are expected; none if nobody knows them."""
        return self.peers() or frozenset()

    @property
    def look_s(self) -> float:
        """The time after which a peer that looks for a group looks again at who is expected."""
        return LOOK_S if self._peers is None else _POLL_S

    def lost(self, peer: PeerID) -> None:
        """This peer is lost."""
        self._lost.add(peer)

    def came(self, peer: PeerID) -> None:
        """This peer asks us, so it is here."""
        self._lost.discard(peer)

    def not_gone(self, peers: frozenset[PeerID], *, among: int) -> frozenset[PeerID]:
        """Those of these peers that follow us, or are neither lost nor silent; `among`: so many are expected."""
        looks = bool(self._followers) or among <= LOOKED_AT  # to look at a peer is to ask it, or to dial it
        return frozenset(p for p in peers if p in self._followers or not self._is_gone(p, looks=looks))

    def _is_gone(self, peer: PeerID, *, looks: bool) -> bool:
        return peer in self._lost or (looks and self._is_silent(peer, True))

    def look_at_others(self, but: Collection[PeerID]) -> frozenset[PeerID]:
        """Look at all that are expected but these, unless they are many; returns all that are expected."""
        expected = self.all()
        for peer in expected.difference(but) if len(expected) <= LOOKED_AT else ():
            self._is_silent(peer, True)
        return expected

    def silent_followers(self) -> list[PeerID]:
        """The followers that fell silent while others were waited for: the round would wait for them, too."""
        if self._peers is None or len(self._followers) > LOOKED_AT:
            return []
        return [peer for peer in self._followers if self._is_silent(peer, True)]
