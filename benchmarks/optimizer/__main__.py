"""Time to a loss, beside hivemind: ``python -m benchmarks.optimizer --against hivemind --hivemind-python PATH``.

The demo's model learns the demo's text: same data, first weights, AdamW, warm-up and samples of a step (256) in each
library. Every peer is a process of its own on loopback with one torch thread. A batch takes a fixed time (50 ms for 2
sequences, of which about 8 ms are computed and the rest is slept), as if a slower device computed it: so a few cores
carry several peers. First one process trains with plain torch for as many steps as `--epochs` says; the loss that it
reaches is what the swarms have to reach. The libraries take turns at each case: 1, 2 and 4 peers, and 4 in *churn*,
where every few seconds one of them is killed (SIGKILL) and another one takes its place; the first peer is spared, as
its parameters are judged. Processes are forks of one that has imported the library: what imports cost is not measured.

- *Seconds*: from the moment that all peers begin until the held-out loss is reached, with the swarm's steps until then.
  A copy of the first peer's parameters is judged by this process, after each step.
- *Lag*, with 4 peers: from the last needed sample until `step` returns with new parameters, without the all-reduce, of
  the median peer and of the worst one, at each step that all took. It includes the rest of the batch that a peer was
  computing: up to 50 ms. The all-reduce is the shortest that the peers saw, so nobody waits for others in it.

Contenders: `hivemind` 1.1.12 (`benchmarks.allreduce` says how to make its environment) with a `matchmaking_time` of
`--matchmaking` seconds; `shoal_delayed` with `delay_grad_averaging`; `hivemind_delayed` with that and
`delay_optimizer_step`. Those that are delayed train with 4 peers only; they have no lag, as nobody waits.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.allreduce import ROOT, aligned, exit_on_sigterm, processor, write
from benchmarks.optimizer.judge import lags, percentile, time_to
from benchmarks.optimizer.task import Task

LIBRARIES = ("shoal", "hivemind", "shoal_delayed", "hivemind_delayed")
CASES = ("1", "2", "4", "churn")
CHURNED = 4
START_S, SPARED = 120.0, 0


class Failed(Exception):
    """A trainer said so, ended, or was not ready in time."""


class Trainers:
    """The trainers of one library: see `contenders.trainers`.

    Attributes:
        said: each line, in order.
    """

    def __init__(self, library: str, args: argparse.Namespace, folder: Path) -> None:
        kind = library.removesuffix("_delayed")
        python = sys.executable if kind == "shoal" else args.hivemind_python
        self.said: list[dict[str, Any]] = []
        self._heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._log = folder / f"{library}.log"
        with self._log.open("ab") as errors:
            self._server = subprocess.Popen(
                [python, "-m", f"benchmarks.contenders.{kind}_trainer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
                cwd=ROOT,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            with contextlib.suppress(ValueError):
                self._heard.put(json.loads(line))
        self._heard.put(None)

    def hear(self, within_s: float) -> dict[str, Any] | None:
        """The next line, or None if there is none in time. Raises `Failed` if a trainer has ended by itself."""
        with contextlib.suppress(queue.Empty):
            if (said := self._heard.get(timeout=max(0.0, within_s))) is None:
                raise Failed(f"the process that forks trainers ended; {self._last_words()}")
            if "died" in said:
                raise Failed(f"trainer {said['peer']}: {said['died']}; {self._last_words()}")
            self.said.append(said)
            return said
        return None

    def wait(self, what: str, peer: str) -> Any:
        """What a trainer says of this."""
        until = time.monotonic() + START_S
        while (left_s := until - time.monotonic()) > 0:
            if (said := self.hear(left_s)) is not None and said["peer"] == peer and what in said:
                return said[what]
        raise Failed(f"trainer {peer!r} did not say {what!r} within {START_S:.0f} s; {self._last_words()}")

    def order(self, **order: Any) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order).encode() + b"\n")
        self._server.stdin.flush()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"last words: {lines[-1][:200]!r}" if lines else "it printed nothing"

    def close(self) -> None:
        """End them all."""
        assert self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.close()
        try:
            self._server.wait(20.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def run(library: str, case: str, turn: int, target: float, task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """Train until the loss is reached; what came of it."""
    peers = CHURNED if case == "churn" else int(case)
    found: dict[str, Any] = {"library": library, "case": case, "turn": turn, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="shoal-optimizer-") as name:
        folder = Path(name)
        torch.save(task.data, folder / "data.pt")
        trainers = Trainers(library, args, folder)
        try:
            trainers.wait("forks", "")
            _race(trainers, found, folder, (library, peers, case == "churn"), target, task, args)
        except Failed as error:
            found["failed"] = str(error)
        finally:
            trainers.close()
            if args.logs:
                args.logs.mkdir(parents=True, exist_ok=True)
                (args.logs / f"{library}-{case}-{turn}.log").write_text((folder / f"{library}.log").read_text())
                lines = "\n".join(map(json.dumps, trainers.said))
                (args.logs / f"{library}-{case}-{turn}.jsonl").write_text(lines)
    return found


def _race(
    trainers: Trainers,
    found: dict[str, Any],
    folder: Path,
    what: tuple[str, int, bool],
    target: float,
    task: Task,
    args: argparse.Namespace,
) -> None:
    library, peers, churns = what
    saves, go, seeds = folder / "saved", folder / "go", itertools.count(1)
    saves.mkdir()
    entry: list[str] = []

    def job(place: int) -> dict[str, Any]:
        return {
            **task.job(),
            "data": str(folder / "data.pt"),
            "go": str(go),
            "late": go.exists(),
            "entries": entry,
            "seed": next(seeds),
            "saves": str(saves) if place == SPARED else "",
            "batch": args.batch,
            "batch_s": args.batch_s,
            "delayed": library.endswith("_delayed"),
            "matchmaking_s": args.matchmaking,
        }

    def start(place: int, life: int) -> str:
        trainers.order(name=f"{place}.{life}", job=job(place))
        return f"{place}.{life}"

    alive = {SPARED: start(SPARED, 0)}
    entry += trainers.wait("ready", alive[SPARED])[:1]
    alive |= {place: start(place, 0) for place in range(1, peers)}
    for place in range(1, peers):
        if not any("ready" in said for said in trainers.said if said["peer"] == alive[place]):
            trainers.wait("ready", alive[place])
    began = time.monotonic()
    go.touch()
    losses: list[tuple[float, float]] = found.setdefault("losses", [])
    kills, rng, lives = found.setdefault("kills", []), random.Random(found["turn"]), itertools.count(1)
    next_kill = began + args.churn_s if churns else math.inf
    while (left_s := began + args.limit - time.monotonic()) > 0:
        if time.monotonic() >= next_kill:
            next_kill += args.churn_s
            kills.append(time.monotonic() - began)
            place = rng.choice([place for place in alive if place != SPARED])
            trainers.order(kill=alive[place])
            alive[place] = start(place, next(lives))
        said = trainers.hear(min(left_s, next_kill - time.monotonic()))
        if said is not None and "saved" in said:
            path = Path(said["saved"])
            losses.append((said["at"] - began, task.loss(path)))
            path.unlink()
            if losses[-1][1] <= target:
                found["epochs"] = said["epoch"]
                break
    found["seconds"] = time_to(losses, target)
    if not churns and peers == CHURNED and not library.endswith("_delayed"):
        batches = -(-task.training.target_batch // args.batch)
        found["lags"] = [lag._asdict() for lag in lags(trainers.said, peers=peers, batches=batches)]
    found["computed_s"] = statistics.median(said["took_s"] for said in trainers.said if "took_s" in said)


# -------------------------------------------------------------------------------------------------------------- results


def summary(runs: Iterable[dict[str, Any]], names: list[str], cases: list[str]) -> str:
    """A line for each case: seconds of each library, and its steps; where none of the turns came there, why."""
    runs = list(runs)
    rows = [["", *names]]
    for case in cases:
        row = [f"{CHURNED} peers in churn" if case == "churn" else f"{case} peer{'s' if case != '1' else ''}"]
        for name in names:
            mine = [each for each in runs if (each["library"], each["case"]) == (name, case)]
            seconds = sorted(each.get("seconds", math.inf) for each in mine)
            if not mine:
                row.append("-")
            elif seconds[len(seconds) // 2] == math.inf:
                row.append(next((each["failed"][:60] for each in mine if "failed" in each), "not reached"))
            else:
                steps = statistics.median(each["epochs"] for each in mine if "epochs" in each)
                middle, low, high = statistics.median(seconds), seconds[0], seconds[-1]
                row.append(f"{middle:.1f} s [{low:.1f}-{high:.1f}], {steps:.0f} steps")
        rows.append(row)
    return aligned(rows)


def lag_lines(runs: Iterable[dict[str, Any]], names: list[str]) -> list[str]:
    """The lags of each library, all turns together."""
    lines, runs = [], list(runs)
    for name in names:
        mine = [lag for each in runs if each["library"] == name for lag in each.get("lags", ())]
        if mine:
            told = ", ".join(
                f"{which} peer p50 {percentile((lag[which] for lag in mine), 50):.3f} s, "
                f"p90 {percentile((lag[which] for lag in mine), 90):.3f}"
                for which in ("median", "worst")
            )
            reduced = percentile((lag["reduced"] for lag in mine), 50)
            lines.append(f"{name}: lag of {len(mine)} steps: {told}; the all-reduce takes {reduced:.3f} s")
    return lines


def parse() -> tuple[argparse.Namespace, list[str], list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--against", default="", help=f"with commas, any of {', '.join(LIBRARIES[1:])}")
    parser.add_argument("--hivemind-python", metavar="PATH", help="the Python of an environment with hivemind 1.1.12")
    parser.add_argument("--cases", default=",".join(CASES), help=f"with commas, any of {', '.join(CASES)}")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=16, help="steps of the one process that says which loss to reach")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a batch")
    parser.add_argument("--batch-s", type=float, default=0.05, help="seconds of a batch")
    parser.add_argument("--churn-s", type=float, default=8.0, help="seconds between two kills")
    parser.add_argument("--matchmaking", type=float, default=3.0, help="hivemind's matchmaking_time, seconds")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a run at most")
    parser.add_argument(
        "--quick", action="store_true", help="5 steps, 1 and 4 peers, one turn: to see whether it works"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="put there what all trainers said")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the losses there (SVG)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    if args.quick:
        args.epochs, args.cases, args.turns = 5, "1,4", 1
    names = list(dict.fromkeys(["shoal", *filter(None, args.against.split(","))]))
    cases = args.cases.split(",")
    if not set(names) <= set(LIBRARIES) or not set(cases) <= set(CASES):
        parser.error("--against or --cases: see --help for what there is")
    if any(name.startswith("hivemind") for name in names) and not args.hivemind_python:
        parser.error("hivemind needs --hivemind-python PATH (`benchmarks.allreduce` says how to make it)")
    if args.turns < 1 or args.epochs < 1:
        parser.error("at least 1 turn, and 1 step")
    return args, names, cases


def main() -> int:
    args, names, cases = parse()
    exit_on_sigterm()
    torch.set_num_threads(1)
    load, task = os.getloadavg()[0], Task.of_demo()
    alone = task.alone(args.epochs, args.batch)
    target = alone[-1]
    print(
        f"{processor()}, {os.cpu_count()} cores, load {load:.1f}; a batch of {args.batch} sequences takes "
        f"{args.batch_s * 1e3:.0f} ms, a step {task.training.target_batch} sequences; one process comes to a held-out "
        f"loss of {target:.3f} in {args.epochs} steps",
        flush=True,
    )
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    found: dict[str, Any] = {"settings": settings, "names": names, "cases": cases, "target": target, "alone": alone}
    runs: list[dict[str, Any]] = found.setdefault("runs", [])
    for turn, case in itertools.product(range(args.turns), cases):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            if name.endswith("_delayed") and case != str(CHURNED):
                continue
            runs.append(last := run(name, case, turn, target, task, args))
            told = f"failed: {last['failed']}" if "failed" in last else f"{last['seconds']:.1f} s"
            print(f"turn {turn + 1}, {case}, {name}: {told} (load {last['load']:.1f})", flush=True)
            if args.json:
                write(args.json, found)  # it takes long: whoever ends it has what there is
    computed = [each["computed_s"] * 1e3 for each in runs if "computed_s" in each]
    if computed:
        print(
            f"of the {args.batch_s * 1e3:.0f} ms of a batch, {min(computed):.0f} to {max(computed):.0f} were computed"
        )
    print(summary(runs, names, cases), *lag_lines(runs, names), sep="\n")
    if args.picture:
        from benchmarks.optimizer.picture import draw

        draw(found, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
