"""Moving averages of sharded weights are those of one process, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoal.zero
from tests.integration import zero_cases
from tests.integration import zero_ema as cases
from tests.integration.ranks import Ranks, ranks
from tests.integration.test_zero_training import TRAINED, distance


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equals_the_averages_of_torch(pool: Ranks, stage: int) -> None:
    """To the bit; weights come back after the block; each rank has its share."""
    wanted = cases.alone(3)
    found = pool.play(3, cases.averaged, stage)
    assert distance([averages for averages, *_ in found], wanted) == 0.0
    assert all(same for _, same, _ in found)
    assert sum(share for *_, share in found) == 4 * TRAINED


@pytest.mark.parametrize("stage", [2, 3])
def test_averages_of_a_model_that_computes_in_16_bits(pool: Ranks, stage: int) -> None:
    """They are of the float32 weights, which come back to the bit."""
    for averages, same, _ in pool.play(2, cases.averaged, stage, torch.bfloat16):
        assert same
        assert all(bool(each.isfinite().all()) for each in averages.values())


@pytest.mark.parametrize("consolidated", [False, True])
def test_averages_go_with_checkpoints(pool: Ranks, tmp_path: Path, consolidated: bool) -> None:
    """From any stage and number of ranks to any other; and to plain torch."""
    path = str(tmp_path / "checkpoint")
    pool.play(2, cases.saved, 1, path, consolidated)
    wanted = cases.alone(2, 2)
    whole = torch.load(path) if consolidated else shoal.zero.consolidate(path)
    assert whole["ema"]["updates"] == 2
    assert distance([whole["ema"]["model"]], wanted) == 0.0
    zero_cases.Odd().load_state_dict(whole["ema"]["model"])
    for stage, count in ((2, 3), (3, 2)):
        for averages, other, updates, message in pool.play(count, cases.loaded, stage, path):
            assert distance([averages, other], wanted) == 0.0
            assert updates == 2
            assert "has no moving averages" in message


REFUSED = {
    **{f"decay {value}": "ConfigError: decay must be a number from 0 to 1" for value in (1.5, True, "0.9", None)},
    "later decay": "ConfigError: decay must be a number from 0 to 1",
    "optimizer": "ConfigError: optimizer must be the one that shard() returned",
    "share": "ConfigError: state_dict is that of another rank",
    "nothing to load": "ConfigError: state_dict is that of another rank",
    "less to load": "ConfigError: state_dict lacks 'averages'",
    "save": "ConfigError: ema must be a shoal.zero.EMA",
    "save another's": "ConfigError: ema must be of the same optimizer",
    "save on one rank": "ConfigError: rank 1 gave something else than rank 0: 'averages after 1 updates'",
    "load": "ConfigError: ema must be a shoal.zero.EMA",
    "load another's": "ConfigError: ema must be of the same optimizer",
    "load on one rank": "ConfigError: rank 1 gave something else than rank 0: 'ema True'",
    "step within": "LocalError: the model cannot be changed within average_parameters()",
    "load within": "LocalError: the model cannot be changed within average_parameters()",
    "save within": "LocalError: the model has the averages in place of its weights",
    "average after unequal updates": "ConfigError: rank 1 gave something else than rank 0: 'averages after 2 updates'",
    "save after unequal updates": "ConfigError: rank 1 gave something else than rank 0: 'averages after 2 updates'",
}


def test_what_is_refused(pool: Ranks, tmp_path: Path) -> None:
    """On all ranks, with what to do. Averages of another model were saved, a step in the block was lost in silence."""
    for found in pool.play(2, cases.refused, str(tmp_path)):
        assert found.keys() == REFUSED.keys()
        assert not [(name, words) for name, words in found.items() if not words.startswith(REFUSED[name])]
