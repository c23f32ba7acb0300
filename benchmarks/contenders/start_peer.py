"""One of many trainers that are started together: the child of `benchmarks.starts`."""

from __future__ import annotations

import time
from typing import Any

import torch

import shoal
from benchmarks.processes import Line
from shoal.events import EpochAdvanced, Event, StateDownloaded, Warned

READY_S = 300.0


def train(
    line: Line,
    *,
    peers: list[str],
    target: int,
    batch: int,
    batch_s: float,
    numel: int,
    modes: dict[str, Any],
) -> dict[str, float]:
    """Says its addresses, waits for "go", and trains until "end"; returns what that cost."""
    parameter = torch.nn.Parameter(torch.zeros(numel))
    inner = torch.optim.SGD([parameter], lr=0.1)
    dht = shoal.DHT(initial_peers=peers, start=True)
    line.say("ready", [str(address) for address in dht.get_visible_maddrs()])
    line.wait("go", READY_S)
    began = time.monotonic()
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="starts",
        target_batch_size=target,
        batch_size_per_step=batch,
        optimizer=inner,
        **modes,
    )

    def say(what: str, **values: Any) -> None:
        line.say(what, {"at": time.monotonic() - began, **values})

    def note(event: Event) -> None:
        match event:
            case EpochAdvanced(epoch=epoch, peers=peers):
                say("epoch", epoch=epoch, peers=peers)
            case StateDownloaded(duration_s=duration_s):
                say("downloaded", duration_s=duration_s)
            case Warned(message=message):
                say("warned", message=message)
            case _:
                pass

    dht.events.subscribe(note)
    used, batches = time.process_time(), 0
    while not line.heard("end", batch_s):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        batches += 1
    wall_s, counted = time.monotonic() - began, optimizer.collaboration.contribution.contributed
    cost = {
        "cpu_s": time.process_time() - used,
        "wall_s": wall_s,
        "computed": batches * batch,
        "counted": counted,
        "possible": wall_s / batch_s * batch,
    }
    optimizer.shutdown()
    dht.shutdown()
    return cost
