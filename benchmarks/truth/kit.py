"""What the replays are made of: an ordinary training loop with `shoal.Optimizer`, of which a `Job` says what differs.

`train` runs it in a process of its own; the `Report` that it gives says what it saw.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

import shoal
from benchmarks.truth.peers import LIMIT_S, Line, Peer, Peers
from shoal.events import EpochAdvanced, Event, StateDownloaded

torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # the first one imports half of torch: before the forks

__all__ = [
    "RUN",
    "Job",
    "Report",
    "Verdict",
    "Warnings",
    "apart",
    "changed",
    "counted",
    "digest",
    "join",
    "joined",
    "no_hook",
    "pass_gate",
    "perceptron",
    "status",
    "together",
    "train",
]


RUN = "truth"
"""The run that all train."""


class CannotRunError(Exception):
    """This machine lacks what a replay needs; the message says what."""


class Verdict(NamedTuple):
    """What a replay found."""

    held: bool
    measured: str


# ------------------------------------------------------------------------------------------------------------- training


def perceptron() -> nn.Module:
    """A small model, the same on all peers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """What most replays train with."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def no_hook(_: Trainee) -> None:
    """Nothing but the loop."""


def regression(trainee: Trainee) -> torch.Tensor:
    """The loss of one batch of this peer's own."""
    width = next(trainee.model.parameters()).shape[-1]
    parameter = next(trainee.model.parameters())
    inputs = torch.randn(trainee.job.batch, width, generator=trainee.draw).to(parameter.dtype)
    loss: torch.Tensor = (trainee.model(inputs).float() - inputs.float().sum(1, keepdim=True).sin()).square().mean()
    return loss


@dataclass(frozen=True)
class Job:
    """What one peer does in a run. All that is called is a function of a module, so that it can be sent to a process.

    Attributes:
        index: draws the batches.
        entries: addresses of the others.
        epochs: announced as the end of the run.
        target: samples of the whole swarm in an epoch.
        batch: samples of each step.
        pace_s: how long a batch takes.
        model: makes it.
        optimizer: makes the one of torch, from the parameters that require a gradient.
        scheduler: makes one from the optimizer, for `shoal.Optimizer`.
        loss: of one batch.
        begin: called once, before the first batch.
        hook: called after each backward pass, before `step`.
        zero: whether `zero_grad` is called.
        gate: wait for "go" before the first batch, so that all begin together.
        wait: at the end of the run, stay until "leave" is heard.
        give_model: give the model as well.
        extra: names of buffers that are given as `extra_tensors`.
        dht: more arguments of `shoal.DHT`.
        options: more arguments of `shoal.Optimizer`.
    """

    index: int = 0
    entries: tuple[str, ...] = ()
    epochs: int = 100
    target: int = 64
    batch: int = 8
    pace_s: float = 0.005
    model: Callable[[], nn.Module] = perceptron
    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = adamw
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    loss: Callable[[Trainee], torch.Tensor] = regression
    begin: Callable[[Trainee], None] = no_hook
    hook: Callable[[Trainee], None] = no_hook
    zero: bool = True
    gate: bool = False
    wait: bool = False
    give_model: bool = False
    extra: tuple[str, ...] = ()
    dht: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """How it went, as the peer itself saw it.

    Attributes:
        weights: digest of all parameters and buffers, by the epoch at which they were first seen.
        statistics: digest of what the inner optimizer keeps, likewise.
        steps: how many peers took each swarm step that this one took itself.
        downloads: how many states it downloaded.
        warnings: what the log said at WARNING or above.
        end: digest of parameters and buffers at the end.
        values: what a hook left.
    """

    weights: dict[int, str] = field(default_factory=dict)
    statistics: dict[int, str] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    downloads: int = 0
    warnings: list[str] = field(default_factory=list)
    end: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def warned(self, *words: str) -> int:
        """How many warnings have one of these words."""
        pattern = re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)
        return sum(pattern.search(each) is not None for each in self.warnings)


class Trainee:
    """One peer while it trains, as its hooks see it."""

    def __init__(self, job: Job, line: Line) -> None:
        self.job, self.line, self.report = job, line, Report()
        self.model = job.model()
        self.optimizer = job.optimizer([each for each in self.model.parameters() if each.requires_grad])
        self.draw = torch.Generator().manual_seed(1000 + job.index)
        self.batches = 0
        self.kept: dict[str, Any] = {}
        self.swarm: shoal.Optimizer

    def saw(self) -> None:
        """Note the epoch's weights, the first time."""
        epoch = self.swarm.local_epoch
        if epoch not in self.report.weights:
            self.report.weights[epoch] = digest(list(self.model.state_dict().values()))
            self.report.statistics[epoch] = digest(self.optimizer.state_dict().get("state"))
            shared = sum(count > 1 for count in self.report.steps.values())
            self.line.say("epoch", (epoch, self.report.weights[epoch], shared))

    def note(self, event: Event) -> None:
        """An event of shoal's, in its own thread."""
        if isinstance(event, EpochAdvanced):
            self.report.steps[event.epoch] = event.peers
        elif isinstance(event, StateDownloaded):
            self.report.downloads += 1
            self.report.values["download_s"] = event.duration_s


class Warnings(logging.Handler):
    """What a user would see in the log."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        self._into.append(record.getMessage())


def join(trainee: Trainee, dht: shoal.DHT) -> shoal.Optimizer:
    """The optimizer of the swarm, as the job wants it."""
    job = trainee.job
    buffers = dict(trainee.model.named_buffers())
    options: dict[str, Any] = {"run_id": RUN, **job.options, **({"model": trainee.model} if job.give_model else {})}
    return shoal.Optimizer(
        dht=dht,
        target_batch_size=job.target,
        batch_size_per_step=job.batch,
        optimizer=trainee.optimizer,
        scheduler=job.scheduler(trainee.optimizer) if job.scheduler else None,
        extra_tensors=[buffers[name] for name in job.extra],
        **options,
    )


def pass_gate(line: Line, job: Job) -> None:
    """Wait for the others, if the replay wants it."""
    if job.gate:
        line.say("ready")
        line.wait("go")


def train(line: Line, job: Job) -> Report:
    """An ordinary training loop, to the end of the run."""
    trainee = Trainee(job, line)
    logging.getLogger("shoal").addHandler(Warnings(trainee.report.warnings))
    with shoal.DHT(job.entries, start=True, **job.dht) as dht:
        dht.events.subscribe(trainee.note)
        line.say("address", next(map(str, dht.get_visible_maddrs()), ""))  # a client has none
        trainee.swarm = swarm = join(trainee, dht)
        swarm.announce_end(job.epochs)
        job.begin(trainee)
        pass_gate(line, job)
        while not swarm.finished:
            time.sleep(job.pace_s)
            job.loss(trainee).backward()
            job.hook(trainee)
            swarm.step()
            if job.zero:
                swarm.zero_grad()
            trainee.batches += 1
            trainee.saw()
            if line.heard("leave"):
                break
        trainee.report.end = digest(list(trainee.model.state_dict().values()))
        line.say("finished")
        if job.wait:
            line.wait("leave")
    return trainee.report


def together(peers: Peers, jobs: Sequence[Job], work: Callable[..., Any] = train) -> list[Report]:
    """Train to the end, all started at once."""
    return [each.result() for each in joined(peers, jobs, work)]


def joined(
    peers: Peers, jobs: Sequence[Job], work: Callable[..., Any] | Sequence[Callable[..., Any]] = train
) -> list[Peer]:
    """Start them all (`work`: of all, or of each), and let them begin at once; the first one is the others' entry."""
    works = [work] * len(jobs) if callable(work) else work
    first = peers.start(works[0], job=changed(jobs[0], gate=True))
    entry = first.wait("address")
    rest = zip(works[1:], jobs[1:], strict=True)
    started = [first, *(peers.start(each, job=changed(job, gate=True, entries=(entry,))) for each, job in rest)]
    for each in started:
        each.wait("ready")
    for each in started:
        each.tell("go")
    return started


def changed(job: Job, **changes: Any) -> Job:
    """The same job, but for this."""
    return Job(**{**vars(job), **changes})


# ------------------------------------------------------------------------------------------------------------ judgement


def digest(values: Any) -> str:
    """Of nested values, to the bit."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in sorted(
                value.items(), key=lambda pair: repr(pair[0])
            ):  # loaded in another order, it is the same
                found.update(repr(key).encode())
                add(item)
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(values)
    return found.hexdigest()[:16]


def apart(reports: Sequence[Report], what: str = "weights", since: int = 0) -> tuple[int, int]:
    """In how many of the epochs that all have seen their weights (or statistics) differ, and how many those are."""
    seen = [getattr(report, what) for report in reports]
    common = [epoch for epoch in set.intersection(*map(set, seen)) if epoch > since]
    return sum(len({each[epoch] for each in seen}) > 1 for epoch in common), len(common)


def counted(number: int, of: int, what: str) -> str:
    """A measurement in words."""
    return f"{number} of {of} {what}"


def status(entry: str) -> dict[str, Any]:
    """What `shoal status` says of the run."""
    command = [sys.executable, "-m", "shoal.cli", "status", entry, "--run", RUN, "--json"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    found: dict[str, Any] = json.loads(said.stdout) if said.returncode == 0 else {"peers": [], "error": said.stderr}
    return found
