"""Everything that is measured, one after another: ``python -m benchmarks --hivemind-python PATH``, or ``make bench``.

Each of `benchmarks.entries` runs as a process of its own. What it measured goes to ``benchmarks/results/NAME.json``,
with the machine, versions, commit and time. At the end the table of all results that are there is printed, and written
beside them: as ``table.md`` and, as far as it is ratios, as the picture ``speed.svg``. A short run (``--quick``) shows
that all works: its numbers mean little, and go to ``build/benchmarks``.

hivemind 1.1.12 takes part where there is a Python for it (``--hivemind-python``, or HIVEMIND_PYTHON in the environment;
`benchmarks.allreduce` says how to make one). The machine should do nothing else meanwhile: it takes about an hour.
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.allreduce import ROOT, aligned, exit_on_sigterm, processor, write
from benchmarks.entries import ENTRIES, Entry
from benchmarks.plot import draw
from benchmarks.rows import HEADINGS, Row, cells, markdown, verdict

RESULTS, QUICK_RESULTS = ROOT / "benchmarks" / "results", ROOT / "build" / "benchmarks"
LIMIT_S = 1800.0
VERSIONS = ("torch", "cryptography", "msgspec")


class LeftOut(Exception):
    """Why something is not measured."""


def measure(entry: Entry, hivemind_python: str | None, *, quick: bool) -> Any:
    """Run it; returns what it wrote. Raises `LeftOut`."""
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
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise LeftOut(f"not done after {LIMIT_S:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return read(path.read_text(), code)


def read(text: str, code: int) -> Any:
    """What a benchmark wrote: a JSON value, or one on each line. It may have ended with `code`, as a bar was missed."""
    if not text.strip():
        raise LeftOut(f"it wrote nothing, and ended with code {code}")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


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
    if commit and said([*git, "status", "--porcelain", "--", "src", "benchmarks"]):
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


# -------------------------------------------------------------------------------------------------------------- results


def load(folder: Path, entries: Iterable[Entry]) -> list[tuple[Entry, Mapping[str, Any]]]:
    """All results that are there, in the order of the entries."""
    paths = ((entry, folder / f"{entry.name}.json") for entry in entries)
    return [(entry, json.loads(path.read_text())) for entry, path in paths if path.exists()]


def collected(results: Iterable[tuple[Entry, Mapping[str, Any]]]) -> tuple[list[Row], list[str]]:
    """The lines of the table, and which results could not be read."""
    rows: list[Row] = []
    troubles = []
    for entry, result in results:
        try:
            rows += entry.rows(result["content"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            troubles.append(f"{entry.name}: its result cannot be read: {type(error).__name__}: {error}")
    return rows, troubles


def caption(results: Sequence[tuple[Entry, Mapping[str, Any]]]) -> str:
    """Where and when it was measured; several if the results differ."""
    said: dict[str, None] = {}
    for _, result in results:
        machine, versions = result["machine"], result["versions"]
        said[
            f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']:g} GiB, Python "
            f"{versions['python']}, torch {versions['torch']}, {result['date'][:10]}, commit {result['commit']}"
        ] = None
    return "; ".join(said)


def report(folder: Path, notes: list[str]) -> bool:
    """Print and write everything; returns whether all bars were met."""
    results = load(folder, ENTRIES)
    rows, troubles = collected(results)
    print("\n" + aligned([HEADINGS, *map(cells, rows)]) + "\n")
    print(caption(results))
    for note in notes + troubles:
        print(note)
    verdicts = [met for met in map(verdict, rows) if met is not None]
    print(f"{sum(verdicts)} of {len(verdicts)} bars met")
    if rows:
        (folder / "table.md").write_text(f"{markdown(rows)}\n{caption(results)}\n")
        draw(rows, caption(results), folder / "speed.svg")
        print(f"{folder}: *.json, table.md, speed.svg")
    return all(verdicts) and not troubles


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
    args.results = args.results or (QUICK_RESULTS if args.quick else RESULTS)
    return args


def main() -> int:
    args = parse()
    exit_on_sigterm()
    entries = [entry for entry in ENTRIES if entry.name in args.only]
    if args.list:
        print(aligned([(each.name, " ".join([each.module, *each.call.split()[1:]])) for each in entries]))
        return 0
    args.results.mkdir(parents=True, exist_ok=True)
    notes = []
    if (
        not args.report
        and not args.hivemind_python
        and any("hivemind" in each.against + each.codecs_of for each in entries)
    ):
        notes.append("left out: hivemind: no --hivemind-python PATH, no HIVEMIND_PYTHON")
    around = {} if args.report else surroundings(args.hivemind_python)
    for number, entry in enumerate([] if args.report else entries, 1):
        # Where that Python is matters here only.
        call = " ".join([entry.module, *entry.arguments(args.hivemind_python and "PATH", quick=args.quick)])
        print(f"[{number}/{len(entries)}] {entry.name}: python -m {call}", flush=True)
        began = time.time()
        try:
            content = measure(entry, args.hivemind_python, quick=args.quick)
        except LeftOut as reason:
            notes.append(f"left out: {entry.name}: {reason}")
            print(notes[-1], file=sys.stderr, flush=True)
            continue
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
        head = {"name": entry.name, "command": call, "date": date, "seconds": round(time.time() - began, 1)}
        write(args.results / f"{entry.name}.json", {**head, "quick": args.quick, **around, "content": content})
    met = report(args.results, notes)
    return 0 if met or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
