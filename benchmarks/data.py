"""How many samples a swarm draws twice before the others: ``python -m benchmarks.data``.

Simulated peers draw batches at their own speeds from a data set of N samples; whenever they have a target batch
together, the swarm takes a step. Each row is a swarm and a way to draw:

replacement  Each draw is independent of all others: 1/e of the samples are unused when N were drawn.
own          `PeerSampler(dataset)`: each peer walks a permutation of its own. Peer i draws a share s_i, so a sample is
             unused with the probability prod(1 - s_i). No way to draw in which peers choose alike and know nothing of
             each other does better: if it gives a sample to peer i with the probability p_i(sample), the mean of
             prod(1 - p_i) over the samples is smallest where all samples are equally likely (Jensen).
ring         All peers walk one permutation, each from a random place on. The expectation is that of `own`, but it
             varies more: it is for all samples together whether the places of two peers lie near each other.
gaps         As `ring`, but a newcomer knows all others' places, and takes the middle of the largest gap.
dealt        `PeerSampler(dataset, swarm)`: each step deals the next samples to its contributors. A draw repeats a
             sample only if it was not dealt. So a bound is expected: what all peers draw before their first deal (the
             samples of a step, and for each peer two batches and those that its `DataLoader` draws ahead), the same
             again for the part of them that begins later, and that dies, and the share that is dropped.

Printed are the share of the samples that is unused when the swarm has drawn N, which is also the share of draws that
repeated one, and the same when it has drawn 2N. A sample of a batch that was dropped counts as used. Churn is the share
of the peers that die, at random moments of the first pass; a new one comes in the place of each. The numbers are the
same on every machine.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

from shoal.base.peer import PeerID
from shoal.data import PeerSampler, Shuffle
from shoal.run.decide.agreement import Contributor, Deal, deal_to

WAYS = ("replacement", "own", "ring", "gaps", "dealt")


@dataclass(frozen=True)
class Swarm:
    """What is simulated.

    Attributes:
        samples: of the data set.
        speeds: of the peers, in batches per time.
        target: samples of a step.
        batch: samples of a batch.
        ahead: batches that a `DataLoader` draws before they are needed.
        dropped: share of the batches whose gradients come too late.
        churn: share of the peers that die in the first pass, each replaced by a new one.
    """

    samples: int
    speeds: tuple[float, ...]
    target: int
    batch: int = 16
    ahead: int = 0
    dropped: float = 0.0
    churn: float = 0.0


@dataclass(frozen=True)
class Row:
    """One swarm and one way to draw; shares, each the mean over the seeds."""

    peers: int
    speeds: str
    churn: float
    dropped: float
    way: str
    expected_1: float | None
    measured_1: float
    spread_1: float
    expected_2: float | None
    measured_2: float


class Peer:
    """One simulated peer: it draws batches ahead, and has samples for the next step."""

    def __init__(self, number: int, speed: float, place: int) -> None:
        self.id = PeerID(number.to_bytes(32, "big"))
        self.speed, self.place = speed, place
        self.swarm: Any = SimpleNamespace(run_id="run", dealt=(), dht=SimpleNamespace(peer_id=self.id))
        self.draws: Iterator[int] = iter(())
        self.ahead: deque[list[int]] = deque()
        self.has = self.steps = 0

    def batch(self, size: int, ahead: int) -> list[int]:
        """The next batch of a loader that is so many batches ahead."""
        while len(self.ahead) <= ahead:
            self.ahead.append([next(self.draws) for _ in range(size)])
        return self.ahead.popleft()

    def deal(self, contributors: list[Contributor], start: int, stop: int) -> None:
        """What the step deals to this peer."""
        share = deal_to(self.id, contributors, start, stop)
        if share[0] < share[1]:
            self.steps += 1
            self.swarm.dealt = (Deal(self.steps, *share),)


def middle_of_gap(places: list[int], size: int) -> int:
    """The middle of the largest gap between places on a ring."""
    if not places:
        return 0
    places = sorted(places)
    gaps = [(after - before, before) for before, after in zip(places, [*places[1:], places[0] + size], strict=True)]
    gap, before = max(gaps)
    return (before + gap // 2) % size


def start_drawing(peer: Peer, way: str, plan: Swarm, rng: random.Random) -> None:
    """Give a new peer its way to draw."""
    size = plan.samples
    if way == "replacement":
        peer.draws = iter(lambda: rng.randrange(size), None)
    elif way in ("own", "dealt"):
        swarm = peer.swarm if way == "dealt" else None
        peer.draws = iter(PeerSampler(range(size), swarm, endless=True, seed=rng.getrandbits(64)))
    else:
        common = Shuffle("ring", size)

        def walk() -> Iterator[int]:
            while True:
                peer.place += 1
                yield common[(peer.place - 1) % size]

        peer.draws = walk()


def play(plan: Swarm, way: str, seed: int) -> list[float]:
    """Draw 2N samples: the shares of them that are unused after N and after 2N draws."""
    rng, size = random.Random(seed), plan.samples
    peers: dict[int, Peer] = {}
    turns: list[tuple[float, int]] = []
    used, drawn, stream, unused = bytearray(size), 0, 0, []
    deaths = sorted(rng.randrange(size) for _ in range(round(plan.churn * len(plan.speeds))))
    numbers = count(1)

    def add(speed: float, now: float) -> None:
        number = next(numbers)
        places = [peer.place % size for peer in peers.values()]
        place = middle_of_gap(places, size) if way == "gaps" else rng.randrange(size)
        peers[number] = peer = Peer(number, speed, place)
        start_drawing(peer, way, plan, rng)
        heapq.heappush(turns, (now + rng.random() / speed, number))

    for speed in plan.speeds:
        add(speed, 0.0)
    while drawn < 2 * size:
        now, number = heapq.heappop(turns)
        peer = peers.get(number)
        if peer is None:
            continue
        for sample in peer.batch(plan.batch, plan.ahead):
            used[sample] = 1
            drawn += 1
            if drawn in (size, 2 * size):
                unused.append(used.count(0) / size)
        if rng.random() >= plan.dropped:
            peer.has += plan.batch
        heapq.heappush(turns, (now + rng.uniform(0.8, 1.2) / peer.speed, number))
        total = sum(each.has for each in peers.values())
        if total >= plan.target:
            contributors = [Contributor(each.id, each.has) for each in peers.values() if each.has]
            for each in peers.values():
                each.deal(contributors, stream, stream + total)
                each.has = 0
            stream += total
        if deaths and drawn >= deaths[0]:
            deaths.pop(0)
            dead = peers.pop(rng.choice(sorted(peers)))
            add(dead.speed, now)
    return unused


def expected(plan: Swarm, way: str, passes: int) -> float | None:
    """The share that is unused after so many passes; a bound for `dealt`, None for `gaps`."""
    shares = [speed / sum(plan.speeds) for speed in plan.speeds]
    if way == "replacement":
        return math.exp(-passes)
    if way == "dealt":
        batches = len(shares) * (2 + plan.ahead) * plan.batch
        not_dealt = (1 + 2 * plan.churn) * (plan.target + batches)
        return min(1.0, not_dealt / plan.samples + plan.dropped) if passes == 1 else 0.0
    if way == "gaps":
        return None
    return math.prod(max(0.0, 1 - share * passes) for share in shares)


def measure(plan: Swarm, way: str, seeds: int) -> Row:
    """One row."""
    found = [play(plan, way, seed) for seed in range(seeds)]
    first = [each[0] for each in found]
    return Row(
        len(plan.speeds),
        "equal" if len(set(plan.speeds)) == 1 else "1 to 8",
        plan.churn,
        plan.dropped,
        way,
        expected(plan, way, 1),
        statistics.fmean(first),
        statistics.pstdev(first),
        expected(plan, way, 2),
        statistics.fmean(each[1] for each in found),
    )


def plans(samples: int) -> Iterator[Swarm]:
    """The swarms of the table."""
    for peers in (2, 4, 16, 64):
        yield Swarm(samples, (1.0,) * peers, 64 * peers)
    yield Swarm(samples, tuple(1.0 + 7 * i / 15 for i in range(16)), 1024)
    yield Swarm(samples, (1.0,) * 16, 1024, ahead=4)
    yield Swarm(samples, (1.0,) * 16, 1024, dropped=0.05)
    yield Swarm(samples, (1.0,) * 16, 1024, churn=0.25)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000, help="of the data set (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON value for each row")
    options = parser.parse_args(argv)
    show: Callable[[Row], str] = json_line if options.json else line
    if not options.json:
        print(
            f"{'peers':>5}  {'speeds':6}  {'churn':>5} {'dropped':>7}  {'way':11}  "
            f"{'N: expected':>17} {'measured':>8} {'(spread)':>8}  {'2N: expected':>18} {'measured':>8}"
        )
    for plan in plans(options.samples):
        for way in WAYS:
            print(show(measure(plan, way, options.seeds)), flush=True)


def json_line(row: Row) -> str:
    return json.dumps(asdict(row))


def line(row: Row) -> str:
    first, second = ("-" if each is None else f"{each:.3f}" for each in (row.expected_1, row.expected_2))
    return (
        f"{row.peers:5}  {row.speeds:6}  {row.churn:5.2f} {row.dropped:7.2f}  {row.way:11}  "
        f"{first:>17} {row.measured_1:8.3f}  ({row.spread_1:.3f})  {second:>18} {row.measured_2:8.3f}"
    )


if __name__ == "__main__":
    main()
