"""The DHT between real processes on loopback: ``python -m benchmarks.dht --nodes 8``.

Every node is a process of its own with its library's defaults (shoal: TLS, signed records, 10 replicas; hivemind 1.1.12,
with ``--against hivemind --hivemind-python PATH``, see `benchmarks.allreduce`: 5 replicas, and a DHT process and a
daemon beside each of these processes). The contenders run at the same time and take turns, so that of two that are
compared one is idle. In each turn, with keys that were never used before and values of 64 bytes:

- *store*, *get*, *get latest*: one operation at a time, from every node in a random order. A key is read by a node that
  did not write it, once with `latest=False` and by another node with `latest=True`;
- *at once*: all nodes together begin ``--at-once`` operations, and one node alone does: operations per second.

Printed are p50 and p99 over all turns, operations per second (median of the turns), and the ratio to shoal, which is
above 1 where shoal is faster; with the range over the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.allreduce import ContenderFailed, Peer, processor, spread, write
from benchmarks.matchmaking import quantile

START_S, TURN_S = 90.0, 120.0
STARTS_AT_ONCE = 4
LATENCIES = ("store", "get", "get latest")
RATES = ("store, all nodes", "get, all nodes", "store, one node", "get, one node")


class Network:
    """All nodes of one library, and what was measured with them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[Peer] = []
        self.seconds: dict[str, list[list[float]]] = {what: [] for what in LATENCIES}
        self.per_s: dict[str, list[float]] = {what: [] for what in RATES}
        self.failed: dict[str, int] = {}

    async def start(self, args: argparse.Namespace, logs: Path) -> None:
        """Start the first node, then the others, a few at a time; all join the first."""
        python = args.hivemind_python if self.name == "hivemind" else sys.executable
        gate = asyncio.Semaphore(STARTS_AT_ONCE)

        async def add(number: int, invites: Sequence[str]) -> str:
            async with gate:
                node = await Peer.spawn(python, f"{self.name}_dht", [], logs / f"{self.name}-{number}.log")
                self.nodes.append(node)
                return str((await node.ask("start", START_S, invites=invites))["invite"])

        invite = await add(0, [])
        await asyncio.gather(*(add(number, [invite]) for number in range(1, args.nodes)))

    async def turn(self, number: int, at_once: int, *, counts: bool) -> None:
        """Measure everything once."""
        rng = random.Random(number)  # the same order for all contenders
        count = len(self.nodes)
        keys = [f"turn {number} key {writer}" for writer in range(count)]
        readers = [(writer + rng.randrange(1, count)) % count for writer in range(count)]
        others = [(reader + rng.randrange(1, count)) % count for reader in readers]
        seconds: dict[str, list[float]] = {what: [] for what in LATENCIES}
        plan = (("store", list(range(count)), {}), ("get", readers, {}), ("get latest", others, {"latest": True}))
        for what, whose, more in plan:
            for key in rng.sample(range(count), count):
                do = what.partition(" ")[0]
                answer = await self.nodes[whose[key]].ask(do, TURN_S, keys=[keys[key]], **more)
                seconds[what] += answer["seconds"]
                self.note(what, answer["failed"])
        per_s = {}
        for who, some in (("all nodes", self.nodes), ("one node", [self.nodes[number % count]])):
            readers_of = self.nodes if len(some) > 1 else [self.nodes[(number + 1) % count]]
            each = [[f"turn {number} {who} {part} {k}" for k in range(at_once // len(some))] for part in range(len(some))]
            per_s[f"store, {who}"] = await self.at_once("store", who, some, each)
            per_s[f"get, {who}"] = await self.at_once("get", who, readers_of, each[1:] + each[:1])
        if counts:
            for what in LATENCIES:
                self.seconds[what].append(seconds[what])
            for what in RATES:
                self.per_s[what].append(per_s[what])

    async def at_once(self, what: str, who: str, nodes: Sequence[Peer], keys: Sequence[Sequence[str]]) -> float:
        """Operations per second."""
        asked = (node.ask("at_once", TURN_S, what=what, keys=some) for node, some in zip(nodes, keys, strict=True))
        answers = await asyncio.gather(*asked)
        self.note(f"{what}, {who}", sum(answer["failed"] for answer in answers))
        began, ended = min(answer["began"] for answer in answers), max(answer["ended"] for answer in answers)
        return sum(map(len, keys)) / (ended - began)

    def note(self, what: str, failed: int) -> None:
        if failed:
            self.failed[what] = self.failed.get(what, 0) + failed


async def compare(args: argparse.Namespace, names: Sequence[str]) -> list[Network]:
    """Run all contenders against each other."""
    networks = [Network(name) for name in names]
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as logs:
        try:
            for network in networks:
                began = time.monotonic()
                await network.start(args, Path(logs))
                print(f"{network.name}: {args.nodes} nodes there after {time.monotonic() - began:.0f} s", flush=True)
            for number in range(args.warm_up + args.turns):
                for network in networks[number % len(networks) :] + networks[: number % len(networks)]:
                    await network.turn(number, args.at_once, counts=number >= args.warm_up)
        finally:
            await asyncio.gather(*(node.stop() for network in networks for node in network.nodes))
    return networks


# -------------------------------------------------------------------------------------------------------------- results


def summary(network: Network, reference: Network) -> dict[str, Any]:
    """Numbers of one contender; `times_shoal` is how much faster shoal was."""
    result: dict[str, Any] = {"failed": network.failed}
    for what in LATENCIES:
        turns, its = network.seconds[what], reference.seconds[what]
        flat = [each for turn in turns for each in turn]
        result[what] = {
            "p50_s": quantile(flat, 0.5),
            "p99_s": quantile(flat, 0.99),
            "times_shoal": quantile(flat, 0.5) / quantile([each for turn in its for each in turn], 0.5),
            "range": spread(statistics.median(a) / statistics.median(b) for a, b in zip(turns, its, strict=True)),
            "p99_times_shoal": quantile(flat, 0.99) / quantile([each for turn in its for each in turn], 0.99),
        }
    for what in RATES:
        mine, its_rates = network.per_s[what], reference.per_s[what]
        result[what] = {
            "per_s": statistics.median(mine),
            "times_shoal": statistics.median(its_rates) / statistics.median(mine),
            "range": spread(b / a for a, b in zip(mine, its_rates, strict=True)),
        }
    return result


def show(results: dict[str, dict[str, Any]]) -> None:
    for what in LATENCIES + RATES:
        for name, result in results.items():
            each = result[what]
            if "p50_s" in each:
                value = f"p50 {1e3 * each['p50_s']:6.2f} ms  p99 {1e3 * each['p99_s']:6.2f} ms"
            else:
                value = f"{each['per_s']:10.0f} per s{'':13}"
            low, high = each["range"]["min"], each["range"]["max"]
            ratio = "" if name == "shoal" else f"  shoal is {each['times_shoal']:.2f} x as fast ({low:.2f} to {high:.2f})"
            if ratio and "p99_times_shoal" in each:
                ratio += f", at p99 {each['p99_times_shoal']:.2f} x"
            print(f"{what:16}  {name:9} {value}{ratio}")
    for name, result in results.items():
        for what, count in result["failed"].items():
            print(f"{name}: {count} failed: {what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1, help="turns before those that count")
    parser.add_argument("--at-once", type=int, default=256, help="operations begun at once")
    parser.add_argument("--against", choices=("hivemind",))
    parser.add_argument("--hivemind-python", metavar="PATH", help="the Python of an environment with hivemind 1.1.12")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    args = parser.parse_args()
    if args.nodes < 3 or args.turns < 1 or args.at_once < args.nodes:
        parser.error("at least 3 nodes, 1 turn, and as many operations at once as nodes")
    if args.against and not args.hivemind_python:
        parser.error("--against hivemind needs --hivemind-python PATH (benchmarks.allreduce says how to make one)")
    print(f"{args.nodes} nodes, {args.turns} turns; {processor()}, {os.cpu_count()} cores", flush=True)
    try:
        networks = asyncio.run(compare(args, ["shoal", *([args.against] if args.against else [])]))
    except ContenderFailed as error:
        raise SystemExit(f"a node could not go on: {error}") from None
    results = {network.name: summary(network, networks[0]) for network in networks}
    show(results)
    if args.json:
        raw = {network.name: {"seconds": network.seconds, "per_s": network.per_s} for network in networks}
        write(args.json, {"nodes": args.nodes, "turns": args.turns, "results": results, "raw": raw})
    return 0


if __name__ == "__main__":
    sys.exit(main())
