"""How late small calls are while a line is full: ``python -m benchmarks.control``.

Every peer has a network namespace of its own, with lines of 10 Mbit/s and a round trip of 100 ms between them
(`benchmarks.emulator`). Each of them makes small calls ten times a second all the time: *heartbeat*, an empty call to
each other peer; *progress*, a note to each, one way; *DHT*, `get(latest=True)`, which asks all. Meanwhile

- *idle*: nothing else goes on;
- *state*: the last peer downloads the state of the first one, whose line up is full, as is its own line down;
- *round*: all average, so that all lines are full both ways.

Printed are the median, the 99th percentile and the longest delay in ms, and for the state those of the calls of the
donor and to it, and of the newcomer and to it. ``--queue-ms`` is how much the lines' own queues hold (a home router:
up to seconds), ``--congestion cubic`` what a system does that has no BBR. ``--base PATH`` measures another checkout of
shoal, too. ``--upload-limit`` gives each peer one, and prints the most that it has sent in 10 s: all bytes of all of
its IP packets, as the emulator counts them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.allreduce import SOURCES, Peer, aligned, exit_on_sigterm, processor
from benchmarks.emulator.forward import PERIOD_S
from benchmarks.emulator.namespaces import Emulator
from benchmarks.emulator.star import Shape

START_S, WORK_S, WINDOW_S = 60.0, 400.0, 10.0
SCENES = ("idle", "state", "round")
HEAD = ("code", "queue", "congestion", "", "seconds", "", "calls", "median ms", "99% ms", "longest ms")


async def measure(
    args: argparse.Namespace, net: Emulator, congestion: str, logs: Path, sources: Path
) -> list[list[str]]:
    """The lines of one network, with shoal from `sources`."""
    peers: list[Peer] = []
    rows: list[list[str]] = []
    try:
        for rank in range(args.peers):
            options = [net.addresses[rank], str(int(rank == 0)), str(int(args.megabytes * 1e6)), str(args.numel)]
            options += [str(args.upload_limit), congestion]
            log, command = logs / f"{rank}.log", net.command(rank)
            peer = await Peer.spawn(sys.executable, "control_peer", options, log, command, sources=sources)
            peers.append(peer)
        invites: list[str] = []
        for peer in peers:
            invites.append((await peer.ask("start", START_S, invites=invites[:1]))["invite"])
        await asyncio.gather(*(peer.ask("meet", START_S, peers=args.peers) for peer in peers))
        await asyncio.gather(*(peer.ask("average", WORK_S) for peer in peers))  # connections are warm
        for scene in args.scenes:
            await asyncio.gather(*(peer.ask("watch", START_S) for peer in peers))
            took_s = [await work(scene, peers, args) for _ in range(1 if scene == "idle" else args.times)]
            answers = await asyncio.gather(*(peer.ask("delays", START_S) for peer in peers))
            delays = [answer["delays"] for answer in answers]
            rows += [
                [
                    "this" if sources == SOURCES else "base",
                    f"{args.queue_ms:g}",
                    congestion,
                    scene,
                    f"{sum(took_s) / len(took_s):.1f}",
                    *line,
                ]
                for line in lines(scene, delays, net)
            ]
    finally:
        for peer in peers:
            await peer.stop()
    return rows


async def work(scene: str, peers: list[Peer], args: argparse.Namespace) -> float:
    """Fill the lines; returns how long that took, seconds."""
    if scene == "idle":
        await asyncio.sleep(args.idle_s)
        return float(args.idle_s)
    asked = peers[-1:] if scene == "state" else peers
    answers = await asyncio.gather(*(peer.ask("load" if scene == "state" else "average", WORK_S) for peer in asked))
    return max(float(answer["seconds"]) for answer in answers)


def lines(scene: str, delays: list[dict[str, list[tuple[str, float]]]], net: Emulator) -> list[list[str]]:
    """What the calls have taken, by kind, and for a state by the line that is full."""
    found = []
    for kind in ("heartbeat", "progress", "DHT"):
        each = [(net.addresses[rank], host, s) for rank, by in enumerate(delays) for host, s in by.get(kind, [])]
        found.append([kind, *spread([s for *_, s in each])])
        if scene == "state" and kind == "heartbeat":
            for name, host in (("donor", net.addresses[0]), ("newcomer", net.addresses[len(delays) - 1])):
                found.append([f"  of the {name}, or to it", *spread([s for a, b, s in each if host in (a, b)])])
    return found


def spread(delays: list[float]) -> list[str]:
    """How many, median, 99th percentile and longest, ms."""
    ordered = sorted(delays)
    if not ordered:
        return ["0", "-", "-", "-"]
    picked = (ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1])
    return [f"{len(ordered)}", *(f"{delay * 1e3:.0f}" for delay in picked)]


def most_in_a_window(sent: list[int], limit: float) -> float:
    """The most that was sent in `WINDOW_S`, of what the limit allows; `sent`: for each period of the emulator."""
    periods = round(WINDOW_S / PERIOD_S)
    return max(sum(sent[start : start + periods]) for start in range(max(1, len(sent) - periods))) / limit / WINDOW_S


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=10.0, help="Mbit/s of each host, up and down")
    parser.add_argument("--up", default="", help="with commas: Mbit/s up of the first hosts, in place of --rate")
    parser.add_argument("--round-trip-ms", type=float, default=100.0)
    parser.add_argument(
        "--queue-ms", default="100,1000", help="with commas; a packet that would wait longer is dropped"
    )
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--congestion", default="bbr,cubic", help="with commas")
    parser.add_argument("--megabytes", type=float, default=8.0, help="of the state")
    parser.add_argument("--numel", type=int, default=1_000_000, help="float32 values of a round")
    parser.add_argument("--upload-limit", type=float, default=0.0, help="of each peer, bytes per second")
    parser.add_argument("--scenes", default=",".join(SCENES), help="with commas")
    parser.add_argument("--times", type=int, default=2, help="how often each is done")
    parser.add_argument("--idle-s", type=float, default=5.0)
    parser.add_argument("--base", type=Path, metavar="PATH", help="a checkout that is measured as well")
    args = parser.parse_args()
    args.scenes = args.scenes.split(",")
    args.sources = [SOURCES] if args.base is None else [args.base / "src", SOURCES]
    return args


def main() -> int:
    args = parse()
    exit_on_sigterm()
    print(f"{args.peers} hosts, {args.rate:g} Mbit/s each way, round trip {args.round_trip_ms:g} ms, ", end="")
    print(f"loss {args.loss:.0%}; a state of {args.megabytes:g} MB, rounds of {args.numel * 4e-6:.1f} MB; ", end="")
    print(f"{processor()}, {os.cpu_count()} cores", flush=True)
    rows: list[list[str]] = []
    up_mbit = [float(rate) for rate in args.up.split(",") if rate]
    for queue_ms in args.queue_ms.split(","):
        args.queue_ms = float(queue_ms)
        for congestion, sources in itertools.product(args.congestion.split(","), args.sources):
            shape = Shape(args.rate, args.round_trip_ms / 4, args.loss, args.queue_ms)
            with (
                tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as logs,
                Emulator(args.peers, shape, up_mbit=up_mbit) as net,
            ):
                rows += asyncio.run(measure(args, net, congestion, Path(logs), sources))
            counts: dict[str, Any] = net.counts
            print(f"  emulator: {counts['dropped']:,} of {counts['packets']:,} packets dropped, ", end="")
            print(f"late by {counts['latest_ms']:.0f} ms at most", flush=True)
            if args.upload_limit:
                most = [most_in_a_window(sent, args.upload_limit) for sent in counts["sent_bytes"]]
                told = ", ".join(f"{each:.3f}" for each in most)
                print(f"  most that a host has sent in {WINDOW_S:g} s, of what its limit allows: {told}", flush=True)
    print(aligned([HEAD, *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
