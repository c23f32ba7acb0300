"""Do peers that call together meet? ``python -m benchmarks.matchmaking --peers 16 --rounds 100``.

Every peer is a process with a DHT node and an averager of its own, on loopback with TLS. In every round all call
`step()` on a small tensor at once, with a target of all of them; a group of two would do. Printed are, for each of the
sizes in ``--peers``,

- how many joins (calls of `step`) ended in a full group, and in how many rounds all peers were in one group;
- the time to form: from the last peer's call until a peer knew its group, over all joins of full groups, and of the
  last peer of each round in which all were in full ones. Groups that are not full have no time: they are late;
- every failure with its reason, and the sizes of groups that were not full.

With ``--against hivemind --hivemind-python PATH`` (see `benchmarks.allreduce`) peers of hivemind 1.1.12 take turns with
shoal's, round by round, on the same terms: the target is all, and everything else what each library does by itself, so
that a group of two would do there, too. hivemind is left out once it has failed too often or for too long
(`FAILURES_IN_A_ROW`, `FAILURES`, `NOT_FULL_S`), and at once if a peer of it is gone or silent; what was measured stays.
Links are warm: rounds before ``--warm-up`` do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.allreduce import MISSED, ROUND_S, Contender, ContenderFailed, exit_on_sigterm, processor, write

Round = list[dict[str, Any]]

PEERS = {"shoal": "matchmaking", "hivemind": "hivemind_matchmaking"}
"""What runs a peer of each contender."""

FAILURES_IN_A_ROW, FAILURES = 3, 6
"""So many rounds in which a `step` failed are enough: each may take its whole time limit."""

NOT_FULL_S = 180.0
"""So many seconds in rounds in which not all found a full group are enough."""


class Turns:
    """The rounds of one contender: what each peer answered. A round that failed as a whole is empty."""

    def __init__(self, name: str, swarm: Contender) -> None:
        self.name, self.swarm = name, swarm
        self.rounds: list[Round] = []
        self.failed = self.failed_in_a_row = 0
        self.not_full_s = 0.0
        self.left_out: str | None = None

    async def play(self, number: int, *, counts: bool) -> None:
        """One round, if it still takes part."""
        if self.left_out is not None:
            return
        began = time.monotonic()
        answers = await one_round(self.swarm, number)
        if counts:
            self.rounds.append(answers)
        why = self.enough(answers, time.monotonic() - began)
        if self.swarm.failure is not None:
            await self.leave(f"left out after round {number}: {self.swarm.failure}")
        elif why and self.name != "shoal":
            await self.leave(f"left out after round {number}: {why}")

    def enough(self, answers: Round, seconds: float) -> str | None:
        """Count one more round. Why these were enough, if they were."""
        failed = not answers or any(join["failure"] for join in answers)
        if failed or any(join["size"] < len(answers) for join in answers):
            self.not_full_s += seconds
        self.failed += failed
        self.failed_in_a_row = self.failed_in_a_row + 1 if failed else 0
        if self.failed_in_a_row == FAILURES_IN_A_ROW:
            return f"{FAILURES_IN_A_ROW} failures in a row"
        if self.failed == FAILURES:
            return f"{FAILURES} failures"
        return f"{self.not_full_s:.0f} s without a full group" if self.not_full_s > NOT_FULL_S else None

    async def leave(self, why: str) -> None:
        """Take part no longer."""
        self.left_out = why
        await self.swarm.stop()


async def play(args: argparse.Namespace, names: Sequence[str]) -> list[Turns]:
    """All rounds of each contender. Without shoal the others do not go on."""
    turns: list[Turns] = []
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as logs:
        try:
            for name in names:
                turns.append(Turns(name, await Contender.start(PEERS[name], args, Path(logs))))
                if (failure := turns[-1].swarm.failure) is not None:
                    await turns[-1].leave(f"left out, its peers did not start: {failure}")
            for number in range(args.warm_up + args.rounds):
                for each in turns[number % len(turns) :] + turns[: number % len(turns)]:
                    if turns[0].left_out is None:
                        await each.play(number, counts=number >= args.warm_up)
        finally:
            await asyncio.gather(*(each.swarm.stop() for each in turns if each.left_out is None))
    return turns


async def one_round(swarm: Contender, number: int) -> Round:
    """What each peer answered; nothing if not all did."""
    try:
        return await swarm.ask_all("average", ROUND_S, round=number)
    except ContenderFailed as error:
        print(f"  {swarm.name}, round {number}: {error}", file=sys.stderr, flush=True)
        swarm.failed(error)
        return []


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which this part of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def report(rounds: Sequence[Round], peers: int) -> dict[str, Any]:
    """Everything in numbers."""
    empty, rounds = sum(not answers for answers in rounds), [answers for answers in rounds if answers]
    joins = [join for answers in rounds for join in answers]
    count = len(joins) + empty * peers
    full = [join for join in joins if join["size"] == peers]
    times, last = [], []
    for answers in rounds:
        called = max(join["called"] for join in answers)
        formed = [max(0.0, join["formed"] - called) for join in answers if join["size"] == peers]
        times += formed
        last += [max(formed)] if len(formed) == peers else []
    return {
        "rounds": len(rounds),
        "failed_rounds": empty,
        "joins": count,
        "full_joins": len(full),
        "full_part": len(full) / count if count else 0.0,
        "full_rounds": sum(
            len({join["group"] for join in answers}) == 1 and answers[0]["size"] == peers for answers in rounds
        ),
        "form_s": {name: quantile(times, part) for name, part in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)) if times},
        "last_s": {name: quantile(last, part) for name, part in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)) if last},
        "call_spread_s": statistics.median(
            [max(join["called"] for join in answers) - min(join["called"] for join in answers) for answers in rounds]
            or [0.0]
        ),
        "failures": Counter(join["failure"] for join in joins if join["failure"]),
        "smaller": Counter(join["size"] for join in joins if 0 < join["size"] < peers),
    }


def show(name: str, result: dict[str, Any]) -> None:
    print(f"{name}: joins in a full group: {result['full_joins']} of {result['joins']} ({result['full_part']:.2%})")
    print(f"rounds with one group of all: {result['full_rounds']} of {result['rounds'] + result['failed_rounds']}")
    for field, what in (("form_s", "time to form, all peers"), ("last_s", "time to form, last peer of a round")):
        values = "  ".join(f"{key} {1e3 * value:.0f} ms" for key, value in result[field].items())
        print(f"{what}: {values or 'never'}")
    print(f"calls of a round were {1e3 * result['call_spread_s']:.0f} ms apart (median of first to last)")
    for reason, count in result["failures"].most_common():
        print(f"failed {count} times: {reason}")
    for size, count in sorted(result["smaller"].items()):
        print(f"joins in a group of {size}: {count}")
    if result["left_out"]:
        print(f"{name}: {result['left_out']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--peers", default="16", help="sizes of the group, with commas")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--against", choices=("hivemind",))
    parser.add_argument("--hivemind-python", metavar="PATH", help="the Python of an environment with hivemind 1.1.12")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.set_defaults(numel=1000, compression="none", part_bytes=None)
    args = parser.parse_args()
    sizes = [int(size) for size in args.peers.split(",")]
    if min(sizes) < 2 or args.rounds < 1:
        parser.error("at least 2 peers and 1 round")
    if args.against and not args.hivemind_python:
        parser.error("--against hivemind needs --hivemind-python PATH (benchmarks.allreduce says how to make one)")
    exit_on_sigterm()
    names = ["shoal", *([args.against] if args.against else [])]
    content: dict[str, Any] = {}
    for args.peers in sizes:
        print(f"{args.peers} peers, {args.rounds} rounds; {processor()}, {os.cpu_count()} cores", flush=True)
        began = time.monotonic()
        turns = asyncio.run(play(args, names))
        results = {each.name: report(each.rounds, args.peers) | {"left_out": each.left_out} for each in turns}
        for name, result in results.items():
            show(name, result)
        if args.against and results[args.against]["last_s"] and results["shoal"]["last_s"]:
            times = results[args.against]["last_s"]["p50"] / results["shoal"]["last_s"]["p50"]
            print(f"the last peer of a round, p50: {args.against} takes {times:.1f} times as long")
        print(f"{time.monotonic() - began:.0f} s in all", flush=True)
        content[str(args.peers)] = {"results": results, "answers": {each.name: each.rounds for each in turns}}
        if args.json:  # what is there is not lost if the next size fails
            write(args.json, content)
    ours = [each["results"]["shoal"] for each in content.values()]
    return 0 if all(each["full_part"] >= 0.99 and not each["left_out"] for each in ours) else MISSED


if __name__ == "__main__":
    sys.exit(main())
