"""One-process references of the strategies of low communication, as their papers define them. Nothing is sent.

All of them are one algorithm with different settings (`Strategy`):

- local SGD (Stich, 2018, arXiv:1805.09767): `every` H steps all peers take the mean of their parameters;
- DiLoCo (Douillard et al., 2023, arXiv:2311.08105): an outer optimizer steps an *anchor*, a copy of the parameters that
  all peers hold, by the mean of the *outer gradients*: anchor minus parameters;
- Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512): the parameters are split into `fragments`, whose merges
  are staggered; a merge takes `overlap` steps, in which the peers train on, and then mix the new anchor in;
- Decoupled DiLoCo (Douillard et al., 2026, arXiv:2604.21428): a merge needs a `quorum` of peers, and the others are
  left out;
- SparseLoCo (Sarfi et al., 2025, arXiv:2508.15706): outer gradients are encoded, with error feedback that decays, in
  the place of an outer momentum.

A peer's weight in a merge is the number of samples that it has trained since it last gave. A peer that is left out of a
merge moves by as much as the anchor does: so it keeps its local progress, and gives it later. All is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from shoal.compression import codec_by_name

__all__ = [
    "DILOCO",
    "LOCAL_SGD",
    "Feedback",
    "Fragment",
    "Peer",
    "Strategy",
    "Swarm",
    "outer_gradient",
    "outer_step",
    "split",
    "weighted_mean",
]

Outer = Callable[[list[Tensor]], torch.optim.Optimizer]
"""Makes the outer optimizer of an anchor."""

LOCAL_SGD: Outer = partial(torch.optim.SGD, lr=1.0)
DILOCO: Outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def outer_gradient(base: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """How far a peer has come from its base, with the sign of a gradient: base minus parameters."""
    return [before - after.detach() for before, after in zip(base, parameters, strict=True)]


def weighted_mean(values: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> list[Tensor]:
    """The mean of lists of tensors, tensor by tensor."""
    total = sum(weights)
    return [
        torch.stack([tensor * (weight / total) for tensor, weight in zip(each, weights, strict=True)]).sum(0)
        for each in zip(*values, strict=True)
    ]


def outer_step(anchor: Sequence[Tensor], optimizer: torch.optim.Optimizer, gradient: Sequence[Tensor]) -> None:
    """Step the anchor, in place."""
    for tensor, each in zip(anchor, gradient, strict=True):
        tensor.grad = each
    optimizer.step()


def split(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The places of tensors of these sizes, in `count` runs of about equal size."""
    total = sum(sizes)
    runs: list[list[int]] = [[] for _ in range(count)]
    for place, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
        runs[int((end - size / 2) * count / total)].append(place)
    return runs


class Feedback:
    """Sends values through a codec; what is lost is added to the values that are sent next.

    Args:
        codec: its name.
        decay: the part of the loss that is kept (SparseLoCo's beta).
    """

    def __init__(self, codec: str = "none", decay: float = 1.0) -> None:
        self.codec, self.decay = codec_by_name(codec), decay
        self.lost: list[Tensor] | None = None

    def send(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The values as they arrive."""
        if self.codec.name == "none":
            return list(values)
        if self.lost is not None:
            values = [value + self.decay * lost for value, lost in zip(values, self.lost, strict=True)]
        sizes = [value.numel() for value in values]
        flat = torch.cat([value.flatten() for value in values])
        arrived = self.codec.decode(self.codec.encode(flat, sizes), flat.numel(), flat.dtype, sizes)
        pieces = torch.split(arrived.to(flat.dtype), sizes)
        found = [piece.clone().view(value.shape) for piece, value in zip(pieces, values, strict=True)]
        self.lost = [value - each for value, each in zip(values, found, strict=True)]
        return found


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How peers merge.

    Attributes:
        every: local steps between two merges of a fragment (H): when the peers have done so many on average. With a
            quorum: when so many peers have done them.
        outer: makes the outer optimizer of each fragment's anchor.
        fragments: how many (P); the merges of one are H / P steps after those of another.
        overlap: steps between giving and taking (tau).
        mixing: with an overlap: the part of its own parameters that a peer keeps (alpha), 0 to take the anchor. None:
            it takes the anchor, and keeps all that it has trained since it gave.
        quorum: peers that give to a merge, at least; None: all give what they have.
        partial: with a quorum: peers that have done fewer steps give what they have.
        patience: a peer that was left out keeps its local progress if it is so many merges behind, and drops it if
            there are more.
        codec: of the outer gradients.
        average_codec: of their average; None: the same.
        decay: of error feedback.
        resets: each merge makes a peer forget the state of its inner optimizer.
    """

    every: float
    outer: Outer = DILOCO
    fragments: int = 1
    overlap: int = 0
    mixing: float | None = None
    quorum: int | None = None
    partial: bool = False
    patience: int = 1
    codec: str = "none"
    average_codec: str | None = None
    decay: float = 1.0
    resets: bool = False

    @property
    def codecs(self) -> tuple[str, str]:
        """Of the two halves of an all-reduce: outer gradients, and their average."""
        return self.codec, self.codec if self.average_codec is None else self.average_codec

    def givers(self, steps: Sequence[float]) -> list[int]:
        """Who gives to a merge now, by the steps of each peer since it gave last; nobody if none is due."""
        done = [peer for peer, count in enumerate(steps) if count >= self.every]
        everybody = list(range(len(steps)))
        if self.quorum is None:
            return everybody if sum(steps) >= self.every * len(steps) else []
        if len(done) < self.quorum:
            return []
        return everybody if self.partial else done


@dataclass
class Peer:
    """One peer.

    Attributes:
        parameters: its own.
        inner: its optimizer of them.
        learn: makes the gradients of one step; returns the number of samples.
    """

    parameters: list[Tensor]
    inner: torch.optim.Optimizer
    learn: Callable[[], int]

    def step(self) -> int:
        """Train one step; returns the number of samples."""
        self.inner.zero_grad()
        samples = self.learn()
        self.inner.step()
        return samples


@dataclass
class Member:
    """What a fragment knows of a peer.

    Attributes:
        base: the anchor that its parameters come from.
        version: the merges that were before it.
        steps: since it gave last, or, without a quorum, since the last merge; at the beginning more, by the fragment's
            turn.
        samples: since it gave last.
        sender: of its outer gradients.
        given: its parameters when it gave, until it takes.
    """

    base: list[Tensor]
    steps: float
    sender: Feedback
    version: int = 0
    samples: int = 0
    given: list[Tensor] | None = None


@dataclass
class Fragment:
    """A part of the parameters, which is merged by itself.

    Attributes:
        places: of its tensors in the list of parameters.
        anchor: their common copy.
        optimizer: the outer optimizer.
        members: the peers.
        reducer: of the average.
        version: merges so far.
        average: what a merge has found that nobody has taken yet.
        due: when that is taken.
    """

    places: list[int]
    anchor: list[Tensor]
    optimizer: torch.optim.Optimizer
    members: list[Member]
    reducer: Feedback
    version: int = 0
    average: list[Tensor] | None = field(default=None)
    due: int = 0


class Swarm:
    """Peers that merge.

    Args:
        peers: with equal parameters.
        strategy: how they merge.
    """

    def __init__(self, peers: list[Peer], strategy: Strategy) -> None:
        self.peers, self.strategy, self.steps = peers, strategy, 0
        first = [tensor.detach().clone() for tensor in peers[0].parameters]
        self.fragments = []
        parts = split([tensor.numel() for tensor in first], strategy.fragments)
        for number, places in enumerate(parts, 1):
            anchor = [first[place] for place in places]
            ahead = strategy.every * (1 - number / len(parts)) if len(parts) > 1 else 0.0
            members = [Member(_copy(anchor), ahead, Feedback(strategy.codec, strategy.decay)) for _ in peers]
            reducer = Feedback(strategy.codecs[1], strategy.decay)
            self.fragments.append(Fragment(places, anchor, strategy.outer(anchor), members, reducer))

    def step(self, active: Collection[int] | None = None, present: Collection[int] | None = None) -> int:
        """Some peers train one step; then merges are given and taken.

        Args:
            active: those that train; None: all.
            present: those that give and take; None: all. One that comes back takes the anchors that it has missed.

        Returns:
            The number of samples.
        """
        self.steps += 1
        everybody = range(len(self.peers))
        here = [number for number in everybody if present is None or number in present]
        total = 0
        for number in everybody if active is None else active:
            samples = self.peers[number].step()
            total += samples
            for fragment in self.fragments:
                fragment.members[number].steps += 1
                fragment.members[number].samples += samples
        for fragment in self.fragments:
            for number in here:
                if fragment.members[number].version < fragment.version:
                    self.catch_up(fragment, number)
            if fragment.average is not None and self.steps >= fragment.due:
                self.take(fragment, here)
            givers = self.strategy.givers([fragment.members[number].steps for number in here])
            if givers and fragment.average is None:
                self.give(fragment, [here[place] for place in givers])
                if not self.strategy.overlap:
                    self.take(fragment, here)
        return total

    def give(self, fragment: Fragment, givers: Sequence[int]) -> None:
        """The first half of a merge: average the outer gradients of these peers."""
        gradients, weights = [], []
        for number in givers:
            member = fragment.members[number]
            member.given = _copy(self._own(fragment, number))
            gradients.append(outer_gradient(member.base, member.given))
            weights.append(float(member.samples))
            member.steps, member.samples = 0.0, 0
        fragment.average = self.average(fragment, givers, gradients, weights)
        fragment.due = self.steps + self.strategy.overlap

    def average(
        self, fragment: Fragment, givers: Sequence[int], gradients: Sequence[list[Tensor]], weights: Sequence[float]
    ) -> list[Tensor]:
        """The average of these peers' outer gradients, as it arrives."""
        sent = [fragment.members[number].sender.send(each) for number, each in zip(givers, gradients, strict=True)]
        return fragment.reducer.send(weighted_mean(sent, weights))

    def take(self, fragment: Fragment, takers: Sequence[int]) -> None:
        """The second half: step the anchor, which these peers take."""
        assert fragment.average is not None, "there is an average to take"
        outer_step(fragment.anchor, fragment.optimizer, fragment.average)
        fragment.version += 1
        fragment.average = None
        for number in takers:
            self.catch_up(fragment, number)

    @torch.no_grad()
    def catch_up(self, fragment: Fragment, number: int) -> None:
        """One peer takes the anchor as it is now."""
        member, anchor, own = fragment.members[number], fragment.anchor, self._own(fragment, number)
        missed = fragment.version - member.version - (member.given is not None)
        if missed and self.strategy.quorum is None:
            member.steps = 0.0
        if missed > self.strategy.patience or (not missed and not self.strategy.overlap):
            _set(own, anchor)
            if missed:
                member.steps, member.samples = 0.0, 0
        elif missed or self.strategy.mixing is None:
            _move(own, anchor, member.base if member.given is None else member.given)
        else:
            for tensor, new in zip(own, anchor, strict=True):
                tensor.mul_(self.strategy.mixing).add_(new, alpha=1 - self.strategy.mixing)
        member.base, member.version, member.given = _copy(anchor), fragment.version, None
        if self.strategy.resets:
            for tensor in own:
                self.peers[number].inner.state.pop(tensor, None)

    @torch.no_grad()
    def mean(self) -> list[Tensor]:
        """The mean of the peers' parameters: the model at the end. After a merge of all it is the anchor."""
        return weighted_mean([peer.parameters for peer in self.peers], [1.0] * len(self.peers))

    def _own(self, fragment: Fragment, number: int) -> list[Tensor]:
        return [self.peers[number].parameters[place] for place in fragment.places]


def _copy(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _set(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _move(tensors: Sequence[Tensor], to: Sequence[Tensor], start: Sequence[Tensor]) -> None:
    for tensor, end, begin in zip(tensors, to, start, strict=True):
        tensor.add_(end - begin)
