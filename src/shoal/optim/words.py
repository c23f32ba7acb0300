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
most that it gave to one of the last steps. It may give four times the most that any key of weight gave to one of them
(`able`): so newcomers are not held back, nor those that are left when others go, and nobody makes an average its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from shoal.peer import PeerID
from shoal.wire import Contact

__all__ = ["Weigh", "able", "believed", "committed_weights", "heaviest", "heeds", "hosts_of", "weigh"]

_PART = 3
"""A key weighs nothing before it has contributed to one of so many of the last steps, on average."""

_BELIEVED, _ABLE = 2, 4
"""How many times the samples that were given to one of the last steps may be claimed, and given, for the next one."""

_AHEAD = 16
"""A peer is recorded with no more than so many times the samples of all others of its step. A liar gets no further
ahead of them, step by step, and a machine that is as much faster counts with all that it does."""

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


def recorded(samples: int, others: int, most: int | None) -> int:
    """So many of the samples that a peer gave to a step are kept in the record of the step.

    Args:
        samples: that it gave.
        others: that all others gave.
        most: that it was able to give; None if that is not known.
    """
    found = samples if most is None else min(samples, most)
    return min(found, _AHEAD * others) if others else found


def able(steps: Sequence[Iterable[_Gave]]) -> int | None:
    """The most samples that any peer may give to the step after these, however many it has; None if none is known."""
    most, weights = _most_given(steps), committed_weights(steps)
    return max((_ABLE * most[peer] for peer in weights), default=None)


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


def heaviest(said: Mapping[PeerID, T], weights: Mapping[PeerID, int]) -> list[T]:
    """The different words of these peers, the one of most weight first; of equal ones that of the lowest peer."""
    total = dict[T, int]()
    for peer in sorted(said):
        total[said[peer]] = total.get(said[peer], 0) + weights.get(peer, 0)
    return sorted(total, key=lambda each: -total[each])
