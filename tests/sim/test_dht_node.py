"""What a user of the DHT sees: store and get on networks of one, two and many nodes, and what goes wrong aloud."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from shoal.base.peer import Address
from shoal.dht import DhtNode, DhtSettings, Item, SchemaValidator
from shoal.errors import ClosedError, ConfigError, PeerUnreachable
from shoal.events import Warned
from shoal.protocol.identity import Identity
from shoal.rpc import Endpoint, Limits
from shoal.sim import Swarm, run, sleep
from tests.sim.dht_kit import FIRST, Node, get, grow, holders, nearest, new_swarm, node, store

NO_UPKEEP = DhtSettings(refresh_s=math.inf, republish_s=math.inf, retry_lost_s=math.inf)


async def lone() -> tuple[Swarm[Node], Node]:
    """A network of one."""
    swarm = new_swarm()
    return swarm, await swarm.start_peer(FIRST, node())


# ----------------------------------------------------------------------------------------------------- store and get


def test_lone_node_stores_and_gets() -> None:
    """Plain values and dictionaries, with and without `latest`."""

    async def main() -> None:
        swarm, alone = await lone()
        assert await get(swarm, alone, "nothing") is None
        assert await store(swarm, alone, "plain", [1, "two"], 60)
        assert await store(swarm, alone, "dict", 1, 60, subkey="a")
        assert await store(swarm, alone, "dict", 2, 50, subkey="b")
        expires = alone.in_s(60)
        for latest in (False, True):
            assert await get(swarm, alone, "plain", latest=latest) == ([1, "two"], expires)
            assert await get(swarm, alone, "dict", latest=latest) == (
                {"a": (1, expires), "b": (2, expires - 10)},
                expires,
            )

    run(main)


@pytest.mark.parametrize("count", [2, 3, 20])
def test_what_one_node_stored_every_node_gets(count: int) -> None:
    """From networks smaller than the number of replicas to larger ones; absent keys are None."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, count)
        for number, each in enumerate(nodes):
            assert await store(swarm, each, f"key {number}", number, 600)
        for number in range(count):
            assert len(holders(swarm, f"key {number}")) == min(count, DhtSettings().replicas)
            found = await asyncio.gather(*(get(swarm, each, f"key {number}") for each in nodes))
            assert [value and value.value for value in found] == [number] * count
        assert await get(swarm, nodes[0], "absent") is None
        assert await get(swarm, nodes[-1], "absent", latest=True) is None

    run(main)


def test_records_lie_at_the_nodes_nearest_to_their_key() -> None:
    """Exactly there, in a network that nobody left."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 40)
        for number in range(20):
            assert await store(swarm, nodes[number], f"key {number}", number, 600)
            assert set(map(id, holders(swarm, f"key {number}"))) == set(map(id, nearest(nodes, f"key {number}")[:10]))

    run(main)


def test_dictionary_gathers_entries_of_many_peers_which_expire_one_by_one() -> None:
    """As swarm bookkeeping needs it: each peer writes its own entry, named by its id."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 12)
        for number, each in enumerate(nodes):
            assert await store(swarm, each, "peers", number, 100 + 10 * number, subkey=each.dht.peer_id.to_bytes())
        for gone in range(12):
            found = await get(swarm, nodes[gone], "peers", latest=True)
            assert found is not None
            assert {subkey: entry.value for subkey, entry in found.value.items()} == {
                each.dht.peer_id.to_bytes(): number for number, each in enumerate(nodes) if number >= gone
            }
            assert found.expiration_time == max(entry.expiration_time for entry in found.value.values())
            await sleep(100 if gone == 0 else 10)
        assert await get(swarm, nodes[0], "peers", latest=True) is None

    run(main)


def test_later_expiration_wins_wherever_it_was_stored() -> None:
    """The loser is told so; equal expirations are decided by the value, on all nodes alike."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 15)
        assert await store(swarm, nodes[1], "key", "late", 300)
        assert not await store(swarm, nodes[2], "key", "early", 200)
        assert (await get(swarm, nodes[2], "key", latest=True) or [None])[0] == "late"
        assert await store(swarm, nodes[3], "key", "latest", 400)
        assert (await get(swarm, nodes[1], "key", latest=True) or [None])[0] == "latest"
        await asyncio.gather(*(store(swarm, nodes[number], "tie", number, 300) for number in range(5)))
        found = await asyncio.gather(*(get(swarm, each, "tie", latest=True) for each in nodes))
        assert {value and value.value for value in found} == {4}

    run(main)


def test_cached_answer_is_used_for_a_while_and_latest_goes_past_it() -> None:
    """`latest=False` trades freshness for calls, but not for ever."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 30, settings=NO_UPKEEP)
        reader = nearest(nodes, "key")[-1]
        writer = next(each for each in nodes if each is not reader)
        await store(swarm, writer, "key", "old", 300)
        assert (await get(swarm, reader, "key") or [None])[0] == "old"
        await store(swarm, writer, "key", "new", 400)
        calls = reader.dht.calls_made
        assert (await get(swarm, reader, "key") or [None])[0] == "old"
        assert reader.dht.calls_made == calls
        assert (await get(swarm, reader, "key", latest=True) or [None])[0] == "new"
        await store(swarm, writer, "key", "newer", 500)
        await sleep(DhtSettings().cache_s + 1)
        assert (await get(swarm, reader, "key") or [None])[0] == "newer"

    run(main)


def test_own_entry_does_not_answer_for_the_whole_dictionary() -> None:
    """A peer that wrote one entry still asks others for the rest."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 30, settings=NO_UPKEEP)
        writer, other = nearest(nodes, "key")[-1], nearest(nodes, "key")[-2]
        await store(swarm, writer, "key", 1, 300, subkey="mine")
        await store(swarm, other, "key", 2, 300, subkey="other")
        found = await get(swarm, writer, "key")
        assert found is not None
        assert set(found.value) == {"mine", "other"}

    run(main)


def test_many_keys_cost_one_call_per_node_not_one_per_key() -> None:
    """Bulk operations give the same results as single ones, with far fewer calls."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 20)
        writer, reader = nodes[3], nodes[7]
        items = [Item(f"key {number}", number, writer.in_s(600), f"entry {number}") for number in range(100)]
        before = writer.dht.calls_made
        assert await swarm.run_on(writer.name, writer.dht.store_many, items) == [True] * 100
        assert writer.dht.calls_made - before < 100
        before = reader.dht.calls_made
        keys = [f"key {number}" for number in range(101)]
        found = await swarm.run_on(reader.name, reader.dht.get_many, keys, latest=True)
        assert reader.dht.calls_made - before < 100
        for number in range(100):
            value = found[f"key {number}"]
            assert value is not None
            assert {name: entry.value for name, entry in value.value.items()} == {f"entry {number}": number}
        assert found["key 100"] is None

    run(main)


def test_of_several_items_for_one_entry_the_one_that_expires_later_is_stored() -> None:
    """The others are told that they lost."""

    async def main() -> None:
        swarm, alone = await lone()
        items = [Item("key", value, alone.in_s(seconds)) for value, seconds in (("a", 50), ("b", 70), ("c", 60))]
        assert await swarm.run_on(FIRST, alone.dht.store_many, items) == [False, True, False]
        assert (await get(swarm, alone, "key") or [None])[0] == "b"
        assert await swarm.run_on(FIRST, alone.dht.store_many, []) == []

    run(main)


def test_hundreds_of_operations_at_once_from_one_node_all_succeed() -> None:
    """They wait in line rather than overwhelm a neighbour."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 8, limits=Limits(calls_per_peer=40))
        first, last = nodes[0], nodes[-1]
        stored = await asyncio.gather(*(store(swarm, first, f"key {number}", number, 600) for number in range(200)))
        assert all(stored)
        found = await asyncio.gather(*(get(swarm, last, f"key {number}", latest=True) for number in range(200)))
        assert [value and value.value for value in found] == list(range(200))

    run(main)


def test_expired_values_are_never_returned_nor_taken() -> None:
    """Not from the cache, not from what was written here, and storing one says no."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 15)
        assert not await store(swarm, nodes[0], "late", 1, 0)
        assert not await store(swarm, nodes[0], "late", 1, -5)
        assert await store(swarm, nodes[0], "key", 1, 5)
        assert await get(swarm, nodes[1], "key") is not None
        await sleep(5)
        for each in nodes:
            assert await get(swarm, each, "key") is None

    run(main)


# ------------------------------------------------------------------------------------------------------ client mode


def test_client_stores_and_gets_but_is_in_nobodys_table_and_holds_nothing() -> None:
    """A peer that only dials is a guest."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 10)
        client = await swarm.start_peer("client", node([swarm.host(FIRST).address]), client_mode=True)
        assert client.dht.client_mode
        assert await store(swarm, client, "key", "from a client", 60)
        assert (await get(swarm, nodes[5], "key") or [None])[0] == "from a client"
        assert await store(swarm, nodes[2], "other", "for a client", 60)
        assert (await get(swarm, client, "other") or [None])[0] == "for a client"
        assert client.dht.records_held == 0
        assert not any(client.dht.peer_id in each.dht._neighbours.table for each in nodes)

    run(main)


def test_client_without_network_says_that_nothing_was_stored() -> None:
    """Nobody holds it."""

    async def main() -> None:
        swarm = new_swarm()
        client = await swarm.start_peer("client", node(), client_mode=True)
        assert not await store(swarm, client, "key", 1, 60)
        assert await get(swarm, client, "key") is None

    run(main)


# -------------------------------------------------------------------------------------------------------- bootstrap


def test_failed_bootstrap_names_every_address_and_why() -> None:
    """Nobody listens at one, somebody else at another, the third does not answer."""

    async def main() -> None:
        swarm = new_swarm()
        await swarm.start_peer("other", node())
        await swarm.start_peer("frozen", node())
        swarm.stall("frozen")
        swarm.network.add_host("empty")
        stranger = Identity.from_seed(bytes(32)).peer_id
        initial = [
            Address("empty", 4000, swarm.identity("empty").peer_id),
            Address("other", 4000, stranger),
            swarm.host("frozen").address,
        ]
        began = asyncio.get_running_loop().time()
        with pytest.raises(PeerUnreachable) as caught:
            await swarm.start_peer("new", node(initial, timeout_s=7.0))
        assert asyncio.get_running_loop().time() - began == pytest.approx(7.0)
        text = str(caught.value)
        assert all(str(address) in text for address in initial)
        assert "nobody listens" in text
        assert "refused" in text
        assert "no answer from frozen" in text

    run(main)


def test_bootstrap_that_everybody_refuses_ends_at_once() -> None:
    """There is nothing to wait for."""

    async def main() -> None:
        swarm = new_swarm()
        await swarm.start_peer("other", node())
        initial = [Address("other", 4000, Identity.from_seed(bytes(32)).peer_id)]
        began = asyncio.get_running_loop().time()
        with pytest.raises(PeerUnreachable, match="refused"):
            await swarm.start_peer("new", node(initial, timeout_s=60.0))
        assert asyncio.get_running_loop().time() - began < 1.0

    run(main)


def test_bootstrap_waits_for_an_initial_peer_that_starts_later() -> None:
    """Peers that are started together find each other in whatever order they come up."""

    async def main() -> None:
        swarm = new_swarm()
        swarm.network.add_host("late")
        address = Address("late", 4000, swarm.identity("late").peer_id)
        early = asyncio.ensure_future(swarm.start_peer("early", node([address])))
        await sleep(4.0)
        assert not early.done()
        late = await swarm.start_peer("late", node())
        await store(swarm, late, "key", 1, 60)
        assert await get(swarm, await early, "key") is not None

    run(main)


def test_initial_peers_that_all_refuse_are_given_up_within_three_seconds() -> None:
    """They cost 15 s, though every port said at once that nobody listens. One that is silent costs them still."""

    async def main() -> None:
        swarm = new_swarm()
        addresses = []
        for name in ("down", "gone"):
            swarm.network.add_host(name)
            addresses.append(Address(name, 4000, swarm.identity(name).peer_id))
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(PeerUnreachable, match=r"no initial peer answered: .*down.*nobody listens.*gone.*nobody"):
            await swarm.start_peer("new", node(addresses, timeout_s=15.0, patient=False))
        assert 2.0 <= loop.time() - began <= 3.5
        swarm.network.wall("gone")
        began = loop.time()
        with pytest.raises(PeerUnreachable, match=r"down.*nobody listens.*gone"):
            await swarm.start_peer("newer", node(addresses, timeout_s=15.0, patient=False))
        assert loop.time() - began == pytest.approx(15.0)

    run(main)


def test_an_initial_peer_that_listens_a_second_later_is_not_given_up() -> None:
    """Peers that are started together do not come up in the same instant."""

    async def main() -> None:
        swarm = new_swarm()
        swarm.network.add_host("late")
        address = Address("late", 4000, swarm.identity("late").peer_id)
        early = asyncio.ensure_future(swarm.start_peer("early", node([address], patient=False)))
        await sleep(1.0)
        await swarm.start_peer("late", node())
        assert (await early).dht.neighbours == 1

    run(main)


def test_peers_that_name_each_other_form_one_network() -> None:
    """All at once, each with the addresses of all."""

    async def main() -> None:
        swarm = new_swarm()
        names = [f"n{number}" for number in range(4)]
        everybody = [Address(name, 4000, swarm.identity(name).peer_id) for name in names]
        for name in names:
            swarm.network.add_host(name)
        nodes = await swarm.start_peers(names, node(everybody))
        assert await store(swarm, nodes[0], "key", 1, 60)
        assert [each.dht.neighbours for each in nodes] == [3] * 4
        assert len(holders(swarm, "key")) == 4

    run(main)


def test_own_address_among_the_initial_peers_is_left_out() -> None:
    """A list that is the same for all peers holds our own, too; alone, it begins a network."""

    async def main() -> None:
        swarm = new_swarm()
        own = Address(FIRST, 4000, swarm.identity(FIRST).peer_id)
        alone = await swarm.start_peer(FIRST, node([own]))
        assert alone.dht.neighbours == 0
        assert await store(swarm, alone, "key", 1, 60)
        with pytest.raises(ConfigError, match=r"initial_peers: .* cannot share an identity file"):
            await alone.dht.bootstrap([Address(FIRST, 4001, own.peer_id)])
        with pytest.raises(PeerUnreachable):
            await alone.dht.bootstrap([own, Address("nobody", 4000, swarm.identity("nobody").peer_id)], timeout_s=1.0)

    run(main)


def test_dead_initial_peer_does_not_hold_up_a_bootstrap_that_another_answers() -> None:
    """The first answer is enough."""

    async def main() -> None:
        swarm = new_swarm()
        await grow(swarm, 3)
        await swarm.start_peer("frozen", node())
        swarm.stall("frozen")
        began = asyncio.get_running_loop().time()
        initial = [swarm.host("frozen").address, swarm.host(FIRST).address]
        new = await swarm.start_peer("new", node(initial))
        assert asyncio.get_running_loop().time() - began < 1.0
        assert new.dht.neighbours == 3

    run(main)


def test_one_that_joins_waits_three_seconds_for_a_silent_node() -> None:
    """It does not: of a small network the others have answered; nor does it wait for that node again and again."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 8)
        swarm.stall(nodes[3].name)
        began = asyncio.get_running_loop().time()
        new = await swarm.start_peer("new", node([swarm.host(FIRST).address]))
        assert asyncio.get_running_loop().time() - began < 1.0
        for number in range(4):
            assert await new.dht.get(f"key {number}", latest=True) is None
        assert asyncio.get_running_loop().time() - began < 1.5

    run(main)


@pytest.mark.parametrize(("live", "vanished"), [(1, 1), (3, 2), (8, 3)])
def test_joining_among_vanished_nodes_takes_three_seconds(live: int, vanished: int) -> None:
    """It takes one: who has not answered then is waited for no longer, where others have answered at once."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, live + vanished)
        for each in nodes[1 : 1 + vanished]:
            swarm.vanish(each.name)
        loop = asyncio.get_running_loop()
        began = loop.time()
        new = await swarm.start_peer("new", node([swarm.host(FIRST).address]))
        assert loop.time() - began < 1.3
        assert new.dht.neighbours == live
        began = loop.time()
        assert await new.dht.get("key", latest=True) is None
        assert loop.time() - began < 0.5

    run(main)


def test_far_nodes_are_not_taken_for_vanished() -> None:
    """An answer over a new connection takes 1.2 s here, over a link half of that: the one that joins waits for all."""

    async def main() -> None:
        swarm = new_swarm(latency_s=0.3)
        await grow(swarm, 4)
        new = await swarm.start_peer("new", node([swarm.host(FIRST).address]))
        assert new.dht.neighbours == 4

    run(main)


# ------------------------------------------------------------------------------------------------- nodes that fail


def test_slow_node_does_not_hold_up_a_get() -> None:
    """A frozen neighbour costs half a second at most, not its timeout."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 40, settings=NO_UPKEEP)
        await store(swarm, nodes[0], "key", 1, 600)
        order = nearest(nodes, "key")
        for frozen in order[:3]:
            swarm.stall(frozen.name)
        began = asyncio.get_running_loop().time()
        assert await get(swarm, order[-1], "key") is not None
        assert asyncio.get_running_loop().time() - began < 1.5

    run(main)


def test_every_operation_ends_in_time_when_nobody_answers() -> None:
    """It answers with what there is: nothing, or what this node holds itself."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 6)
        for each in nodes[1:]:
            swarm.stall(each.name)
        loop, alive = asyncio.get_running_loop(), nodes[0]
        began = loop.time()
        assert await get(swarm, alive, "key", timeout_s=1.0) is None
        assert loop.time() - began <= 1.0
        assert await store(swarm, alive, "key", 1, 600, timeout_s=20.0)
        assert loop.time() - began < 15.0
        assert (await get(swarm, alive, "key", latest=True) or [None])[0] == 1

    run(main)


def test_operations_whose_turn_does_not_come_in_time_return_what_is_known() -> None:
    """Two hundred averagers at once: those that waited in line for too long raised "generator didn't yield"."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 6, settings=DhtSettings(parallel_operations=1))
        for each in nodes[1:]:
            swarm.stall(each.name)

        async def operate(node: Node) -> list[object]:
            dht, items = node.dht, [Item(f"key {number}", number, node.in_s(60)) for number in range(5)]
            stores = [dht.store_many([item], timeout_s=0.5) for item in items]
            gets = [dht.get(item.key, latest=True, timeout_s=0.5) for item in items]
            exchanges = [dht.exchange(item, timeout_s=0.5) for item in items]
            finds = [dht.nearest(item.key, timeout_s=0.5) for item in items]
            return list(await asyncio.gather(*stores, *gets, *exchanges, *finds))

        assert len(await swarm.run_on(nodes[0].name, operate, nodes[0])) == 20

    run(main)


@pytest.mark.parametrize("how", ["crash", "vanish", "stall"])
def test_dead_neighbour_leaves_the_table_within_seconds(how: str) -> None:
    """Unasked: its connection breaks, or its silence is noticed."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 5, limits=Limits(idle_beat_s=2.0))
        assert [each.dht.neighbours for each in nodes] == [4] * 5
        getattr(swarm, how)(nodes[2].name)
        await sleep(1.0 if how == "crash" else 10.0)
        assert all(nodes[2].dht.peer_id not in each.dht._neighbours.table for each in nodes if each is not nodes[2])

    run(main)


def test_closing_ends_operations_and_answers_no_more() -> None:
    """A waiting caller is told; nothing of the node runs on."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 3)
        closed, other = nodes[1], nodes[2]
        swarm.stall(FIRST)
        swarm.stall(other.name)
        waiting = asyncio.ensure_future(get(swarm, closed, "key"))
        await sleep(0.1)
        await swarm.run_on(closed.name, closed.dht.close)
        with pytest.raises(ClosedError):
            await waiting
        for call in (
            lambda: closed.dht.get("key"),
            lambda: closed.dht.store("key", 1, closed.in_s(60)),
            lambda: closed.dht.nearest("key"),
            lambda: closed.dht.bootstrap([]),
        ):
            with pytest.raises(ClosedError):
                await call()
        await closed.dht.close()
        assert not closed.dht._caller.tasks
        swarm.unstall(FIRST)
        swarm.unstall(other.name)
        assert await store(swarm, other, "key", 1, 60)
        assert closed.dht.records_held == 0

    run(main)


# -------------------------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"key": 5}, "key"),
        ({"expiration_time": "tomorrow"}, "expiration_time"),
        ({"expiration_time": math.nan}, "expiration_time"),
        ({"expiration_time": math.inf}, "expiration_time"),
        ({"expiration_time": True}, "expiration_time"),
        ({"expiration_time": 1.7e9 + 3700}, "expiration_time"),
        ({"value": object()}, "value"),
        ({"value": "x" * 70000}, "value"),
        ({"subkey": 1.5}, "subkey"),
        ({"subkey": bytes(32)}, "subkey"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": -1.0}, "timeout_s"),
    ],
)
def test_wrong_arguments_of_store_are_named(arguments: dict[str, Any], named: str) -> None:
    """Before anything is sent; an expiration more than an hour ahead is one of them."""

    async def main() -> None:
        swarm, alone = await lone()
        right: dict[str, Any] = {"key": "key", "value": 1, "expiration_time": alone.in_s(3599)}
        assert await swarm.run_on(FIRST, lambda: alone.dht.store(**right))
        with pytest.raises(ConfigError, match=named):
            await swarm.run_on(FIRST, lambda: alone.dht.store(**{**right, **arguments}))

    run(main)


def test_wrong_key_of_get_is_named() -> None:
    """Keys are text or bytes."""

    async def main() -> None:
        _, alone = await lone()
        wrong: Any = 5
        with pytest.raises(ConfigError, match="key"):
            await alone.dht.get(wrong)

    run(main)


@pytest.mark.parametrize(
    "wrong", [{"bucket_size": 0}, {"replicas": 33}, {"alpha": 1.5}, {"timeout_s": 0.0}, {"refresh_s": -1.0}]
)
def test_wrong_settings_are_named(wrong: dict[str, Any]) -> None:
    """When they are made."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DhtSettings(**wrong)


def test_node_refuses_an_identity_that_is_not_its_endpoints() -> None:
    """It could sign nothing that others would believe."""

    async def main() -> None:
        _, alone = await lone()
        with pytest.raises(ConfigError, match="identity"):
            DhtNode(alone.endpoint, alone.env, Identity.from_seed(bytes(32)))

    run(main)


# ------------------------------------------------------------------------------------------------------ validators


def test_nodes_with_a_schema_refuse_what_does_not_fit_it() -> None:
    """When it is sent to them, when they store it themselves, and when they read it elsewhere."""

    async def main() -> None:
        swarm = new_swarm()
        strict, other = await grow(swarm, 2)
        assert await store(swarm, other, "old", "text", 600)
        strict.dht.add_validators(SchemaValidator({"count": int, "old": int}))
        assert not await store(swarm, strict, "count", "many", 60)
        assert await store(swarm, other, "count", "many", 70)
        assert holders(swarm, "count") == [other]
        assert await get(swarm, strict, "count", latest=True) is None
        assert other.dht.peer_id in strict.dht._neighbours.table
        assert (await get(swarm, other, "count") or [None])[0] == "many"
        assert await store(swarm, strict, "count", 5, 80)
        assert (await get(swarm, strict, "count", latest=True) or [None])[0] == 5

    run(main)


def test_store_refused_by_a_validator_raises() -> None:
    """Not any more: it is False, by its own with a warning, also in one of many; so by those of all the others."""

    async def main() -> None:
        swarm = new_swarm()
        strict, _ = await grow(swarm, 2)
        for each in swarm.peers.values():
            each.dht.add_validators(SchemaValidator({"count": int}))
        client = await swarm.start_peer("client", node([swarm.host(FIRST).address]), client_mode=True)
        assert not await store(swarm, client, "count", "many", 60)
        assert not await store(swarm, strict, "count", "many", 60)
        (warned,) = strict.seen(Warned)
        assert warned.message.startswith("value for key 'count' is refused by this node's own validators: value does")
        items = [Item("count", "many", strict.in_s(60)), Item("count", 5, strict.in_s(50))]
        assert await swarm.run_on(strict.name, strict.dht.store_many, items) == [False, True]
        assert (await get(swarm, client, "count", latest=True) or [None])[0] == 5

    run(main)


# ------------------------------------------------------------------------------------------------------ the same seed


def test_same_seed_gives_the_same_trace() -> None:
    """Joining, storing, getting, a crash and the repair after it; another seed gives another trace."""

    async def main() -> str:
        swarm = new_swarm()
        nodes = await grow(swarm, 12, settings=DhtSettings(refresh_s=20.0, republish_s=30.0))
        await asyncio.gather(*(store(swarm, each, f"key {each.name}", 1, 900) for each in nodes))
        swarm.crash("n7")
        await sleep(45.0)
        await asyncio.gather(*(get(swarm, each, "key n3") for each in swarm.peers.values()))
        return swarm.network.trace_digest()

    assert run(main, seed=3) == run(main, seed=3)
    assert run(main, seed=3) != run(main, seed=4)


def test_a_newcomer_whose_entry_dies_after_its_first_answer_goes_on_knocking() -> None:
    """Killed 0.3 s after it had let the newcomer in: within seconds of its restart they are together again."""

    async def main() -> None:
        swarm = new_swarm()
        await swarm.start_peer(FIRST, node())
        newcomer = await swarm.start_peer("newcomer", node([swarm.host(FIRST).address]))
        await sleep(0.3)
        swarm.crash(FIRST)
        await sleep(60.0)
        assert newcomer.dht.neighbours == 0
        await swarm.restart(FIRST)
        await sleep(8.0)
        assert newcomer.dht.neighbours == 1

    run(main)


def test_a_node_that_need_not_join_begins_alone_and_is_found_later() -> None:
    """Nobody that it knows is there yet: it says so, and knocks on."""

    async def main() -> None:
        swarm = new_swarm()
        other = await swarm.start_peer("other", node())
        address = swarm.host("other").address
        swarm.crash("other")

        async def start(host: Any) -> Node:
            endpoint = Endpoint(host.transport, host.env)
            await endpoint.start()
            dht = DhtNode(endpoint, host.env, host.identity)
            made = Node(host.name, host.env, host.identity, endpoint, dht)
            host.env.events.subscribe(made.events.append)
            await dht.bootstrap([address], timeout_s=5.0, required=False)
            return made

        alone = await swarm.start_peer("alone", start)
        (warning,) = alone.seen(Warned)
        assert "keeps trying to reach them" in warning.message
        await sleep(30.0)
        other = await swarm.restart("other")
        await sleep(8.0)
        assert alone.dht.neighbours == other.dht.neighbours == 1
        assert [contact.peer for contact in alone.dht.contacts(8)] == [other.dht.peer_id]

    run(main)
