"""Stages 1 and 2 with optimizers that need whole tensors: each tensor has one owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration import zero_whole as programs
from tests.integration.ranks import Ranks, ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as started:
        yield started


SAMPLE = ("Adafactor", "soap", "clips each")


@pytest.mark.parametrize(
    ("stage", "count", "names"),
    [
        (1, 3, SAMPLE),
        (2, 2, SAMPLE),
        *(
            pytest.param(stage, count, programs.NAMES, marks=pytest.mark.long(full=stage == count - 1))
            for stage in (1, 2)
            for count in (2, 3)
        ),
    ],
)
def test_equals_one_process_to_the_bit(pool: Ranks, stage: int, count: int, names: tuple[str, ...]) -> None:
    """Whatever a step makes of a tensor, it makes of the same values as one process does."""
    for found in pool.play(count, programs.apart, stage, names):
        assert found == dict.fromkeys(names, 0.0)


@pytest.mark.parametrize(
    ("stage", "other", "names"),
    [
        pytest.param(1, 2, SAMPLE, marks=pytest.mark.long),
        *(pytest.param(stage, 3 - stage, programs.NAMES, marks=pytest.mark.long(full=True)) for stage in (1, 2)),
    ],
)
def test_statistics_of_any_shape_go_from_2_ranks_to_4_and_to_plain_torch(
    pool: Ranks, tmp_path: Path, stage: int, other: int, names: tuple[str, ...]
) -> None:
    """Rows' means, lists of matrices and None: to the bit, also out of one file, and in plain torch."""
    pool.play(2, programs.saved_halfway, stage, str(tmp_path), names)
    for found in pool.play(4, programs.gone_on, other, str(tmp_path), names):
        assert found == {name: [0.0, 0.0, 0.0] for name in names}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2])
def test_all_else_is_as_with_values(pool: Ranks, tmp_path: Path, stage: int, dtype: torch.dtype | None) -> None:
    """Clipping, micro-batches, steps left out, memory formats, scalars, 16 bits; the state is shared out."""
    found = pool.play(3, programs.mixed, stage, "adafactor", dtype, str(tmp_path))
    for apart, _, _, kept, same in found:
        assert apart < (1e-4 if dtype is None else 0.5)
        assert kept
        assert same
    copies = 0 if dtype is None else 4 * sum(each.numel() for each in programs.Mixed().parameters())
    # One process keeps single values of a parameter without values, too.
    assert sum(state for _, state, *_ in found) == pytest.approx(found[0][2] + copies, abs=16)
