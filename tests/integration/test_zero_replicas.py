"""Hybrid sharding: shards within a group, replicas across groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.zero.plan.laws import Sizes, costs_of
from tests.integration import zero_replicas as cases
from tests.integration.ranks import Ranks, ranks
from tests.integration.test_zero_training import FROZEN, TRAINED, distance


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


@pytest.mark.parametrize("stage", [*(pytest.param(each, marks=pytest.mark.long) for each in (1, 2)), 3])
def test_equals_one_process_to_the_bit(pool: Ranks, stage: int) -> None:
    """Sums over the ranks of a replica, then over replicas; several micro-batches; clipping to rounding."""
    for replicas, count in ((2, 2), (2, 1), (1, 2)):
        wanted = cases.alone(replicas, count)
        found = pool.play(replicas * count, cases.trained, stage, replicas)
        assert distance([state for state, *_ in found], wanted) == 0.0
    found = pool.play(4, cases.trained, stage, 2, 3)
    assert distance([state for state, *_ in found], cases.alone(2, 2, micro=3)) == 0.0
    found = pool.play(4, cases.trained, stage, 2, 1, 0.05)
    assert distance([state for state, *_ in found], cases.alone(2, 2, clip=0.05)) < 1e-6


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_memory_is_that_of_one_replica_and_traffic_has_the_mean_over_replicas(pool: Ranks, stage: int) -> None:
    """The bytes that 2 ranks hold and send, and of this rank's share 2 (R-1)/R, also if gradients are clipped."""
    alone = pool.play(2, cases.trained, stage, 1)
    for options in ((), (1, 0.05), (3,)):
        found = pool.play(4, cases.trained, stage, 2, *options)
        usual = alone if options != (3,) else pool.play(2, cases.trained, stage, 1, 3)
        more = []
        for rank, (_, memory, traffic) in enumerate(found):
            _, one, before = usual[rank % 2]
            assert memory == one
            assert traffic.gathered == before.gathered
            if options != (3,) and stage < 3:  # FSDP2 fills up each parameter's rows
                sizes = Sizes(4 * (TRAINED + FROZEN), 4 * TRAINED, 8 * TRAINED, 4 * TRAINED)
                laws = costs_of(sizes, 4, stage=stage, micro_batches=1, backend="gloo", replicas=2)
                (law,) = (each for each in laws if each.engine.name == "shoal.zero")
                assert traffic.sent / traffic.steps == pytest.approx(law.sent, rel=0.02)
            more.append((traffic.reduced - before.reduced) / traffic.steps)
        assert sum(more[:2]) == sum(more[2:]) == 4 * TRAINED


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_is_left_out_by_all_replicas(pool: Ranks, stage: int) -> None:
    """One rank of one replica has an infinite gradient."""
    assert pool.play(4, cases.bad, stage) == [(False, 1)] * 4


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_from_and_to_other_layouts(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """On 2 replicas of 2 ranks, to another stage on 4 ranks, and back: the same bits."""
    for usual, again in pool.play(4, cases.saved_and_loaded, stage, str(tmp_path)):
        assert distance([again], usual) == 0.0


@pytest.mark.long(full=True)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_lost_rank_is_named_by_all_replicas(pool: Ranks, stage: int) -> None:
    """Also by those that share nothing with it."""
    assert pool.outcomes(4, cases.lost, stage, killed=3)[:3] == [[3]] * 3


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("one dimension", "mesh must be a DeviceMesh of two dimensions"),
        ("no mesh", "mesh must be a DeviceMesh of two dimensions"),
        ("other ranks", "mesh must hold the ranks of group"),
        ("top_k", "mesh cannot carry sparse updates"),
    ],
)
def test_what_is_no_mesh_is_refused_by_all(pool: Ranks, how: str, message: str) -> None:
    """With what to write instead."""
    assert all(message in each for each in pool.play(4, cases.refused, how))
