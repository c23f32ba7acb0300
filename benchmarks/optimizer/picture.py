"""The picture of `benchmarks.optimizer`: the held-out loss against time, one panel for each case. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["draw"]

_INK, _FAINT, _GRID, _KILL = "#1f2933", "#616e7c", "#e4e7eb", "#c81e3a"
_LINES = {
    "shoal": ("#1668b8", "-"),
    "hivemind": ("#d97706", "-"),
    "shoal_delayed": ("#1668b8", ":"),
    "hivemind_delayed": ("#d97706", ":"),
}
_TITLES = {"1": "1 peer", "2": "2 peers", "4": "4 peers", "churn": "4 peers in churn"}


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw what `benchmarks.optimizer` found to an SVG file; each turn is a line of its own."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context({"font.family": "DejaVu Sans", "font.size": 9, "svg.hashsalt": "shoal"}):
        figure = Figure(figsize=(9.0, 3.4), facecolor="white")
        FigureCanvasSVG(figure)
        panels = figure.subplots(1, len(found["cases"]), sharey=True, squeeze=False)[0]
        figure.subplots_adjust(left=0.06, right=0.985, top=0.76, bottom=0.14, wspace=0.08)
        for axes, case in zip(panels, found["cases"], strict=True):
            axes.axhline(found["target"], color=_FAINT, linewidth=0.9, linestyle="--")
            for each in (each for each in found["runs"] if each["case"] == case and each.get("losses")):
                color, style = _LINES[each["library"]]
                at, losses = zip(*each["losses"], strict=True)
                axes.plot(at, losses, style, color=color, linewidth=1.2, alpha=0.8)
                axes.plot(at[-1], losses[-1], ".", color=color, markersize=6)
                for kill in each.get("kills", ()):
                    axes.axvline(kill, ymax=0.05, color=_KILL, linewidth=0.8)
            axes.set_title(_TITLES[case], size=9, color=_INK, loc="left")
            axes.set_xlim(0, None)
            axes.set_xlabel("seconds", color=_FAINT)
            axes.grid(color=_GRID, linewidth=0.9)
            axes.set_axisbelow(True)
            axes.tick_params(length=0, colors=_INK)
            for side in axes.spines.values():
                side.set_visible(False)
        panels[0].set_ylabel("held-out loss", color=_INK)
        names = [axes.plot([], [], _LINES[name][1], color=_LINES[name][0])[0] for name in found["names"]]
        labels = [name.replace("_", ", ") for name in found["names"]]
        figure.legend(names, labels, loc="upper right", ncols=len(names), frameon=False, fontsize=8.5)
        figure.text(0.012, 0.92, "Time to a loss", size=14, weight="bold", color=_INK)
        what = f"dashed: the loss of one process after {len(found['alone'])} steps"
        killed = " · red: a peer is killed, another one joins" if "churn" in found["cases"] else ""
        figure.text(0.985, 0.875, f"{what}{killed}", size=8.5, color=_FAINT, ha="right")
        figure.savefig(path, metadata={"Date": None, "Creator": None})
