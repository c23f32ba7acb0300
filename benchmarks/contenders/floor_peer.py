"""The least that a round of shoal can be: its bytes over its connections, with the passes over memory that it cannot do
without, and nothing else. No group is formed, nothing is decided: all know in which order tiles come, nobody is lost.
"""

from __future__ import annotations

import asyncio

import torch

from benchmarks.contenders.transport_peer import TransportPeer
from benchmarks.contenders.worker import Options, Times, now, serve
from shoal.averaging.allreduce.vector import TileDigests, Vector, describe
from shoal.base.peer import Address
from shoal.compression import codec_by_name
from shoal.layout import Tile
from shoal.protocol.wire import Held
from shoal.transport.base import Connection


class FloorPeer(TransportPeer):
    """One peer. The numbers are worked on in the loop: with more peers than cores another thread gains nothing."""

    def __init__(self, options: Options, tensor: torch.Tensor) -> None:
        super().__init__(options, tensor)
        self.vector = Vector([tensor], describe([tensor], [codec_by_name(options.compression)]))
        even, more = divmod(options.numel, options.peers)
        self.tiling = self.vector.tiling([even + (rank < more) for rank in range(options.peers)], self.tile_bytes)
        self.digests = TileDigests(bytes(16))
        self.missing: dict[Tile, int] = {}
        self.done: dict[Tile, asyncio.Event] = {}

    def join(self, invites: list[str]) -> None:
        super().join(invites)
        ranks = [Address.parse(invite).peer_id for invite in invites]
        self.to_reducer = {ranks.index(connection.peer_id): connection for connection in self.dialed}

    def average(self) -> Times:
        called = now()
        assert self.vector.copy_in() is None, "values that cannot be averaged"
        self.run(self.exchange())
        self.vector.apply(1.0)
        return Times(called, called, now())

    async def exchange(self) -> None:
        mine = self.tiling.owned(self.options.rank)
        self.missing = {tile: len(self.accepted) for tile in mine}
        self.done = {tile: asyncio.Event() for tile in mine}
        works = []
        for reducer, connection in self.to_reducer.items():
            works += [self.contribute(connection, reducer), self.land(connection, reducer)]
        for connection in self.accepted:
            works += [self.reduce(connection, mine), self.give(connection, mine)]
        await asyncio.gather(*works)

    async def contribute(self, connection: Connection, reducer: int) -> None:
        for tile in self.tiling.owned(reducer):
            await connection.write(self.vector.contribution(tile))

    async def reduce(self, connection: Connection, mine: list[Tile]) -> None:
        buffer = memoryview(bytearray(self.tile_bytes))
        for tile in mine:
            data = buffer[: self.vector.encoded_bytes(tile)]
            await connection.readinto(data)
            if self.missing[tile] == len(self.accepted):
                self.vector.begin_sum(tile, 1.0)
            self.vector.add(tile, self.vector.decoded(tile, data, 1.0), 1.0)
            self.missing[tile] -= 1
            if not self.missing[tile]:
                held = Held(self.tiling.tiles.index(tile), 0, b"", self.options.peers, b"")
                self.digests.of(held, self.vector.finish(tile, held.weight))
                self.done[tile].set()

    async def give(self, connection: Connection, mine: list[Tile]) -> None:
        for tile in mine:
            await self.done[tile].wait()
            wire = self.vector.ready_bytes(tile)
            assert wire is not None, "it is finished"
            await connection.write(wire)

    async def land(self, connection: Connection, reducer: int) -> None:
        buffer = memoryview(bytearray(self.tile_bytes))
        for tile in self.tiling.owned(reducer):
            data = self.vector.landing(tile) or buffer[: self.vector.encoded_bytes(tile)]
            await connection.readinto(data)
            self.vector.land(tile, data)

    def result(self, tensor: torch.Tensor) -> tuple[torch.Tensor, float | None]:
        return tensor, None


if __name__ == "__main__":
    serve(FloorPeer)
