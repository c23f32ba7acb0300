"""Stages 1 and 2 with optimizers that need whole tensors: each tensor has one owner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import zero_whole as programs
from tests.integration.ranks import Ranks, ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as started:
        yield started


SAMPLE = ("lamb", "Adafactor", "soap", "clips each")


@pytest.mark.parametrize(
    ("stage", "count", "names"),
    [
        (1, 3, SAMPLE),
        (2, 2, SAMPLE),
        *(pytest.param(stage, count, programs.NAMES, marks=pytest.mark.long) for stage in (1, 2) for count in (2, 3)),
    ],
)
def test_equals_one_process_to_the_bit(pool: Ranks, stage: int, count: int, names: tuple[str, ...]) -> None:
    """Whatever a step makes of a tensor, it makes of the same values as one process does."""
    for found in pool.play(count, programs.apart, stage, names):
        assert found == dict.fromkeys(names, 0.0)
