"""What trains beside a round, and how a round in the background is timed."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

import pytest

from benchmarks.contenders import loops, worker
from benchmarks.contenders.loops import LOOPS
from benchmarks.contenders.worker import Pending, Times


@pytest.mark.parametrize("name", LOOPS)
def test_iterations_are_counted_until_it_is_enough(name: str) -> None:
    """Every loop can iterate."""
    asked = itertools.count()
    found = loops.run(name, lambda: next(asked) == 2)
    assert found["iterations"] == 2
    assert found["seconds"] > 0


def test_a_loop_is_made_before_its_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes, it then iterates for as long as it was told to."""
    now = itertools.count()
    made: list[int] = []

    def make() -> loops.Iteration:
        made.append(next(now))
        return lambda: None

    monkeypatch.setitem(LOOPS, "slow to make", make)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    assert loops.run_for("slow to make", 4.0)["iterations"] > 0
    assert made == [0]


def test_a_round_in_the_background_ends_when_its_result_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when somebody looks; and what went wrong is raised then."""
    clock = itertools.count(10)
    monkeypatch.setattr(worker, "now", lambda: float(next(clock)))
    future: Future[Any] = Future()
    pending = Pending(1.0, future, lambda called, group, done: Times(called, float(group), done))
    assert not pending.done()
    future.set_result(5)
    next(clock)
    assert pending.done()
    assert pending.times() == Times(1.0, 5.0, 10.0)
    failed: Future[Any] = Future()
    pending = Pending(1.0, failed, lambda called, _, done: Times(called, called, done))
    failed.set_exception(RuntimeError("no group"))
    assert pending.done()
    with pytest.raises(RuntimeError, match="no group"):
        pending.times()
