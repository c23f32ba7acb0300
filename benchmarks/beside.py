"""Rounds beside a training loop: ``python -m benchmarks.beside --against hivemind --hivemind-python PATH``.

One of N peers (each a process with one torch thread, on loopback, see `benchmarks.allreduce`) trains in its main thread
while a round that the same thread began with `step(wait=False)` goes on in the background; the others only average.
There are three loops (`contenders.loops`): `torch`, large matrices; `python`, tiny calls of torch and plain Python
code; and `interpreter`, that code alone. For each of them every contender does in turns: the loop alone, a round
alone, both together. Printed are medians with the range:

- *loop slowdown*: the loop's iterations per second alone / during the round, of the same turn;
- *round slowdown*: the whole round (`benchmarks.allreduce` says from when to when) together / alone, of the same turn.

The row `another process` is what sharing the cores costs by itself: shoal's rounds, with the loop in a process beside
those of the peers. What is above it is what sharing one interpreter costs. hivemind averages in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.allreduce import (
    MISSED,
    ROUND_S,
    STOP_S,
    Contender,
    ContenderFailed,
    Peer,
    aligned,
    cell,
    processor,
    spread,
    write,
)
from benchmarks.contenders.loops import LOOPS

APART = "another process"
ALONE_S = 1.0
"""How long the loop runs alone in each turn."""
COLUMNS = {
    "loop alone, per s": ("loop_alone", "{:.1f}"),
    "in a round": ("loop_beside", "{:.1f}"),
    "loop slowdown": ("loop_slowdown", "{:.2f}"),
    "round alone, s": ("round_alone_s", "{:.2f}"),
    "beside": ("round_beside_s", "{:.2f}"),
    "round slowdown": ("round_slowdown", "{:.2f}"),
}


class Turn(NamedTuple):
    """Everything once. Iterations per second, and seconds."""

    loop_alone: float
    loop_beside: float
    round_alone_s: float
    round_beside_s: float


class Pair:
    """The peers of one library, and where the loop runs: in the last of them, or beside them."""

    def __init__(self, name: str, contender: Contender, apart: Peer | None) -> None:
        self.name, self.contender, self.apart = name, contender, apart
        self.turns: dict[str, list[Turn]] = {}
        self.failed: dict[str, list[str]] = {}

    async def turn(self, number: int, loop: str, *, counts: bool) -> None:
        """Everything once, in another order each time; what failed is remembered."""
        parts: list[Callable[[int, str], Awaitable[dict[str, float]]]] = [self.loop, self.round, self.both]
        found: dict[str, float] = {}
        if self.contender.failure is not None:
            return
        try:
            for k in range(3):
                found |= await parts[(number + k) % 3](3 * number + k, loop)
        except ContenderFailed as error:
            print(f"  {self.name}, {loop}, turn {number}: {error}", file=sys.stderr, flush=True)
            self.contender.failed(error)
            if counts:
                self.failed.setdefault(loop, []).append(str(error))
        else:
            if counts:
                self.turns.setdefault(loop, []).append(Turn(**found))
                shown = "  ".join(f"{name} {value:.2f}" for name, value in sorted(found.items()))
                print(f"  {self.name}, {loop}: {shown}", flush=True)

    async def loop(self, number: int, loop: str) -> dict[str, float]:
        trainer = self.apart or self.contender.peers[-1]
        return {"loop_alone": per_s(await trainer.ask("train", ROUND_S, loop=loop, seconds=ALONE_S))}

    async def round(self, number: int, loop: str) -> dict[str, float]:
        return {"round_alone_s": (await self.contender.measure(number)).whole_s}

    async def both(self, number: int, loop: str) -> dict[str, float]:
        await self.contender.ask_all("fill", ROUND_S, round=number)
        if self.apart is None:
            result = await self.contender.average(number, {"loop": loop})
            trained = self.contender.answers[-1]
        else:
            training = asyncio.create_task(self.apart.ask("average", ROUND_S, loop=loop))
            try:
                result = await self.contender.average(number)
            finally:
                self.apart.process.send_signal(signal.SIGUSR1)
                trained = await training
        await self.contender.check(number)
        return {"loop_beside": per_s(trained), "round_beside_s": result.whole_s}


def per_s(answer: dict[str, Any]) -> float:
    return float(answer["iterations"] / answer["seconds"])


async def compare(args: argparse.Namespace) -> list[Pair]:
    """Let all take turns."""
    pairs: list[Pair] = []
    apart: Peer | None = None
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as logs:
        try:
            for name in args.names:
                contender = await Contender.start(name, args, Path(logs))
                pairs.append(Pair(name, contender, None))
                if contender.failure is not None:
                    raise SystemExit(f"{name} did not start: {contender.failure}")
            apart = await Peer.start("loop", sys.executable, 0, args, Path(logs))
            pairs.append(Pair(APART, pairs[0].contender, apart))
            turns = [(number, loop) for number in range(args.warm_up + args.turns) for loop in args.loops]
            for k, (number, loop) in enumerate(turns):
                for pair in pairs[k % len(pairs) :] + pairs[: k % len(pairs)]:
                    await pair.turn(number, loop, counts=number >= args.warm_up)
        finally:
            await asyncio.gather(*(pair.contender.stop() for pair in pairs if pair.name != APART))
            if apart is not None:
                with contextlib.suppress(ContenderFailed):
                    await apart.ask("stop", STOP_S)
                await apart.end()
    return pairs


# -------------------------------------------------------------------------------------------------------------- results


def summary(turns: Sequence[Turn], failed: int) -> dict[str, Any]:
    """Medians and ranges."""
    result: dict[str, Any] = {"turns": len(turns), "failed": failed}
    if turns:
        for field in Turn._fields:
            result[field] = spread(getattr(turn, field) for turn in turns)
        result["loop_slowdown"] = spread(turn.loop_alone / turn.loop_beside for turn in turns)
        result["round_slowdown"] = spread(turn.round_beside_s / turn.round_alone_s for turn in turns)
    return result


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The lines of all loops and contenders."""
    rows = [["loop", "rounds of", *COLUMNS]]
    for loop, each in results.items():
        for name, result in each.items():
            cells = [cell(result[field], form) if field in result else "-" for field, form in COLUMNS.values()]
            rows.append([loop, name, *cells])
    return aligned(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--numel", type=int, default=10_000_000, help="float32 values that are averaged")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=1, help="turns before those that count")
    parser.add_argument("--loops", default=",".join(LOOPS), help=f"with commas, any of {', '.join(LOOPS)}")
    parser.add_argument("--against", choices=("hivemind",))
    parser.add_argument("--hivemind-python", metavar="PATH", help="the Python of an environment with hivemind 1.1.12")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.set_defaults(compression="none", part_bytes=None)
    args = parser.parse_args()
    args.names, args.loops = ["shoal", *([args.against] if args.against else [])], args.loops.split(",")
    if args.peers < 2 or args.turns < 1 or not set(args.loops) <= set(LOOPS):
        parser.error("at least 2 peers, 1 turn, and loops that there are")
    if args.against and not args.hivemind_python:
        parser.error("--against hivemind needs --hivemind-python PATH (benchmarks.allreduce says how to make one)")
    return args


def main() -> int:
    args = parse()
    print(
        f"{args.peers} peers, {args.numel:,} float32 ({args.numel * 4 / 1e6:.1f} MB), {args.turns} turns; "
        f"{processor()}, {os.cpu_count()} cores",
        flush=True,
    )
    pairs = asyncio.run(compare(args))
    results = {
        loop: {pair.name: summary(pair.turns.get(loop, []), len(pair.failed.get(loop, []))) for pair in pairs}
        for loop in args.loops
    }
    print(table(results))
    for loop, each in results.items():
        for name, result in each.items():
            if result["failed"]:
                print(f"{loop}, {name}: {result['failed']} turns failed")
    for pair in pairs:
        if pair.contender.failure is not None:
            print(f"{pair.name} could not go on: {pair.contender.failure}")
    if args.json:
        raw = {
            pair.name: {loop: [turn._asdict() for turn in each] for loop, each in pair.turns.items()} for pair in pairs
        }
        write(args.json, {"peers": args.peers, "numel": args.numel, "results": results, "raw": raw})
    return 0 if all(each["shoal"]["turns"] for each in results.values()) else MISSED


if __name__ == "__main__":
    sys.exit(main())
