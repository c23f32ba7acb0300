"""Accelerate and the Trainer train sharded models as a plain loop does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integration import zero_loops as cases
from tests.integration.ranks import Ranks, ranks
from tests.integration.test_zero_training import distance


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerate(pool: Ranks, stage: int) -> None:
    """Accumulation, clipping and a schedule: the bits of a plain loop, in which the last micro-batch is reduced."""
    for found, wanted, reduced, batches in pool.play(2, cases.by_accelerate, stage):
        assert distance([found], wanted) == 0.0
        assert batches == cases.MICRO * cases.STEPS
        assert reduced < 4 * cases.STEPS * sum(each.numel() for each in cases.Lossy().parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_trainer(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """The same of the Trainer, which logs the norm over all ranks; evaluation works, too."""
    for found, wanted, norms, loss in pool.play(2, cases.by_trainer, stage, str(tmp_path)):
        assert distance([found], wanted) == 0.0
        assert len(norms) == cases.STEPS
        assert min(norms) > cases.CLIP
        assert loss > 0


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_that_is_made_after_the_model_was_sharded(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """It gives the weights other memory. That was refused."""
    for found, wanted, _, _ in pool.play(2, partial(cases.by_trainer, sharded_first=True), stage, str(tmp_path)):
        assert distance([found], wanted) == 0.0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("mixed precision", "give shard\\(\\) dtype=torch.bfloat16"),
        ("bf16", "give shard\\(\\) dtype=torch.bfloat16"),
        ("another optimizer", "optimizer must be the one"),
        ("save", "save_strategy would save one rank's part"),
        ("another", "the Trainer has another model"),
    ],
)
def test_what_cannot_work_is_refused(pool: Ranks, tmp_path: Path, how: str, message: str) -> None:
    """With what to write instead."""
    for each in pool.play(2, cases.refused, how, str(tmp_path)):
        assert re.search(message, each), each


@pytest.mark.parametrize("stage", [2, 3])
def test_save_pretrained(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """Whole models, with tied weights: loaded again they are the same."""
    for found, wanted in pool.play(2, cases.saved, stage, str(tmp_path)):
        assert distance([found], wanted) == 0.0


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_loops_save_whole_models(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """`save_model` on all ranks: in stage 3 it saved shards, and waited for ever."""
    for found, wanted, words in pool.play(2, cases.saved_by_loops, stage, str(tmp_path)):
        assert distance(found, wanted) == 0.0
        assert "shoal.zero.save(path, model, optimizer)" in words
