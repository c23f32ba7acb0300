"""One run of the study: a strategy, or synchronous training, on the task; and what happens to its peers on the way."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from benchmarks.strategies.reference import Feedback, Member, Peer, Strategy, Swarm, split
from benchmarks.strategies.swarm import train as by_shoal
from benchmarks.strategies.task import CONTEXT, PEERS, NextToken, Task
from shoal.compression import codec_by_name

__all__ = ["Case", "bytes_per_token", "train"]

EQUAL = (1.0,) * PEERS
_NEWCOMER_STREAM = 100


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained.

    Attributes:
        name: of its line.
        strategy: None: synchronous training.
        rate: the inner learning rate.
        against: the case beside which it is judged.
        bar: the most that its loss may be above that one's, as a ratio.
        speeds: steps of each peer in one step of the fastest.
        absences: merges that the last peer misses, before it takes part in one; and so on.
        newcomers: after each merge a newcomer replaces the next peer, and begins with these inner moments: "fresh",
            "donor" or "warm" (fresh, with a rate that rises over its first 10 steps); None: nobody leaves.
        beta2: of the inner AdamW.
        by_shoal: shoal's own code trains on every step, on a simulated network, instead of the reference.
    """

    name: str
    strategy: Strategy | None
    rate: float
    against: str | None = None
    bar: float | None = None
    speeds: tuple[float, ...] = EQUAL
    absences: int = 0
    newcomers: str | None = None
    beta2: float = 0.95
    by_shoal: bool = False


def train(case: Case, task: Task) -> float:
    """The held-out loss at the end, when all peers together have trained the task's samples."""
    if case.strategy is None:
        peer = task.peer(*range(PEERS))
        for step in range(1, task.steps + 1):
            _set_rate(peer, task.rate_at(step / task.steps))
            peer.step()
        return task.loss(peer.parameters)
    if case.by_shoal:
        mean = by_shoal(task, case.strategy, case.speeds, lambda peer, part: _set_rate(peer, task.rate_at(part)))
        return task.loss(mean)
    swarm = Swarm([task.peer(number) for number in range(PEERS)], case.strategy)
    seen, factors, version = 0, [1.0] * PEERS, 0
    while seen < task.samples:
        active = _active(case.speeds, swarm.steps)
        for peer, factor in zip(swarm.peers, factors, strict=True):
            _set_rate(peer, factor * task.rate_at(min((seen + task.rows * len(active)) / task.samples, 1.0)))
        seen += swarm.step(active, _present(case, swarm.steps))
        factors = [min(factor + 0.1, 1.0) for factor in factors]
        if case.newcomers is not None and swarm.fragments[0].version > version:
            version = swarm.fragments[0].version
            number = version % PEERS
            _replace(swarm, number, task.peer(_NEWCOMER_STREAM + version), case)
            factors[number] = 0.1 if case.newcomers == "warm" else 1.0
    return task.loss(swarm.mean())


def bytes_per_token(case: Case, task: Task) -> float:
    """What a peer sends for each token that it trains: the law of an all-reduce.

    It is (n - 1) / n times the encoded outer gradients, to the reducers of their parts, and as many times the encoded
    average, of which each peer reduces a part, to the others.
    """
    strategy = case.strategy or Strategy(every=1)
    sizes, codecs = [tensor.numel() for tensor in NextToken().parameters()], map(codec_by_name, strategy.codecs)
    parts = [[sizes[place] for place in places] for places in split(sizes, strategy.fragments)]
    encoded = sum(codec.tensors_bytes(part, torch.float32) for codec in codecs for part in parts)
    return (PEERS - 1) / PEERS * encoded / (strategy.every * task.rows * CONTEXT)


def _set_rate(peer: Peer, rate: float) -> None:
    for group in peer.inner.param_groups:
        group["lr"] = rate


def _active(speeds: Sequence[float], step: int) -> list[int]:
    """Who trains in this step, counted from 0."""
    return [number for number, speed in enumerate(speeds) if int((step + 1) * speed) > int(step * speed)]


def _present(case: Case, step: int) -> Collection[int] | None:
    """Who gives and takes in this step, counted from 0."""
    assert case.strategy is not None, "synchronous peers are never absent"
    merge = int(step // case.strategy.every) + 1
    return None if not case.absences or merge % (case.absences + 1) == 0 else range(PEERS - 1)


def _replace(swarm: Swarm, number: int, newcomer: Peer, case: Case) -> None:
    """A newcomer takes the place of a peer, directly after a merge."""
    (fragment,) = swarm.fragments
    with torch.no_grad():
        for own, value in zip(newcomer.parameters, fragment.anchor, strict=True):
            own.copy_(value)
    if case.newcomers == "donor":
        donor = swarm.peers[(number + 1) % PEERS]
        newcomer.inner.load_state_dict(copy.deepcopy(donor.inner.state_dict()))
    strategy = swarm.strategy
    base = [tensor.clone() for tensor in fragment.anchor]
    sender = Feedback(strategy.codec, strategy.decay)
    fragment.members[number] = Member(base, 0.0, sender, version=fragment.version)
    swarm.peers[number] = newcomer
