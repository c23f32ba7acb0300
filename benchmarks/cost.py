"""Where the time of a round goes: ``python -m benchmarks.cost``.

Peers are processes on loopback, as in `benchmarks.allreduce`, all contenders are there from the beginning and take
turns. Printed are medians, with the range in brackets, of

- *CPU-seconds per GiB*: GiB of contributions and averages as encoded, 2 (N - 1) vectors in a round of N peers. Each
  byte counts once, though one peer sends it and another one receives it: the CPU-seconds are those of both, of programs
  and kernel. Beside that what moving a GiB cannot do without, each by itself, on all cores at the same time (cores may
  share what they compute with): `memcpy` is one copy in memory, `crypto` sealing and opening of records, `sockets` TCP
  on loopback, both ends;
- *seconds* of the connections alone, which move the same bytes between the same peers, of the *floor*, which also
  computes what a round has to and does nothing else (`contenders.floor_peer`), and of a whole round. What the
  connections take of the floor is the most that they could take of any round of this design;
- *bytes touched*: how often a byte of the vector is read or written in user space in a round, in each peer, counted as
  bytes pass each place (`contenders.counted_peer`), beside how often that should be.

All but the seconds are of the first of ``--sizes``, which is also measured without encryption, and beside gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.allreduce import (
    ROUND_S,
    Contender,
    ContenderFailed,
    Peer,
    aligned,
    cell,
    exit_on_sigterm,
    processor,
    spread,
    write,
)

GIB = 1 << 30
PRIMITIVES = ("memcpy", "crypto", "sockets")
SEALED, CLEAR = ("transport", "floor", "shoal"), ("clear_transport", "clear_floor", "clear")
NAMES = {
    "transport": "connections",
    "floor": "floor",
    "shoal": "round",
    "clear_transport": "connections, clear",
    "clear_floor": "floor, clear",
    "clear": "round, clear",
    "gloo": "gloo",
}
QUOTIENTS = (
    ("transport", "floor"),
    ("floor", "shoal"),
    ("transport", "shoal"),
    ("clear_transport", "clear_floor"),
    ("clear_floor", "clear"),
    ("gloo", "clear_floor"),
    ("gloo", "clear"),
)


class Place(NamedTuple):
    """Where bytes are touched.

    Attributes:
        what: happens there.
        reads, writes: how often, for each byte that passes.
        expected: how many bytes should pass with so many peers, for each byte of the vector.
    """

    what: str
    reads: int
    writes: int
    expected: Callable[[int], float]


def once(_: int) -> float:
    return 1.0


def sent(peers: int) -> float:
    return 2 * (peers - 1) / peers


def others(peers: int) -> float:
    return (peers - 1) / peers


def mine(peers: int) -> float:
    return 1 / peers


PLACES = {
    "copy_in": Place("copied from the user's tensors, and checked", 2, 1, once),
    "seal": Place("sealed", 1, 1, sent),
    "written": Place("copied to the kernel", 1, 0, sent),
    "received": Place("copied from the kernel", 0, 1, sent),
    "kept": Place("copied as the beginning of a record", 1, 1, lambda _: 0.0),
    "open": Place("opened", 1, 1, sent),
    "begin_sum": Place("own values copied to the sum", 1, 1, mine),
    "decoded": Place("contributions checked", 1, 0, others),
    "add": Place("contributions added", 2, 1, others),
    "finish": Place("sum divided", 1, 1, mine),
    "digest": Place("averages hashed", 1, 0, mine),
    "land": Place("averages of others checked", 1, 0, others),
    "apply": Place("compared with the user's tensors, and written back", 3, 1, once),
}


class Primitives:
    """What moving bytes cannot do without: one process on each core."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers

    @classmethod
    async def start(cls, logs: Path) -> Primitives:
        paths = [logs / f"primitives-{core}.log" for core in range(os.cpu_count() or 1)]
        return cls([await Peer.spawn(sys.executable, "primitives", [], path) for path in paths])

    async def turn(self) -> dict[str, float]:
        """CPU-seconds per GiB of each."""
        result = {}
        for name in PRIMITIVES:
            answers = await asyncio.gather(*(peer.ask(name, ROUND_S) for peer in self.peers))
            result[name] = sum(each["cpu_s"] for each in answers) * GIB / sum(each["bytes"] for each in answers)
        return result

    async def stop(self) -> None:
        await asyncio.gather(*(peer.stop() for peer in self.peers))


def moved_gib(peers: int, numel: int) -> float:
    """What crosses the wire in a round."""
    return 2 * (peers - 1) * numel * 4 / GIB


def asked(peers: int, numel: int) -> argparse.Namespace:
    """What `Contender.start` is told."""
    return argparse.Namespace(peers=peers, numel=numel, compression="none", part_bytes=None, hivemind_python=None)


async def compare(
    peers: int, numel: int, names: Sequence[str], turns: int, *, primitives: bool = False
) -> dict[str, Any]:
    """Let them take turns. The first turn does not count."""
    contenders: list[Contender] = []
    base: Primitives | None = None
    primitive: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as logs:
        try:
            if primitives:
                base = await Primitives.start(Path(logs))
            for name in names:
                contenders.append(await Contender.start(name, asked(peers, numel), Path(logs)))  # noqa: PERF401
            for number in range(1 + turns):
                if base is not None:
                    primitive.append(await base.turn())
                first = number % len(contenders)
                for contender in contenders[first:] + contenders[:first]:
                    await contender.turn(number, counts=number > 0)
        finally:
            await asyncio.gather(*(contender.stop() for contender in contenders))
            if base is not None:
                await base.stop()
    rounds = {each.name: [one and one._asdict() for one in each.rounds] for each in contenders}
    failures = {each.name: each.failure for each in contenders if each.failure is not None}
    return {"peers": peers, "numel": numel, "rounds": rounds, "primitives": primitive[1:], "failures": failures}


async def touched(peers: int, numel: int, rounds: int) -> dict[str, float]:
    """How many bytes pass each place in each peer, for each byte of the vector."""
    total = dict.fromkeys(PLACES, 0)
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as logs:
        swarm = await Contender.start("counted", asked(peers, numel), Path(logs))
        try:
            await swarm.measure(0)
            await swarm.ask_all("touched", ROUND_S)
            for number in range(1, 1 + rounds):
                await swarm.measure(number)
            for answer in await swarm.ask_all("touched", ROUND_S):
                for place in PLACES:
                    total[place] += answer.get(place, 0)
        finally:
            await swarm.stop()
    return {place: nbytes / (rounds * peers * 4 * numel) for place, nbytes in total.items()}


# -------------------------------------------------------------------------------------------------------------- results


def per_gib(measured: dict[str, Any]) -> dict[str, dict[str, float]]:
    """CPU-seconds per GiB, which the system counts in hundredths: of no use where a round moves little."""
    gib = moved_gib(measured["peers"], measured["numel"])
    turns = measured["primitives"]
    result = {name: spread(turn[name] for turn in turns) for name in PRIMITIVES}
    result["memcpy + sockets"] = spread(turn["memcpy"] + turn["sockets"] for turn in turns)
    result["memcpy + crypto + sockets"] = spread(sum(turn.values()) for turn in turns)
    for name, rounds in measured["rounds"].items():
        if values := [each["cpu_s"] / gib for each in rounds if each]:
            result[NAMES[name]] = spread(values)
    return result


def quotients(measured: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of the seconds of whole rounds of the same turn."""
    rounds, result = measured["rounds"], {}
    for name, other in QUOTIENTS:
        pairs = zip(rounds.get(name, ()), rounds.get(other, ()), strict=False)
        if values := [a["whole_s"] / b["whole_s"] for a, b in pairs if a and b]:
            result[f"{NAMES[name]} / {NAMES[other]}"] = spread(values)
    return result


def seconds(measured: dict[str, Any]) -> dict[str, dict[str, float]]:
    found = {NAMES[name]: [each["whole_s"] for each in rounds if each] for name, rounds in measured["rounds"].items()}
    return {name: spread(values) for name, values in found.items() if values}


def title(measured: dict[str, Any]) -> str:
    return f"{measured['peers']} peers x {measured['numel'] / 1e6:g}M"


def show_times(measured: dict[str, Any]) -> None:
    """Print what was measured with one size."""
    if measured["primitives"]:
        print(f"\n{measured['title']}: CPU-s per GiB\n{table(measured['cpu_s_per_gib'], '{:.2f}')}")
    print(f"\n{measured['title']}: seconds\n{table(measured['seconds'], '{:.3f}')}")
    print(table(measured["quotients"], "{:.2f}"), flush=True)
    for name, failure in measured["failures"].items():
        print(f"{name} failed: {failure}")


def show_touched(title: str, peers: int, counted: dict[str, float]) -> None:
    """Print what was counted."""
    rows: list[tuple[str, ...]] = [(f"{title}: bytes, of the vector", "pass", "expected", "read", "written")]
    for name, place in PLACES.items():
        passed = counted[name]
        counts = (passed, place.expected(peers), passed * place.reads, passed * place.writes)
        rows.append((f"  {place.what}", *(f"{value:.2f}" for value in counts)))
    print(f"\n{aligned(rows)}\nread or written in all: {in_all(counted):.1f}")


def in_all(counted: dict[str, float]) -> float:
    return sum(passed * (PLACES[name].reads + PLACES[name].writes) for name, passed in counted.items())


def table(values: dict[str, dict[str, float]], form: str) -> str:
    return aligned([(f"  {name}", cell(value, form)) for name, value in values.items()])


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, printed on the way."""
    sizes = []
    for number, (peers, numel) in enumerate(args.sizes):
        names = [*SEALED, *CLEAR, "gloo"] if number == 0 else SEALED
        measured = await compare(peers, numel, names, args.turns, primitives=number == 0)
        measured |= {"title": title(measured), "seconds": seconds(measured), "quotients": quotients(measured)}
        if number == 0:
            measured["cpu_s_per_gib"] = per_gib(measured)
        show_times(measured)
        sizes.append(measured)
    peers, numel = args.sizes[0]
    counted = await touched(peers, numel, args.turns)
    show_touched(sizes[0]["title"], peers, counted)
    return {"sizes": sizes, "touched": counted, "touched_in_all": in_all(counted)}


def parsed(text: str) -> list[tuple[int, int]]:
    """``4x10,2x10``: peers, and millions of values."""
    pairs = [each.split("x") for each in text.split(",")]
    return [(int(peers), int(float(millions) * 1e6)) for peers, millions in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sizes", type=parsed, default="4x10,2x10,4x1", help="peers x millions of float32")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    args = parser.parse_args()
    if args.turns < 1 or any(peers < 2 or numel < peers for peers, numel in args.sizes):
        parser.error("at least 1 turn, 2 peers, and as many values as peers")
    exit_on_sigterm()
    print(f"{args.turns} turns; {processor()}, {os.cpu_count()} cores", flush=True)
    try:
        content = asyncio.run(measure(args))
    except ContenderFailed as error:
        raise SystemExit(f"a peer could not go on: {error}") from None
    if args.json:
        write(args.json, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
