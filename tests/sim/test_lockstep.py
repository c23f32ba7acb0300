"""Peers in lockstep that merge: each strategy equals one process that trains as many peers, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from shoal import sim
from shoal.strategies import Decoupled, DiLoCo, LocalSGD, Merges, Outer, StreamingDiLoCo, nesterov
from shoal.strategies.outer import LocalSteps
from tests.replay import Recorder, Replay
from tests.sim.optimizer_kit import Run, Trainer, backward, make_optimizer, model

BATCH = 4


class Recorded(Trainer):
    """A trainer whose events are noted.

    Attributes:
        lost: samples of each fragment that were dropped until the events were over.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        local = self.participant.training.local
        assert isinstance(local, LocalSteps)
        self.recorder = Recorder(local)
        self.lost = [0 for _ in self.fragments]

    def compute(self, number: int, size: int) -> None:
        """See `Trainer`."""
        self.recorder.number = number
        super().compute(number, size)


def sgd(parameters: list[torch.Tensor], _lr: float, *, rate: float, momentum: float) -> tuple[Any, None]:
    """The inner optimizer, without a schedule."""
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum), None


class Case(NamedTuple):
    """What is played: the inner optimizer is AdamW with a schedule, or SGD of this rate and momentum."""

    strategy: Merges
    peers: int = 2
    inner: tuple[float, float] | None = None

    @property
    def make(self) -> Callable[[list[torch.Tensor], float], tuple[Any, Any]]:
        """Makes the inner optimizer and its schedule."""
        return make_optimizer if self.inner is None else partial(sgd, rate=self.inner[0], momentum=self.inner[1])


def play(case: Case, durations_s: Sequence[float], until_s: float, seed: int = 1) -> list[Recorded]:
    """Peers whose batches last so long, until then."""

    async def main() -> list[Recorded]:
        run = Run(target=1, make=case.make, trainer=Recorded)
        names = [f"p{number}" for number in range(len(durations_s))]
        for name in names:
            await run.add(name, strategy=case.strategy)
        await sim.sleep(3.0)

        for name, duration_s in zip(names, durations_s, strict=True):
            run.swarm.spawn(name, run.trainers[name].train(BATCH, duration_s=duration_s, until=lambda: False))
        await sim.sleep(until_s)
        for trainer in run.trainers.values():
            assert isinstance(trainer, Recorded)
            trainer.recorder.stop()
            trainer.lost = [each.status().dropped for each in trainer.fragments]
        assert not run.warnings, run.warnings
        await run.close()
        return list(run.trainers.values())  # type: ignore[arg-type]

    return sim.run(main, seed=seed)


def replay(case: Case, trainers: Sequence[Recorded]) -> int:
    """One process does the same; returns the number of merges."""
    merging = case.strategy.merging

    def make() -> tuple[list[torch.Tensor], Any, Any]:
        parameters = model()
        return parameters, *case.make(parameters, 0.05)

    def gradient(parameters: list[torch.Tensor], peer: int, number: int) -> None:
        backward(parameters, peer, number, BATCH)

    places = [[0, 1]] if merging.fragments == 1 else [[1], [0]]
    return Replay(merging, make, gradient, places, BATCH).check([each.recorder.events for each in trainers])


def expected(strategy: Merges, batches: int) -> list[str]:
    """The events of each peer in lockstep: a fragment is given after `every` batches, and taken `overlap` later."""
    merging = strategy.merging
    every, count = merging.steps or 0, merging.fragments
    overlap = 1 if merging.overlap is None else merging.overlap  # a merge takes less time than a batch
    since = [every * number / count for number in range(count)]  # they are so far ahead on their first way
    events, due = list[str](), dict[int, int]()
    for batch in range(1, batches + 1):
        events.append("b")
        events += [f"t{number}" for number in sorted(due) if due[number] == batch]
        due = {number: at for number, at in due.items() if at > batch}
        for number in range(count):
            since[number] += 1
            if since[number] >= every:
                since[number] = 0
                events.append(f"g{number}")
                if overlap:
                    due[number] = batch + overlap
                else:
                    events.append(f"t{number}")
    return events


def check(case: Case, merges: int = 5) -> None:
    """In lockstep the events are those of the definition, and all bits those of one process."""
    merging = case.strategy.merging
    batches = merges * (merging.steps or 0) + (merging.overlap or 1)
    trainers = play(case, [1.0] * case.peers, batches + 0.9)
    for trainer in trainers:
        found = trainer.recorder.kinds()
        assert found == expected(case.strategy, batches + 2)[: len(found)], case
        assert not any(trainer.lost)
    assert replay(case, trainers) >= merges, case


FAST, MOMENTUM = (0.4, 0.0), (0.1, 0.9)


@pytest.mark.parametrize(
    "case",
    [
        Case(LocalSGD(1), 2, FAST),
        Case(LocalSGD(2), 3, FAST),
        Case(LocalSGD(5), 4, MOMENTUM),
        Case(DiLoCo(3)),
        Case(StreamingDiLoCo(4, fragments=2, overlap=1)),
        Case(StreamingDiLoCo(5, fragments=2, overlap=3, mixing=0.5), 3, FAST),
        Case(Decoupled(4, fragments=2, quorum=3), 3),
    ],
    ids=str,
)
def test_peers_in_lockstep_equal_one_process(case: Case) -> None:
    """`LocalSGD` and `DiLoCo` did not: each peer was off the anchor by a batch that was computed before the merge."""
    check(case)


def matrix() -> list[Case]:
    """All of it: H, rates to the edge of stability and beyond, momentum, fragments, overlap."""
    inner = [None, (0.05, 0.0), (0.4, 0.0), (1.2, 0.0), (0.1, 0.9)]
    outers: list[Outer] = [nesterov, partial(torch.optim.SGD, lr=1.0), partial(torch.optim.SGD, lr=0.5, momentum=0.5)]
    strategies: list[Merges] = []
    for every in (1, 2, 5, 10):
        strategies += [LocalSGD(every), *(DiLoCo(every, outer) for outer in outers)]
        for fragments, overlap in itertools.product((1, 2), range(1, every)):
            outer = outers[(every + overlap) % 3]
            ways = [None, 0.0, 0.5]
            strategies += [StreamingDiLoCo(every, fragments, overlap, way, outer) for way in ways]
        if every > 1:
            strategies += [Decoupled(every, fragments, 2, outer) for fragments in (1, 2) for outer in outers]
    return [Case(*each) for each in itertools.product(strategies, (2, 3, 4), inner)]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_strategies_in_lockstep_equal_one_process(soak: Callable[[int, int], int]) -> None:
    """Each combination of many, or some of them."""
    cases = matrix()
    random.Random(4).shuffle(cases)
    for case in cases[: soak(12, len(cases))]:
        check(case)


@pytest.mark.parametrize(
    ("case", "durations_s"),
    [
        (Case(LocalSGD(1), inner=FAST), [1.0, 1.7]),
        (Case(DiLoCo(5), 3, MOMENTUM), [0.31, 0.4, 1.1]),
        (Case(LocalSGD("2s"), 3, MOMENTUM), [0.31, 0.4, 0.7]),
        (Case(StreamingDiLoCo(6, fragments=2, overlap=2), 3, FAST), [0.4, 0.45, 0.6]),
    ],
    ids=str,
)
def test_peers_of_other_speeds_equal_one_process(case: Case, durations_s: list[float]) -> None:
    """It trains the batches that counted, in their order: one that came too late to a merge is in nothing."""
    trainers = play(case, durations_s, 16.0)
    assert replay(case, trainers) >= 5


@pytest.mark.parametrize("every", [7, "2s"])
def test_peers_of_equal_speed_lose_nothing_to_a_merge(every: int | str) -> None:
    """Nobody begins a batch that could not be over before the merge; by time most were under way when it was due."""
    trainers = play(Case(LocalSGD(every), 3), [0.31, 0.32, 0.33], 18.0)
    for trainer in trainers:
        assert trainer.participant.epoch >= 6
        lost = trainer.recorder.kinds().count("-")
        assert trainer.lost == [lost * BATCH]
        assert lost <= isinstance(every, str)  # by time some begin in the middle of the first way


def test_a_fast_peer_waits_for_a_slow_one_once_and_not_for_long() -> None:
    """For the time of one of its own batches, before a merge is due; and of the mean one afterwards."""
    fast, slow = play(Case(LocalSGD(10)), [1.0, 9.0], 80.0)
    times = [at for at, *_ in fast.epochs]
    assert len(times) >= 3
    trained = [len(each) for each in "".join(fast.recorder.kinds()).replace("g0", "").split("t0")[1 : len(times)]]
    for batches, took_s in zip(trained, (b - a for a, b in itertools.pairwise(times)), strict=True):
        assert took_s <= batches + 1.0 + took_s / 10 + 0.1
    assert slow.participant.contribution.contributed > 0
