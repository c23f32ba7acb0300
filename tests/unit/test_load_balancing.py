"""How much each member reduces."""

from __future__ import annotations

import itertools
import math

import pytest

from shoal.allreduce.load_balancing import balance, cost
from shoal.errors import ConfigError


def test_equals_get_equal_slices() -> None:
    """Known or not: nobody differs, nobody gets more; what is left over goes one by one."""
    assert balance(12, [None] * 4, [True] * 4) == [3, 3, 3, 3]
    assert balance(14, [5.0] * 4, [True] * 4) == [4, 4, 3, 3]
    assert balance(2, [5.0] * 4, [True] * 4) == [1, 1, 0, 0]
    assert balance(0, [5.0] * 4, [True] * 4) == [0] * 4
    assert balance(7, [None], [True]) == [7]


def test_of_two_each_reduces_by_its_bandwidth() -> None:
    """The cost does not depend on the slices: they follow the bandwidth."""
    assert balance(1000, [300.0, 100.0], [True, True]) == [750, 250]
    assert cost([0.75, 0.25], [300.0, 100.0]) == cost([0.0, 1.0], [300.0, 100.0]) == 0.01


def test_an_unknown_bandwidth_counts_as_the_mean() -> None:
    """Of those that are known and not 0."""
    mixed = balance(10_000, [100.0, None, 300.0, 0.0], [True] * 4)
    assert mixed == balance(10_000, [100.0, 200.0, 300.0, 0.0], [True] * 4)
    assert mixed[0] < mixed[1] < mixed[2]
    assert mixed[3] == 0


def test_who_cannot_or_will_not_reduces_nothing() -> None:
    """Clients, and bandwidth 0; all falls to the others."""
    assert balance(100, [1.0, 1.0, 1.0], [True, False, True]) == [50, 0, 50]
    assert balance(100, [0.0, 0, 1.0], [True, True, True]) == [0, 0, 100]
    assert balance(100, [0.0, None, 5.0], [False, True, False]) == [0, 100, 0]


@pytest.mark.parametrize(
    ("bandwidths", "reduces"), [([], []), ([None], [False]), ([0.0, 0.0], [True, True]), ([0.0, 5.0], [True, False])]
)
def test_somebody_must_reduce(bandwidths: list[float | None], reduces: list[bool]) -> None:
    """A group of nothing but clients and zeros is refused, and told what it lacks."""
    with pytest.raises(ConfigError, match="bandwidth above 0"):
        balance(10, bandwidths, reduces)


def test_a_slow_member_in_a_large_group_reduces_nothing() -> None:
    """Below a certain bandwidth its own contributions take all its time."""
    slices = balance(1_000_000, [1000.0] * 7 + [10.0], [True] * 8)
    assert slices[7] == 0
    assert max(slices) - min(slices[:7]) <= 1


@pytest.mark.parametrize("value", [5e-324, 1e-300, 1e-9, 1.0, 1e15, 1e300, 1.7e308])
def test_absurd_bandwidths_do_no_harm(value: float) -> None:
    """What others say of themselves may be anything that is finite: no overflow, no division by zero."""
    for others in ([None], [1e6], [1e6, None], [value], [value, None, 1e6], [0.0, value]):
        bandwidths = [value, *others]
        slices = balance(1000, bandwidths, [True] * len(bandwidths))
        assert sum(slices) == 1000
        assert min(slices) >= 0


GRID = 20


@pytest.mark.parametrize("n", [2, 3, 4])
def test_no_grid_point_is_better(n: int) -> None:
    """All divisions into twentieths, for all mixes of four bandwidths: none is quicker than ours."""
    divisions = [
        tuple(b - a - 1 for a, b in itertools.pairwise((-1, *cuts, GRID + n - 1)))
        for cuts in itertools.combinations(range(GRID + n - 1), n - 1)
    ]
    assert len(divisions) == math.comb(GRID + n - 1, n - 1)
    numel = 1 << 40
    for bandwidths in itertools.combinations_with_replacement((10.0, 50.0, 100.0, 1000.0), n):
        ours = cost([size / numel for size in balance(numel, bandwidths, [True] * n)], bandwidths)
        best = min(cost([part / GRID for part in division], bandwidths) for division in divisions)
        assert ours <= best * (1 + 1e-9)


def test_those_who_reduce_are_done_at_the_same_time() -> None:
    """At the optimum nobody waits: equal times for all that own something, and no shorter one for those that do not."""
    bandwidths = [10.0, 40.0, 90.0, 100.0, 200.0]
    numel = 1 << 40
    slices = balance(numel, bandwidths, [True] * 5)
    times = [(1 + 3 * size / numel) / b for size, b in zip(slices, bandwidths, strict=True)]
    owning = [time for time, size in zip(times, slices, strict=True) if size]
    assert max(owning) - min(owning) < 1e-9
    assert all(1 / b >= max(owning) for b, size in zip(bandwidths, slices, strict=True) if not size)
