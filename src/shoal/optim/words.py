"""Whose word counts how much: the one place that decides it. Pure functions.

Keys are free, so the number of peers that say something proves nothing. A key's word weighs by the samples that were
committed under it, in the last steps that led to the state (see `committed`):

- A key that has contributed to less than a third of these steps (3 of 10) weighs nothing; where nobody has contributed
  to so many, those weigh that have contributed to most.
- If none of those who say something weighs anything (no step is known, or all of them are new), each *host* has one
  voice, which its keys share: nothing else is known of them. Peers that announce no address are one host together. Of
  two sets of hosts of one size, the one with more keys weighs more. So peers of one laboratory, which share an address,
  count like any others among themselves.

All members of a round know the same steps and the same addresses, so they weigh all words alike.

A peer says itself how many samples it has. It is `believed` as far as it has been able to give them: up to twice the
most that it gave to one of the last steps. What it may give to a round grows with the time since it gave last, and with
what the fastest key of weight gives (`may_give`): so newcomers are not held back, nor those that were away, or are left
when others go, and nobody makes an average its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Protocol, TypeVar

from shoal.peer import PeerID
from shoal.wire import Contact

__all__ = [
    "MOST_STEPS",
    "Weigh",
    "believed",
    "committed_weights",
    "heaviest",
    "heeds",
    "hosts_of",
    "may_give",
    "recorded",
    "shared_out",
    "typical",
    "weigh",
]

_PART = 3
"""A key weighs nothing before it has contributed to one of so many of the last steps, on average."""

_BELIEVED = 2
"""How many times the samples that a peer gave to one of the last steps it may claim for the next one."""

_FASTER = 2
"""A peer may be so many times as fast as the fastest one of weight."""

MOST_STEPS = 64
"""A peer that was away gives what it has trained in the time of so many steps at most."""

_AHEAD = 16
"""A peer is recorded with no more than so many times the samples of those of its step who are not so far ahead: liars
get no further ahead, however many they are, and a machine that is as much faster counts with all that it does."""

_VOICE = 720_720
"""The voice of a host: up to 16 keys share it without a rest."""

T = TypeVar("T")


class _Gave(Protocol):
    """A part of a step: the samples that were committed under one key."""

    @property
    def peer(self) -> PeerID: ...
    @property
    def samples(self) -> int: ...


class Weigh(Protocol):
    """Weighs the words of some peers: `weigh` with all but the peers given."""

    def __call__(self, peers: Collection[PeerID], /) -> Mapping[PeerID, int]:
        """The weight of the word of each of these peers."""


def committed_weights(steps: Sequence[Iterable[_Gave]]) -> dict[PeerID, int]:
    """The weight that these last steps give each key: its samples in them; keys that weigh nothing are left out.

    In a step a peer says itself how many samples it has. So no more count of a key than all others gave to that step.
    """
    samples, rounds = Counter[PeerID](), Counter[PeerID]()
    for gave in ([each for each in step if each.samples] for step in steps):
        total = sum(each.samples for each in gave)
        for each in gave:
            samples[each.peer] += min(each.samples, total - each.samples) if len(gave) > 1 else each.samples
            rounds[each.peer] += 1
    needed = min(len(steps) // _PART, max(rounds.values(), default=0))
    return {peer: count for peer, count in samples.items() if rounds[peer] >= needed}


def _most_given(steps: Sequence[Iterable[_Gave]]) -> dict[PeerID, int]:
    """The most that each key gave to one of these steps."""
    most = dict[PeerID, int]()
    for each in (each for step in steps for each in step if each.samples):
        most[each.peer] = max(most.get(each.peer, 0), each.samples)
    return most


def believed(steps: Sequence[Iterable[_Gave]]) -> dict[PeerID, int]:
    """The most samples that each contributor to these last steps may have for the next one, to be believed."""
    return {peer: _BELIEVED * samples for peer, samples in _most_given(steps).items()}


def recorded(gave: Mapping[PeerID, int], most: int | None) -> dict[PeerID, int]:
    """So many of the samples that each peer gave to a step are kept in the record of the step.

    Args:
        gave: the samples of each.
        most: that any of them was able to give; None if that is not known.
    """
    found = {peer: samples if most is None else min(samples, most) for peer, samples in gave.items()}
    behind = 0
    for samples in sorted(found.values()):
        if behind and samples > _AHEAD * behind:
            return {peer: min(each, _AHEAD * behind) for peer, each in found.items()}
        behind += samples
    return found


def shared_out(said: Mapping[PeerID, int], total: int) -> dict[PeerID, int]:
    """What each counts for of these samples, where all together gave so many: those that say most are cut, alike."""
    left = total
    for place, samples in enumerate(sorted(said.values())):
        peers = len(said) - place
        if samples * peers > left:
            return {peer: min(each, left // peers) for peer, each in said.items()}
        left -= samples
    return dict(said)


def typical(steps: Sequence[Iterable[_Gave]]) -> float | None:
    """The samples that the fastest key of weight gave to one of these last steps, on average; None if none is known."""
    gave = Counter[PeerID]()
    for each in (each for step in steps for each in step):
        gave[each.peer] += each.samples
    most = max((gave[peer] for peer in committed_weights(steps)), default=0)
    return most / len(steps) if most else None


def may_give(typical_samples: float | None, steps: float) -> float:
    """The most samples that a peer may give to a round; infinite if nothing is known.

    Args:
        typical_samples: see `typical`.
        steps: the time since it gave last, or has come, in the time that a step takes; up to `MOST_STEPS`.
    """
    # One more, as times differ, and as a batch may have been under way when it gave last.
    return math.inf if typical_samples is None else _FASTER * typical_samples * (1 + min(steps, MOST_STEPS))


def hosts_of(contacts: Iterable[Contact]) -> dict[PeerID, str]:
    """The host of each of these peers, as far as it announces one."""
    return {each.peer: each.addresses[0].host for each in contacts if each.addresses}


def weigh(
    peers: Collection[PeerID], *, committed: Mapping[PeerID, int], hosts: Mapping[PeerID, str]
) -> dict[PeerID, int]:
    """The weight of the word of each of these peers, beside each other.

    Args:
        peers: that say something.
        committed: the weights that the last steps give, see `committed_weights`.
        hosts: of the peers, see `hosts_of`.
    """
    found = {peer: committed.get(peer, 0) for peer in peers}
    if any(found.values()):
        return found
    keys = Counter(hosts.get(peer, "") for peer in peers)
    return {peer: _VOICE // keys[hosts.get(peer, "")] + 1 for peer in peers}


def heeds(
    peers: Collection[PeerID], *, committed: Mapping[PeerID, int], given: Collection[PeerID], begun: bool
) -> bool:
    """Whether a peer believes these, the only others that there are, that a run has other settings than its own.

    A newcomer that was invited does. One that founds a run, or goes on with its state of it, believes no stranger.

    Args:
        peers: that say so.
        committed: the weights that the last steps give, see `committed_weights`.
        given: the peers that its user gave it to begin with.
        begun: whether it has a state of the run.
    """
    return bool(given and not begun) or any(peer in given or committed.get(peer, 0) > 0 for peer in peers)


def heaviest(said: Mapping[PeerID, T], weights: Mapping[PeerID, int], chance: bytes = b"") -> list[T]:
    """The different words of these peers, the one of most weight first; of equal ones that of the first peer.

    Args:
        said: the word of each.
        weights: of the words.
        chance: something that nobody could know when it chose its key: the peers have another order by each. Empty: the
            lowest one is first.
    """
    total = dict[T, int]()
    for peer in sorted(said, key=lambda peer: (sha256(chance + peer.raw).digest() if chance else b"", peer)):
        total[said[peer]] = total.get(said[peer], 0) + weights.get(peer, 0)
    return sorted(total, key=lambda each: -total[each])
