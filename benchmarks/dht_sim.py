"""The DHT at scale, simulated: ``python -m benchmarks.dht_sim``. Prints, for each number of nodes (k = 8):

- hops: calls in a row until the nearest node has answered, mean over random lookups from random nodes; beside it the
  same divided by log2(nodes), which stays level if hops grow like a logarithm;
- calls per lookup (of the 10 nearest nodes) and per stored record;
- what part of the records is found after half of all nodes crashed at once: right then, with no repair yet; again when
  the survivors have repaired what they hold; and again after half of the survivors crashed, too.

Nothing is real but the code: network and time are simulated, so the numbers are the same on every machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from shoal.base.peer import Address
from shoal.dht import DhtNode, DhtSettings
from shoal.rpc import Endpoint, Limits
from shoal.sim import SimHost, SimNetwork, Swarm, run, sleep

BUCKET_SIZE = 8
LIFETIME_S = 3000.0
REPAIR_DELAY_S = 20.0

# A thousand nodes have tens of thousands of links: their heartbeats would be most of what the simulation does.
LIMITS = Limits(idle_beat_s=3600.0, idle_close_s=7200.0)


@dataclass
class Peer:
    """One simulated node."""

    endpoint: Endpoint
    node: DhtNode


@dataclass(frozen=True)
class Row:
    """What was measured with one number of nodes. Hops are those of one lookup, with their mean over all of them."""

    nodes: int
    neighbours: float
    hops: float
    hops_per_log2: float
    calls_per_lookup: float
    calls_per_store: float
    stored: float
    found_after_crash: float
    found_after_repair: float
    found_after_second_crash: float
    real_s: float


@contextmanager
def without_gc() -> Iterator[None]:
    """No cyclic garbage collection: with a million living objects it would take half of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def settings() -> DhtSettings:
    """As users have it, but with small buckets, a repair slow enough to look before it, and no other upkeep."""
    return DhtSettings(
        bucket_size=BUCKET_SIZE,
        refresh_s=math.inf,
        republish_s=math.inf,
        retry_lost_s=math.inf,
        repair_delay_s=REPAIR_DELAY_S,
    )


async def start(host: SimHost, initial: Sequence[Address], dht: DhtSettings) -> Peer:
    """Start a node on a simulated host."""
    endpoint = Endpoint(host.transport, host.env, limits=LIMITS)
    await endpoint.start()
    node = DhtNode(endpoint, host.env, host.identity, settings=dht)
    await node.bootstrap(initial)
    return Peer(endpoint, node)


async def grow(swarm: Swarm[Peer], count: int, dht: DhtSettings) -> None:
    """Add nodes in batches, each a quarter of those there are; each node knows one member at first."""
    rng = random.Random(f"{swarm.seed}/grow")
    target = len(swarm.peers) + count
    members: list[Address] = []
    while (have := len(swarm.peers)) < target:
        members += [swarm.host(name).address for name in list(swarm.peers)[len(members) :]]

        async def factory(host: SimHost, members: Sequence[Address] = members) -> Peer:
            return await start(host, [rng.choice(members)] if members else [], dht)

        batch = min(max(1, have // 4), 50, target - have)
        await swarm.start_peers([f"n{number}" for number in range(have, have + batch)], factory)


def crash_half(swarm: Swarm[Peer], rng: random.Random) -> None:
    """Half of all nodes, chosen by chance, die at the same moment."""
    names = list(swarm.peers)
    for name in rng.sample(names, len(names) // 2):
        swarm.crash(name)


async def find(swarm: Swarm[Peer], writers: dict[str, str], rng: random.Random) -> float:
    """The part of the records that a random living node finds; never the one that wrote it."""

    async def found(key: str, writer: str) -> bool:
        reader = rng.choice([name for name in swarm.peers if name != writer])
        got = await swarm.run_on(reader, swarm.peer(reader).node.get, key)
        return got is not None and got.value == key

    return sum(await asyncio.gather(*(found(key, writer) for key, writer in writers.items()))) / len(writers)


def calls(swarm: Swarm[Peer]) -> int:
    return sum(peer.node.calls_made for peer in swarm.peers.values())


async def simulate(nodes: int, records: int, lookups: int, seed: int, *, repair: bool) -> Row:
    """Everything, with one number of nodes. Runs under `shoal.sim.run`."""
    began = time.perf_counter()
    rng = random.Random(f"{seed}/benchmark")
    swarm = Swarm[Peer](seed, network=SimNetwork(seed, latency_s=0.02, jitter_s=0.02))
    await grow(swarm, nodes, settings())
    names = list(swarm.peers)
    neighbours = sum(peer.node.neighbours for peer in swarm.peers.values()) / nodes

    async def look(number: int) -> int:
        name = rng.choice(names)
        return (await swarm.run_on(name, swarm.peer(name).node.nearest, f"lookup {number}")).hops

    before = calls(swarm)
    hops = sum(await asyncio.gather(*(look(number) for number in range(lookups)))) / lookups
    per_lookup = (calls(swarm) - before) / lookups

    expires = swarm.host(names[0]).env.clock.time() + LIFETIME_S
    writers = {f"record {number}": rng.choice(names) for number in range(records)}
    before = calls(swarm)
    stored = await asyncio.gather(
        *(swarm.run_on(name, swarm.peer(name).node.store, key, key, expires) for key, name in writers.items())
    )
    per_store = (calls(swarm) - before) / records

    crash_half(swarm, rng)
    await sleep(1.0)  # the survivors' connections break; repair begins in 20 s
    after_crash = await find(swarm, writers, rng)
    after_repair = after_second = math.nan
    if repair:
        await sleep(3 * REPAIR_DELAY_S)
        after_repair = await find(swarm, writers, rng)
        crash_half(swarm, rng)
        await sleep(1.0)
        after_second = await find(swarm, writers, rng)
    return Row(
        nodes=nodes,
        neighbours=neighbours,
        hops=hops,
        hops_per_log2=hops / math.log2(nodes),
        calls_per_lookup=per_lookup,
        calls_per_store=per_store,
        stored=sum(stored) / records,
        found_after_crash=after_crash,
        found_after_repair=after_repair,
        found_after_second_crash=after_second,
        real_s=time.perf_counter() - began,
    )


def measure(nodes: int, *, records: int, lookups: int, seed: int, repair: bool = True) -> Row:
    """Simulate one number of nodes and return what was measured; without `repair`, only up to the first crash."""
    with without_gc():
        return run(lambda: simulate(nodes, records, lookups, seed, repair=repair), seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--nodes", default="100,300,1000", help="numbers of nodes, with commas")
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--lookups", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object per row instead of a table")
    args = parser.parse_args()
    if not args.json:
        print("         known         hops/   calls per         found after half crashed, at once")
        print(" nodes   nodes  hops   log2   lookup  store     at once   after repair   half again   real s")
    for nodes in map(int, args.nodes.split(",")):
        row = measure(nodes, records=args.records, lookups=args.lookups, seed=args.seed)
        if args.json:
            print(json.dumps(asdict(row)), flush=True)
            continue
        print(
            f"{row.nodes:6}{row.neighbours:8.1f}{row.hops:6.2f}{row.hops_per_log2:7.3f}"
            f"{row.calls_per_lookup:9.1f}{row.calls_per_store:7.1f}"
            f"{row.found_after_crash:12.1%}{row.found_after_repair:15.1%}{row.found_after_second_crash:13.1%}"
            f"{row.real_s:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
