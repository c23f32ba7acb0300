"""Whole averagers on simulated hosts: what the averaging and optimizer simulations start from."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import torch

from shoal.averaging import Averager, AveragerSettings, StepResult, TensorLock
from shoal.averaging.core import PeerCore
from shoal.compression import CompressionBase
from shoal.events import Event, Warned
from shoal.sim import SimHost, SimNetwork, Swarm
from shoal.transport.base import Transport

SETTINGS = AveragerSettings(window_s=5.0, request_timeout_s=1.0, part_size_bytes=4096, silence_s=2.0)


async def start_core(
    host: SimHost,
    first: SimHost | None,
    *,
    client_mode: bool = False,
    transport: Transport | None = None,
    **options: Any,
) -> PeerCore:
    """One peer, joined to the network of the first."""
    transport = transport or host.transport
    peers = [] if first is None or first.name == host.name else [first.address]
    return await PeerCore.start(host.identity, transport, host.env, peers, client_mode=client_mode, **options)


def seize(lock: TensorLock, holder: str) -> Callable[[], None]:
    """Take a lock that is free; returns what gives it back."""
    stack = ExitStack()
    assert stack.enter_context(lock.acquire_in_thread(holder, 0.0))
    return stack.close


def note_internal_error(notes: list[str], name: str, event: Event) -> None:
    """Collect what went wrong inside of shoal: a Python error that it caught, not a peer or a network that failed."""
    if isinstance(event, Warned) and re.match(r"[A-Z][A-Za-z]*(Error|Exception)\b", event.message):
        notes.append(f"{name}: {event.where}: {event.message}")


class Trial:
    """A swarm of averagers, each with its own tensors.

    Args:
        settings: of every averager.
        compression: codec for averaging.
        bandwidth_bytes_s: of every host.
        transport_of: what a host's peer stands on, if not on the host's own transport.
        heard: called with the name of a host and each event there.

    Attributes:
        warnings: internal errors that any peer reported: there must be none.
    """

    def __init__(
        self,
        *,
        settings: AveragerSettings = SETTINGS,
        compression: CompressionBase | None = None,
        bandwidth_bytes_s: float | None = None,
        transport_of: Callable[[SimHost], Transport] = lambda host: host.transport,
        heard: Callable[[str, Event], None] = lambda name, event: None,
    ) -> None:
        seed = asyncio.get_running_loop().seed  # type: ignore[attr-defined]
        self.swarm: Swarm[Averager] = Swarm(network=SimNetwork(seed, bandwidth_bytes_s=bandwidth_bytes_s))
        self.settings, self.compression = settings, compression
        self.warnings: list[str] = []
        self._first: SimHost | None = None
        self._transport_of, self._heard = transport_of, heard

    async def add(
        self, name: str, tensors: Sequence[torch.Tensor], *, client_mode: bool = False, **changes: Any
    ) -> Averager:
        """Start an averager on a host of its own."""

        async def factory(host: SimHost) -> Averager:
            host.env.events.subscribe(lambda event: note_internal_error(self.warnings, name, event))
            host.env.events.subscribe(lambda event: self._heard(name, event))
            if self._first is None:
                self._first = host
            transport = self._transport_of(host)
            core = await start_core(host, self._first, client_mode=client_mode, transport=transport)
            settings = msgspec.structs.replace(self.settings, client_mode=client_mode, **changes)
            return Averager(core, tensors, "trial", settings, lock=TensorLock(), compression=self.compression)

        return await self.swarm.start_peer(name, factory, client_mode=client_mode)

    async def step(self, name: str, **options: Any) -> StepResult:
        """One step of one averager, on its own host."""
        return await self.swarm.run_on(name, self.swarm.peer(name).step, **options)

    def begin(self, name: str, **options: Any) -> Coroutine[Any, Any, StepResult]:
        """As `step`, to be awaited together with others."""
        return self.step(name, **options)

    async def close(self) -> None:
        """Shut all averagers down, in order."""
        for name, averager in self.swarm.peers.items():
            await self.swarm.run_on(name, averager.close)
            await self.swarm.run_on(name, averager.core.close)


def same_bits(tensors: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether all lists of tensors are equal bit by bit."""
    return all(all(torch.equal(a, b) for a, b in zip(tensors[0], other, strict=True)) for other in tensors[1:])


Make = Callable[[int], list[torch.Tensor]]
