"""ZeRO's stages and engines side by side: ``python -m benchmarks.zero --params 30e6 --ranks 2,4``. Linux only.

A small GPT (pre-norm, head tied to the embedding, 2 x 64 tokens per rank and step, float32, Adam) is trained by each
engine on the same data, one engine after another in ``--turns`` turns, each time in new processes with one thread each:

- ``DDP``: PyTorch's, all on every rank (gradients as views of its buckets);
- ``ZeroRedundancyOptimizer``, ``FSDP2-2``, ``FSDP2-3``: PyTorch's for stages 1, 2 (``reshard_after_forward=False``), 3;
- ``shoal-1``, ``shoal-2``, ``shoal-3``: `shoal.zero.shard`.

Printed for each: seconds per step, the median of all turns with the range; bytes that a rank gives TCP to send in a
step, in units of the parameters' bytes, what the law says, and what the loopback device of a network namespace of its
own has carried for it (headers, and what TCP sent again, included); what a rank holds between backward pass and step
(unique storages); the peak of resident memory beyond that of before the model was made; and whether the weights after
all steps are DDP's to the bit. ``x best`` is time and peak over those of the best of PyTorch's engines that sends as
many bytes, and of the best that has the same stage.

Namespaces need the right to make them (root). Without, the device is the whole machine's, and it says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.allreduce import ROOT, aligned, processor, spread, write
from shoal.zero.laws import Sizes, costs_of

NAMES = ("DDP", "ZeroRedundancyOptimizer", "FSDP2-2", "FSDP2-3", "shoal-1", "shoal-2", "shoal-3")
MIB = 1 << 20
SAME_BYTES = 0.02
"""Engines whose bytes differ by less are compared."""


def own_namespace() -> list[str]:
    """What, before a command, runs it in a network namespace with a loopback device; empty if that is not allowed."""
    command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']
    if shutil.which("unshare") and shutil.which("ip"):
        tried = subprocess.run([*command, "true"], capture_output=True, check=False)
        if tried.returncode == 0:
            return command
    return []


def run(name: str, ranks: int, args: argparse.Namespace, prefix: Sequence[str]) -> list[dict[str, Any]]:
    """One turn of one engine; what its ranks measured."""
    module = [sys.executable, "-m", "benchmarks.contenders.zero_ranks", "--engine", name]
    options = [f"--ranks={ranks}", f"--params={args.params}", f"--steps={args.steps}", f"--warm-up={args.warm_up}"]
    done = subprocess.run(
        [*prefix, *module, *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def law(name: str, ranks: int, nbytes: float) -> float:
    """Bytes that a rank sends in a step."""
    title = name.partition("-")[0].replace("shoal", "shoal.zero")
    sizes = Sizes(nbytes, nbytes, 2 * nbytes)
    (found,) = (
        each
        for each in costs_of(sizes, ranks, stage=stage(name), micro_batches=1, backend="gloo")
        if each.engine.name == title
    )
    return found.sent


def summary(name: str, ranks: int, turns: Sequence[list[dict[str, Any]]], weights: str) -> dict[str, Any]:
    """The figures of one engine."""
    first = turns[0][0]
    nbytes = 4 * first["parameters"]
    everyone = [rank for turn in turns for rank in turn]
    medians = [statistics.median(second for rank in turn for second in rank["seconds"]) for turn in turns]
    return {
        "engine": name,
        "ranks": ranks,
        "parameters": first["parameters"],
        "seconds": spread(second for rank in everyone for second in rank["seconds"]),
        "turns": medians,
        "sent": statistics.median(rank["sent"] for rank in everyone) / nbytes,
        "on_device": statistics.median(rank["on_device"] for rank in everyone) / nbytes,
        "law": law(name, ranks, nbytes) / nbytes,
        "held": {key: max(rank["held"][key] for rank in turns[-1]) / nbytes for key in first["held"]},
        "peak": statistics.median(max(rank["peak"] for rank in turn) for turn in turns),
        "equal": all(rank["weights"] == weights for rank in everyone),
    }


def stage(name: str) -> int:
    """Which stage of ZeRO an engine carries."""
    return {"DDP": 0, "ZeroRedundancyOptimizer": 1}[name] if "-" not in name else int(name[-1])


def compare(results: list[dict[str, Any]]) -> None:
    """Add what each takes in units of the best of the others: of those that send as much, and of those of its stage."""
    for each in results:
        others = [other for other in results if not other["engine"].startswith("shoal")]
        alike = {
            "bytes": [other for other in others if abs(other["law"] - each["law"]) <= SAME_BYTES * each["law"]],
            "stage": [other for other in others if stage(other["engine"]) == stage(each["engine"])],
        }
        for kind, found in alike.items():
            times, peaks = [other["seconds"]["median"] for other in found], [other["peak"] for other in found]
            each[f"time_to_best_of_{kind}"] = each["seconds"]["median"] / min(times) if times else None
            # Of one turn each: they ran close to each other.
            each[f"times_to_best_of_{kind}"] = [
                mine / min(other["turns"][turn] for other in found) for turn, mine in enumerate(each["turns"]) if found
            ]
            each[f"peak_to_best_of_{kind}"] = each["peak"] / min(peaks) if peaks else None


def ratios(result: dict[str, Any], what: str) -> str:
    """To the best of the same bytes, and of the same stage."""
    found = [result[f"{what}_to_best_of_{kind}"] for kind in ("bytes", "stage")]
    return " / ".join("-" if each is None else f"{each:.2f}" for each in found)


def table(results: Sequence[dict[str, Any]]) -> str:
    """For the terminal."""
    headings = (
        "engine",
        "sent",
        "law",
        "device",
        "params",
        "grads",
        "state",
        "s per step",
        "x best",
        "peak MiB",
        "x best",
        "equal",
    )
    rows = [headings]
    for each in results:
        held, seconds = each["held"], each["seconds"]
        rows.append(
            (
                each["engine"],
                f"{each['sent']:.3f}",
                f"{each['law']:.3f}",
                f"{each['on_device']:.3f}",
                *(f"{held[key]:.2f}" for key in ("parameters", "gradients", "state")),
                f"{seconds['median']:.2f} ({seconds['min']:.2f} to {seconds['max']:.2f})",
                ratios(each, "time"),
                f"{each['peak'] / MIB:.0f}",
                ratios(each, "peak"),
                "yes" if each["equal"] else "no",
            )
        )
    return aligned(rows)


def measure(ranks: int, args: argparse.Namespace, prefix: Sequence[str]) -> list[dict[str, Any]]:
    """All engines, in turns."""
    turns: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in args.engines}
    for number in range(args.turns):
        shift = number % len(args.engines)
        for name in args.engines[shift:] + args.engines[:shift]:
            turns[name].append(run(name, ranks, args, prefix))
    reference = turns[args.engines[0]][0][0]["weights"]
    results = [summary(name, ranks, found, reference) for name, found in turns.items()]
    compare(results)
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--params", type=float, default=30e6, help="about how many (default 30e6)")
    parser.add_argument("--ranks", default="2,4", help="how many, with commas (default 2,4)")
    parser.add_argument(
        "--engines", default=",".join(NAMES), help="with commas; weights are compared to the first one's"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="in a turn (default 5)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    args.engines = args.engines.split(",")
    if unknown := set(args.engines) - set(NAMES):
        parser.error(f"--engines: there is no {', '.join(sorted(unknown))}")
    return args


def main() -> int:
    args = parse()
    prefix = own_namespace()
    if not prefix:
        print("no namespace could be made: what the device sent is that of the whole machine's loopback device")
    everything = []
    for ranks in (int(text) for text in args.ranks.split(",")):
        results = measure(ranks, args, prefix)
        print(
            f"\n{results[0]['parameters'] / 1e6:.1f} M parameters, {ranks} ranks; in units of the parameters' bytes\n"
        )
        print(table(results), flush=True)
        everything += results
    if args.json:
        write(args.json, {"processor": processor(), "cores": os.cpu_count(), "engines": everything})
    return 0


if __name__ == "__main__":
    sys.exit(main())
