"""Nodes that lie, flood, stall and forge: what they get for it is a refusal, and the others go on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from shoal.base.peer import Address, PeerID
from shoal.dht import DhtSettings, Item, StorageLimits
from shoal.dht.routing import id_of_key, key_of, node_id
from shoal.dht.validation import encode_subkey, encode_value, signed_record
from shoal.errors import PeerRefused
from shoal.events import PeerDropped, Warned
from shoal.protocol.identity import Identity
from shoal.protocol.wire import (
    Contact,
    DhtFind,
    DhtFindReply,
    DhtFound,
    DhtPing,
    DhtPong,
    DhtStore,
    DhtStoreReply,
    Record,
)
from shoal.rpc import Endpoint
from shoal.sim import SimHost, Swarm, run
from tests.sim.dht_kit import Node, get, grow, holders, nearest, new_swarm, node, store

ALICE = Identity.from_seed(bytes(32))
KEY = key_of("key")
ONE = encode_value(1)

FindHandler = Callable[["Evil", PeerID, DhtFind], Awaitable[DhtFindReply]]


@dataclass
class Evil:
    """A peer that speaks the protocol but not the truth."""

    host: SimHost
    endpoint: Endpoint

    def now(self) -> float:
        """Wall time."""
        return self.host.env.clock.time()

    def record(self, identity: Identity = ALICE, *, seconds: float = 60.0, **fields: Any) -> Record:
        """A good record of the key "key", by anybody, with some fields changed after it was signed."""
        good = signed_record(identity, KEY, fields.pop("subkey", None), ONE, self.now() + seconds)
        return msgspec.structs.replace(good, **fields)

    async def send(self, to: Node, records: Sequence[Record]) -> list[str]:
        """Send records; what the node says of them."""
        reply = await self.endpoint.call(to.endpoint.contact, DhtStore(list(records)), timeout_s=5.0)
        return reply.refused


def as_dict(value: Any) -> Any:
    """A dictionary from the DHT without its expirations."""
    return None if value is None else {subkey: entry.value for subkey, entry in value.value.items()}


def distance(swarm: Swarm[Any], name: str) -> int:
    """How far from the key "key" a host of this name would be."""
    return node_id(swarm.identity(name).peer_id) ^ id_of_key(KEY)


async def evil(swarm: Swarm[Any], name: str, victims: Sequence[Node], find: FindHandler | None = None) -> Evil:
    """Start an evil peer that answers `DhtFind` like this (default: knows nothing) and meets the victims."""

    async def start(host: SimHost) -> Evil:
        endpoint = Endpoint(host.transport, host.env)
        made = Evil(host, endpoint)

        async def ping(peer: PeerID, _: DhtPing) -> DhtPong:
            return DhtPong(endpoint.contact)

        async def answer(peer: PeerID, request: DhtFind) -> DhtFindReply:
            if find is None:
                return DhtFindReply([DhtFound([], []) for _ in request.keys])
            return await find(made, peer, request)

        async def accept(peer: PeerID, request: DhtStore) -> DhtStoreReply:
            return DhtStoreReply(["" for _ in request.records])

        endpoint.serve(DhtPing, ping)
        endpoint.serve(DhtFind, answer)
        endpoint.serve(DhtStore, accept)
        await endpoint.start()
        for victim in victims:
            await endpoint.call(victim.endpoint.contact, DhtPing(), timeout_s=5.0)
        return made

    made: Evil = await swarm.start_peer(name, start)
    return made


async def surround(swarm: Swarm[Any], victims: Sequence[Node], count: int, *, among: int) -> list[str]:
    """Start evil peers under the names, of so many, that are nearest to the key "key"; returns these."""
    names = sorted((f"evil{number}" for number in range(among)), key=lambda name: distance(swarm, name))[:count]
    for name in names:
        await evil(swarm, name, victims)
    return names


# ----------------------------------------------------------------------------------------------- records that are sent


FORGERIES: dict[str, tuple[Callable[[Evil], Record], str]] = {
    "wrong signature": (lambda e: e.record(signature=bytes(64)), "wrong signature"),
    "no signature": (lambda e: e.record(signature=b""), "wrong signature"),
    "changed value": (lambda e: e.record(value=encode_value(2)), "wrong signature"),
    "replayed with a later expiration": (lambda e: e.record(expiration=e.now() + 900), "wrong signature"),
    "replayed under another key": (lambda e: e.record(key=key_of("other")), "wrong signature"),
    "replayed under another subkey": (lambda e: e.record(subkey=None, owner=e.host.peer_id), "wrong signature"),
    "another's entry, unsigned": (
        lambda e: Record(KEY, encode_subkey(ALICE.peer_id.to_bytes()), ONE, e.now() + 60),
        "the subkey names a peer",
    ),
    "another's entry, signed by the sender": (
        lambda e: e.record(e.host.identity, subkey=encode_subkey(ALICE.peer_id.to_bytes())),
        "the subkey names a peer",
    ),
    "another spelling of another's entry": (
        lambda e: e.record(e.host.identity, subkey=b"\xc5\x00\x20" + ALICE.peer_id.to_bytes()),
        "shortest encoding",
    ),
    "expired": (lambda e: e.record(seconds=-1), "expired"),
    "expires in two hours": (lambda e: e.record(seconds=7200), "too far ahead"),
    "unreadable value": (lambda e: signed_record(ALICE, KEY, None, b"\xc1", e.now() + 60), "undecodable"),
    "endlessly nested value": (lambda e: signed_record(ALICE, KEY, None, b"\x91" * 60000, e.now() + 60), "undecodable"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_record_is_refused_with_the_reason(name: str) -> None:
    """And the good one that came with it is taken."""

    async def main() -> None:
        swarm = new_swarm()
        (victim,) = await grow(swarm, 1)
        sender = await evil(swarm, "evil", [])
        forge, reason = FORGERIES[name]
        good = signed_record(ALICE, key_of("good"), None, ONE, sender.now() + 60)
        said = await sender.send(victim, [forge(sender), good])
        assert reason in said[0]
        assert said[1] == ""
        assert victim.dht.records_held == 1
        assert victim.seen(Warned) == []

    run(main)


def test_anybody_may_hand_on_a_record_that_its_owner_signed() -> None:
    """That is what replication is; the same record twice is no error."""

    async def main() -> None:
        swarm = new_swarm()
        (victim,) = await grow(swarm, 1)
        sender = await evil(swarm, "evil", [])
        own = sender.record(ALICE, subkey=encode_subkey(ALICE.peer_id.to_bytes()))
        assert await sender.send(victim, [own]) == [""]
        assert await sender.send(victim, [own]) == [""]
        assert as_dict(await get(swarm, victim, "key")) == {ALICE.peer_id.to_bytes(): 1}

    run(main)


def test_flood_of_records_hits_the_rate_limit_then_the_store_stays_open_for_others() -> None:
    """The flooder is refused, holds no more than its share, and an honest peer still stores."""
    limits = StorageLimits(total_bytes=1 << 20, source_bytes=256 << 10, owner_bytes=128 << 10)

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 2, settings=DhtSettings(storage=limits, store_records_per_s=50.0))
        victim = nodes[0]
        sender = await evil(swarm, "evil", [])
        refusals: set[str] = set()

        async def flood() -> None:
            for batch in range(40):
                owners = [Identity.from_seed(hashlib.sha256(b"%d/%d" % (batch, n)).digest()) for n in range(50)]
                records = [
                    signed_record(owner, key_of(f"{batch}/{number}"), None, ONE, sender.now() + 3000)
                    for number, owner in enumerate(owners)
                ]
                refusals.update(await sender.send(victim, records))

        with pytest.raises(PeerRefused, match="too many records per second"):
            await flood()
        assert refusals == {"", f"you have {256 << 10} bytes here already"}
        assert victim.dht._vault.held.bytes <= 256 << 10
        assert await store(swarm, nodes[1], "honest", 1, 600)
        assert victim in holders(swarm, "honest")

    run(main)


def test_flood_of_lookups_hits_the_rate_limit() -> None:
    """Others are not affected."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 2, settings=DhtSettings(find_keys_per_s=10.0))
        asker = await evil(swarm, "evil", [])

        async def flood() -> None:
            for _ in range(10):
                await asker.endpoint.call(nodes[0].endpoint.contact, DhtFind([KEY] * 64), timeout_s=5.0)

        with pytest.raises(PeerRefused, match="too many keys per second"):
            await flood()
        assert await store(swarm, nodes[1], "key", 1, 60)
        assert len(holders(swarm, "key")) == 2

    run(main)


def test_large_answers_use_up_the_rate_faster_than_small_ones() -> None:
    """A peer that asks for the same megabyte again and again is slowed down."""

    async def main() -> None:
        swarm = new_swarm()
        (victim,) = await grow(swarm, 1, settings=DhtSettings(find_keys_per_s=20.0))
        items = [Item("key", "x" * 60000, victim.in_s(600), number) for number in range(12)]
        assert all(await swarm.run_on(victim.name, victim.dht.store_many, items))
        asker = await evil(swarm, "evil", [])
        sizes = []

        async def flood() -> None:
            for _ in range(100):
                reply = await asker.endpoint.call(victim.endpoint.contact, DhtFind([KEY]), timeout_s=5.0)
                sizes.append(len(reply.found[0].records))

        with pytest.raises(PeerRefused, match="too many keys"):
            await flood()
        assert set(sizes) == {12}
        assert len(sizes) < 20
        storing = await evil(swarm, "evil2", [])

        async def exchanges() -> None:
            for _ in range(20):
                await storing.endpoint.call(victim.endpoint.contact, DhtStore([], KEY), timeout_s=5.0)

        with pytest.raises(PeerRefused, match="too many keys"):
            await exchanges()

    run(main)


def test_crowded_key_refuses_more_entries_but_keeps_working() -> None:
    """A peer in it can renew and read."""
    limits = StorageLimits(key_entries=10)

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 2, settings=DhtSettings(storage=limits))
        assert await store(swarm, nodes[0], "key", 1, 60, subkey=nodes[0].dht.peer_id.to_bytes())
        sender = await evil(swarm, "evil", [])
        for each in nodes:
            said = await sender.send(each, [sender.record(subkey=encode_subkey(number)) for number in range(20)])
            assert said.count("") == 9
        assert await store(swarm, nodes[0], "key", 2, 70, subkey=nodes[0].dht.peer_id.to_bytes())
        assert as_dict(await get(swarm, nodes[1], "key", latest=True))[nodes[0].dht.peer_id.to_bytes()] == 2

    run(main)


# ------------------------------------------------------------------------------------------------ answers that are lies


async def _forged(me: Evil, _: PeerID, request: DhtFind) -> DhtFindReply:
    return DhtFindReply([DhtFound([me.record(seconds=900, value=encode_value(0))], []) for _ in request.keys])


async def _stolen(me: Evil, _: PeerID, request: DhtFind) -> DhtFindReply:
    record = me.record(me.host.identity, subkey=encode_subkey(ALICE.peer_id.to_bytes()))
    return DhtFindReply([DhtFound([record], []) for _ in request.keys])


async def _other_key(me: Evil, _: PeerID, request: DhtFind) -> DhtFindReply:
    record = signed_record(ALICE, key_of("other"), None, ONE, me.now() + 60)
    return DhtFindReply([DhtFound([record], []) for _ in request.keys])


async def _too_few(me: Evil, _: PeerID, request: DhtFind) -> DhtFindReply:
    return DhtFindReply([])


async def _always_more(me: Evil, _: PeerID, request: DhtFind) -> DhtFindReply:
    return DhtFindReply([DhtFound([], [], True) for _ in request.keys])


@pytest.mark.parametrize("lie", [_forged, _stolen, _other_key, _too_few, _always_more])
def test_liar_is_dropped_and_the_truth_is_found(lie: FindHandler) -> None:
    """What it said is not believed, it leaves the table, an event says why; and it is not asked again."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 12)
        reader = nearest(nodes, "key")[-1]
        assert await store(swarm, nodes[0], "key", "true", 600)
        # Near the key, so that they are asked.
        names = sorted((f"evil{number}" for number in range(64)), key=lambda name: distance(swarm, name))
        liars = [await evil(swarm, name, [reader], lie) for name in names[:4]]
        for latest in (True, False, True):
            found = await get(swarm, reader, "key", latest=latest)
            assert found is not None
            assert found.value == "true"
        dropped = [event.peer for event in reader.seen(PeerDropped)]
        assert len(dropped) == 4
        assert set(dropped) == {liar.endpoint.peer_id for liar in liars}
        assert not any(reader.dht._neighbours.avoids(each.dht.peer_id, 0.0) for each in nodes)
        assert not any(name in reader.dht._neighbours.table for name in dropped)
        assert reader.seen(Warned) == []

    run(main)


def test_exchange_drops_a_liar_and_believes_the_others() -> None:
    """A forged record in the answer to a store costs its sender its place; what honest holders show counts."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 4)
        liar = await evil(swarm, "evil", nodes)

        async def answer(peer: PeerID, request: DhtStore) -> DhtStoreReply:
            forged = liar.record(subkey=encode_subkey(ALICE.peer_id.to_bytes()), value=encode_value("forged"))
            return DhtStoreReply(["" for _ in request.records], [forged])

        liar.endpoint.serve(DhtStore, answer)
        for number, each in enumerate(nodes[:2]):
            item = Item("key", number, each.in_s(60), each.dht.peer_id.to_bytes())
            stored, found = await swarm.run_on(each.name, each.dht.exchange, item)
            assert stored
            assert as_dict(found) == {nodes[k].dht.peer_id.to_bytes(): k for k in range(number + 1)}
            assert [event.peer for event in each.seen(PeerDropped)] == [liar.host.peer_id]

    run(main)


def test_one_honest_holder_is_enough_for_an_exchange() -> None:
    """Nine of ten holders take everything and show nothing: two peers still find each other."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 3)
        names = await surround(swarm, nodes, 9, among=200)
        order = nearest(nodes, "key")
        assert max(distance(swarm, name) for name in names) < distance(swarm, order[0].name)
        for number, each in enumerate(order[1:]):
            item = Item("key", number, each.in_s(60), each.dht.peer_id.to_bytes())
            stored, found = await swarm.run_on(each.name, each.dht.exchange, item)
            assert stored
        assert as_dict(found) == {order[1].dht.peer_id.to_bytes(): 0, order[2].dht.peer_id.to_bytes(): 1}

    run(main)


def test_eclipse_of_a_newcomer() -> None:
    """All nodes near the key take everything and show nothing: who knows one honest writer finds what that wrote."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 4)
        await surround(swarm, nodes, 14, among=400)
        writer = nearest(nodes, "key")[-1]
        subkey = writer.dht.peer_id.to_bytes()
        for _ in range(2):
            assert await store(swarm, writer, "key", 1, 60, subkey=subkey)
        new = await swarm.start_peer("new", node([swarm.host(writer.name).address]))
        assert as_dict(await get(swarm, new, "key", latest=True)) == {subkey: 1}

    run(main)


def test_untimely_records_in_an_answer_are_ignored_without_blame() -> None:
    """The other's clock may be wrong; but nothing expired, or capped, is returned."""

    async def late(me: Evil, _: PeerID, request: DhtFind) -> DhtFindReply:
        records = [me.record(seconds=-5), me.record(seconds=7200, subkey=encode_subkey("far"))]
        return DhtFindReply([DhtFound(records, []) for _ in request.keys])

    async def main() -> None:
        swarm = new_swarm()
        (reader,) = await grow(swarm, 1)
        other = await evil(swarm, "evil", [reader], late)
        assert await get(swarm, reader, "key", latest=True) is None
        assert other.endpoint.peer_id in reader.dht._neighbours.table
        assert reader.seen(PeerDropped) == []

    run(main)


def test_made_up_nodes_cost_a_bounded_number_of_calls() -> None:
    """A liar that always knows 32 nearer nodes, none of which exists, does not keep a lookup busy for long."""
    made_up = 0

    async def endless(me: Evil, _: PeerID, request: DhtFind) -> DhtFindReply:
        nonlocal made_up
        contacts = []
        for _number in range(32):
            made_up += 1
            name = PeerID(hashlib.sha256(b"made up %d" % made_up).digest())
            contacts.append(Contact(name, (Address("evil", 4000, name),)))
        return DhtFindReply([DhtFound([], contacts) for _ in request.keys])

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 12)
        assert await store(swarm, nodes[0], "key", 1, 600)
        reader = nearest(nodes, "key")[-1]
        await evil(swarm, "evil", [reader], endless)
        loop = asyncio.get_running_loop()
        began, calls = loop.time(), reader.dht.calls_made
        assert await get(swarm, reader, "key", latest=True) is not None
        assert await get(swarm, reader, "absent", latest=True) is None
        assert loop.time() - began < 15.0
        assert reader.dht.calls_made - calls < 400
        assert len(reader.dht._neighbours.table) == 12

    run(main)


def test_false_address_of_a_known_node_does_not_displace_the_true_one() -> None:
    """What others say about a node we know is not believed."""

    async def slander(me: Evil, _: PeerID, request: DhtFind) -> DhtFindReply:
        contacts = [Contact(each, (Address("evil", 4000, each),)) for each in victims]
        return DhtFindReply([DhtFound([], contacts) for _ in request.keys])

    victims: list[PeerID] = []

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 6)
        reader = nodes[0]
        victims.extend(each.dht.peer_id for each in nodes[1:])
        await evil(swarm, "evil", [reader], slander)
        for number in range(5):
            await get(swarm, reader, f"key {number}", latest=True)
        for each in nodes[1:]:
            contact = reader.dht._neighbours.table.contact(each.dht.peer_id)
            assert contact is not None
            assert contact.addresses[0].host == each.name
            assert reader.endpoint.contact_of(each.dht.peer_id).addresses[0].host == each.name

    run(main)


def test_staller_costs_moments_not_timeouts() -> None:
    """Evil nodes near the key that never answer do not keep the others' record from being found soon."""

    async def stall(me: Evil, _: PeerID, request: DhtFind) -> DhtFindReply:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 30)
        assert await store(swarm, nodes[0], "key", 1, 600)
        reader = nearest(nodes, "key")[-1]
        for number in range(5):
            await evil(swarm, f"evil{number}", [reader], stall)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await get(swarm, reader, "key") is not None
        assert loop.time() - began < 2.0
        began = loop.time()
        assert await get(swarm, reader, "key", latest=True, timeout_s=3.0) is not None
        assert loop.time() - began <= 3.0

    run(main)


# -------------------------------------------------------------------------------------------------------- large answers


def test_answer_too_large_for_one_message_is_fetched_in_several() -> None:
    """Megabytes under many keys, asked for at once, all arrive."""

    async def main() -> None:
        swarm = new_swarm()
        holder, _ = await grow(swarm, 2)
        items = [Item(f"key {number}", f"{number}" * 8000, holder.in_s(600)) for number in range(100)]
        assert all(await swarm.run_on(holder.name, holder.dht.store_many, items))
        # Only the first node holds them: the reader has to ask it.
        reader: Node = await swarm.start_peer("reader", node([swarm.host(holder.name).address]), client_mode=True)
        keys = [item.key for item in items]
        found = await swarm.run_on("reader", reader.dht.get_many, keys)
        assert [value and value.value for value in found.values()] == [item.value for item in items]
        assert reader.seen(PeerDropped) == []

    run(main)


def test_dictionary_with_a_thousand_entries_comes_whole() -> None:
    """As many peers as a large run has, each with some bytes of progress."""

    async def main() -> None:
        swarm = new_swarm()
        (holder,) = await grow(swarm, 1)
        items = [Item("run", {"epoch": 1, "samples": number}, holder.in_s(600), number) for number in range(1000)]
        assert all(await swarm.run_on(holder.name, holder.dht.store_many, items))
        reader: Node = await swarm.start_peer("reader", node([swarm.host(holder.name).address]), client_mode=True)
        found = as_dict(await get(swarm, reader, "run", latest=True))
        assert len(found) == 1000
        assert found[999] == {"epoch": 1, "samples": 999}

    run(main)
