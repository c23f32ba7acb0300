"""Small groups average a large swarm: ``python -m benchmarks.moshpit_sim``.

1,024 simulated peers with random values form groups of 32 again and again. Printed is, for each round, the variance of
the values over the living peers, divided by that before the round, and beside it what theory says. Two ways of choosing
who meets, each without failures and with 5% of the peers crashing at random moments of every round:

random  Before each round all peers are dealt to the keys at random. For groups of given sizes the expected ratio is
        exactly (r - 1) / (N - 1), with N living peers in r groups. (The mean of a group of n that are drawn from N has
        the variance v (N - n) / (n (N - 1)); its n members have it: the sum of N - n over the groups, by N (N - 1), is
        that.) Moshpit SGD (Ryabinin et al. 2021, arXiv:2103.03239, on averaging in random groups) has
        (r - 1) / N + r / N^2; both are 0.030 here.
grid    `next_group_bits`: keys of one digit of 32 values, the place in the group is the other digit of the grid. The
        first round is one of random groups. In every later one a group has at most one member of each of the M = 32
        groups before: of their means it averages n at random, so that the ratio is (M - n) / (n (M - 1)), and over
        groups of different sizes the same with their mean size in place of n. Full groups: 0, the average is exact
        after two rounds.

Peers, matchmaking and links are shoal's own, on a simulated network; a peer's values travel as what it gathers, so
that each member averages those that its own `Begin` brought. What is not simulated is the exchange of large tensors
(`benchmarks.allreduce` measures it). Peers find each other through a dictionary in memory that takes as long as the DHT
would, or with ``--directory dht`` through shoal's own DHT, which costs several times the real time (try it with
``--peers 64 --target 8``). The numbers are the same on every machine, but for the last column.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.dht_sim import LIMITS, without_gc
from shoal.averaging.directory import DhtDirectory
from shoal.averaging.matchmaking import Group, GroupDirectory, JoinTerms, Matchmaker, MatchmakingConfig
from shoal.averaging.matchmaking.group_bits import next_group_bits
from shoal.base.peer import Address, PeerID
from shoal.dht import DhtNode, DhtSettings
from shoal.errors import RoundFailed
from shoal.protocol.wire import Contact, Member
from shoal.rpc import Endpoint
from shoal.sim import SimHost, SimNetwork, Swarm, run, sleep

PREFIX = "moshpit"
VALUES = 64
LATENCY_S, JITTER_S = 0.02, 0.02
SPREAD_S = 0.1
CRASH_WITHIN_S = 1.0
WINDOW_S = 10.0


class MemoryDirectory:
    """One dictionary for all peers; a write takes about six latencies, a read four, as in the DHT."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"{seed}/directory")
        self.entries: dict[str, dict[PeerID, tuple[Contact, float]]] = {}

    async def pause(self, latencies: int) -> None:
        await sleep(latencies * self.rng.uniform(LATENCY_S, LATENCY_S + JITTER_S) / 2)


class MemoryView:
    """One peer's view of it. Of its writes the last one called wins."""

    def __init__(self, directory: MemoryDirectory, peer: PeerID) -> None:
        self.directory, self.peer = directory, peer
        self.serial = 0

    async def write(self, group_key: str, entry: tuple[Contact, float] | None) -> list[tuple[Contact, float]]:
        self.serial += 1
        serial = self.serial
        await self.directory.pause(6)
        if serial == self.serial:
            entries = self.directory.entries.setdefault(group_key, {})
            entries.pop(self.peer, None)
            if entry is not None:
                entries[self.peer] = entry
        found = list(self.directory.entries.get(group_key, {}).values())
        await self.directory.pause(6)
        return found

    async def declare(self, group_key: str, expiration: float, contact: Contact) -> list[tuple[Contact, float]]:
        return await self.write(group_key, (contact, expiration))

    async def withdraw(self, group_key: str) -> None:
        await self.write(group_key, None)

    async def read(self, group_key: str) -> list[tuple[Contact, float]]:
        await self.directory.pause(4)
        found = list(self.directory.entries.get(group_key, {}).values())
        await self.directory.pause(4)
        return found


@dataclass
class Peer:
    """One simulated peer and its values."""

    endpoint: Endpoint
    matchmaker: Matchmaker
    values: array[float]
    bits: str = ""


@dataclass(frozen=True)
class Row:
    """What one round did."""

    way: str
    crash: float
    round: int
    alive: int
    groups: int
    mean_size: float
    smallest: int
    without_group: int
    ratio: float
    theory: float
    left: float
    form_p50_s: float
    form_max_s: float
    real_s: float


def plan(members: Sequence[Member]) -> tuple[list[int], int]:
    """Equal shares: nothing is reduced here."""
    return [1] * len(members), 1024


async def start(host: SimHost, initial: Sequence[Address], target: int, directory: MemoryDirectory | None) -> Peer:
    """Start a peer on a simulated host; without a directory, in the DHT of the others."""
    endpoint = Endpoint(host.transport, host.env, limits=LIMITS)
    await endpoint.start()
    view: GroupDirectory
    if directory is None:
        node = DhtNode(endpoint, host.env, host.identity, settings=DhtSettings(bucket_size=8))
        await node.bootstrap(initial)
        view = DhtDirectory(node, endpoint, timeout_s=2.4)
    else:
        view = MemoryView(directory, host.peer_id)
    matchmaker = Matchmaker(
        endpoint,
        host.env,
        view,
        MatchmakingConfig(target_group_size=target, window_s=WINDOW_S),
        prefix=PREFIX,
        terms=JoinTerms(b"schema", {}, lambda *_: None),
        plan=plan,
    )
    rng = random.Random(f"{host.name}/values")
    return Peer(endpoint, matchmaker, array("d", (rng.gauss(0.0, 1.0) for _ in range(VALUES))))


async def grow(swarm: Swarm[Peer], count: int, target: int, directory: MemoryDirectory | None) -> None:
    """Add peers in batches, each a quarter of those there are; each knows one member at first."""
    rng = random.Random(f"{swarm.seed}/grow")
    members: list[Address] = []
    while (have := len(swarm.peers)) < count:
        members += [swarm.host(name).address for name in list(swarm.peers)[len(members) :]]

        async def factory(host: SimHost, members: Sequence[Address] = members) -> Peer:
            return await start(host, [rng.choice(members)] if members else [], target, directory)

        batch = min(max(1, have // 4), 50, count - have)
        await swarm.start_peers([f"n{number}" for number in range(have, have + batch)], factory)


def variance(peers: Sequence[Peer]) -> float:
    """Of the values over these peers, mean over the places of the vector."""
    return statistics.fmean(statistics.pvariance(column) for column in zip(*(p.values for p in peers), strict=True))


def average(group: Group) -> array[float]:
    """The mean of what the members brought."""
    brought = [array("d", member.gathered) for member in group.members]
    return array("d", (sum(column) / len(brought) for column in zip(*brought, strict=True)))


def deal(peers: Sequence[Peer], keys: int, rng: random.Random) -> None:
    """Deal the peers to the keys at random, as evenly as possible."""
    width = (keys - 1).bit_length()
    for place, peer in enumerate(rng.sample(peers, len(peers))):
        peer.bits = f"{place % keys:0{width}b}" if keys > 1 else ""


async def play_round(
    swarm: Swarm[Peer], crashing: Sequence[str], rng: random.Random
) -> tuple[list[Group], list[float]]:
    """All living peers form groups, some crash meanwhile. The groups as the survivors hold them, and times to form."""
    loop = asyncio.get_running_loop()
    formed: dict[str, Group] = {}
    times: list[float] = []

    async def form(name: str, peer: Peer, after_s: float) -> None:
        await sleep(after_s)
        began = loop.time()
        try:
            formed[name] = await peer.matchmaker.form_group(
                group_key=f"{PREFIX}.0b{peer.bits}", gathered=peer.values.tobytes(), deadline_s=2 * WINDOW_S
            )
        except RoundFailed:
            return  # counted as a peer without a group
        times.append(loop.time() - began)

    tasks = {name: swarm.spawn(name, form(name, p, rng.uniform(0, SPREAD_S))) for name, p in swarm.peers.items()}
    for name in crashing:
        loop.call_later(rng.uniform(0.0, CRASH_WITHIN_S), swarm.crash, name)
    await sleep(CRASH_WITHIN_S)
    await asyncio.wait(tasks.values())
    for name, task in tasks.items():
        if swarm.is_alive(name):
            task.result()
    return [formed[name] for name in swarm.peers if name in formed], times


def apply(swarm: Swarm[Peer], groups: Sequence[Group], target: int) -> None:
    """Everybody takes the average of its own group, and the bits for the next."""
    names = {peer.endpoint.peer_id: peer for peer in swarm.peers.values()}
    for group in groups:
        peer = names[group.peers[group.my_index]]
        peer.values = average(group)
        peer.bits = next_group_bits(
            peer.bits,
            round_id=group.round_id,
            place=group.my_index,
            size=len(group.members),
            target_group_size=target,
        )
        group.release()


def expected(way: str, number: int, alive: int, groups: int, target: int, mean_size: float) -> float:
    """What theory says of the ratio."""
    if way == "random" or number == 1:
        return (groups - 1) / (alive - 1)
    return max(0.0, target - mean_size) / (mean_size * (target - 1))


async def simulate(
    way: str, crash: float, peers: int, target: int, rounds: int, seed: int, *, dht: bool = False
) -> list[Row]:
    """All rounds. Runs under `shoal.sim.run`."""
    rng = random.Random(f"{seed}/moshpit")
    swarm = Swarm[Peer](seed, network=SimNetwork(seed, latency_s=LATENCY_S, jitter_s=JITTER_S))
    await grow(swarm, peers, target, None if dht else MemoryDirectory(seed))
    keys = -(-peers // target)
    deal(list(swarm.peers.values()), keys, rng)
    first = before = variance(list(swarm.peers.values()))
    rows = []
    for number in range(1, rounds + 1):
        began = time.perf_counter()
        if way == "random":
            deal(list(swarm.peers.values()), -(-len(swarm.peers) // target), rng)
        started = len(swarm.peers)
        crashing = rng.sample(list(swarm.peers), round(crash * started))
        held, times = await play_round(swarm, crashing, rng)
        apply(swarm, held, target)
        sizes = {group.round_id: len(group.members) for group in held}
        members, mean_size = sum(sizes.values()), statistics.fmean(sizes.values())
        after = variance(list(swarm.peers.values()))
        row = Row(
            way=way,
            crash=crash,
            round=number,
            alive=len(swarm.peers),
            groups=len(sizes),
            mean_size=mean_size,
            smallest=min(sizes.values()),
            without_group=len(swarm.peers) - len(held),
            ratio=after / before if before else 0.0,
            theory=expected(way, number, members, len(sizes), target, mean_size),
            left=after / first,
            form_p50_s=statistics.median(times),
            form_max_s=max(times),
            real_s=time.perf_counter() - began,
        )
        rows.append(row)
        before = after if after > 1e-28 else 0.0  # what rounding leaves is no variance
        await sleep(1.0)
        gc.collect()  # by hand, as it is switched off: rounds leave cycles behind
    return rows


def measure(way: str, crash: float, *, peers: int, target: int, rounds: int, seed: int, dht: bool = False) -> list[Row]:
    """Simulate one swarm and return what was measured in each round."""
    with without_gc():
        return run(lambda: simulate(way, crash, peers, target, rounds, seed, dht=dht), seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--peers", type=int, default=1024)
    parser.add_argument("--target", type=int, default=32, help="members of a full group")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--crash", default="0,0.05", help="parts of the peers that crash in each round, with commas")
    parser.add_argument("--ways", default="random,grid")
    parser.add_argument("--directory", choices=("memory", "dht"), default="memory")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object per row instead of a table")
    args = parser.parse_args()
    if not args.json:
        print("                              members     without  variance after / before   variance   to form, s")
        print(
            "way     crash  round  alive groups  mean  least  group   measured     theory  left      p50    max  real s"
        )
    for way in args.ways.split(","):
        for crash in map(float, args.crash.split(",")):
            options = {"peers": args.peers, "target": args.target, "rounds": args.rounds, "seed": args.seed}
            for row in measure(way, crash, **options, dht=args.directory == "dht"):
                if args.json:
                    print(json.dumps(asdict(row)), flush=True)
                    continue
                print(
                    f"{row.way:7} {row.crash:5.0%} {row.round:6} {row.alive:6} {row.groups:6} {row.mean_size:5.1f} "
                    f"{row.smallest:6} {row.without_group:6} {row.ratio:10.5f} {row.theory:10.5f}  {row.left:8.1e} "
                    f"{row.form_p50_s:5.2f} {row.form_max_s:6.2f} {row.real_s:7.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
