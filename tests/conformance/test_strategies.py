"""What every strategy keeps: a value that says all about itself, and a run of three peers that ends with equal bits."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from shoal import sim
from shoal.errors import ConfigError
from shoal.optim.arguments import merging_of
from shoal.strategies import Decoupled, DiLoCo, LocalSGD, Merging, Strategy, StreamingDiLoCo, Synchronous
from tests.sim.optimizer_kit import Run


@dataclass(frozen=True)
class OneOfAUser:
    """A strategy needs no more than this."""

    merging: Merging = field(
        default_factory=lambda: Merging(every=5, outer=partial(torch.optim.Adam, lr=0.05), overlap=1)
    )


ALL: list[Strategy] = [
    Synchronous(),
    LocalSGD(5),
    LocalSGD("2s"),
    DiLoCo(5),
    DiLoCo(5, outer=partial(torch.optim.SGD, lr=0.5)),
    StreamingDiLoCo(5, fragments=2, overlap=2, mixing=0.5),
    StreamingDiLoCo(5, fragments=2, overlap=2, mixing=None),
    Decoupled(5, fragments=2, quorum=2),
    Decoupled("2s", fragments=2, quorum=3),
    OneOfAUser(),
]


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_it_is_a_value(strategy: Strategy) -> None:
    """Equal ones are equal, on another machine, too; nothing of it can be changed."""
    assert isinstance(strategy, Strategy)
    for same in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)):
        assert (same, hash(same), repr(same)) == (strategy, hash(strategy), repr(strategy))
    with pytest.raises(AttributeError):
        strategy.every = 7  # type: ignore[attr-defined]


def test_different_ones_say_so() -> None:
    """By the text that peers compare; the outer optimizer is compared beside it."""
    texts = [merging.text for each in ALL if (merging := merging_of(each)) is not None]
    assert len(set(texts)) == len(texts) - 2  # three differ in the outer optimizer alone
    assert len(set(ALL)) == len(ALL)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LocalSGD(0), "every must be a whole number of at least 1"),
        (lambda: DiLoCo("soon"), "every must be a number of steps, or a time"),
        (lambda: DiLoCo(True), "every must be a whole number"),
        (lambda: DiLoCo(10, outer="SGD"), "outer must be a function"),  # type: ignore[arg-type]
        (lambda: StreamingDiLoCo(10, fragments=0), "fragments must be a whole number of at least 1"),
        (lambda: StreamingDiLoCo(10, overlap=0), "overlap must be a whole number of at least 1"),
        (lambda: StreamingDiLoCo(4, overlap=4), "overlap must be less than every"),
        (lambda: StreamingDiLoCo(10, mixing=1.5), "mixing must be a number from 0 to 1"),
        (lambda: Decoupled(10, quorum=0), "quorum must be a whole number of at least 1"),
        (lambda: merging_of(DiLoCo), "strategy must be one of shoal.strategies"),
        (lambda: merging_of("diloco"), "strategy must be one of shoal.strategies"),
        (lambda: merging_of(DiLoCo(10), late="next"), "late does not go with a strategy that merges"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: object, text: str) -> None:
    """When it is made, or given."""
    assert callable(make)
    with pytest.raises(ConfigError, match=text):
        make()


@pytest.mark.parametrize("strategy", [OneOfAUser()], ids=["a user's own"])
def test_a_run_ends_with_equal_bits(strategy: Strategy) -> None:
    """As those of shoal's own do (`tests/sim/test_strategies.py`)."""

    async def main() -> None:
        run = Run(target=1)
        names = [f"p{number}" for number in range(3)]
        for name in names:
            await run.add(name, strategy=strategy)
        await sim.sleep(3.0)
        run.announce_end(3)
        for number, name in enumerate(names):
            work = run.trainers[name].train(4, duration_s=0.2 + 0.1 * number, until=lambda: False)
            run.swarm.spawn(name, work)
        while not all(trainer.finished for trainer in run.trainers.values()):
            await sim.sleep(0.5)
        assert run.agree(names)
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=4)
