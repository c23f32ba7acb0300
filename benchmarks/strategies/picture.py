"""The picture of `benchmarks.strategies`: loss against bytes, one point for each case. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.strategies.study import Case

__all__ = ["draw"]

_INK, _FAINT, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_KINDS = (("synchronous", "#1f2933"), ("local SGD", "#d97706"), ("streaming", "#0e9f6e"), ("decoupled", "#7e3af2"))
_ELSE = "#1668b8"
_FAR = 1.2
"""A case with a larger loss, as a ratio to synchronous training, is named but not drawn."""


def draw(found: Sequence[tuple[Case, Sequence[float], float]], path: Path) -> None:
    """Draw cases, each with its losses (one of each seed) and its bytes per token, to an SVG file."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context({"font.family": "sans-serif", "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "shoal"}):
        figure = Figure(figsize=(10.0, 4.8), facecolor="white")
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.06, 0.12, 0.61, 0.75))
        whole = found[0][1]
        for number, (case, losses, sent) in enumerate(found, 1):
            color = next((color for kind, color in _KINDS if case.name.startswith(kind)), _ELSE)
            above = [100 * (mine / its - 1) for mine, its in zip(losses, whole, strict=False)]
            mean = statistics.fmean(above)
            far = f" ({mean:+.0f}%)" if mean > 100 * (_FAR - 1) else ""
            figure.text(0.69, 0.85 - 0.048 * number, f"{number}  {case.name}{far}", size=7.5, color=color)
            if far:
                continue
            axes.plot((sent, sent), (min(above), max(above)), color=color, linewidth=1.6, alpha=0.4)
            axes.plot(sent, mean, "o", color=color, markersize=6)
            axes.annotate(str(number), (sent, mean), (6, 4), textcoords="offset points", color=color, size=8.5)
        axes.set_xscale("log")
        axes.set_xlabel("bytes that a peer sends for each token it trains", color=_FAINT)
        axes.set_ylabel("held-out loss above synchronous, %", color=_FAINT)
        axes.axhline(0.0, color=_FAINT, linewidth=0.9, linestyle="--")
        hundredth = found[0][2] / 100
        axes.axvline(hundredth, color=_FAINT, linewidth=0.9, linestyle=":")
        axes.annotate(
            "a hundredth of the bytes",
            (hundredth, 0.0),
            (-4, 4),
            textcoords="offset points",
            color=_FAINT,
            size=7.5,
            ha="right",
        )
        axes.grid(color=_GRID, linewidth=0.9)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, colors=_INK)
        for side in axes.spines.values():
            side.set_visible(False)
        figure.text(0.02, 0.93, "Loss against bytes", size=14, weight="bold", color=_INK)
        figure.text(0.98, 0.935, "point: mean of the seeds · line: their range", size=8.5, color=_FAINT, ha="right")
        figure.savefig(path, metadata={"Date": None, "Creator": None})
