"""Optimizer state in files against state in memory, and against the disk: ``python -m benchmarks.zero_offload``. Linux.

A stack of linear layers (float32, AdamW, stage 2 of `shoal.zero`, one rank) is trained in turns, each time in a new
process: with its state in memory, and in files of ``--folder``. Another process does nothing but what the disk must do
in a step: it reads windows of files as large as the state and gradients, changes a value of each page, and writes them
back, the next window ahead. Printed: seconds per step, the peak of resident memory beyond that of before the model was
made, in units of the parameters' bytes, and the ratios of seconds.

What fits into the system's cache is not read from the disk, here as in training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

import shoal.zero
from benchmarks.allreduce import aligned, processor
from shoal.zero.memory.mapped import Extent, fetch, write_back

KINDS = ("memory", "files", "disk")
WIDTH, WINDOW_BYTES, MIB = 1024, 24 << 20, 1 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Peak:
    """The peak of resident memory in a block, beyond that of its beginning."""

    def __enter__(self) -> Self:
        self._over, self.nbytes, self._before = threading.Event(), 0, resident()
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.nbytes = max(self.nbytes, resident() - self._before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()


def train(layers: int, steps: int, folder: str | None) -> list[float]:
    """Seconds of each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    model, optimizer = shoal.zero.shard(
        model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), stage=2, offload=folder
    )
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return seconds


def stream(nbytes: int, steps: int, folder: str) -> list[float]:
    """Seconds to read, touch and write so many bytes."""
    extent, like, windows = Extent(Path(folder), nbytes), torch.empty(WINDOW_BYTES // 4), []
    while (window := extent.take(like)) is not None:
        windows.append(window)
    seconds = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(steps):
            began = time.perf_counter()
            going = []
            coming = pool.submit(fetch, [windows[0]])
            for number, window in enumerate(windows):
                coming.result()
                coming = pool.submit(fetch, windows[number + 1 : number + 2])
                window[::1024] += 1
                going.append(pool.submit(write_back, [window]))
            for each in going:
                each.result()
            seconds.append(time.perf_counter() - began)
    return seconds


def child(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """What one process measures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()  # imports much
    with Peak() as peak:
        if kind == "disk":
            seconds = stream(12 * args.layers * WIDTH**2, args.steps, args.folder)
        else:
            seconds = train(args.layers, args.steps, args.folder if kind == "files" else None)
    return {"seconds": seconds[2:], "peak": peak.nbytes}


def run(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a new process measures."""
    options = [f"--layers={args.layers}", f"--steps={args.steps}", f"--folder={args.folder}", f"--child={kind}"]
    # By this glibc gives freed memory back, so that the peak is of what is in use.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.zero_offload", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=48, help="of 2^20 parameters each (default 48)")
    parser.add_argument("--steps", type=int, default=7, help="in a turn; the first two do not count (default 7)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.child:
        print(json.dumps(child(args.child, args)), flush=True)
        return 0
    turns: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(args.turns):
        for kind in KINDS:
            turns[kind].append(run(kind, args))
    parameters = 4 * args.layers * WIDTH**2
    seconds = {
        kind: statistics.median(each for turn in found for each in turn["seconds"]) for kind, found in turns.items()
    }
    rows: list[tuple[str, ...]] = [("", "s per step", "x memory", "x disk", "peak, x parameters")]
    for kind, found in turns.items():
        peak = statistics.median(turn["peak"] for turn in found) / parameters
        ratios = (seconds[kind] / seconds["memory"], seconds[kind] / seconds["disk"])
        rows.append((kind, f"{seconds[kind]:.2f}", *(f"{each:.2f}" for each in ratios), f"{peak:.2f}"))
    print(f"{processor()}, load {os.getloadavg()[0]:.1f}; parameters {parameters / MIB:.0f} MiB")
    print(aligned(rows))
    speed = 3 * parameters / seconds["disk"] / 1e6
    print(f"The disk reads and writes {speed:.0f} MB/s each at once (what is in the system's cache is not read).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
