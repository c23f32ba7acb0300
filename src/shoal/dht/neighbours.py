"""This node's knowledge of the others: nodes in the table, avoided nodes, lost nodes that may come back.

Invariants:

- only a node that called or answered enters the table; other nodes' words about it are only hints which nodes to ask;
- only answers are signs of life: its own calls neither keep a node in the table, nor end the time for which it is
  avoided;
- a node that cannot be reached leaves at once, one that does not answer leaves at the second time, one that lied leaves
  and is not believed again for ten minutes;
- a node whose words have led nowhere is asked, but only those of its words are believed that name nodes in the table;
- nodes outside the table that failed are avoided for a growing while, so the dead that others still name cost little;
- every set here is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from shoal.base.bounded import put_last
from shoal.base.peer import PeerID
from shoal.dht.routing import RoutingTable
from shoal.protocol.wire import Contact

if TYPE_CHECKING:
    import random

__all__ = ["Neighbours"]

_AVOIDED_MAX = 4096
_REMEMBERED_MAX = 256
"""The most lost nodes that are remembered."""

_FIRST_PAUSE_S = 5.0
"""A node that failed is avoided for so long at first, then twice as long each time."""

_LONGEST_PAUSE_S = 120.0
"""A node that failed is avoided for at most so long."""

_MISLED = 8
"""A node that has named so many nodes more which do not answer than nodes that do is not believed."""

_LIAR_PAUSE_S = 600.0
"""A node that lied is not believed for so long."""

_REMEMBER_S = 3600.0
"""A lost node is remembered for so long."""


class _Avoided(NamedTuple):
    until: float
    pause_s: float
    lied: bool


class Neighbours:
    """The other nodes, as far as this one knows. All times are seconds on a clock that never goes back.

    Args:
        own: this node.
        bucket_size: k.

    Attributes:
        version: changes whenever a node that is relied on comes into the table, or leaves it.
        on_change: called whenever any node does.
        initial: the initial peers.
    """

    def __init__(self, own: PeerID, *, bucket_size: int) -> None:
        self.table = RoutingTable(own, bucket_size=bucket_size)
        self.version = 0
        self.on_change: Callable[[], None] = lambda: None
        self._avoided: dict[PeerID, _Avoided] = {}
        self._misled: dict[PeerID, int] = {}
        self._lost: dict[PeerID, tuple[Contact, float]] = {}
        self.initial: dict[PeerID, Contact] = {}
        self._joined_since: dict[PeerID, None] = {}
        self._lost_since: dict[PeerID, None] = {}

    # ---------------------------------------------------------------------------------------------------- what happened

    def alive(self, contact: Contact, now: float) -> bool:
        """The node answered a call. True if it is new in the table."""
        peer = contact.peer
        avoided = self._avoided.get(peer)
        if avoided is not None:
            if avoided.lied and avoided.until > now:
                return False
            del self._avoided[peer]
        self._lost.pop(peer, None)
        return self._enter(contact, now, answered=True)

    def called(self, contact: Contact, now: float) -> None:
        """The node called: it comes into the table if it is not avoided, but its calls make up for nothing."""
        if not self.avoids(contact.peer, now):
            self._enter(contact, now, answered=False)

    def silent(self, peer: PeerID, now: float, *, owes: bool = True) -> None:
        """The node did not answer a call in time; `owes`: it is relied on again once it has made up for that."""
        contact = self.table.contact(peer)
        lost = self.table.failed(peer, owes=owes)
        if contact is None:
            self._avoid(peer, now)
        elif lost:
            self._note_lost(contact, now)

    def refused(self, peer: PeerID, now: float) -> None:
        """The node answered with a refusal: it lives. Another node may have more time for us."""
        if peer not in self.table:
            self._avoid(peer, now)

    def unreachable(self, peer: PeerID, now: float) -> None:
        """The node cannot be reached, or its connection was lost."""
        contact = self.table.contact(peer)
        self._avoid(peer, now)
        if self.table.remove(peer) and contact is not None:
            self._note_lost(contact, now)

    def linked(self, peer: PeerID) -> Contact | None:
        """It is connected again, so it is avoided no longer, unless it lied; returns where it was if it was lost."""
        if (avoided := self._avoided.get(peer)) is not None and not avoided.lied:
            del self._avoided[peer]
        contact, _ = self._lost.get(peer, (None, 0.0))
        return contact

    def lied(self, peer: PeerID, now: float) -> None:
        """The node sent something that no honest node sends."""
        if self.table.remove(peer):
            self._note_gone(peer)
        self._lost.pop(peer, None)
        put_last(self._avoided, peer, _Avoided(now + _LIAR_PAUSE_S, _LIAR_PAUSE_S, True), _AVOIDED_MAX)

    def led(self, namer: PeerID | None, *, to_answer: bool) -> None:
        """A node that this one has named has answered a lookup, or has not."""
        if namer is not None:
            count = self._misled.pop(namer, 0) + (-1 if to_answer else 1)
            put_last(self._misled, namer, min(max(count, 0), _MISLED), _AVOIDED_MAX)

    def take_changes(self) -> tuple[list[PeerID], list[PeerID]]:
        """The nodes that came into the table, and those that left it, since the last time this was asked."""
        changes = list(self._joined_since), list(self._lost_since)
        self._joined_since.clear()
        self._lost_since.clear()
        return changes

    # ------------------------------------------------------------------------------------------------------ whom to ask

    def avoids(self, peer: PeerID, now: float) -> bool:
        """Whether to leave this node alone for now."""
        avoided = self._avoided.get(peer)
        return avoided is not None and avoided.until > now

    def worth_asking(self, contacts: Iterable[Contact], now: float, *, namer: PeerID | None = None) -> list[Contact]:
        """The contacts that are not avoided; of a node whose words led nowhere only those that are in the table."""
        believed = namer is None or self._misled.get(namer, 0) < _MISLED
        return [
            contact
            for contact in contacts
            if contact.peer in self.table or (believed and not self.avoids(contact.peer, now))
        ]

    def always_remember(self, contacts: Iterable[Contact]) -> None:
        """Keep trying these (the initial peers) whenever they are not in the table."""
        self.initial.update((contact.peer, contact) for contact in contacts)

    def missing_initial(self) -> list[Contact]:
        """The initial peers that are not in the table."""
        return [contact for peer, contact in self.initial.items() if peer not in self.table]

    def lately_lost(self, count: int) -> list[Contact]:
        """The nodes that were lost last."""
        return [contact for contact, _ in list(self._lost.values())[-count:]]

    def missed(self, count: int, rng: random.Random, now: float) -> list[Contact]:
        """A few nodes, drawn by chance, that were here once, or should be, and are not: worth another try."""
        while self._lost and next(iter(self._lost.values()))[1] < now - _REMEMBER_S:
            self._lost.pop(next(iter(self._lost)))
        missed = {peer: contact for peer, (contact, _) in self._lost.items()}
        missed |= {contact.peer: contact for contact in self.missing_initial()}
        return rng.sample(list(missed.values()), min(count, len(missed)))

    # ------------------------------------------------------------------------------------------------------ bookkeeping

    def _enter(self, contact: Contact, now: float, *, answered: bool) -> bool:
        joined = self.table.seen(contact, now, answered=answered)
        if joined:
            self._lost_since.pop(contact.peer, None)
            self._joined_since[contact.peer] = None
            self._changed(contact.peer)
        return joined

    def _note_lost(self, contact: Contact, now: float) -> None:
        peer = contact.peer
        put_last(self._lost, peer, (contact, now), _REMEMBERED_MAX)
        self._avoid(peer, now)
        self._note_gone(peer)

    def _note_gone(self, peer: PeerID) -> None:
        self._joined_since.pop(peer, None)
        self._lost_since[peer] = None
        self._changed(peer)

    def _changed(self, peer: PeerID) -> None:
        # Where records go does not follow from nodes that are not relied on: they could come and go all the time.
        self.version += not self.table.doubtful(peer)
        self.on_change()

    def _avoid(self, peer: PeerID, now: float) -> None:
        old = self._avoided.get(peer)
        if old is not None and old.until > now:
            return
        pause_s = _FIRST_PAUSE_S if old is None else min(2 * old.pause_s, _LONGEST_PAUSE_S)
        put_last(self._avoided, peer, _Avoided(now + pause_s, pause_s, False), _AVOIDED_MAX)
