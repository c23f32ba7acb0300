"""One of many trainers that are started together: the child of `benchmarks.starts`."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

import shoal
from shoal.events import EpochAdvanced, Event, StateDownloaded, Warned

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first one imports half of torch: before the fork


def train(settings: dict[str, Any], parent: Connection) -> None:
    """Says its addresses, waits for a word, and trains until the next one."""
    lock = threading.Lock()

    def say(**values: Any) -> None:
        with lock:  # events come on shoal's thread
            parent.send(values)

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(settings["numel"]))
    inner = torch.optim.SGD([parameter], lr=0.1)
    dht = shoal.DHT(initial_peers=settings["peers"], start=True)
    say(ready=[str(address) for address in dht.get_visible_maddrs()])
    parent.recv()
    began = time.monotonic()
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="starts",
        target_batch_size=settings["target"],
        batch_size_per_step=settings["batch"],
        optimizer=inner,
    )

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
    used = time.process_time()
    while not parent.poll(settings["batch_s"]):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    say(cpu_s=time.process_time() - used, wall_s=time.monotonic() - began)
    optimizer.shutdown()
    dht.shutdown()
