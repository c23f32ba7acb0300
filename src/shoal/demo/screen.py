"""The demo's display while it runs: a live screen in a terminal, plain lines anywhere else. No torch here.

`render` is a pure function to a rich renderable that fits the width (from 80 columns) and height of the console.
`open_display` chooses between the two displays and draws the first picture, before anything is started.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.demo.result import conclusion
from shoal.demo.settings import DemoOptions
from shoal.demo.state import DemoPeer, DemoState, Happening

__all__ = ["Display", "block_chart", "open_display", "render"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_CHART_ROWS, _LOG_ROWS = 4, 8
_LABEL = 10  # cells left of the time bar and of the chart
_PLAIN_STATUS_EVERY_S = 5.0
_TONES = {"plain": ("·", "default"), "good": ("✓", "green"), "bad": ("✗", "bold red")}
_STATE_STYLES = {"training": "green", "averaging": "cyan", "finished": "bold green", "DEAD": "bold red", "left": "dim"}
_PHASES = {
    "starting": "starting",
    "training": "training",
    "stopping": "last epochs",
    "leaving": "leaving",
    "baseline": "one process alone",
    "done": "done",
}


class _LiveScreen:
    """Draws the run over and over."""

    def __init__(self, console: Console, options: DemoOptions) -> None:
        self._console, self._options = console, options
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def show(self, state: DemoState, now_s: float) -> None:
        self._live.update(render(state, now_s, self._console), refresh=True)

    def close(self, state: DemoState, now_s: float) -> None:
        self.show(state, now_s)
        self._live.stop()
        _print_conclusion(self._console, state, self._options)


class _PlainLines:
    """Prints what happens, and now and then how it goes."""

    def __init__(self, console: Console, options: DemoOptions) -> None:
        self._console, self._options = console, options
        self._printed = 0
        self._status_due_s = _PLAIN_STATUS_EVERY_S
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a log in an old encoding is better than no run
        self._print(0.0, _intro(options.peers, options.seconds))

    def show(self, state: DemoState, now_s: float) -> None:
        # The log may have dropped old lines, so count from its end.
        for line in state.log[len(state.log) - (state.logged - self._printed) :]:
            self._print(line.at_s, line.text)
        self._printed = state.logged
        if now_s >= self._status_due_s and state.phase != "done":
            self._status_due_s = now_s + _PLAIN_STATUS_EVERY_S
            self._print(now_s, _status_line(state))

    def close(self, state: DemoState, now_s: float) -> None:
        self.show(state, now_s)
        _print_conclusion(self._console, state, self._options)

    def _print(self, at_s: float, text: str) -> None:
        self._console.print(f"{at_s:6.1f} s  {text}", markup=False, soft_wrap=True)


Display = _LiveScreen | _PlainLines
"""`show` brings it up to date; `close` shows the end and the result, and gives the terminal back."""


def open_display(options: DemoOptions, console: Console | None = None) -> Display:
    """The display that fits: live in a terminal, plain lines if `options.headless` or stdout is something else."""
    console = console or Console(highlight=False)
    if options.headless or not console.is_terminal or console.is_dumb_terminal:
        return _PlainLines(console, options)
    return _LiveScreen(console, options)


def _print_conclusion(console: Console, state: DemoState, options: DemoOptions) -> None:
    good = state.exit_reason == "completed"
    console.print()
    for number, line in enumerate(conclusion(state)):
        console.print(Text(line, style="" if number else "bold green" if good else "bold red"), soft_wrap=True)
    if options.report is not None:
        shown = "report.png" if good else "logs"
        console.print(f"{'picture' if good else 'logs'}: {options.report / shown}", markup=False, soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------- rendering


def render(state: DemoState, now_s: float, console: Console) -> RenderableType:
    """The screen for `state` at `now_s` seconds since the start."""
    inner = console.width - 4
    # Frame 2, status 1, bar 1, three gaps, table head 1, and 1 for the cursor: the rest goes to the log.
    room = console.height - (9 + len(state.peers) + _CHART_ROWS) if console.is_terminal else _LOG_ROWS
    parts = (
        _status(state, now_s, inner),
        _time_bar(state, now_s, inner),
        Text(),
        _peer_table(state, wide=inner >= 100),
        Text(),
        _loss_chart(state, inner),
        Text(),
        _log(state.log, max(3, min(_LOG_ROWS, room)), inner),
    )
    title = f"[bold]shoal demo[/]  [dim]{state.run_id or 'one model, many processes'}[/]"
    return Panel(Group(*parts), title=title, title_align="left", border_style=_border(state), width=console.width)


def _border(state: DemoState) -> str:
    if state.phase != "done":
        return "cyan"
    return "green" if state.exit_reason == "completed" else "red"


def _status(state: DemoState, now_s: float, width: int) -> Text:
    loss = f"{state.loss_last:.2f}" if state.loss_last is not None else "–"
    left = Text(_PHASES[state.phase], style="bold")
    left.append("   epoch ", "dim").append(f"{state.epoch}", "bold")
    left.append(f"/{state.stop_epoch}" if state.stop_epoch else "", "dim")
    left.append("   loss ", "dim").append(loss, "bold cyan")
    if state.phase in {"baseline", "done"} and state.baseline:
        last = state.baseline[-1]
        left.append("   alone ", "dim").append(f"{last.loss:.2f}", "bold yellow")
        left.append(f" ({last.samples / max(1, state.samples):.0%} done)", "dim")
    else:
        training = sum(peer.training_since_s is not None for peer in state.living)
        left.append("   peers ", "dim").append(f"{training}")
        left.append("   samples/s ", "dim").append(f"{sum(peer.work.samples_per_s for peer in state.living):.0f}")
    right = Text(f" {now_s:.0f} s", style="bold")
    left.truncate(width - right.cell_len)
    left.append(" " * (width - left.cell_len - right.cell_len))
    return left.append_text(right)


def _time_bar(state: DemoState, now_s: float, width: int) -> Text:
    """The planned time, with what happened in it; its columns are those of the chart below."""
    stop_s = state.stopped_at_s if state.stopped_at_s is not None else now_s
    cells = width - _LABEL
    done = min(cells, int(cells * stop_s / state.seconds))
    bar = Text("━" * done, style="cyan").append("━" * (cells - done), style="grey30")

    def mark(at_s: float, sign: str, style: str) -> None:
        nonlocal bar
        place = min(cells - 1, int(cells * at_s / state.seconds))
        bar = bar[:place].append(sign, style=style).append_text(bar[place + 1 :])

    for peer in state.peers.values():
        if peer.newcomer and peer.training_since_s is not None:
            mark(peer.training_since_s, "✚", "bold green")
        if peer.lost and peer.ended_at_s is not None:
            mark(peer.ended_at_s, "✖", "bold red")
    return Text(f"{f'of {state.seconds:.0f} s':<{_LABEL}}", style="dim").append_text(bar)


def _peer_table(state: DemoState, *, wide: bool) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("peer", no_wrap=True)
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=13)
    table.add_column("samples/s", justify="right", no_wrap=True)
    table.add_column("epoch", justify="right", no_wrap=True)
    table.add_column("share", no_wrap=True)
    table.add_column("up / down MB", justify="right", no_wrap=True)
    table.add_column("last round", no_wrap=True)
    for peer in state.peers.values():
        table.add_row(*_peer_row(state, peer, wide=wide))
    return table


def _peer_row(state: DemoState, peer: DemoPeer, *, wide: bool) -> Iterable[Text]:
    fade = "" if peer.alive else "dim"
    trains = peer.training_since_s is not None and peer.alive
    return (
        Text(peer.name, style="bold red" if peer.lost else f"bold {fade}"),
        Text(str(peer.pid), style=fade),
        Text(peer.state, style=_STATE_STYLES.get(peer.state, "yellow")),
        Text(f"{peer.work.samples_per_s:.0f}" if trains else "–", style=fade),
        Text(str(peer.epoch), style=fade),
        _share_bar(state.share(peer), 20 if wide else 6) if trains else Text("–", style=fade),
        Text(f"{_megabytes(peer.work.bytes_sent)} / {_megabytes(peer.work.bytes_received)}", style=fade),
        _last_round(peer, wide=wide),
    )


def _share_bar(share: float, cells: int) -> Text:
    full = round(cells * share)
    return Text("█" * full, style="cyan").append("░" * (cells - full), "grey30").append(f"{share:5.0%}", "default")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.{0 if count >= 1e8 else 1}f}" if count else "–"


def _last_round(peer: DemoPeer, *, wide: bool) -> Text:
    if peer.lost:
        return Text("kill -9" if peer.fate == "killed" else "died", style="red")
    if peer.last_round is None:
        return Text("–")
    noun = " peers" if wide else "p"
    return Text(
        f"{len(peer.last_round.peers)}{noun} {peer.last_round.duration_s:.2f} s", style="" if peer.alive else "dim"
    )


def _loss_chart(state: DemoState, width: int) -> Text:
    if len(state.losses) < 2:
        peers = sum(not peer.newcomer for peer in state.peers.values()) or 4
        text = Text(_intro(peers, state.seconds), style="italic")
        lines = text.wrap(Console(width=width), width)
        return Text("\n").join([*lines, *[Text()] * max(0, _CHART_ROWS - len(lines))])
    points = [(point.at_s, point.loss) for point in state.losses]
    rows = block_chart(_over_time(points, width - _LABEL, max(state.seconds, points[-1][0])), _CHART_ROWS)
    sides = [f"loss {points[0][1]:.2f}", *[""] * (_CHART_ROWS - 2), f"now  {points[-1][1]:.2f}"]
    return Text("\n").join(
        Text(f"{side:<{_LABEL}}", style="dim").append(row, style="cyan") for side, row in zip(sides, rows, strict=True)
    )


def _over_time(points: Sequence[tuple[float, float]], cells: int, until_s: float) -> list[float | None]:
    """The value in each of `cells` equal spans of 0..`until_s`, on straight lines between points; None outside them."""
    values: list[float | None] = [None] * cells
    for (from_s, first), (to_s, last) in pairwise(points):
        begin, end = (min(cells - 1, int(cells * at_s / until_s)) for at_s in (from_s, to_s))
        for cell in range(begin, end + 1):
            values[cell] = first + (last - first) * ((cell - begin) / (end - begin) if end > begin else 1.0)
    return values


def block_chart(values: Sequence[float | None], rows: int) -> list[str]:
    """`values` as columns of block characters, `rows` lines high, the highest value full; None leaves a gap."""
    known = [value for value in values if value is not None]
    low, span = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0
    # The lowest column keeps one eighth, so that it is seen to be there.
    eighths = [0 if value is None else 1 + round((8 * rows - 1) * (value - low) / span) for value in values]
    return ["".join(_BLOCKS[max(0, min(8, level - 8 * row))] for level in eighths) for row in reversed(range(rows))]


def _log(happenings: Sequence[Happening], rows: int, width: int) -> Text:
    lines = []
    for line in happenings[-rows:]:
        sign, style = _TONES[line.tone]
        text = Text(f"{line.at_s:6.1f} s ", style="dim").append(f"{sign} {line.text}", style=style)
        text.truncate(width, overflow="ellipsis")
        lines.append(text)
    return Text("\n").join([*lines, *[Text()] * (rows - len(lines))])


def _status_line(state: DemoState) -> str:
    loss = f"{state.loss_last:.3f}" if state.loss_last is not None else "–"
    if state.phase == "baseline":
        last = state.baseline[-1] if state.baseline else None
        reached = f"{last.samples:,} of {state.samples:,} samples, loss {last.loss:.3f}" if last else "starting"
        return f"one process alone: {reached}"
    states = ", ".join(f"{peer.name} {peer.state}" for peer in state.peers.values())
    rate = sum(peer.work.samples_per_s for peer in state.living)
    return f"epoch {state.epoch}  loss {loss}  {rate:.0f} samples/s  ({states})"


def _intro(peers: int, seconds: float) -> str:
    return (
        f"{peers} processes of unequal speed train one language model together, over TCP and TLS, without a "
        f"coordinator. About {seconds / 3:.0f} s in, one is killed; about {seconds / 2:.0f} s in, a new one joins and "
        "takes the state from the others. At the end all hold the same weights."
    )
