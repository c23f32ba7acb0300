"""Rounds over slow links: ``python -m benchmarks.shaped``.

Every peer has a network namespace of its own, and `benchmarks.emulator` lies between them: by default 100 Mbit/s
up and down, 40 ms for a round trip, queues of 100 ms, and no loss or 1%. Contenders take turns as in
`benchmarks.allreduce`, whose columns these are, and beside them:

- *links allow*: 2 (N - 1) / N x encoded bytes / rate, what each peer must at least send (and receive, meanwhile). With
  ``--up``, where some send more slowly, the same with the shares that take the least time (`layout.balance`). Nothing
  else: no header, no handshake, no round trip, no loss. TCP and IP headers alone take 1.036 times as long.
- */ allowed*: all-reduce, and whole round, divided by that.

`transport` is shoal's connections alone, with nothing averaged: all is sent at once. `sockets` is the floor: plain TCP
that sends what a round sends, an average not before its contributions have come (`contenders.sockets_peer`).

First come raw TCP streams through the emulator, one alone and all pairs at once, as a check of the emulator; last its
counts, with the longest time by which it was late.

Where namespaces cannot be made (they take Linux, root and /dev/net/tun), it says so and simulates the network with
`shoal.sim`: there bytes queue and fly as on the links, but there is no TCP, and computing takes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.allreduce import MISSED, Contender, Place, Round, exit_on_sigterm, processor, spread, write
from benchmarks.contenders.shoal_peer import codec
from benchmarks.emulator.namespaces import Emulator, NotPermitted
from benchmarks.emulator.simulated import simulate
from benchmarks.emulator.star import Shape
from benchmarks.emulator.stream import streams_mbit
from shoal.layout import balance, cost

CONTENDERS = ("shoal", "hivemind", "transport", "sockets")
COLUMNS = ("all-reduce s", "matchmaking s", "whole round s", "links allow s", "/ allowed", "round / allowed", "CPU s")
STREAM_S = 3.0


def allowed_s(args: argparse.Namespace, compression: str) -> float:
    """What the links allow."""
    encoded = codec(compression).encoded_bytes(args.numel, torch.float32)
    rates = [rate * 1e6 / 8 for rate in [*args.up_mbit, *[args.rate] * args.peers][: args.peers]]
    shares = balance(args.numel, rates, [True] * args.peers)
    return cost([size / args.numel for size in shares], rates) * encoded


async def compare(args: argparse.Namespace, net: Emulator) -> list[tuple[str, Contender]]:
    """Let all contenders average over one emulated network, taking turns."""
    places = [Place(net.command(rank), net.addresses[rank]) for rank in range(args.peers)]
    contenders: list[tuple[str, Contender]] = []
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as logs:
        try:
            for compression in args.compression:
                each = argparse.Namespace(**{**vars(args), "compression": compression})
                for name in args.contenders:
                    contenders.append((compression, await Contender.start(name, each, Path(logs), places)))  # noqa: PERF401
            for number in range(args.warm_up + args.rounds):
                turn = number % len(contenders)
                for _, contender in contenders[turn:] + contenders[:turn]:
                    await contender.turn(number, counts=number >= args.warm_up)
        finally:
            await asyncio.gather(*(contender.stop() for _, contender in contenders))
    return contenders


def emulated(args: argparse.Namespace, shape: Shape) -> list[dict[str, Any]]:
    """The rows of one network of namespaces."""
    with Emulator(args.peers, shape, seed=args.seed, up_mbit=args.up_mbit) as net:
        if args.streams:
            check_streams(net, args.peers)
        contenders = asyncio.run(compare(args, net))
    rows = [row(args, shape, each.name, compression, each.rounds, each.failure) for compression, each in contenders]
    packets, lost, dropped = (net.counts.get(key, 0) for key in ("packets", "lost", "dropped"))
    cpu_s, latest_ms = (net.counts.get(key, 0.0) for key in ("cpu_s", "latest_ms"))
    print(f"  emulator: {packets:,} packets, {lost:,} lost, {dropped:,} dropped, {cpu_s:.0f} CPU s, ", end="")
    print(f"late by {latest_ms:.0f} ms at most", flush=True)
    return rows


def simulated(args: argparse.Namespace, shape: Shape) -> list[dict[str, Any]]:
    """The rows of one simulated network."""
    rows = []
    for compression in args.compression:
        times = simulate(args.peers, shape, args.numel, compression, args.warm_up + args.rounds, seed=args.seed)
        rounds = [Round(*each, cpu_s=0.0) for each in times[args.warm_up :]]
        rows.append(row(args, shape, "shoal", compression, rounds, None))
    return rows


def check_streams(net: Emulator, hosts: int) -> None:
    pairs = [(source, target) for source in range(hosts) for target in range(hosts) if source != target]
    for congestion in ("cubic", "bbr"):
        try:
            alone = sum(streams_mbit(net, congestion, STREAM_S, [(0, 1)]))
            together = sum(streams_mbit(net, congestion, STREAM_S, pairs)) / hosts
        except OSError:
            print(f"  raw TCP, {congestion}: not in this kernel")
        else:
            print(f"  raw TCP, {congestion}: {alone:.0f} Mbit/s alone; all to all {together:.0f} from each host")
    sys.stdout.flush()


# -------------------------------------------------------------------------------------------------------------- results


def row(
    args: argparse.Namespace,
    shape: Shape,
    name: str,
    compression: str,
    rounds: Sequence[Round | None],
    failure: str | None,
) -> dict[str, Any]:
    """One line of the table."""
    good = [each for each in rounds if each is not None]
    allowed = allowed_s(args, compression)
    result: dict[str, Any] = {"loss": shape.loss, "name": name, "compression": compression, "allowed_s": allowed}
    result.update(rounds=len(good), failed=len(rounds) - len(good), failure=failure)
    if good:
        result["all-reduce s"] = spread(each.allreduce_s for each in good)
        result["matchmaking s"] = spread(each.matchmaking_s for each in good)
        result["whole round s"] = spread(each.whole_s for each in good)
        result["links allow s"] = spread([allowed])
        result["/ allowed"] = spread(each.allreduce_s / allowed for each in good)
        result["round / allowed"] = spread(each.whole_s / allowed for each in good)
        result["CPU s"] = spread(each.cpu_s for each in good)
    result["all"] = [each and each._asdict() for each in rounds]
    return result


def table(rows: list[dict[str, Any]]) -> str:
    lines = [["loss", "", "codec", *COLUMNS]]
    for each in rows:
        cells = [f"{each['loss']:.0%}", each["name"], each["compression"]]
        for column in COLUMNS:
            if column not in each:
                cells.append("-")
                continue
            low, middle, high = (f"{each[column][key]:.2f}" for key in ("min", "median", "max"))
            cells.append(middle if low == high else f"{middle} [{low}-{high}]")
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    joined = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in joined)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--numel", type=int, default=10_000_000, help="float32 values that are averaged")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before those that count")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of each host, up and down")
    parser.add_argument("--up", default="", help="with commas: Mbit/s up of the first hosts, in place of --rate")
    parser.add_argument("--round-trip-ms", type=float, default=40.0)
    parser.add_argument("--queue-ms", type=float, default=100.0, help="a packet that would wait longer is dropped")
    parser.add_argument("--loss", default="0,0.01", help="with commas; the part of packets that is lost")
    parser.add_argument("--compression", default="none,uniform8bit", help="with commas")
    parser.add_argument("--against", default="", help=f"with commas, any of {', '.join(CONTENDERS[1:])}")
    parser.add_argument("--hivemind-python", metavar="PATH", help="as for benchmarks.allreduce")
    parser.add_argument("--part-bytes", type=int, help="shoal's (and the transport's) part size instead of the default")
    parser.add_argument("--seed", type=int, default=0, help="of the losses")
    parser.add_argument("--no-streams", dest="streams", action="store_false", help="leave the raw TCP streams out")
    parser.add_argument("--simulated", action="store_true", help="simulate, also where namespaces can be made")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    args = parser.parse_args()
    args.contenders = ["shoal", *filter(None, args.against.split(","))]
    if unknown := set(args.contenders) - set(CONTENDERS):
        parser.error(f"--against: unknown {', '.join(sorted(unknown))}")
    if args.peers < 2 or args.rounds < 1 or args.numel < args.peers:
        parser.error("at least 2 peers, 1 round, and as many values as peers")
    if "hivemind" in args.contenders and not args.hivemind_python:
        parser.error("--against hivemind needs --hivemind-python PATH (see benchmarks.allreduce)")
    args.compression = args.compression.split(",")
    args.up_mbit = [float(rate) for rate in args.up.split(",") if rate]
    if args.simulated and args.up_mbit:
        parser.error("--up needs namespaces")
    args.losses = [float(loss) for loss in args.loss.split(",")]
    return args


def main() -> int:
    args = parse()
    exit_on_sigterm()
    print(
        f"{args.peers} hosts, {args.rate:g} Mbit/s each way, round trip {args.round_trip_ms:g} ms, queues of "
        f"{args.queue_ms:g} ms; {args.numel:,} float32 ({args.numel * 4 / 1e6:.1f} MB), {args.rounds} rounds; "
        f"{processor()}, {os.cpu_count()} cores",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    content: dict[str, Any] = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "rows": rows, "simulated": args.simulated}
    content["machine"] = {"processor": processor(), "cores": os.cpu_count()}
    for loss in args.losses:
        if args.json and rows:  # what is there is not lost if this fails
            write(args.json, content)
        shape = Shape(args.rate, args.round_trip_ms / 4, loss, args.queue_ms)
        if not args.simulated:
            try:
                print(f"loss {loss:.1%}", flush=True)
                rows += emulated(args, shape)
                continue
            except NotPermitted as error:
                print(f"no network namespaces here: {error}. The network is simulated: no TCP, computing takes no time")
                args.simulated = content["simulated"] = True
        rows += simulated(args, shape)
    print(table(rows))
    for each in rows:
        if each["failed"] or each["failure"]:
            print(f"{each['name']}, {each['compression']}: {each['failed']} rounds failed; {each['failure'] or ''}")
    if args.json:
        write(args.json, content)
    return 0 if all(each["rounds"] for each in rows if each["name"] == "shoal") else MISSED


if __name__ == "__main__":
    sys.exit(main())
