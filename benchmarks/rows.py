"""Lines of the table that `python -m benchmarks` ends with: what was measured, beside what, the bar, the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["HEADINGS", "Bar", "Row", "Section", "Spread", "at_least", "at_most", "cells", "markdown", "verdict"]

HEADINGS = ("line", "measured", "beside", "its number", "ratio", "bar", "met")


class Spread(NamedTuple):
    """A median and the range around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float] | Mapping[str, float]) -> Spread:
        """Of values, or of a spread as `benchmarks.allreduce` writes it. Raises `ValueError` if there are none."""
        if isinstance(values, Mapping):
            return cls(values["median"], values["min"], values["max"])
        values = sorted(values)
        if not values:
            raise ValueError("nothing was measured")
        return cls(statistics.median(values), values[0], values[-1])


class Bar(NamedTuple):
    """What the median must at least, or at most, be."""

    limit: float
    least: bool


def at_least(limit: float) -> Bar:
    """The median must not be below this."""
    return Bar(limit, least=True)


def at_most(limit: float) -> Bar:
    """The median must not be above this."""
    return Bar(limit, least=False)


class Row(NamedTuple):
    """One line.

    Attributes:
        line: what it is about.
        measured: shoal's number, in `unit`; infinite seconds are shown as never.
        unit: of both numbers.
        beside: whose the other number is; empty if there is none.
        its: the other number; None beside a name: there is none, as `absent` says why.
        ratio: how many times as good shoal is, of the same turns; above 1 is better.
        bar: what the ratio (without one: the measured number) has to reach.
        absent: whose number is missing took no part; otherwise it failed.
    """

    line: str
    measured: float
    unit: str = ""
    beside: str = ""
    its: float | None = None
    ratio: Spread | None = None
    bar: Bar | None = None
    absent: bool = False


class Section(NamedTuple):
    """The lines of one origin.

    Attributes:
        title: when, from which commit and on what they were measured.
        rows: the lines.
    """

    title: str
    rows: tuple[Row, ...]


def verdict(row: Row) -> bool | None:
    """Whether the bar was met; None if there is none, or nothing to judge by."""
    if row.bar is None or (row.beside and row.its is None):
        return None
    value = row.measured if row.ratio is None else row.ratio.median
    return value >= row.bar.limit if row.bar.least else value <= row.bar.limit


def cells(row: Row) -> tuple[str, ...]:
    """The texts under `HEADINGS`."""
    met = verdict(row)
    sign = "" if row.bar is None else "≥" if row.bar.least else "≤"
    missing = row.beside != "" and row.its is None
    unit = "" if row.ratio is not None or missing else row.unit
    return (
        row.line,
        _amount(row.measured, row.unit),
        row.beside,
        ("was not there" if row.absent else "failed")
        if missing
        else ""
        if row.its is None
        else _amount(row.its, row.unit),
        ""
        if row.ratio is None
        else f"{_digits(row.ratio.median)} ({_digits(row.ratio.low)} to {_digits(row.ratio.high)})",
        "" if row.bar is None else f"{sign} {_amount(row.bar.limit, unit)}",
        "" if row.bar is None else "not judged" if met is None else "yes" if met else "NO",
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table for a page."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *map(cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _amount(value: float, unit: str) -> str:
    if value == math.inf:
        return "never"
    return f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if abs(value) >= 0.001 else f"{value:.1g}"
