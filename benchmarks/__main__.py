"""Everything that is measured, one after another: ``python -m benchmarks --hivemind-python PATH``, or ``make bench``.

Each of `benchmarks.entries` runs as a process of its own. Its raw answer goes to ``build/benchmarks/NAME.json``. The
lines that are made of it go to ``benchmarks/results/summary.json``, with the machine, versions, commit and time. At the
end the table of all lines that are there is printed, older ones under their own headings, and written beside them: as
``table.md`` and, as far as it is ratios, as the picture ``speed.svg`` (`benchmarks.report`). A short run (``--quick``)
shows that all works: its numbers mean little, and stay in ``build/benchmarks``.

hivemind 1.1.12 takes part where there is a Python for it (``--hivemind-python``, or HIVEMIND_PYTHON in the environment;
`benchmarks.allreduce` says how to make one); bars against it are not judged where there is none. The machine should do
nothing else meanwhile: it takes an hour or two.

The exit code is 1 if a bar was missed, or a benchmark did not come to its end. One that ends with `MISSED` did.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.allreduce import MISSED, ROOT, aligned, exit_on_sigterm, processor, write
from benchmarks.entries import ENTRIES, Entry
from benchmarks.report import keep, report

RESULTS, RAW = ROOT / "benchmarks" / "results", ROOT / "build" / "benchmarks"
LIMIT_S = 1800.0
VERSIONS = ("torch", "cryptography", "msgspec")


class LeftOut(Exception):
    """Why something is not measured."""


class Broken(LeftOut):
    """It was begun, and gave nothing that can be used."""


def measure(entry: Entry, hivemind_python: str | None, *, quick: bool) -> tuple[Any, str]:
    """Run it; returns what it wrote, and why that is not all (empty: it is). Raises `LeftOut`."""
    if importlib.util.find_spec(entry.module) is None:
        raise LeftOut(f"there is no {entry.module}")
    if (free := free_gib()) is not None and free < entry.gib:
        raise LeftOut(f"it needs {entry.gib:.0f} GiB, and {free:.0f} are free")
    command = [sys.executable, "-m", entry.module, *entry.arguments(hivemind_python, quick=quick), "--json"]
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as folder:
        path = Path(folder) / "result.json"
        with path.open("wb") as output:
            # A group of its own: whatever is left of it can be ended.
            process = subprocess.Popen(
                command if entry.printed else [*command, str(path)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
                stdout=output if entry.printed else None,
                start_new_session=True,
            )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return read(path.read_text(), code)


def read(text: str, code: int | None) -> tuple[Any, str]:
    """What a benchmark wrote, a JSON value or one on each line; and why that is not all (empty: it is).

    Raises:
        Broken: it wrote nothing, or something else.
    """
    stopped = ending(code)
    if not text.strip():
        raise Broken(stopped or "it wrote nothing")
    try:
        try:
            return json.loads(text), stopped
        except json.JSONDecodeError:
            return [json.loads(line) for line in text.splitlines()], stopped
    except json.JSONDecodeError:
        raise Broken(f"what it wrote is broken off; {stopped or 'it ended well'}") from None


def ending(code: int | None) -> str:
    """What went wrong, by the exit code; empty if nothing did but that a bar may have been missed."""
    if code is None:
        return f"not done after {LIMIT_S:.0f} s"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return "" if code in {0, MISSED} else f"it ended with code {code}"


def free_gib() -> float | None:
    """Memory that can be had, or None where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / (1 << 20)
    return None


def surroundings(hivemind_python: str | None) -> dict[str, Any]:
    """The machine, the versions and the commit."""
    git = ["git", "-C", str(ROOT)]
    commit = said([*git, "rev-parse", "--short=12", "HEAD"])
    # Results are written while it runs.
    if commit and said([*git, "status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results"]):
        commit += ", changed"
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in VERSIONS}
    if hivemind_python:
        versions["hivemind"] = said(
            [hivemind_python, "-c", "import importlib.metadata as m; print(m.version('hivemind'))"]
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else 0.0
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": platform.platform(),
    }
    return {"commit": commit, "machine": machine, "versions": versions}


def said(command: Sequence[str]) -> str:
    """What a command prints; empty if it fails."""
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", metavar="NAMES", help="with commas; the table still has all results that are there")
    parser.add_argument("--list", action="store_true", help="the names, and what they run")
    parser.add_argument("--quick", action="store_true", help="a short run, to see whether all works")
    parser.add_argument("--report", action="store_true", help="measure nothing: table and picture of what is there")
    parser.add_argument(
        "--hivemind-python",
        metavar="PATH",
        default=os.environ.get("HIVEMIND_PYTHON"),
        help="the Python of an environment with hivemind 1.1.12; default: HIVEMIND_PYTHON",
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="instead of benchmarks/results")
    args = parser.parse_args()
    names = [entry.name for entry in ENTRIES]
    args.only = names if args.only is None else args.only.split(",")
    if unknown := set(args.only) - set(names):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; --list says what there is")
    args.results = args.results or (RAW if args.quick else RESULTS)
    return args


def main() -> int:
    args = parse()
    exit_on_sigterm()
    entries = [entry for entry in ENTRIES if entry.name in args.only]
    if args.list:
        print(aligned([(each.name, " ".join([each.module, *each.call.split()[1:]])) for each in entries]))
        return 0
    for folder in (args.results, RAW):
        folder.mkdir(parents=True, exist_ok=True)
    around = {} if args.report else surroundings(args.hivemind_python)
    if not args.report and not args.hivemind_python:
        print("without hivemind: no --hivemind-python PATH, no HIVEMIND_PYTHON")
    broken = False
    for number, entry in enumerate([] if args.report else entries, 1):
        # Where that Python is matters here only.
        call = " ".join([entry.module, *entry.arguments(args.hivemind_python and "PATH", quick=args.quick)])
        print(f"[{number}/{len(entries)}] {entry.name}: python -m {call}", flush=True)
        began, load = time.time(), round(os.getloadavg()[0], 1)
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
        try:
            content, stopped = measure(entry, args.hivemind_python, quick=args.quick)
        except LeftOut as reason:
            print(f"left out: {entry.name}: {reason}", file=sys.stderr, flush=True)
            keep(args.results, entry, {"left_out": {"date": date, "commit": around["commit"], "reason": str(reason)}})
            broken = broken or isinstance(reason, Broken)
            continue
        head = {"command": call, "date": date, "seconds": round(time.time() - began, 1), "load": load}
        head["quick"] = args.quick
        result = {**head, **({"stopped": stopped} if stopped else {}), **around, "content": content}
        write(RAW / f"{entry.name}.json", {"name": entry.name, **result})
        keep(args.results, entry, result)
    met = report(args.results) and not broken
    return 0 if met or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
