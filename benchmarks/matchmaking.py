"""Do peers that call together meet? ``python -m benchmarks.matchmaking --peers 16 --rounds 100``.

Every peer is a process with a DHT node and an averager of its own, on loopback with TLS. In every round all call
`step()` on a small tensor at once, with a target of all of them; a group of two would do. Printed are

- how many joins (calls of `step`) ended in a full group, and in how many rounds all peers were in one group;
- the time to form: from the last peer's call until a peer knew its group, over all joins of full groups, and of the
  last peer of each round;
- every failure with its reason, and the sizes of groups that were not full.
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

from benchmarks.allreduce import ROUND_S, Contender, ContenderFailed, processor, write

Round = list[dict[str, Any]]


async def play(args: argparse.Namespace) -> list[Round]:
    """All rounds: what each peer answered."""
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as logs:
        swarm = await Contender.start("matchmaking", args, Path(logs))
        try:
            if swarm.failure is not None:
                raise SystemExit(f"the peers did not start: {swarm.failure}")
            for number in range(args.warm_up + args.rounds):
                answers = await swarm.ask_all("average", ROUND_S, round=number)
                if number >= args.warm_up:
                    rounds.append(answers)
        finally:
            await swarm.stop()
    return rounds


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which this part of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def report(rounds: Sequence[Round], peers: int) -> dict[str, Any]:
    """Everything in numbers."""
    joins = [join for answers in rounds for join in answers]
    full = [join for join in joins if join["size"] == peers]
    times, last = [], []
    for answers in rounds:
        called = max(join["called"] for join in answers)
        formed = [max(0.0, join["formed"] - called) for join in answers if join["size"] == peers]
        times += formed
        last += [max(formed)] if len(formed) == peers else []
    return {
        "rounds": len(rounds),
        "joins": len(joins),
        "full_joins": len(full),
        "full_part": len(full) / len(joins),
        "full_rounds": sum(
            len({join["group"] for join in answers}) == 1 and answers[0]["size"] == peers for answers in rounds
        ),
        "form_s": {name: quantile(times, part) for name, part in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)) if times},
        "last_s": {name: quantile(last, part) for name, part in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)) if last},
        "call_spread_s": statistics.median(
            max(join["called"] for join in answers) - min(join["called"] for join in answers) for answers in rounds
        ),
        "failures": Counter(join["failure"] for join in joins if join["failure"]),
        "smaller": Counter(join["size"] for join in joins if 0 < join["size"] < peers),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.set_defaults(numel=1000, compression="none", part_bytes=None)
    args = parser.parse_args()
    if args.peers < 2 or args.rounds < 1:
        parser.error("at least 2 peers and 1 round")
    print(f"{args.peers} peers, {args.rounds} rounds; {processor()}, {os.cpu_count()} cores", flush=True)
    began = time.monotonic()
    try:
        rounds = asyncio.run(play(args))
    except ContenderFailed as error:
        raise SystemExit(f"a peer could not go on: {error}") from None
    result = report(rounds, args.peers)
    print(f"joins in a full group: {result['full_joins']} of {result['joins']} ({result['full_part']:.2%})")
    print(f"rounds with one group of all: {result['full_rounds']} of {result['rounds']}")
    for name, what in (("form_s", "time to form, all peers"), ("last_s", "time to form, last peer of a round")):
        values = "  ".join(f"{key} {1e3 * value:.0f} ms" for key, value in result[name].items())
        print(f"{what}: {values or 'never'}")
    print(f"calls of a round were {1e3 * result['call_spread_s']:.0f} ms apart (median of first to last)")
    for reason, count in result["failures"].most_common():
        print(f"failed {count} times: {reason}")
    for size, count in sorted(result["smaller"].items()):
        print(f"joins in a group of {size}: {count}")
    print(f"{time.monotonic() - began:.0f} s in all")
    if args.json:
        write(args.json, {**result, "answers": rounds})
    return 0 if result["full_part"] >= 0.99 else 1


if __name__ == "__main__":
    sys.exit(main())
