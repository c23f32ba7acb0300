"""Many simulated peers from one seed: hosts with their environments, identities and transports, and their faults.

A peer can be anything: a factory, given a `SimHost`, makes one and starts it. The factory and everything that it starts
belong to that host: a crash stops them, a stall freezes them, a restart calls the factory again, with the same name,
identity and address and a new environment.

::

    async def main():
        swarm = Swarm[DHTNode]()
        await swarm.start_peer("a", start_node)
        await swarm.start_peer("b", start_node)
        swarm.crash("a")
        await swarm.run_on("b", swarm.peer("b").get, "key")


    shoal.sim.run(main, seed=7)
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from shoal.base.clock import Env, InlineExecutor
from shoal.base.peer import Address, PeerID
from shoal.errors import ClosedError, ConfigError, LocalError
from shoal.events import EventBus
from shoal.protocol.identity import SEED_BYTES, Identity
from shoal.sim.loop import VirtualLoop, world_time
from shoal.sim.network import SimNetwork
from shoal.sim.whims import SlowExecutor
from shoal.transport.memory import MemoryTransport

__all__ = ["SimClock", "SimHost", "Swarm"]

P = ParamSpec("P")
T = TypeVar("T")
PeerT = TypeVar("PeerT")

EPOCH_S = 1.7e9
"""The time of the wall clocks when a simulation begins, seconds since 1970."""

PORT = 4000
"""The port of every simulated peer, each on a host of its own."""


class SimClock:
    """The clock of a simulated host.

    Args:
        loop: the virtual loop.
        epoch_s: wall time at virtual time 0.
        skew_s: how far this clock is ahead of the right time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, epoch_s: float = EPOCH_S, skew_s: float = 0.0) -> None:
        self._loop, self._offset_s = loop, epoch_s + skew_s

    def time(self) -> float:
        return self._offset_s + world_time(self._loop)

    def monotonic(self) -> float:
        return world_time(self._loop)


@dataclass(frozen=True, slots=True)
class SimHost:
    """The surroundings of a peer on a simulated host; made anew for every life of the host.

    Attributes:
        name: the host's name.
        life: the number of restarts so far.
        env: clock, chance, executor and events of this life.
        identity: the same in every life.
        transport: the transport, which does not listen yet. Its address is the same in every life.
        network: the network under the transport.
    """

    name: str
    life: int
    env: Env
    identity: Identity
    transport: MemoryTransport
    network: SimNetwork

    @property
    def peer_id(self) -> PeerID:
        """The id of the peer."""
        return self.identity.peer_id

    @property
    def address(self) -> Address:
        """Where the peer can be dialed once it listens."""
        return Address(self.name, PORT, self.identity.peer_id)


class Swarm(Generic[PeerT]):
    """Simulated peers, by the names of their hosts. Made inside of `shoal.sim.run`.

    Args:
        seed: the source of all chance; None takes the seed given to `run`.
        network: None makes one with the default latency and no limit of bandwidth.
        epoch_s: wall time at virtual time 0, seconds since 1970.
        clock_skew_s: each host's wall clock is wrong by up to this much, either way.

    Raises:
        LocalError: no virtual event loop is running.
    """

    def __init__(
        self,
        seed: int | None = None,
        *,
        network: SimNetwork | None = None,
        epoch_s: float = EPOCH_S,
        clock_skew_s: float = 0.0,
    ) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if not isinstance(loop, VirtualLoop):
            raise LocalError("make a Swarm inside of shoal.sim.run: it needs virtual time")
        self._loop = loop
        self._epoch_s, self._clock_skew_s = epoch_s, clock_skew_s
        self.seed = loop.seed if seed is None else seed
        self.network = SimNetwork(self.seed) if network is None else network
        self._hosts: dict[str, SimHost] = {}
        self._client_mode: dict[str, bool] = {}
        self._factories: dict[str, Callable[[SimHost], Coroutine[Any, Any, PeerT]]] = {}
        self._peers: dict[str, PeerT] = {}

    # --------------------------------------------------------------------------------------------------------- peers

    @property
    def peers(self) -> dict[str, PeerT]:
        """The factories' results for the hosts that are alive now, in the order in which they were started."""
        return {name: self._peers[name] for name in self._hosts if name in self._peers}

    def peer(self, name: str) -> PeerT:
        """The result of this host's factory.

        Raises:
            ClosedError: the host is down, or its factory has not returned yet.
        """
        if name not in self._peers:
            raise ClosedError(f"no peer runs on host {name!r}")
        return self._peers[name]

    def host(self, name: str) -> SimHost:
        """The present life of a host.

        Raises:
            ConfigError: no peer was ever started there.
        """
        if name not in self._hosts:
            raise ConfigError(f"there is no host {name!r} in the swarm: it has {', '.join(self._hosts) or 'none yet'}")
        return self._hosts[name]

    def identity(self, name: str) -> Identity:
        """The identity of the host of this name in this swarm, whether it was started or not."""
        seed = f"{self.seed}/{name}/identity".encode()
        return Identity.from_seed(hashlib.blake2b(seed, digest_size=SEED_BYTES).digest())

    async def start_peer(
        self, name: str, factory: Callable[[SimHost], Coroutine[Any, Any, PeerT]], *, client_mode: bool = False
    ) -> PeerT:
        """Make a host and run `factory` on it; returns the factory's result.

        Args:
            name: letters, digits, dots, dashes and underscores.
            factory: makes and starts the peer. It is called again after a restart.
            client_mode: the peer's transport only dials.

        Raises:
            ConfigError: the name is taken.
            ClosedError: the host went down meanwhile.
        """
        if name in self._hosts:
            raise ConfigError(f"host {name!r} runs a peer already: choose another name, or restart it")
        self._client_mode[name], self._factories[name] = client_mode, factory
        self._hosts[name] = self._make_host(name, 0)
        return await self._start(name)

    async def start_peers(
        self, names: Iterable[str], factory: Callable[[SimHost], Coroutine[Any, Any, PeerT]]
    ) -> list[PeerT]:
        """Start several peers at the same time; returns them in the order of their names."""
        return await asyncio.gather(*(self.start_peer(name, factory) for name in names))

    async def run_on(
        self, name: str, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a coroutine function on a host, which owns all tasks that it starts; returns the function's result.

        If this is cancelled, it cancels the call and does not wait for it to unwind: the host may be stalled.

        Raises:
            ClosedError: the host is down, or went down meanwhile.
        """
        task = self.network.spawn(name, function(*args, **kwargs))
        owner = self.network.owner(name)
        waiting: list[asyncio.Future[Any]] = [task]
        if owner.ended is not None:
            waiting.append(owner.ended)  # a killed task may never end
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if owner.killed:
                raise ClosedError(f"host {name!r} went down")
            return task.result()
        finally:
            task.cancel()

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task on a host. If it fails and nobody awaits it, the simulation fails.

        Raises:
            ClosedError: the host is down.
        """
        return self.network.spawn(name, coroutine)

    async def _start(self, name: str) -> PeerT:
        host = self._hosts[name]
        peer = await self.run_on(name, self._factories[name], host)
        self._peers[name] = peer
        return peer

    def _make_host(self, name: str, life: int) -> SimHost:
        skew_s = random.Random(f"{self.seed}/{name}/skew").uniform(-self._clock_skew_s, self._clock_skew_s)
        env = Env(
            clock=SimClock(self._loop, epoch_s=self._epoch_s, skew_s=skew_s),
            rng=random.Random(f"{self.seed}/{name}/{life}"),
            executor=InlineExecutor() if self._loop.mischief is None else SlowExecutor(self._loop.mischief),
            events=EventBus(),
        )
        identity = self.identity(name)
        transport = MemoryTransport(identity, self.network, host=name, port=PORT, client_mode=self._client_mode[name])
        return SimHost(name, life, env, identity, transport, self.network)

    # -------------------------------------------------------------------------------------------------------- faults

    def is_alive(self, name: str) -> bool:
        """Whether the host's process runs (also if it is stalled)."""
        return self.network.is_alive(name)

    def crash(self, name: str) -> None:
        """Kill the peer: see `SimNetwork.crash`. No effect if it is down already."""
        self._peers.pop(self.host(name).name, None)
        self.network.crash(name)

    def vanish(self, name: str) -> None:
        """Take the whole machine away: see `SimNetwork.vanish`."""
        self._peers.pop(self.host(name).name, None)
        self.network.vanish(name)

    async def restart(self, name: str) -> PeerT:
        """Start a peer again that is down. It keeps name, identity and address, and nothing else of its last life.

        Raises:
            LocalError: the host is alive.
            ClosedError: the host went down again meanwhile.
        """
        last, last_owner = self.host(name), self.network.owner(name)
        self.network.restart(name)
        self._hosts[name] = self._make_host(name, last.life + 1)
        if last_owner.ended is not None and not last_owner.buried:
            await asyncio.wait([last_owner.ended])
        return await self._start(name)

    def stall(self, name: str, duration_s: float | None = None) -> None:
        """Freeze the peer for so long, or until `unstall`: see `SimNetwork.stall`."""
        self.network.stall(self.host(name).name, duration_s)

    def unstall(self, name: str) -> None:
        """Let a stalled peer go on."""
        self.network.unstall(self.host(name).name)

    def slow(self, name: str, factor: float) -> None:
        """Make the host's network slower by `factor`; 1 ends it."""
        self.network.slow(self.host(name).name, factor)

    def partition(self, groups: Iterable[Iterable[str]]) -> None:
        """Silence between the groups until `heal`; hosts that no group names form one more."""
        self.network.partition(groups)

    def heal(self) -> None:
        """End the partition."""
        self.network.heal()
