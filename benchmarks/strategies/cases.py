"""What the study compares, in groups. Within a group each case is judged beside another one of the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.strategies.reference import LOCAL_SGD, Outer, Strategy
from benchmarks.strategies.study import Case
from benchmarks.strategies.swarm import is_of_shoal

__all__ = ["GROUPS", "SYNCHRONOUS", "groups"]

SYNCHRONOUS_RATE, RATE, LOCAL_RATE, OFTEN_RATE = 24e-3, 8e-3, 16e-3, 32e-3
"""Inner learning rates: of synchronous training, of DiLoCo, and of local SGD with rare and with frequent merges. The
group `search` has those that were tried."""


def nesterov(rate: float, momentum: float) -> Outer:
    """SGD as the outer optimizer."""
    return partial(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=momentum > 0)


OUTER = nesterov(1.0, 0.8)

SYNCHRONOUS = Case(name="synchronous", strategy=None, rate=SYNCHRONOUS_RATE)
HALF, QUARTER = (1.0, 1.0, 1.0, 0.5), (1.0, 1.0, 1.0, 0.25)


def diloco(name: str, every: int = 25, **settings: Any) -> Case:
    """A case of DiLoCo: settings of the case, and those of the strategy."""
    own = {key: settings.pop(key) for key in list(settings) if key in Case.__dataclass_fields__}
    strategy = Strategy(**{"every": every, "outer": OUTER, **settings})
    return Case(**{"name": name, "strategy": strategy, "rate": RATE, **own})


BASE = diloco("DiLoCo, H = 25")


def quality(codecs: Sequence[str]) -> list[Case]:
    """The strategies, and their bars; trained by shoal where it has them."""
    beside: dict[str, Any] = {"against": SYNCHRONOUS.name}
    closest: dict[str, Any] = {"against": BASE.name, "bar": 1.01}
    cases = [
        SYNCHRONOUS,
        replace(BASE, against=SYNCHRONOUS.name, bar=1.02),
        diloco("DiLoCo, H = 100", 100, bar=1.04, **beside),
        diloco("local SGD, H = 25", rate=LOCAL_RATE, outer=LOCAL_SGD, **beside),
        diloco("local SGD, H = 100", 100, rate=LOCAL_RATE, outer=LOCAL_SGD, **beside),
        diloco("streaming, P = 4, overlap 3, mixing 0.5", fragments=4, overlap=3, mixing=0.5, **closest),
        diloco("streaming, P = 4, overlap 3, keeping", fragments=4, overlap=3, **closest),
        diloco("decoupled, P = 4, 3 of 4, a peer at half speed", fragments=4, quorum=3, speeds=HALF, **closest),
        *(diloco(f"DiLoCo, H = 25, {codec}", codec=codec, **closest) for codec in codecs),
        *sparse(closest),
    ]
    return [replace(case, by_shoal=case.strategy is not None and is_of_shoal(case.strategy)) for case in cases]


def sparse(beside: dict[str, Any]) -> list[Case]:
    """The largest values in 2 bits, without an outer momentum: rare merges as in SparseLoCo, and frequent ones.

    SparseLoCo's peers take all that four peers send, and their feedback decays; four times as many values of 8 bits
    hold that. With frequent merges both halves have one codec, as `shoal.ErrorFeedback` sends them.
    """
    few, union, many = "topk:0.03:2", "topk:0.12:8", "topk:0.2:2"
    plain: dict[str, Any] = {"outer": LOCAL_SGD, **beside}
    both: dict[str, Any] = {"codec": few, "average_codec": union}
    return [
        diloco(f"SparseLoCo, H = 25, {few}, average {union}", decay=0.95, **both, **plain),
        diloco(f"local SGD, H = 5, {few}, average {union}", 5, rate=OFTEN_RATE, **both, **plain),
        diloco(f"local SGD, H = 5, {many}", 5, rate=OFTEN_RATE, codec=many, **plain),
        diloco("local SGD, H = 5", 5, rate=OFTEN_RATE, **{**plain, "bar": None}),
    ]


def joins() -> list[Case]:
    """After each merge a newcomer takes a peer's place: with which inner moments does it begin?"""
    settled: dict[str, Any] = {"against": "nobody leaves"}
    return [
        replace(BASE, name="nobody leaves"),
        *(diloco(f"{kind} moments", newcomers=kind, **settled) for kind in ("fresh", "donor", "warm")),
    ]


def overlaps() -> list[Case]:
    """A merge takes five steps: keep, mix, or overwrite what was trained in them?"""
    ways = {"keeping": None, "mixing 0.5": 0.5, "overwriting": 0.0}
    return [
        replace(BASE, name="no overlap"),
        *(diloco(f"overlap 5, {name}", overlap=5, mixing=way, against="no overlap") for name, way in ways.items()),
    ]


def speeds() -> list[Case]:
    """A peer has a quarter of the others' speed."""
    exact: dict[str, Any] = {"against": "each exactly H steps"}
    return [
        replace(BASE, name="each exactly H steps"),
        diloco("H steps on average, all give", speeds=QUARTER, **exact),
        diloco("quorum 3 of 4, all give what they have", speeds=QUARTER, quorum=3, partial=True, **exact),
        diloco("quorum 3 of 4, a peer gives when it has H", speeds=QUARTER, quorum=3, patience=9, **exact),
        diloco("quorum 3 of 4, the slow one is never heard", speeds=QUARTER, quorum=3, patience=0, **exact),
    ]


def moments() -> list[Case]:
    """The inner moments are kept at a merge, or forgotten."""
    found = [replace(BASE, name="kept, H = 25"), diloco("kept, H = 100", 100)]
    return found + [
        diloco(f"forgotten, H = {every}", every, resets=True, against=f"kept, H = {every}") for every in (25, 100)
    ]


def stale() -> list[Case]:
    """One of four peers misses merges, and takes part in the one after, again and again."""
    found = [replace(BASE, name="never late")]
    for late in (1, 2, 5):
        for way, patience in (("keeps", late), ("drops", 0)):
            name = f"{late} merge{'s' * (late > 1)} late, {way} its progress"
            found.append(diloco(name, absences=late, patience=patience, against="never late"))
    return found


def search() -> list[Case]:
    """The hyper-parameters that were tried: of synchronous training first."""
    found = [
        replace(SYNCHRONOUS, name=f"synchronous, rate {rate:g}", rate=rate) for rate in (24e-3, 32e-3, 16e-3, 8e-3)
    ]
    paper, fast, mild, plain = (0.7, 0.9), (1.0, 0.8), (1.0, 0.5), (1.0, 0.0)
    tried = {
        25: [(16e-3, *paper), (8e-3, *paper), (8e-3, *fast), (16e-3, *fast), (8e-3, *mild), (4e-3, *paper)],
        100: [(8e-3, *fast), (8e-3, *paper), (8e-3, *mild), (4e-3, *fast), (16e-3, *fast), (8e-3, *plain)],
    }
    for every in (5, 25, 100):
        tried[every] = [*tried.get(every, []), (16e-3, *plain), (32e-3, *plain)]
    for every, settings in tried.items():
        for rate, outer, momentum in settings:
            name = f"H = {every}, rate {rate:g}, outer {outer:g}, momentum {momentum:g}"
            found.append(diloco(name, every, rate=rate, outer=nesterov(outer, momentum)))
    return found + sparse_search()


def sparse_search() -> list[Case]:
    """The largest values in 2 bits: how often, how many, and what is sent back (None: as many)."""
    few, two, union = "topk:0.03:2", "blockwise:2:64", "topk:0.12:8"
    plain, whole = (1.0, 0.0, 1.0), "none"
    tried: list[tuple[int, str, str | None, float, tuple[float, float, float]]] = [
        (1, few, None, 16e-3, plain),
        (1, "topk:0.01:2", whole, 16e-3, plain),
        (2, few, whole, 16e-3, plain),
        (2, few, whole, 24e-3, plain),
        (2, "topk:0.06:2", None, 24e-3, plain),
        (2, "topk:0.06:2", None, 48e-3, plain),
        (5, few, two, 32e-3, plain),
        (5, few, two, 32e-3, (1.0, 0.0, 0.95)),
        (5, few, union, 32e-3, plain),
        (5, "topk:0.05:2", two, 32e-3, plain),
        (5, "topk:0.1:2", whole, 8e-3, plain),
        (5, "topk:0.1:2", two, 16e-3, plain),
        (5, "topk:0.1:2", two, 32e-3, plain),
        (5, "topk:0.1:2", None, 32e-3, plain),
        *((5, "topk:0.2:2", None, rate, plain) for rate in (16e-3, 24e-3, 32e-3, 48e-3)),
        *((5, "topk:0.2:2", None, 16e-3, outer) for outer in ((1.0, 0.25, 1.0), (1.0, 0.5, 1.0), (1.5, 0.0, 1.0))),
        (10, "topk:0.2:2", None, 32e-3, plain),
        (10, "topk:0.25:2", None, 48e-3, plain),
        (10, "topk:0.25:2", "blockwise:4:64", 24e-3, plain),
        (10, "topk:0.25:2", "blockwise:4:64", 8e-3, (1.0, 0.8, 1.0)),
        *((25, few, union, rate, (1.0, 0.0, 0.95)) for rate in (16e-3, 32e-3)),
    ]
    found = []
    for every, codec, average, rate, (outer, momentum, decay) in tried:
        name = f"H = {every}, {codec}, back {average or codec}, rate {rate:g}, outer {outer:g}, momentum {momentum:g}"
        settings: dict[str, Any] = {"codec": codec, "average_codec": average, "decay": decay}
        name += f", decay {decay:g}" * (decay < 1)
        found.append(diloco(name, every, rate=rate, outer=nesterov(outer, momentum), **settings))
    return found


def groups(codecs: Sequence[str]) -> dict[str, list[Case]]:
    """All, by their names."""
    return {
        "quality": quality(codecs),
        "joins": joins(),
        "overlaps": overlaps(),
        "speeds": speeds(),
        "moments": moments(),
        "stale": stale(),
        "search": search(),
    }


GROUPS = tuple(groups(()))
