"""A process that is frozen until the others of its run have ended it and left."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.integration.test_strategy_processes import heard
from tests.integration.workers import Talk

FROZEN_AT, SOON, LATE = 3, 7, 150
TOLD = {SOON: "ended without this peer", LATE: "this peer made its steps alone"}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "end", "shares"),
    [
        *(
            pytest.param(
                strategy, end, shares, marks=marks, id=f"{strategy}, {end}, {'one folder' if shares else 'apart'}"
            )
            for strategy, end, marks in (
                ("Decoupled, rarely", SOON, ()),
                ("StreamingDiLoCo, rarely", SOON, pytest.mark.long(full=True)),
                ("DiLoCo, rarely", SOON, pytest.mark.long(full=True)),
                ("StreamingDiLoCo, rarely", LATE, pytest.mark.long(full=True)),
            )
            for shares in (False, True)
        ),
        # Without a folder it waits for a quorum for ever, and says so.
        pytest.param("Decoupled, rarely", LATE, True, marks=pytest.mark.long(full=True)),
    ],
)
def test_a_peer_that_is_frozen_until_the_others_have_left(
    strategy: str, end: int, tmp_path: Path, *, shares: bool
) -> None:
    """It takes their last state from a folder that they share; without one it says that its weights are others.

    If it stands still for long, they have given it up, and cannot say to it that they have ended.
    """
    talks, invites = list[Talk](), list[str]()

    def start(folder: str) -> Talk:
        command = [sys.executable, "-m", "tests.integration.merging_peer", strategy, str(tmp_path / folder), "0"]
        talk = Talk(command, fresh=True)
        talks.append(talk)
        talk.write(invites[0] if invites else "")
        invites.append(heard(talk, lambda what, _: what == "invite"))
        return talk

    try:
        first, frozen, other = start("ours"), start("ours" if shares else "its"), start("ours")
        reached = heard(other, lambda what, _: what == "epoch")
        for talk in talks:
            talk.write(str(reached + end))
        heard(frozen, lambda what, value: what == "epoch" and value >= reached + FROZEN_AT)
        frozen.signal(signal.SIGSTOP)
        ends = [heard(talk, lambda what, _: what == "end") for talk in (first, other)]
        assert [first.wait(), other.wait()] == [0, 0]
        frozen.signal(signal.SIGCONT)
        own = heard(frozen, lambda what, _: what == "end")
        assert frozen.wait() == 0, frozen.errors()
        said = frozen.errors()
    finally:
        for talk in talks:
            talk.end()
    assert ends[0] == ends[1]
    assert (own == ends[0]) == shares, (own, ends, said)
    assert [said.count(each) for each in TOLD.values()] == [not shares and each == end for each in TOLD], said
