"""The shares of the vector that the members reduce: the slowest link is to be done as early as possible.

In a butterfly all-reduce with c *contributors* (members that send values and receive averages), a contributor that owns
the fraction x of the vector sends its values for the others' shares, 1 - x, and its averages to the c - 1 others,
(c - 1) x. An *auxiliary* member only reduces: it sends averages to c members. Both kinds receive as much as they send.
With bandwidth b they are busy for

    t(x) = (1 + (c - 2) x) / b        and        t(x) = c x / b

(in units of the vector). A client reduces nothing: 1 / b. The fractions that minimize the largest t, the cost of Diskin
et al. 2021 (DeDLOC), have a closed form for a given t, and the fraction that all members can take within t grows with
t. So bisection finds the optimum, and no solver is needed. This stays exact when no member may own less than
`min_size`: within t only members count that can take so much, and those of them that can take the most must be enough,
and not too many. Elements that rounding leaves over go, one by one, to the member that would be done first with one
more: no division into whole elements is quicker. Members whose values alone take longer than the others' work own
nothing.

Members with equal bandwidths are looked at once, for all of them: a group has 1,024 of few bandwidths (see `alike`).

With c <= 2 a contributor's time does not grow with the fraction that it owns. Then only the traffic of reducing counts,
(c - 1) x and c x: among the optimal divisions this one spreads the work by bandwidth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from shoal.errors import ConfigError

__all__ = ["alike", "balance", "cost", "is_slower"]

_SLOWEST, _FASTEST = 1.0, 1e15
"""Bandwidths beyond these (bytes per second) count as these, so that no peer's numbers make ours overflow."""

_BISECTIONS = 100

_FAR_LONGER = 4 / 3 + 1e-3
"""Beyond this a plan is no fair one. Whole elements, and bandwidths that count as alike, make no difference."""

_ALIKE = 0.85
"""Bandwidths from this part of another one on count as equal to it. Measured ones vary by 7%."""


def cost(fractions: Sequence[float], bandwidths: Sequence[float], contributes: Sequence[bool] | None = None) -> float:
    """The largest t(x) over the members, in vectors per unit of bandwidth. Without `contributes`, all contribute."""
    gives = contributes or [True] * len(fractions)
    c = sum(gives)
    return max(
        ((1 + (c - 2) * x) if give else c * x) / b for x, b, give in zip(fractions, bandwidths, gives, strict=True)
    )


def is_slower(
    shares: Sequence[int], fair: Sequence[int], bandwidths: Sequence[float | None], contributes: Sequence[bool]
) -> bool:
    """Whether those that own something by this plan need far longer than those that do by the fair one (`balance`).

    Far longer is more than a third. A leader that cannot use half of four members, for a reason that only it knows, is
    still within that. A member that owns nothing counts for neither plan: whoever says that its line is slow, and owns
    nothing, excuses no plan.
    """

    def owners(plan: Sequence[int]) -> float:
        fractions = [size / sum(plan) for size in plan]
        # Those that own nothing have no cost beside these.
        widths = [max(b or _SLOWEST, _SLOWEST) if x else math.inf for x, b in zip(fractions, bandwidths, strict=True)]
        return cost(fractions, widths, contributes)

    return owners(shares) > _FAR_LONGER * owners(fair)


def alike(bandwidths: Sequence[float | None]) -> list[float | None]:
    """The same bandwidths, but those that differ by less than measurements do are equal.

    A peer that does not know its bandwidth has never seen its line full: it counts as the fastest of the others.
    """
    fastest = width = max(filter(None, bandwidths), default=None)
    equal: dict[float | None, float | None] = {0.0: 0.0, None: fastest}
    for each in sorted(set(filter(None, bandwidths)), reverse=True):
        if width is None or each < _ALIKE * width:
            width = each
        equal[each] = width
    return [equal[each] for each in bandwidths]


def balance(
    numel: int,
    bandwidths: Sequence[float | None],
    reduces: Sequence[bool],
    *,
    min_size: int = 0,
    contributes: Sequence[bool] | None = None,
) -> list[int]:
    """Elements of the vector that each member reduces.

    Args:
        numel: elements in all.
        bandwidths: bytes per second of each member, finite; None where unknown: taken as the mean of those that are
            known.
        reduces: whether the member may reduce at all; one with bandwidth 0 does not either.
        min_size: elements; a member reduces at least this many, or none. If the whole vector has fewer, one member
            reduces it.
        contributes: whether the member has values to average; False for one that only assists. None: all have.

    Returns:
        One number for each member, their sum is `numel`.

    Raises:
        ConfigError: no member can reduce, or `min_size` is negative.
    """
    if min_size < 0:
        raise ConfigError(f"min_size must be 0 or more elements, got {min_size}")
    known = [min(max(b, _SLOWEST), _FASTEST) if b else b for b in bandwidths]
    some = [b for b in known if b]
    mean = sum(some) / len(some) if some else 1.0
    able = [i for i, can in enumerate(reduces) if can and known[i] != 0]
    if not able:
        raise ConfigError("no member of the group can reduce: at least one needs an address and a bandwidth above 0")
    gives = contributes or [True] * len(reduces)
    loads = [_Load.of(known[i] or mean, c=sum(gives), contributes=gives[i]) for i in able]
    least = min(min_size, numel)
    shares = [0] * len(reduces)
    chosen = _choose(loads, numel, least)
    for j, size in zip(chosen, _divide([loads[j] for j in chosen], numel, least), strict=True):
        shares[able[j]] = size
    return shares


class _Load(NamedTuple):
    """The time of a member that reduces: (offset + slope x) / bandwidth, in vectors."""

    bandwidth: float
    offset: float
    slope: float

    @classmethod
    def of(cls, bandwidth: float, *, c: int, contributes: bool) -> _Load:
        if not contributes:
            return cls(bandwidth, 0.0, max(c, 1))
        return cls(bandwidth, 1.0, c - 2) if c > 2 else cls(bandwidth, 0.0, c - 1)

    def time(self, x: float) -> float:
        """Return when the fraction `x` is done."""
        return (self.offset + self.slope * x) / self.bandwidth

    def within(self, t: float) -> float:
        """The largest fraction that is done by `t`, 0 to 1."""
        if not self.slope:
            return 1.0  # the only contributor: the fraction that it reduces need not travel
        x = (t * self.bandwidth - self.offset) / self.slope
        return 0.0 if x < 0.0 else min(x, 1.0)


def _choose(loads: Sequence[_Load], numel: int, least: int) -> list[int]:
    """The members that reduce: all that help to be done as early as possible, with at least `least` elements each."""
    counts = Counter(loads)

    def enough(t: float) -> bool:
        """Whether those that can take the most within `t`, as few as can take everything, get enough each."""
        rest, used = numel, 0
        for size, count in sorted(
            ((int(load.within(t) * numel), count) for load, count in counts.items()), reverse=True
        ):
            if size < least:
                break
            if size * count >= rest:
                return (used + max(1, -(-rest // max(1, size)))) * least <= numel
            rest, used = rest - size * count, used + count
        return False

    t = _least(1.001 * min(load.time(1.0) for load in counts), enough)
    takes = [int(load.within(t) * numel) for load in loads]
    order = sorted((j for j, size in enumerate(takes) if size >= least), key=lambda j: (-takes[j], j))
    # Fewer cannot do it. More may help if there is enough for all of them.
    return order[: numel // least if least else None]


def _least(high: float, enough: Callable[[float], bool]) -> float:
    """The least time within which it is enough, if it is within `high`."""
    low = 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _divide(loads: Sequence[_Load], numel: int, least: int) -> list[int]:
    """Whole shares of at least `least` for these, all done as early as they can be."""
    least_fraction, counts = least / numel if numel else 0.0, Counter(loads)

    def at(load: _Load, t: float) -> float:
        return max(least_fraction, load.within(t))

    most = max(load.time(1.0) for load in counts)
    t = _least(most, lambda t: sum(count * at(load, t) for load, count in counts.items()) >= 1)
    more = {load: at(load, t) - least_fraction for load in counts}
    beyond = [more[load] for load in loads]
    rest, total = numel - least * len(loads), sum(beyond)
    shares = [least + (int(rest * x / total) if total else 0) for x in beyond]
    largest = shares.index(max(shares))
    shares[largest] -= max(0, sum(shares) - numel)  # floating point may have given too much
    # No share is larger than at the optimum: each element left over goes to the member that is done first with it.
    after = [
        (load.time((size + 1) / (numel or 1)), j) for j, (load, size) in enumerate(zip(loads, shares, strict=True))
    ]
    heapify(after)
    for _ in range(numel - sum(shares)):
        j = after[0][1]
        shares[j] += 1
        heapreplace(after, (loads[j].time((shares[j] + 1) / numel), j))
    return shares
