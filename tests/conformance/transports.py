"""The transports that the conformance suite runs on: to add one, append a `TransportFactory` to `FACTORIES`.

A scenario is a coroutine function that gets a `TransportPair`. The factory makes the pair and runs the scenario on the
kind of loop that its transport needs (sockets: asyncio's own; simulated network: virtual time), and closes everything.
"""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

from shoal.base.peer import Address
from shoal.protocol.identity import Identity
from shoal.transport.base import Connection, Transport

NEAR = Identity.from_seed(b"n" * 32)
FAR = Identity.from_seed(b"f" * 32)
NOBODY = Identity.from_seed(b"0" * 32)


class TransportPair:
    """Two transports of one kind, both listening, and what a test needs around them.

    Attributes:
        near: the one that dials in most tests.
        far: the one that accepts.
        client: a third one in client mode.
        silent: an address (of peer `FAR`) that takes no notice of whoever dials it.
        dead: an address (of peer `FAR`) where nobody listens.
    """

    def __init__(self, near: Transport, far: Transport, client: Transport, silent: Address, dead: Address) -> None:
        self.near, self.far, self.client, self.silent, self.dead = near, far, client, silent, dead
        self.accepted: asyncio.Queue[Connection] = asyncio.Queue()

    async def start(self) -> None:
        """Let all three listen (which does nothing in client mode)."""
        for transport in (self.far, self.near, self.client):
            await transport.listen(self.accepted.put_nowait)

    async def dial(self, addresses: Sequence[Address] | None = None, *, timeout_s: float = 20.0) -> Connection:
        """Dial `far` from `near`."""
        where = self.far.addresses if addresses is None else addresses
        return await self.near.dial(self.far.peer_id, where, timeout_s=timeout_s)

    async def connect(self) -> tuple[Connection, Connection]:
        """A new connection: its end at `near`, which dialed, and its end at `far`."""
        dialed = await self.dial()
        return dialed, await self.accepted.get()

    async def close(self) -> None:
        """Close all transports."""
        for transport in (self.near, self.far, self.client):
            await transport.close()


Scenario = Callable[[TransportPair], Coroutine[Any, Any, None]]


class TransportFactory(NamedTuple):
    """How to run a scenario on one kind of transport."""

    name: str
    run: Callable[[Scenario], None]


async def _play(scenario: Scenario, pair: TransportPair) -> None:
    await pair.start()
    try:
        await scenario(pair)
    finally:
        await pair.close()


def run_tcp(scenario: Scenario, *, encrypt: bool = True) -> None:
    """Run on real sockets; afterwards no socket and no task may be left."""
    from shoal.transport.tcp import TcpTransport

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as deaf, socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            silent, dead = (Address("127.0.0.1", each.getsockname()[1], FAR.peer_id) for each in (deaf, unused))
            near, far = (TcpTransport(each, encrypt=encrypt) for each in (NEAR, FAR))
            client = TcpTransport(Identity.from_seed(b"c" * 32), client_mode=True, encrypt=encrypt)
            await _play(scenario, TransportPair(near, far, client, silent, dead))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    gc.collect()  # what was not closed warns now, in the test whose fault it is
    assert not _open_sockets()


def _open_sockets() -> list[socket.socket]:
    from shoal.transport import sockets

    return [sock for sock in sockets.open_sockets if sock.fileno() >= 0]


def run_memory(scenario: Scenario) -> None:
    """Run on a simulated network, in virtual time."""
    from shoal import sim
    from shoal.transport.memory import MemoryTransport

    async def main() -> None:
        network = sim.SimNetwork(random.Random(1))
        for host in ("near", "far", "client", "silent"):
            network.add_host(host)
        network.stall("silent")
        silent, dead = Address("silent", 4000, FAR.peer_id), Address("far", 4999, FAR.peer_id)
        near, far = (MemoryTransport(each, network, host=host) for each, host in ((NEAR, "near"), (FAR, "far")))
        client = MemoryTransport(Identity.from_seed(b"c" * 32), network, host="client", client_mode=True)
        await _play(scenario, TransportPair(near, far, client, silent, dead))

    sim.run(main, seed=1)


FACTORIES = (
    TransportFactory("tcp", run_tcp),
    TransportFactory("clear", partial(run_tcp, encrypt=False)),
    TransportFactory("memory", run_memory),
)


async def gather(*works: Awaitable[Any]) -> list[Any]:
    """`asyncio.gather` that leaves nothing running behind a failure."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_await(work)) for work in works]
    return [task.result() for task in tasks]


async def _await(work: Awaitable[Any]) -> Any:
    return await work
