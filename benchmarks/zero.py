"""ZeRO's stages and engines side by side: ``python -m benchmarks.zero --params 30e6 --ranks 2,4``. Linux only.

A small GPT (pre-norm, head tied to the embedding, 2 x 64 tokens per rank and step, float32, Adam) is trained by each
engine on the same data, one engine after another in ``--turns`` turns, each time in new processes with one thread each:

- ``DDP``: PyTorch's, all on every rank (gradients as views of its buckets);
- ``ZeroRedundancyOptimizer``, ``FSDP2-2``, ``FSDP2-3``: PyTorch's for stages 1, 2 (``reshard_after_forward=False``), 3;
- ``shoal-1``, ``shoal-2``, ``shoal-3``: `shoal.zero.shard`;
- ``DeepSpeed-1``, ``DeepSpeed-2``, ``DeepSpeed-3``, with ``--deepspeed-python PATH``: the Python of an environment that
  has shoal's dependencies, ``deepspeed``, ``ninja`` and a C++ compiler. It does not clip gradients here (its default is
  1.0), and its stage 3 keeps no parameters gathered from one use to the next.

``--busy N`` lets N processes compute beside the ranks all the time. ``--link MBIT,MS`` gives each rank a namespace of
its own, and a line of this rate (each way) and this round trip.

Printed for each: seconds per step, the median of all turns with the range; CPU seconds of a rank per step; bytes that a
rank gives TCP to send in a step, in units of the parameters' bytes, what the law says, and what the network device of
the namespace has carried for it (headers, and what TCP sent again, included); what a rank holds between backward pass
and step (unique storages); the peak of resident memory beyond that of before the model was made; and whether the
weights after all steps are DDP's to the bit. ``x best`` is time, CPU seconds and peak over those of the best of the
other engines that sends as many bytes, and of the best that has the same stage.

Namespaces need the right to make them (root). Without, the device is the whole machine's, and it says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.allreduce import ROOT, aligned, exit_on_sigterm, processor, spread, write
from benchmarks.emulator.namespaces import Emulator
from benchmarks.emulator.star import Shape
from shoal.zero.plan.laws import Sizes, costs_of

NAMES = ("DDP", "ZeroRedundancyOptimizer", "FSDP2-2", "FSDP2-3", "shoal-1", "shoal-2", "shoal-3")
DEEPSPEED = ("DeepSpeed-1", "DeepSpeed-2", "DeepSpeed-3")
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


Places = Sequence[Sequence[str]]
"""What each command begins with, to run where it should: one that starts all ranks, or one for each rank."""


def run(name: str, ranks: int, args: argparse.Namespace, places: Places) -> list[dict[str, Any]]:
    """One turn of one engine; what its ranks measured."""
    python = args.deepspeed_python if name in DEEPSPEED else sys.executable
    module = [python, "-m", "benchmarks.contenders.zero_ranks", "--engine", name]
    options = [f"--ranks={ranks}", f"--params={args.params}", f"--steps={args.steps}", f"--warm-up={args.warm_up}"]
    bins = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed builds with ninja
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "PATH": bins}
    env["DS_ACCELERATOR"] = "cpu"
    started = []
    for rank, prefix in enumerate(places):
        of_rank = [f"--rank={rank}", f"--master={args.master}", "--port=29500"] if args.link else []
        started.append(
            subprocess.Popen(
                [*prefix, *module, *options, *of_rank],
                cwd=ROOT,
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    found: list[dict[str, Any]] = []
    for each in started:
        said, errors = each.communicate()
        if each.returncode:
            raise SystemExit(f"{name} failed:\n{errors}")
        found += json.loads(said.splitlines()[-1])  # DeepSpeed prints, too
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
        "cpu": statistics.median(rank["cpu"] for rank in everyone),
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
            each[f"cpu_to_best_of_{kind}"] = each["cpu"] / min(other["cpu"] for other in found) if found else None


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
        "CPU s",
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
                *(f"{held[key]:.2f}" if held else "-" for key in ("parameters", "gradients", "state")),
                f"{seconds['median']:.2f} ({seconds['min']:.2f} to {seconds['max']:.2f})",
                ratios(each, "time"),
                f"{each['cpu']:.2f}",
                ratios(each, "cpu"),
                f"{each['peak'] / MIB:.0f}",
                ratios(each, "peak"),
                "yes" if each["equal"] else "no",
            )
        )
    return aligned(rows)


def measure(ranks: int, args: argparse.Namespace, places: Places) -> list[dict[str, Any]]:
    """All engines, in turns."""
    turns: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in args.engines}
    for number in range(args.turns):
        shift = number % len(args.engines)
        for name in args.engines[shift:] + args.engines[:shift]:
            turns[name].append(run(name, ranks, args, places))
    reference = turns[args.engines[0]][0][0]["weights"]
    results = [summary(name, ranks, found, reference) for name, found in turns.items()]
    compare(results)
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--params", type=float, default=30e6, help="about how many (default 30e6)")
    parser.add_argument("--ranks", default="2,4", help="how many, with commas (default 2,4)")
    parser.add_argument(
        "--engines",
        default=",".join(NAMES),
        help="with commas; weights are compared to the first one's (default: all that can be run)",
    )
    parser.add_argument("--deepspeed-python", metavar="PATH", help="the Python of an environment with deepspeed")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that compute beside the ranks")
    parser.add_argument("--link", metavar="MBIT,MS", help="a line of this rate and round trip for each rank")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="in a turn (default 5)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    if args.deepspeed_python and args.engines == parser.get_default("engines"):
        args.engines = ",".join([args.engines, *DEEPSPEED])
    args.engines = args.engines.split(",")
    if unknown := set(args.engines) - {*NAMES, *DEEPSPEED}:
        parser.error(f"--engines: there is no {', '.join(sorted(unknown))}")
    if set(args.engines) & set(DEEPSPEED) and not args.deepspeed_python:
        parser.error("--engines: DeepSpeed needs --deepspeed-python")
    if args.link:
        args.link = [float(each) for each in args.link.split(",")]
    return args


@contextlib.contextmanager
def placed(ranks: int, args: argparse.Namespace) -> Iterator[Places]:
    """The places of the ranks: one namespace, or one for each behind its line."""
    if not args.link:
        if not (prefix := own_namespace()):
            print("no namespace could be made: what the device sent is that of the whole machine's loopback device")
        yield [prefix]
        return
    rate, round_trip = args.link
    with Emulator(ranks, Shape(rate_mbit=rate, delay_ms=round_trip / 4)) as net:
        args.master = net.addresses[0]
        yield [net.command(rank) for rank in range(ranks)]
    print(f"\nthe emulator: {net.counts}")


@contextlib.contextmanager
def computing(count: int) -> Iterator[None]:
    """So many processes that compute and do nothing else."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def main() -> int:
    args = parse()
    exit_on_sigterm()
    everything = []
    for ranks in (int(text) for text in args.ranks.split(",")):
        with placed(ranks, args) as places, computing(args.busy):
            results = measure(ranks, args, places)
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
