"""The readers of a donor: who has to leave when others wait. No loop: `now` is an argument.

A reader holds a place, and keeps a copy of the state from being freed. It pays for both by what it takes. While nobody
waits it may be as slow as it is: a slow line is no fault. While others wait, those are left that take far less than
their share of what the donor can send. Keys are free, so the readers of one site have one share together. Only the time
counts in which the donor waits for a reader, and not that in which the reader waits for the donor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes

__all__ = ["Reader", "Readers"]

_GRACE_S = 5.0
"""A reader is judged once the donor has waited for it for so long."""

_PART = 0.25
"""A reader is left if it takes less than this part of its share."""

_LEAST_SHARED_BYTES_PER_S = 256 << 10
"""Every donor is taken for one that can send as much, as nobody may have shown yet what it can."""

_HALF_AFTER_S = 120.0
"""What a donor has sent to somebody counts half after this time: its line may be fuller now."""


class Reader:
    """One stream to a receiver.

    Args:
        peer: the receiver.
        site: of the receiver.
        taken: returns how many bytes it has taken so far.
        leave: ends the stream.
        now: seconds.
    """

    def __init__(
        self, peer: PeerID, site: str, taken: Callable[[], int], leave: Callable[[], None], now: float
    ) -> None:
        self.peer, self.site, self._taken, self._leave = peer, site, taken, leave
        self._began, self._before = now, taken()
        self._waited_s, self._since = 0.0, math.inf  # when the wait of now began
        self._seen = self._before, 0.0
        self._left = False

    @contextmanager
    def awaited(self, time: Callable[[], float]) -> Iterator[None]:
        """The donor waits for this reader in the block."""
        self._since = time()
        try:
            yield
        finally:
            self._waited_s += time() - self._since
            self._since = math.inf

    def is_slower(self, bytes_per_s: float, now: float) -> bool:
        """Whether it took less than that since the last look; False if there is too little to tell."""
        taken, waited_s = self._taken(), self._waited_s + max(0.0, now - self._since)
        before, since = self._seen
        if waited_s - since < _GRACE_S:
            return False
        self._seen = taken, waited_s
        return taken - before < bytes_per_s * (waited_s - since)

    def bytes_per_s(self, now: float) -> float:
        """What it has taken in all its time, which was a second at least."""
        return (self._taken() - self._before) / max(1.0, now - self._began)

    def leave(self) -> None:
        """End its stream, once."""
        if not self._left:
            self._left = True
            self._leave()


class Readers:
    """All readers of one donor."""

    def __init__(self) -> None:
        self._readers: dict[Reader, None] = {}
        self._best_bytes_per_s, self._best_at = 0.0, 0.0

    def __len__(self) -> int:
        return len(self._readers)

    def add(self, reader: Reader) -> None:
        """It reads from now on."""
        self._readers[reader] = None

    def remove(self, reader: Reader, now: float) -> None:
        """It has ended."""
        del self._readers[reader]
        if (pace := reader.bytes_per_s(now)) >= self._can_send(now):
            self._best_bytes_per_s, self._best_at = pace, now

    def of_peer(self, peer: PeerID) -> int:
        """How many are this peer's."""
        return sum(reader.peer == peer for reader in self._readers)

    def of_site(self, site: str) -> int:
        """How many are at this site."""
        return sum(reader.site == site for reader in self._readers)

    def make_way(self, now: float) -> None:
        """Others wait for a place, or for memory: leave those that take far less than their share."""
        sites = Counter(reader.site for reader in self._readers)
        share = _PART * self._can_send(now) / max(1, len(sites))
        for reader in list(self._readers):
            if reader.is_slower(share / sites[reader.site], now):
                sometimes("a donor leaves a slow reader, as others wait")
                reader.leave()

    def _can_send(self, now: float) -> float:
        best: float = self._best_bytes_per_s * 0.5 ** ((now - self._best_at) / _HALF_AFTER_S)
        return max(best, _LEAST_SHARED_BYTES_PER_S)
