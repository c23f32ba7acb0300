"""Training over home lines: how much of its time a peer computes. ``python -m benchmarks.home_lines``.

Every peer has a network namespace of its own, and `benchmarks.emulator` lies between them: 10 Mbit/s up and down, 100
ms for a round trip, and one of the peers sends 2 Mbit/s. All train a model of 10 million float32 parameters with
`shoal.Optimizer`. A batch is a wait of `--batch-s`, as on another processor. Gradients are random numbers, but all else
is real: the inner AdamW steps, outer gradients in 4 bits with error feedback, rounds, encryption.

- *computes*: the time of the batches, and of the steps of the inner optimizer (the lower quartile of the calls of
  `step`), by all the time from the first batch to the last;
- *stands*: the longest call of `step`, seconds;
- *merge s*: the rounds, from the group to the verdict, median and longest, and how many of them left somebody out;
- *allowed*: the same bytes by the rates of the lines, if the slowest peer reduces nothing, and sends its outer gradient
  only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

import shoal
from benchmarks.allreduce import exit_on_sigterm
from benchmarks.emulator.namespaces import Emulator, NotPermitted
from benchmarks.emulator.star import Shape
from benchmarks.strategies.named import named
from shoal.compression import codec_by_name
from shoal.events import Event, RoundFinished, Warned
from shoal.strategies import Merges, Strategy

SAMPLES = 8
TENSORS = 20


def strategy_of(args: argparse.Namespace) -> Strategy:
    """The strategy of this name."""
    every = int(args.every) if str(args.every).isdecimal() else args.every
    return named(args.strategy, every=every, fragments=args.fragments, quorum=args.quorum, overlap=args.overlap)


def train(args: argparse.Namespace) -> None:
    """One peer: prints its invite, waits for a line with the others', trains, and prints what it measured."""
    torch.set_num_threads(1)
    with shoal.DHT(host_maddrs=f"/ip4/{args.address}/tcp/0", initial_peers=args.peer, start=True) as dht:
        print(json.dumps({"invite": str(dht.get_visible_maddrs()[0])}), flush=True)
        rounds: list[float] = []
        left_out: list[int] = []
        warned: list[str] = []

        def hear(event: Event) -> None:
            if isinstance(event, RoundFinished):
                rounds.append(event.duration_s)
                left_out.append(len(event.left_out))
            elif isinstance(event, Warned):
                warned.append(event.message)

        dht.events.subscribe(hear)
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(args.numel // TENSORS) * 0.02) for _ in range(TENSORS)]
        strategy, codec = strategy_of(args), codec_by_name(args.codec)
        target = None if isinstance(strategy, Merges) else args.peers * SAMPLES
        swarm = shoal.Optimizer(
            dht=dht,
            run_id="home",
            optimizer=torch.optim.AdamW(parameters, lr=1e-4),
            batch_size_per_step=SAMPLES,
            grad_compression=codec,
            averaging_timeout=600.0,
            bandwidth=(args.rate if args.rank else args.slow_up) * 1e6 / 8,
            strategy=strategy,
            target_batch_size=target,
        )
        swarm.announce_end(args.merges)
        generator = torch.Generator().manual_seed(args.rank)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-3
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        steps: list[float] = []
        pause = threading.Event()
        began = time.monotonic()
        while not swarm.finished and time.monotonic() < began + args.longest_s:
            pause.wait(args.batch_s)
            before = time.monotonic()
            swarm.step()
            steps.append(time.monotonic() - before)
        wall_s = time.monotonic() - began
        own_s = statistics.quantiles(steps, n=4)[0]
        print(
            json.dumps(
                {
                    "computes": len(steps) * (args.batch_s + own_s) / wall_s,
                    "stands": max(steps),
                    "rounds": rounds,
                    "left_out": sum(map(bool, left_out)),
                    "batches": len(steps),
                    "wall_s": wall_s,
                    "sent": swarm.collaboration.core.endpoint.traffic[0],
                    "epoch": swarm.local_epoch,
                    "warned": warned[:3],
                }
            ),
            flush=True,
        )


def links_allow_s(args: argparse.Namespace) -> float:
    """The time of a merge of one part that the lines allow: the slowest line up, and the others' share."""
    parts, others = args.fragments if args.strategy in ("streaming", "decoupled") else 1, args.peers - 1
    encoded = codec_by_name(args.codec).encoded_bytes(args.numel // parts, torch.float32)
    # The others give to each other, and send the averages of what they reduce to all.
    each_s = encoded * ((others - 1) / others + (args.peers - 1) / others) * 8e-6 / args.rate
    return float(max(encoded * 8e-6 / args.slow_up, each_s))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All peers on one network; what each of them has measured."""
    shape = Shape(args.rate, args.round_trip_ms / 4, args.loss, args.queue_ms)
    with Emulator(args.peers, shape, seed=args.seed, up_mbit=[args.slow_up]) as net:
        children: list[subprocess.Popen[str]] = []
        invites: list[str] = []
        try:
            # The slow peer comes last, so that it is not the one that all begin with.
            for rank in (*range(1, args.peers), 0):
                options = {**vars(args), "rank": rank, "address": net.addresses[rank]}
                options["peer"] = invites[:1]
                python = [sys.executable, "-m", "benchmarks.home_lines", "--child", json.dumps(options)]
                command = [*net.command(rank), *python]
                children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
                invites.append(said(children[-1])["invite"])
            for child in children:
                said(child)
            for child in children:
                assert child.stdin is not None
                child.stdin.write("\n")
                child.stdin.flush()
            return [said(child) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()


def said(child: subprocess.Popen[str]) -> dict[str, Any]:
    """The next thing that a peer says."""
    assert child.stdout is not None
    if not (line := child.stdout.readline()):
        raise SystemExit("a peer has ended: see its error above")
    found: dict[str, Any] = json.loads(line)
    return found


def table(args: argparse.Namespace, found: Sequence[dict[str, Any]]) -> str:
    """The results of one strategy."""
    allowed_s = links_allow_s(args)
    lines = [f"{args.strategy}, every {args.every}, {args.codec}; a merge is allowed in {allowed_s:.1f} s:"]
    for number, each in enumerate(found):
        rounds = each["rounds"] or [float("nan")]
        middle_s, who = statistics.median(rounds), "slow" if number == len(found) - 1 else "peer"
        merges = f"{middle_s:.1f} / {max(rounds):.1f} ({middle_s / allowed_s:.2f} of allowed), "
        merges += f"{each['left_out']} of {len(each['rounds'])} left somebody out"
        lines.append(
            f"  {who} {number}: computes {each['computes']:.3f}, stands {each['stands']:.1f} s, merge s {merges}, "
            f"{each['batches']} batches in {each['wall_s']:.0f} s, epoch {each['epoch']}, "
            f"sent {each['sent'] / 1e6:.1f} MB"
        )
        lines += [f"    warned: {message}" for message in each["warned"]]
    return "\n".join(lines)


def main() -> int:
    """Print the table of each strategy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--strategy", default="synchronous,diloco,decoupled", help="with commas; also local, streaming")
    parser.add_argument("--every", default="120", help="batches, or a time such as 60s")
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--overlap", type=int, default=30, help="of streaming, batches")
    parser.add_argument("--quorum", type=int, default=2, help="of decoupled")
    parser.add_argument("--merges", type=int, default=3, help="of each part; steps of synchronous training")
    parser.add_argument("--codec", default="feedback:blockwise:4:64")
    parser.add_argument("--numel", type=int, default=10_000_000)
    parser.add_argument("--batch-s", type=float, default=1.0)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=10.0, help="Mbit/s of each host, up and down")
    parser.add_argument("--slow-up", type=float, default=2.0, help="Mbit/s up of one of them")
    parser.add_argument("--round-trip-ms", type=float, default=100.0)
    parser.add_argument("--queue-ms", type=float, default=200.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--longest-s", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        train(argparse.Namespace(**json.loads(args.child)))
        return 0
    exit_on_sigterm()
    lines = f"{args.rate:g} Mbit/s, one {args.slow_up:g} up, {args.round_trip_ms:g} ms, loss {args.loss:.0%}"
    print(f"{args.peers} peers, {lines}; batches of {args.batch_s:g} s, {args.numel:,} parameters", flush=True)
    for name in args.strategy.split(","):
        args.strategy = name
        try:
            print(table(args, run(args)), flush=True)
        except NotPermitted as error:
            print(f"no namespaces here: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
