"""Whose word counts how much: the one place that decides it. Pure functions.

Keys are free, so the number of peers that say something proves nothing. A key's word weighs by the samples that were
committed under it, in the last steps that led to the state (see `committed`). So:

- A key that has given to less than three steps since its last long pause weighs nothing, if others have given to more.
  Nor does one that came to few of the last ten, and to none of the last five: it is gone.
- No *site* (see `peer.site_of`) weighs more than all others together, but where each of its keys weighs no
  more than one elsewhere: peers of one laboratory, which share an address, count like any others. Of one site alone
  the same holds for its keys. So no key decides anything while others are there.
- If none of those who say something weighs anything (no step is known, or all of them are new), each site has one
  voice, which its keys share: nothing else is known of them. Peers that announce no address are one site together. Of
  two sets of sites of one size, the one with more keys weighs more.

All members of a round know the same steps and the same addresses, so they weigh all words alike.

A peer says itself how many samples it has. It is `believed` as far as it has been able to give them. What it may give
to a round grows with the time since it gave last, and with what the fastest key of another site gives (`Record.rate`,
`may_give`): so newcomers are not held back, nor those that were away, or are left when others go, and nobody makes an
average its own. A key's own record counts there, too, or a machine that is much faster than all others would be cut for
ever. But so it allows it only a quarter more with each step, and `_AHEAD` times what all others give at most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Protocol, TypeVar

from shoal.base.peer import PeerID, site_of
from shoal.protocol.wire import Contact

__all__ = [
    "MOST_STEPS",
    "RECORD",
    "SITE_BYTES",
    "Record",
    "Weigh",
    "believes",
    "heaviest",
    "may_give",
    "recorded",
    "shared_out",
    "sites_of",
    "weigh",
]

_PART = 3
"""A key weighs nothing before it has contributed to one in this many of the last steps, on average."""

RECORD = 3
"""The number of steps that a key has given to is recorded up to this: more does not matter."""

_BELIEVED = 2
"""How many times the samples that a peer gave to one of the last steps it may claim for the next one."""

_FASTER = 2
"""A peer may be this many times as fast as the fastest one of another site."""

_GROWS = 1.25
"""A peer that is faster than that may give this many times the most that it gave to one of the last steps."""

SITE_BYTES = 4
"""A site is known by this number of bytes of its hash."""

MOST_STEPS = 64
"""A peer that was away gives at most what it has trained in the time of this many steps."""

_AHEAD = 64
"""A peer is recorded with no more than this many times the samples of those of its step who are not so far ahead: liars
get no further ahead, however many they are, and a machine that is as much faster counts with all that it does."""

_VOICE = 720_720
"""The voice of a site: up to 16 keys share it without a rest."""

T = TypeVar("T")


class _Gave(Protocol):
    """A part of a step: the samples that were committed under one key."""

    @property
    def peer(self) -> PeerID: ...
    @property
    def samples(self) -> int: ...
    @property
    def site(self) -> bytes: ...
    @property
    def rounds(self) -> int: ...


class Weigh(Protocol):
    """Weighs the words of some peers: `weigh` with all but the peers given."""

    def __call__(self, peers: Collection[PeerID], /) -> Mapping[PeerID, int]:
        """The weight of the word of each of these peers."""


class Record:
    """What the last steps that led to a state say of each key that gave anything to them.

    Args:
        steps: for each of them the words of its contributors.

    Attributes:
        samples: that each key gave to them.
        weights: of the word of each key; keys that weigh nothing are left out.
        believed: the most samples that each key may have for the next step, to be believed.
        places: where each key was: its site; of one site alone each key is a place of its own.
    """

    def __init__(self, steps: Sequence[Sequence[_Gave]]) -> None:
        self.samples, self._most = dict[PeerID, int](), dict[PeerID, int]()
        self._steps, rounds, sites = len(steps), Counter[PeerID](), dict[PeerID, bytes]()
        for each in (each for step in steps for each in step if each.samples):
            peer = each.peer
            self.samples[peer] = self.samples.get(peer, 0) + each.samples
            self._most[peer] = max(self._most.get(peer, 0), each.samples)
            rounds[peer] = max(rounds[peer] + 1, each.rounds)
            sites[peer] = each.site
        needed = min(len(steps) // _PART, max(rounds.values(), default=0))
        regular = {peer: given for peer, given in self.samples.items() if rounds[peer] >= needed}
        # Those who are shut out of most steps come to a third of them together, and one that is slow comes now and
        # then; one that is gone does not.
        often = Counter(each.peer for step in steps for each in step if each.samples)
        rare = {peer for peer in regular if often[peer] < needed}
        if sum(any(each.peer in rare and each.samples for each in step) for step in steps) < needed:
            came = {each.peer for step in steps[len(steps) // 2 :] for each in step if each.samples}
            regular = {peer: given for peer, given in regular.items() if peer not in rare or peer in came}
        self.weights = _none_alone(regular, sites)
        self._one = len(set(sites.values())) <= 1
        self.places = {peer: self._place(peer, site) for peer, site in sites.items()}
        self._most_at, fastest = Counter[bytes](), dict[bytes, tuple[bool, int]]()
        for peer, place in self.places.items():
            self._most_at[place] += self._most[peer]
            fastest[place] = max(fastest.get(place, (False, 0)), (peer in regular, self.samples[peer]))
        self._fastest = sorted(fastest.items(), key=lambda each: each[1])[-2:]
        self.believed = {
            peer: int(min(_BELIEVED * most, may_give(self.rate(peer), 1))) for peer, most in self._most.items()
        }

    def _place(self, peer: PeerID, site: bytes) -> bytes:
        return peer if self._one else site

    def rate(self, peer: PeerID, site: bytes | None = None) -> float | None:
        """The samples that a peer may give for the time of a step; None if nothing is known of others.

        Args:
            peer: that gives them.
            site: of it; None for where it was last.
        """
        place = self.places.get(peer, peer) if site is None else self._place(peer, site)
        others = [found for at, (_, found) in self._fastest if at != place]
        if not others:
            return None
        own = min(self._most.get(peer, 0), _AHEAD * (self._most_at.total() - self._most_at[place]))
        # `may_give` allows two steps' worth for one.
        return max(_FASTER * others[-1] / self._steps, _GROWS / 2 * own)


def _none_alone(weights: Mapping[PeerID, int], sites: Mapping[PeerID, bytes]) -> dict[PeerID, int]:
    """These weights, where no site, or of one site no key, decides against all others."""
    together = dict[bytes, dict[PeerID, int]]()
    for peer, weight in weights.items():
        if weight:
            together.setdefault(sites.get(peer, b""), {})[peer] = weight
    if len(together) == 1:
        together = {peer: {peer: weight} for each in together.values() for peer, weight in each.items()}
    if len(together) < 2:
        return dict(weights)
    *others, first = sorted(together.values(), key=lambda each: sum(each.values()))
    rest, elsewhere = sum(sum(each.values()) for each in others), max(max(each.values()) for each in others)
    # All others together have the last word, unless they are one as well.
    most = max(rest - (len(others) > 1), sum(min(weight, elsewhere) for weight in first.values()))
    return {**weights, **shared_out(first, most)}


def recorded(gave: Mapping[PeerID, int], most: Mapping[PeerID, float]) -> dict[PeerID, int]:
    """The samples that are kept in the record of a step, of those that each peer gave to it.

    Args:
        gave: the samples of each.
        most: that it was able to give, as far as that is known.
    """
    found = {peer: int(min(samples, most.get(peer, math.inf))) for peer, samples in gave.items()}
    slower = 0
    for samples in sorted(found.values()):
        if slower and samples > _AHEAD * slower:
            return {peer: min(each, _AHEAD * slower) for peer, each in found.items()}
        slower += samples
    return found


def shared_out(said: Mapping[PeerID, int], total: int) -> dict[PeerID, int]:
    """What each counts for of these samples, where all together gave `total`: those that say most are cut, alike."""
    left = total
    for place, samples in enumerate(sorted(said.values())):
        peers = len(said) - place
        if samples * peers > left:
            return {peer: min(each, left // peers) for peer, each in said.items()}
        left -= samples
    return dict(said)


def may_give(rate: float | None, steps: float) -> float:
    """The most samples that a peer may give to a round; infinite if nothing is known.

    Args:
        rate: see `Record.rate`.
        steps: the time since it gave last, or has come, in the time that a step takes; up to `MOST_STEPS`.
    """
    # One more, as times differ, and as a batch may have been under way when it gave last.
    return math.inf if rate is None else rate * (1 + min(steps, MOST_STEPS))


def sites_of(contacts: Iterable[Contact]) -> dict[PeerID, bytes]:
    """The site of each of these peers (a hash of it); empty for those that announce no address."""

    def site(contact: Contact) -> bytes:
        return sha256(site_of(contact.addresses[0].host).encode()).digest()[:SITE_BYTES] if contact.addresses else b""

    return {each.peer: site(each) for each in contacts}


def weigh(
    peers: Collection[PeerID], *, committed: Mapping[PeerID, int], sites: Mapping[PeerID, bytes]
) -> dict[PeerID, int]:
    """The weight of the word of each of these peers, beside each other.

    Args:
        peers: that say something.
        committed: the weights that the last steps give, see `Record`.
        sites: of the peers, see `sites_of`.
    """
    found = {peer: committed.get(peer, 0) for peer in peers}
    if any(found.values()):
        return _none_alone(found, sites)
    keys = Counter(sites.get(peer, b"") for peer in peers)
    return {peer: _VOICE // keys[sites.get(peer, b"")] + 1 for peer in peers}


def believes(
    peers: Collection[PeerID], *, committed: Mapping[PeerID, int], given: Collection[PeerID], begun: bool
) -> bool:
    """Whether a peer believes these, the only others that there are, that a run has other settings than its own.

    A newcomer that was invited does. One that founds a run, or goes on with its state of it, believes those who have
    half of the weight there, and no stranger.

    Args:
        peers: that say so.
        committed: the weights that the last steps give, see `Record`.
        given: the peers that its user gave it to begin with.
        begun: whether it has a state of the run.
    """
    if (given and not begun) or any(peer in given for peer in peers):
        return True
    weight, total = sum(committed.get(peer, 0) for peer in peers), sum(committed.values())
    return weight > 0 and 2 * weight >= total


def heaviest(said: Mapping[PeerID, T], weights: Mapping[PeerID, int], chance: bytes = b"") -> list[T]:
    """The different words of these peers, the one of most weight first; of equal ones that of the first peer.

    Args:
        said: the word of each.
        weights: of the words.
        chance: something that nobody could know when it chose its key: the peers have another order by each. Empty: the
            lowest one is first.
    """
    total = dict[T, int]()
    for peer in sorted(said, key=lambda peer: (sha256(chance + peer).digest() if chance else b"", peer)):
        total[said[peer]] = total.get(said[peer], 0) + weights.get(peer, 0)
    return sorted(total, key=lambda each: -total[each])
