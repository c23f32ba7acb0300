"""Replays of newcomers: slow lines, several at once, and those that lose whom they came by."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.truth.kit import Job, Trainee, Verdict, apart, changed, joined, train
from benchmarks.truth.peers import Failed, Peers
from shoal.run.decide.phases import RunPhase

__all__ = ["REPLAYS"]

HELLO = 6
STEP_BYTES = 4 * 66_049

# ---------------------------------------------------------------------------------------------------------- slow lines


def large() -> nn.Module:
    """About 66,000 values: 0.26 MB in each step, with AdamW a state of 0.8 MB."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))


def over_a_line(download_epochs: int, newcomers: int = 1, batch_s: float = 0.1) -> Verdict:
    """Newcomers at two peers, whose lines carry, for each, a state in so many epochs beside the steps of these epochs.

    With AdamW a state is three times as large as a step.
    """
    epochs, epoch_s = 3 * download_epochs + 30, 5 * batch_s
    line = newcomers * STEP_BYTES * (1 + 3 / download_epochs) / epoch_s
    common: dict[str, Any] = {"epochs": epochs, "target": 160, "batch": 16, "pace_s": batch_s, "model": large}
    with Peers() as peers:
        old = joined(peers, [Job(index=i, dht={"state_upload_limit": line / 2}, **common) for i in range(2)])
        entry = dict(old[0].said)["address"]
        old[0].until_epoch(HELLO)
        new = [peers.start(train, job=Job(index=2 + i, entries=(entry,), **common)) for i in range(newcomers)]
        for each in new:
            each.wait("address")
        came = old[0].latest("epoch")[0]
        reports = [each.result() for each in (*new, *old)]
    fresh = reports[:newcomers]
    since = [min(report.steps, default=epochs) for report in fresh]
    taken = min(sum(n > 1 for n in r.steps.values()) / (epochs + 1 - s) for r, s in zip(fresh, since, strict=True))
    downloads = [report.downloads for report in fresh]
    differ, seen = apart(reports, since=max(since))
    # Beside the steps the download takes longer than those epochs; then it must be there, and stay.
    held = max(since) <= came + download_epochs + 20 and set(downloads) == {1} and taken >= 0.9 and not differ and seen
    took = max(report.values.get("download_s", 0.0) for report in fresh) / epoch_s
    measured = f"{downloads} downloads, of {took:.1f} epochs; came at epoch {came}, take part from {since} on"
    return Verdict(bool(held), f"{measured}, in {taken:.0%}; {differ} of {seen} differ")


def quick_newcomer() -> Verdict:
    """A newcomer whose download takes an epoch."""
    return over_a_line(1, batch_s=0.2)


def slow_newcomer() -> Verdict:
    """A newcomer whose download takes five epochs."""
    return over_a_line(5)


def slowest_newcomer() -> Verdict:
    """A newcomer whose download takes 20 epochs."""
    return over_a_line(20)


def several_newcomers() -> Verdict:
    """Four newcomers at once, whose downloads take five epochs."""
    return over_a_line(5, 4)


# --------------------------------------------------------------------------------------------------- whom they came by


def tell_when_behind(trainee: Trainee) -> None:
    """Say it when the state of a run that is further is known, and being fetched."""

    def watch() -> None:
        while trainee.swarm.collaboration.phase is not RunPhase.BEHIND:
            time.sleep(0.05)
        trainee.line.say("behind")

    threading.Thread(target=watch, daemon=True).start()


def donor_dies() -> Verdict:
    """The only donor is killed while a newcomer downloads: no epoch 0 in silence."""
    wait_s = 12.0
    common: dict[str, Any] = {"target": 32, "batch": 16, "pace_s": 0.1, "model": large}
    with Peers() as peers:
        old = peers.start(train, job=Job(epochs=1000, dht={"state_upload_limit": 32_768.0}, **common))
        entry = old.wait("address")
        old.until_epoch(HELLO)
        options = {"load_state_timeout": wait_s}
        job = Job(index=1, epochs=6, entries=(entry,), options=options, begin=tell_when_behind, **common)
        new = peers.start(train, job=job)
        new.wait("behind")
        time.sleep(2.0)
        old.kill()
        began = time.monotonic()
        try:
            new.until_epoch(1, 3 * wait_s)
            after_s = time.monotonic() - began
            texts = new.result().warnings
        except (Failed, TimeoutError) as error:
            after_s, texts = 3 * wait_s, [str(error)]
    told = [text for text in texts if re.search("epoch 0|alone|begins|StateUnavailable", text)]
    measured = f"epoch 1 {after_s:.0f} s after the death, {f'told: {told[0][:150]}' if told else 'not a word of it'}"
    # Two of the seconds had passed, and a batch takes a while.
    return Verdict(bool(told) and after_s > wait_s - 4, measured)


def entry_dies() -> Verdict:
    """The only entry of a newcomer is killed 0.3 s after it has joined: it trains with the others, or says that not."""
    epochs = 60
    jobs = [Job(index=i, epochs=epochs, target=64 * 3, batch=16, pace_s=0.1) for i in range(4)]
    with Peers() as peers:
        old = joined(peers, jobs[:3])
        entry = dict(old[0].said)["address"]
        old[0].until_epoch(HELLO)
        new = peers.start(train, job=changed(jobs[3], entries=(entry,)))
        new.wait("address")
        time.sleep(0.3)
        old[0].kill()
        reports = [each.result() for each in (new, *old[1:])]
    alone = sum(count == 1 for count in reports[0].steps.values())
    shared = len(reports[0].steps) - alone
    differ, seen = apart(reports, since=min(reports[0].steps))
    told = reports[0].warned("alone")
    measured = f"{shared} epochs together, {alone} alone, {told} warnings of that; {differ} of {seen} differ"
    return Verdict((shared > epochs / 2 and not alone and not differ) or (not shared and told > 0), measured)


REPLAYS: tuple[Callable[[], Verdict], ...] = (
    quick_newcomer,
    slow_newcomer,
    slowest_newcomer,
    several_newcomers,
    donor_dies,
    entry_dies,
)
