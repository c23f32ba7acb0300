"""What a peer of a run holds in tensors, in bytes per parameter: ``python -m benchmarks.optimizer_memory``.

Two peers train one model in one process, each in a thread, for a few epochs; then all tensors that are alive are
counted, memory that several share once, and divided by the parameters of both. Plain torch is counted in the same way.
What a donor holds for its newcomers, and what a newcomer holds while it loads, are counted at their own places.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal import compression

EPOCHS = 4
WIDTH = 512


def live_bytes() -> int:
    """Of all tensors that there are."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
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

    def __init__(self, entry: shoal.DHT | None, dtype: torch.dtype, options: dict[str, Any]) -> None:
        self.dht = shoal.DHT(initial_peers=[str(a) for a in entry.get_visible_maddrs()] if entry else [], start=True)
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

    def train(self, epochs: int) -> None:
        """Until that epoch."""
        while self.optimizer.local_epoch < epochs:
            backward(self.layer)
            self.optimizer.step()
            if self.optimizer.local_epoch < epochs:
                self.optimizer.zero_grad()

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
        peers.append(Peer(peers[0].dht if peers else None, dtype, {**options, **own}))
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
    for name, found in results.items():
        donor = f", and {found['donor']:.2f} while newcomers load from it" if "donor" in found else ""
        print(f"{name:48} {found['peer']:6.2f} bytes per parameter{donor}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
