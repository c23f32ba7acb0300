"""Frames and streams by themselves, over a connection that plays back bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from shoal.base.peer import PeerID
from shoal.errors import LocalError, PeerProtocolError, PeerRefused, PeerUnreachable
from shoal.protocol.identity import Identity
from shoal.protocol.wire import Beat, Chunk, Failure, Leave, Report, encode
from shoal.rpc import Limits, Stream
from shoal.rpc.framing import PREFIX_BYTES, Kind, pack, payload_size, read_frame
from shoal.transport.base import Buffer

PEER = Identity.from_seed(b"p" * 32).peer_id
LIMITS = Limits(header_bytes=1000, payload_bytes=5000)


class Playback:
    """A `Connection` that gives out prepared bytes, then ends; keeps what is written."""

    def __init__(self, data: bytes = b"") -> None:
        self.data, self.written = bytearray(data), bytearray()
        self.asked: list[int] = []
        self.closed = self.bulk = False
        self.bytes_received = self.bytes_acked = 0
        self.local_host = self.remote_host = ""

    @property
    def peer_id(self) -> PeerID:
        return PEER

    @property
    def dialed(self) -> bool:
        return True

    @property
    def bytes_sent(self) -> int:
        return len(self.written)

    async def write(self, *buffers: Buffer) -> None:
        if self.closed:
            raise PeerUnreachable("closed", PEER)
        for buffer in buffers:
            self.written += buffer

    async def readinto(self, buffer: bytearray | memoryview) -> None:
        size = len(buffer)
        self.asked.append(size)
        if self.closed or len(self.data) < size:
            raise PeerUnreachable("ended", PEER)
        buffer[:] = self.data[:size]
        del self.data[:size]
        self.bytes_received += size

    async def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


def prefix(kind: int, header_bytes: int, payload_bytes: int) -> bytes:
    """Written down a second time, from the table in `framing`."""
    return bytes([kind]) + header_bytes.to_bytes(4, "big") + payload_bytes.to_bytes(4, "big")


def play(work: Coroutine[Any, Any, Any]) -> Any:
    """Run it."""
    return asyncio.run(work)


def stream_of(data: bytes) -> tuple[Stream[Leave, Report | Chunk], Playback, list[bool]]:
    """A stream that will read these bytes, its connection, and what its release was called with."""
    connection, released = Playback(data), list[bool]()
    kind: Any = Report | Chunk
    return Stream(connection, kind, LIMITS, released.append), connection, released


# --------------------------------------------------------------------------------------------------------------- frames


def test_frames_are_prefix_header_payload() -> None:
    """One byte of kind, two lengths of four, big-endian, then the message."""
    header = encode(Beat(1.5))
    assert pack(Kind.CALL, Beat(1.5)) == prefix(2, len(header), 0) + header
    assert pack(Kind.DATA, Beat(1.5), 77) == prefix(4, len(header), 77) + header
    assert pack(Kind.END) == prefix(5, 0, 0)
    assert PREFIX_BYTES == 9
    assert [int(kind) for kind in Kind] == [1, 2, 3, 4, 5, 6]


def test_frames_are_read_back() -> None:
    """Header as sent, payload only announced."""

    async def main() -> None:
        connection = Playback(pack(Kind.DATA, Beat(1.5), 3) + b"abc" + pack(Kind.END))
        frame = await read_frame(connection, LIMITS)
        assert (frame.kind, bytes(frame.header), frame.payload_bytes) == (Kind.DATA, encode(Beat(1.5)), 3)
        payload = bytearray(3)
        await connection.readinto(payload)
        assert payload == b"abc"
        assert (await read_frame(connection, LIMITS)).kind is Kind.END

    play(main())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (prefix(0, 0, 0), "unknown kind 0"),
        (prefix(7, 0, 0), "unknown kind 7"),
        (prefix(255, 0, 0), "unknown kind 255"),
        (prefix(1, 1001, 0), "header of 1001 bytes"),
        (prefix(4, 0xFFFFFFFF, 0), "header of 4294967295 bytes"),
        (prefix(4, 0, 5001), "payload of 5001 bytes"),
        (prefix(4, 0, 0xFFFFFFFF), "payload of 4294967295 bytes"),
        (prefix(1, 0, 1), "payload of 1 bytes in a HELLO frame"),
        (prefix(2, 0, 1), "payload of 1 bytes in a CALL frame"),
        (prefix(3, 0, 1), "payload of 1 bytes in a OPEN frame"),
        (prefix(5, 0, 1), "payload of 1 bytes in a END frame"),
        (prefix(6, 0, 1), "payload of 1 bytes in a FAULT frame"),
    ],
)
def test_frames_over_the_limit_are_refused_before_memory_is_taken(data: bytes, reason: str) -> None:
    """Unknown kinds and lengths: an error that names the peer, and nothing is read beyond the prefix."""
    connection = Playback(data + bytes(2000))
    with pytest.raises(PeerProtocolError, match=reason) as error:
        play(read_frame(connection, LIMITS))
    assert error.value.peer_id == PEER
    assert connection.asked == [9]


def test_a_long_header_takes_memory_as_it_comes() -> None:
    """A megabyte that is announced and does not come costs a fraction of it; one that comes is put together."""
    announced = Playback(prefix(2, 1 << 20, 0) + bytes(100_000))
    with pytest.raises(PeerUnreachable):
        play(read_frame(announced, Limits()))
    assert max(announced.asked) <= 64 << 10
    header = bytes(range(256)) * 1000
    frame = play(read_frame(Playback(prefix(2, len(header), 0) + header), Limits()))
    assert frame.header == header


def test_a_truncated_frame_is_a_lost_connection() -> None:
    """Wherever the bytes end."""
    whole = pack(Kind.CALL, Beat(1.0))
    for length in range(len(whole)):
        with pytest.raises(PeerUnreachable):
            play(read_frame(Playback(whole[:length]), LIMITS))


def test_messages_over_the_limit_are_not_packed() -> None:
    """A sender that packs with limits hears of it before the other side does."""
    with pytest.raises(LocalError, match="the most is 1000"):
        pack(Kind.CALL, Failure(1, "x" * 1000, ""), limits=LIMITS)
    assert pack(Kind.CALL, Failure(1, "x" * 900, ""), limits=LIMITS)


def test_payload_sizes_count_bytes() -> None:
    """Also of views with larger elements."""
    assert payload_size(None) == 0
    assert payload_size(b"abc") == 3
    assert payload_size(memoryview(bytearray(16)).cast("H")) == 16


# -------------------------------------------------------------------------------------------------------------- streams


def test_a_stream_reads_messages_of_its_types() -> None:
    """Each of the union, in order, with its payload; then END, again and again."""

    async def main() -> None:
        data = pack(Kind.DATA, Report(lost=[1])) + pack(Kind.DATA, Chunk(3), 2) + b"hi" + pack(Kind.END)
        stream, _, released = stream_of(data)
        assert await stream.recv() == (Report(lost=[1]), 0)
        assert await stream.recv() == (Chunk(3), 2)
        payload = bytearray(2)
        await stream.readinto(payload)
        assert payload == b"hi"
        assert await stream.recv() is None
        assert await stream.recv() is None
        assert not released
        assert not stream.closed

    play(main())


@pytest.mark.parametrize(
    "frame",
    [
        pack(Kind.HELLO),
        pack(Kind.CALL, Beat(1.0)),
        pack(Kind.OPEN),
        pack(Kind.DATA, Leave()),
        pack(Kind.DATA),
        prefix(4, 1, 0) + b"\xc1",
        prefix(4, 9, 0) + b"\x92\xa5Chun\xff\x01\x01",
        pack(Kind.FAULT, Leave()),
        prefix(9, 0, 0),
        prefix(4, 0, 5001),
    ],
)
def test_what_does_not_belong_on_a_stream_ends_it(frame: bytes) -> None:
    """Other frames, other messages, no message at all: the sender's fault, and the connection goes."""

    async def main() -> None:
        stream, connection, released = stream_of(frame + bytes(100))
        with pytest.raises(PeerProtocolError) as error:
            await stream.recv()
        assert error.value.peer_id == PEER
        assert connection.closed
        assert stream.closed
        assert released == [False]

    play(main())


def test_a_fault_says_why() -> None:
    """Code and text of the other side's FAULT; the code alone if there is no text."""

    async def main() -> None:
        for text, message in (("no room", "no room"), ("", "busy")):
            stream, connection, released = stream_of(pack(Kind.FAULT, Failure(0, "busy", text)))
            with pytest.raises(PeerRefused, match=message) as refusal:
                await stream.recv()
            assert refusal.value.code == "busy"
            assert connection.closed
            assert released == [False]

    play(main())


def test_a_stream_that_is_lost_releases_its_connection() -> None:
    """While a message or a payload is waited for: nobody need abort it for the books to be right."""

    async def main() -> None:
        stream, _, released = stream_of(b"")
        with pytest.raises(PeerUnreachable):
            await stream.recv()
        assert released == [False]
        stream, _, released = stream_of(pack(Kind.DATA, Chunk(1), 10) + b"abc")
        await stream.recv()
        with pytest.raises(PeerUnreachable):
            await stream.readinto(bytearray(10))
        assert released == [False]

    play(main())


def test_a_connection_is_free_again_once_both_have_said_end() -> None:
    """In either order; before that, `abort` takes it away, after that it does nothing."""

    async def main() -> None:
        for ours_first in (True, False):
            stream, connection, released = stream_of(pack(Kind.END) + pack(Kind.DATA, Chunk(1)))
            if ours_first:
                await stream.end()
            assert await stream.recv() is None
            await stream.finish()
            assert released == [True]
            stream.abort()
            await stream.fail("refused", "late")
            assert released == [True]
            assert not connection.closed
            assert connection.written == pack(Kind.END)
            assert await stream.recv() is None  # and takes nothing of whoever uses the connection now
        stream, connection, released = stream_of(pack(Kind.END))
        await stream.end()
        stream.abort()
        stream.abort()
        assert released == [False]
        assert connection.closed

    play(main())


def test_finish_needs_payloads_to_be_read_first() -> None:
    """No END is sent over a payload that nobody read: the other side would take it for an orderly end."""

    async def main() -> None:
        stream, connection, _ = stream_of(pack(Kind.DATA, Chunk(1), 3) + b"abc" + pack(Kind.END))
        await stream.recv()
        with pytest.raises(LocalError, match="payload of 3"):
            await stream.finish()
        assert not connection.written
        await stream.readinto(bytearray(3))
        await stream.finish()

    play(main())


def test_fail_tells_once_and_cuts_long_texts() -> None:
    """FAULT with code and text, then the connection closes; on one that is gone nothing happens."""

    async def main() -> None:
        stream, connection, released = stream_of(b"")
        await stream.fail("internal", "x" * 5000)
        assert connection.written == pack(Kind.FAULT, Failure(0, "internal", "x" * 1000))
        assert connection.closed
        assert released == [False]
        await stream.fail("internal", "again")
        with pytest.raises(PeerUnreachable):
            await stream.send(Leave())

    play(main())


def test_send_writes_message_and_payload_together() -> None:
    """Prefix, message, payload; nothing of what is too long."""

    async def main() -> None:
        stream, connection, _ = stream_of(b"")
        await stream.send(Leave(), b"abc")
        await stream.send(Leave())
        assert connection.written == pack(Kind.DATA, Leave(), 3) + b"abc" + pack(Kind.DATA, Leave())
        size = len(connection.written)
        for payload in (bytes(5001), bytearray(5001), memoryview(bytearray(5008)).cast("H")):
            with pytest.raises(LocalError, match="cut it"):
                await stream.send(Leave(), payload)
        assert len(connection.written) == size
        assert stream.bytes_sent == size

    play(main())
