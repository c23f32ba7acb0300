"""Processes that merge: one is killed in the middle of a merge, one stands still, one comes late."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.merging_peer import STRATEGIES
from tests.integration.workers import Talk

MISSED = 4
MORE = 120  # several a second: the end is to be ahead of each fragment when all have heard of it


def heard(talk: Talk, fits: Callable[[str, Any], bool]) -> Any:
    """What it says next that fits."""
    while True:
        what, value = json.loads(talk.line())
        if fits(what, value):
            return value


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "strategy", [pytest.param(each, marks=pytest.mark.long(full=each != "Decoupled")) for each in STRATEGIES]
)
def test_processes_that_merge_end_with_equal_anchors(strategy: str, tmp_path: Path) -> None:
    """They share a folder: each state is saved once there, the last one too, and who comes late goes on from it."""
    talks: list[Talk] = []

    def start(number: int = 0) -> Talk:
        command = [sys.executable, "-m", "tests.integration.merging_peer", strategy, str(tmp_path), str(int(number))]
        talk = Talk(command, fresh=True)  # of forks one did not come to the end
        talks.append(talk)
        talk.write(invites[0] if invites else "")
        invites.append(heard(talk, lambda what, _: what == "invite"))
        return talk

    invites: list[str] = []
    try:
        first, killed, stopped, other = start(), start(signal.SIGKILL), start(signal.SIGSTOP), start()
        heard(killed, lambda what, _: what == "struck")
        assert killed.wait() == -signal.SIGKILL
        late = start()
        heard(stopped, lambda what, _: what == "struck")
        # The others were in a merge with it: they go on when they do not wait for it any more.
        reached = heard(first, lambda what, _: what == "epoch")
        reached = heard(first, lambda what, value: what == "epoch" and value >= reached + MISSED)
        stopped.signal(signal.SIGCONT)
        reached = heard(late, lambda what, value: what == "epoch" and value > reached)
        alive = [first, stopped, other, late]
        for talk in alive:
            talk.write(str(reached + MORE))
        ends = [heard(talk, lambda what, _: what == "end") for talk in alive]
        assert [talk.wait() for talk in alive] == [0] * len(alive), [talk.errors() for talk in alive]
    finally:
        for talk in talks:
            talk.end()
    assert all(end == ends[0] for end in ends), ends
    assert [epoch for epoch, _ in ends[0][0]] == [reached + MORE] * 2
    saved = sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".")
    last = [name for name in saved if int(name.split("-")[1]) == reached + MORE]
    assert len(last) == 1, saved
    assert len(saved) <= 3, saved
