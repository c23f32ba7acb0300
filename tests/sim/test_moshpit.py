"""Small groups average a large swarm as fast as theory says: a small version of `python -m benchmarks.moshpit_sim`."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.moshpit_sim import Row, measure


def show(row: Row) -> None:
    """Theory and measurement side by side."""
    print(f"{row.way}, {row.crash:.0%} crash, round {row.round}: {row.ratio:.4f}, by theory {row.theory:.4f}")


def test_random_groups_follow_the_law() -> None:
    """64 peers in groups of 8: each round leaves (r - 1) / (N - 1) of the variance, all groups full."""
    rows = measure("random", 0.0, peers=64, target=8, rounds=4, seed=1)
    for row in rows:
        show(row)
        assert row.groups == 8
        assert row.smallest == 8
        assert row.theory == pytest.approx(7 / 63)
        assert 0.4 * row.theory < row.ratio < 2.5 * row.theory
    assert statistics.fmean(row.ratio for row in rows) == pytest.approx(7 / 63, rel=0.3)


def test_full_grid_is_exact_after_two_rounds() -> None:
    """64 peers in groups of 8, keys of one digit: nothing but rounding is left."""
    rows = measure("grid", 0.0, peers=64, target=8, rounds=3, seed=1)
    assert [row.smallest for row in rows] == [8, 8, 8]
    assert rows[0].ratio == pytest.approx(rows[0].theory, rel=0.4)
    assert rows[1].left < 1e-28


def test_eight_peers_in_pairs_are_exact_after_three_rounds() -> None:
    """A hypercube of 2^3 places: keys of two bits, the third is the place in the pair."""
    rows = measure("grid", 0.0, peers=8, target=2, rounds=3, seed=1)
    assert [row.groups for row in rows] == [4, 4, 4]
    assert rows[1].left > 1e-6
    assert rows[2].left < 1e-28


def test_grid_mixes_on_while_peers_crash() -> None:
    """5% crash in every round: nobody is left without a group, and it mixes faster than random groups would."""
    rows = measure("grid", 0.05, peers=64, target=8, rounds=4, seed=1)
    for row in rows:
        show(row)
        assert row.without_group == 0
    assert rows[-1].alive == 52
    assert rows[-1].left < (8 / 64) ** 4
