"""The demo's supervisor with real processes, real kills and real signals; only the training is played."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import demo_runner

RUNNER = str(Path(demo_runner.__file__))
LONG_S = 60.0
"""No wait in here is longer; all of them end far earlier."""


def until(condition: Callable[[], Any]) -> Any:
    """What `condition` returns, as soon as it is true."""
    end_s = time.monotonic() + LONG_S
    pause = threading.Event()
    while time.monotonic() < end_s:
        if found := condition():
            return found
        pause.wait(0.02)
    raise TimeoutError("it did not happen")


def read(record: Path) -> dict[str, Any]:
    """The JSON file; empty if there is none yet."""
    return json.loads(record.read_text()) if record.exists() else {}


def lives(pid: int) -> bool:
    """Whether the process runs (a dead one that nobody has waited for yet does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def texts(found: dict[str, Any]) -> list[str]:
    """What the log says."""
    return [text for _, text in found["log"]]


def planned_kills(found: dict[str, Any]) -> int:
    """How many peers the demo killed itself."""
    return sum(text.startswith("kill -9") for text in texts(found))


@contextlib.contextmanager
def supervisor(record: Path, **told: Any) -> Iterator[subprocess.Popen[str]]:
    """The supervisor in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path]))}
    command = [sys.executable, RUNNER, json.dumps({"record": str(record), **told})]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def pids_of(record: Path, count: int, epochs: int = 1) -> list[int]:
    """The peers' pids, once `count` have been started and the run has come to `epochs`."""

    def found() -> list[int] | None:
        now = read(record)
        return now["pids"] if now and len(now["pids"]) >= count and now["epochs"] >= epochs else None

    pids: list[int] = until(found)
    return pids


def test_run_kills_one_takes_one_in_and_ends_with_equal_weights(tmp_path: Path) -> None:
    """The whole story, and every field of the JSON file."""
    record = tmp_path / "run.json"
    assert demo_runner.run(record=record, seconds=4, peers=3) == 0
    found = read(record)
    assert found["exit_reason"] == "completed"
    assert (found["peers_started"], found["killed"], found["joined"]) == (3, 1, 1)
    # Seed 1 of 2 candidates: the third peer is killed; the fourth name is the newcomer's.
    assert found["weights_sha256"] == {f"id-of-{name}": "a" * 64 for name in ("oak", "elm", "yew")}
    assert len(found["epoch_times_s"]) == found["epochs"] > 10
    assert found["epoch_times_s"] == sorted(found["epoch_times_s"])
    gaps = [late - early for early, late in zip(found["epoch_times_s"], found["epoch_times_s"][1:], strict=False)]
    assert found["max_stall_s"] == pytest.approx(max(gaps), abs=0.01)
    assert found["samples"] == 16 * found["epochs"]
    assert found["loss_first"] == 8.0
    assert found["loss_last"] < 8.0
    assert found["baseline_loss_last"] == pytest.approx(found["loss_last"])
    assert found["baseline_complete"]
    assert found["baseline_samples"] == found["samples"]
    assert (found["state_download_s"], found["state_download_bytes"]) == (0.01, 1000)
    assert len(found["pids"]) == 4
    assert not any(lives(pid) for pid in found["pids"])


@pytest.mark.long
def test_two_kills_from_outside_are_survived(tmp_path: Path) -> None:
    """Two peers killed by somebody else at once: the run completes, with a newcomer as planned."""
    record = tmp_path / "run.json"
    with supervisor(record, seconds=4, peers=4) as process:
        first, *_, last = pids_of(record, 4)
        os.kill(first, signal.SIGKILL)
        os.kill(last, signal.SIGKILL)
        assert process.wait(LONG_S) == 0
    found = read(record)
    assert (found["killed"], found["joined"]) == (2 + planned_kills(found), 1)
    assert len(found["weights_sha256"]) == 5 - found["killed"]


@pytest.mark.long
def test_kills_before_the_first_epoch_are_survived(tmp_path: Path) -> None:
    """Peers that die while they load are no reason to stop."""
    record = tmp_path / "run.json"
    with supervisor(record, seconds=3, peers=4) as process:
        for pid in pids_of(record, 4, epochs=0)[:2]:
            os.kill(pid, signal.SIGKILL)
        assert process.wait(LONG_S) == 0
    assert read(record)["killed"] >= 2


@pytest.mark.long
def test_newcomer_and_another_killed_from_outside_are_survived(tmp_path: Path) -> None:
    """The newcomer dies, and one more on top of the planned kill: the rest finishes."""
    record = tmp_path / "run.json"
    with supervisor(record, seconds=4, peers=4) as process:
        pids = pids_of(record, 5)
        os.kill(pids[4], signal.SIGKILL)
        os.kill(pids[0], signal.SIGKILL)
        assert process.wait(LONG_S) == 0
    found = read(record)
    assert found["killed"] == 2 + planned_kills(found)
    assert len(found["weights_sha256"]) == 5 - found["killed"]


def test_kill_while_the_last_epochs_run_is_survived(tmp_path: Path) -> None:
    """A peer that dies after the end was announced does not hold up the end."""
    record = tmp_path / "run.json"
    with supervisor(record, seconds=2, peers=3, limits={"margin_s": 2.0}) as process:
        until(lambda: read(record).get("phase") == "stopping")
        alive = [pid for pid in read(record)["pids"] if lives(pid)]
        os.kill(alive[0], signal.SIGKILL)
        assert process.wait(LONG_S) == 0
    found = read(record)
    assert found["killed"] == 1 + planned_kills(found)


def test_all_peers_dead_ends_the_run_with_exit_code_1(tmp_path: Path) -> None:
    """Nothing is waited for when nobody is left."""
    record = tmp_path / "run.json"
    with supervisor(record, seconds=60, peers=2) as process:
        for pid in pids_of(record, 2):
            os.kill(pid, signal.SIGKILL)
        assert process.wait(LONG_S) == 1
    assert read(record)["exit_reason"] == "no peer is left"


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"oak": "other weights"}, "the peers hold different weights: "),
        ({"oak": "other epoch"}, "the peers stopped at different epochs: "),
        ({"oak": "deaf"}, "oak did not reach the last epoch within 1 s"),
        (dict.fromkeys(("oak", "elm", "fir"), "rising loss"), "the loss did not fall: "),
        ({"baseline": "crash"}, "the single process failed: RuntimeError: the baseline broke"),
    ],
)
def test_run_that_proves_nothing_fails_and_says_why(tmp_path: Path, faults: dict[str, str], reason: str) -> None:
    """Exit code 1, the reason in the file, and no process left."""
    record = tmp_path / "run.json"
    assert demo_runner.run(record=record, seconds=1.5, peers=2, faults=faults, limits={"stop_s": 1.0}) == 1
    found = read(record)
    assert found["exit_reason"].startswith(reason)
    assert not any(lives(pid) for pid in found["pids"])


def test_peer_that_breaks_is_reported_with_its_last_words(tmp_path: Path) -> None:
    """A peer that ends with an error counts as lost; what it said last stands in the log."""
    record = tmp_path / "run.json"
    assert demo_runner.run(record=record, peers=3, faults={"elm": "crash"}) == 0
    found = read(record)
    assert found["killed"] == 1
    assert "elm died (exit code 1): RuntimeError: no more memory" in texts(found)


def test_output_that_is_no_message_is_passed_over(tmp_path: Path) -> None:
    """A library that prints does not disturb the run."""
    record = tmp_path / "run.json"
    assert demo_runner.run(record=record, peers=2, faults={"oak": "chatter"}) == 0


def test_peer_that_falls_silent_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that closes its stdout can no longer be followed: it is killed and counts as lost."""
    monkeypatch.setattr("shoal.demo.children._DRAIN_S", 0.2)
    record = tmp_path / "run.json"
    assert demo_runner.run(record=record, peers=3, faults={"elm": "mute"}) == 0
    assert "elm died (signal 9)" in texts(read(record))


def test_first_ctrl_c_leaves_in_order(tmp_path: Path) -> None:
    """Peers are told to leave, none is killed, the code is 130."""
    record = tmp_path / "run.json"
    with supervisor(record, seconds=60, peers=3) as process:
        pids = pids_of(record, 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG_S) == 130
    found = read(record)
    assert found["exit_reason"] == "interrupted"
    assert found["killed"] == 0
    assert not any(lives(pid) for pid in pids)


def test_seven_seconds_without_a_word_after_ctrl_c_in_the_demo(tmp_path: Path) -> None:
    """A peer that has met no other (it loads torch, say) is not waited for, and is no death; the log says so."""
    record = tmp_path / "run.json"
    with supervisor(record, seconds=60, peers=2, faults={"oak": "mute", "elm": "mute"}) as process:
        pids = until(lambda: read(record).get("pids", [])[1:] and read(record)["pids"])
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG_S) == 130
    assert "all peers leave; Ctrl+C again ends everything at once" in texts(read(record))
    assert not any("died" in text for text in texts(read(record)))
    assert not any(lives(pid) for pid in pids)


def test_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """A peer that does not leave is not waited for after the second Ctrl+C."""
    record = tmp_path / "run.json"
    with supervisor(record, seconds=60, peers=2, limits={"leave_s": 3600}) as process:
        pids = pids_of(record, 2)
        os.kill(pids[0], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        until(lambda: read(record).get("phase") == "leaving")
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG_S) == 130
    until(lambda: not any(lives(pid) for pid in pids))


def test_kill_of_the_supervisor_leaves_no_process(tmp_path: Path) -> None:
    """Children notice the end of their pipe, whatever they are doing."""
    record = tmp_path / "run.json"
    with supervisor(record, seconds=60, peers=3) as process:
        pids = pids_of(record, 3)
        process.kill()
        until(lambda: not any(lives(pid) for pid in pids))


def test_ctrl_c_of_the_terminal_does_not_reach_the_children(tmp_path: Path) -> None:
    """Every child leads a session of its own."""
    record = tmp_path / "run.json"
    with supervisor(record, seconds=60, peers=2):
        pids = pids_of(record, 2)
        assert [os.getsid(pid) for pid in pids] == pids


def test_file_is_complete_at_any_time(tmp_path: Path) -> None:
    """A reader gets all fields while the run goes on, and no temporary file stays."""
    record = tmp_path / "run.json"
    # The stand-ins go on by the wall clock: if the supervisor stood still for longer, they would be past the end.
    with supervisor(record, seconds=2, peers=2, limits={"margin_s": 2.0}) as process:
        phases = set()
        while process.poll() is None:
            phases.add(read(record).get("phase"))
        phases.add(read(record).get("phase"))  # the last one may be written right before the end
        assert process.returncode == 0, texts(read(record))
    assert {"starting", "training", "done"} <= phases
    assert list(tmp_path.iterdir()) == [record]


def test_child_ends_with_its_pipe_whatever_it_is_doing() -> None:
    """A child busy in Python code exits with code 3 when its pipe closes; Ctrl+C does nothing to it."""
    busy = (
        "import os, signal; from shoal.demo.lifeline import Lifeline; from shoal.events import Warned;"
        "line = Lifeline.hold(); os.kill(os.getpid(), signal.SIGINT); line.say(Warned(where='w', message='busy'))\n"
        "while True: pass"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path]))}
    command = [sys.executable, "-c", busy]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        try:
            assert b"busy" in child.stdout.readline()
            child.stdin.close()
            assert child.wait(LONG_S) == 3
        finally:
            child.kill()
