"""Records stay where they are found while nodes come, go, part and meet again."""

from __future__ import annotations

import asyncio
import math
import random

from shoal.dht import DhtSettings
from shoal.rpc import Limits
from shoal.sim import Swarm, run, sleep
from tests.sim.dht_kit import Node, get, grow, holders, nearest, new_swarm, node, store

# Only what the test is about happens unasked, and what a cache holds does not hide what the network lost.
ONLY_REPAIR = DhtSettings(refresh_s=math.inf, republish_s=math.inf, retry_lost_s=math.inf, cache_s=1e-9)
BRISK = DhtSettings(refresh_s=30.0, republish_s=60.0, retry_lost_s=10.0, cache_s=1e-9)
QUIET = Limits(idle_beat_s=10.0)


async def store_many(swarm: Swarm[Node], count: int, seconds: float) -> dict[str, str]:
    """Store so many records from nodes all over the network: which node wrote which key."""
    names = list(swarm.peers)
    writers = {f"key {number}": names[number % len(names)] for number in range(count)}
    stored = await asyncio.gather(*(store(swarm, swarm.peer(name), key, key, seconds) for key, name in writers.items()))
    assert all(stored)
    return writers


async def missing(swarm: Swarm[Node], writers: dict[str, str], rng: random.Random) -> list[str]:
    """The keys that a random living node, not the writer, does not find."""

    async def found(key: str) -> bool:
        reader = rng.choice([name for name in swarm.peers if name != writers[key]])
        value = await get(swarm, swarm.peer(reader), key)
        return value is not None and value.value == key

    results = await asyncio.gather(*(found(key) for key in writers))
    return [key for key, there in zip(writers, results, strict=True) if not there]


def test_new_nodes_get_the_keys_they_should_hold() -> None:
    """When all that held a key at first are gone one after another, those that came later have it."""

    async def main() -> None:
        swarm = new_swarm()
        old = await grow(swarm, 10, settings=ONLY_REPAIR)
        writers = await store_many(swarm, 20, 3000)
        await grow(swarm, 20, settings=ONLY_REPAIR)
        await sleep(5.0)
        everybody = list(swarm.peers.values())
        for key in writers:
            assert set(map(id, nearest(everybody, key)[:10])) <= set(map(id, holders(swarm, key)))
        for each in old:
            swarm.crash(each.name)
        await sleep(1.0)
        assert await missing(swarm, writers, random.Random(1)) == []

    run(main)


def test_lost_copies_are_made_again_by_those_that_are_left() -> None:
    """Half of the nodes die, then half of the rest, and half again: with time for repair in between nothing is lost."""

    async def main() -> None:
        swarm = new_swarm()
        await grow(swarm, 32, settings=ONLY_REPAIR, limits=QUIET)
        writers = await store_many(swarm, 20, 3000)
        rng = random.Random(2)
        for _ in range(3):
            names = list(swarm.peers)
            for name in rng.sample(names, len(names) // 2):
                swarm.crash(name)
            await sleep(10.0)
            assert await missing(swarm, writers, rng) == []
            left = list(swarm.peers.values())
            for key in writers:
                assert set(map(id, nearest(left, key)[:10])) == set(map(id, holders(swarm, key)))

    run(main)


def test_machines_that_vanish_without_a_word_are_replaced_too() -> None:
    """Their silence is noticed, and their keys are given to others."""

    async def main() -> None:
        swarm = new_swarm()
        await grow(swarm, 24, settings=ONLY_REPAIR, limits=QUIET)
        writers = await store_many(swarm, 15, 3000)
        rng = random.Random(3)
        for name in rng.sample(list(swarm.peers), 12):
            swarm.vanish(name)
        await sleep(90.0)
        assert await missing(swarm, writers, rng) == []
        assert all(len(holders(swarm, key)) >= 10 for key in writers)

    run(main)


def test_records_survive_steady_churn() -> None:
    """Every few seconds a node dies and another joins, until nobody is left of those that began."""

    async def main() -> None:
        swarm = new_swarm()
        await grow(swarm, 12, settings=BRISK, limits=QUIET)
        writers = await store_many(swarm, 15, 3000)
        rng = random.Random(1)
        founders = list(swarm.peers)
        rng.shuffle(founders)
        for founder in founders:
            swarm.crash(founder)
            await sleep(rng.uniform(1.0, 4.0))
            await grow(swarm, 1, settings=BRISK, limits=QUIET)
            await sleep(rng.uniform(1.0, 4.0))
            sample = dict(rng.sample(sorted(writers.items()), 5))
            assert await missing(swarm, sample, rng) == []
        assert await missing(swarm, writers, rng) == []

    run(main)


def test_two_halves_of_a_parted_network_grow_together_again() -> None:
    """Each half goes on by itself; after the partition everybody finds what either half has stored."""

    async def main() -> None:
        swarm = new_swarm()
        await grow(swarm, 10, settings=BRISK, limits=QUIET)
        names = list(swarm.peers)
        left, right = names[::2], names[1::2]
        before = await store_many(swarm, 10, 3000)
        swarm.partition([left, right])
        await sleep(60.0)
        rng = random.Random(4)
        for half in (left, right):
            nodes = [swarm.peer(name) for name in half]
            assert nodes[0].dht.neighbours == 4
            for key in before:
                assert await get(swarm, rng.choice(nodes), key) is not None
        here, there = swarm.peer(left[0]), swarm.peer(right[0])
        assert await store(swarm, here, "left", "left", 3000)
        assert await store(swarm, there, "right", "right", 3000)
        assert await store(swarm, here, "both", "earlier", 2000)
        assert await store(swarm, there, "both", "later", 2100)
        assert await get(swarm, there, "left", latest=True) is None
        swarm.heal()
        await sleep(120.0)
        for name in names:
            for key, value in {"left": "left", "right": "right", "both": "later"}.items():
                found = await get(swarm, swarm.peer(name), key, latest=True)
                assert found is not None
                assert found.value == value

    run(main)


def test_writer_brings_its_record_back_when_all_who_held_it_are_gone() -> None:
    """What a node wrote it keeps renewing while it lives."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 20, settings=BRISK)
        writer = nearest(nodes, "key")[-1]
        assert await store(swarm, writer, "key", "mine", 3000)
        for each in holders(swarm, "key"):
            swarm.crash(each.name)
        assert holders(swarm, "key") == []
        await sleep(90.0)
        assert len(holders(swarm, "key")) == 10
        reader = next(each for each in swarm.peers.values() if each is not writer)
        assert (await get(swarm, reader, "key", latest=True) or [None])[0] == "mine"

    run(main)


def test_new_nodes_get_what_is_written_again_and_again() -> None:
    """The writer remembers where its key belongs, but not for longer than it may."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 12, settings=ONLY_REPAIR)
        writer = nearest(nodes, "key")[-1]
        calls = []
        for number in range(60):
            before = writer.dht.calls_made
            assert await store(swarm, writer, "key", number, 600)
            calls.append(writer.dht.calls_made - before)
            if number in range(20, 40, 2):
                await grow(swarm, 1, settings=ONLY_REPAIR)
            await sleep(1.0)
        everybody = list(swarm.peers.values())
        assert len(everybody) == 22
        for each in nearest(everybody, "key")[:10]:
            assert (await get(swarm, each, "key") or [None])[0] == 59
        # Most of the time the ten that hold it were called, and nobody else.
        assert sorted(calls)[len(calls) // 2] == 10

    run(main)


def test_a_small_network_needs_no_lookup_for_each_new_key() -> None:
    """All nodes answered the first lookup: the next keys go to all of them at once, and to one that came since."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 6, settings=ONLY_REPAIR)
        writer = nodes[0]
        calls = []
        for number in range(4):
            before = writer.dht.calls_made
            assert await store(swarm, writer, f"key {number}", "value", 600)
            calls.append(writer.dht.calls_made - before)
            assert len(holders(swarm, f"key {number}")) == len(swarm.peers)
            if number == 1:
                await grow(swarm, 1, settings=ONLY_REPAIR)
        assert calls == [10, 5, 12, 6]

    run(main)


def test_record_outlives_its_writer_until_it_expires_and_no_longer() -> None:
    """Holders give it to each other, but nobody can renew it."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 15, settings=BRISK, limits=QUIET)
        assert await store(swarm, nodes[3], "key", 1, 150)
        swarm.crash(nodes[3].name)
        await sleep(145.0)
        assert await get(swarm, nodes[4], "key", latest=True) is not None
        await sleep(5.0)
        assert await get(swarm, nodes[4], "key", latest=True) is None
        assert holders(swarm, "key") == []

    run(main)


def test_restarted_node_is_met_again() -> None:
    """Same identity, same address, nothing remembered: it holds its share again."""

    async def main() -> None:
        swarm = new_swarm()
        initial = await swarm.start_peer("n0", node(settings=BRISK))
        names = [f"n{number}" for number in range(1, 8)]
        nodes = [initial, *await swarm.start_peers(names, node([swarm.host("n0").address], settings=BRISK))]
        assert await store(swarm, nodes[1], "key", 1, 3000)
        swarm.crash("n5")
        await sleep(3.0)
        back = await swarm.restart("n5")
        assert back.dht.records_held == 0
        await sleep(5.0)
        assert back in holders(swarm, "key")
        assert all(back.dht.peer_id in each.dht._neighbours.table for each in nodes if each.name != "n5")

    run(main)


def test_neighbour_whose_connection_only_broke_is_back_in_moments() -> None:
    """It is dialed once more at once: in a network of two, each would be alone otherwise."""

    async def main() -> None:
        swarm = new_swarm()
        await swarm.start_peer("n0", node())
        other = await swarm.start_peer("n1", node([swarm.host("n0").address]))
        swarm.crash("n0")
        await sleep(0.2)
        back = await swarm.restart("n0")
        await sleep(0.1)
        assert other.dht.neighbours == 0
        await sleep(3.0)
        assert other.dht.neighbours == back.dht.neighbours == 1

    run(main)


def test_nodes_that_were_parted_for_long_left_each_other_out_though_they_were_connected_again() -> None:
    """Each avoided the other for up to two minutes, after as long a partition. Now one connection is enough."""

    async def main() -> None:
        swarm = new_swarm()
        left, right = ["n0", "n1"], ["n2", "n3"]
        await swarm.start_peer("n0", node(settings=BRISK))
        await swarm.start_peers([*left[1:], *right], node([swarm.host("n0").address], settings=BRISK))
        nodes = {name: swarm.peer(name) for name in (*left, *right)}
        swarm.partition([left, right])
        await sleep(60.0)
        assert [nodes[name].dht.neighbours for name in (*left, *right)] == [1, 1, 1, 1]
        assert nodes["n0"].dht._neighbours.avoids(nodes["n2"].dht.peer_id, asyncio.get_running_loop().time())
        swarm.heal()
        nodes["n0"].endpoint.dial_ahead(nodes["n2"].dht.peer_id, link=True)
        await sleep(0.2)
        for one, other in (("n0", "n2"), ("n2", "n0")):
            assert nodes[other].dht.peer_id in nodes[one].dht._neighbours.table

    run(main)


def test_initial_peer_that_comes_back_is_joined_again() -> None:
    """A node that lost everybody keeps trying those it began with."""

    async def main() -> None:
        swarm = new_swarm()
        await swarm.start_peer("n0", node(settings=BRISK))
        lonely = await swarm.start_peer("n1", node([swarm.host("n0").address], settings=BRISK))
        swarm.crash("n0")
        await sleep(300.0)
        assert lonely.dht.neighbours == 0
        back = await swarm.restart("n0")
        await sleep(60.0)
        assert lonely.dht.neighbours == back.dht.neighbours == 1

    run(main)


def test_quiet_network_keeps_its_tables_fresh() -> None:
    """Without any traffic of its users, every node still knows living nodes at all distances after half an hour."""

    async def main() -> None:
        swarm = new_swarm()
        await grow(swarm, 20, limits=Limits(idle_beat_s=60.0, idle_close_s=60.0))
        await sleep(180.0)
        for number in range(5, 10):
            swarm.crash(f"n{number}")  # long after all connections were closed as idle: nobody is told
        await sleep(1200.0)
        alive = {each.dht.peer_id for each in swarm.peers.values()}
        for each in swarm.peers.values():
            known = {contact.peer for contact in each.dht._neighbours.table}
            assert known <= alive
            assert len(known) >= 12

    run(main)
