"""The picture of a demo run: `report.png`. Needs matplotlib (extra `demo`), imported only here, when it is drawn.

Above: the held-out loss against time, with the kill and the join, and the single process on the same axis: its loss
after as many epochs (and sequences) is drawn at the time when the swarm had that many, so the two curves answer "what
did the model lose by being trained by a swarm", not "which is faster". Below: the peers that took part, over time.
Under both: the result, in words.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.demo.result import proof
from shoal.demo.state import DemoPeer, DemoState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_report"]

_INK, _FAINT, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_SWARM, _ALONE, _LOST, _CAME = "#1668b8", "#e07b00", "#c81e3a", "#15803d"
_WIDTH_IN, _HEIGHT_IN, _DPI = 9.6, 6.4, 160


def draw_report(state: DemoState, path: Path) -> None:
    """Draw the run to a PNG file.

    Args:
        state: a run that has ended.
        path: where to put the picture; replaced.

    Raises:
        OSError: it cannot be written there.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # An own figure and canvas: pyplot's global state stays the user's.
    with rc_context({"font.family": "DejaVu Sans", "font.size": 10.5, "axes.unicode_minus": False}):
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=_DPI, facecolor="white")
        FigureCanvasAgg(figure)
        lanes = max(1, len(state.peers))
        loss_axes, peer_axes = figure.subplots(2, 1, sharex=True, height_ratios=[10, 1.5 + 0.62 * lanes])
        figure.subplots_adjust(left=0.075, right=0.97, top=0.845, bottom=0.185, hspace=0.12)
        _titles(figure, state)
        _loss(loss_axes, state)
        _lanes(peer_axes, state)
        _marks(loss_axes, peer_axes, state)
        _footer(figure, state)
        figure.savefig(path)


def _end_s(state: DemoState) -> float:
    return max([view.at_s for view in state.epochs] + [point.at_s for point in state.losses] + [1.0])


def _titles(figure: Figure, state: DemoState) -> None:
    count = sum(not peer.newcomer for peer in state.peers.values())
    figure.text(0.03, 0.948, "One model, trained by processes that come and go", size=16, weight="bold", color=_INK)
    size = f", {state.parameters / 1e3:,.0f} thousand weights" if state.parameters else ""
    what = f"{count} peers of unequal speed, TCP and TLS, no coordinator · masked language model{size}"
    figure.text(0.03, 0.907, what, size=10.5, color=_FAINT)


def _plain(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.tick_params(colors=_FAINT, length=0, labelcolor=_INK)


def _loss(axes: Axes, state: DemoState) -> None:
    _plain(axes)
    axes.grid(axis="y", color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(labelbottom=False)
    axes.set_ylabel("held-out loss (nats)", color=_INK)
    end_s = _end_s(state)
    axes.set_xlim(0, end_s * 1.0)
    times = {0: state.losses[0].at_s if state.losses else 0.0} | {view.epoch: view.at_s for view in state.epochs}
    alone = [(times[point.epoch], point.loss) for point in state.baseline if point.epoch in times]
    swarm = [(point.at_s, point.loss) for point in state.losses]
    for points, color in ((swarm, _SWARM), (alone, _ALONE)):
        axes.plot(*zip(*points[-1:], strict=True), marker="o", color=color, markersize=6, zorder=6, clip_on=False)
    if swarm:
        axes.plot(
            *zip(*swarm, strict=True), color=_SWARM, linewidth=2.6, solid_capstyle="round", zorder=4, label="swarm"
        )
    if alone:
        axes.plot(*zip(*alone, strict=True), color=_ALONE, linewidth=2.0, dashes=(4, 2.2), zorder=5, label="alone")
    _legend(axes, state)
    highest = max([loss for _, loss in swarm + alone], default=1.0)
    lowest = min([loss for _, loss in swarm + alone], default=0.0)
    room = (highest - lowest) or 1.0
    axes.set_ylim(lowest - 0.10 * room, highest + 0.16 * room)


def _legend(axes: Axes, state: DemoState) -> None:
    swarm = f"the swarm: {state.loss_last:.2f}" if state.loss_last is not None else "the swarm"
    names = [swarm]
    if state.baseline:
        last = state.baseline[-1]
        as_many = "as many sequences" if state.baseline_complete else f"{last.samples:,} sequences, then time was up"
        names.append(f"one process alone, {as_many}: {last.loss:.2f}")
    lines = axes.get_lines()
    curves = [line for line in lines if line.get_label() in {"swarm", "alone"}]
    # Above the axes, so that no curve is ever hidden behind it.
    axes.legend(
        curves, names[: len(curves)], loc="lower left", bbox_to_anchor=(-0.008, 0.985), ncols=2, frameon=False,
        labelcolor=_INK, handlelength=2.6, columnspacing=2.5,
    )  # fmt: skip


def _marks(axes: Axes, below: Axes, state: DemoState) -> None:
    marks: list[tuple[float, str, str]] = []
    for peer in state.peers.values():
        if peer.lost and peer.ended_at_s is not None:
            marks.append(
                (peer.ended_at_s, f"{peer.name} killed" if peer.fate == "killed" else f"{peer.name} died", _LOST)
            )
        if peer.newcomer and peer.training_since_s is not None:
            marks.append((peer.training_since_s, f"{peer.name} joins", _CAME))
    end_s = _end_s(state)
    before_s, row = -end_s, 0
    for at_s, text, color in sorted(marks):
        # Labels that would touch the one before go one line lower.
        row = row + 1 if at_s - before_s < 0.14 * end_s else 0
        before_s = at_s
        axes.axvline(at_s, color=color, linewidth=1.3, zorder=2)
        below.axvline(at_s, color=color, linewidth=1.0, alpha=0.35, zorder=1)
        on_the_left = at_s > 0.85 * end_s
        axes.annotate(
            text,
            (at_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if on_the_left else 5, -2 - 15 * row),
            textcoords="offset points",
            ha="right" if on_the_left else "left",
            va="top",
            color=color,
            weight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            zorder=7,
        )


def _lanes(axes: Axes, state: DemoState) -> None:
    _plain(axes)
    axes.set_xlabel("seconds since the start", color=_INK)
    axes.tick_params(axis="x", length=3)
    peers = list(state.peers.values())
    for row, peer in enumerate(peers):
        _lane(axes, row, peer, _end_s(state))
    axes.set_yticks(range(len(peers)), [peer.name for peer in peers])
    axes.set_ylim(len(peers) - 0.4, -0.6)
    for label, peer in zip(axes.get_yticklabels(), peers, strict=True):
        label.set_color(_LOST if peer.lost else _CAME if peer.newcomer else _INK)


def _lane(axes: Axes, row: int, peer: DemoPeer, end_s: float) -> None:
    until_s = min(peer.ended_at_s if peer.lost and peer.ended_at_s is not None else end_s, end_s)
    since_s = min(peer.training_since_s if peer.training_since_s is not None else until_s, until_s)
    axes.barh(row, since_s - peer.started_at_s, left=peer.started_at_s, height=0.14, color=_GRID)
    if since_s - peer.started_at_s > 0.1 * end_s and row == 0:
        axes.annotate(
            "loading torch", (peer.started_at_s, row), (1, 4), textcoords="offset points", size=8, color=_FAINT
        )
    if until_s > since_s:
        color = _CAME if peer.newcomer else _SWARM
        axes.barh(row, until_s - since_s, left=since_s, height=0.66, color=color, alpha=0.9)
    if until_s - since_s > 0.15 * end_s and peer.work.samples:
        text = f"{peer.work.samples:,} sequences"
        axes.annotate(
            text, (since_s, row), (6, 0), textcoords="offset points", va="center_baseline", size=9, color="white"
        )
    if peer.lost:
        axes.plot([until_s], [row], marker="X", markersize=10, color=_LOST, markeredgecolor="white", zorder=5)


def _footer(figure: Figure, state: DemoState) -> None:
    figure.text(0.03, 0.068, proof(state, digits=16) + " …", size=11, weight="bold", color=_INK)
    figure.text(0.03, 0.028, _details(state), size=10, color=_FAINT)


def _details(state: DemoState) -> str:
    parts = [f"{state.epoch} steps", f"{state.samples:,} sequences"]
    if len(state.epochs) > 1:
        parts.append(f"longest wait for a step {state.max_stall_s(0.0):.1f} s")
    if state.download is not None:
        size = state.download.bytes_received / 1e6
        parts.append(f"newcomer: {size:.1f} MB of state in {state.download.duration_s:.2f} s")
    return " · ".join(parts)
