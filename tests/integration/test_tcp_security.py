"""Attacks on the TCP transport, over real sockets: each is refused, and none keeps a good peer out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import socket
import ssl
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shoal.base.peer import Address
from shoal.errors import ConfigError, PeerRefused, PeerTimeout, PeerUnreachable
from shoal.protocol.identity import Identity
from shoal.transport import sockets, tcp
from shoal.transport.base import Connection
from shoal.transport.certificate import server_context
from shoal.transport.connection import TcpConnection
from shoal.transport.sockets import new_socket, outside_host
from shoal.transport.tcp import TcpLimits, TcpTransport
from tests.integration.wire_peers import VERSION, Greeting, Wire, dial, serve, signed

SERVER, CLIENT, OTHER = (Identity.from_seed(letter * 32) for letter in (b"s", b"c", b"o"))
NONCE = b"n" * 32


class Stage:
    """A listening server and a client, both good."""

    def __init__(self, server: TcpTransport, client: TcpTransport) -> None:
        self.server, self.client = server, client
        self.accepted: asyncio.Queue[Connection] = asyncio.Queue()

    @property
    def address(self) -> Address:
        """Where the server listens."""
        return self.server.addresses[0]

    def greeting(self, **changes: Any) -> Greeting:
        """What a good client would say, with changes."""
        return Greeting(**{"identity": CLIENT, "claimed": CLIENT.peer_id, "wanted": SERVER.peer_id, **changes})

    async def dial(self, *addresses: Address) -> Connection:
        """The good client dials the server's identity (at its address, if no other is given)."""
        return await self.client.dial(SERVER.peer_id, addresses or self.server.addresses, timeout_s=30)

    async def check_service(self) -> None:
        """The good client can connect, and bytes arrive."""
        near = await self.dial()
        far = await self.accepted.get()
        await near.write(b"good")
        buffer = bytearray(4)
        await far.readinto(buffer)
        assert buffer == b"good"
        assert far.peer_id == CLIENT.peer_id
        near.abort()
        await connection_end(far)
        assert isinstance(far, TcpConnection)
        await far.wait_lost()


async def connection_end(connection: Connection) -> None:
    """Wait until the connection ends."""
    with pytest.raises(PeerUnreachable):
        await connection.readinto(bytearray(1 << 20))


@contextlib.asynccontextmanager
async def stage(
    *, limits: TcpLimits | None = None, versions: tuple[int, int] = (VERSION, VERSION)
) -> AsyncIterator[Stage]:
    """Start both; close both."""
    actors = Stage(TcpTransport(SERVER, limits=limits, protocol_versions=versions), TcpTransport(CLIENT))
    try:
        await actors.server.listen(actors.accepted.put_nowait)
        yield actors
    finally:
        await actors.client.close()
        await actors.server.close()


@contextlib.asynccontextmanager
async def tapped(
    target: Address, change: Callable[[bytes], bytes] = lambda data: data
) -> AsyncIterator[tuple[Address, bytearray]]:
    """Somebody on the way to `target`: where to dial him, and all that he saw. He may change what he passes on."""
    seen = bytearray()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                seen.extend(data)
                writer.write(change(data))
        writer.transport.abort()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(target.host, target.port)
        await asyncio.gather(forward(reader, back), forward(there, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1], target.peer_id), seen
    finally:
        server.close()
        await server.wait_closed()


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario; afterwards no socket of a transport may be open."""
    asyncio.run(scenario())
    gc.collect()
    assert [sock for sock in sockets.open_sockets if sock.fileno() >= 0] == []


# ------------------------------------------------------------------------------------------------------------ identity


def test_a_client_that_follows_the_description_is_welcome() -> None:
    """The hand-made client of these tests is right, so what is refused below is refused for what is changed in it."""

    async def scenario() -> None:
        async with stage() as actors, dial(actors.address) as wire:
            assert await actors.greeting().say(wire) == ["welcome"]
            assert (await actors.accepted.get()).peer_id == CLIENT.peer_id

    play(scenario)


def test_the_server_proves_itself_as_described() -> None:
    """Its signature covers role, version, its certificate as seen, both peers and both nonces."""

    async def scenario() -> None:
        async with stage() as actors, dial(actors.address) as wire:
            await wire.send("hello", VERSION, VERSION, CLIENT.peer_id.to_bytes(), SERVER.peer_id.to_bytes(), NONCE)
            kind, version, nonce, signature, key, clear = await wire.receive()
            assert not clear
            assert (kind, version, len(nonce), len(key)) == ("proof", VERSION, 32, 32)
            from shoal.protocol.identity import verify

            message = signed(b"server", VERSION, wire.certificate, CLIENT.peer_id, SERVER.peer_id, NONCE + nonce)
            assert verify(SERVER.peer_id, b"transport", message, signature)

    play(scenario)


def test_a_man_in_the_middle_is_refused() -> None:
    """He ends TLS with a certificate of his own on each side and relays every frame: neither side is fooled."""

    async def scenario() -> None:
        async with stage() as actors:
            relayed: list[bytes] = []

            async def relay(victim: Wire, _: bytes) -> None:
                async with dial(actors.address) as onward:
                    while True:
                        for source, target in ((victim, onward), (onward, victim)):
                            frame = await source.receive_raw()
                            relayed.append(frame)
                            await target.send_raw(frame)

            async with serve(relay, SERVER.peer_id) as address:
                with pytest.raises(PeerRefused, match="cannot prove"):
                    await actors.dial(address)
            assert len(relayed) == 2  # hello and the server's proof; the client told nothing more
            assert actors.accepted.empty()
            await actors.check_service()

    play(scenario)


def test_a_proof_for_another_certificate_is_refused() -> None:
    """What a client signs towards one server is worth nothing at another: a malicious server cannot pass it on."""

    async def scenario() -> None:
        async with stage() as actors, dial(actors.address) as wire:
            _, certificate = server_context()
            answer = await actors.greeting(certificate=certificate).say(wire)
            assert answer[0] == "refusal"
            assert "does not verify" in answer[1]
            assert await wire.at_end()
            assert actors.accepted.empty()

    play(scenario)


def test_a_replayed_client_proof_is_refused() -> None:
    """The very frames that were welcome once are refused when they come again."""

    async def scenario() -> None:
        async with stage() as actors:
            async with dial(actors.address) as wire:
                assert await actors.greeting().say(wire) == ["welcome"]
                await actors.accepted.get()
            hello, proof = wire.sent
            async with dial(actors.address) as replay:
                await replay.send_raw(hello)
                assert (await replay.receive())[0] == "proof"
                await replay.send_raw(proof)
                assert (await replay.receive())[0] == "refusal"
            assert actors.accepted.empty()

    play(scenario)


def test_a_replayed_server_proof_is_refused() -> None:
    """A liar that has seen the server's proof for one client cannot use it towards another connection."""

    async def scenario() -> None:
        async with stage() as actors:
            async with dial(actors.address) as wire:
                await wire.send("hello", VERSION, VERSION, CLIENT.peer_id.to_bytes(), SERVER.peer_id.to_bytes(), NONCE)
                recorded = await wire.receive_raw()

            async def replay(victim: Wire, _: bytes) -> None:
                await victim.receive()
                await victim.send_raw(recorded)
                await victim.at_end()

            async with serve(replay, SERVER.peer_id) as address:
                with pytest.raises(PeerRefused, match="cannot prove"):
                    await actors.dial(address)

    play(scenario)


def test_a_server_that_answers_with_another_key_is_refused() -> None:
    """It follows the protocol in everything, but holds another key than the peer that was dialed."""

    async def scenario() -> None:
        async def lie(victim: Wire, certificate: bytes) -> None:
            hello = await victim.receive()
            message = signed(b"server", VERSION, certificate, CLIENT.peer_id, SERVER.peer_id, hello[5] + NONCE)
            await victim.send("proof", VERSION, NONCE, OTHER.sign(b"transport", message), NONCE)
            await victim.at_end()

        async with stage() as actors, serve(lie, SERVER.peer_id) as address:
            with pytest.raises(PeerRefused, match="cannot prove"):
                await actors.dial(address)

    play(scenario)


def test_a_reflected_proof_is_refused() -> None:
    """A server without a key sends the client's kind of proof back: roles are part of what is signed."""

    async def scenario() -> None:
        async def reflect(victim: Wire, certificate: bytes) -> None:
            hello = await victim.receive()
            message = signed(b"client", VERSION, certificate, CLIENT.peer_id, CLIENT.peer_id, hello[5] + NONCE)
            await victim.send("proof", VERSION, NONCE, CLIENT.sign(b"transport", message), NONCE)
            await victim.at_end()

        async with stage() as actors, serve(reflect, CLIENT.peer_id) as address:
            with pytest.raises(PeerRefused):
                await actors.client.dial(CLIENT.peer_id, [address], timeout_s=30)

    play(scenario)


@pytest.mark.parametrize(
    "changes",
    [
        {"claimed": OTHER.peer_id},
        {"claimed": SERVER.peer_id},
        {"identity": OTHER},
        {"context": b"record"},
    ],
    ids=["another's id", "the server's own id", "another's key", "a signature for another purpose"],
)
def test_a_client_that_claims_what_it_cannot_prove_is_refused(changes: dict[str, Any]) -> None:
    """The acceptor never hears of it."""

    async def scenario() -> None:
        async with stage() as actors, dial(actors.address) as wire:
            answer = await actors.greeting(**changes).say(wire)
            assert answer[0] == "refusal"
            assert "does not verify" in answer[1]
            assert await wire.at_end()
            assert actors.accepted.empty()
            assert actors.server.connections == 0

    play(scenario)


def test_the_server_signs_nothing_for_who_wanted_somebody_else() -> None:
    """Dialing a peer at another peer's address gives a clear refusal, before anything is proved."""

    async def scenario() -> None:
        async with stage() as actors, dial(actors.address) as wire:
            answer = await actors.greeting(wanted=OTHER.peer_id).say(wire)
            assert answer[0] == "refusal"
            assert "not the one that answers here" in answer[1]
            assert await wire.at_end()

    play(scenario)


def test_nothing_passes_before_the_proof() -> None:
    """Data sent right after hello is not taken for data: the connection is dropped."""

    async def scenario() -> None:
        async with stage() as actors, dial(actors.address) as wire:
            await wire.send("hello", VERSION, VERSION, CLIENT.peer_id.to_bytes(), SERVER.peer_id.to_bytes(), NONCE)
            await wire.send("welcome")
            assert (await wire.receive())[0] == "proof"
            assert await wire.at_end()
            assert actors.accepted.empty()

    play(scenario)


# ---------------------------------------------------------------------------------------------------------- encryption


@pytest.mark.parametrize("server_encrypts", [True, False])
@pytest.mark.parametrize("client_encrypts", [True, False])
def test_data_is_readable_on_the_way_only_where_both_sides_asked_for_it(
    server_encrypts: bool, client_encrypts: bool
) -> None:
    """Looked for in what really passes between the sockets, both ways."""

    async def scenario() -> None:
        server = TcpTransport(SERVER, encrypt=server_encrypts)
        client = TcpTransport(CLIENT, encrypt=client_encrypts)
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        await server.listen(accepted.put_nowait)
        async with tapped(server.addresses[0]) as (address, seen):
            near = await client.dial(SERVER.peer_id, [address], timeout_s=30)
            far = await accepted.get()
            for sender, receiver, word in ((near, far, b"there"), (far, near, b"back!")):
                await sender.write(word)
                buffer = bytearray(len(word))
                await receiver.readinto(buffer)
                assert buffer == word
                assert (word in seen) is not (server_encrypts or client_encrypts)
            near.abort()
            await connection_end(far)
        await client.close()
        await server.close()

    play(scenario)


def test_a_server_cannot_talk_a_client_out_of_encryption() -> None:
    """It says that data goes as it is, which the client has not offered."""

    async def scenario() -> None:
        async def lie(victim: Wire, certificate: bytes) -> None:
            hello = await victim.receive()
            message = signed(b"server", VERSION, certificate, CLIENT.peer_id, SERVER.peer_id, hello[5] + NONCE)
            await victim.send("proof", VERSION, NONCE, SERVER.sign(b"transport", message), NONCE, True)
            await victim.at_end()

        async with stage() as actors, serve(lie, SERVER.peer_id) as address:
            with pytest.raises(PeerUnreachable, match=r"does not greet as peers do: .*not offered"):
                await actors.dial(address)

    play(scenario)


# ------------------------------------------------------------------------------------------------------------ versions


@pytest.mark.parametrize(("server", "client"), [((2, 3), (1, 1)), ((1, 1), (2, 3))], ids=["old client", "old server"])
def test_no_common_version_is_a_clear_refusal(server: tuple[int, int], client: tuple[int, int]) -> None:
    """The dialing side learns which versions each side speaks."""

    async def scenario() -> None:
        async with stage(versions=server) as actors:
            dialer = TcpTransport(OTHER, client_mode=True, protocol_versions=client)
            with pytest.raises(PeerRefused) as caught:
                await dialer.dial(SERVER.peer_id, actors.server.addresses, timeout_s=30)
            await dialer.close()
            texts = {(2, 3): "2 to 3", (1, 1): "1"}
            assert f"it speaks protocol version {texts[server]}, this side {texts[client]}" in str(caught.value)
            assert actors.accepted.empty()

    play(scenario)


def test_the_highest_common_version_is_taken() -> None:
    """Both sides agree on it."""

    async def scenario() -> None:
        async with stage(versions=(1, 3)) as actors:
            dialer = TcpTransport(OTHER, client_mode=True, protocol_versions=(2, 5))
            near = await dialer.dial(SERVER.peer_id, actors.server.addresses, timeout_s=30)
            far = await actors.accepted.get()
            assert (near.protocol_version, getattr(far, "protocol_version", None)) == (3, 3)
            await dialer.close()

    play(scenario)


def test_a_later_hello_with_more_fields_is_understood() -> None:
    """So that an old peer can tell a newer one which versions it speaks."""

    async def scenario() -> None:
        async with stage() as actors, dial(actors.address) as wire:
            await wire.send(
                "hello", 7, 9, bytes(CLIENT.peer_id), bytes(SERVER.peer_id), NONCE, False, "new", {"more": 1}
            )
            kind, reason, *versions = await wire.receive()
            assert kind == "refusal"
            assert "7 to 9" in reason
            assert versions == [VERSION, VERSION]

    play(scenario)


def test_a_version_that_was_not_offered_is_not_taken() -> None:
    """A server cannot talk the client into another protocol."""

    async def scenario() -> None:
        async def choose(victim: Wire, _: bytes) -> None:
            await victim.receive()
            await victim.send("proof", VERSION + 1, NONCE, bytes(64), NONCE)
            await victim.at_end()

        async with stage() as actors, serve(choose, SERVER.peer_id) as address:
            with pytest.raises(PeerUnreachable, match=r"does not greet as peers do: .*not offered"):
                await actors.dial(address)

    play(scenario)


# ------------------------------------------------------------------------------------------------------- rubbish, load


def rubbish(seed: int) -> bytes:
    """Random bytes, half of them behind the beginning of a TLS record."""
    rng = random.Random(seed)
    return (b"\x16\x03\x01\xff\xff" if seed % 2 else b"") + rng.randbytes(rng.randint(0, 4000))


def test_random_bytes_harm_nobody() -> None:
    """A hundred connections send what is no TLS; each is dropped, and a good peer is served."""

    async def scenario() -> None:
        async with stage(limits=TcpLimits(auth_timeout_s=1.0)) as actors:

            async def throw(seed: int) -> None:
                reader, writer = await asyncio.open_connection(actors.address.host, actors.address.port)
                writer.write(rubbish(seed))
                with contextlib.suppress(OSError):
                    await reader.read()
                writer.transport.abort()

            await asyncio.gather(actors.check_service(), *map(throw, range(100)))
            assert actors.server.unauthenticated == 0
            await actors.check_service()

    play(scenario)


REFUSAL_NO_TEXT = b"\x94\xa7refusal\xa2\xff\xfe\x01\x01"
"""A refusal whose reason is not UTF-8."""

HELLO = (VERSION, VERSION, CLIENT.peer_id.to_bytes(), SERVER.peer_id.to_bytes(), NONCE)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff" + bytes(100),
        b"\x00\x00",
        b"\x04\x01" + bytes(1025),
        b"\x00\x05\xc1\xc1\xc1\xc1\xc1",
        b"\x00\x05\xdd\xff\xff\xff\xff",
        b"\x00\x09\xa5hello\xa1x\x01",
        b"\x00\x07\x91\xa5hello",
        b"\x00\x07\x91\xa5other",
        b"\x00\x0e" + REFUSAL_NO_TEXT,
        b"\x04\x00" + b"\x91" * 1024,
    ],
    ids=[
        "giant length",
        "length 0",
        "just too long",
        "no msgpack",
        "giant array",
        "no array",
        "too few fields",
        "type",
        "no text",
        "nested",
    ],
)
def test_a_malformed_frame_ends_the_connection(frame: bytes) -> None:
    """Inside TLS, in place of hello."""

    async def scenario() -> None:
        async with stage() as actors, dial(actors.address) as wire:
            wire.writer.write(frame)
            assert await wire.at_end()
            assert actors.accepted.empty()
            await actors.check_service()

    play(scenario)


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, 0), (0, -1), (0, 1 << 40), (0, "1"), (1, 1.5), (2, b"short"), (2, "text"), (3, None), (4, bytes(33))],
)
def test_a_hello_with_a_wrong_field_ends_the_connection(place: int, value: object) -> None:
    """Wrong types, ranges and lengths."""

    async def scenario() -> None:
        async with stage() as actors, dial(actors.address) as wire:
            fields: list[object] = list(HELLO)
            fields[place] = value
            await wire.send("hello", *fields)
            assert await wire.at_end()
            assert actors.accepted.empty()

    play(scenario)


def test_a_truncated_hello_is_given_up_at_the_deadline() -> None:
    """Half a hello, then silence: the server hangs up by itself."""

    async def scenario() -> None:
        async with stage(limits=TcpLimits(auth_timeout_s=0.2)) as actors, dial(actors.address) as wire:
            wire.writer.write(b"\x00\x70\x96\xa5hel")
            assert await wire.at_end()
            assert actors.server.unauthenticated == 0

    play(scenario)


def test_silent_connections_keep_no_good_peer_out() -> None:
    """Of 300 that say nothing at most 256 are kept, and a good peer connects at once while they are there."""

    async def scenario() -> None:
        async with stage(limits=TcpLimits(auth_timeout_s=1000.0)) as actors:
            where = (actors.address.host, actors.address.port)
            silent = [await asyncio.open_connection(*where) for _ in range(300)]
            await asyncio.gather(*(reader.read() for reader, _ in silent[:44]))  # the oldest are hung up on
            assert actors.server.unauthenticated == 256
            for _ in range(3):
                await actors.check_service()
            assert actors.server.unauthenticated <= 256
            for _, writer in silent:
                writer.transport.abort()

    play(scenario)


def test_silent_connections_are_dropped_at_the_deadline() -> None:
    """Also those that did the TLS handshake and then say nothing."""

    async def scenario() -> None:
        async with stage(limits=TcpLimits(auth_timeout_s=0.5)) as actors, contextlib.AsyncExitStack() as stack:
            wires = [await stack.enter_async_context(dial(actors.address)) for _ in range(5)]
            reader, writer = await asyncio.open_connection(actors.address.host, actors.address.port)
            assert await reader.read() == b""
            writer.transport.abort()
            assert all([await wire.at_end() for wire in wires])
            assert actors.server.unauthenticated == 0

    play(scenario)


def test_a_crowd_from_one_host_pushes_out_its_own() -> None:
    """When there are too many, the oldest of the host that holds most goes, not somebody else's connection."""

    async def scenario() -> None:
        async with stage(limits=TcpLimits(max_unauthenticated=4, auth_timeout_s=1000.0)) as actors:
            where = (actors.address.host, actors.address.port)
            lone_reader, lone = await asyncio.open_connection(*where, local_addr=("127.0.0.2", 0))
            lone_end = asyncio.ensure_future(lone_reader.read())
            crowd = [await asyncio.open_connection(*where) for _ in range(12)]
            await asyncio.gather(*(reader.read() for reader, _ in crowd[:9]))
            assert not lone_end.done()
            lone.transport.abort()
            for _, writer in crowd:
                writer.transport.abort()
            await asyncio.gather(lone_end, return_exceptions=True)

    if sys.platform != "linux":
        pytest.skip("needs a second loopback address")
    play(scenario)


def test_who_is_refused_leaves_nothing_behind() -> None:
    """A refused peer that does not hang up is dropped all the same: refusals cannot pile up."""

    async def scenario() -> None:
        async with stage() as actors, contextlib.AsyncExitStack() as stack:
            for _ in range(5):
                wire = await stack.enter_async_context(dial(actors.address))
                assert (await actors.greeting(wanted=OTHER.peer_id).say(wire))[0] == "refusal"
                assert await wire.at_end()
            await actors.check_service()
            assert actors.server.unauthenticated == 0
            (listener,) = (sock for sock in sockets.open_sockets if sock.fileno() >= 0)
            assert listener.getsockname()[1] == actors.address.port

    play(scenario)


async def one_turn() -> None:
    """Let the loop go round once."""
    turned = asyncio.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    await turned.wait()


@pytest.mark.parametrize("steps", range(5))
def test_closing_while_somebody_connects_loses_no_socket(steps: int) -> None:
    """Wherever between its arrival and its handshake: who is accepted is closed with the transport."""

    async def scenario() -> None:
        transport = TcpTransport(SERVER)
        await transport.listen(lambda _: None)
        (address,) = transport.addresses
        await one_turn()  # it waits for somebody
        with socket.create_connection((address.host, address.port)):
            for _ in range(steps):
                await one_turn()
            await transport.close()
        gc.collect()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        play(scenario)
    assert [str(each.message) for each in caught] == []


def rss_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_strangers_cost_bounded_memory() -> None:
    """256 connections that went through TLS and push what they can, plain and encrypted, take less than 64 MiB."""

    async def scenario() -> None:
        async with stage(limits=TcpLimits(auth_timeout_s=1000.0)) as actors:
            where = (actors.address.host, actors.address.port)
            for _ in range(20):  # what the first connections cost once
                await actors.check_service()
            gc.collect()
            before = rss_bytes()
            plain = []
            for _ in range(128):
                sock = socket.create_connection(where)
                sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    sock.send(b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc" + bytes(1000))  # a ClientHello that goes on
                plain.append(sock)
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(128):
                    wire = await stack.enter_async_context(dial(actors.address))
                    wire.writer.write(b"\x04\x00")  # a frame of the longest kind that never ends
                await actors.check_service()
                grown = rss_bytes() - before
            for sock in plain:
                sock.close()
            # the 128 TLS ends of the attackers are in this process too, with asyncio's 256 KiB each
            assert grown < (64 << 20) + 128 * (512 << 10)

    play(scenario)


def test_limits_per_peer_and_in_all() -> None:
    """Too many of one peer are a clear refusal; too many in all cost the one that has carried least."""

    async def scenario() -> None:
        limits = TcpLimits(max_connections_per_peer=2, max_connections=8)
        async with stage(limits=limits) as actors:
            mine = [await actors.dial(), await actors.dial()]
            with pytest.raises(PeerRefused, match="has 2 connections"):
                await actors.dial()
            for connection in mine:
                await connection.write(bytes(10_000))
            ends = [await actors.accepted.get() for _ in mine]
            for end in ends:
                await end.readinto(bytearray(10_000))
            others = [TcpTransport(Identity.ephemeral(), client_mode=True) for _ in range(7)]
            for other in others:
                await other.dial(SERVER.peer_id, actors.server.addresses, timeout_s=30)
            assert actors.server.connections == 8
            assert not any(end.closed for end in ends)
            for other in others:
                await other.close()

    play(scenario)


def test_one_host_takes_every_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 60 fresh keys: it takes places from itself, and from nobody else; and the program has files to open."""
    from shoal.transport import tcp

    def elsewhere(family: int) -> socket.socket:
        made = new_socket(family)
        made.bind(("127.0.0.2", 0))
        return made

    async def scenario() -> None:
        monkeypatch.setattr(tcp, "open_files_limit", lambda: 64)
        async with stage() as actors:
            mine = [await actors.dial() for _ in range(6)]
            ends = [await actors.accepted.get() for _ in mine]
            monkeypatch.setattr(tcp, "new_socket", elsewhere)
            attackers = [TcpTransport(Identity.ephemeral(), client_mode=True) for _ in range(60)]
            for attacker in attackers:
                await attacker.dial(SERVER.peer_id, actors.server.addresses, timeout_s=30)
                assert actors.server.connections <= 38
            assert not any(end.closed for end in ends)
            monkeypatch.setattr(tcp, "new_socket", new_socket)
            late = await actors.dial()
            assert not late.closed
            for attacker in attackers:
                await attacker.close()

    play(scenario)


# --------------------------------------------------------------------------------------------------------- broken ways


def test_a_flipped_bit_breaks_the_connection_on_both_sides() -> None:
    """A change of the ciphertext on its way ends the connection; changed bytes never reach a reader."""

    async def scenario() -> None:
        meddling = asyncio.Event()

        def meddle(data: bytes) -> bytes:
            return data[:-1] + bytes([data[-1] ^ 1]) if meddling.is_set() else data

        async with stage() as actors, tapped(actors.address, meddle) as (address, _):
            near = await actors.dial(address)
            far = await actors.accepted.get()
            await near.write(b"fine")
            buffer = bytearray(4)
            await far.readinto(buffer)
            meddling.set()
            await near.write(b"evil")
            for end in (far, near):
                with pytest.raises(PeerUnreachable):
                    await end.readinto(buffer)
            assert buffer == bytes(4)  # nothing is left of what did not verify

    play(scenario)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x15\x03\x03\x00\x02\x02\x28"])
def test_a_server_that_does_not_speak_tls_is_unreachable(answer: bytes) -> None:
    """Junk, a closed door, a TLS alert: `PeerUnreachable`, not an `SSLError`."""

    async def scenario() -> None:
        async def serve_junk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve_junk, "127.0.0.1", 0)
        async with stage() as actors:
            with pytest.raises(PeerUnreachable):
                await actors.dial(Address("127.0.0.1", server.sockets[0].getsockname()[1], SERVER.peer_id))
        server.close()
        await server.wait_closed()

    play(scenario)


@pytest.mark.parametrize("frame", [b"\x00\x0e" + REFUSAL_NO_TEXT, b"\x04\x00" + b"\x91" * 1024, b"\xff\xff"])
def test_a_server_that_greets_with_nonsense_is_not_the_peer(frame: bytes) -> None:
    """Somebody else may have given this address: what is done there is no fault of the peer that was wanted."""

    async def scenario() -> None:
        async def serve_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(frame)
            await reader.read()
            writer.close()

        context, _ = server_context()
        server = await asyncio.start_server(serve_nonsense, "127.0.0.1", 0, ssl=context)
        async with stage() as actors:
            with pytest.raises(PeerUnreachable, match=r"does not greet as peers do: .*greeting frame"):
                await actors.dial(Address("127.0.0.1", server.sockets[0].getsockname()[1], SERVER.peer_id))
        server.close()
        await server.wait_closed()

    play(scenario)


def test_tls_before_1_3_is_not_spoken() -> None:
    """Neither side goes down to it."""

    async def scenario() -> None:
        async with stage() as actors:
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises(ssl.SSLError, match=r"(?i)alert"):
                await asyncio.open_connection(actors.address.host, actors.address.port, ssl=old, server_hostname="")
            context, _ = server_context()
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
            server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
            with pytest.raises(PeerUnreachable):
                await actors.dial(Address("127.0.0.1", server.sockets[0].getsockname()[1], SERVER.peer_id))
            server.close()
            await server.wait_closed()

    play(scenario)


def test_a_server_that_stops_after_tls_times_out() -> None:
    """`PeerTimeout` after the time for proofs, though the caller would have waited longer."""

    async def scenario() -> None:
        async def stop(victim: Wire, _: bytes) -> None:
            await victim.receive()
            await victim.at_end()

        async with serve(stop, SERVER.peer_id) as address:
            client = TcpTransport(CLIENT, client_mode=True, limits=TcpLimits(auth_timeout_s=0.2))
            with pytest.raises(PeerTimeout, match="proved no identity"):
                await client.dial(SERVER.peer_id, [address], timeout_s=1000)
            await client.close()

    play(scenario)


# -------------------------------------------------------------------------------------------------- arguments and ports


def test_a_used_port_is_named() -> None:
    """`ConfigError` with host and port, and what to do."""

    async def scenario() -> None:
        async with stage() as actors:
            second = TcpTransport(OTHER, port=actors.address.port)
            with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{actors.address.port}.*port 0"):
                await second.listen(actors.accepted.put_nowait)
            assert list(second.addresses) == []
            await second.close()

    play(scenario)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "host.invalid"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    """`ConfigError` with what was given."""

    async def scenario() -> None:
        transport = TcpTransport(OTHER, host=host)
        with pytest.raises(ConfigError, match=host):
            await transport.listen(lambda _: None)
        await transport.close()

    play(scenario)


@pytest.mark.parametrize(
    "arguments",
    [
        {"port": -1},
        {"port": 65536},
        {"port": "4000"},
        {"host": ""},
        {"announce_host": "not a host"},
        {"protocol_versions": (2, 1)},
        {"protocol_versions": (0, 1)},
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any]) -> None:
    """Each message begins with what is wrong."""
    with pytest.raises(ConfigError, match=next(iter(arguments)).split("_", 1)[0]):
        TcpTransport(OTHER, **arguments)
    with pytest.raises(ConfigError, match="auth_timeout_s"):
        TcpLimits(auth_timeout_s=0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::1", "localhost"])
def test_what_it_announces_can_be_dialed(host: str) -> None:
    """Also for all interfaces, IPv6 and names."""

    async def scenario() -> None:
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        server, client = TcpTransport(SERVER, host=host), TcpTransport(CLIENT, client_mode=True)
        try:
            await server.listen(accepted.put_nowait)
        except ConfigError as error:
            pytest.skip(f"not on this machine: {error}")
        address = server.addresses[0]
        assert Address.parse(str(address)) == address
        assert address.host not in {"0.0.0.0", "::"}
        await client.dial(SERVER.peer_id, server.addresses, timeout_s=30)
        await accepted.get()
        await client.close()
        await server.close()

    play(scenario)


@pytest.mark.parametrize(
    ("host", "options", "guess", "then"),
    [
        ("0.0.0.0", {}, "127.0.0.1", "127.0.0.2"),  # without a default route: others know better
        ("0.0.0.0", {}, "192.0.2.7", "192.0.2.7"),  # any stranger may dial: its choice changes no guess
        ("0.0.0.0", {"announce_host": "peer.example.org"}, "127.0.0.1", "peer.example.org"),
        ("127.0.0.2", {}, "127.0.0.1", "127.0.0.2"),
    ],
)
def test_a_peer_that_is_dialed_learns_where_it_is_reached(
    host: str, options: dict[str, Any], guess: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first connection, if it listens on all interfaces and had no better guess than its own machine."""
    monkeypatch.setattr(tcp, "outside_host", lambda host: guess if host == "0.0.0.0" else host)
    # 127.0.0.2 stands for an address of a network card, so that this needs none.
    monkeypatch.setattr(tcp, "is_loopback", "127.0.0.1".__eq__)

    async def scenario() -> None:
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        server, client = TcpTransport(SERVER, host=host, **options), TcpTransport(CLIENT, client_mode=True)
        await server.listen(accepted.put_nowait)
        port = server._listeners[0].getsockname()[1]
        assert server.addresses[0].port == port
        for dialed in ("127.0.0.2", "127.0.0.3") if host == "0.0.0.0" else ("127.0.0.2",):
            await client.dial(SERVER.peer_id, [Address(dialed, port, SERVER.peer_id)], timeout_s=30)
            await accepted.get()
            assert server.addresses == (Address(then, port, SERVER.peer_id),)
        await client.close()
        await server.close()

    play(scenario)


@pytest.mark.parametrize(
    ("host", "guess", "is_outside", "then"),
    [
        ("0.0.0.0", "192.0.2.7", True, "127.0.0.1"),  # the way to its first peer, not that to the outside
        ("0.0.0.0", "192.0.2.7", False, "192.0.2.7"),  # its first peer is on this machine: that says nothing
        ("::", "2001:db8::7", True, "127.0.0.1"),  # it takes both families: this is its address of the other one
    ],
)
def test_a_peer_that_dials_announces_the_address_of_that_connection(
    host: str, guess: str, is_outside: bool, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`0.0.0.0` is a guess until then; once it is known, no further connection changes it."""
    monkeypatch.setattr(tcp, "outside_host", lambda host: guess if host in {"0.0.0.0", "::"} else host)
    monkeypatch.setattr(tcp, "is_loopback", lambda _: not is_outside)

    async def scenario() -> None:
        first, newcomer = TcpTransport(SERVER), TcpTransport(CLIENT, host=host)
        await first.listen(lambda _: None)
        try:
            await newcomer.listen(lambda _: None)
        except ConfigError as error:
            pytest.skip(f"not on this machine: {error}")
        port = newcomer.addresses[0].port
        assert newcomer.addresses == (Address(guess, port, CLIENT.peer_id),)
        await newcomer.dial(SERVER.peer_id, first.addresses, timeout_s=30)
        then_all = tuple(Address(each, port, CLIENT.peer_id) for each in ([then, guess] if host == "::" else [then]))
        assert newcomer.addresses == then_all
        newcomer._saw_ourselves("198.51.100.1" if then == "127.0.0.1" else "")
        assert newcomer.addresses == then_all
        await newcomer.close()
        await first.close()

    play(scenario)


def test_a_listener_of_all_ipv6_addresses_announces_both_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """An IPv4-only peer dialed it by IPv4, forgot that for the one address that was announced, and never got in."""
    outside = {"::": "2001:db8::7", "0.0.0.0": "192.0.2.7"}
    monkeypatch.setattr(tcp, "outside_host", outside.__getitem__)

    async def scenario() -> None:
        server, client = TcpTransport(SERVER, host="::"), TcpTransport(CLIENT, client_mode=True)
        try:
            await server.listen(lambda _: None)
        except ConfigError as error:
            pytest.skip(f"not on this machine: {error}")
        port = server.addresses[0].port
        assert [each.host for each in server.addresses] == ["2001:db8::7", "192.0.2.7"]
        connection = await client.dial(SERVER.peer_id, [Address("127.0.0.1", port, SERVER.peer_id)], timeout_s=30)
        assert connection.remote_host == "127.0.0.1"
        await client.close()
        await server.close()

    play(scenario)


def test_without_a_default_route_an_interface_of_ipv6_is_announced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`::` announced ::1, which nobody else reaches: only IPv4 addresses of interfaces were looked at."""
    lines = (
        "00000000000000000000000000000001 01 80 10 80       lo",
        "fe800000000000000000000000000001 02 40 20 80     eth0",
        "20010db8000000000000000000000007 02 40 00 80     eth0",
    )
    found = tmp_path / "if_inet6"
    found.write_text("\n".join(lines) + "\n", encoding="ascii")
    monkeypatch.setattr(sockets, "_IF_INET6", found)
    monkeypatch.setattr(sockets, "_ANY", {"::": (socket.AF_INET6, "no address")})  # no way to the outside
    assert outside_host("::") == "2001:db8::7"
    found.write_text(lines[0] + "\n", encoding="ascii")
    assert outside_host("::") == "::1"


def test_a_name_that_cannot_be_resolved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that does not answer was "no connection within 5 s"."""

    async def never(host: str, port: int) -> Any:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(tcp, "resolve", never)

    async def scenario() -> None:
        client = TcpTransport(CLIENT, client_mode=True)
        named = [Address("peer.example.org", 4000, SERVER.peer_id)]
        with pytest.raises(PeerTimeout, match=r"the system's resolver has not found peer\.example\.org within 0\.1 s"):
            await client.dial(SERVER.peer_id, named, timeout_s=0.1)
        assert not client._resolving
        await client.close()

    play(scenario)


def test_the_announced_host_can_be_chosen() -> None:
    """For a public name or a forwarded port."""

    async def scenario() -> None:
        server = TcpTransport(SERVER, announce_host="peer.example.org")
        await server.listen(lambda _: None)
        assert server.addresses[0].host == "peer.example.org"
        await server.close()

    play(scenario)


def test_an_acceptor_that_fails_costs_only_that_connection(caplog: pytest.LogCaptureFixture) -> None:
    """The next one is accepted."""

    async def scenario() -> None:
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        outcomes = iter([ZeroDivisionError("first")])

        def accept(connection: Connection) -> None:
            for error in outcomes:
                raise error
            accepted.put_nowait(connection)

        server, client = TcpTransport(SERVER), TcpTransport(CLIENT, client_mode=True)
        await server.listen(accept)
        first = await client.dial(SERVER.peer_id, server.addresses, timeout_s=30)
        await connection_end(first)
        await client.dial(SERVER.peer_id, server.addresses, timeout_s=30)
        await accepted.get()
        await client.close()
        await server.close()

    play(scenario)
    assert "ZeroDivisionError" in caplog.text


# ---------------------------------------------------------------------------------------------------------------- fork


FORKING_PEER = """
import asyncio, os, sys
from shoal.protocol.identity import Identity
from shoal.base.peer import Address
from shoal.transport.sockets import open_sockets
from shoal.transport.tcp import TcpTransport

async def main():
    address = Address.parse(sys.argv[1])
    transport = TcpTransport(Identity.ephemeral())
    await transport.listen(lambda connection: None)
    connection = await transport.dial(address.peer_id, [address], timeout_s=30)
    await connection.write(b"here")
    if os.fork() == 0:
        child_of_a_dead_peer()
    print(transport.addresses[0], flush=True)
    sys.stdin.readline()
    os._exit(0)

def child_of_a_dead_peer():
    descriptor = os.open(os.devnull, os.O_RDONLY)  # takes the lowest free number: one of those that were closed
    for sock in list(open_sockets):
        sock.close()  # as the garbage collector may: closes nothing that is not its own
    os.fstat(descriptor)
    sys.stdin.read()  # until the test closes our input
    os.fstat(descriptor)
    sys.stdout.write("child lived\\n")
    sys.stdout.flush()
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_keep_a_dead_peer_alive() -> None:
    """The parent's connections and its port are gone as soon as it is, though its child (a DataLoader worker) lives on.

    The child reads the rest of the same input as its parent: the parent one line, the child until the end.
    """

    async def scenario() -> None:
        async with stage() as actors:
            command = [sys.executable, "-W", "error", "-c", FORKING_PEER, str(actors.address)]
            process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": SOURCES}
            )
            assert process.stdin is not None
            assert process.stdout is not None
            connection = await actors.accepted.get()
            buffer = bytearray(4)
            await connection.readinto(buffer)
            address = Address.parse((await process.stdout.readline()).decode())
            try:
                process.kill()
                await connection_end(connection)
                with pytest.raises(PeerUnreachable):
                    await actors.client.dial(address.peer_id, [address], timeout_s=30)
            finally:
                process.stdin.close()
                await process.wait()
            assert await process.stdout.read() == b"child lived\n"

    play(scenario)


SOURCES = str(Path(__file__).parents[2] / "src")
