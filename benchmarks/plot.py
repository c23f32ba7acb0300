"""The picture of a benchmark's ratios: how many times as fast shoal is as what it stands beside, and each bar.

One point for each line of the table that has a ratio, on a logarithmic scale, with its range; the bar is a tick. Where
lines are of more than one origin, a raised number says of which. Needs matplotlib (extra `demo`). On a ground of its
own: it can be read on white pages and on dark ones.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import Row, Section, Spread, verdict

__all__ = ["draw"]

_INK, _FAINT, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_MET, _MISSED, _NONE = "#1668b8", "#c81e3a", "#7b8794"
_ROW_IN, _AXES_IN, _CAPTION_IN = 0.27, 5.3, 0.14
_LETTER_IN = 0.072
"""As wide as a letter of the labels is, and a little wider."""
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def draw(sections: Sequence[Section], path: Path) -> None:
    """Draw the ratios of some lines to an SVG file.

    Args:
        sections: lines without a ratio are left out. The titles stand below.
        path: where to put the picture; replaced, or removed if no line has a ratio.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    lines, below = _lines(sections)
    if not lines:
        path.unlink(missing_ok=True)
        return
    left = max(3.0, 0.3 + _LETTER_IN * max(len(label) for _, _, label in lines))
    width = left + _AXES_IN + 0.4
    # The same rows give the same file: no date in it, and ids from a fixed salt. Letters stay text: as paths they were
    # four fifths of the file. A browser without DejaVu Sans takes another font of its kind.
    with rc_context(
        {
            "font.family": "sans-serif",
            "font.size": 9,
            "svg.fonttype": "none",
            "svg.hashsalt": "shoal",
            "axes.unicode_minus": False,
        }
    ):
        foot = 0.6 + _CAPTION_IN * len(below)
        height = foot + _ROW_IN * len(lines) + 0.6
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasSVG(figure)
        axes = figure.add_axes(
            (left / width, foot / height, _AXES_IN / width, 1 - (foot + 0.6) / height), facecolor="white"
        )
        for place, (row, ratio, _) in enumerate(lines):
            met = verdict(row)
            color = _NONE if met is None else _MET if met else _MISSED
            axes.plot((ratio.low, ratio.high), (place, place), color=color, linewidth=1.6, alpha=0.55, zorder=3)
            axes.plot(ratio.median, place, marker="o" if met is not False else "X", color=color, markersize=6, zorder=4)
            if row.bar is not None:
                axes.plot(row.bar.limit, place, marker="|", color=_INK, markersize=13, markeredgewidth=1.8, zorder=5)
        axes.set_yticks(range(len(lines)), [label for _, _, label in lines], color=_INK)
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.set_xscale("log")
        axes.axvline(1.0, color=_FAINT, linewidth=1.0, zorder=2)
        values = [value for row, ratio, _ in lines for value in (*ratio, row.bar.limit if row.bar else 1.0)]
        low, high = min(values) / 2, max(values) * 2
        ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], color=_INK)
        axes.set_xticks([], minor=True)
        axes.grid(axis="x", color=_GRID, linewidth=0.9)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        figure.text(0.02, 1 - 0.32 / height, "How many times as fast", size=14, weight="bold", color=_INK)
        legend = "point: median · line: range · tick: the bar to reach · red cross: not reached"
        figure.text(0.98, 1 - 0.30 / height, legend, size=8.5, color=_FAINT, ha="right")
        figure.text(0.02, 0.12 / height, "\n".join(below), size=7.5, color=_FAINT, va="bottom")
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def _lines(sections: Sequence[Section]) -> tuple[list[tuple[Row, Spread, str]], list[str]]:
    """What is drawn: each row with its ratio and label, those beside the same together; and the caption's lines."""
    shown = [section for section in sections if any(row.ratio is not None for row in section.rows)]
    lines, below = [], []
    for number, section in enumerate(shown, 1):
        mark = str(number).translate(_RAISED) if len(shown) > 1 else ""
        lines += [
            (row, row.ratio, f"{row.line}  / {row.beside}{mark}") for row in section.rows if row.ratio is not None
        ]
        below += textwrap.wrap(f"{mark} {section.title}".strip(), 150)
    others = [row.beside for row, _, _ in lines]
    return sorted(lines, key=lambda line: others.index(line[0].beside)), below
