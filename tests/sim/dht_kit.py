"""Simulated DHT nodes for the tests of the DHT."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shoal.base.clock import Env
from shoal.base.peer import Address
from shoal.dht import DhtNode, DhtSettings, RecordValidator, ValueWithExpiration
from shoal.dht.routing import id_of_key, key_of, node_id
from shoal.events import Event
from shoal.protocol.identity import Identity
from shoal.rpc import Endpoint, Limits
from shoal.sim import SimHost, SimNetwork, Swarm

E = TypeVar("E", bound=Event)

FIRST = "n0"


@dataclass
class Node:
    """One simulated node."""

    name: str
    env: Env
    identity: Identity
    endpoint: Endpoint
    dht: DhtNode
    events: list[Event] = field(default_factory=list)

    def in_s(self, seconds: float) -> float:
        """An expiration so far from now."""
        return self.env.clock.time() + seconds

    def seen(self, kind: type[E]) -> list[E]:
        """The events of this kind so far."""
        return [event for event in self.events if isinstance(event, kind)]


Factory = Callable[[SimHost], Coroutine[Any, Any, Node]]


def node(
    initial: Iterable[Address] = (),
    *,
    settings: DhtSettings | None = None,
    limits: Limits | None = None,
    validators: Iterable[RecordValidator] = (),
    timeout_s: float | None = None,
    patient: bool = True,
) -> Factory:
    """A factory of nodes that join by these addresses."""

    async def start(host: SimHost) -> Node:
        endpoint = Endpoint(host.transport, host.env, limits=limits)
        await endpoint.start()
        dht = DhtNode(endpoint, host.env, host.identity, settings=settings, validators=validators)
        made = Node(host.name, host.env, host.identity, endpoint, dht)
        host.env.events.subscribe(made.events.append)
        await dht.bootstrap(initial, timeout_s=timeout_s, patient=patient)
        return made

    return start


def new_swarm(**network: Any) -> Swarm[Node]:
    """A swarm on a network with a little jitter, so that replies come in many orders."""
    loop: Any = asyncio.get_running_loop()
    return Swarm[Node](network=SimNetwork(loop.seed, **{"latency_s": 0.01, "jitter_s": 0.01, **network}))


async def grow(swarm: Swarm[Node], count: int, **options: Any) -> list[Node]:
    """Add so many nodes, in small batches; each knows one living member at first. All nodes of the swarm."""
    rng = random.Random(f"{swarm.seed}/grow/{len(swarm.network.hosts)}")
    left = count
    while left:
        members = [swarm.host(name).address for name in swarm.peers]
        batch = min(left, max(1, len(members) // 2))
        names = [f"n{len(swarm.network.hosts) + number}" for number in range(batch)]
        await asyncio.gather(
            *(swarm.start_peer(name, node([rng.choice(members)] if members else [], **options)) for name in names)
        )
        left -= batch
    return list(swarm.peers.values())


async def get(swarm: Swarm[Node], where: Node, key: str, **options: Any) -> ValueWithExpiration | None:
    """`get` on that node's host."""
    return await swarm.run_on(where.name, where.dht.get, key, **options)


async def store(swarm: Swarm[Node], where: Node, key: str, value: object, seconds: float, **options: Any) -> bool:
    """`store` on that node's host, for so long."""
    return await swarm.run_on(where.name, where.dht.store, key, value, where.in_s(seconds), **options)


def nearest(nodes: Sequence[Node], key: str) -> list[Node]:
    """The nodes in order of their distance to a key."""
    return sorted(nodes, key=lambda each: node_id(each.dht.peer_id) ^ id_of_key(key_of(key)))


def holders(swarm: Swarm[Node], key: str) -> list[Node]:
    """The living nodes that hold the key for others."""
    nodes = [peer for peer in swarm.peers.values() if isinstance(peer, Node)]
    return [each for each in nodes if each.dht._vault.held.records(key_of(key), each.env.clock.time())]
