"""The DHT at scale: hops grow like a logarithm, and half of all nodes may die at once.

A thousand nodes take a while on a busy machine: here they are among the long tests. `python -m benchmarks.dht_sim`
prints the same numbers as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from benchmarks.dht_sim import Row, measure


def check_growth(rows: Sequence[Row]) -> None:
    """Hops grow, but hops / log2(nodes) stays level, and a lookup costs far less than asking everybody."""
    for row in rows:
        print(f"{row.nodes} nodes: {row.hops:.2f} hops, {row.hops_per_log2:.3f} of log2(nodes)")
    ratios = [row.hops_per_log2 for row in rows]
    assert max(ratios) < 1.2 * min(ratios)
    assert all(smaller.hops < larger.hops for smaller, larger in pairwise(rows))
    assert all(row.calls_per_lookup < 20 for row in rows)


def check_found(row: Row) -> None:
    """Everything was stored, and of that almost everything is found by survivors, before any repair and after."""
    print(
        f"{row.nodes} nodes: found {row.found_after_crash:.1%} after half crashed at once, "
        f"{row.found_after_repair:.1%} after repair, {row.found_after_second_crash:.1%} after half of the rest crashed"
    )
    assert row.stored == 1.0
    assert row.found_after_crash >= 0.99
    assert row.found_after_repair >= 0.99
    assert row.found_after_second_crash >= 0.99


@pytest.mark.long
def test_hops_grow_like_a_logarithm() -> None:
    """From sixty nodes to two hundred, with k = 8."""
    check_growth([measure(nodes, records=10, lookups=100, seed=1, repair=False) for nodes in (60, 200)])


def test_records_survive_the_crash_of_half_the_nodes_twice() -> None:
    """With k = 8; in between the survivors give each other what they hold."""
    check_found(measure(64, records=75, lookups=10, seed=2))


@pytest.mark.long(full=True)
@pytest.mark.timeout(900)
def test_a_thousand_nodes() -> None:
    """Both of the above with a thousand nodes and as many records."""
    small, medium, large = (measure(nodes, records=1000, lookups=500, seed=1) for nodes in (100, 300, 1000))
    check_growth([small, medium, large])
    check_found(medium)
    check_found(large)
