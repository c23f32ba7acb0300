"""Which states of others a peer may take: whose word for a state counts, and how far a run can have come. Pure.

A key costs nothing, and a state is a claim like any other: a stranger can change the weights and name what it has as
it likes. So this peer asks who stands for a state:

- **Contributors.** A state is *vouched* for by the peers whose words weigh here (`words.Record`), and by
  those whose words have weighed here before: two branches that meet after a partition know each other so. A state may
  be taken if a majority of them stands for it, or for a better one. Without a majority it may be taken only if the run
  can have come to it since they and this peer were last in one step. States of contributors come before others.
- **Strangers** are heeded if the run can have come to their state since this peer's last step with others, as this peer
  has measured it: a newcomer may be the only one that knows a step. Where no contributor is here but this peer, or none
  of them can give a state (all are clients, as this peer is), one that has just begun, or has measured nothing, heeds
  all: it has little to lose. Later the stranger was heard for a part of the time that this peer has trained alone, too:
  the more there is to lose, the longer a claim has to stand. A peer that began with a state of its own heeds all for
  `_RESTARTED_S`: others are started again then, under new keys, and one may have a newer checkpoint.
- **Founders.** Those who were there before the run's first step count as contributors while this peer has just begun,
  each as much as any: nobody had done anything yet, and a line may have failed before the first step.
- **A peer without a trained state** takes any, those first of the peers that its user gave it.

A run can have come as far as its samples per second, as this peer has measured them in its own steps, allow in that
time, if many others have come to it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from shoal.base.bounded import bound, put_last
from shoal.base.peer import PeerID
from shoal.run.view.progress import Heeded, StateKey

__all__ = ["FASTER", "Witness"]

FASTER = 16
"""A run becomes at most this many times as fast while this peer does not see it."""

_PATIENCE = 4
"""A stranger is heard for at least this part of the time that the run takes for what this peer would lose."""

_RESTARTED_S = 120.0
"""Peers that are started again from their checkpoints come within this time."""

_MEASURED, _LEAST_STEPS = 10, 3
"""The speed of a run is measured over this number of steps, and over no fewer than that."""

_AT_FIRST_S = 10.0
"""Those that are heard so soon after this peer has begun were there before."""

_MAX_REMEMBERED = 4096


class _Place(NamedTuple):
    """A place on the way of a run: epoch and samples of a state, and the time at which this peer was there."""

    epoch: int
    samples: int
    at: float


_BEGINNING = _Place(0, 0, 0.0)


class _Met(NamedTuple):
    """A peer that was in a step with this one: its part of all weight then, and the state before that step."""

    part: float
    place: _Place


@dataclass(slots=True)
class _Speed:
    """The most samples and epochs per second of a run, over some steps; and the seconds that its last steps took."""

    samples: float = 0.0
    epochs: float = 0.0
    step_s: float = 0.0


class Witness:
    """Remembers how far this peer and others came together.

    Args:
        me: this peer.
        given: the peers that its user gave it to begin with.
        begins_s: the time for which a peer has just begun, seconds.
        time: returns the seconds since it began, also those for which the machine slept.
    """

    def __init__(self, me: PeerID, *, given: Collection[PeerID], begins_s: float, time: Callable[[], float]) -> None:
        self._me, self._given, self._begins_s, self._time = me, frozenset(given), begins_s, time
        self._place = self._together = _BEGINNING
        self._trail: list[_Place] = []
        self._speed = _Speed()
        self._parts: Mapping[PeerID, float] = {}
        self._met: dict[PeerID, _Met] = {}
        self._gave_at: dict[PeerID, float] = {}
        self._first_heard: dict[PeerID, float] = {}
        self._founders: frozenset[PeerID] = frozenset()
        self._restarted: bool | None = None  # whether it began with a trained state; None: not known

    def took_over(self, epoch: int, samples: int, *, gave: Collection[PeerID], weights: Mapping[PeerID, int]) -> None:
        """This peer's state is another one now, which is no step of its own from the one before; see `stepped`."""
        now = self._time()
        for peer in gave:  # when is not known here, but since the state before; what this peer itself has held is over
            put_last(self._gave_at, peer, now if peer == self._me else self._place.at, _MAX_REMEMBERED)
        self._place = self._together = _Place(epoch, samples, now)
        self._trail, self._parts = [self._place], _parts_of(weights)
        if epoch:
            self._founders = frozenset()

    def stepped(self, epoch: int, samples: int, *, gave: Collection[PeerID], weights: Mapping[PeerID, int]) -> None:
        """This peer took a step of its own, or with others.

        Args:
            epoch: of the state after it.
            samples: that went into that state.
            gave: the contributors to the step.
            weights: of all words, after the step.
        """
        now = self._time()
        before, self._place = self._place, _Place(epoch, samples, now)
        self._trail = [*self._trail[-_MEASURED:], self._place]
        first = self._trail[0]
        seconds, speed = now - first.at, self._speed
        if len(self._trail) > 1 and seconds > 0:
            speed.step_s = seconds / (epoch - first.epoch)
        if len(self._trail) > _LEAST_STEPS and seconds > 0:
            speed.samples = max(speed.samples, (samples - first.samples) / seconds)
            speed.epochs = max(speed.epochs, (epoch - first.epoch) / seconds)
        if set(gave) <= {self._me}:
            return
        # Its own weight grows with each step that it takes alone: that says nothing against the others.
        self._together, self._parts = self._place, _parts_of(weights)
        for peer in gave:
            if peer != self._me and peer in self._parts:
                put_last(self._met, peer, _Met(self._parts[peer], before), _MAX_REMEMBERED)

    def gave(self, peers: Collection[PeerID]) -> None:
        """A round to which these gave has just ended: its members hear of that together, and step when they can."""
        now = self._time()
        for peer in peers:
            put_last(self._gave_at, peer, now, _MAX_REMEMBERED)

    def steps_since(self, peer: PeerID) -> float | None:
        """The time since this peer gave to a step, or since it has come, in the time that a step takes.

        None if that is not known: nothing was measured, or it was there before this peer.
        """
        now = self._time()
        came = self._first_heard.get(peer, now)
        since = self._gave_at.get(peer, came if came > _AT_FIRST_S else None)
        return None if since is None or not self._speed.step_s else (now - since) / self._speed.step_s

    def heeded(self, own: StateKey, named: Mapping[PeerID, StateKey], can_give: Collection[PeerID]) -> Heeded:
        """The other peers whose states this peer may take.

        Args:
            own: this peer's state.
            named: the state that each of the others is at.
            can_give: those of them that can give it to this peer.
        """
        now = self._time()
        for peer in named:
            self._first_heard.setdefault(peer, now)
        bound(self._first_heard, _MAX_REMEMBERED)
        if self._restarted is None:
            self._restarted = own.trained and not self._speed.step_s
        trained = {peer: key for peer, key in named.items() if key.trained}
        if not own.trained:
            self._founders = self._founders.union(named.keys() - trained)
            return Heeded(frozenset(trained.keys() & self._given), frozenset(named))
        former = {peer: self._met[peer].part for peer in trained if peer in self._met}
        if now < self._begins_s:
            equal = dict.fromkeys(self._founders & trained.keys(), 1 / (1 + len(self._founders)))
            former = equal | former
        part = former | {peer: self._parts[peer] for peer in trained if peer in self._parts}
        known = {peer: trained[peer] for peer in part}
        vouching = self._vouching(own, known, part, self._parts.get(self._me, 0.0), now)
        strangers = trained.keys() - part
        if part.keys().isdisjoint(can_give) or (self._restarted and now < _RESTARTED_S):
            if part and not self._restarted:  # all are clients, as this peer is: an auxiliary peer gives their state
                strangers = (strangers & self._given) or strangers
            heeded = (peer for peer in strangers if self._is_heeded(peer, own, trained[peer], now))
        else:
            measured = strangers if self._speed.samples else ()
            heeded = (peer for peer in measured if self._can_be_there(peer, trained[peer], now))
        return Heeded(vouching, frozenset(heeded))

    def _vouching(
        self, own: StateKey, known: Mapping[PeerID, StateKey], part: Mapping[PeerID, float], mine: float, now: float
    ) -> frozenset[PeerID]:
        """Those of the known peers that stand for a state that may be taken; the worse ones do if anybody does."""
        ahead = sorted((peer for peer in known if known[peer] > own), key=known.__getitem__, reverse=True)
        found = known.keys() - ahead
        # Those who are gone stand for nothing, and parts of different times may be more than the whole.
        total = min(1.0, mine + sum(part.values()))
        support = 0.0
        for key, peers in groupby(ahead, key=known.__getitem__):
            equal = list(peers)
            support = sum((part[peer] for peer in equal), support)
            found |= {peer for peer in equal if 2 * support > total or self._can_be_there(peer, key, now)}
        return frozenset(found)

    def _is_heeded(self, peer: PeerID, own: StateKey, key: StateKey, now: float) -> bool:
        """Whether a stranger's state may be taken, where no contributor is here."""
        if now < self._begins_s or not self._speed.samples:
            return True
        alone = own.samples - self._together.samples
        stood = _PATIENCE * self._speed.samples * (now - self._first_heard[peer])
        return alone <= stood and self._can_be_there(peer, key, now)

    def _can_be_there(self, peer: PeerID, key: StateKey, now: float) -> bool:
        """Whether the run can have come to this state since this peer was in a step with that one, or with anybody."""
        speed, met = self._speed, self._met.get(peer)
        if not speed.samples:
            return True
        from_ = self._together if met is None else met.place
        if met is None and peer in self._founders:
            from_ = _BEGINNING
        # Two steps may have been under way, and their samples trained before.
        most_s = FASTER * (now - from_.at) + 2 / speed.epochs
        return (
            key.epoch <= from_.epoch + speed.epochs * most_s and key.samples <= from_.samples + speed.samples * most_s
        )


def _parts_of(weights: Mapping[PeerID, int]) -> dict[PeerID, float]:
    total = sum(weights.values())
    return {peer: weight / total for peer, weight in weights.items() if weight}
