"""A stream can be watched without taking anything from it, and then be read by somebody else."""

from __future__ import annotations

import asyncio

import pytest

from shoal.base.peer import PeerID
from shoal.errors import PeerUnreachable
from shoal.protocol.wire import Leave, Report
from shoal.rpc import Limits, Stream
from shoal.rpc.framing import Kind, pack
from shoal.transport.base import Buffer


class ScriptedConnection:
    """A connection whose bytes arrive when the test says so."""

    def __init__(self) -> None:
        self.peer_id = PeerID(bytes(32))
        self.dialed, self.closed, self.bulk = True, False, False
        self.bytes_sent = self.bytes_received = self.bytes_acked = 0
        self.local_host = self.remote_host = ""
        self._data = bytearray()
        self._news = asyncio.Event()

    def arrive(self, data: bytes) -> None:
        """These bytes come in."""
        self._data += data
        self._news.set()

    async def readinto(self, buffer: bytearray | memoryview) -> None:
        while len(self._data) < len(buffer):
            if self.closed:
                raise PeerUnreachable("ended")
            self._news.clear()
            await self._news.wait()
        buffer[:] = self._data[: len(buffer)]
        del self._data[: len(buffer)]

    async def write(self, *buffers: Buffer) -> None:
        """Goes nowhere."""

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self.closed = True
        self._news.set()


async def turn() -> None:
    """Let the loop turn once."""
    asyncio.get_running_loop().call_soon((turned := asyncio.Event()).set)
    await turned.wait()


def new_stream() -> tuple[ScriptedConnection, Stream[Leave, Report]]:
    """A stream on such a connection."""
    connection = ScriptedConnection()
    return connection, Stream(connection, Report, Limits(), lambda _reusable: None)


def test_watching_takes_nothing() -> None:
    """After any number of watchers, cancelled or not, the reader gets every message once, in order."""

    async def main() -> None:
        connection, stream = new_stream()
        for cut in range(1, 6):
            watcher = asyncio.create_task(stream.ready())
            frame = pack(Kind.DATA, Report(lost=[cut]))
            connection.arrive(frame[:cut])
            for _ in range(5):
                await turn()
            assert not watcher.done()
            watcher.cancel()
            connection.arrive(frame[cut:])
            await stream.ready()
            await stream.ready()
            assert await stream.recv() == (Report(lost=[cut]), 0)
            connection.arrive(pack(Kind.DATA, Report(lost=[0])))
            assert await stream.recv() == (Report(lost=[0]), 0)

    asyncio.run(main())


def test_end_and_loss_are_ready() -> None:
    """A watcher also learns that nothing more will come."""

    async def main() -> None:
        connection, stream = new_stream()
        connection.arrive(pack(Kind.END))
        await stream.ready()
        assert await stream.recv() is None
        await stream.ready()
        connection, stream = new_stream()
        watcher = asyncio.create_task(stream.ready())
        await turn()
        connection.abort()
        await watcher
        with pytest.raises(PeerUnreachable):
            await stream.recv()

    asyncio.run(main())


def test_unread_payload_is_ready_and_untouched() -> None:
    """While a payload waits to be read, watching does not read ahead into it."""

    async def main() -> None:
        connection, stream = new_stream()
        connection.arrive(pack(Kind.DATA, Report(), 4) + b"data" + pack(Kind.DATA, Report(lost=[1])))
        assert await stream.recv() == (Report(), 4)
        await stream.ready()
        payload = bytearray(4)
        await stream.readinto(payload)
        assert payload == b"data"
        await stream.ready()
        assert await stream.recv() == (Report(lost=[1]), 0)

    asyncio.run(main())
