"""The picture of a benchmark's ratios: how many times as fast shoal is as what it stands beside, and each bar.

One point for each line of the table that has a ratio, on a logarithmic scale, with its range; the bar is a tick. Needs
matplotlib (extra `demo`). On a ground of its own: it can be read on white pages and on dark ones.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import Row, verdict

__all__ = ["draw"]

_INK, _FAINT, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_MET, _MISSED, _NONE = "#1668b8", "#c81e3a", "#7b8794"
_ROW_IN, _WIDTH_IN = 0.27, 9.6


def draw(rows: Sequence[Row], caption: str, path: Path) -> None:
    """Draw the ratios of some rows to an SVG file; nothing if there are none.

    Args:
        rows: those without a ratio are left out.
        caption: what stands below.
        path: where to put the picture; replaced.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    lines = [(row, row.ratio) for row in rows if row.ratio is not None]
    if not lines:
        return
    others = [row.beside for row, _ in lines]
    lines.sort(key=lambda line: others.index(line[0].beside))  # what stands beside the same, together
    # The same rows give the same file: no date in it, and ids from a fixed salt.
    with rc_context(
        {"font.family": "DejaVu Sans", "font.size": 9, "svg.hashsalt": "shoal", "axes.unicode_minus": False}
    ):
        height = _ROW_IN * len(lines) + 1.5
        figure = Figure(figsize=(_WIDTH_IN, height), facecolor="white")
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.41, 0.75 / height, 0.55, 1 - 1.35 / height), facecolor="white")
        for place, (row, ratio) in enumerate(lines):
            met = verdict(row)
            color = _NONE if met is None else _MET if met else _MISSED
            axes.plot((ratio.low, ratio.high), (place, place), color=color, linewidth=1.6, alpha=0.55, zorder=3)
            axes.plot(ratio.median, place, marker="o" if met is not False else "X", color=color, markersize=6, zorder=4)
            if row.bar is not None:
                axes.plot(row.bar.limit, place, marker="|", color=_INK, markersize=13, markeredgewidth=1.8, zorder=5)
        axes.set_yticks(range(len(lines)), [f"{row.line}  / {row.beside}" for row, _ in lines], color=_INK)
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.set_xscale("log")
        axes.axvline(1.0, color=_FAINT, linewidth=1.0, zorder=2)
        shown = [value for row, ratio in lines for value in (*ratio, row.bar.limit if row.bar else 1.0)]
        ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if min(shown) / 2 <= tick <= max(shown) * 2]
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
        below = "\n".join(textwrap.wrap(caption, 150)[:3])
        figure.text(0.02, 0.12 / height, below, size=7.5, color=_FAINT, va="bottom")
        figure.savefig(path, metadata={"Date": None, "Creator": None})
