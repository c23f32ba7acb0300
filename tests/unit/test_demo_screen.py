"""The demo's screen, plain lines and picture, drawn from states without a run."""

from __future__ import annotations

import io
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from shoal.demo import messages as say
from shoal.demo.screen import block_chart, open_display, render
from shoal.demo.settings import DemoOptions
from shoal.demo.state import DemoState
from tests.unit.demo_kit import noted, round_of, stepped_into

NAMES = ("oak", "elm", "fir")


def story(*, ended: bool = False) -> tuple[DemoState, float]:
    """Three peers, one of them killed at 20 s, one that joins at 30 s; perhaps to the end."""
    state = DemoState(seconds=60)
    for index, name in enumerate(NAMES):
        state.started(name, 41230 + index, 0.1)
        state.said(name, say.Ready(peer_id=f"{name}-id", run_id="demo-1", addresses=(), parameters=1), 7.0)
        working = say.Working(
            state="training", samples=900, samples_per_s=100.0, bytes_sent=2 * 10**6, bytes_received=10**8
        )
        state.said(name, working, 8.0)
    for epoch in range(30):
        state.said("oak", stepped_into(epoch, 256), 9.0 + 0.7 * epoch)
        state.said("oak", say.HeldOutLoss(epoch=epoch, loss=7.7 - 0.1 * epoch), 9.0 + 0.7 * epoch)
    state.said("oak", round_of(3, 0.213), 29.4)
    state.killing("fir", 29.5)
    state.started("yew", 41239, 29.6, newcomer=True)
    state.said("yew", say.Working(state="training", epoch=29, samples_per_s=50.0), 30.0)
    if not ended:
        return state, 31.0
    state.stop_announced(29, 60.0)
    for name in ("oak", "elm", "yew"):
        state.said(name, say.Finished(epoch=29, weights_sha256="ab" * 32, loss=4.8), 61.0)
    for epoch, loss in ((0, 7.7), (10, 6.6), (29, 4.7)):
        state.said("baseline", say.BaselinePoint(epoch=epoch, samples=256 * epoch, loss=loss), 70.0)
    state.baseline_complete = True
    state.over("completed")
    return state, 81.0


def drawn(state: DemoState, now_s: float, width: int) -> list[str]:
    """The screen as lines of text."""
    console = Console(width=width, file=io.StringIO(), record=True, color_system=None)
    console.print(render(state, now_s))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("ended", [False, True])
def test_screen_fits_its_width_and_height(width: int, ended: bool) -> None:
    """Every line is as wide as the frame, and the number of lines never changes while it runs."""
    lines = drawn(*story(ended=ended), width)
    assert {len(line) for line in lines} == {width}
    assert len(lines) == 8 + 4 + 4 + 8


def test_screen_shows_each_peer_with_its_numbers() -> None:
    """State, rate, epoch, share, bytes and the last round stand in the peer's line."""
    oak, elm, fir, yew = (line.strip("│ ").split() for line in drawn(*story(), 120)[5:9])
    assert oak[:5] == ["oak", "41230", "training", "100", "29"]
    assert oak[6:] == ["40%", "2.0", "/", "100", "3", "peers", "0.21", "s"]
    assert elm[2] == "training"
    assert fir[:3] == ["fir", "41232", "DEAD"]
    assert fir[-2:] == ["kill", "-9"]
    assert yew[6] == "20%"


def test_killed_peer_is_red() -> None:
    """It is seen at once."""
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="standard", height=50)
    console.print(render(*story()))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1;31mfir" in output
    assert "\x1b[1;31mDEAD" in output


def test_time_bar_marks_kill_and_join_above_the_chart() -> None:
    """The marks stand in the columns of their time: 29.5 s and 30 s of 60 s."""
    bar = drawn(*story(), 80)[2].strip("│").strip()
    bar = bar.removeprefix("of 60 s").strip()
    assert (bar.index("✖"), bar.index("✚"), len(bar)) == (32, 33, 66)


def test_first_screen_says_what_will_happen() -> None:
    """Before anything has started there is something to read."""
    text = " ".join(" ".join(drawn(DemoState(seconds=60), 0.0, 80)).replace("│", "").split())
    assert "About 20 s in, one is killed; about 30 s in, a new one joins" in text


def test_low_terminal_gets_a_shorter_log() -> None:
    """With 24 lines all of it can be seen."""
    console = Console(width=80, height=24, file=io.StringIO(), force_terminal=True)
    console.print(render(*story()))
    assert len(console.file.getvalue().splitlines()) <= 24  # type: ignore[attr-defined]


def test_markup_in_messages_is_text() -> None:
    """What a peer says is shown as it is, not read as a style."""
    state, now_s = story()
    state.said("oak", noted("[red]x[/red] [/]"), now_s)
    assert any("oak: test: [red]x[/red] [/]" in line for line in drawn(state, now_s, 100))


def test_block_chart_is_full_at_the_highest_and_visible_at_the_lowest() -> None:
    """Two rows are sixteen steps; a gap stays empty."""
    assert block_chart([3.0, None, 2.0, 1.0], 2) == ["█ ▁ ", "█ █▁"]
    assert block_chart([5.0, 5.0], 1) == ["▁▁"]
    assert block_chart([], 2) == ["", ""]


def test_plain_lines_print_each_happening_once_and_then_the_result() -> None:
    """No escape codes, nothing twice, the proof at the end."""
    console = Console(width=80, file=io.StringIO(), highlight=False)
    display = open_display(DemoOptions(peers=3, report=None), console)
    state, now_s = story()
    display.show(state, now_s)
    display.show(state, now_s + 1)
    display.close(*story(ended=True))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in output
    assert output.count("kill -9 41232: fir is gone without a word") == 1
    assert output.count("epoch 29  loss 4.800  250 samples/s") == 1
    assert f"All 3 surviving peers hold identical weights at epoch 29: sha256 {'ab' * 32}\n" in output


def test_live_screen_gives_the_terminal_back() -> None:
    """The cursor is hidden while it runs and shown afterwards; the result stays below the screen."""
    console = Console(width=100, height=50, file=io.StringIO(), force_terminal=True)
    display = open_display(DemoOptions(peers=3, report=None), console)
    display.show(*story())
    display.close(*story(ended=True))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert output.index("\x1b[?25l") < output.rindex("\x1b[?25h") < output.index("All 3 surviving peers")


def test_headless_is_plain_also_in_a_terminal() -> None:
    """Nothing is drawn over."""
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    open_display(DemoOptions(headless=True, report=None), console).show(*story())
    assert "\x1b[?25l" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["whole", "without baseline", "cut short", "hardly begun"])
def test_picture_is_drawn_from_any_run_that_ended(tmp_path: Path, kind: str) -> None:
    """A PNG of the documented size, whatever is missing."""
    pytest.importorskip("matplotlib")
    from shoal.demo.report import draw_report

    state, _ = story(ended=True)
    if kind == "without baseline":
        state = replace(state, baseline=[])
    elif kind == "cut short":
        state = replace(state, baseline=state.baseline[:2], baseline_complete=False)
    elif kind == "hardly begun":
        state = DemoState(seconds=60)
    draw_report(state, tmp_path / "report.png")
    head = (tmp_path / "report.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert struct.unpack(">II", head[16:24]) == (1536, 1024)


def test_picture_leaves_matplotlibs_global_state_alone(tmp_path: Path) -> None:
    """Settings and pyplot's figures are the user's."""
    matplotlib = pytest.importorskip("matplotlib")
    from shoal.demo.report import draw_report

    before = dict(matplotlib.rcParams)
    draw_report(story(ended=True)[0], tmp_path / "report.png")
    assert dict(matplotlib.rcParams) == before


def test_supervisor_and_screen_do_without_torch() -> None:
    """The first picture must not wait for it."""
    import subprocess
    import sys

    script = (
        "import sys; import shoal.demo.swarm; from shoal.demo import DemoOptions, run_demo; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'matplotlib')))"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0
