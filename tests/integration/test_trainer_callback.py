"""An ordinary Trainer with a `SwarmCallback`, in real processes."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.workers import Talk

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

Said = list[tuple[str, Any]]


def peer(folder: Path, epochs: int, pace_s: float = 0.005, *more: str) -> Talk:
    """A process that trains."""
    command = [sys.executable, "-m", "tests.integration.trainer_peer", str(folder), str(epochs), str(pace_s), *more]
    return Talk(command, library="transformers")


def start(talk: Talk, invite: str = "") -> str:
    """Let it join; returns its own invite."""
    talk.write(invite)
    kind, value = json.loads(talk.line())
    assert kind == "invite"
    return str(value)


def hear(talk: Talk, kind: str, enough: Any = lambda _: True) -> tuple[Any, Said]:
    """Its next word of this kind that is enough, and all that it says until then."""
    said: Said = []
    while True:
        line = talk.line()
        if line.startswith("["):
            said.append(tuple(json.loads(line)))
            if said[-1][0] == kind and enough(said[-1][1]):
                return said[-1][1], said


def end(talk: Talk) -> Said:
    """All that it says to its end, which is a good one."""
    said: Said = [tuple(json.loads(line)) for line in talk.rest() if line.startswith("[")]
    assert talk.wait() == 0, talk.errors()
    return said


def epochs_of(said: Said) -> dict[int, list[Any]]:
    """The weights, the name of the state, peers and samples of each epoch."""
    return {value[0]: value[1:] for kind, value in said if kind == "epoch"}


def check_agreement(*all_said: Said) -> None:
    """No epoch differs between two peers, and they end with equal weights."""
    epochs = [epochs_of(said) for said in all_said]
    common = set.intersection(*(set(each) for each in epochs))
    assert [epoch for epoch in sorted(common) if len({tuple(each[epoch][:2]) for each in epochs}) > 1] == []
    assert len({dict(said)["weights"] for said in all_said}) == 1


def test_two_trainers_hold_equal_weights_in_all_epochs(tmp_path: Path) -> None:
    """With each argument at its default that can be: warm-up, linear schedule, clipping, the short last batch."""
    with peer(tmp_path / "first", 60) as first, peer(tmp_path / "second", 60) as second:
        start(second, start(first))
        for talk in (first, second):
            talk.write("begin")
        said = [end(talk) for talk in (first, second)]
    check_agreement(*said)
    epochs = epochs_of(said[0])
    assert sum(peers == 2 for *_, peers, _ in epochs.values()) >= 50, epochs
    # Batches of 8 and, at the end of each pass of 45 samples, of 5.
    assert any(samples % 8 for *_, samples in epochs.values()), epochs
    for each in said:
        values = dict(each)
        assert values["end"][0] == 60
        assert values["rate"] == 0.0  # the linear schedule ends with the run
        assert values["log"]["swarm_epoch"] == 60
        assert any("swarm_loss" in value for kind, value in each if kind == "log")
        assert not [value for kind, value in each if kind == "warned"]
    begun = [dict(each)["begun"] for each in said]
    assert [sampler for sampler, _ in begun] == ["PeerSampler", "PeerSampler"]
    assert begun[0] != begun[1], "both draw the same samples"
    assert dict(said[0])["random"] != dict(said[1])["random"]


@pytest.mark.long
def test_two_trainers_merge(tmp_path: Path) -> None:
    """`max_steps` and the schedule count batches; the merges, of 5 batches of each in the mean, end the run."""
    with peer(tmp_path / "first", 48, 0.005, "merge") as first, peer(tmp_path / "second", 48, 0.01, "merge") as second:
        start(second, start(first))
        for talk in (first, second):
            talk.write("begin")
        said = [end(talk) for talk in (first, second)]
    assert len({dict(each)["weights"] for each in said}) == 1
    steps = 0
    for each in said:
        values = dict(each)
        assert values["end"][0] == 10
        assert values["log"]["swarm_epoch"] == 10
        assert [value[:32] for kind, value in each if kind == "warned"] == ["max_steps=48 is no multiple of t"]
        assert values["rate"] == 0.0  # the schedule is as long as the run
        steps += values["end"][1]
    assert steps >= 2 * 50


@pytest.mark.long(full=True)  # the sample has one that resumes, late, which is the same without a checkpoint
def test_a_late_trainer_downloads_before_its_first_batch(tmp_path: Path) -> None:
    """It has the state of the others before it computes anything, and ends with them."""
    with peer(tmp_path / "first", 100, 0.02) as first, peer(tmp_path / "second", 100, 0.02) as second:
        invite = start(first)
        first.write("begin")
        _, before = hear(first, "epoch", lambda value: value[0] >= 10)
        start(second, invite)
        second.write("begin")
        _, begun = hear(second, "begun")
        said = [before + end(first), begun + end(second)]
    check_agreement(*said)
    assert "downloaded" in dict(begun), begun
    assert min(epochs_of(said[1])) > 10
    assert any(peers == 2 for *_, peers, _ in epochs_of(said[1]).values())


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_trainer_that_was_killed_resumes_and_catches_up(tmp_path: Path) -> None:
    """By kill -9; the other one goes on; it resumes from its latest whole checkpoint, and takes over what it missed."""
    with peer(tmp_path / "first", 150, 0.02) as first, peer(tmp_path / "second", 150, 0.02) as second:
        invite = start(first)
        start(second, invite)
        for talk in (first, second):
            talk.write("begin")
        saved, _ = hear(second, "saved", lambda step: step >= 20)
        second.signal(signal.SIGKILL)
        second.wait()
        (tmp_path / "second" / "checkpoint-999").mkdir()  # it was about to save
        at, before = hear(first, "epoch")
        _, later = hear(first, "epoch", lambda value: value[0] >= at[0] + 10)
        with peer(tmp_path / "second", 150, 0.02, "resume") as again:
            start(again, invite)
            again.write("begin")
            _, begun = hear(again, "begun")
            said = [before + later + end(first), begun + end(again)]
    check_agreement(*said)
    assert dict(said[1])["resumed"] >= saved
    assert "downloaded" in dict(begun), begun
    assert min(epochs_of(said[1])) > at[0]


@pytest.mark.long
def test_all_trainers_were_killed_and_one_resumes_the_run(tmp_path: Path) -> None:
    """Nobody is there to download from: the run goes on at the checkpoint's epoch, with its schedule."""
    with peer(tmp_path, 40, 0.01) as first:
        start(first)
        first.write("begin")
        _, said = hear(first, "saved", lambda step: step >= 40)
        first.signal(signal.SIGKILL)
        first.wait()
    with peer(tmp_path, 40, 0.01, "resume") as again:
        start(again)
        again.write("begin")
        resumed = end(again)
    values, before = dict(resumed), epochs_of(said)
    assert values["resumed"] in (40, 50)
    assert min(epochs_of(resumed)) <= max(before) + 3
    assert min(epochs_of(resumed)) > 5
    assert values["end"][0] == 40
    assert values["rate"] == 0.0
