"""The iterative lookup: asks nodes nearer and nearer to an id until the nearest ones have answered (sans-IO).

A state machine for one target: `next_queries` returns the nodes to ask now, `reply`, `failed` and `slow` take the
results, `done` says when to stop. The caller sends the calls and keeps the time.

Invariants, held by the tests:

- at most `alpha` queries wait at the same time while replies bring nearer nodes; after one that does not, the rest of
  the nearest `count` are asked at once. Queries that were called slow do not count: a silent node takes one place for a
  moment, and does not hold up the lookup;
- it ends when the nearest `count` nodes of those that did not fail have answered; a slow one among them is waited for
  only while fewer than `count` others have, and fewer than four for each that is slow. A late one is waited for only
  while nobody has answered;
- one reply adds at most 32 candidates, and there are never more than `max_queries` queries, so liars can lengthen a
  lookup by a bounded amount only. A reply's word about another node counts as hearsay until that node answers itself.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from shoal.base.peer import PeerID
from shoal.dht.routing import node_id
from shoal.protocol.wire import Contact

__all__ = ["Lookup"]

_QUERIES_PER_COUNT = 10
"""The most calls of a lookup, for each node that is to answer."""

_CONTACTS_PER_REPLY = 32
"""The most nodes of one reply that are looked at."""

_ANSWERS_PER_SLOW = 4


class _State(Enum):
    NEW = auto()
    ASKED = auto()
    SLOW = auto()
    LATE = auto()
    REPLIED = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class _Candidate:
    """A node that the lookup heard of. `hops` is how many calls in a row led to its answer, its own included."""

    contact: Contact
    distance: int
    hops: int
    state: _State = _State.NEW


class Lookup:
    """One search for the nodes nearest to an id.

    Args:
        target: the id.
        own: this node, which is never asked.
        seeds: the nearest nodes in this node's own table.
        count: how many of the nearest nodes are to answer.
        alpha: how many queries wait at the same time while it gets nearer (Kademlia's alpha).
        max_queries: how many queries are made at most; default 10 times `count`.
    """

    def __init__(
        self,
        target: int,
        own: PeerID,
        seeds: Iterable[Contact],
        *,
        count: int,
        alpha: int = 3,
        max_queries: int | None = None,
    ) -> None:
        self.target = target
        self.count = count
        self._own = own
        self._alpha = alpha
        self._queries_left = _QUERIES_PER_COUNT * count if max_queries is None else max_queries
        self._known: dict[PeerID, _Candidate] = {}
        self._ordered: list[_Candidate] = []
        self._waiting = 0
        self._nearing = True
        for seed in seeds:
            self._add(seed, 1)

    # -------------------------------------------------------------------------------------------------------- reading

    @property
    def done(self) -> bool:
        """Whether no further query can help, or none may be made."""
        replied = slow = late = 0
        for candidate in self._ordered:
            if replied >= self.count:
                return True
            if candidate.state is _State.ASKED or (candidate.state is _State.NEW and self._queries_left > 0):
                return False
            replied += candidate.state is _State.REPLIED
            slow += candidate.state is _State.SLOW
            late += candidate.state is _State.LATE
        return replied >= min(self.count, _ANSWERS_PER_SLOW * slow + min(late, 1))

    @property
    def nearest(self) -> list[Contact]:
        """The nearest nodes that answered, nearest first, `count` at most."""
        return self.answered[: self.count]

    @property
    def answered(self) -> list[Contact]:
        """All nodes that answered, nearest first."""
        return [candidate.contact for candidate in self._ordered if candidate.state is _State.REPLIED]

    @property
    def complete(self) -> bool:
        """Whether all nodes that the lookup heard of have answered: they know of no others."""
        return all(candidate.state is _State.REPLIED for candidate in self._ordered)

    @property
    def queries(self) -> int:
        """How many queries were made so far."""
        return sum(candidate.state is not _State.NEW for candidate in self._ordered)

    @property
    def hops(self) -> int:
        """The number of calls in a row to the nearest node that answered; 0 if none did."""
        for candidate in self._ordered:
            if candidate.state is _State.REPLIED:
                return candidate.hops
        return 0

    # ------------------------------------------------------------------------------------------------------- changing

    def next_queries(self) -> list[Contact]:
        """The nodes to ask now; each is asked once. Empty while enough queries wait, and when no node is left."""
        chosen: list[Contact] = []
        window = 0
        at_once = self._alpha if self._nearing else max(self._alpha, self.count)
        for candidate in self._ordered:
            if window >= self.count or self._waiting >= at_once or self._queries_left <= 0:
                break
            if candidate.state is _State.NEW:
                candidate.state = _State.ASKED
                self._waiting += 1
                self._queries_left -= 1
                chosen.append(candidate.contact)
            window += candidate.state in (_State.ASKED, _State.REPLIED)
        return chosen

    def reply(self, peer: PeerID, found: Iterable[Contact]) -> None:
        """The node answered, and named these as the nearest that it knows. Ignored if it was not asked."""
        candidate = self._settle(peer, _State.REPLIED)
        if candidate is None:
            return
        told: dict[PeerID, Contact] = {}
        for contact in found:
            if contact.addresses and all(address.peer_id == contact.peer for address in contact.addresses):
                told.setdefault(contact.peer, contact)
        nearest = sorted(told.values(), key=lambda each: node_id(each.peer) ^ self.target)
        horizon = self._horizon()
        self._nearing = False
        for contact in nearest[:_CONTACTS_PER_REPLY]:
            added = self._add(contact, candidate.hops + 1)
            self._nearing |= added is not None and (horizon is None or added.distance < horizon)

    def widen(self, count: int) -> None:
        """Go on until so many of the nearest nodes have answered, with as many further queries."""
        self._queries_left += max(0, count - self.count)
        self.count = count

    def _horizon(self) -> int | None:
        """The distance of the `count`-th nearest node that did not fail; None if there are fewer."""
        living = 0
        for candidate in self._ordered:
            living += candidate.state is not _State.FAILED
            if living >= self.count:
                return candidate.distance
        return None

    def failed(self, peer: PeerID) -> None:
        """The node did not answer, or its answer made no sense. Ignored if it was not asked."""
        self._settle(peer, _State.FAILED)

    def slow(self, peer: PeerID) -> None:
        """The node keeps us waiting: ask another meanwhile. Its reply, if it comes, is still welcome."""
        candidate = self._known.get(peer)
        if candidate is not None and candidate.state is _State.ASKED:
            candidate.state = _State.SLOW
            self._waiting -= 1

    def late(self, peer: PeerID) -> None:
        """A slow node keeps us waiting for much longer than the others: if any has answered, go on without it."""
        candidate = self._known.get(peer)
        if candidate is not None and candidate.state is _State.SLOW:
            candidate.state = _State.LATE

    def _settle(self, peer: PeerID, state: _State) -> _Candidate | None:
        candidate = self._known.get(peer)
        if candidate is None or candidate.state not in (_State.ASKED, _State.SLOW, _State.LATE):
            return None
        self._waiting -= candidate.state is _State.ASKED
        candidate.state = state
        return candidate

    def _add(self, contact: Contact, hops: int) -> _Candidate | None:
        if contact.peer == self._own or contact.peer in self._known:
            return None
        candidate = _Candidate(contact, node_id(contact.peer) ^ self.target, hops)
        self._known[contact.peer] = candidate
        insort(self._ordered, candidate, key=lambda each: each.distance)
        return candidate
