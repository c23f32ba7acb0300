"""The trainers of `benchmarks.storm`: one process that has imported torch, and forks each of them.

It reads what to start from stdin, a line of JSON for each; the trainers write what happens to the stdout that they
share, a line at a time. A trainer begins with nothing of shoal but its code: keys, sockets, threads and state are its
own. It dies with this process, which ends with its stdin. Times are CLOCK_MONOTONIC, one for the whole machine.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from typing import Any

import torch

import shoal
from benchmarks.strategies.named import named
from shoal.events import (
    EpochAdvanced,
    Event,
    GroupFormed,
    PeerDropped,
    PeerSilent,
    RoundAborted,
    RoundFinished,
    StateDownloaded,
    Warned,
)
from shoal.strategies import Merges

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_INPUTS = 64
_STOOD_S = 0.02
"""A call of `step` that takes longer is said."""


def say(name: str, **values: Any) -> None:
    """A line of its own: what is shorter than a page is not mixed with that of others."""
    line = json.dumps({"peer": name, "at": time.monotonic(), **values}).encode()
    os.write(1, line[:4000] + b"\n")


def compute(batch_s: float, *, holds_gil: bool) -> None:
    """Take as long as a batch takes; a program that holds the interpreter counts all the time."""
    until = time.monotonic() + batch_s
    while holds_gil and time.monotonic() < until:
        sum(range(1000))
    time.sleep(max(0.0, until - time.monotonic()))


def train(name: str, settings: dict[str, Any]) -> None:
    """Compute a batch in a fixed time, step, until killed."""
    torch.manual_seed(os.getpid())
    teacher = torch.linspace(-1.0, 1.0, _INPUTS)
    strategy = named(**settings["strategy"])
    parts = strategy.merging.fragments if isinstance(strategy, Merges) else 1
    parameters = [torch.nn.Parameter(torch.zeros(max(_INPUTS, settings["numel"] // parts))) for _ in range(parts)]
    parameter, slope = parameters[0], torch.zeros_like(parameters[0])
    parameter.grad = slope
    for each in parameters[1:]:
        each.grad = torch.zeros_like(each)
    inner = torch.optim.SGD(parameters, lr=settings["lr"])
    say(name, packet=True)
    maddrs = [f"/ip4/{settings['host']}/tcp/{settings['port']}"]
    dht = shoal.DHT(initial_peers=settings["entries"], host_maddrs=maddrs, start=True)
    me = str(dht.peer_id)
    say(name, ready=me[:16], addresses=[str(address) for address in dht.get_visible_maddrs()])
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="storm",
        target_batch_size=None if isinstance(strategy, Merges) else settings["target"],
        strategy=strategy,
        batch_size_per_step=settings["batch"],
        optimizer=inner,
    )
    loss, coordinator, searched_s = 0.0, None, dict[str, float]()
    participants = {each.settings.run_id: each for each in optimizer._chains.participants}  # noqa: SLF001 (one for each part)

    def note(event: Event) -> None:
        nonlocal coordinator
        match event:
            case GroupFormed(peers=peers, waited_s=waited_s):
                coordinator, searched_s[event.prefix] = event.coordinator, waited_s
                say(name, group=len(peers), searched_s=round(waited_s, 3), leads=str(coordinator) == me)
            case PeerDropped(peer=peer, where=where, reason=reason):
                say(name, dropped=str(peer)[:16], where=where, reason=reason[:100])
            case PeerSilent(peer=peer, waited_s=waited_s):
                say(name, silent=str(peer)[:16], decides=peer == coordinator, waited_s=round(waited_s, 3))
            case RoundFinished(prefix=prefix, duration_s=duration_s):
                say(name, merged_s=round(searched_s.pop(prefix, 0.0) + duration_s, 3))
            case EpochAdvanced(run_id=run_id, epoch=epoch, samples=samples, digest=digest):
                result = participants[run_id].swarm_step.last_round
                by = [me] if result is None else [str(peer) for peer in result.outcome.contributors]
                say(
                    name,
                    epoch=epoch,
                    part=run_id,
                    samples=samples,
                    digest=digest.hex()[:16],
                    by=[peer[:16] for peer in by],
                    round_s=0.0 if result is None else result.duration_s,
                    loss=loss,
                )
            case StateDownloaded(duration_s=duration_s):
                say(name, downloaded=duration_s)
            case RoundAborted(reason=reason):
                say(name, aborted=reason[:200])
            case Warned(message=message):
                say(name, warned=message[:300])
            case _:
                pass

    dht.events.subscribe(note)
    while True:
        compute(settings["batch_s"], holds_gil=settings["hold_gil"])
        inputs = torch.randn(settings["batch"], _INPUTS)
        with torch.no_grad():
            wrong = inputs @ (parameter[:_INPUTS] - teacher) + 0.1 * torch.randn(settings["batch"])
            loss = float(wrong.square().mean())
            slope[:_INPUTS] = inputs.T @ wrong / settings["batch"]
        began, joins = time.monotonic(), optimizer.local_epoch == 0
        optimizer.step()
        if (stood_s := time.monotonic() - began) > _STOOD_S:
            say(name, stood_s=round(stood_s, 3), joins=joins)


def start(order: dict[str, Any]) -> None:
    """The forked trainer."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if order["namespace"] is not None:
        namespace = os.open(order["namespace"], os.O_RDONLY)
        if libc.setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns failed")
        os.close(namespace)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    say(order["name"], pid=os.getpid())
    train(order["name"], order["settings"])


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    torch.set_num_threads(1)
    warm = torch.nn.Parameter(torch.zeros(_INPUTS))
    torch.optim.SGD([warm], lr=0.1)  # the first one imports half of torch
    _ = shoal.DHT, shoal.Optimizer
    gc.collect()
    gc.freeze()
    say("", forks=True)
    while line := sys.stdin.readline():
        if os.fork() == 0:
            try:
                start(json.loads(line))
            except BaseException as error:  # noqa: BLE001 (said, and the process ends)
                say(json.loads(line)["name"], died=f"{type(error).__name__}: {error}"[:300])
            finally:
                os._exit(1)


if __name__ == "__main__":
    main()
