"""What peers that merge do, event by event; and one process that does the same by the strategies' definitions.

A peer's events are its batches, and for each fragment of its model what it gives to a merge, and that it takes one.
`Recorder` notes them while a real peer trains. `Replay` trains as many peers in one process, in plain torch: it takes
from the run only the order of the events, and which batches counted. Then all parameters have to have equal bits after
each merge. So a batch whose gradient was computed before a merge, and steps what came after it, shows.

A sum depends on the order in which values are added, which the network decides, and on the place of a value in memory.
So each value of an average may be that of any order; the replay goes on from the one that it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shoal.run.view.contribution import Contribution
from shoal.strategies import Merging
from shoal.strategies.outer import LocalSteps, OuterTrainingState

__all__ = ["Batch", "Give", "Recorder", "Replay", "Take", "is_mean"]


class Batch(NamedTuple):
    """A batch of this number was given to the optimizer, and counts or does not."""

    number: int
    counts: bool


class Give(NamedTuple):
    """The outer gradient of a fragment went into a round."""

    fragment: int


class Cut(NamedTuple):
    """Of the samples behind the merge that is taken next, so many were more than the peer may give at once."""

    samples: int


class Take(NamedTuple):
    """A merge of a fragment was taken: the average, the anchor after it, and the peer's parameters."""

    fragment: int
    average: list[Tensor]
    anchor: list[Tensor]
    own: list[Tensor]


Event = Batch | Give | Cut | Take

_LANES = 64
"""Processors add several values at once, and what is left over one by one, which may round otherwise."""


class Recorder:
    """Notes the events of a peer.

    Args:
        local: what it trains.
        contribution: its account; None: it never gives more than it may.

    Attributes:
        number: of the batch that is given next.
        events: so far.
    """

    def __init__(self, local: LocalSteps, contribution: Contribution | None = None) -> None:
        self.number, self.events, self._over = 0, list[Event](), False
        accumulate = local.accumulate

        def accumulates(batch_size: int) -> bool:
            counts = accumulate(batch_size)
            self._note(Batch(self.number, counts))
            return counts

        local.accumulate = accumulates  # type: ignore[method-assign]
        for number, fragment in enumerate(local.fragments):
            self._watch(number, fragment)
        if contribution is not None:
            was_cut = contribution.was_cut

            def is_cut(samples: int) -> None:
                was_cut(samples)
                self._note(Cut(samples))

            contribution.was_cut = is_cut  # type: ignore[method-assign]

    def stop(self) -> None:
        """Note nothing more: the other peers leave."""
        self._over = True

    def _note(self, event: Event) -> None:
        if not self._over:
            self.events.append(event)

    def _watch(self, number: int, fragment: OuterTrainingState) -> None:
        contribute, after_step = fragment.contribute, fragment._after_step
        epoch = fragment.epoch

        def contributes() -> tuple[float, float]:
            self._note(Give(number))
            return contribute()

        def is_after_step(own: Sequence[Tensor | None], *, taken: bool) -> None:
            nonlocal epoch
            after_step(own, taken=taken)
            if fragment.epoch != epoch:  # it is called twice
                epoch = fragment.epoch
                average, anchor = _copy(fragment.accumulators), _copy(fragment.trained)
                self._note(Take(number, average, anchor, _copy(fragment._own)))

        fragment.contribute = contributes  # type: ignore[method-assign]
        fragment._after_step = is_after_step  # type: ignore[method-assign]

    def kinds(self) -> list[str]:
        """The events as short texts: `b` is a batch, `-` one that does not count, `g0` and `t0` a give and a take."""
        found = []
        for event in self.events:
            if isinstance(event, Batch):
                found.append("b" if event.counts else "-")
            elif isinstance(event, Give | Take):
                found.append(f"{'g' if isinstance(event, Give) else 't'}{event.fragment}")
        return found


class _Peer:
    """One peer of the replay."""

    def __init__(self, parameters: list[Tensor], inner: torch.optim.Optimizer, schedule: object) -> None:
        self.parameters, self.inner, self.schedule = parameters, inner, schedule
        self.trained: dict[int, int] = {}  # batches since the last give that counts, by fragment
        self.given: dict[int, tuple[list[Tensor], int]] = {}  # the parameters then, and the batches
        self.cut = 0  # samples of the next merge


class _Fragment:
    """A fragment of the replay: the anchor, which all peers share, and the outer optimizer."""

    def __init__(self, places: Sequence[int], parameters: Sequence[Tensor], merging: Merging) -> None:
        self.places = places
        self.anchor = [torch.nn.Parameter(parameters[place].detach().clone()) for place in places]
        self.outer = merging.outer(self.anchor)
        self.before = _copy(self.anchor)

    def merge(self, gradients: Sequence[list[Tensor]], weights: Sequence[float], average: list[Tensor]) -> None:
        """Step the anchor by this average.

        Raises:
            AssertionError: it is not the mean of these gradients, in whatever order they are added.
        """
        assert is_mean(average, gradients, weights), "the average is not that of these batches"
        self.before = _copy(self.anchor)
        for each, gradient in zip(self.anchor, average, strict=True):
            each.grad = gradient.clone()
        self.outer.step()


class Replay:
    """One process that trains all peers.

    Args:
        merging: the way in which they merge.
        make: makes the parameters, the inner optimizer and its schedule (None for none) of a peer.
        backward: sets `.grad` for the batch of this number of this peer.
        places: the numbers of the parameters of each fragment.
        weight: of each batch.
    """

    def __init__(
        self,
        merging: Merging,
        make: Callable[[], tuple[list[Tensor], torch.optim.Optimizer, object]],
        backward: Callable[[list[Tensor], int, int], object],
        places: Sequence[Sequence[int]],
        weight: int,
    ) -> None:
        self._merging, self._make, self._backward = merging, make, backward
        self._places, self._weight = places, weight

    def check(self, events: Sequence[Sequence[Event]]) -> int:
        """Train the peers by their events; returns the number of merges.

        Raises:
            AssertionError: a peer's parameters, or an anchor, have other bits than those of the replay.
        """
        peers = [_Peer(*self._make()) for _ in events]
        fragments = [_Fragment(each, peers[0].parameters, self._merging) for each in self._places]
        left = [list(each) for each in events]
        merges = 0
        while any(left):
            taking = [self._go_on(number, peer, left[number]) for number, peer in enumerate(peers)]
            ready = [take for take in taking if take is not None]
            if len(ready) < len(peers):  # the run was stopped while some had a merge to take
                break
            assert len({take.fragment for take in ready}) == 1, "peers take merges in another order"
            fragment = fragments[ready[0].fragment]
            gives = [peer.given.pop(ready[0].fragment) for peer in peers]
            gradients = [
                [anchor.detach() - own for anchor, own in zip(fragment.anchor, given, strict=True)]
                for given, _ in gives
            ]
            weights = [
                float(self._weight * batches - peer.cut) for peer, (_, batches) in zip(peers, gives, strict=True)
            ]
            fragment.merge(gradients, weights, ready[0].average)
            for number, (peer, take, (given, _)) in enumerate(zip(peers, ready, gives, strict=True)):
                assert all(map(torch.equal, take.anchor, fragment.anchor)), "peers hold other anchors"
                self._take(peer, fragment, take.fragment, given)
                own = [peer.parameters[place] for place in fragment.places]
                assert all(map(torch.equal, own, take.own)), f"merge {merges}: peer {number} does not go on from there"
                left[number].pop(0)
            merges += 1
        return merges

    def _go_on(self, number: int, peer: _Peer, left: list[Event]) -> Take | None:
        """Let a peer train until it takes a merge; returns that."""
        while left:
            event = left[0]
            if isinstance(event, Take):
                return event
            left.pop(0)
            if isinstance(event, Cut):
                peer.cut = event.samples
            elif isinstance(event, Give):
                own = [peer.parameters[place].detach().clone() for place in self._places[event.fragment]]
                _, before = peer.given.get(event.fragment, (None, 0))  # a round that failed gives nothing
                peer.given[event.fragment] = own, before + peer.trained.pop(event.fragment, 0)
            elif event.counts:
                self._backward(peer.parameters, number, event.number)
                peer.inner.step()
                if peer.schedule is not None:
                    peer.schedule.step()  # type: ignore[attr-defined]
                for fragment in range(len(self._places)):
                    peer.trained[fragment] = peer.trained.get(fragment, 0) + 1
        return None

    @torch.no_grad()
    def _take(self, peer: _Peer, fragment: _Fragment, number: int, given: list[Tensor]) -> None:
        mixing = self._merging.mixing
        for place, anchor, before, gave in zip(fragment.places, fragment.anchor, fragment.before, given, strict=True):
            own = peer.parameters[place]
            if self._merging.overlap == 0 or (mixing is None and not peer.trained.get(number)):
                own.copy_(anchor)
            elif mixing is None:  # what was trained since the give is kept
                own.sub_(before).add_(before - gave).add_(anchor)
            else:
                own.lerp_(anchor, 1.0 - mixing)


def is_mean(average: Sequence[Tensor], values: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> bool:
    """Whether each value of the average is the weighted mean of these, in whatever order they are added."""
    right = [torch.zeros_like(each, dtype=torch.bool) for each in average]
    for order, fused in itertools.product(itertools.permutations(range(len(values))), (True, False)):
        mean = _mean([values[index] for index in order], [weights[index] for index in order], fused=fused)
        for matches, one, other in zip(right, mean, average, strict=True):
            matches |= one == other
    return all(bool(each.all()) for each in right)


def _mean(values: Sequence[Sequence[Tensor]], weights: Sequence[float], *, fused: bool) -> list[Tensor]:
    """Tensor by tensor, added in this order; a product that is added is rounded first, or not."""
    found = []
    for tensors in zip(*values, strict=True):
        padded = [functional.pad(tensor.reshape(-1), (0, -tensor.numel() % _LANES)) for tensor in tensors]
        total = padded[0] * weights[0]
        for tensor, weight in zip(padded[1:], weights[1:], strict=True):
            total = total.add_(tensor, alpha=weight) if fused else total + tensor * weight
        found.append(total.div_(sum(weights))[: tensors[0].numel()].view(tensors[0].shape))
    return found


def _copy(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().clone() for each in tensors]
