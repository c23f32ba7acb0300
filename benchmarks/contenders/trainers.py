"""The trainers of `benchmarks.optimizer`: one process that has imported a library, and forks each of them.

It reads what to do from stdin, a line of JSON for each; the trainers write what happens to the stdout that they share,
a line at a time. Each trainer leads a process group, which is killed as a whole: a peer of hivemind is several
processes. All are killed when the input ends. Times are CLOCK_MONOTONIC, one for the whole machine. Imports nothing of
shoal but the demo's model, which needs torch alone: this also runs in hivemind's environment.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.contenders.orders import now
from shoal.demo.model import Batch, MaskedLM, ModelConfig, build_model

__all__ = ["Job", "Trainer", "make_inner", "make_schedule", "serve"]

_PR_SET_PDEATHSIG = 1

Job = dict[str, Any]
"""What `benchmarks.optimizer` tells a trainer: see its `job`."""


class Trainer(Protocol):
    """One peer of a library.

    Attributes:
        optimizer: that the loop calls.
    """

    optimizer: Any

    @property
    def reduced_s(self) -> float | None:
        """Of the last round of gradients, from the group until the average is there; None before the first."""
        ...

    def addresses(self) -> list[str]:
        """How others find this peer."""
        ...

    def begin(self, *, late: bool) -> None:
        """Training begins now; `late`: it joins others that train already."""
        ...


def make_inner(job: Job, parameters: Any) -> torch.optim.Optimizer:
    """The demo's optimizer."""
    return torch.optim.AdamW(parameters, lr=job["lr"], betas=tuple(job["betas"]))


def make_schedule(job: Job, optimizer: Any) -> torch.optim.lr_scheduler.LambdaLR:
    """The demo's: linear warm-up, then constant; it counts epochs of the swarm."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, (epoch + 1) / job["warm_up_epochs"]))


def serve(make: Callable[[Job, MaskedLM], Trainer]) -> None:
    """Fork trainers, and kill them, as the input says; kill all when it ends."""
    torch.set_num_threads(1)
    warm = torch.nn.Parameter(torch.zeros(1))
    torch.optim.AdamW([warm])  # the first one imports half of torch
    gc.collect()
    gc.freeze()
    pids: dict[str, int] = {}
    _say("", forks=True)
    try:
        while line := sys.stdin.readline():
            order = json.loads(line)
            if "kill" in order:
                _kill(pids.pop(order["kill"]))
                _say(order["kill"], killed=True)
            elif pid := os.fork():
                pids[order["name"]] = pid
            else:
                _be(order, make)
    finally:
        for pid in pids.values():
            _kill(pid)


def _kill(pid: int) -> None:
    """End a trainer, and what it has started. It may have ended: it is ours until we have waited for it."""
    for kill in (os.killpg, os.kill):  # it may not lead a group yet
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.waitpid(pid, 0)


def _say(name: str, **values: Any) -> None:
    """A line of its own: what is shorter than a page is not mixed with that of others."""
    os.write(_STDOUT, json.dumps({"peer": name, **values}).encode()[:4000] + b"\n")


_STDOUT = os.dup(1)
os.dup2(2, 1)  # what a library prints is no line of ours


def _be(order: dict[str, Any], make: Callable[[Job, MaskedLM], Trainer]) -> None:
    """The forked trainer; never returns."""
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _train(order["name"], order["job"], make)
    except BaseException as error:  # noqa: BLE001 (said, and the process ends)
        _say(order["name"], died=f"{type(error).__name__}: {error}"[:300])
    finally:
        os._exit(1)


def _batches(job: Job) -> Iterator[Batch]:
    """An endless stream of this peer's own."""
    inputs, masked, targets = (torch.load(job["data"])[name] for name in ("inputs", "masked", "targets"))
    generator = torch.Generator().manual_seed(job["seed"])
    while True:
        rows = torch.randint(len(inputs), (job["batch"],), generator=generator)
        chosen = masked[rows].flatten().nonzero().squeeze(1)
        yield Batch(inputs[rows], chosen, targets[rows].flatten()[chosen])


def _train(name: str, job: Job, make: Callable[[Job, MaskedLM], Trainer]) -> None:
    """Batches of a fixed time until killed: what is not computed of it is slept, as if a slower device computed."""
    model = build_model(ModelConfig(**job["model"]), seed=job["model_seed"])
    trainer, batches = make(job, model), _batches(job)
    _say(name, ready=trainer.addresses())
    while not Path(job["go"]).exists():
        time.sleep(0.002)
    trainer.begin(late=job["late"])
    known = model.out_bias.clone()
    while True:
        began = now()
        model.loss(next(batches)).backward()
        took_s = now() - began
        time.sleep(max(0.0, job["batch_s"] - took_s))
        epoch, called = trainer.optimizer.local_epoch, now()
        trainer.optimizer.step()
        done, reached = now(), trainer.optimizer.local_epoch
        trainer.optimizer.zero_grad()
        _say(name, batch=epoch, at=called, took_s=took_s)
        if reached != epoch:
            _say(name, epoch=reached, at=done, reduced_s=trainer.reduced_s)
        if job["saves"] and not torch.equal(model.out_bias, known):
            known = model.out_bias.clone()  # each step of the optimizer changes it
            _say(name, saved=_save(model, Path(job["saves"]) / f"{done}.pt"), epoch=reached, at=done)


def _save(model: MaskedLM, path: Path) -> str:
    """The parameters, for whoever judges them."""
    torch.save(model.state_dict(), path)
    return str(path)
