"""Unusual models in groups of processes: `GroupOptimizer`, and ZeRO in each stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import unusual_groups as programs
from tests.integration.ranks import Ranks, ranks
from tests.sim.unusual_kit import MODELS

REFUSED = {name: "has no values, which FSDP2 cannot reduce" for name in MODELS if name.startswith("empty tensor")}
REFUSED |= dict.fromkeys(("no dimensions", "small"), "is a scalar, which FSDP2 cannot shard")
"""In stage 3, by torch's `fully_shard`."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as started:
        yield started


def test_a_group_trains_every_model_as_one_peer(pool: Ranks) -> None:
    """All ranks hold the same bits after each step, whichever weights they began with."""
    here, there = pool.play(2, programs.grouped)
    assert here == there
    assert {name: epoch for name, (epoch, _) in here.items()} == dict.fromkeys(MODELS, programs.BATCHES)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_zero_trains_every_model_as_one_process(pool: Ranks, stage: int) -> None:
    """Or says at the beginning that it cannot."""
    for found in pool.play(2, programs.partitioned, stage):
        for name, said in found.items():
            assert (REFUSED.get(name, "") in said and said) if stage == 3 and name in REFUSED else not said, found
