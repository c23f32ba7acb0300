"""shoal's transport alone: each peer exchanges with each other one what a butterfly all-reduce would, both ways on
each connection at once. Nothing is added up: this is what there is to reach.
"""

from __future__ import annotations

import asyncio

import torch

from benchmarks.contenders.own_loop import OwnLoop
from benchmarks.contenders.worker import Contender, Options, Times, now, serve
from shoal.base.peer import Address
from shoal.compression import view_bytes
from shoal.protocol.identity import Identity
from shoal.transport.base import Connection
from shoal.transport.tcp import TcpTransport

TILE_BYTES = 1 << 20


class TransportPeer(OwnLoop, Contender):
    """One peer."""

    def __init__(self, options: Options, tensor: torch.Tensor) -> None:
        OwnLoop.__init__(self)
        itemsize = {"none": 4, "float16": 2}.get(options.compression, 1)
        self.options, self.tensor = options, tensor
        self.tile_bytes = options.part_bytes or TILE_BYTES
        self.share_bytes = options.numel // options.peers * itemsize
        self.dialed: list[Connection] = []
        self.accepted: list[Connection] = []
        self.complete = asyncio.Event()
        self.received: list[torch.Tensor] = []

    def accept(self, connection: Connection) -> None:
        self.accepted.append(connection)
        if len(self.accepted) == self.options.peers - 1:
            self.complete.set()

    def start(self) -> str:
        async def listen() -> str:
            self.transport = TcpTransport(Identity.ephemeral(), host=self.options.host, encrypt=self.options.encrypt)
            await self.transport.listen(self.accept)
            return str(self.transport.addresses[0])

        return self.run(listen())

    def join(self, invites: list[str]) -> None:
        async def dial() -> None:
            for rank, invite in enumerate(invites):
                if rank != self.options.rank:
                    address = Address.parse(invite)
                    self.dialed.append(await self.transport.dial(address.peer_id, [address], timeout_s=10.0))
            async with asyncio.timeout(30.0):
                await self.complete.wait()

        self.run(dial())
        itemsize = self.tensor.element_size()
        self.received = [torch.zeros(self.share_bytes // itemsize) for _ in range(2 * (self.options.peers - 1))]

    def average(self) -> Times:
        called = now()
        self.run(self.exchange())
        return Times(called, called, now())

    async def exchange(self) -> None:
        source = view_bytes(self.tensor)
        works = []
        for connection, target in zip([*self.dialed, *self.accepted], self.received, strict=True):
            works.append(self.send(connection, source))
            works.append(self.receive(connection, view_bytes(target)))
        await asyncio.gather(*works)

    async def send(self, connection: Connection, source: memoryview) -> None:
        for start in range(0, self.share_bytes, self.tile_bytes):
            await connection.write(source[start : min(start + self.tile_bytes, self.share_bytes)])

    async def receive(self, connection: Connection, target: memoryview) -> None:
        for start in range(0, self.share_bytes, self.tile_bytes):
            await connection.readinto(target[start : start + self.tile_bytes])

    def result(self, tensor: torch.Tensor) -> tuple[torch.Tensor, float | None]:
        """The sum of what all others sent to us; each sent the beginning of its values."""
        dialed = self.received[: len(self.dialed)]
        others = sum(range(1, self.options.peers + 1)) - (self.options.rank + 1)
        return torch.stack(dialed).sum(0), others

    def stop(self) -> None:
        self.run(self.transport.close())


if __name__ == "__main__":
    serve(TransportPeer)
