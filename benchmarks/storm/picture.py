"""The picture of a storm: who is live and who takes part, what struck when, and the loss. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["draw"]

_INK, _FAINT, _GRID, _CALM = "#1f2933", "#616e7c", "#e4e7eb", "#f3f6f9"
_LIVE, _TOOK_PART = "#9fb3c8", "#1668b8"
_KINDS = {
    "kill": ("killed", "#c81e3a"),
    "stop": ("stopped for 10 s", "#d97706"),
    "cut": ("cut off for 10 s", "#6d28d9"),
}


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw what `benchmarks.storm` found to an SVG file."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    drawn = found["drawn"]
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9, "svg.hashsalt": "shoal"}):
        figure = Figure(figsize=(9.0, 4.6), facecolor="white")
        FigureCanvasSVG(figure)
        trainers, struck, loss = figure.subplots(
            3, 1, sharex=True, gridspec_kw={"height_ratios": (3.0, 0.8, 2.0), "hspace": 0.12}
        )
        figure.subplots_adjust(left=0.075, right=0.985, top=0.86, bottom=0.1)
        epochs = [at / 60 for at, _, _ in drawn["took_part"]]
        for axes in (trainers, struck, loss):
            axes.axvspan(-drawn["calm_s"] / 60, 0.0, color=_CALM, linewidth=0)
            axes.grid(axis="y", color=_GRID, linewidth=0.9)
            axes.set_axisbelow(True)
            axes.tick_params(length=0, colors=_INK)
            for side in axes.spines.values():
                side.set_visible(False)
        trainers.step([at / 60 for at, _ in drawn["live"]], [n for _, n in drawn["live"]], where="post", color=_LIVE)
        trainers.plot(epochs, [n for _, n, _ in drawn["took_part"]], ".", color=_TOOK_PART, markersize=3)
        trainers.set_ylim(0, None)
        trainers.set_ylabel("trainers", color=_INK)
        for row, (kind, (_, color)) in enumerate(_KINDS.items()):
            at = [when / 60 for when, each in drawn["faults"] if each == kind]
            struck.plot(at, [row] * len(at), "|", color=color, markersize=7, markeredgewidth=1.2)
        struck.set_yticks(range(len(_KINDS)), [name.split(" ")[0] for name, _ in _KINDS.values()], fontsize=7)
        struck.set_ylim(len(_KINDS) - 0.4, -0.6)
        loss.plot(epochs, [each for _, _, each in drawn["took_part"]], color=_INK, linewidth=0.9)
        loss.set_yscale("log")
        loss.set_ylabel("loss", color=_INK)
        loss.set_xlabel("minutes since the storm began", color=_FAINT)
        figure.text(0.012, 0.945, "A storm", size=14, weight="bold", color=_INK)
        counts = ", ".join(f"{n} {_KINDS[kind][0]}" for kind, n in found["faults"].items())
        figure.text(0.985, 0.95, f"{counts}; shaded: the calm before", size=8.5, color=_FAINT, ha="right")
        legend = f"line: live · dots: contributors of each epoch · goodput {found['goodput']:.2f} of the calm's"
        figure.text(0.985, 0.905, legend, size=8.5, color=_FAINT, ha="right")
        figure.savefig(path, metadata={"Date": None, "Creator": None})
