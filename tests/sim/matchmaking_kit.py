"""Simulated peers that form groups, and a directory in memory that takes its time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from shoal.averaging.directory import DhtDirectory
from shoal.averaging.matchmaking import Group, GroupDirectory, JoinTerms, Matchmaker, MatchmakingConfig
from shoal.base.clock import Env
from shoal.base.peer import PeerID
from shoal.dht import DhtNode
from shoal.errors import PeerProtocolError, PeerTimeout, RoundFailed
from shoal.events import Event
from shoal.protocol.wire import Contact, Member
from shoal.rpc import Endpoint
from shoal.sim import SimHost, SimNetwork, Swarm, sleep

PREFIX = "run"
KEY = "run.0b"
NUMEL = 1000
LATENCY_S = 0.002


class SlowDirectory:
    """One dictionary for all peers, as slow as a DHT: a write takes about six latencies, a read four.

    Args:
        seed: where the variation comes from.
        latency_s: one way between two peers.
        visible_after_s: an entry is found only up to this much later than `declare` says.
    """

    def __init__(self, seed: int, *, latency_s: float = LATENCY_S, visible_after_s: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.latency_s, self.visible_after_s = latency_s, visible_after_s
        self.entries: dict[str, dict[PeerID, tuple[Contact, float]]] = {}
        self.writes: dict[tuple[str, PeerID], int] = {}
        self.reads = 0
        self.broken = False

    async def write(
        self, group_key: str, peer: PeerID, entry: tuple[Contact, float] | None
    ) -> list[tuple[Contact, float]]:
        """Store the entry, unless the peer has begun to store a later one; all that are there then."""
        serial = self.writes[group_key, peer] = self.writes.get((group_key, peer), 0) + 1
        took_s = 6 * self.latency_s * self.rng.uniform(0.5, 1.5)
        share = self.rng.random()
        await sleep(took_s * share)

        def store() -> None:
            if self.writes[group_key, peer] == serial:
                entries = self.entries.setdefault(group_key, {})
                entries.pop(peer, None)
                if entry is not None:
                    entries[peer] = entry

        if self.broken and entry is not None:
            raise PeerTimeout("the directory does not answer")
        late_s = self.visible_after_s * self.rng.random()
        if late_s:
            asyncio.get_running_loop().call_later(late_s, store)
        else:
            store()
        found = list(self.entries.get(group_key, {}).values())
        await sleep(took_s * (1 - share))
        return found

    async def read(self, group_key: str) -> list[tuple[Contact, float]]:
        """All entries, as they are somewhere in the middle of the read."""
        self.reads += 1
        took_s = 4 * self.latency_s * self.rng.uniform(0.5, 1.5)
        share = self.rng.random()
        await sleep(took_s * share)
        found = list(self.entries.get(group_key, {}).values())
        await sleep(took_s * (1 - share))
        if self.broken:
            raise PeerTimeout("the directory does not answer")
        return found


class View:
    """One peer's `GroupDirectory`."""

    def __init__(self, directory: SlowDirectory, peer: PeerID) -> None:
        self.directory, self.peer = directory, peer

    async def declare(self, group_key: str, expiration: float, contact: Contact) -> list[tuple[Contact, float]]:
        return await self.directory.write(group_key, self.peer, (contact, expiration))

    async def withdraw(self, group_key: str) -> None:
        await self.directory.write(group_key, self.peer, None)

    async def read(self, group_key: str) -> list[tuple[Contact, float]]:
        return await self.directory.read(group_key)


def plan(members: Sequence[Member]) -> tuple[list[int], int]:
    """Equal shares for all that reduce."""
    reducers = [index for index, member in enumerate(members) if member.reduces]
    shares = [0] * len(members)
    for index in reducers:
        shares[index] = NUMEL // len(reducers)
    shares[reducers[0]] += NUMEL - sum(shares)
    return shares, 1 << 19


def compare_schema(theirs: bytes, peer: PeerID) -> str | None:
    """A sentence if the schemas differ."""
    if not theirs:
        raise PeerProtocolError("no schema", peer)
    return None if theirs == b"schema" else f"tensor 0 'weight' is {theirs.decode()} at {peer.short()}"


@dataclass(eq=False)
class Mate:
    """One simulated peer."""

    name: str
    env: Env
    endpoint: Endpoint
    matchmaker: Matchmaker
    events: list[Event] = field(default_factory=list)

    @property
    def peer(self) -> PeerID:
        """Its id."""
        return self.endpoint.peer_id

    async def form(self, *, window_s: float | None = None, bandwidth: float | None = None, **kwargs: Any) -> Group:
        """Form a group under the usual key; `window_s` and `bandwidth` are set from now on, if given."""
        given = {name: value for name, value in (("window_s", window_s), ("bandwidth", bandwidth)) if value is not None}
        self.matchmaker._config = replace(self.matchmaker._config, **given)
        return await self.matchmaker.form_group(**{"group_key": KEY, "gathered": self.name.encode()} | kwargs)


@dataclass(eq=False)
class Fleet:
    """A swarm of mates with one directory; `dht`: with shoal's own, in their DHT."""

    swarm: Swarm[Mate]
    directory: SlowDirectory
    dht: bool = False
    mates: dict[str, Mate] = field(default_factory=dict)

    @classmethod
    def launch(
        cls,
        *,
        seed: int | None = None,
        latency_s: float = LATENCY_S,
        jitter_s: float = 0.0,
        dht: bool = False,
        **kwargs: Any,
    ) -> Fleet:
        """An empty fleet; call it inside of `shoal.sim.run`."""
        loop_seed = seed if seed is not None else getattr(asyncio.get_running_loop(), "seed", 0)
        directory = SlowDirectory(loop_seed, latency_s=latency_s, visible_after_s=kwargs.pop("visible_after_s", 0.0))
        network = SimNetwork(loop_seed, latency_s=latency_s, jitter_s=jitter_s)
        return cls(Swarm(loop_seed, network=network, **kwargs), directory, dht)

    async def add(
        self,
        *names: str,
        client_mode: bool = False,
        schema: bytes = b"schema",
        settings: Mapping[str, str] = MappingProxyType({}),
        compare_schema: Callable[[bytes, PeerID], str | None] = compare_schema,
        plan: Callable[[Sequence[Member]], tuple[list[int], int]] = plan,
        **config: Any,
    ) -> list[Mate]:
        """Start peers with these options of the matchmaker."""

        async def start(host: SimHost) -> Mate:
            endpoint = Endpoint(host.transport, host.env)
            await endpoint.start(listen=not client_mode)
            events: list[Event] = []
            host.env.events.subscribe(events.append)
            matchmaker = Matchmaker(
                endpoint,
                host.env,
                await self._view(host, endpoint),
                MatchmakingConfig(**({"window_s": 5.0, "client_mode": client_mode} | config)),
                prefix=PREFIX,
                terms=JoinTerms(schema, settings, compare_schema),
                plan=plan,
            )
            return Mate(host.name, host.env, endpoint, matchmaker, events)

        added = []
        for name in names:
            mate = await self.swarm.start_peer(name, start, client_mode=client_mode)
            self.mates[name] = mate
            added.append(mate)
        return added

    async def _view(self, host: SimHost, endpoint: Endpoint) -> GroupDirectory:
        if not self.dht:
            return View(self.directory, host.peer_id)
        node = DhtNode(endpoint, host.env, host.identity)
        await node.bootstrap([self.swarm.host(name).address for name in list(self.mates)[:1]])
        return DhtDirectory(node, endpoint, timeout_s=2.4)

    def call(self, mate: Mate, *, after_s: float = 0.0, **kwargs: Any) -> asyncio.Task[Group]:
        """Let a peer form a group, in a while."""

        async def later() -> Group:
            if after_s:
                await sleep(after_s)
            return await mate.form(**kwargs)

        task = self.swarm.spawn(mate.name, later())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # told by `outcomes`
        return task

    def name_of(self, peer: PeerID) -> str:
        """Whose id this is."""
        return next(mate.name for mate in self.mates.values() if mate.peer == peer)

    async def close(self) -> None:
        """Close what is alive."""
        for mate in self.swarm.peers.values():
            await self.swarm.run_on(mate.name, mate.matchmaker.close)
            await self.swarm.run_on(mate.name, mate.endpoint.close)


async def outcomes(tasks: Mapping[str, asyncio.Task[Group]]) -> dict[str, Group | BaseException]:
    """What came of each: the group, or why not."""
    await asyncio.wait(tasks.values())
    ends: dict[str, Group | BaseException] = {}
    for name, task in tasks.items():
        if task.cancelled():
            ends[name] = asyncio.CancelledError()
        else:
            ends[name] = task.exception() or task.result()
    return ends


def groups_of(ends: Mapping[str, Group | BaseException]) -> list[set[str]]:
    """The groups, as sets of the names of those that got it; the failures left out."""
    found: dict[bytes, set[str]] = {}
    for name, end in ends.items():
        if isinstance(end, Group):
            found.setdefault(end.round_id, set()).add(name)
    return sorted(found.values(), key=sorted)


def released(ends: Mapping[str, Group | BaseException]) -> None:
    """Release all groups."""
    for end in ends.values():
        if isinstance(end, Group):
            end.release()


def failure(end: Group | BaseException) -> RoundFailed:
    """The failure, where one is expected."""
    assert isinstance(end, RoundFailed), f"expected a failure, got {end!r}"
    return end


async def in_time(coroutine: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    """Await it, but no longer than this (virtual) time."""
    async with asyncio.timeout(limit_s):
        return await coroutine


Expected = Callable[[], frozenset[PeerID] | None]
