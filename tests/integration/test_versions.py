"""A peer of an earlier version: refused with a clear word on both sides, by bytes that this code did not make.

The frames were recorded from the last code that spoke each version. They stay as they are: a change of the greeting
that would keep two versions from understanding even their refusal fails here. A new version adds those of the last one.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from shoal.errors import PeerRefused
from shoal.protocol.identity import Identity
from shoal.protocol.wire import PROTOCOL_VERSION
from shoal.transport.tcp import TcpTransport
from tests.integration.wire_peers import Wire, dial, serve

SERVER, CLIENT = (Identity.from_seed(letter * 32) for letter in (b"s", b"c"))

HELLOS = {
    1: bytes.fromhex(
        "97a568656c6c6f0101c420a7f6dfaf8f38b89ba8ce649b594f91e4d01fdc57f9c9493df43b5e50a9987367c420fec1428673f6afe89264b3"
        "807344ae8b269d125a503855202687db5a7128579fc4206e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec2"
    ),
    2: bytes.fromhex(
        "97a568656c6c6f0202c420a7f6dfaf8f38b89ba8ce649b594f91e4d01fdc57f9c9493df43b5e50a9987367c420fec1428673f6afe89264b3"
        "807344ae8b269d125a503855202687db5a7128579fc4206e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec2"
    ),
    3: bytes.fromhex(
        "97a568656c6c6f0303c420a7f6dfaf8f38b89ba8ce649b594f91e4d01fdc57f9c9493df43b5e50a9987367c420fec1428673f6afe89264b3"
        "807344ae8b269d125a503855202687db5a7128579fc4206e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ec2"
    ),
}
"""CLIENT dials SERVER, and speaks this version only."""

REFUSALS = {
    1: bytes.fromhex(
        "94a77265667573616cd92570726f746f636f6c2076657273696f6e2032206973206e6f742073706f6b656e20686572650101"
    ),
    2: bytes.fromhex(
        "94a77265667573616cd92570726f746f636f6c2076657273696f6e2033206973206e6f742073706f6b656e20686572650202"
    ),
    3: bytes.fromhex(
        "94a77265667573616cd92570726f746f636f6c2076657273696f6e2034206973206e6f742073706f6b656e20686572650303"
    ),
}
"""A server of this version was dialed by a client of the next one."""

EARLIER = range(1, PROTOCOL_VERSION)


def test_each_earlier_version_is_remembered() -> None:
    """A new version adds the frames of the one before it."""
    assert list(HELLOS) == list(REFUSALS) == list(EARLIER)


@pytest.mark.parametrize("version", EARLIER)
def test_a_peer_of_an_earlier_version_dials(caplog: pytest.LogCaptureFixture, version: int) -> None:
    """It gets a refusal that it can read; here one warning says what to do, however often it tries."""

    async def scenario() -> list[bytes]:
        server = TcpTransport(SERVER)
        answers = []
        try:
            await server.listen(lambda connection: pytest.fail("it was let in"))
            for _ in range(3):
                async with dial(server.addresses[0]) as wire:
                    await wire.send_raw(HELLOS[version])
                    answers.append(await wire.receive_raw())
                    assert await wire.at_end()
        finally:
            await server.close()
        return answers

    with caplog.at_level(logging.WARNING, "shoal"):
        answers = asyncio.run(scenario())
    expected = ["refusal", f"protocol version {version} is not spoken here", PROTOCOL_VERSION, PROTOCOL_VERSION]
    assert [msgspec.msgpack.decode(answer) for answer in answers] == [expected] * 3
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"told no: protocol version {version} is not spoken here" in told
    assert f"this one speaks version {PROTOCOL_VERSION}" in told
    assert "install the same version of shoal on both" in told


@pytest.mark.parametrize("version", EARLIER)
def test_a_peer_of_an_earlier_version_is_dialed(version: int) -> None:
    """The caller learns both versions, and what to do."""

    async def refuse(wire: Wire, _: bytes) -> None:
        await wire.receive_raw()
        await wire.send_raw(REFUSALS[version])
        await wire.at_end()

    async def scenario() -> None:
        client = TcpTransport(CLIENT, client_mode=True)
        try:
            async with serve(refuse, SERVER.peer_id) as address:
                with pytest.raises(PeerRefused) as caught:
                    await client.dial(SERVER.peer_id, [address], timeout_s=30)
        finally:
            await client.close()
        assert f"it speaks protocol version {version}, this side {PROTOCOL_VERSION}" in str(caught.value)
        assert "install the same version of shoal on both" in str(caught.value)

    asyncio.run(scenario())
