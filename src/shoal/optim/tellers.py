"""Who tells whom of progress, and how often: few messages, however large the swarm. Pure functions.

In a swarm of a few, everybody tells everybody. In a larger one, each state has `KEEPERS` *keepers*: the peers whose
hash with the state's digest is lowest. Everybody at that state tells the keepers, so a keeper knows all samples, and
when they are enough it tells everybody what it knows. Each state has other keepers, so the work goes round; two,
because one may be gone, or not known to everybody. Who picks another one, knowing other peers, still shares one with
the others, mostly; what goes wrong all the same is mended by the DHT, which everybody writes and reads.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection

from shoal.peer import PeerID

__all__ = ["FEW", "KEEPERS", "keepers", "pace_s"]

FEW = 4
"""So many others are all told directly."""

KEEPERS = 2

_TOLD_PER_S = 1000.0
"""A keeper is told no more often than this, however many peers there are."""


def keepers(digest: bytes, peers: Collection[PeerID]) -> list[PeerID]:
    """Those of these peers who count the samples of the state with this digest."""
    return heapq.nsmallest(KEEPERS, peers, key=lambda peer: hashlib.sha256(digest + peer.raw).digest())


def pace_s(shortest_s: float, peers: int) -> float:
    """The shortest time between two messages of one peer in a swarm of so many."""
    return max(shortest_s, peers / _TOLD_PER_S) if peers - 1 > FEW else shortest_s
