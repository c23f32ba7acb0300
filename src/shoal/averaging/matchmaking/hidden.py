"""The expected peers that the directory hides: which of them is asked, and when. Sans-IO."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from shoal.averaging.matchmaking.config import SETTLE_MAX_S
from shoal.averaging.matchmaking.declarations import KnownDeclarations
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.protocol.wire import Contact

__all__ = ["HiddenPeers"]


class HiddenPeers:
    """The expected peers that do not stand in the directory, and are asked all the same.

    Lying nodes there may hide them, or the clocks of a few are so wrong that they see each other alone. Whatever such a
    peer says shows the way: it leads, sends us to its leader, or has heard of us now and comes here.

    Args:
        me: the searching peer.
        known: the declarations that are known.
        followers: the peers that have come; others change it.
        contact_of: returns what is known of a peer's addresses.
    """

    def __init__(
        self,
        me: PeerID,
        known: KnownDeclarations,
        followers: Mapping[PeerID, object],
        contact_of: Callable[[PeerID], Contact],
    ) -> None:
        self._me, self._known, self._followers, self._contact_of = me, known, followers, contact_of
        self._asked: list[PeerID] = []
        self._asked_at = -math.inf

    def next_to_ask(
        self, expected: frozenset[PeerID], never_leads: Callable[[PeerID], bool], declared_at: float, now: float
    ) -> Contact | None:
        """Return the one to ask now, as most have neither come here nor declared themselves; None: nobody.

        Args:
            expected: the peers that are expected.
            never_leads: whether a peer never leads us.
            declared_at: when we declared ourselves.
            now: loop time, seconds.
        """
        if now < max(declared_at, self._asked_at) + SETTLE_MAX_S:
            return None
        seen = {each.peer for each in self._known.earlier(None, (), now)}
        hidden = expected - seen - self._followers.keys()
        if 2 * len(hidden) <= len(expected):
            return None
        able = [peer for peer in hidden if not self._known.is_set_aside(peer, now) and not never_leads(peer)]
        able.sort(key=lambda peer: (self._asked.count(peer), peer < self._me, peer))
        contact = next((contact for contact in map(self._contact_of, able) if contact.addresses), None)
        if contact is not None:
            sometimes("an expected peer that the directory does not show is asked")
            self._asked_at = now
            self._asked.append(contact.peer)
        return contact
