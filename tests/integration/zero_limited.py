"""A rank that trains with less memory than its optimizer's state takes: ``python -m tests.integration.zero_limited``.

Prints a line of JSON: a checksum of the weights, and bytes of the state, of the limit and of resident memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import shoal.zero
from shoal.zero.memory import offload
from shoal.zero.optimizer import ShardedOptimizer
from shoal.zero.ranks import buckets

MIB = 1 << 20
_CGROUPS = Path("/sys/fs/cgroup")


def numbers() -> dict[str, int]:
    """Bytes of this process, as the kernel counts them, by the kernel's names."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def own_cgroup() -> tuple[Path, str] | None:
    """A new control group for memory, and the file of its limit; None if this process may not make one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, limit = (_CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (_CGROUPS, "memory.max")
        made = root / path.lstrip("/") / f"shoal-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            made.mkdir()
            if (made / limit).exists():
                return made, limit
            made.rmdir()
    return None


@contextlib.contextmanager
def limited(kind: str, nbytes: int) -> Iterator[None]:
    """Limit the memory that this process takes from here on: its own (data), or with that of files (cgroup).

    Under cgroups the kernel ends a process that takes more; else its allocations fail.
    """
    if kind != "cgroup":
        before = resource.getrlimit(resource.RLIMIT_DATA)
        if kind == "data":
            resource.setrlimit(resource.RLIMIT_DATA, (numbers()["VmData"] + nbytes, before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_DATA, before)
        return
    found = own_cgroup()
    assert found is not None
    group, limit = found
    (group / limit).write_text(str(nbytes))
    outside = group.parent / "cgroup.procs"
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        outside.write_text(str(os.getpid()))
        group.rmdir()


class Deep(torch.nn.Module):
    """Layers of a MiB of float32 values each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512, bias=False) for _ in range(layers))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 512)."""
        for layer in self.layers:
            values = values + layer(values).tanh()
        return values


def train(model: torch.nn.Module, optimizer: ShardedOptimizer, steps: int, checkpoint: str, *, load: bool) -> int:
    """Train, with a checkpoint before the last step, perhaps loaded again; returns the peak of resident memory."""
    peak, over = 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = max(peak, numbers()["VmRSS"])

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    for step in range(steps):
        if step == steps - 1:
            shoal.zero.save(checkpoint, model, optimizer)
            if load:
                shoal.zero.load(checkpoint, model, optimizer)
        values = torch.randn(4, 512, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        model(values).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    over.set()
    looking.join()
    return peak


def main() -> None:
    """Train as the options say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--store", required=True)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--offload")
    parser.add_argument("--limit", choices=["none", "data", "cgroup"], default="none")
    parser.add_argument("--limit-mib", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.ranks)
    buckets.BUCKET_BYTES, offload.WINDOW_NUMEL = 2 * MIB, 1 << 18  # as for a small model
    # The ordinary optimizer imports much at its first step, which is no part of training.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
    model = Deep(args.layers)

    def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    model, optimizer = shoal.zero.shard(model, adamw, stage=args.stage, offload=args.offload)
    before = numbers()["VmRSS"]
    with limited(args.limit, args.limit_mib * MIB):
        # safetensors maps files so that they count as data, though they take no memory.
        peak = train(model, optimizer, 3, args.store + "-saved", load=args.limit == "cgroup")
    checksum, memory = 0, optimizer.memory()
    for each in shoal.zero.full_state_dict(model).values():
        checksum = zlib.crc32(each.numpy().data, checksum)
    print(json.dumps({"weights": checksum, "taken": peak - before, "peak": peak, **memory._asdict()}), flush=True)


if __name__ == "__main__":
    main()
