"""What `python -m benchmarks` ends with: from the summary in a folder to the table, a page and a picture of it.

``summary.json`` has an entry for each benchmark, by its name: the ``rows`` that were made of its answer, beside them
the machine, versions, commit and date. ``load`` is how busy the machine was when it began, ``stopped`` says why a
benchmark did not come to its end, ``trouble`` why its answer makes no lines, ``left_out`` when and why a later run left
the entry out, so that its lines are older than they could be.

Lines of one commit, day and machine stand under a heading of their own, the newest first: no old one looks as if it was
measured today. What has no line, is not complete, was left out, or could not be judged is listed below them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.allreduce import aligned, write
from benchmarks.entries import ENTRIES, Entry
from benchmarks.plot import draw
from benchmarks.rows import HEADINGS, Bar, Row, Section, Spread, cells, markdown, verdict

__all__ = ["SUMMARY", "keep", "load", "notes", "report", "sections", "unjudged"]

SUMMARY = "summary.json"
BUSY = 1.0
"""Above this load something else keeps the machine busy. The benchmark before is in it, too."""

Result = Mapping[str, Any]


def load(folder: Path) -> dict[str, Result]:
    """What is known of each benchmark, by its name; nothing if there is no summary.

    Raises:
        ValueError: the summary cannot be read.
    """
    path = folder / SUMMARY
    return dict(json.loads(path.read_text())) if path.exists() else {}


def keep(folder: Path, entry: Entry, result: Mapping[str, Any]) -> None:
    """Enter a result into the summary; one without ``content`` only adds to what is there.

    Args:
        folder: where the summary is.
        entry: the benchmark.
        result: its answer as ``content``, which is not kept, but the lines that are made of it; and what stands beside.
    """
    summary = load(folder)
    found = {name: value for name, value in result.items() if name != "content"}
    if "content" in result:
        try:
            found["rows"] = entry.rows(result["content"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            found["trouble"] = f"its result makes no lines: {type(error).__name__}: {error}"
    else:
        found = {**summary.get(entry.name, {}), **found}
    write(folder / SUMMARY, {**summary, entry.name: found})


def _row(values: Sequence[Any]) -> Row:
    """A line, as JSON has kept it."""
    row = Row(*values)
    ratio = None if row.ratio is None else Spread(*row.ratio)
    return row._replace(ratio=ratio, bar=None if row.bar is None else Bar(*row.bar))


def origin(result: Result) -> str:
    """When, from which commit and on what it was measured."""
    machine, versions = result["machine"], result["versions"]
    hivemind = f"hivemind {versions['hivemind']}" if versions.get("hivemind") else "no hivemind"
    return (
        f"{result['date'][:10]}, commit {result['commit']}{', a short run' if result.get('quick') else ''}: "
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']:g} GiB, Python "
        f"{versions['python']}, torch {versions['torch']}, {hivemind}"
    )


def sections(results: Mapping[str, Result], entries: Iterable[Entry]) -> list[Section]:
    """The lines of the table, one section for each origin, the newest first."""
    found: dict[str, list[Row]] = {}
    newest: dict[str, str] = {}
    for entry in entries:
        result = results.get(entry.name, {})
        if "rows" in result:
            title = origin(result)
            found.setdefault(title, []).extend(map(_row, result["rows"]))
            newest[title] = max(newest.get(title, ""), result["date"])
    order = sorted(found, key=lambda title: newest[title], reverse=True)
    return [Section(title, tuple(found[title])) for title in order]


def notes(results: Mapping[str, Result], entries: Iterable[Entry]) -> list[str]:
    """What is not complete, was left out, or was never measured."""
    lines, never = [], []
    for entry in entries:
        result = results.get(entry.name)
        if result is None:
            never.append(entry.name)
            continue
        if (busy := result.get("load", 0.0)) > BUSY:
            lines.append(f"beside other work: {entry.name}: load {busy:g} when it began")
        if trouble := result.get("trouble"):
            lines.append(f"{entry.name}: {trouble}")
        if stopped := result.get("stopped"):
            lines.append(f"not complete: {entry.name}: {stopped}")
        if left := result.get("left_out"):
            older = f"; its lines are of {result['date'][:10]}" if "rows" in result else ""
            when = f"{left['date'][:10]}, commit {left['commit']}"
            lines.append(f"left out: {entry.name}: {left['reason']} ({when}){older}")
    return [*lines, *([f"not measured yet: {', '.join(never)}"] if never else [])]


def unjudged(rows: Iterable[Row]) -> list[str]:
    """The bars that nothing could be held against, by the reason."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.bar is not None and verdict(row) is None:
            found.setdefault(f"{row.beside} {'was not there' if row.absent else 'failed'}", []).append(row.line)
    return [f"not judged: {reason}: {'; '.join(lines)}" for reason, lines in found.items()]


def report(folder: Path, entries: Sequence[Entry] = ENTRIES) -> bool:
    """Print and write everything; returns whether all bars that could be judged were met, and all is complete."""
    results = load(folder)
    tables = sections(results, entries)
    rows = [row for table in tables for row in table.rows]
    verdicts = [met for met in map(verdict, rows) if met is not None]
    bars = sum(row.bar is not None for row in rows)
    summary = f"{sum(verdicts)} of {len(verdicts)} bars met, {bars - len(verdicts)} not judged"
    below = [*notes(results, entries), *unjudged(rows), summary]
    for table in tables:
        print(f"\n{table.title}\n\n" + aligned([HEADINGS, *map(cells, table.rows)]))
    print("", *below, sep="\n")
    page = [f"## {table.title}\n\n{markdown(table.rows)}" for table in tables]
    (folder / "table.md").write_text("\n".join([*page, "## Notes\n", *(f"- {line}" for line in below), ""]))
    draw(tables, folder / "speed.svg")
    print(f"{folder}: {SUMMARY}, table.md, speed.svg")
    return all(verdicts) and not any(result.keys() & {"stopped", "trouble"} for result in results.values())
