"""What a machine does to its peer: it stops it, interrupts it, has a wrong clock, or too little memory."""

from __future__ import annotations

import logging
import random
import re
import resource
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.hardships.kit import address_of, jobs, left, pace, paces, swarm
from benchmarks.truth.kit import Job, Report, Trainee, Verdict, Warnings, apart, changed, join, joined, pass_gate, train
from benchmarks.truth.peers import Failed, Line, Peers

__all__ = ["REPLAYS"]

_FROZEN_S = 70.0
_SIGNALS = 300
_HOURS_S = 2 * 3600.0
_ROOM_BYTES = 24 << 20


def frozen() -> Verdict:
    """All peers are stopped for 70 s, as a laptop's lid does: all go on."""
    with Peers() as peers:
        those = swarm(peers, jobs(4))
        for each in those:
            each.signal(signal.SIGSTOP)
        time.sleep(_FROZEN_S)
        for each in those:
            each.signal(signal.SIGCONT)
        time.sleep(5.0)
        rates = paces(those, 10.0)
        reports = left(those)
    alarms = sum(report.warned("clock", "clocks") for report in reports)
    measured = f"{min(rates):.1f} to {max(rates):.1f} epochs a second 5 s later, {alarms} warnings about clocks"
    return Verdict(held=min(rates) > 1.0 and not alarms, measured=measured)


def interrupted(line: Line, job: Job) -> Report:
    """Train as others do, and go on after each Ctrl+C, wherever it comes."""
    import shoal

    trainee, interrupts = Trainee(job, line), 0
    logging.getLogger("shoal").addHandler(Warnings(trainee.report.warnings))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what runs in the background
    with shoal.DHT(job.entries, start=True) as dht:
        dht.events.subscribe(trainee.note)
        line.say("address", str(dht.get_visible_maddrs()[0]))
        trainee.swarm = swarm = join(trainee, dht)
        swarm.announce_end(job.epochs)
        pass_gate(line, job)
        leaving = False
        while not leaving:
            try:
                while not leaving:
                    time.sleep(job.pace_s)
                    job.loss(trainee).backward()
                    swarm.step()
                    swarm.zero_grad()
                    trainee.saw()
                    leaving = line.heard("leave")
            except KeyboardInterrupt:
                interrupts += 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        trainee.report.values["interrupts"] = interrupts
    return trainee.report


def signals() -> Verdict:
    """300 real Ctrl+C at random moments of one peer's loop: it trains on, with the same weights as the other.

    A step that was interrupted in the middle has weights of its own, until those of the other peer are here.
    """
    draw = random.Random(1)
    with Peers() as peers:
        those = joined(peers, jobs(2), interrupted)
        for each in those:
            each.until_steps(5)
        for _ in range(_SIGNALS):
            those[1].signal(signal.SIGINT)
            time.sleep(draw.uniform(0.0, 0.1))
            for each in those:
                each.latest("epoch")
        time.sleep(2.0)
        rates = paces(those, 5.0)
        reports = left(those)
    differ, common = apart(reports)
    came, halves = reports[1].values["interrupts"], reports[1].warned("step was interrupted")
    after, _ = apart(reports, since=max(reports[0].weights) - 10)
    measured = (
        f"{came} interrupts, then {min(rates):.1f} epochs a second; weights differ in {differ} of {common} epochs, "
        f"and in {after} of the last 10; {halves} steps were interrupted in the middle"
    )
    held = min(rates) > 1.0 and came > _SIGNALS / 2 and differ <= halves and not after
    return Verdict(held=held, measured=measured)


def with_wrong_clock(line: Line, job: Job) -> Report:
    """Train on a machine whose clock is two hours ahead."""
    from shoal.base.clock import SystemClock

    true: Any = SystemClock.time
    SystemClock.time = lambda self: true(self) + _HOURS_S  # type: ignore[method-assign]
    return train(line, job)


def clocks() -> Verdict:
    """One peer's clock is two hours ahead: it trains with the others, and is told by how much."""
    with Peers() as peers:
        those = swarm(peers, jobs(2))
        entry = next(value for name, value in those[0].said if name == "address")
        late = peers.start(with_wrong_clock, job=changed(jobs(1)[0], index=9, entries=(entry,), target=160))
        time.sleep(15.0)
        reports = left([*those, late])
    shared = sum(count > 2 for count in reports[2].steps.values())
    told = reports[2].warned("clock", "clocks")
    measured = f"{shared} epochs together within 15 s, {told} warnings about clocks there"
    return Verdict(held=shared >= 10 and told >= 1, measured=measured)


def wide() -> nn.Module:
    """16 MB of parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 1 << 15), nn.Linear(1 << 15, 64), nn.Linear(64, 1))


def plain(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Without statistics."""
    return torch.optim.SGD(parameters, lr=1e-3)


def leave_no_room(_: Trainee) -> None:
    """From now on the process may have 24 MB more than it has."""
    [size] = re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_AS, ((int(size) << 10) + _ROOM_BYTES,) * 2)


def little_memory() -> Verdict:
    """A newcomer's memory is used up as it downloads the state: its program is told, and the others train on."""
    with Peers() as peers:
        work: dict[str, Any] = {"model": wide, "optimizer": plain, "pace_s": 0.1, "target": 48}
        those = swarm(peers, jobs(2, **work))
        calm = pace(those[0], 15.0)
        job = changed(jobs(1, **work)[0], index=9, entries=(str(address_of(those[0])),), begin=leave_no_room)
        new, told = peers.start(train, job=job), ""
        try:
            new.result(60.0)
        except Failed as error:
            told = str(error)
        after = pace(those[0], 15.0)
        left(those)
    measured = f"{calm:.1f} epochs a second, then {after:.1f}; its program: {told.splitlines()[0][:80]}"
    return Verdict(held=after > 0.8 * calm and "Error" in told, measured=measured)


REPLAYS = (frozen, signals, clocks, little_memory)
