"""Do all take part from the beginning? ``python -m benchmarks.starts --peers 16 --starts 20``.

Real processes, of tiny models and a pace by timer, are started together and train for some seconds. Counted is, for
each start, who took part in every swarm step from the third epoch on, by the step itself and not by a download; how
many states were downloaded, and how many in a row at one peer; steps taken alone; the share of a core of a peer.
Exit code 1 if anybody was left out. Imports are done before the start: what they cost hides nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.allreduce import write
from benchmarks.contenders.start_peer import READY_S, train
from benchmarks.processes import Peer, Peers

FIRST_EPOCH = 3


def start(args: argparse.Namespace) -> dict[str, Any]:
    """One start, and what came of it."""
    modes = {"late": args.late, "delay_grad_averaging": args.delay}
    settings = {
        "target": args.target,
        "batch": args.batch,
        "batch_s": args.batch_s,
        "numel": args.numel,
        "modes": modes,
    }
    with Peers() as peers:
        trainers = [peers.start(train, peers=[], **settings)]
        entries = trainers[0].wait("ready", READY_S)[:1]
        trainers += [peers.start(train, peers=entries, **settings) for _ in range(args.peers - 1)]
        for trainer in trainers[1:]:
            trainer.wait("ready", READY_S)
        for trainer in trainers:
            trainer.tell("go")
        time.sleep(args.seconds)
        for trainer in trainers:
            trainer.tell("end")
        for trainer in trainers:
            trainer.result(60.0)
    if args.log:
        lines = ({"peer": i, name: value} for i, trainer in enumerate(trainers) for name, value in trainer.said)
        args.log.write_text("\n".join(map(json.dumps, lines)))
    return judge(trainers)


def judge(trainers: list[Peer]) -> dict[str, Any]:
    """The steps, and the peers that took part in each."""

    def all_of(kind: str) -> list[list[dict[str, Any]]]:
        return [[value for name, value in trainer.said if name == kind] for trainer in trainers]

    def total(name: str) -> float:
        return sum(trainer.returned[name] for trainer in trainers)

    taken = [{said["epoch"]: said for said in each} for each in all_of("epoch")]
    last = max((max(epochs, default=0) for epochs in taken), default=0) - 1  # the very last ones may be under way
    counted = range(FIRST_EPOCH, last + 1)
    missed = [sum(epoch not in epochs for epoch in counted) for epochs in taken]
    in_a_row = []
    for trainer in trainers:
        longest = row = 0
        for name, _ in trainer.said:
            row = row + 1 if name == "downloaded" else 0 if name == "epoch" else row
            longest = max(longest, row)
        in_a_row.append(longest)
    begun = [min(said["at"] for epochs in taken for said in epochs.values() if said["epoch"] == n) for n in counted]
    gaps = [later - earlier for earlier, later in itertools.pairwise(begun)]
    return {
        "epochs": last,
        "first_s": begun[0] if begun else math.nan,
        "epoch_s": statistics.median(gaps) if gaps else math.nan,
        "longest_s": max(gaps, default=math.nan),
        "missed": missed,
        "out": sum(bool(each) for each in missed),
        "downloads": sum(map(len, all_of("downloaded"))),
        "in_a_row": max(in_a_row),
        "alone": sum(said["peers"] == 1 for each in all_of("epoch") for said in each),
        "counted": total("counted") / total("computed"),
        "used": total("counted") / total("possible"),
        "core": statistics.median(trainer.returned["cpu_s"] / trainer.returned["wall_s"] for trainer in trainers),
        "warned": sorted({said["message"] for each in all_of("warned") for said in each}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each start")
    parser.add_argument("--target", type=int, default=1024, help="samples of an epoch")
    parser.add_argument("--batch", type=int, default=16, help="samples of a batch")
    parser.add_argument("--batch-s", type=float, default=0.2, help="seconds of a batch")
    parser.add_argument("--numel", type=int, default=1000, help="parameters")
    parser.add_argument("--late", choices=("drop", "next"), default=None, help="as of shoal.Optimizer")
    parser.add_argument("--delay", action="store_true", help="delay_grad_averaging=True")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write there what the peers of the last start said")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    results = []
    for number in range(args.starts):
        results.append(found := start(args))
        print(
            f"start {number + 1:2}: {found['epochs']:3} epochs (the third after {found['first_s']:.1f} s, then one in "
            f"{found['epoch_s']:.2f} s, at most {found['longest_s']:.1f}), {found['out']:2} of {args.peers} missed one "
            f"from the third on ({sum(found['missed'])} times), {found['downloads']} downloads, {found['in_a_row']} in "
            f"a row, {found['alone']} steps alone, {found['core']:.1%} of a core; {found['counted']:.1%} of what was "
            f"computed went into a step, {found['used']:.1%} of what trainers that never wait would compute",
            flush=True,
        )
        for warning in found["warned"][:4]:
            print(f"          warned: {warning[:160]}", flush=True)
    held = sum(not found["out"] and found["epochs"] > FIRST_EPOCH for found in results)
    print(f"all took part in {held} of {args.starts} starts")
    if args.json:
        write(args.json, {"starts": results})
    return 0 if held == args.starts else 1


if __name__ == "__main__":
    sys.exit(main())
