"""What every strategy keeps: a value that says all about itself, and a run of three peers that ends with equal bits."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import types
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from shoal import sim
from shoal.errors import ConfigError
from shoal.hivemind.arguments import strategy_of
from shoal.strategies import (
    Decoupled,
    DiLoCo,
    Inner,
    LocalSGD,
    LocalUpdates,
    Merges,
    Merging,
    Strategy,
    StreamingDiLoCo,
    Synchronous,
    Terms,
)
from tests.sim.optimizer_kit import Run


@dataclass(frozen=True)
class OneOfAUser(Merges):
    """A strategy that merges needs no more than this."""

    merging: Merging = field(
        default_factory=lambda: Merging(every=5, outer=partial(torch.optim.Adam, lr=0.05), overlap=1)
    )


def of_the_docs() -> Strategy:
    """The strategy that docs/how-to/strategies.md makes, which is no part of shoal."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "strategies.md").read_text(encoding="utf-8")
    (block,) = (
        each for each in re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "MajorityVote" in each
    )
    module = types.ModuleType("of_the_docs")
    sys.modules[module.__name__] = module  # as a file of its own, from which values can be pickled
    exec(block, vars(module))
    strategy: Strategy = module.MajorityVote(target_batch_size=12)
    return strategy


VOTES = of_the_docs()
ALL: list[Strategy] = [
    Synchronous(),
    Synchronous(64, late="next", max_grad_norm=1.0, low_rank=4),
    LocalUpdates(64, statistics=["exp_avg_sq"]),
    LocalSGD(5),
    LocalSGD("2s"),
    DiLoCo(5),
    DiLoCo(5, outer=partial(torch.optim.SGD, lr=0.5)),
    StreamingDiLoCo(5, fragments=2, overlap=2, mixing=0.5),
    StreamingDiLoCo(5, fragments=2, overlap=2, mixing=None),
    Decoupled(5, fragments=2, quorum=2),
    Decoupled("2s", fragments=2, quorum=3),
    OneOfAUser(),
    VOTES,
]


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_it_is_a_value(strategy: Strategy) -> None:
    """Equal ones are equal, on another machine, too; nothing of it can be changed."""
    assert isinstance(strategy, Strategy)
    for same in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)):
        assert (same, hash(same), repr(same)) == (strategy, hash(strategy), repr(strategy))
    with pytest.raises(AttributeError):
        strategy.terms = Terms()  # type: ignore[misc]


def test_different_ones_say_so() -> None:
    """By the text that peers compare; the outer optimizer is compared beside it."""
    texts = [each.merging.text for each in ALL if isinstance(each, Merges)]
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
        (lambda: Synchronous(0), "target_batch_size must be a whole number of at least 1"),
        (lambda: Synchronous(8, late="never"), "late must be 'drop', 'next' or 'overlap', got 'never'"),
        (lambda: Synchronous(8, low_rank=0), "low_rank must be a whole number of at least 1"),
        (lambda: LocalUpdates(8, statistics="exp_avg"), "statistics must be a list of names"),
        (lambda: strategy_of(DiLoCo, {}), "strategy must be one of shoal.strategies"),
        (lambda: strategy_of("diloco", {}), "strategy must be one of shoal.strategies"),
        (lambda: strategy_of(Synchronous(), {}), "target_batch_size is missing"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: object, text: str) -> None:
    """When it is made, or given."""
    assert callable(make)
    with pytest.raises(ConfigError, match=text):
        make()


def test_the_strategy_of_the_docs_steps_by_signs() -> None:
    """As large as the gradients are, each number moves by the rate, or not at all."""
    parameter = torch.nn.Parameter(torch.ones(3))
    training = VOTES.training(Inner(torch.optim.SGD([parameter], lr=0.5)))
    parameter.grad = torch.tensor([0.25, -3.0, 0.0])
    assert training.accumulate(4)
    training.use_own_mean()
    training.step()
    assert parameter.tolist() == [0.5, 1.5, 1.0]


@pytest.mark.parametrize("strategy", [OneOfAUser(), VOTES], ids=["a user's own", "that of the docs"])
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
