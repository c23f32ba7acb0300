"""For any group: whole shares, exact sums, and never slower than the simple rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.layout import balance, cost

members = st.lists(
    st.tuples(st.none() | st.just(0.0) | st.floats(1.0, 1e12), st.booleans()), min_size=1, max_size=40
).filter(lambda group: any(able and width != 0 for width, able in group))


@given(members, st.integers(0, 10**12))
def test_shares_are_whole_and_cover_exactly(group: list[tuple[float | None, bool]], numel: int) -> None:
    """No element twice, none lost; nothing for those that cannot reduce."""
    bandwidths, reduces = [width for width, _ in group], [able for _, able in group]
    shares = balance(numel, bandwidths, reduces)
    assert len(shares) == len(group)
    assert sum(shares) == numel
    assert min(shares) >= 0
    assert not any(size for size, (width, able) in zip(shares, group, strict=True) if width == 0 or not able)
    assert shares == balance(numel, bandwidths, reduces)


@given(st.lists(st.floats(1.0, 1e9), min_size=2, max_size=40))
def test_never_slower_than_equal_or_proportional_shares(bandwidths: list[float]) -> None:
    """The optimum is at least as quick as what one would do without thinking."""
    n, total = len(bandwidths), sum(bandwidths)
    numel = 1 << 50
    ours = cost([size / numel for size in balance(numel, bandwidths, [True] * n)], bandwidths)
    slack = 1 + 1e-9
    assert ours <= cost([1 / n] * n, bandwidths) * slack
    assert ours <= cost([b / total for b in bandwidths], bandwidths) * slack
    assert ours >= max(1 / b for b in bandwidths) / slack  # nobody is done before its own contributions are sent


@given(st.lists(st.floats(1.0, 1e9), min_size=3, max_size=12))
def test_moving_elements_from_one_to_another_never_helps(bandwidths: list[float]) -> None:
    """A local change of the division does not make it quicker: with a convex cost that is the optimum."""
    n, numel = len(bandwidths), 1 << 50
    fractions = [size / numel for size in balance(numel, bandwidths, [True] * n)]
    ours = cost(fractions, bandwidths)
    for giver in range(n):
        for taker in range(n):
            step = min(fractions[giver], 0.01)
            if giver != taker and step > 0:
                moved = list(fractions)
                moved[giver] -= step
                moved[taker] += step
                assert cost(moved, bandwidths) >= ours * (1 - 1e-9)


@given(members)
def test_more_bandwidth_is_never_less_work(group: list[tuple[float | None, bool]]) -> None:
    """Of two that can reduce, the faster one owns at least as much (but for one element of rounding)."""
    bandwidths, reduces = [width for width, _ in group], [able for _, able in group]
    known = [(width, i) for i, (width, able) in enumerate(group) if width and able]
    assume(len(known) > 1)
    shares = balance(1_000_000, bandwidths, reduces)
    for (slow, i), (fast, j) in zip(sorted(known), sorted(known)[1:], strict=False):
        assert slow <= fast
        assert shares[i] <= shares[j] + 1


# ------------------------------------------------------------------------------- smallest shares and auxiliary members

helped = st.lists(st.tuples(st.floats(1.0, 1e4), st.booleans(), st.booleans()), min_size=2, max_size=5).filter(
    lambda group: any(able for _, able, _ in group) and any(gives for _, _, gives in group)
)


def vertices(group: list[tuple[float, bool, bool]], least: float) -> Iterator[list[float]]:
    """Divisions among which is the best one, as in any linear program.

    For every choice of who reduces nothing, who reduces the least, and who ends at the same time as all others: that
    division, if there is one.
    """
    c = sum(gives for _, _, gives in group)
    for roles in itertools.product("0le", repeat=len(group)):
        if any(role != "0" and not able for role, (_, able, _) in zip(roles, group, strict=True)):
            continue
        x = [least if role == "l" else 0.0 for role in roles]
        equal = [i for i, role in enumerate(roles) if role == "e"]
        left = 1.0 - sum(x)
        lines = {i: (1.0, c - 2) if group[i][2] else (0.0, c) for i in equal}
        if equal and all(slope > 0 for _, slope in lines.values()):
            base = sum(offset / slope for offset, slope in lines.values())
            t = (left + base) / sum(group[i][0] / slope for i, (_, slope) in lines.items())
            for i, (offset, slope) in lines.items():
                x[i] = (t * group[i][0] - offset) / slope
        elif len(equal) == 1:
            x[equal[0]] = left
        if abs(sum(x) - 1) < 1e-9 and not any(0 < each < least or each < 0 for each in x):
            yield x


@given(helped, st.sampled_from([0.0, 0.05, 0.2, 0.3, 0.5, 0.7, 1.0]))
def test_as_quick_as_the_best_vertex_of_the_linear_program(group: list[tuple[float, bool, bool]], least: float) -> None:
    """With and without a smallest share, clients and auxiliary members: the cost is the least that there is."""
    numel = 10 << 40
    bandwidths, reduces, gives = (list(column) for column in zip(*group, strict=True))
    shares = balance(numel, bandwidths, reduces, min_size=int(least * numel), contributes=gives)
    assert sum(shares) == numel
    assert all(size >= int(least * numel) for size in shares if size)
    ours = cost([size / numel for size in shares], bandwidths, gives)
    best = min(cost(x, bandwidths, gives) for x in vertices(group, least))
    assert abs(ours - best) <= 1e-6 * best


@given(helped, st.integers(0, 10), st.integers(1, 8))
def test_no_whole_division_is_quicker(group: list[tuple[float, bool, bool]], least: int, numel: int) -> None:
    """Of all divisions of a few elements, none is quicker: nothing is lost by rounding."""
    bandwidths, reduces, gives = (list(column) for column in zip(*group, strict=True))
    ours = balance(numel, bandwidths, reduces, min_size=least, contributes=gives)
    assert sum(ours) == numel
    options = [[0, *range(max(1, min(least, numel)), numel + 1)] if able else [0] for able in reduces]
    assert all(size in option for size, option in zip(ours, options, strict=True))
    best = min(
        cost([size / numel for size in division], bandwidths, gives)
        for division in itertools.product(*options)
        if sum(division) == numel
    )
    assert cost([size / numel for size in ours], bandwidths, gives) <= best * (1 + 1e-9)
