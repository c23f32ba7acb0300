"""Nodes that only call, answer some calls, or name others that do not answer: nobody waits for them for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.base.peer import Address, PeerID
from shoal.dht import Item
from shoal.dht.routing import id_of_key, key_of, node_id
from shoal.errors import PeerError, RoundFailed
from shoal.protocol.wire import Contact, DhtFind, DhtFindReply, DhtFound, DhtPing, DhtPong, DhtStore, DhtStoreReply
from shoal.rpc import Endpoint
from shoal.sim import SimHost, Swarm
from tests.sim.averaging_kit import SETTINGS, Trial
from tests.sim.dht_kit import Node, grow, new_swarm

THIRDS = [f"third{number}" for number in range(64)]
"""Hosts that let nobody in, and say nothing."""

_SOON_S = 10.0
"""After so long they cost little."""


class Pest:
    """A key that calls every second.

    Args:
        kind: "third" names an address of others, and answers nothing; "linked" names one, too, and answers on its own
            link. The other kinds answer where they say: "mute" no lookup and no store, "takes" lookups but no store,
            "fickle" every second lookup, "rare" all but each twentieth, "member" everything; "names" everything, and it
            knows nodes that do not exist.
        endpoint: its own.
    """

    made_up = count()

    def __init__(self, kind: str, endpoint: Endpoint) -> None:
        self.kind, self.endpoint, self.asked = kind, endpoint, 0
        endpoint.serve(DhtPing, self.ping)
        endpoint.serve(DhtFind, self.find)
        endpoint.serve(DhtStore, self.store)

    async def begin(self, victim: Contact) -> None:
        """Listen, if it does, and call the victim for ever."""
        await self.endpoint.start(listen=self.kind not in ("third", "linked"))
        if self.kind in ("third", "linked"):
            self.endpoint.announce(self._somewhere(self.endpoint.peer_id))
        while True:
            with suppress(PeerError):
                await self.endpoint.call(victim, DhtPing(), timeout_s=5.0)
            await sim.sleep(1.0)

    async def ping(self, _: PeerID, __: DhtPing) -> DhtPong:
        """Any answer, but of the first kind."""
        await self._stop("third")
        return DhtPong(self.endpoint.contact)

    async def find(self, _: PeerID, request: DhtFind) -> DhtFindReply:
        """Nothing is known here, or those that do not exist are."""
        self.asked += 1
        await self._stop("third", "mute", *(["fickle"] * (self.asked % 2)), *(["rare"] * (self.asked % 20 == 0)))
        return DhtFindReply([DhtFound([], self._named()) for _ in request.keys])

    async def store(self, _: PeerID, request: DhtStore) -> DhtStoreReply:
        """Everything is taken, and nothing shown."""
        await self._stop("third", "mute", "takes")
        return DhtStoreReply(["" for _ in request.records])

    async def _stop(self, *kinds: str) -> None:
        if self.kind in kinds:
            await asyncio.Event().wait()

    def _named(self) -> list[Contact]:
        if self.kind != "names":
            return []
        peers = [PeerID(next(self.made_up).to_bytes(32)) for _ in range(16)]
        return [Contact(peer, (self._somewhere(peer),)) for peer in peers]

    def _somewhere(self, peer: PeerID) -> Address:
        return Address(THIRDS[next(self.made_up) % len(THIRDS)], 4000, peer)


async def add_pest(swarm: Swarm[Any], name: str, kind: str, victim: Contact) -> None:
    """Start a pest on a host of its own."""

    async def start(host: SimHost) -> Pest:
        return Pest(kind, Endpoint(host.transport, host.env))

    pest = await swarm.start_peer(name, start)
    swarm.spawn(name, pest.begin(victim))


async def paces(kind: str, pests: int, averagers: int = 2, *, windows: int = 4, window_s: float = 20.0) -> list[int]:
    """Rounds of averagers in windows of this length: in calm, then among so many keys, from their tenth second on."""
    trial, done = Trial(settings=SETTINGS), 0
    names = [f"p{number}" for number in range(averagers)]
    for third in THIRDS:
        trial.swarm.network.add_host(third)
        trial.swarm.network.wall(third)
    for number, name in enumerate(names):
        await trial.add(name, [torch.full((64,), float(number))])
    victim = trial.swarm.peer(names[0]).core.endpoint.contact

    async def average(name: str) -> None:
        nonlocal done
        while True:
            with suppress(RoundFailed):
                await trial.step(name, timeout_s=30.0)
                done += name == names[0]

    for name in names:
        trial.swarm.spawn(name, average(name))
    found = []
    await sim.sleep(5.0)
    for window in range(1 + windows):
        before = done
        await sim.sleep(window_s)
        found.append(done - before)
        if not window:
            for number in range(pests):
                await add_pest(trial.swarm, f"pest{number}", kind, victim)
            await sim.sleep(_SOON_S)
    assert not trial.warnings
    return found


async def _three_and(kind: str, pests: int, *, near: bool = False) -> tuple[Swarm[Any], list[Node]]:
    """Three honest nodes, and keys that call one of them, for ten seconds; `near`: those, of many, nearest to "key"."""
    swarm: Swarm[Any] = new_swarm()
    for third in THIRDS:
        swarm.network.add_host(third)
        swarm.network.wall(third)
    nodes = await grow(swarm, 3)
    names = [f"pest{number}" for number in range(200 if near else pests)]
    if near:
        names.sort(key=lambda name: node_id(swarm.identity(name).peer_id) ^ id_of_key(key_of("key")))

    for name in names[:pests]:
        await add_pest(swarm, name, kind, nodes[0].endpoint.contact)
    await sim.sleep(_SOON_S)
    return swarm, nodes


def test_a_node_that_only_calls_is_relied_on_no_more_once_it_was_asked() -> None:
    """Twenty keys that name a third party and call every second: after a few lookups others alone are relied on."""

    async def main() -> None:
        swarm, nodes = await _three_and("third", 20)
        for number in range(30):
            for each in nodes:
                await swarm.run_on(each.name, each.dht.nearest, f"key {number}")
        tables = [each.dht._neighbours.table for each in nodes]
        assert [sum(not table.doubtful(each.peer) for each in table) for table in tables] == [2] * 3

    sim.run(main)


async def _exchange_all(swarm: Swarm[Any], nodes: Sequence[Node], key: str) -> list[int]:
    """Each exchanges under one key, at once; how many entries each is shown."""

    async def exchange(each: Node) -> int:
        item = Item(key, 0, each.in_s(60), each.dht.peer_id.to_bytes())
        _, found = await swarm.run_on(each.name, each.dht.exchange, item)
        return 0 if found is None else len(found.value)

    return await asyncio.gather(*map(exchange, nodes))


def test_nodes_that_stood_still_find_each_other_again() -> None:
    """Four that each did so twice for five seconds owe each other answers; what they exchange is complete."""

    async def main() -> None:
        swarm: Swarm[Any] = new_swarm()
        nodes = await grow(swarm, 4)
        for turn in range(2):
            for still in nodes:
                swarm.network.stall(still.name, 5.0)
                for number in range(12):
                    await _exchange_all(swarm, [each for each in nodes if each is not still], f"{turn} {number}")
                    await sim.sleep(0.3)
                await sim.sleep(3.0)
        for one in nodes:
            assert any(one.dht._neighbours.table.doubtful(each.dht.peer_id) for each in nodes)
        for number in range(20):
            await _exchange_all(swarm, nodes, f"key {number}")
            assert await _exchange_all(swarm, nodes, f"key {number}") == [4] * 4

    sim.run(main)


def test_nobody_owes_an_answer_where_our_own_line_was_down() -> None:
    """One of thirty nodes is cut off amid thirty lookups: its later lookups are worth as much as before."""

    async def main() -> None:
        swarm: Swarm[Any] = new_swarm()
        one, *others = await grow(swarm, 30)
        lookups = asyncio.gather(*(swarm.run_on(one.name, one.dht.nearest, f"key {number}") for number in range(30)))
        await sim.sleep(0.03)
        swarm.network.partition([[one.name]])
        await sim.sleep(6.0)
        swarm.network.heal()
        await lookups
        await sim.sleep(2.0)
        assert not [each for each in others if one.dht._neighbours.table.doubtful(each.dht.peer_id)]

    sim.run(main)


@pytest.mark.parametrize("kind", ["mute", "takes", "names", "fickle"])
def test_nobody_waits_for_the_silent_nodes_nearest_to_a_key(kind: str) -> None:
    """Nine, nearer to the key than all others: what honest nodes exchange there takes them moments, and is found."""

    async def main() -> None:
        swarm, nodes = await _three_and(kind, 9, near=True)
        loop, took = asyncio.get_running_loop(), []
        for number in range(40):
            each = nodes[number % 3]
            item = Item("key", number, each.in_s(60), each.dht.peer_id.to_bytes())
            began = loop.time()
            stored, found = await swarm.run_on(each.name, each.dht.exchange, item)
            took.append(loop.time() - began)
            assert stored
            if number > 2:
                assert found is not None
                assert set(found.value) == {node.dht.peer_id.to_bytes() for node in nodes}
            await sim.sleep(0.5)
        # Each of the three waits once; where others are named, which nobody has heard of before, once for each lookup.
        assert sum(each > 0.3 for each in took) <= (9 if kind == "names" else 6), " ".join(map("{:.2f}".format, took))
        assert max(took[20:]) < (1.3 if kind == "names" else 0.3), " ".join(map("{:.2f}".format, took))

    sim.run(main)


def test_twenty_keys_that_name_a_third_party_stopped_two_averagers() -> None:
    """They made a tenth of their rounds; after ten seconds they make eight tenths at least."""
    calm, *later = sim.run(partial(paces, "third", 20, windows=1, window_s=10.0))
    assert min(later) >= 0.8 * calm


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "pests", "averagers", "share"),
    [
        *(pytest.param(kind, 50, 4, 0.6, marks=pytest.mark.long(full=True)) for kind in ("third", "mute")),
        *(  # of the others each commit has a test
            pytest.param(kind, 20, 2, 0.8, marks=pytest.mark.long(full=True))
            for kind in ("third", "mute", "takes", "fickle")
        ),
        *((kind, 20, 2, 0.8) for kind in ("linked", "rare")),
        ("names", 20, 2, 0.3),  # with some seeds; keys that answer every call have half of the rounds there, too
    ],
)
def test_a_group_keeps_its_pace_among_keys_that_do_not_answer(
    kind: str, pests: int, averagers: int, share: float, soak: Callable[[int, int], int]
) -> None:
    """From thirty seconds on this share of the rounds at least."""
    for seed in range(soak(1, 5)):
        calm, *later = sim.run(partial(paces, kind, pests, averagers), seed=seed)
        assert min(later[1:]) >= share * calm, (seed, calm, later)
