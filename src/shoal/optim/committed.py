"""Who has contributed to the last steps, and with how many samples: what a peer's word weighs. Pure bookkeeping.

Keys are free, so what is said under a key counts by what was committed under it: a key that has contributed to none of
the last rounds weighs nothing. In a round a peer says itself how many samples it has; so nobody weighs more than all
the others of its round together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from shoal.peer import PeerID

__all__ = ["Committed"]

_ROUNDS = 10
"""So many of the last steps count."""


class Committed:
    """Remembers the last steps that this peer took."""

    def __init__(self) -> None:
        self._rounds: deque[Mapping[PeerID, int]] = deque(maxlen=_ROUNDS)
        self.samples: Mapping[PeerID, int] = {}
        """Of each contributor to the last steps, all of them together."""

    def add(self, samples: Mapping[PeerID, int]) -> None:
        """A step was taken, from so many samples of each contributor."""
        total = sum(samples.values())
        capped = {peer: min(own, total - own) for peer, own in samples.items()} if len(samples) > 1 else samples
        self._rounds.append(capped)
        count: Counter[PeerID] = Counter()
        for each in self._rounds:
            count.update(each)
        self.samples = {peer: own for peer, own in count.items() if own > 0}
