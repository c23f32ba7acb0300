"""What a peer of a run holds in tensors, in bytes per parameter: ``python -m benchmarks.optimizer_memory``.

Two peers train one model in one process, each in a thread, for a few epochs; then all tensors that are alive are
counted, memory that several share once, and divided by the parameters of both. Plain torch is counted in the same way.
What a donor holds for its newcomers is counted at its own place.

Then two peers in processes of their own train on while a newcomer downloads their state over a line that gives a state
in five epochs beside their steps. All the while each counts its live tensors, its copy of the state for newcomers, and
the steps that it keeps. The most of each is printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch

import shoal
from shoal import compression
from shoal.run.join.steps import Step
from shoal.state.wire.snapshot import Snapshot

EPOCHS = 4
WIDTH = 512

EPOCH_S = 0.5
LINE = 1.05 * (1 + 3 / 5) * 4 * WIDTH * WIDTH / EPOCH_S
"""Bytes per second for a step in each epoch, and for a state of three times its size in five epochs."""


def live_bytes() -> int:
    """Of all tensors that there are."""
    gc.collect()
    return tensor_bytes(gc.get_objects())


def tensor_bytes(objects: list[Any]) -> int:
    """Of the tensors among these."""
    storages = {}
    for each in objects:
        if issubclass(type(each), torch.Tensor):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def model(dtype: torch.dtype) -> torch.nn.Linear:
    """A layer."""
    torch.manual_seed(0)
    return torch.nn.Linear(WIDTH, WIDTH, bias=False).to(dtype)


def backward(layer: torch.nn.Linear) -> None:
    """One batch."""
    layer(torch.ones(1, WIDTH, dtype=layer.weight.dtype)).float().square().mean().backward()


def adamw(params: Any) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(params, lr=1e-4)


def plain(dtype: torch.dtype) -> float:
    """Bytes per parameter of plain torch."""
    before = live_bytes()
    layer = model(dtype)
    optimizer = adamw(layer.parameters())
    backward(layer)
    optimizer.step()
    return (live_bytes() - before) / layer.weight.numel()


class Peer:
    """One that trains in a thread."""

    def __init__(
        self, entry: list[str], dtype: torch.dtype, options: dict[str, Any], limit: float | None = None
    ) -> None:
        self.dht = shoal.DHT(initial_peers=entry, state_upload_limit=limit, start=True)
        self.layer = model(dtype)
        self.optimizer = shoal.Optimizer(
            dht=self.dht,
            run_id="memory",
            target_batch_size=8,
            batch_size_per_step=2,
            params=self.layer.parameters(),
            optimizer=adamw,
            **options,
        )

    def train(self, epochs: int, pause_s: float = 0.0) -> None:
        """Until that epoch."""
        while self.optimizer.local_epoch < epochs:
            time.sleep(pause_s)
            backward(self.layer)
            self.optimizer.step()
            if self.optimizer.local_epoch < epochs:
                self.optimizer.zero_grad()

    @property
    def addresses(self) -> list[str]:
        """Where it can be reached."""
        return [str(each) for each in self.dht.get_visible_maddrs()]

    def close(self) -> None:
        """Leave."""
        self.optimizer.shutdown()
        self.dht.shutdown()


def swarm(dtype: torch.dtype = torch.float32, extra: int = 0, **options: Any) -> dict[str, float]:
    """Bytes per parameter of a peer; and of the copy that a donor makes."""
    before = live_bytes()
    peers: list[Peer] = []
    for _ in range(2):
        own = {"extra_tensors": [torch.zeros(extra)]} if extra else {}
        peers.append(Peer(peers[0].addresses if peers else [], dtype, {**options, **own}))
    threads = [threading.Thread(target=peer.train, args=(EPOCHS,)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numel = WIDTH * WIDTH
    found = {"peer": (live_bytes() - before) / numel / 2}
    training = peers[0].optimizer.collaboration.training
    found["donor"] = sum(each.numel() * each.itemsize for each in training.export()[1]) / numel
    for peer in peers:
        peer.close()
    return found


class Most:
    """The most that this process holds while the block lasts, looked at every few milliseconds; per parameter."""

    def __init__(self) -> None:
        self.tensors = self.copy = self.steps = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.01):
            self._count(gc.get_objects())  # kept by nobody: what it lists can go again

    def _count(self, objects: list[Any]) -> None:
        self.tensors = max(self.tensors, tensor_bytes(objects) / WIDTH**2)
        self.copy = max(self.copy, sum(each.data.nbytes for each in objects if type(each) is Snapshot) / WIDTH**2)
        self.steps = max(self.steps, sum(len(each.data) for each in objects if type(each) is Step) / WIDTH**2)


def beside_a_newcomer(pipe: Connection, entry: list[str], newcomer: bool) -> None:
    """A process with a peer, which says what it holds at most from the time on that it is told to look."""
    peer = Peer(entry, torch.float32, {}, LINE / 2)
    pipe.send(peer.addresses)
    thread = threading.Thread(target=peer.train, args=(10**6, EPOCH_S / 2), daemon=True)
    if not newcomer:
        thread.start()
    pipe.recv()
    with Most() as most:
        if newcomer:
            thread.start()
        pipe.recv()
    found = {"peer": most.tensors, "copy": most.copy, "steps": most.steps}
    pipe.send((found, peer.optimizer.local_epoch))
    pipe.recv()  # until it is killed


def newcomers() -> dict[str, dict[str, float]]:
    """What a newcomer, and a member that gives it its state and steps, hold at most."""
    processes = multiprocessing.get_context("spawn")
    started = list[Any]()

    def start(entry: list[str], *, newcomer: bool = False) -> Connection:
        ours, theirs = processes.Pipe()
        process = processes.Process(target=beside_a_newcomer, args=(theirs, entry, newcomer), daemon=True)
        process.start()
        started.append(process)
        return ours

    try:
        first = start([])
        entry = first.recv()
        second = start(entry)
        second.recv()
        time.sleep(10 * EPOCH_S)
        late = start(entry, newcomer=True)
        late.recv()
        for each in (first, second, late):
            each.send("look")
        time.sleep(40 * EPOCH_S)
        for each in (first, second, late):
            each.send("tell")
        found = [each.recv() for each in (first, second, late)]
    finally:
        for process in started:
            process.kill()
    newcomer, epoch = found[2]
    assert epoch > 10, "the newcomer did not come to the run"
    members = {kind: max(each[kind] for each, _ in found[:2]) for kind in newcomer}
    return {"a newcomer at most, until it takes part": newcomer, "a member at most that gives to it": members}


def cases() -> dict[str, Callable[[], dict[str, float]]]:
    """By name."""
    eight, feedback = (
        compression.Uniform8BitQuantization(),
        compression.ErrorFeedback(compression.Uniform8BitQuantization()),
    )
    return {
        "float32": swarm,
        "average_state_every=2": lambda: swarm(average_state_every=2),
        "grad_compression: 8 bits": lambda: swarm(grad_compression=eight),
        "grad_compression: 8 bits, error feedback": lambda: swarm(grad_compression=feedback),
        "state_averaging_compression: 8 bits": lambda: swarm(state_averaging_compression=eight, average_state_every=2),
        "state_averaging_compression: 16 bits": lambda: swarm(
            state_averaging_compression=compression.Float16Compression(), average_state_every=2
        ),
        "extra_tensors: as many elements as parameters": lambda: swarm(extra=WIDTH * WIDTH),
        "bfloat16 parameters": lambda: swarm(torch.bfloat16),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {
        "plain torch, float32": {"peer": plain(torch.float32)},
        "plain torch, bfloat16": {"peer": plain(torch.bfloat16)},
    }
    for name, measure in cases().items():
        results[name] = measure()
    results.update(newcomers())
    for name, found in results.items():
        donor = f", and {found['donor']:.2f} while newcomers load from it" if "donor" in found else ""
        beside = f", {found['copy']:.2f} in its copy and {found['steps']:.2f} in steps" if "steps" in found else ""
        print(f"{name:48} {found['peer']:6.2f} bytes per parameter{donor}{beside}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
