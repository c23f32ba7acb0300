"""What `python -m benchmarks` ends with: from the results in a folder to the table, a page and a picture of it.

A result is a file, ``NAME.json``: ``content`` is what the entry of that name wrote, beside it are the machine,
versions, commit and date. ``stopped`` says why a benchmark did not come to its end, ``left_out`` when and why a later
run left the entry out, so that its lines are older than they could be.

Lines of one commit, day and machine stand under a heading of their own, the newest first: no old one looks as if it was
measured today. What has no line, is not complete, was left out, or could not be judged is listed below them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.allreduce import aligned
from benchmarks.entries import ENTRIES, Entry
from benchmarks.plot import draw
from benchmarks.rows import HEADINGS, Row, Section, cells, markdown, verdict

__all__ = ["load", "notes", "report", "sections", "unjudged"]

Result = Mapping[str, Any]


def load(folder: Path, entries: Iterable[Entry]) -> tuple[dict[str, Result], list[str]]:
    """All results that are there, by name in the order of the entries; and which files cannot be read."""
    results, troubles = {}, []
    for entry in entries:
        path = folder / f"{entry.name}.json"
        if path.exists():
            try:
                results[entry.name] = json.loads(path.read_text())
            except ValueError as error:
                troubles.append(f"{entry.name}: its file cannot be read: {error}")
    return results, troubles


def origin(result: Result) -> str:
    """When, from which commit and on what it was measured."""
    machine, versions = result["machine"], result["versions"]
    hivemind = f"hivemind {versions['hivemind']}" if versions.get("hivemind") else "no hivemind"
    return (
        f"{result['date'][:10]}, commit {result['commit']}{', a short run' if result.get('quick') else ''}: "
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']:g} GiB, Python "
        f"{versions['python']}, torch {versions['torch']}, {hivemind}"
    )


def sections(results: Mapping[str, Result], entries: Iterable[Entry]) -> tuple[list[Section], list[str]]:
    """The lines of the table, one section for each origin, the newest first; and which results make no lines."""
    found: dict[str, list[Row]] = {}
    newest: dict[str, str] = {}
    troubles = []
    for entry in entries:
        result = results.get(entry.name, {})
        if "content" not in result:
            continue
        try:
            title, rows = origin(result), entry.rows(result["content"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            troubles.append(f"{entry.name}: its result makes no lines: {type(error).__name__}: {error}")
            continue
        found.setdefault(title, []).extend(rows)
        newest[title] = max(newest.get(title, ""), result["date"])
    order = sorted(found, key=lambda title: newest[title], reverse=True)
    return [Section(title, tuple(found[title])) for title in order], troubles


def notes(results: Mapping[str, Result], entries: Iterable[Entry]) -> list[str]:
    """What is not complete, was left out, or was never measured."""
    lines, never = [], []
    for entry in entries:
        result = results.get(entry.name)
        if result is None:
            never.append(entry.name)
            continue
        if stopped := result.get("stopped"):
            lines.append(f"not complete: {entry.name}: {stopped}")
        if left := result.get("left_out"):
            older = f"; its lines are of {result['date'][:10]}" if "content" in result else ""
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
    results, troubles = load(folder, entries)
    tables, more = sections(results, entries)
    troubles += more
    rows = [row for table in tables for row in table.rows]
    verdicts = [met for met in map(verdict, rows) if met is not None]
    bars = sum(row.bar is not None for row in rows)
    summary = f"{sum(verdicts)} of {len(verdicts)} bars met, {bars - len(verdicts)} not judged"
    below = [*troubles, *notes(results, entries), *unjudged(rows), summary]
    for table in tables:
        print(f"\n{table.title}\n\n" + aligned([HEADINGS, *map(cells, table.rows)]))
    print("", *below, sep="\n")
    page = [f"## {table.title}\n\n{markdown(table.rows)}" for table in tables]
    (folder / "table.md").write_text("\n".join([*page, "## Notes\n", *(f"- {line}" for line in below), ""]))
    draw(tables, folder / "speed.svg")
    print(f"{folder}: *.json, table.md, speed.svg")
    return all(verdicts) and not troubles and not any("stopped" in result for result in results.values())
