"""Storing an entry and getting the others' in one: how peers that declare at the same time find each other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from shoal.dht import DhtSettings, Item
from shoal.sim import Swarm, run
from tests.sim.dht_kit import Node, get, grow, holders, nearest, new_swarm

QUIET = DhtSettings(refresh_s=math.inf, republish_s=math.inf, retry_lost_s=math.inf)


async def exchange(
    swarm: Swarm[Node], where: Node, value: object = 1, key: str = "key"
) -> tuple[bool, dict[bytes, object]]:
    """Write the node's own entry under a key: whether it is stored, and the entries that it was shown."""
    item = Item(key, value, where.in_s(60), where.dht.peer_id.to_bytes())
    stored, found = await swarm.run_on(where.name, where.dht.exchange, item)
    return stored, {} if found is None else {subkey: entry.value for subkey, entry in found.value.items()}


def ids(nodes: Sequence[Node]) -> set[bytes]:
    """The subkeys of these nodes' entries."""
    return {each.dht.peer_id.to_bytes() for each in nodes}


@pytest.mark.parametrize("count", [1, 2, 16, 40])
def test_what_is_exchanged_is_stored_and_shown(count: int) -> None:
    """One after another each node is shown the entries of all before it and its own, and every node can get them."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, count, settings=QUIET)
        for number, each in enumerate(nodes[:8]):
            assert await exchange(swarm, each, number) == (
                True,
                {nodes[k].dht.peer_id.to_bytes(): k for k in range(number + 1)},
            )
        found = await get(swarm, nodes[-1], "key", latest=True)
        assert found is not None
        assert set(found.value) == ids(nodes[:8])
        assert len(holders(swarm, "key")) == min(count, QUIET.replicas)

    run(main)


def test_of_two_that_exchange_at_once_one_at_least_sees_the_other() -> None:
    """Each holder takes an entry before it shows what it has: whichever it hears of last is shown the other."""

    async def main() -> None:
        swarm = new_swarm(jitter_s=0.05)
        nodes = await grow(swarm, 16, settings=QUIET)
        both = 0
        for number in range(1, 16):
            pair = [nodes[0], nodes[number]]
            shown = await asyncio.gather(*(exchange(swarm, each, key=f"key{number}") for each in pair))
            sees = [other.dht.peer_id in found for (_, found), other in zip(shown, reversed(pair), strict=True)]
            assert any(sees)
            both += all(sees)
        assert both  # with several holders it is mostly both

    run(main)


def test_exchange_costs_one_call_for_each_holder() -> None:
    """Where the nodes that hold the key are known, nothing is looked up."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 16, settings=QUIET)
        writer = nearest(nodes, "key")[-1]
        await exchange(swarm, writer)
        before = writer.dht._caller.calls
        await exchange(swarm, writer)
        assert writer.dht._caller.calls - before == QUIET.replicas

    run(main)


def test_silent_holders_are_waited_for_a_moment_only() -> None:
    """What the others hold is there soon; the silent ones get the entry when they wake up."""

    async def main() -> None:
        swarm = new_swarm()
        nodes = await grow(swarm, 16, settings=QUIET)
        order = nearest(nodes, "key")
        await exchange(swarm, order[-2])
        await exchange(swarm, order[-1])
        frozen = order[:3]
        for each in frozen:
            swarm.stall(each.name)
        loop = asyncio.get_running_loop()
        began = loop.time()
        stored, shown = await exchange(swarm, order[-1], 2)
        assert stored
        assert shown == {order[-2].dht.peer_id.to_bytes(): 1, order[-1].dht.peer_id.to_bytes(): 2}
        assert QUIET.slow_s <= loop.time() - began < QUIET.slow_s + 0.2

    run(main)
