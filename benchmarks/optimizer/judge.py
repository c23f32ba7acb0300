"""From what the trainers said to figures: pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Lag", "lags", "percentile", "time_to"]

FIRST_EPOCH = 2
"""The step before is the first one: there the peers meet."""

Said = Mapping[str, Any]
"""`peer`, `at` and either `batch`, the epoch in which it was computed, or `epoch` with `reduced_s`."""


class Lag(NamedTuple):
    """One step of the swarm: from its last needed sample until new parameters, without the all-reduce; seconds.

    Attributes:
        epoch: that it leads to.
        median: of the peers.
        worst: of the peers.
        reduced: the all-reduce once all peers are in it: the shortest of those that the peers saw.
    """

    epoch: int
    median: float
    worst: float
    reduced: float


def lags(said: Iterable[Said], *, peers: int, batches: int) -> list[Lag]:
    """The lag of each step that all peers have taken, by a round.

    The last needed sample is there when a batch is handed over with which the epoch has as many as a step takes. Where
    a library begins its step with fewer, it is the last one that was handed over before a peer had taken the step.

    Args:
        said: by all trainers, in any order.
        peers: that train.
        batches: of one step of the swarm.
    """
    handed: dict[int, list[float]] = {}
    taken: dict[int, dict[str, Said]] = {}
    for each in said:
        if "batch" in each:
            handed.setdefault(each["batch"], []).append(each["at"])
        elif each.get("reduced_s") is not None:
            taken.setdefault(each["epoch"], {})[each["peer"]] = each
    found = []
    for epoch, steps in sorted(taken.items()):
        first = min(each["at"] for each in steps.values())
        calls = sorted(at for at in handed.get(epoch - 1, ()) if at <= first)
        if epoch < FIRST_EPOCH or len(steps) < peers or not calls:
            continue
        last, reduced = calls[:batches][-1], min(each["reduced_s"] for each in steps.values())
        waits = [each["at"] - last - reduced for each in steps.values()]
        found.append(Lag(epoch, statistics.median(waits), max(waits), reduced))
    return found


def time_to(losses: Sequence[tuple[float, float]], target: float) -> float:
    """When a loss was reached first, of times and losses in order; infinite: never."""
    return next((at for at, loss in losses if loss <= target), math.inf)


def percentile(values: Iterable[float], percent: float) -> float:
    """Of the values, with none in between; not a number if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else math.nan
