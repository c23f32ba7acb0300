"""Hand-made peers for security tests: they speak TLS through asyncio's streams and build every frame themselves.

Nothing here uses `shoal.transport.handshake`: the frames and the signed message are written down a second time, from
the description of the protocol, so that a change of either side alone is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

import msgspec

from shoal.base.peer import Address, PeerID
from shoal.protocol.identity import Identity
from shoal.transport.certificate import client_context, server_context

VERSION = 4
"""Of the protocol that these peers speak."""


def signed(role: bytes, version: int, certificate: bytes, client: PeerID, server: PeerID, nonces: bytes) -> bytes:
    """The message that a proof of identity signs."""
    digest = hashlib.sha256(certificate).digest()
    return role + b"\0" + version.to_bytes(2, "big") + digest + client.to_bytes() + server.to_bytes() + nonces


class Wire:
    """One TLS connection that carries frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.sent: list[bytes] = []

    @property
    def certificate(self) -> bytes:
        """The server's certificate as the client sees it (DER)."""
        found = self.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert isinstance(found, bytes)
        return found

    async def send(self, *frame: object) -> None:
        """Send a frame."""
        await self.send_raw(msgspec.msgpack.encode(frame))

    async def send_raw(self, body: bytes) -> None:
        """Send a frame that is encoded already."""
        self.sent.append(body)
        self.writer.write(len(body).to_bytes(2, "big") + body)
        await self.writer.drain()

    async def receive(self) -> list[Any]:
        """The next frame."""
        return msgspec.msgpack.decode(await self.receive_raw(), type=list[Any])

    async def receive_raw(self) -> bytes:
        """The next frame, undecoded."""
        size = int.from_bytes(await self.reader.readexactly(2), "big")
        return await self.reader.readexactly(size)

    async def at_end(self) -> bool:
        """Wait for the end of the connection; True if nothing came before it."""
        try:
            return await self.reader.read(1) == b""
        except OSError:
            return True


@contextlib.asynccontextmanager
async def dial(address: Address) -> AsyncIterator[Wire]:
    """A TLS connection to a peer."""
    context = client_context()
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, server_hostname="")
    try:
        yield Wire(reader, writer)
    finally:
        await hang_up(writer)


@contextlib.asynccontextmanager
async def serve(serving: Callable[[Wire, bytes], Coroutine[Any, Any, None]], peer_id: PeerID) -> AsyncIterator[Address]:
    """A TLS server that claims to be `peer_id`; `serving` gets each connection and the server's certificate."""
    context, certificate = server_context()
    tasks: list[asyncio.Task[None]] = []

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await serving(Wire(reader, writer), certificate)
        await hang_up(writer)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(converse(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1], peer_id)
        await asyncio.gather(*tasks)
    finally:
        server.close()
        await server.wait_closed()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Close at once."""
    writer.transport.abort()
    with contextlib.suppress(OSError, ssl.SSLError):
        await writer.wait_closed()


class Greeting(NamedTuple):
    """What a hand-made client says of itself; tests change one thing at a time.

    Attributes:
        identity: whose key signs.
        claimed: the PeerID that hello names.
        wanted: who is dialed.
        versions: lowest and highest that are offered.
        context: the context of the signature.
        certificate: signed instead of the one that was seen, if given.
        key: what its data would be sealed with.
    """

    identity: Identity
    claimed: PeerID
    wanted: PeerID
    versions: tuple[int, int] = (VERSION, VERSION)
    context: bytes = b"transport"
    certificate: bytes = b""
    key: bytes = b"k" * 32

    async def say(self, wire: Wire, nonce: bytes = b"n" * 32) -> list[Any]:
        """Do the client's part; returns the last frame that the server answers."""
        await wire.send("hello", *self.versions, self.claimed.to_bytes(), self.wanted.to_bytes(), nonce)
        answer = await wire.receive()
        if answer[0] != "proof":
            return answer
        version, server_nonce = answer[1], answer[2]
        certificate = self.certificate or wire.certificate
        message = signed(b"client", version, certificate, self.claimed, self.wanted, nonce + server_nonce)
        await wire.send("proof", version, nonce, self.identity.sign(self.context, message), self.key)
        return await wire.receive()
