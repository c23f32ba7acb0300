"""How much of the vector each member reduces, so that the slowest link is done as early as possible.

In a butterfly all-reduce of n members, a member that owns the fraction x of the vector sends its contributions to the
others' slices, 1 - x, and its averages to the n - 1 others, (n - 1) x; it receives as much. With bandwidth b it is busy
for

    t(x) = (1 + (n - 2) x) / b

(in units of the vector). The fractions that minimize the largest t, the cost of Diskin et al. 2021 (DeDLOC), have a
closed form for a given t: x = (t b - 1) / (n - 2), within 0..1. The sum grows with t, so the optimum is found by
bisection; no solver is needed. For n = 2 the cost does not depend on x: the slices follow the bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import ConfigError

__all__ = ["balance", "cost"]

_SLOWEST, _FASTEST = 1.0, 1e15
"""Bandwidths beyond these (bytes per second) count as these: nobody's numbers make ours overflow."""


def cost(fractions: Sequence[float], bandwidths: Sequence[float]) -> float:
    """The largest t(x) over the members, in vectors per unit of bandwidth."""
    n = len(fractions)
    return max((1 + (n - 2) * x) / b for x, b in zip(fractions, bandwidths, strict=True))


def balance(numel: int, bandwidths: Sequence[float | None], reduces: Sequence[bool]) -> list[int]:
    """Elements of the vector that each member reduces.

    Args:
        numel: elements in all.
        bandwidths: bytes per second of each member, finite; None where unknown: taken as the mean of those that are
            known.
        reduces: whether the member may reduce at all; one with bandwidth 0 does not either.

    Returns:
        One number for each member, their sum is `numel`.

    Raises:
        ConfigError: no member can reduce.
    """
    known = [min(max(b, _SLOWEST), _FASTEST) if b else b for b in bandwidths]
    some = [b for b in known if b]
    mean = sum(some) / len(some) if some else 1.0
    able = [i for i, can in enumerate(reduces) if can and known[i] != 0]
    if not able:
        raise ConfigError("no member of the group can reduce: at least one needs an address and a bandwidth above 0")
    fractions = _fractions([known[i] or mean for i in able], len(reduces))
    slices = [0] * len(reduces)
    # Largest remainders: whole elements that differ from the fractions by less than one.
    exact = [numel * fraction for fraction in fractions]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(able)), key=lambda j: (whole[j] - exact[j], j))
    for j in by_remainder[: max(0, numel - sum(whole))]:
        whole[j] += 1
    for i, size in zip(able, whole, strict=True):
        slices[i] = size
    slices[able[0]] += numel - sum(slices)  # what floating point may have left over
    return slices


def _fractions(bandwidths: Sequence[float], n: int) -> list[float]:
    """Optimal fractions for those who reduce, in a group of `n`."""
    total = sum(bandwidths)
    if n <= 2:
        return [b / total for b in bandwidths]

    def at(t: float) -> list[float]:
        return [min(1.0, max(0.0, (t * b - 1) / (n - 2))) for b in bandwidths]

    low, high = 0.0, (n - 1) / min(bandwidths)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) < 1 else (low, middle)
    fractions = at(high)
    return [x / sum(fractions) for x in fractions]
