"""Simulated donors and receivers for the tests of state download."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from shoal.base.clock import Env
from shoal.base.peer import PeerID
from shoal.compression import CompressionBase
from shoal.events import Event
from shoal.rpc import Endpoint
from shoal.sim import SimHost, SimNetwork, Swarm, sleep
from shoal.state.wire import Donor, DownloadedState, SharedState, ShareLimits, StateDonor, download_state

E = TypeVar("E", bound=Event)
P = ParamSpec("P")
T = TypeVar("T")

PREFIX = "run"
MIB = 1 << 20


class SlowExecutor:
    """Everything takes so long, in virtual time."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        await sleep(self._delay_s)
        return function(*args, **kwargs)


class Box:
    """A state with a lock, as an averager would have it. Counts how often it was held."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        epoch: int = 0,
        metadata: Any = None,
        codecs: Sequence[CompressionBase] | None = None,
        may_be_infinite: Collection[int] = (),
    ) -> None:
        self.tensors, self.epoch, self.metadata, self.codecs = list(tensors), epoch, metadata, codecs
        self.may_be_infinite = may_be_infinite
        self.lock = asyncio.Lock()
        self.holds = 0

    def version(self) -> Hashable:
        """Changes with every write."""
        return self.epoch

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[SharedState]:
        """The state under its lock."""
        async with self.lock:
            self.holds += 1
            yield SharedState(self.metadata, self.tensors, self.codecs, self.epoch, self.may_be_infinite)

    async def write(self, value: float) -> None:
        """Overwrite everything, one tensor after another with other work between, as training would."""
        async with self.lock:
            for tensor in self.tensors:
                tensor.fill_(value)
                await sleep(0)
            self.epoch += 1


@dataclass
class Node:
    """One simulated peer."""

    env: Env
    endpoint: Endpoint
    box: Box | None
    donor: StateDonor | None
    events: list[Event] = field(default_factory=list)

    def seen(self, kind: type[E]) -> list[E]:
        """The events of this kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def peer(self) -> PeerID:
        """Its id."""
        return self.endpoint.peer_id


def node(
    box: Box | None = None,
    *,
    limits: ShareLimits | None = None,
    kind: type[StateDonor] = StateDonor,
    change_env: Callable[[Env], Env] = lambda env: env,
) -> Callable[[SimHost], Coroutine[Any, Any, Node]]:
    """A factory for `Swarm.start_peer`: a peer that shares `box`, or nothing."""

    async def start(host: SimHost) -> Node:
        env = change_env(host.env)
        endpoint = Endpoint(host.transport, env)
        donor = kind(endpoint, env, PREFIX, box.hold, box.version, limits=limits) if box else None
        await endpoint.start()
        made = Node(env, endpoint, box, donor)
        env.events.subscribe(made.events.append)
        return made

    return start


def new_swarm(*, bandwidth_bytes_s: float | None = 4 * MIB, window_bytes: int = 4 * MIB) -> Swarm[Node]:
    """A swarm whose hosts have 4 MiB/s each way, so that a download takes its time."""
    seed = Swarm[Node]().seed
    network = SimNetwork(seed, bandwidth_bytes_s=bandwidth_bytes_s, window_bytes=window_bytes)
    return Swarm[Node](seed, network=network)


def donors_of(*nodes: Node, priorities: Sequence[float] | None = None) -> list[Donor]:
    """These nodes as donors; without priorities the first has the highest."""
    ranks = priorities or [len(nodes) - i for i in range(len(nodes))]
    return [Donor(n.endpoint.contact, rank) for n, rank in zip(nodes, ranks, strict=True)]


async def fetch(
    swarm: Swarm[Node], name: str, donors: Sequence[Donor], *, prefix: str = PREFIX, **options: Any
) -> DownloadedState:
    """Download on this host."""
    me = swarm.peer(name)
    options.setdefault("timeout_s", 300.0)
    return await swarm.run_on(name, download_state, me.endpoint, me.env, prefix, donors, **options)


def random_tensors(seed: int, *mebibytes: float) -> list[torch.Tensor]:
    """Float32 tensors of these sizes with values that follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(int(size * MIB / 4), generator=generator) for size in mebibytes]


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether two states are equal in every bit that counts."""
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))
