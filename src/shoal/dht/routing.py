"""The ids of nodes and keys, and the table of the nodes that this one knows (sans-IO).

Ids are 256-bit numbers: a key's is the SHA-256 of the application's key, a node's the SHA-256 of its `PeerID`; the
distance of two ids is their XOR (Kademlia, Maymounkov and Mazieres 2002). Bucket i of the table holds nodes that share
exactly i leading bits with this node, so a node knows its own neighbourhood fully and the rest of the world thinly.

Invariants, held by the tests:

- at most `bucket_size` nodes and `bucket_size` spares per bucket: memory is bounded whatever the network says;
- a node without addresses (client mode) and this node itself are never in the table;
- a known node is never displaced by a new one; only a lost one makes room, and the spare seen last takes its place;
- only an answer to a call of ours is a sign of life: a node that calls us every second and answers nothing is lost;
- `nearest` is exactly what sorting all known nodes by distance would give, with the doubtful ones behind the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from shoal.base.bounded import put_last
from shoal.base.peer import PeerID
from shoal.protocol.wire import Contact

if TYPE_CHECKING:
    import random

__all__ = ["ID_BITS", "RoutingTable", "id_of_key", "key_of", "node_id"]

ID_BITS = 256
_FAILURES_TO_REMOVE = 2
"""A node that gives no answer to so many calls in a row leaves the table."""

_OWED = 1024
"""A node that left a call without an answer is doubtful before it has given so many."""

_MOST_DEBTS = 4096


def key_of(key: str | bytes) -> bytes:
    """The wire key of an application's key: its SHA-256. Text counts as its UTF-8 bytes."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def id_of_key(key: bytes) -> int:
    """The id of a wire key (`key_of`): the same 256 bits as a number."""
    return int.from_bytes(key)


@lru_cache(maxsize=1 << 16)
def node_id(peer: PeerID) -> int:
    """The id of a node."""
    return int.from_bytes(hashlib.sha256(peer).digest())


@dataclass(slots=True, eq=False)
class _Node:
    """A node in a bucket or among its spares."""

    contact: Contact
    id: int
    bucket: int
    last_seen: float
    failures: int = 0


@dataclass(slots=True, eq=False)
class _Bucket:
    """Nodes at one distance. Both dictionaries are ordered by when a node was last seen, the longest ago first."""

    refreshed: float
    nodes: dict[PeerID, _Node] = field(default_factory=dict)
    spares: dict[PeerID, _Node] = field(default_factory=dict)


class RoutingTable:
    """The nodes that this node knows, in k-buckets with replacement caches.

    Args:
        own: this node.
        bucket_size: k, the most nodes (and the most spares) kept per bucket.
    """

    def __init__(self, own: PeerID, *, bucket_size: int) -> None:
        self.own_id = node_id(own)
        self.bucket_size = bucket_size
        self._buckets: dict[int, _Bucket] = {}
        self._nodes: dict[PeerID, _Node] = {}  # all that are in some bucket's `nodes`
        self._debts: dict[PeerID, int] = {}  # answers; also of nodes that have left the table

    # -------------------------------------------------------------------------------------------------------- reading

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, peer: PeerID) -> bool:
        return peer in self._nodes

    def __iter__(self) -> Iterator[Contact]:
        """All known nodes, far ones first."""
        for index in sorted(self._buckets):
            for node in self._buckets[index].nodes.values():
                yield node.contact

    def contact(self, peer: PeerID) -> Contact | None:
        """The contact of a known node; None if it is not in the table."""
        node = self._nodes.get(peer)
        return node.contact if node else None

    def doubtful(self, peer: PeerID) -> bool:
        """Whether a node has left a call without an answer, and has not made up for it since."""
        return peer in self._debts

    def nearest(self, target: int, count: int, *, without: PeerID | None = None) -> list[Contact]:
        """The known nodes nearest to an id, nearest first; `doubtful` ones only where there are too few others.

        Args:
            target: the id.
            count: how many at most.
            without: a node to leave out (the one that asks).
        """
        found: list[Contact] = []
        doubtful: list[Contact] = []
        for group in self._rings(target):
            for node in sorted(group, key=lambda each: each.id ^ target):
                if (peer := node.contact.peer) != without:
                    (doubtful if self.doubtful(peer) else found).append(node.contact)
            if len(found) >= count:
                break
        return (found + doubtful)[:count]

    def _rings(self, target: int) -> Iterator[list[_Node]]:
        """All nodes in groups, each group wholly nearer to the target than the next.

        With p bits shared by this node and the target: nodes of bucket p share more than p bits with the target, nodes
        of higher buckets exactly p, and nodes of bucket i < p exactly i.
        """
        shared = self._index(target)
        indices = sorted(self._buckets, reverse=True)
        if (bucket := self._buckets.get(shared)) is not None:
            yield list(bucket.nodes.values())
        yield [node for index in indices if index > shared for node in self._buckets[index].nodes.values()]
        for index in indices:
            if index < shared:
                yield list(self._buckets[index].nodes.values())

    def _index(self, node: int) -> int:
        return ID_BITS - (self.own_id ^ node).bit_length()

    # -------------------------------------------------------------------------------------------------------- changing

    def seen(self, contact: Contact, now: float, *, answered: bool = True) -> bool:
        """Note that a node answered a call, or called: its call lets it in, and is no sign of life.

        The word of others about a node does not count.

        Returns:
            True if the node is new in the table.
        """
        peer = contact.peer
        if not contact.addresses:
            return False
        if answered and peer in self._debts:
            self._debts[peer] -= 1
            if not self._debts[peer]:
                del self._debts[peer]
        known = self._nodes.get(peer)
        if known is not None:
            known.contact = contact
            if answered:
                known.last_seen, known.failures = now, 0
                nodes = self._buckets[known.bucket].nodes
                nodes[peer] = nodes.pop(peer)
            return False
        its_id = node_id(peer)
        index = self._index(its_id)
        if index == ID_BITS:
            return False
        bucket = self._buckets.setdefault(index, _Bucket(now))
        node = _Node(contact, its_id, index, now)
        if len(bucket.nodes) < self.bucket_size:
            bucket.spares.pop(peer, None)
            bucket.nodes[peer] = self._nodes[peer] = node
            return True
        put_last(bucket.spares, peer, node, self.bucket_size)
        return False

    def failed(self, peer: PeerID, *, owes: bool = True) -> bool:
        """Note that a node did not answer a call in time; twice in a row removes it. True if it is removed.

        `owes`: it is doubtful before it has made up for it.
        """
        if owes:
            put_last(self._debts, peer, _OWED, _MOST_DEBTS)
        node = self._nodes.get(peer)
        if node is None:
            return False
        node.failures += 1
        return node.failures >= _FAILURES_TO_REMOVE and self.remove(peer)

    def remove(self, peer: PeerID) -> bool:
        """Drop a node that is lost. The spare seen last takes its place. True if it was in the table."""
        bucket = self._buckets.get(self._index(node_id(peer)))
        if bucket is None:
            return False
        bucket.spares.pop(peer, None)
        if bucket.nodes.pop(peer, None) is None:
            return False
        del self._nodes[peer]
        if bucket.spares:
            name, spare = bucket.spares.popitem()
            bucket.nodes[name] = self._nodes[name] = spare
            bucket.nodes = dict(sorted(bucket.nodes.items(), key=lambda item: item[1].last_seen))
        return True

    # ------------------------------------------------------------------------------------------------------- refreshing

    def refreshed(self, target: int, now: float) -> None:
        """Note that a lookup near this id was made."""
        if (bucket := self._buckets.get(self._index(target))) is not None:
            bucket.refreshed = now

    def due(self, before: float) -> list[int]:
        """Buckets that saw no lookup since `before`, far ones first; of the empty ones only those that can matter.

        A network of n nodes has nobody beyond about log2(n) shared bits: the deepest bucket in use, and all buckets
        above it, are worth refreshing.
        """
        if not self._nodes:
            return []
        deepest = max(index for index, bucket in self._buckets.items() if bucket.nodes)
        due = []
        for index in range(deepest + 1):
            bucket = self._buckets.setdefault(index, _Bucket(float("-inf")))
            if bucket.refreshed < before:
                due.append(index)
        return due

    def random_id(self, bucket: int, rng: random.Random) -> int:
        """An id drawn from the range of one bucket, to look up for a refresh."""
        tail = ID_BITS - bucket - 1
        prefix = (self.own_id >> tail) ^ 1
        return (prefix << tail) | (rng.getrandbits(tail) if tail else 0)

    def quiet(self, before: float) -> list[Contact]:
        """Nodes that gave no sign of life since `before`: at most one per bucket, the one silent for longest."""
        silent = []
        for index in sorted(self._buckets):
            node = next(iter(self._buckets[index].nodes.values()), None)
            if node is not None and node.last_seen < before:
                silent.append(node.contact)
        return silent
