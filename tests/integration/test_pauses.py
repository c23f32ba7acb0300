"""Real processes that are stopped (SIGSTOP) while they train, and go on; and one whose clock is wrong by hours."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.workers import Worker, run_python


def run_together(count: int, stopped: Callable[[list[Worker]], None], *, ahead_s: float = 0.0) -> str:
    """Peers train; in the middle of it something is done to them. All have the same weights at the end.

    Returns:
        What the last one has written to stderr.
    """
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker()) for _ in range(count)]
        invites: list[str] = []
        for seed, worker in enumerate(workers):
            ahead = ahead_s if seed == count - 1 else 0.0
            worker.start("keep_training", initial_peers=invites[:1], seed=seed, clock_ahead_s=ahead)
            invites += worker.expect("joined")[1]
            worker.expect("ready")
        for worker in workers:
            while worker.expect("epoch")[1] < count:
                pass
        stopped(workers)
        end = max(worker.latest("epoch")[0] for worker in workers) + 50
        for worker in workers:
            worker.tell(end)  # all announce it: no single peer ends a run, and two ends would be two wishes
        weights = {worker.expect("weights") for worker in workers[:-1]}
        last: list[tuple[str, Any]] = []
        while not last or last[-1][0] != "weights":
            kind, value = json.loads(workers[-1].line())
            assert kind not in ("failed", "ended"), value
            last.append((kind, value))
        assert weights == {last[-1][1]}
        assert [value for kind, value in last if kind == "epoch"][-1][1] == count
        for worker in workers:
            worker.tell(None)
            worker.finish()
        return workers[-1].errors()


def pause(workers: list[Worker], duration_s: float) -> None:
    """Stop these for so long."""
    for worker in workers:
        worker.signal(signal.SIGSTOP)
    threading.Event().wait(duration_s)
    for worker in workers:
        worker.signal(signal.SIGCONT)


def test_no_answer_from_shoals_own_thread_after_a_stop() -> None:
    """D1: a stop of 3 s passes a limit of 1 s in neither the loop nor the thread that waits for it."""
    done = run_python(
        """
import asyncio, os, subprocess
from shoal.runtime.thread import LoopThread

thread = LoopThread("test")

async def work():
    async with asyncio.timeout(0.9):
        await asyncio.sleep(0.3)
    return 7

async def nothing():
    pass

stopper = subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"])
for _ in range(3):
    assert thread.run(work(), 1.0) == 7
stopper.wait()
thread.stop(nothing, 5.0)
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("who", ["one", pytest.param("all", marks=pytest.mark.long(full=True))])
def test_a_peer_that_is_stopped_for_a_second_goes_on(who: str) -> None:
    """Within a round or a batch, wherever it is."""

    def stopped(workers: list[Worker]) -> None:
        for _ in range(2):
            pause(workers[:1] if who == "one" else workers, 1.0)

    warned = run_together(2, stopped)
    assert "clock" not in warned
    assert "Error" not in warned


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "who", [*(pytest.param(each, marks=pytest.mark.long(full=True)) for each in ("one", "all but one")), "all"]
)
def test_a_peer_that_was_stopped_dies_when_it_wakes(who: str, soak: Callable[[int, int], int]) -> None:
    """D1: `no answer from shoal's own thread within 65 s`, in four peers of five."""

    def stopped(workers: list[Worker]) -> None:
        for duration_s in (12.0, 70.0, 200.0)[: soak(1, 3)]:
            pause({"one": workers[:1], "all but one": workers[1:], "all": workers}[who], duration_s)

    warned = run_together(3, stopped)
    assert "clock" not in warned
    assert "Error" not in warned


@pytest.mark.long
def test_a_process_whose_clock_is_two_hours_wrong_trains_with_the_others() -> None:
    """It says so, and nothing else comes of it."""
    warned = run_together(2, lambda workers: None, ahead_s=-7200.0)
    assert "the clock of this machine is 7200 s behind that of the network" in warned
    assert "Error" not in warned
