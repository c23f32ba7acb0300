"""Small groups average a large swarm as fast as theory says: a small version of `python -m benchmarks.moshpit_sim`."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch

from benchmarks.moshpit_sim import Row, measure
from shoal import sim
from tests.sim.averaging_kit import Trial

SEEDS = range(1, 7)

SPREAD = {1: 0.06, 2: 0.19, 3: 0.27}
"""How far the ratio of one round is from the law by chance, as a part of it (standard deviation).

For one random value per peer the ratio has the distribution Beta((r - 1) / 2, (N - r) / 2): here its spread is half of
the law. The peers have 64 independent values in the first round: an eighth of that. Later they have as many as the
groups of the rounds before have left apart: 7 directions, and in them less and less alike. Rounds of random partitions
of random numbers, without any peers, give 0.061, 0.193 and 0.272. So over three seeds the first round alone tells the
law, 0.111, from r / N, 0.125.
"""


def show(row: Row) -> None:
    """Theory and measurement side by side."""
    print(f"{row.way}, {row.crash:.0%} crash, round {row.round}: {row.ratio:.4f}, by theory {row.theory:.4f}")


def follows_the_law(rows: Sequence[Row]) -> None:
    """In each round the mean ratio over all seeds is the law's, within three times what chance does to such a mean."""
    for number in sorted({row.round for row in rows}):
        ratios = [row.ratio / row.theory for row in rows if row.round == number]
        found, chance = statistics.fmean(ratios), SPREAD[number] / math.sqrt(len(ratios))
        print(f"round {number}: {found:.3f} of the law over {len(ratios)} seeds, by chance 1 +- {chance:.3f}")
        assert abs(found - 1) < 3 * chance


@pytest.mark.long
def test_random_groups_follow_the_law(soak: Callable[[int, int], int]) -> None:
    """64 peers in groups of 8: each round leaves (r - 1) / (N - 1) of the variance, all groups full."""
    rows = [
        row for seed in SEEDS[: soak(2, 6)] for row in measure("random", 0.0, peers=64, target=8, rounds=3, seed=seed)
    ]
    for row in rows:
        assert (row.groups, row.smallest, row.without_group) == (8, 8, 0)
        assert row.theory == pytest.approx(7 / 63)
    follows_the_law(rows)


@pytest.mark.long
def test_random_groups_follow_the_law_while_peers_crash(soak: Callable[[int, int], int]) -> None:
    """5% crash in every round, and the sizes of groups differ: so many groups of so many peers, and the same law."""
    rows = [
        row for seed in SEEDS[: soak(2, 6)] for row in measure("random", 0.05, peers=64, target=8, rounds=3, seed=seed)
    ]
    for row in rows:
        show(row)
        assert row.without_group == 0
    follows_the_law(rows)


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


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.long)])
def test_averagers_in_small_groups_have_the_exact_mean_after_two_rounds(size: int) -> None:
    """The same with whole averagers and their tensors: as many keys as places, group bits drawn anew each round."""
    peers, digits = size * size, size.bit_length() - 1

    async def main() -> None:
        trial, generator = Trial(), torch.Generator().manual_seed(5)
        values = [[torch.randn(2000, generator=generator)] for _ in range(peers)]
        before = torch.stack([tensor for [tensor] in values]).double()
        for number, tensors in enumerate(values):
            await trial.add(f"p{number}", tensors, target_group_size=size, group_bits=f"{number % size:0{digits}b}")
        for number, theory in ((1, (size - 1) / (peers - 1)), (2, 0.0)):
            results = await asyncio.gather(*(trial.step(f"p{peer}", timeout_s=60.0) for peer in range(peers)))
            members = {result.round_id: result.outcome.members for result in results}
            assert [len(group) for group in members.values()] == [size] * size
            after = torch.stack([tensor for [tensor] in values]).double()
            left = float(after.var(0, unbiased=False).mean() / before.var(0, unbiased=False).mean())
            print(f"averagers, round {number}: {left:.4g} of the variance is left, by theory {theory:.4f}")
            # 2,000 values each: by chance the first round is 1.5% from the law, and the second exact to rounding.
            assert left == pytest.approx(theory, rel=0.05, abs=1e-12)
        torch.testing.assert_close(after, before.mean(0).expand_as(after), rtol=0.0, atol=1e-6)
        assert not trial.warnings
        await trial.close()

    sim.run(main, seed=1)
