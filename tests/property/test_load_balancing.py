"""For any group: whole slices, exact sums, and never slower than the simple rules."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.allreduce.load_balancing import balance, cost

members = st.lists(
    st.tuples(st.none() | st.just(0.0) | st.floats(1.0, 1e12), st.booleans()), min_size=1, max_size=40
).filter(lambda group: any(able and width != 0 for width, able in group))


@given(members, st.integers(0, 10**12))
def test_slices_are_whole_and_cover_exactly(group: list[tuple[float | None, bool]], numel: int) -> None:
    """No element twice, none lost; nothing for those that cannot reduce."""
    bandwidths, reduces = [width for width, _ in group], [able for _, able in group]
    slices = balance(numel, bandwidths, reduces)
    assert len(slices) == len(group)
    assert sum(slices) == numel
    assert min(slices) >= 0
    assert not any(size for size, (width, able) in zip(slices, group, strict=True) if width == 0 or not able)
    assert slices == balance(numel, bandwidths, reduces)


@given(st.lists(st.floats(1.0, 1e9), min_size=2, max_size=40))
def test_never_slower_than_equal_or_proportional_slices(bandwidths: list[float]) -> None:
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
    slices = balance(1_000_000, bandwidths, reduces)
    for (slow, i), (fast, j) in zip(sorted(known), sorted(known)[1:], strict=False):
        assert slow <= fast
        assert slices[i] <= slices[j] + 1
