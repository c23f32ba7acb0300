"""The least that a download of shoal's can be: its bytes over one of its connections, with the passes over memory that
it cannot do without. The donor copies the state and hashes the copy; the receiver has memory for it made in another
thread, hashes what has come while more comes, and looks for values that are no numbers. Nothing is asked for, nothing
is paced, no peer is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.contenders.own_loop import OwnLoop
from benchmarks.contenders.state_worker import TENSORS, Options, StatePeer, serve, state
from shoal.base.peer import Address
from shoal.compression import allocate, populate, view_bytes
from shoal.protocol.identity import Identity
from shoal.state.digest import digest_of
from shoal.state.finite import worst_values
from shoal.state.wire.manifest import CHUNK_BYTES
from shoal.transport.base import Connection
from shoal.transport.tcp import TcpTransport


def check(tensor: torch.Tensor) -> None:
    """Look for values that no state has."""
    list(worst_values([tensor]))


class FloorPeer(OwnLoop, StatePeer):
    """One peer; two threads work on tensors, as in shoal."""

    def __init__(self, options: Options) -> None:
        OwnLoop.__init__(self)
        self.options = options
        self.shared = [] if options.role == "receiver" else state(options.state_bytes)
        self.pool = ThreadPoolExecutor(2)
        self.served: set[asyncio.Task[None]] = set()

    async def each(self, function: Callable[..., object], *arguments: Any) -> list[Any]:
        """Call it with each of them, in the threads."""
        calls = (self.loop.run_in_executor(self.pool, function, *each) for each in zip(*arguments, strict=True))
        return await asyncio.gather(*calls)

    def start(self, invites: list[str]) -> str:
        self.invites = invites

        async def listen() -> str:
            self.transport = TcpTransport(Identity.ephemeral())
            await self.transport.listen(self.accept)
            return str(self.transport.addresses[0])

        return self.run(listen())

    def accept(self, connection: Connection) -> None:
        task = self.loop.create_task(self.give(connection))
        self.served.add(task)
        task.add_done_callback(self.served.discard)

    async def give(self, connection: Connection) -> None:
        await connection.readinto(bytearray(1))
        copies = [allocate(tensor.numel(), tensor.dtype) for tensor in self.shared]
        await self.each(check, self.shared)
        await self.each(torch.Tensor.copy_, [tensor for tensor, _ in copies], self.shared)
        chunks = [chunk for _, data in copies for chunk in chunks_of(data)]
        await self.each(digest_of, [[chunk] for chunk in chunks])
        for chunk in chunks:
            await connection.write(chunk)
        await connection.readinto(bytearray(1))

    def load(self) -> list[torch.Tensor]:
        address = Address.parse(self.invites[0])

        async def take() -> list[torch.Tensor]:
            connection = await self.transport.dial(address.peer_id, [address], timeout_s=10.0)
            tensors = [torch.empty(self.options.state_bytes // 4 // TENSORS) for _ in range(TENSORS)]
            chunks = [chunk for tensor in tensors for chunk in chunks_of(view_bytes(tensor))]
            await connection.write(b"!")
            checks: list[asyncio.Future[Any]] = [self.loop.run_in_executor(self.pool, populate, chunks)]
            for chunk in chunks:
                await connection.readinto(chunk)
                checks.append(self.loop.run_in_executor(self.pool, digest_of, [chunk]))
            await asyncio.gather(*checks)
            await self.each(check, tensors)
            await connection.write(b"!")
            await connection.close()
            return tensors

        return self.run(take())

    def average(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.run(self.transport.close())


def chunks_of(data: memoryview) -> list[memoryview]:
    """Cut to what is sent, and hashed, at once."""
    return [data[start : start + CHUNK_BYTES] for start in range(0, data.nbytes, CHUNK_BYTES)]


if __name__ == "__main__":
    serve(FloorPeer)
