"""The rules by which peers tell each other of progress: few messages, however large the swarm. No I/O.

In a swarm of a few, everybody tells everybody. In a larger one, each state has `KEEPERS` *keepers*: the peers whose
hash with the state's digest is lowest. Everybody at that state tells the keepers, so a keeper knows all samples, and
when they are enough it tells everybody what it knows. Each state has other keepers, so the work goes round; two,
because one may be gone, or not known to everybody. A peer that picks another one, knowing other peers, still shares one
with the others, mostly; what goes wrong all the same is mended by the DHT, which everybody writes and reads.

In a swarm of hundreds the peers of a state are divided into parts, by the same hash. Each part has its own keepers, and
the keepers of all parts tell each other what they were told.

A count matters when it may be the one that makes the batch full. So it is told near the end of an epoch, and else only
now and then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from shoal.base.peer import PeerID
from shoal.protocol.wire import Progress, Standing
from shoal.run.view.progress import RELAYED_S, SwarmView
from shoal.strategies.merge_pace import WAY

__all__ = ["KEEPERS", "Countdown", "Order", "Relay", "look_s", "silence_s", "write_s"]

KEEPERS = 2
"""The number of keepers of each state, or of each part of its peers."""

_PART = 96
"""A state with twice as many peers is divided."""

_NEAR = 0.1
"""The end of an epoch is near when this share of it is left, or one and a half batches of this peer.

Then a count is told, again when half as much is left, and so on, and after each of the last batches.
"""

_BATCHES = 1.5
"""The end of an epoch is near, too, when this peer has no more batches left than this."""

_LATE_S = 0.5
"""An epoch is late this long after its estimated end. Then its keepers are looked at."""

_SILENCE_S, _PEERS_PER_S = 1.0, 16.0
"""Far from the end of an epoch keepers are told after this time, or at this rate of peers a second if that is later."""

_WRITTEN_PER_S, _READ_PER_S, _LOOK_S = 16.0, 8.0, 5.0
"""The numbers of peers of a run that write to the DHT, and that read it, in a second. Once all are known, two reads are
`_LOOK_S` apart at least."""


class Order:
    """The peers of a state in the order in which they keep its count, divided into parts.

    To make it takes a hash for each peer; to find the keepers only the first peers are looked at.

    Args:
        digest: of the state.
        peers: all of it, the part of whose first one comes first.

    Attributes:
        parts: each in this order.
    """

    def __init__(self, digest: bytes, peers: Collection[PeerID]) -> None:
        ranks = {peer: hashlib.sha256(digest + peer).digest() for peer in peers}
        self._peers = sorted(ranks, key=ranks.__getitem__)
        number = 1 << max(0, (len(peers) // _PART).bit_length() - 1)
        divided: dict[int, list[PeerID]] = {ranks[peer][-1] % number: [] for peer in islice(peers, 1)}
        for peer in self._peers:
            divided.setdefault(ranks[peer][-1] % number, []).append(peer)
        self.parts = list(divided.values())

    def first(self, able: Callable[[PeerID], bool]) -> list[PeerID]:
        """The first peers that are able, of all parts: as many as keep the count of one, or as there are."""
        return _first(self._peers, able)

    def keepers(self, able: Callable[[PeerID], bool]) -> list[list[PeerID]]:
        """The keepers of each part: its first peers that are able, if there are any."""
        return [_first(part, able) for part in self.parts]


def _first(peers: Iterable[PeerID], able: Callable[[PeerID], bool]) -> list[PeerID]:
    return list(islice(filter(able, peers), KEEPERS))


class Relay:
    """The words of others that a keeper passes on: to the other keepers, and to all of its part once there is enough.

    It tells what is new, and all of them before they are forgotten. All of them each time would be more than a peer
    reads from another one (`Allowance`), and arrive ever later.

    Attributes:
        done: of the state's next step, when words were passed on last.
        at: when that was, local time, seconds.
    """

    def __init__(self) -> None:
        self.done, self.at = 0, float("-inf")
        self._told: dict[PeerID, float] = {}  # the time of each word
        self._all_at = float("-inf")

    def news(self, words: Sequence[Standing], done: int, now: float) -> list[Standing]:
        """The words to tell now, of all that are known, which are told then."""
        self.done, self.at = done, now
        if now >= self._all_at:
            self._told, self._all_at = {}, now + RELAYED_S / 2
        new = [each for each in words if self._told.get(each.peer) != each.time]
        self._told.update((each.peer, each.time) for each in new)
        return new


def silence_s(peers: int) -> float:
    """Return how long a peer says nothing to the keepers, if nothing else makes it speak, in a swarm of `peers`."""
    return max(_SILENCE_S, peers / _PEERS_PER_S)


def write_s(peers: int, shortest_s: float) -> float:
    """Return how often a peer writes to the DHT in a swarm of `peers`."""
    return max(shortest_s, peers / _WRITTEN_PER_S)


def look_s(peers: int) -> float:
    """Return how often a peer reads the DHT in a swarm of `peers`, once it knows them all."""
    return max(_LOOK_S, peers / _READ_PER_S)


class Countdown:
    """An estimate of how near the end of the epoch is, as far as one peer can tell.

    It goes by what it gave to the last step, by what the others say they have done, and by how fast they all are.

    Args:
        merges: peers merge now and then. Nobody waits for the end of a merge's way, and with a quorum it differs from
            one way to the next: it is late once a tenth more (`_NEAR`) is over. Else half of a swarm of hundreds
            looked at its keepers, four times a second.
    """

    def __init__(self, *, merges: bool = False) -> None:
        self._merges, self._slack = merges, _NEAR if merges else 0.0
        self._target, self._rate = 1, 0.0
        self._digest, self._began, self._over_since = b"", 0.0, float("inf")
        self._done = self._batch = self._gave = 0
        self._left = self._told_left = 1.0

    def observe(self, mine: Progress, view: SwarmView, target: int, rate: float, now: float) -> bool:
        """Take in a view. True if a further batch may be the last one.

        Args:
            mine: this peer's word.
            view: of the swarm.
            target: what all peers have done when a step is due.
            rate: of that, per second.
            now: local time, seconds.
        """
        self._target, self._rate = target, rate
        if mine.digest != self._digest:
            # A merge is due about when a peer has gone its way, however far it went while the last ones failed.
            self._digest, self._began, self._gave = mine.digest, now, WAY if self._merges else self._done
            self._done, self._over_since = 0, float("inf")
            self._batch *= self._merges
            self._left = self._told_left = 1.0
        if (more := mine.done - self._done) > 0:
            # Batches differ in size. But peers that merge count them alike, and may look once in several batches.
            self._batch = min(more, self._batch or more) if self._merges else max(more, self._batch)
        self._done = max(self._done, mine.done)
        part = max(view.done, rate * (now - self._began)) / self._target
        if self._gave:
            part = max(part, mine.done / self._gave)
            if part >= 1.0:
                self._over_since = min(now, self._over_since)
        self._left = 1.0 - part
        return self._left <= max(_NEAR, self._last_batches)

    @property
    def _last_batches(self) -> float:
        return _BATCHES * self._batch / self._gave if self._gave else 1.0

    @property
    def left_s(self) -> float:
        """How long the epoch goes on, seconds; most samples are not known before its end."""
        return max(0.0, self._left) * self._target / self._rate if self._rate > 0 else 0.0

    @property
    def matters(self) -> bool:
        """Near the end: whether our count has changed enough since it was told."""
        return self._left <= max(self._told_left / 2, self._last_batches)

    @property
    def presses(self) -> bool:
        """Near the end: whether the others may wait for our count, which matters.

        Not where nothing says what this peer gives to a step; nor again after a count at the estimated end, which may
        be far too early.
        """
        return self.matters and self._gave > 0 and self._told_left > 0

    def told(self) -> None:
        """Our count is told."""
        self._told_left = self._left

    def is_late(self, now: float) -> bool:
        """Return whether the epoch should have ended a while ago: its keepers may have fallen silent."""
        return now >= self._over_since + max(_LATE_S, self._slack * (self._over_since - self._began))
