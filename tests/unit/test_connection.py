"""A connection on a transport of asyncio's that is only said to be one: what is hard to bring about with sockets."""

from __future__ import annotations

import asyncio
import ssl
from itertools import pairwise

import pytest

from shoal.errors import PeerUnreachable
from shoal.transport.connection import TcpConnection
from shoal.transport.layers import BUNCH_BYTES, Scratch
from shoal.transport.uplink import Uplink

MIB = 1 << 20


class Greedy(asyncio.Transport):
    """Takes all that is written, at once; from `broken_at` bytes on its socket is gone, as asyncio tells it: later."""

    def __init__(self, connection: TcpConnection, *, broken_at: int | None = None) -> None:
        super().__init__()
        self._connection, self._broken_at = connection, broken_at
        self.taken = 0
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._closing
        self.taken += len(data)
        if self._broken_at is not None and self.taken > self._broken_at:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, BrokenPipeError("gone"))

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0


def connect(*, broken_at: int | None = None) -> tuple[TcpConnection, Greedy]:
    """A connection, past its handshake, in the clear."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    connection = TcpConnection(context, dialed=False, scratch=Scratch(), uplink=Uplink(), alive=set())
    transport = Greedy(connection, broken_at=broken_at)
    connection.connection_made(transport)
    connection.unseal()
    return connection, transport


async def write_for_ever(connection: TcpConnection, nbytes: int) -> None:
    """One piece after another."""
    while True:
        await connection.write(bytes(nbytes))


@pytest.mark.parametrize("nbytes", [1000, MIB, 3 * MIB])
def test_whoever_writes_to_a_socket_that_broke_is_told(nbytes: int) -> None:
    """In the write that found out: one that returned, as if all were sent, could be called for ever and ever."""

    async def scenario() -> None:
        connection, transport = connect(broken_at=5 * MIB)
        with pytest.raises(PeerUnreachable, match="connection lost: gone"):
            await write_for_ever(connection, nbytes)
        assert transport.taken <= 5 * MIB + BUNCH_BYTES
        with pytest.raises(PeerUnreachable):
            await connection.write(b"more")

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("nbytes", [64 << 10, MIB, 10 * MIB])
def test_others_have_the_loop_while_a_socket_takes_everything(nbytes: int) -> None:
    """About once for each bunch, in pieces of whatever size."""

    async def scenario() -> None:
        connection, transport = connect()
        turns: list[int] = []

        def other() -> None:
            turns.append(transport.taken)
            asyncio.get_running_loop().call_soon(other)

        other()
        for _ in range(40 * MIB // nbytes):
            await connection.write(bytes(nbytes))
        assert max(b - a for a, b in pairwise(turns)) <= 2 * BUNCH_BYTES
        assert len(turns) <= 2 * 40 + 2

    asyncio.run(asyncio.wait_for(scenario(), 60))
