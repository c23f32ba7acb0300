"""What the replays are made of: peers that train until they are told to leave, and strangers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import shoal
from benchmarks.truth.kit import RUN, Job, Report, joined, perceptron, train
from benchmarks.truth.peers import Failed, Line, Peer, Peers
from shoal.base.clock import Env
from shoal.base.peer import Address
from shoal.errors import PeerError
from shoal.protocol.identity import Identity
from shoal.protocol.wire import Contact, Progress, TellProgress
from shoal.rpc import Endpoint
from shoal.transport import sockets, tcp

__all__ = [
    "ALL",
    "PREFIX",
    "RUN",
    "Stranger",
    "address_of",
    "at_home",
    "ballast",
    "beside",
    "elsewhere",
    "enter",
    "jobs",
    "left",
    "only_a_way_in",
    "own_core",
    "pace",
    "paces",
    "strangers",
    "swarm",
]

ALL = "/ip4/0.0.0.0/tcp/0"

PREFIX = f"{RUN}_state"
"""The name by which its peers share the state."""

_ATTACKER = "127.0.0.2"
FOR_EVER = 10**6
_CLONE_NEWNET = 0x40000000


def jobs(count: int, **changes: Any) -> list[Job]:
    """Peers that make about five epochs a second, whatever their number, until they are told to leave."""
    usual: dict[str, Any] = {"epochs": FOR_EVER, "pace_s": 0.02, "batch": 8, "target": 80 * count}
    return [Job(index=index, **(usual | changes)) for index in range(count)]


def ballast(megabytes: int) -> dict[str, Any]:
    """Of a job: a small model whose state has so much more, which no round averages and no report looks at."""
    return {"model": functools.partial(_with_ballast, megabytes), "extra": ("ballast",)}


def _with_ballast(megabytes: int) -> nn.Module:
    model = perceptron()
    model.register_buffer("ballast", torch.arange(megabytes * 250_000, dtype=torch.float32), persistent=False)
    return model


def swarm(peers: Peers, those: Sequence[Job], work: Callable[..., Any] | None = None) -> list[Peer]:
    """Start them; returns when all have taken steps together."""
    started = joined(peers, those, work) if work is not None else joined(peers, those)
    for each in started:
        each.until_steps(5)
    return started


def address_of(peer: Peer) -> Address:
    """Where it listens, as it said."""
    return Address.parse(next(value for name, value in peer.said if name == "address"))


def pace(peer: Peer, seconds: float) -> float:
    """Epochs a second that a peer trains from now on, over so long; those that a download skips do not count."""
    return paces([peer], seconds)[0]


def paces(those: Sequence[Peer], seconds: float) -> list[float]:
    """The same of several at once."""
    began, before = time.monotonic(), [_epochs(each) for each in those]
    time.sleep(seconds)
    after = [_epochs(each) for each in those]
    return [(b - a) / (time.monotonic() - began) for a, b in zip(before, after, strict=True)]


def _epochs(peer: Peer) -> int:
    peer.hear()
    return sum(name == "epoch" for name, _ in peer.said)


def left(those: Sequence[Peer]) -> list[Report]:
    """Tell them to leave; how it went for each. One that has failed raises `Failed`."""
    for each in those:
        each.tell("leave")
    return [each.result() for each in those]


# ------------------------------------------------------------------------------------------------------------ strangers


@contextlib.contextmanager
def elsewhere(host: str = _ATTACKER) -> Iterator[None]:
    """What this process dials comes from another address of this machine meanwhile."""

    def bound(family: int) -> socket.socket:
        made = sockets.new_socket(family)
        made.bind((host, 0))
        return made

    tcp.new_socket = bound  # type: ignore[attr-defined]
    try:
        yield
    finally:
        tcp.new_socket = sockets.new_socket  # type: ignore[attr-defined]


class Stranger:
    """Somebody with the run's invite, and a fresh key."""

    def __init__(self) -> None:
        self.identity = Identity.ephemeral()
        self.endpoint = Endpoint(tcp.TcpTransport(self.identity, host=_ATTACKER), Env())

    async def tell(self, to: Address, **changes: Any) -> Progress:
        """Tell a peer where we stand: as it says of itself, but for `changes`. Returns what it says of itself."""
        contact = Contact(to.peer_id, (to,))
        words: dict[str, Any] = {"epoch": 0, "digest": bytes(32), "branch_samples": 0, "samples": 0, "rate": 0.0}
        first = Progress(self.endpoint.contact, **words, time=time.time(), settings={}, left=True)
        told = await self.endpoint.call(contact, TellProgress(RUN, first), timeout_s=5.0)
        own: dict[str, Any] = {"contact": self.endpoint.contact, "time": time.time(), "end_epoch": None}
        progress = msgspec.structs.replace(told.progress, **(own | changes))
        await self.endpoint.call(contact, TellProgress(RUN, progress), timeout_s=5.0)
        return told.progress


@contextlib.asynccontextmanager
async def strangers(count: int = 1) -> AsyncIterator[list[Stranger]]:
    """So many, from one host."""
    made = [Stranger() for _ in range(count)]
    try:
        for each in made:
            await each.endpoint.start()
        with elsewhere():
            yield made
    finally:
        await asyncio.gather(*(each.endpoint.close() for each in made))


async def beside(work: Awaitable[None], measured: Callable[[], Any]) -> Any:
    """What `measured` returns while `work` goes on."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.to_thread(measured)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, PeerError, Failed):
            await task


def enter(namespace: str) -> None:
    """Be in this network namespace from now on: this thread, and those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(namespace).open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns failed")


def at_home(line: Line, job: Job, namespace: str) -> Report:
    """Train in this network namespace."""
    enter(namespace)
    return train(line, job)


def only_a_way_in(line: Line, namespace: str) -> None:
    """A DHT that trains nothing."""
    enter(namespace)
    with shoal.DHT(host_maddrs=ALL, start=True) as dht:
        line.say("address", str(dht.get_visible_maddrs()[0]))
        line.wait("leave")


def own_core(number: int) -> None:
    """Run on this core only."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number]})
