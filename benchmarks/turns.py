"""This code against older code, in turns: ``python -m benchmarks.turns --base PATH --pairs 15``.

PATH is another checkout (``git worktree add --detach PATH COMMIT``). For each kind of work (``--only`` says which) and
each pair, the processes of both are started anew, with the same benchmark and the sources of either. While both are
there they take turns (A B B A ...), one works and the other is idle, so that whatever else the machine does hits both.
Each pair gives one ratio: the median turn of the base / that of this code. Printed are

- *speed*: the median of the pairs' ratios, and its 90% interval in brackets, by bootstrap (10,000 resamples of the
  pairs, seed 0): above 1 this code is faster;
- *CPU*: the same of the processor time of all processes, which waiting does not change.

A kind is *slower* if the upper end of its interval is below ``--bar``: then the exit code is 3. Wall time needs an idle
machine; with ``--against-itself`` the base's code takes both places, which says what the machine does to such a ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks import state_download
from benchmarks.allreduce import MISSED, SOURCES, START_S, Contender, Peer, aligned, exit_on_sigterm, processor, write

WORK_S = 60.0
WARM_UP = 2


class Turn(NamedTuple):
    """What one turn took."""

    wall_s: float
    cpu_s: float


class Kind(Protocol):
    """One kind of work.

    Attributes:
        what: it is, for the reader.
        turns: of each side in a pair.
    """

    what: str
    turns: int

    async def start(self, sources: Path, logs: Path) -> Contender:
        """Start its processes with the shoal that lies there."""
        ...

    async def turn(self, swarm: Contender, number: int) -> Turn:
        """Let them work once."""
        ...


class Rounds:
    """Rounds of averaging; the whole round counts."""

    name = "shoal"

    def __init__(self, peers: int, numel: int, compression: str = "none", sizes: str = "", turns: int = 15) -> None:
        tensors = f"tensors of {sizes} elements" if sizes else "one tensor"
        self.what = f"a round of {peers} peers, {numel:,} float32 in {tensors}, {compression}"
        self.turns = turns
        options = [f"--sizes={sizes}"] if sizes else []
        self.args = argparse.Namespace(
            peers=peers, numel=numel, compression=compression, part_bytes=None, options=options
        )

    async def start(self, sources: Path, logs: Path) -> Contender:
        args = argparse.Namespace(**vars(self.args), sources=sources)
        return await Contender.start(self.name, args, logs)

    async def turn(self, swarm: Contender, number: int) -> Turn:
        result = await swarm.measure(number)
        return Turn(result.whole_s, result.cpu_s)


class Groups(Rounds):
    """As `benchmarks.matchmaking`: from the last call until the last peer knows its group."""

    name = "matchmaking"

    def __init__(self, peers: int, turns: int = 25) -> None:
        super().__init__(peers, 1000, turns=turns)
        self.what = f"forming a group of {peers} peers"

    async def turn(self, swarm: Contender, number: int) -> Turn:
        joins, cpu_s = await timed(swarm, "average", round=number)
        if any(join["size"] != self.args.peers for join in joins):
            raise RuntimeError(f"not all were in one group: {joins}")
        return Turn(max(join["formed"] for join in joins) - max(join["called"] for join in joins), cpu_s)


class Downloads:
    """As `benchmarks.state_download`: one newcomer loads the state of one donor, again and again."""

    turns = 9

    def __init__(self, megabytes: float) -> None:
        self.what = f"a download of {megabytes:g} MB"
        self.args = argparse.Namespace(megabytes=megabytes, cap=0.0, train_megabytes=1.0, trainers=2)

    async def start(self, sources: Path, logs: Path) -> Contender:
        args = argparse.Namespace(**vars(self.args), sources=sources)
        donor, invite = await state_download.start("shoal", "donor", [], args, logs)
        receiver, _ = await state_download.start("shoal", "receiver", [invite], args, logs)
        return Contender("downloads", [receiver, donor])

    async def turn(self, swarm: Contender, number: int) -> Turn:
        receiver, before = swarm.peers[0], swarm.cpu_s()
        answer = await receiver.ask("load", WORK_S)
        if answer["wrong"]:
            raise RuntimeError(answer["wrong"])
        return Turn(answer["seconds"], swarm.cpu_s() - before)


class Training:
    """`shoal.Optimizer` at work (`contenders.optimizer_peer`)."""

    def __init__(self, case: str, what: str, *, peers: int, turns: int = 9) -> None:
        self.case, self.what, self.peers, self.turns = case, what, peers, turns

    async def start(self, sources: Path, logs: Path) -> Contender:
        swarm, invites = Contender(self.case, []), list[str]()
        for number in range(self.peers):
            peer = await Peer.spawn(
                sys.executable, "optimizer_peer", [self.case], logs / f"{self.case}-{number}.log", sources=sources
            )
            swarm.peers.append(peer)
            invites.append((await peer.ask("start", START_S, invites=invites[:1]))["invite"])
        return swarm

    async def turn(self, swarm: Contender, number: int) -> Turn:
        answers, cpu_s = await timed(swarm, "work")
        return Turn(max(answer["seconds"] for answer in answers), cpu_s)


class Network:
    """The DHT: each node stores values, then each reads those of the node before it."""

    turns = 15

    def __init__(self, nodes: int, keys: int) -> None:
        self.nodes, self.keys = nodes, keys
        self.what = f"{keys} stores by each of {nodes} nodes of a DHT, then as many gets"

    async def start(self, sources: Path, logs: Path) -> Contender:
        swarm, invites = Contender("dht", []), list[str]()
        for number in range(self.nodes):
            peer = await Peer.spawn(sys.executable, "shoal_dht", [], logs / f"dht-{number}.log", sources=sources)
            swarm.peers.append(peer)
            invites.append((await peer.ask("start", START_S, invites=invites[:1], options={}))["invite"])
        return swarm

    async def turn(self, swarm: Contender, number: int) -> Turn:
        keys = [[f"turn {number} node {node} key {key}" for key in range(self.keys)] for node in range(self.nodes)]
        wall_s, before = 0.0, swarm.cpu_s()
        for what, whose in (("store", keys), ("get", keys[1:] + keys[:1])):
            asked = (
                peer.ask("at_once", WORK_S, what=what, keys=[each])
                for peer, each in zip(swarm.peers, whose, strict=True)
            )
            answers = await asyncio.gather(*asked)
            if failed := sum(answer["failed"] for answer in answers):
                raise RuntimeError(f"{failed} times {what} failed")
            wall_s += max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers)
        return Turn(wall_s, swarm.cpu_s() - before)


class Sharded:
    """`shoal.zero` on two ranks (`contenders.zero_peer`)."""

    turns = 5

    def __init__(self, stage: int, parameters: float = 8e6, ranks: int = 2, steps: int = 3) -> None:
        self.stage, self.parameters, self.ranks, self.steps = stage, parameters, ranks, steps
        self.what = f"{steps} steps of a model of {parameters / 1e6:g}M parameters in stage {stage} on {ranks} ranks"

    async def start(self, sources: Path, logs: Path) -> Contender:
        options = [f"--engine=shoal-{self.stage}", f"--params={self.parameters}", f"--ranks={self.ranks}"]
        options.append(f"--file={(logs / 'meet').resolve()}")
        spawned = [
            Peer.spawn(sys.executable, "zero_peer", [*options, f"--rank={n}"], logs / f"{n}.log", sources=sources)
            for n in range(self.ranks)
        ]
        swarm = Contender("zero", [await each for each in spawned])
        await swarm.ask_all("start", START_S)
        return swarm

    async def turn(self, swarm: Contender, number: int) -> Turn:
        answers, cpu_s = await timed(swarm, "work", steps=self.steps)
        return Turn(max(answer["seconds"] for answer in answers), cpu_s)


MODEL = "262144,256,256,589824,256,256,262144,1024,1024"
"""Elements of the tensors in the third stage of ResNet-50: weights, and scales and biases of normalization."""

KINDS: dict[str, Kind] = {
    "rounds": Rounds(2, 5_000_000),
    "rounds_of_4": Rounds(4, 1_000_000),
    "rounds_of_8": Rounds(8, 1_000_000),
    "tiny_of_8": Rounds(8, 256, turns=25),
    "rounds_16bit": Rounds(2, 5_000_000, "float16"),
    "rounds_8bit": Rounds(2, 5_000_000, "uniform8bit"),
    "rounds_quantile": Rounds(2, 5_000_000, "quantile8bit"),
    "rounds_blockwise": Rounds(2, 5_000_000, "blockwise"),
    "model_8bit": Rounds(2, 5_000_000, "uniform8bit", MODEL),
    "model_quantile": Rounds(2, 5_000_000, "quantile8bit", MODEL),
    "model_blockwise": Rounds(2, 5_000_000, "blockwise", MODEL),
    "mixed_8bit": Rounds(2, 5_000_000, "uniform8bit", "36864,64,64,16384,64,1024"),
    "small": Rounds(2, 128_000, "none", "64"),
    "small_8bit": Rounds(2, 128_000, "uniform8bit", "64"),
    "groups": Groups(4),
    "groups_of_16": Groups(16),
    "dht": Network(8, 16),
    "downloads": Downloads(100),
    "local_steps": Training("local", "400 local steps, 48 small tensors", peers=1),
    "epochs_alone": Training("alone", "60 epochs of a peer alone, 48 small tensors", peers=1),
    "epochs": Training("together", "10 epochs of 2 peers, 20 ms a batch, 48 small tensors", peers=2),
    "optimizer_demo": Training("demo", "4 epochs alone, 4 batches each, the demo's model", peers=1, turns=5),
    "optimizer_wide": Training("wide", "2 epochs alone, 4 batches each, 8 million parameters", peers=1, turns=5),
    "zero_1": Sharded(1),
    "zero_2": Sharded(2),
    "zero_3": Sharded(3),
}


async def timed(swarm: Contender, do: str, **more: Any) -> tuple[list[dict[str, Any]], float]:
    """Ask all peers, and what their answers took of the processors."""
    before = swarm.cpu_s()
    answers = await swarm.ask_all(do, WORK_S, **more)
    return answers, swarm.cpu_s() - before


async def pair(kind: Kind, number: int, sides: dict[str, Path]) -> dict[str, list[Turn]]:
    """Start both, let them take turns, end them."""
    swarms: dict[str, Contender] = {}
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as folder:
        try:
            for name in order(list(sides), number):
                logs = Path(folder) / name
                logs.mkdir()
                swarms[name] = await kind.start(sides[name], logs)
            for turn in range(WARM_UP + kind.turns):
                for name in order(list(sides), number + turn):
                    result = await kind.turn(swarms[name], turn)
                    if turn >= WARM_UP:
                        turns[name].append(result)
        finally:
            await asyncio.gather(*(end(peer) for swarm in swarms.values() for peer in swarm.peers))
    return turns


def order(names: list[str], number: int) -> list[str]:
    """The first place takes turns, too."""
    return names if number % 2 else names[::-1]


async def end(peer: Peer) -> None:
    """At once: nobody waits for its leaving."""
    with suppress(ProcessLookupError):
        os.killpg(peer.process.pid, signal.SIGKILL)
    await peer.end()


# -------------------------------------------------------------------------------------------------------------- results


def ratios(pairs: Sequence[dict[str, list[Turn]]], what: str) -> list[float]:
    """Of each pair: the base's time by ours."""
    middle = [{name: statistics.median(getattr(t, what) for t in turns) for name, turns in p.items()} for p in pairs]
    return [each["base"] / each["new"] for each in middle]


def interval(values: Sequence[float], resamples: int = 10_000) -> tuple[float, float, float]:
    """The median, between the ends of its 90% interval."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples))
    return medians[resamples // 20], statistics.median(values), medians[-resamples // 20 - 1]


def shown(values: Sequence[float]) -> str:
    low, middle, high = interval(values)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def row(name: str, pairs: Sequence[dict[str, list[Turn]]], bar: float) -> list[str]:
    base = statistics.median(turn.wall_s for each in pairs for turn in each["base"])
    speed = ratios(pairs, "wall_s")
    verdict = "slower" if interval(speed)[2] < bar else "held"
    return [name, f"{base * 1e3:.1f}", shown(speed), shown(ratios(pairs, "cpu_s")), verdict]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--base", type=Path, required=True, metavar="PATH", help="the checkout of the older code")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", default=",".join(KINDS), help=f"with commas, any of {', '.join(KINDS)}")
    parser.add_argument("--bar", type=float, default=0.97, help="the least speed that is asked for")
    parser.add_argument("--against-itself", action="store_true", help="the base in both places")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    args = parser.parse_args()
    names, base = args.only.split(","), args.base.resolve() / "src"
    if unknown := set(names) - set(KINDS):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}")
    if not (base / "shoal").is_dir() or args.pairs < 2:
        parser.error("--base must be a checkout of shoal, and at least 2 pairs")
    exit_on_sigterm()
    sides = {"base": base, "new": base if args.against_itself else SOURCES}
    print(f"{args.pairs} pairs; {processor()}, {os.cpu_count()} cores", flush=True)
    rows, content = [["", "base ms", "speed", "CPU", ""]], {}
    for name in names:
        began = time.monotonic()
        pairs = [asyncio.run(pair(KINDS[name], number, sides)) for number in range(args.pairs)]
        rows.append(row(name, pairs, args.bar))
        content[name] = {"what": KINDS[name].what, "pairs": pairs}
        print(f"{name}: {KINDS[name].what}; {time.monotonic() - began:.0f} s", flush=True)
        if args.json:
            write(args.json, content)
    print(aligned(rows))
    return MISSED if any(each[-1] == "slower" for each in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
