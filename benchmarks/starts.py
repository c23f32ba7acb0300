"""Do all take part from the beginning? ``python -m benchmarks.starts --peers 16 --starts 20``.

Real processes, of tiny models and a pace by timer, are started together and train for some seconds. Counted is, for
each start, who took part in every swarm step from the third epoch on, by the step itself and not by a download; how
many states were downloaded, and how many in a row at one peer; steps taken alone; the share of a core of a peer.
Exit code 1 if anybody was left out. Imports are done before the start: what they cost hides nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.allreduce import write
from benchmarks.contenders.start_peer import train

FIRST_EPOCH = 3
READY_S = 300.0


# The children are forks of one process that has imported torch: 16 imports on two cores take longer than a start.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["benchmarks.contenders.start_peer"])


class Child:
    """One trainer, and what it said."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=train, args=(settings, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.said: list[dict[str, Any]] = []
        self.ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                self.said.append(self._pipe.recv())
                self.ready.set()

    def wait_ready(self) -> list[str]:
        """Its addresses."""
        if not self.ready.wait(READY_S):
            raise TimeoutError(f"a trainer was not ready within {READY_S:.0f} s")
        return list(self.said[0]["ready"])

    def tell(self) -> None:
        """Make the optimizer, and train; told again: train no more, and say what it cost."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(None)

    def end(self) -> None:
        """Wait for its end."""
        self.process.join(60.0)
        self.process.kill()
        self._reader.join(60.0)

    def all_of(self, kind: str) -> list[dict[str, Any]]:
        """What it said of this kind."""
        return [said for said in self.said if kind in said]


def start(args: argparse.Namespace) -> dict[str, Any]:
    """One start, and what came of it."""
    settings = {
        "peers": [],
        "target": args.target,
        "batch": args.batch,
        "batch_s": args.batch_s,
        "numel": args.numel,
    }
    children = [Child(settings)]
    try:
        addresses = children[0].wait_ready()
        children += [Child({**settings, "peers": addresses[:1]}) for _ in range(args.peers - 1)]
        for child in children:
            child.wait_ready()
        for child in children:
            child.tell()
        time.sleep(args.seconds)
    finally:
        for child in children:
            child.tell()
        for child in children:
            child.end()
    if args.log:
        args.log.write_text("\n".join(json.dumps({"peer": i, **s}) for i, c in enumerate(children) for s in c.said))
    return judge(children)


def judge(children: list[Child]) -> dict[str, Any]:
    """Who took part in what."""
    taken = [{said["epoch"]: said for said in child.all_of("epoch")} for child in children]
    last = max((max(epochs, default=0) for epochs in taken), default=0) - 1  # the very last ones may be under way
    counted = range(FIRST_EPOCH, last + 1)
    missed = [sum(epoch not in epochs for epoch in counted) for epochs in taken]
    in_a_row = []
    for child in children:
        longest = row = 0
        for said in child.said:
            row = row + 1 if "downloaded" in said else 0 if "epoch" in said else row
            longest = max(longest, row)
        in_a_row.append(longest)
    begun = [min(said["at"] for epochs in taken for said in epochs.values() if said["epoch"] == n) for n in counted]
    gaps = [later - earlier for earlier, later in itertools.pairwise(begun)]
    cpu = [said["cpu_s"] / said["wall_s"] for child in children for said in child.all_of("cpu_s")]
    return {
        "epochs": last,
        "first_s": begun[0] if begun else math.nan,
        "epoch_s": statistics.median(gaps) if gaps else math.nan,
        "longest_s": max(gaps, default=math.nan),
        "missed": missed,
        "out": sum(bool(each) for each in missed),
        "downloads": sum(len(child.all_of("downloaded")) for child in children),
        "in_a_row": max(in_a_row),
        "alone": sum(said["peers"] == 1 for child in children for said in child.all_of("epoch")),
        "core": statistics.median(cpu) if cpu else 0.0,
        "warned": sorted({said["warned"] for child in children for said in child.all_of("warned")}),
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
            f"a row, {found['alone']} steps alone, {found['core']:.1%} of a core",
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
