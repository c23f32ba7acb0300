"""Plain asyncio sockets that send what a round sends, in the same order, and nothing else: what TCP itself can reach.

Each peer has two connections with each other one. On the one that it dialed it sends its contributions to the tiles
that the other owns, and gets their averages back; on the one that it accepted it is the other way round. So what goes
from a peer to another one goes on a connection for contributions and one for averages. An average is sent when the
contributions of all have come. Nothing is encrypted, encoded or added up: a codec only says how many bytes there are.
BBR where the kernel has it. Imports nothing of shoal.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from itertools import pairwise

import torch

from benchmarks.contenders.own_loop import OwnLoop
from benchmarks.contenders.worker import Contender, Options, Times, now, serve

TILE_BYTES = 1 << 20


class SocketsPeer(OwnLoop, Contender):
    """One peer."""

    limit_s = 80.0

    def __init__(self, options: Options, tensor: torch.Tensor) -> None:
        OwnLoop.__init__(self)
        self.options, self.tensor = options, tensor
        itemsize = {"none": 4, "float16": 2}.get(options.compression, 1)
        values = options.numel // options.peers * itemsize // tensor.element_size()
        nbytes = values * tensor.element_size()
        count = -(-nbytes // (options.part_bytes or TILE_BYTES))
        self.tiles = list(pairwise(nbytes * number // count for number in range(count + 1)))
        self.received = [torch.zeros(values) for _ in range(2 * (options.peers - 1))]
        self.dialed: list[socket.socket] = []
        self.accepted: list[socket.socket] = []

    def start(self) -> str:
        self.listener = tuned(socket.create_server((self.options.host, 0)))
        return f"{self.options.host}:{self.listener.getsockname()[1]}"

    def join(self, invites: list[str]) -> None:
        self.run(self.connect([invite for rank, invite in enumerate(invites) if rank != self.options.rank]))

    async def connect(self, invites: list[str]) -> None:
        """Dial all others, and be dialed by them."""
        for invite in invites:
            host, _, port = invite.rpartition(":")
            self.dialed.append(tuned(socket.socket()))
            await self.loop.sock_connect(self.dialed[-1], (host, int(port)))
        for _ in invites:
            self.accepted.append(tuned((await self.loop.sock_accept(self.listener))[0]))

    def average(self) -> Times:
        called = now()
        self.run(self.exchange())
        return Times(called, called, now())

    async def exchange(self) -> None:
        """Everything of one round."""
        missing = [len(self.accepted)] * len(self.tiles)
        complete = [asyncio.Event() for _ in self.tiles]
        source = self.tensor.numpy().data.cast("B")
        averages, contributions = self.received[: len(self.dialed)], self.received[len(self.dialed) :]

        async def contribute(sock: socket.socket) -> None:
            for start, stop in self.tiles:
                await self.loop.sock_sendall(sock, source[start:stop])

        async def give(sock: socket.socket) -> None:
            for event, (start, stop) in zip(complete, self.tiles, strict=True):
                await event.wait()
                await self.loop.sock_sendall(sock, source[start:stop])

        async def take(sock: socket.socket, target: torch.Tensor, *, counts: bool) -> None:
            place = target.numpy().data.cast("B")
            for number, (start, stop) in enumerate(self.tiles):
                while start < stop:
                    count = await self.loop.sock_recv_into(sock, place[start:stop])
                    if not count:
                        raise ConnectionError("a peer hung up")
                    start += count
                if counts:
                    missing[number] -= 1
                    if not missing[number]:
                        complete[number].set()

        await asyncio.gather(
            *(contribute(sock) for sock in self.dialed),
            *(give(sock) for sock in self.accepted),
            *(take(*each, counts=True) for each in zip(self.accepted, contributions, strict=True)),
            *(take(*each, counts=False) for each in zip(self.dialed, averages, strict=True)),
        )

    def result(self, tensor: torch.Tensor) -> tuple[torch.Tensor, float | None]:
        """The sum of all that came: each other peer sent the beginning of its values twice."""
        others = sum(range(1, self.options.peers + 1)) - (self.options.rank + 1)
        return torch.stack(self.received).sum(0), 2 * others

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


def tuned(sock: socket.socket) -> socket.socket:
    """As shoal sets its sockets up."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, AttributeError):  # the system's choice stays
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    return sock


if __name__ == "__main__":
    serve(SocketsPeer)
