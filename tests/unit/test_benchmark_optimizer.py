"""The figures of `benchmarks.optimizer`, from facts that are made up here."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import collect
from benchmarks.optimizer.judge import Lag, lags, percentile, time_to


def step(peer: str, epoch: int, at: float, reduced_s: float | None) -> dict[str, Any]:
    """What a trainer says of a step."""
    return {"peer": peer, "epoch": epoch, "at": at, "reduced_s": reduced_s}


def batches(epoch: int, *times: float) -> list[dict[str, Any]]:
    """What trainers say of batches that were computed in this epoch."""
    return [{"peer": "a", "batch": epoch, "at": at} for at in times]


def test_a_lag_runs_from_the_last_needed_sample_without_the_all_reduce() -> None:
    """Batches beyond those that a step takes come too late for it; the shortest all-reduce waits for nobody."""
    said = [*batches(1, 5.0, 6.0, 4.0, 6.5), step("a", 2, 7.0, 0.9), step("b", 2, 7.5, 0.4), step("c", 2, 8.0, 0.5)]
    (found,) = lags(said, peers=3, batches=3)
    assert found == pytest.approx(Lag(2, 1.1, 1.6, 0.4))


def test_a_step_that_begins_early_is_counted_from_the_last_batch_that_there_is() -> None:
    """A library that estimates when there will be enough begins with fewer; a peer that it leaves behind goes on."""
    said = [*batches(1, 5.0, 6.0, 8.0), step("a", 2, 7.0, 0.5), step("b", 2, 8.5, 0.5)]
    assert lags(said, peers=2, batches=3) == [Lag(2, 1.25, 2.0, 0.5)]


def test_steps_without_all_peers_or_without_a_round_have_no_lag() -> None:
    """Nor has the first one, in which the peers meet; what is saved is no step."""
    first = [*batches(0, 1.0), step("a", 1, 2.0, 0.1), step("b", 1, 2.0, 0.1)]
    downloaded = [*batches(1, 3.0), step("a", 2, 4.0, 0.1), step("b", 2, 9.0, None)]
    saved = [{"peer": "b", "epoch": 2, "at": 4.0, "saved": "x"}]
    assert lags(first + downloaded + saved, peers=2, batches=1) == []


def test_the_loss_is_reached_when_it_is_first() -> None:
    """A later rise changes nothing; never is infinite."""
    losses = [(1.0, 7.0), (2.0, 5.5), (3.0, 6.1), (4.0, 5.0)]
    assert time_to(losses, 5.5) == 2.0
    assert time_to(losses, 4.9) == math.inf


def test_percentiles_are_values_that_were_measured() -> None:
    """And of nothing there is none."""
    assert [percentile([3.0, 1.0, 2.0], p) for p in (0, 50, 90, 100)] == [1.0, 2.0, 3.0, 3.0]
    assert math.isnan(percentile([], 50))


def test_lines_of_the_table() -> None:
    """Ratios are of the same turn; a run that never came to the loss is none; the bar is for both lags."""

    def run(library: str, turn: int, seconds: float, *median: float) -> dict[str, Any]:
        its = [{"median": each, "worst": 2 * each} for each in median]
        return {"library": library, "case": "4", "turn": turn, "seconds": seconds, "lags": its}

    runs = [run("shoal", 0, 10.0, 0.03), run("shoal", 1, 20.0, 0.05), run("hivemind", 0, 30.0, 0.8)]
    rows = collect.time_to_loss({"cases": ["4"], "runs": [*runs, run("hivemind", 1, math.inf)]})
    assert [(row.line, row.measured, row.its) for row in rows] == [
        ("time to a loss, 4 peers", 15.0, 30.0),
        ("a step of 4 peers beyond the all-reduce, median peer", 0.04, 0.8),
        ("a step of 4 peers beyond the all-reduce, worst peer", 0.08, 1.6),
    ]
    assert rows[0].ratio == (3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="shoal did not come to the loss in the case '4'"):
        collect.time_to_loss({"cases": ["4"], "runs": [run("shoal", 0, math.inf)]})
