"""The DHT between real processes on loopback: ``python -m benchmarks.dht --nodes 8``.

Nodes are real processes with their library's defaults: shoal with TLS, signed records and 10 replicas; hivemind 1.1.12
(``--against hivemind --hivemind-python PATH``, see `benchmarks.allreduce`) with 5, so that a store of shoal's is twice
the work, and half of all nodes may die; ``--replicas N`` gives both as many. With ``--per-process N`` each
process that gives the orders has N nodes, of either library: a node of hivemind is then still a process of its own with
a daemon beside it, one of shoal is a thread. The contenders are there at the same time and take turns, so that
one is idle. In each turn, with keys that were never used before and values of 64 bytes:

- *store*, *get*, *get latest*: one operation at a time, one from every node in a random order. A key is read by a node
  that did not write it, and with `latest=True` by another one;
- *all nodes*, *one node*: these begin ``--at-once`` operations at once; operations per second.

Printed are p50 and p99 over all turns, operations per second (median of the turns), and the ratio to shoal, which is
above 1 where shoal is faster: for each turn that of the medians (or rates) in it, and of these the median and the
range. At p99, for which one turn has too few operations, it is the ratio of the numbers beside it.
"""

from __future__ import annotations

import argparse
import asyncio
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
        self.processes: list[Peer] = []
        self.per_process = 1
        self.nodes = 0
        self.seconds: dict[str, list[list[float]]] = {what: [] for what in LATENCIES}
        self.per_s: dict[str, list[float]] = {what: [] for what in RATES}
        self.failed: dict[str, int] = {}

    async def start(self, args: argparse.Namespace, logs: Path) -> None:
        """Start the first node, then the others, a few at a time; all join the first."""
        python = args.hivemind_python if self.name == "hivemind" else sys.executable
        gate = asyncio.Semaphore(STARTS_AT_ONCE)
        self.per_process, self.nodes = args.per_process, args.nodes
        options = {"num_replicas": args.replicas} if args.replicas else {}
        invites: list[str] = []

        async def add(number: int) -> None:
            async with gate:
                process = await Peer.spawn(python, f"{self.name}_dht", [], logs / f"{self.name}-{number}.log")
                self.processes.append(process)
                for _ in range(self.per_process):
                    invite = (await process.ask("start", START_S, invites=invites[:1], options=options))["invite"]
                    invites.append(invite)

        await add(0)
        await asyncio.gather(*(add(number) for number in range(1, self.nodes // self.per_process)))

    async def one(self, do: str, node: int, key: str, **more: Any) -> float:
        """One operation from one node; seconds."""
        process = self.processes[node // self.per_process]
        answer = await process.ask(do, TURN_S, node=node % self.per_process, key=key, **more)
        self.note(do, answer["failed"])
        return float(answer["seconds"])

    async def many(self, what: str, keys: Sequence[Sequence[str]]) -> float:
        """Operations of all nodes at once, with so many keys each; operations per second."""
        per = self.per_process
        asked = (
            process.ask("at_once", TURN_S, what=what, keys=keys[per * number : per * (number + 1)])
            for number, process in enumerate(self.processes)
            if any(keys[per * number : per * (number + 1)])
        )
        answers = await asyncio.gather(*asked)
        self.note(f"{what} at once", sum(answer["failed"] for answer in answers))
        began, ended = min(answer["began"] for answer in answers), max(answer["ended"] for answer in answers)
        return sum(map(len, keys)) / (ended - began)

    async def turn(self, number: int, at_once: int, *, counts: bool) -> None:
        """Measure everything once."""
        rng = random.Random(number)  # the same order for all contenders
        count = self.nodes
        readers = [(writer + rng.randrange(1, count)) % count for writer in range(count)]
        others = [(reader + rng.randrange(1, count)) % count for reader in readers]
        seconds: dict[str, list[float]] = {}
        plan: tuple[tuple[str, list[int], dict[str, bool]], ...]
        plan = (("store", list(range(count)), {}), ("get", readers, {}), ("get latest", others, {"latest": True}))
        for what, whose, more in plan:
            do, order = what.partition(" ")[0], rng.sample(range(count), count)
            seconds[what] = [await self.one(do, whose[key], f"turn {number} key {key}", **more) for key in order]
        each = [[f"turn {number} node {node} key {k}" for k in range(at_once // count)] for node in range(count)]
        per_s = {"store, all nodes": await self.many("store", each)}
        per_s["get, all nodes"] = await self.many("get", each[1:] + each[:1])
        keys, writer = [f"turn {number} one node, key {k}" for k in range(at_once)], rng.randrange(count)
        per_s["store, one node"] = await self.many("store", only(writer, keys, count))
        per_s["get, one node"] = await self.many("get", only((writer + 1) % count, keys, count))
        if counts:
            for what in LATENCIES:
                self.seconds[what].append(seconds[what])
            for what in RATES:
                self.per_s[what].append(per_s[what])

    def note(self, what: str, failed: int) -> None:
        if failed:
            self.failed[what] = self.failed.get(what, 0) + failed


def only(node: int, keys: list[str], count: int) -> list[list[str]]:
    """Keys for one node, none for the others."""
    return [keys if number == node else [] for number in range(count)]


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
                counts = number >= args.warm_up
                for network in networks[number % len(networks) :] + networks[: number % len(networks)]:
                    await network.turn(number, args.at_once if counts else args.nodes, counts=counts)
        finally:
            await asyncio.gather(*(process.stop() for network in networks for process in network.processes))
    return networks


# -------------------------------------------------------------------------------------------------------------- results


def summary(network: Network, reference: Network) -> dict[str, Any]:
    """Numbers of one contender; `range` is how many times as fast shoal was, turn by turn."""
    result: dict[str, Any] = {"failed": network.failed}
    for what in LATENCIES:
        turns, its = network.seconds[what], reference.seconds[what]
        flat = [each for turn in turns for each in turn]
        result[what] = {
            "p50_s": quantile(flat, 0.5),
            "p99_s": quantile(flat, 0.99),
            "range": spread(statistics.median(a) / statistics.median(b) for a, b in zip(turns, its, strict=True)),
            "p99_times_shoal": quantile(flat, 0.99) / quantile([each for turn in its for each in turn], 0.99),
        }
    for what in RATES:
        mine, its_rates = network.per_s[what], reference.per_s[what]
        result[what] = {
            "per_s": statistics.median(mine),
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
            low, middle, high = (f"{each['range'][key]:.2f}" for key in ("min", "median", "max"))
            ratio = "" if name == "shoal" else f"  shoal is {middle} x as fast ({low} to {high})"
            if ratio and "p99_times_shoal" in each:
                ratio += f", at p99 {each['p99_times_shoal']:.2f} x"
            print(f"{what:16}  {name:9} {value}{ratio}")
    for name, result in results.items():
        for what, count in result["failed"].items():
            print(f"{name}: {count} failed: {what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--per-process", type=int, default=1, help="nodes in each process that gives the orders")
    parser.add_argument("--replicas", type=int, help="nodes that hold a record; default: what each library has")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1, help="turns before those that count")
    parser.add_argument("--at-once", type=int, default=256, help="operations begun at once")
    parser.add_argument("--against", choices=("hivemind",))
    parser.add_argument("--hivemind-python", metavar="PATH", help="the Python of an environment with hivemind 1.1.12")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    args = parser.parse_args()
    if args.nodes < 3 or args.turns < 1 or args.at_once < args.nodes:
        parser.error("at least 3 nodes, 1 turn, and as many operations at once as nodes")
    if args.per_process < 1 or args.nodes % args.per_process:
        parser.error("--nodes must be a multiple of --per-process")
    if args.against and not args.hivemind_python:
        parser.error("--against hivemind needs --hivemind-python PATH (benchmarks.allreduce says how to make one)")
    where = f"{args.per_process} in each process, " if args.per_process > 1 else ""
    print(f"{args.nodes} nodes, {where}{args.turns} turns; {processor()}, {os.cpu_count()} cores", flush=True)
    try:
        networks = asyncio.run(compare(args, ["shoal", *([args.against] if args.against else [])]))
    except ContenderFailed as error:
        raise SystemExit(f"a node could not go on: {error}") from None
    results = {network.name: summary(network, networks[0]) for network in networks}
    show(results)
    if args.json:
        raw = {network.name: {"seconds": network.seconds, "per_s": network.per_s} for network in networks}
        write(
            args.json,
            {
                "nodes": args.nodes,
                "per_process": args.per_process,
                "replicas": args.replicas,
                "turns": args.turns,
                "results": results,
                "raw": raw,
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
