"""What low-communication training costs in loss: ``python -m benchmarks.strategies``.

Four peers in one process train a small language model on the demo's text (`task`), with the one-process reference of
each strategy (`reference`). All runs see as many tokens, and begin with the weights that some synchronous steps have
left. Runs of one seed are compared: they have the same first weights and the same streams of samples. Printed are the
held-out loss, its ratio to that of another case of the same seeds, with the standard error of the mean, and the bar for
it. Where that error is above half a percent, and the bar less than five such errors away, more seeds are run. Bytes are
those that a peer sends for each token it trains, by the law of an all-reduce; beside them how many times fewer they are
than in synchronous training.

``quality`` has the strategies and the bars. The other groups answer questions: with which inner moments a newcomer
begins (``joins``), what happens to steps that were trained during a merge (``overlaps``), who gives if one peer is slow
(``speeds``), whether a merge resets the inner moments (``moments``), and what a peer that missed merges does with its
progress (``stale``). ``search`` has the hyper-parameters that were tried, on a seed of its own. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.strategies.cases import GROUPS, SYNCHRONOUS, groups
from benchmarks.strategies.study import Case, bytes_per_token, train
from benchmarks.strategies.task import Task

SEARCH_SEED, MOST_SEEDS, ENOUGH, FAR = 11, 6, 0.005, 5.0
HEADING = "4 peers, {steps} steps of {rows} windows after {begun} synchronous ones, {seeds} seeds"
CODECS = ("blockwise:4:64", "blockwise:2:64", "topk:0.03:2")


class Results:
    """Losses, kept in a file: a study that was stopped goes on where it was."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, float] = json.loads(path.read_text()) if path is not None and path.exists() else {}

    def loss(self, case: Case, task: Task) -> float:
        """Of one run."""
        key = repr((replace(case, name="", against=None, bar=None), task))
        if key not in self._found:
            self._found[key] = train(case, task)
            if self._path is not None:
                self._path.write_text(json.dumps(self._found, indent=0))
            print(f"seed {task.seed}: {case.name}: {self._found[key]:.4f}", file=sys.stderr, flush=True)
        return self._found[key]


def ratio(losses: dict[str, list[float]], case: Case) -> tuple[float, float]:
    """The mean ratio to the other case, and its standard error."""
    beside = losses[case.against or case.name]
    each = [mine / its for mine, its in zip(losses[case.name], beside, strict=False)]
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return statistics.fmean(each), error


def unclear(mean: float, error: float, bar: float) -> bool:
    """Whether more seeds could say more of the bar; not of a loss that is far beyond it."""
    return error > ENOUGH and abs(mean - bar) < FAR * error


def study(cases: Sequence[Case], tasks: Sequence[Task], results: Results) -> dict[str, list[float]]:
    """The losses of each case, one for each task; of some more, where a bar asks for it."""
    losses: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(MOST_SEEDS):
        unsure = {
            name
            for case in cases
            if case.bar is not None and case.against is not None and number >= len(tasks) > 1
            if unclear(*ratio(losses, case), case.bar)
            for name in (case.name, case.against)
        }
        for case in cases:
            if number < len(tasks) or case.name in unsure:
                task = replace(tasks[0], seed=tasks[0].seed + number, beta2=case.beta2, rate=case.rate)
                losses[case.name].append(results.loss(case, task))
    return losses


def line(case: Case, losses: dict[str, list[float]], task: Task) -> str:
    """Of the table."""
    found, sent = losses[case.name], bytes_per_token(case, task)
    fewer = bytes_per_token(SYNCHRONOUS, task) / sent
    cells = [case.name, str(len(found)), f"{statistics.fmean(found):.4f}", f"{sent:,.2f}", f"{fewer:,.0f}"]
    if case.against is None:
        return " | ".join([*cells, "", "", ""])
    mean, error = ratio(losses, case)
    bar = "" if case.bar is None else f"{case.bar - 1:.0%}: {'met' if mean <= case.bar else 'not met'}"
    spread = "" if math.isnan(error) else f" ± {error:.2%}"
    return " | ".join([*cells, case.against, f"{mean - 1:+.2%}{spread}", bar])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in GROUPS if name != "search"]
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=usual, help="groups (default: all but search)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=1200, help="of each peer; a multiple of 100 (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=16, help="windows in a peer's step (default: %(default)s)")
    parser.add_argument("--begun", type=int, default=400, help="synchronous steps before (default: %(default)s)")
    parser.add_argument("--codecs", nargs="*", default=CODECS, help="of outer gradients (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the losses; a run that is in it is not repeated")
    parser.add_argument("--picture", type=Path, help="SVG file for a picture of the group quality; needs matplotlib")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results, known = Results(options.json), groups(options.codecs)
    for group in options.only:
        seeds = [SEARCH_SEED] if group == "search" else range(options.first_seed, options.first_seed + options.seeds)
        tasks = [Task(seed=seed, steps=options.steps, rows=options.rows, begun=options.begun) for seed in seeds]
        losses = study(known[group], tasks, results)
        print(f"\n## {group}: {HEADING.format(**{**vars(options), 'seeds': len(tasks)})}\n")
        print("| case | seeds | loss | bytes / token | times fewer | beside | loss above it | bar |")
        print("| --- " * 8 + "|")
        for case in known[group]:
            print(f"| {line(case, losses, tasks[0])} |")
        if group == "quality" and options.picture is not None:
            from benchmarks.strategies.picture import draw

            draw([(case, losses[case.name], bytes_per_token(case, tasks[0])) for case in known[group]], options.picture)


if __name__ == "__main__":
    main()
