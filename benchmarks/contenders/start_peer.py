"""One of many trainers that are started together: the child of `benchmarks.starts`. Writes JSON lines."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import torch

import shoal
from shoal.events import EpochAdvanced, Event, StateDownloaded, Warned


def say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Waits for its entry addresses, and for `go`; trains until stdin ends."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(settings["numel"]))
    inner = torch.optim.SGD([parameter], lr=0.1)  # the first one imports half of torch
    dht = shoal.DHT(initial_peers=settings["peers"], start=True)
    say(ready=[str(address) for address in dht.get_visible_maddrs()])
    sys.stdin.readline()
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="starts",
        target_batch_size=settings["target"],
        batch_size_per_step=settings["batch"],
        optimizer=inner,
    )
    began = time.monotonic()

    def note(event: Event) -> None:
        at = time.monotonic() - began
        match event:
            case EpochAdvanced(epoch=epoch, peers=peers):
                say(at=at, epoch=epoch, peers=peers)
            case StateDownloaded(duration_s=duration_s):
                say(at=at, downloaded=duration_s)
            case Warned(message=message):
                say(at=at, warned=message)
            case _:
                pass

    dht.events.subscribe(note)
    over = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    used = time.process_time()
    while not over.wait(settings["batch_s"]):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    say(cpu_s=time.process_time() - used, wall_s=time.monotonic() - began)
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
