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
from shoal.dht import Item
from shoal.dht.routing import id_of_key, key_of, node_id
from shoal.errors import PeerError, RoundFailed
from shoal.peer import Address, PeerID
from shoal.rpc import Endpoint
from shoal.sim import SimHost, Swarm
from shoal.wire import Contact, DhtFind, DhtFindReply, DhtFound, DhtPing, DhtPong, DhtStore, DhtStoreReply
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


def note_dials(node: Node, dialed: list[tuple[str, str]]) -> None:
    """Write down who dials where from now on."""
    dials = node.endpoint._dialer.dials
    dial = dials.dial

    async def noted(peer: PeerID, addresses: Sequence[Address], **options: Any) -> Any:
        dialed.extend((node.name, address.host) for address in addresses)
        return await dial(peer, addresses, **options)

    dials.dial = noted  # type: ignore[method-assign]


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


def test_a_node_that_only_calls_enters_no_table() -> None:
    """Twenty keys that name a third party and call every second: in no table, named to nobody, and never dialed."""

    async def main() -> None:
        nodes = (await _three_and("third", 20))[1]
        dialed: list[tuple[str, str]] = []
        for each in nodes:
            note_dials(each, dialed)
        await sim.sleep(60.0)
        assert [each.dht.neighbours for each in nodes] == [2] * 3
        assert not [where for _, where in dialed if where in THIRDS]

    sim.run(main)


@pytest.mark.parametrize("kind", ["mute", "takes", "names", "fickle"])
def test_nobody_waits_for_the_silent_nodes_nearest_to_a_key(kind: str) -> None:
    """Nine, nearer to the key than all others: what honest nodes exchange there takes them moments, and is found."""

    async def main() -> None:
        swarm, nodes = await _three_and(kind, 9, near=True)
        loop, took = asyncio.get_running_loop(), []
        for number in range(40):
            each = nodes[number % 3]
            item = Item("key", number, each.in_s(60), each.dht.peer_id.raw)
            began = loop.time()
            stored, found = await swarm.run_on(each.name, each.dht.exchange, item)
            took.append(loop.time() - began)
            assert stored
            if number > 2:
                assert found is not None
                assert set(found.value) == {node.dht.peer_id.raw for node in nodes}
            await sim.sleep(0.5)
        # Each of the three waits once, and once more where others are named; then nobody waits.
        assert sum(each > 0.3 for each in took) <= 6, " ".join(f"{each:.2f}" for each in took)
        assert max(took[20:]) < 0.3, " ".join(f"{each:.2f}" for each in took)

    sim.run(main)


def test_twenty_keys_that_name_a_third_party_stopped_two_averagers() -> None:
    """They made a tenth of their rounds; after ten seconds they make eight tenths at least."""
    calm, *later = sim.run(partial(paces, "third", 20, windows=1, window_s=10.0))
    assert min(later) >= 0.8 * calm


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "pests", "averagers"),
    [("third", 50, 4), ("mute", 50, 4), *((kind, 20, 2) for kind in ("linked", "takes", "fickle", "rare", "names"))],
)
def test_a_group_keeps_its_pace_among_keys_that_do_not_answer(
    kind: str, pests: int, averagers: int, soak: Callable[[int, int], int]
) -> None:
    """From thirty seconds on eight tenths of the rounds at least."""
    for seed in range(soak(1, 5)):
        calm, *later = sim.run(partial(paces, kind, pests, averagers), seed=seed)
        assert min(later[1:]) >= 0.8 * calm, (seed, calm, later)
