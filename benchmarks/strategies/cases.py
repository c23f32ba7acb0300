"""What the study compares, in groups. Within a group each case is judged beside another one of the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.strategies.reference import LOCAL_SGD, Outer, Strategy
from benchmarks.strategies.study import Case

__all__ = ["GROUPS", "groups"]

SYNCHRONOUS_RATE, RATE = 24e-3, 8e-3
"""Inner learning rates: of synchronous training, and between merges. The group `search` has those that were tried."""


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
    """The strategies, and their bars."""
    beside: dict[str, Any] = {"against": SYNCHRONOUS.name}
    closest: dict[str, Any] = {"against": BASE.name, "bar": 1.01}
    return [
        SYNCHRONOUS,
        replace(BASE, against=SYNCHRONOUS.name, bar=1.02),
        diloco("DiLoCo, H = 100", 100, bar=1.04, **beside),
        diloco("local SGD, H = 25", outer=LOCAL_SGD, **beside),
        diloco("local SGD, H = 100", 100, outer=LOCAL_SGD, **beside),
        diloco("streaming, P = 4, overlap 3, mixing 0.5", fragments=4, overlap=3, mixing=0.5, **closest),
        diloco("streaming, P = 4, overlap 3, keeping", fragments=4, overlap=3, **closest),
        diloco("decoupled, P = 4, 3 of 4, a peer at half speed", fragments=4, quorum=3, speeds=HALF, **closest),
        *(case for codec in codecs for case in coded(codec)),
    ]


def coded(codec: str) -> list[Case]:
    """DiLoCo with a codec; for a sparse one also as in SparseLoCo: feedback that decays, and no outer momentum."""
    closest: dict[str, Any] = {"against": BASE.name, "bar": 1.01}
    found = [diloco(f"DiLoCo, H = 25, {codec}", codec=codec, **closest)]
    if codec.startswith("topk"):
        sparse: dict[str, Any] = {"codec": codec, "average_codec": "none", "decay": 0.95, "outer": LOCAL_SGD}
        whole = diloco(f"DiLoCo, H = 25, {codec}, average whole", codec=codec, average_codec="none", **closest)
        found += [whole, diloco(f"SparseLoCo, H = 25, {codec}", **sparse, **closest)]
    return found


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
    for every, settings in tried.items():
        for rate, outer, momentum in settings:
            name = f"H = {every}, rate {rate:g}, outer {outer:g}, momentum {momentum:g}"
            found.append(diloco(name, every, rate=rate, outer=nesterov(outer, momentum)))
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
