"""What an idle peer costs: ``python -m benchmarks.idle``. Linux only (it reads /proc).

Processes are started one after another, in turns, ``--runs`` times each:

- ``python``: nothing at all; ``torch``: imports torch, and waits; ``shoal``: `import shoal` alone;
- ``shoal-peer``: a DHT and a `DecentralizedAverager` of four numbers, idle;
- ``hivemind-peer`` (with ``--against hivemind --hivemind-python PATH``): the same with hivemind 1.1.12, whose processes
  all count.

Printed are medians with the range: seconds to import and, after that, to start; resident, proportional and private
memory (RSS, PSS, USS; for several processes their sum, in which RSS counts shared pages again and again) and the ratio
to `torch`'s of the same Python; processes and threads; and CPU seconds per minute when idle, within ``--window``
seconds that begins two seconds after the start (short: background work that comes seldom may be missing).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.allreduce import ROOT, process_s, processor, spread, write

SETTLE_S = 2.0


def processes(leader: int) -> list[Path]:
    """What /proc has of the processes of one session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(stat.parent)
    return found


def memory(leader: int) -> dict[str, float]:
    """RSS, PSS and USS of a session, bytes; and how many processes and threads it has."""
    total = {"rss": 0.0, "pss": 0.0, "uss": 0.0, "processes": 0.0, "threads": 0.0}
    for each in processes(leader):
        with contextlib.suppress(OSError):
            fields = {
                line.split()[0].rstrip(":"): int(line.split()[1]) * 1024
                for line in (each / "smaps_rollup").read_text().splitlines()[1:]
            }
            total["rss"] += fields["Rss"]
            total["pss"] += fields["Pss"]
            total["uss"] += fields["Private_Clean"] + fields["Private_Dirty"]
            total["processes"] += 1
            total["threads"] += len(list((each / "task").iterdir()))
    return total


def cpu_s(leader: int) -> float:
    total = 0.0
    for each in processes(leader):
        with contextlib.suppress(OSError):
            total += process_s(int(each.name))
    return total


def run(python: str, what: str, window_s: float) -> dict[str, float]:
    """One process, from its start to its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [python, str(ROOT / "benchmarks" / "contenders" / "idle_peer.py"), what]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{what}: the process ended")
        measured: dict[str, float] = json.loads(line)
        if window_s and what.endswith("-peer"):
            time.sleep(SETTLE_S)
            before = cpu_s(process.pid)
            time.sleep(window_s)
            measured["cpu_s_per_minute"] = (cpu_s(process.pid) - before) * 60 / window_s
        return {**measured, **memory(process.pid)}
    finally:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def slowest_imports(count: int = 12) -> list[tuple[str, float]]:
    """The modules that `import shoal` spends most in, seconds each, without what they import themselves."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    text = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import shoal"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    rows = [line.removeprefix("import time:").split("|") for line in text.splitlines() if "|" in line]
    own = [(name.strip(), int(self_us) / 1e6) for self_us, _, name in rows if self_us.strip().isdecimal()]
    return sorted(own, key=lambda row: -row[1])[:count]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--window", type=float, default=5.0, help="seconds in which the CPU of an idle peer is counted")
    parser.add_argument("--against", choices=("hivemind",))
    parser.add_argument("--hivemind-python", metavar="PATH", help="the Python of an environment with hivemind 1.1.12")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    args = parser.parse_args()
    if args.against and not args.hivemind_python:
        parser.error("--against hivemind needs --hivemind-python PATH (benchmarks.allreduce says how to make one)")
    print(f"{args.runs} runs each; {processor()}, {os.cpu_count()} cores", flush=True)
    plan = [(name, sys.executable, name) for name in ("python", "torch", "shoal", "shoal-peer")]
    if args.against:
        plan += [
            ("hivemind's torch", args.hivemind_python, "torch"),
            ("hivemind-peer", args.hivemind_python, "hivemind-peer"),
        ]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in plan}
    for number in range(args.runs):
        for name, python, what in plan[number % len(plan) :] + plan[: number % len(plan)]:
            runs[name].append(run(python, what, args.window))
    results: dict[str, Any] = {}
    for name, each in runs.items():
        bare = runs["hivemind's torch" if name.startswith("hivemind") else "torch"]
        result: dict[str, Any] = {field: spread(one[field] for one in each) for field in each[0]}
        for field in ("rss", "pss", "uss"):
            result[f"{field}_times_torch"] = spread(a[field] / b[field] for a, b in zip(each, bare, strict=True))
        results[name] = result
        show(name, result)
    imports = slowest_imports()
    print(
        "import shoal, modules that take longest: " + ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in imports[:6])
    )
    if args.json:
        write(args.json, {"runs": args.runs, "results": results, "raw": runs, "imports": imports})
    return 0


def show(name: str, result: dict[str, Any]) -> None:
    """A few lines about one kind of process."""

    def of(field: str, form: str, times: float = 1.0) -> str:
        low, middle, high = (form.format(times * result[field][key]) for key in ("min", "median", "max"))
        return f"{middle} [{low}-{high}]"

    print(f"{name:17} import {of('import_s', '{:.3f}')} s", end="")
    if "start_s" in result:
        print(
            f", then start {of('start_s', '{:.3f}')} s, idle CPU {of('cpu_s_per_minute', '{:.2f}')} s per minute",
            end="",
        )
    print(
        f"\n{'':17} {of('processes', '{:.0f}')} processes, {of('threads', '{:.0f}')} threads; MB and times torch's:",
        end="",
    )
    for field in ("rss", "pss", "uss"):
        print(f"  {field.upper()} {of(field, '{:.0f}', 1e-6)} ({result[f'{field}_times_torch']['median']:.2f})", end="")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
