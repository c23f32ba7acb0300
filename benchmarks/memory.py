"""What rounds take of memory: ``python -m benchmarks.memory``. Linux only (it reads /proc).

N peers, processes of their own on loopback, average as in `benchmarks.allreduce`. Printed are

- *copies*, for each size in ``--numel``: what a peer's memory grows by, from before its averager is made to the highest
  point of its rounds (VmHWM), in copies of the vector, beyond the tensors of its user. What a peer needs anyhow (code,
  connections, threads) is measured with a tiny vector, and taken away. Median of the peers, with the range;
- *beyond 2 copies*: the same in MiB, less two copies: what should not grow with the vector;
- *growth*: what ``--many`` rounds of a small vector leave behind, in resident memory, threads and descriptors: the
  slope of ten samples, of the peer where it is steepest. `FIRST_ROUNDS` go before, until the flight recorder is full.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.allreduce import CODECS, ROUND_S, Contender, ContenderFailed, cell, processor, spread, write
from benchmarks.soak import Sample
from benchmarks.state_download import forget_peak, memory

TINY = 1000
"""Values of the vector that is nearly nothing."""

FIRST_ROUNDS = 500
"""Each has two events, and the flight recorder keeps the last 1,000."""

FIELDS = ("memory", "threads", "descriptors")


async def peaks(args: argparse.Namespace, numel: int, logs: Path) -> list[float]:
    """How many bytes each peer's memory grew by until the highest point of some rounds."""
    swarm = await Contender.start("shoal", with_numel(args, numel), logs, join=False)
    try:
        await swarm.ask_all("fill", ROUND_S, round=0)
        before = [memory(peer, "VmRSS") for peer in swarm.peers]
        for peer in swarm.peers:
            forget_peak(peer)
        await swarm.join()
        for number in range(args.rounds):
            await swarm.measure(number)
        after = [memory(peer, "VmHWM") for peer in swarm.peers]
    finally:
        await swarm.stop()
    return [high - low for low, high in zip(before, after, strict=True)]


async def growth(args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """What is left behind by many small rounds."""
    swarm = await Contender.start("shoal", with_numel(args, TINY), logs)
    samples: list[list[Sample]] = []
    try:
        for number in range(FIRST_ROUNDS):
            await swarm.average(number)
        for number in range(1, args.many + 1):
            await swarm.average(FIRST_ROUNDS + number)
            if number % (args.many // 10) == 0:
                samples.append([Sample.of(peer.process.pid, number) for peer in swarm.peers])
    finally:
        await swarm.stop()
    return {field: max(trend(each, field) for each in zip(*samples, strict=True)) * args.many for field in FIELDS} | {
        "samples": [[sample._asdict() for sample in each] for each in samples]
    }


def trend(samples: Sequence[Sample], field: str) -> float:
    """How much one peer's field grows in a round."""
    return statistics.linear_regression(
        [sample.at_s for sample in samples], [getattr(sample, field) for sample in samples]
    ).slope


def with_numel(args: argparse.Namespace, numel: int) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "numel": numel})


def copies(large: Sequence[float], tiny: Sequence[float], nbytes: int) -> dict[str, float]:
    """Growth in copies of the vector, less what a peer with next to no vector needs."""
    return spread((a - b) / nbytes for a, b in zip(large, tiny, strict=True))


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything."""
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as folder:
        logs = Path(folder)
        tiny = await peaks(args, TINY, logs)
        vectors = []
        for numel in args.sizes:
            large = await peaks(args, numel, logs)
            taken = copies(large, tiny, 4 * numel)
            beyond = (taken["median"] - 2) * 4 * numel / 2**20
            vectors.append({"numel": numel, "copies": taken, "beyond_mib": beyond, "bytes": large})
            print(f"{numel:,} values: {cell(taken, '{:.2f}')} copies, {beyond:+.1f} MiB beyond 2 copies", flush=True)
        return {
            "peers": args.peers,
            "vectors": vectors,
            "tiny": tiny,
            "growth": await growth(args, logs),
            "first_rounds": FIRST_ROUNDS,
            "rounds": args.many,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--numel", default="10_000_000", help="float32 values of the large vectors, with commas")
    parser.add_argument("--rounds", type=int, default=5, help="with each large vector")
    parser.add_argument("--many", type=int, default=1000, help="rounds with the small one")
    parser.add_argument("--compression", choices=CODECS, default="none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.set_defaults(part_bytes=None)
    args = parser.parse_args()
    args.sizes = [int(size) for size in args.numel.split(",")]
    if args.peers < 2 or args.many < 10 or args.many % 10 or min(args.sizes) <= TINY:
        parser.error(f"at least 2 peers, a multiple of 10 small rounds, and more than {TINY} values")
    print(f"{args.peers} peers; {processor()}, {os.cpu_count()} cores", flush=True)
    try:
        result = asyncio.run(measure(args))
    except ContenderFailed as error:
        raise SystemExit(f"a peer could not go on: {error}") from None
    grown = result["growth"]
    curve = (f"{max(each['memory'] for each in peers) / 2**20:.1f}" for peers in grown["samples"])
    print(f"MiB of the largest peer after each {args.many // 10} rounds: {' '.join(curve)}")
    print(
        f"in {args.many} rounds, after the first {FIRST_ROUNDS}: {grown['memory'] / 2**20:+.2f} MiB, "
        f"{grown['threads']:+.1f} threads, {grown['descriptors']:+.1f} descriptors"
    )
    if args.json:
        write(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
