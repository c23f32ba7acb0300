r"""Frames: how messages lie on a connection.

====  =====================  =============================================================================
size  field                  meaning
====  =====================  =============================================================================
1     kind                   see `Kind`
4     header bytes           big-endian; at most `Limits.header_bytes`, checked before anything is allocated
4     payload bytes          big-endian; at most `Limits.payload_bytes`; 0 except on DATA
\*     header                 one MessagePack message (`shoal.protocol.wire`)
\*     payload                raw tensor bytes, read straight into the reader's own buffer
====  =====================  =============================================================================

The first frame of the dialer says what the connection is for: HELLO makes it a call link, OPEN a stream.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import msgspec

from shoal.errors import LocalError, PeerProtocolError
from shoal.protocol.wire import encode
from shoal.transport.base import Buffer, Connection

__all__ = ["PREFIX_BYTES", "Frame", "Kind", "Limits", "pack", "read_frame"]

_PREFIX = struct.Struct(">BII")
_PIECE_BYTES = 64 << 10
PREFIX_BYTES = _PREFIX.size


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on what one peer may cost us. Each is checked before memory is taken.

    Attributes:
        header_bytes: the largest message.
        payload_bytes: the largest payload of one frame.
        calls_per_peer: calls on one link that are served at a time, those answered at once not counted. More are
            answered `busy`.
        streams_per_peer: streams that one peer may have open to us. More are answered `busy`.
        calls_per_host_s: small calls a second that all peers of one host, or of one /64 of IPv6 addresses, may go on
            making, and four times as many at once. A message counts as one more call for each 256 bytes, one that
            opens a stream for each 2,048. So does our reply to it beyond 64 KiB. Replies that we waited for count
            nothing. If a host asks for more, its links are not read for 0.1 to 1 s, and its streams not served, except
            those that stay within an equal share of it for each link. A new link begins with nothing.
        calls_s: the same for all hosts together. While they ask for more, each gets its share, at least 10 a second.
        outbox_bytes: small frames that may wait on one link. Beyond it our own calls to that peer fail.
        outboxes_bytes: the same for all links together. Beyond it each link may have 256 KiB waiting.
        idle_streams: idle stream connections that are kept for each peer.
        dial_timeout_s: the longest time to make one connection.
        beat_s: a peer with open streams that is silent for so long is asked for a sign of life.
        silence_s: a peer with open streams that is silent for so long is lost. Never under 1 s: a busy interpreter is
            no death (`docs/why/protocol.md`).
        idle_beat_s: as `beat_s`, for a peer without streams. It is lost after three times this.
        idle_close_s: a link without calls and streams is closed after so long.
    """

    header_bytes: int = 1 << 20
    payload_bytes: int = 16 << 20
    calls_per_peer: int = 128
    streams_per_peer: int = 64
    calls_per_host_s: float = 500.0
    calls_s: float = 4000.0
    outbox_bytes: int = 8 << 20
    outboxes_bytes: int = 32 << 20
    idle_streams: int = 4
    dial_timeout_s: float = 5.0
    beat_s: float = 1.0
    silence_s: float = 5.0
    idle_beat_s: float = 10.0
    idle_close_s: float = 120.0


class Kind(enum.IntEnum):
    """The kinds of frames."""

    HELLO = 1
    """`Hello`: the first frame of a call link."""
    CALL = 2
    """`Call`, `Reply`, `Failure`, `Note`, `Beat`, `BeatReply` or `Bye`, on a call link."""
    OPEN = 3
    """`OpenStream`: the first frame of a stream."""
    DATA = 4
    """A message of the stream, perhaps with a payload."""
    END = 5
    """The sender sends nothing more on this stream. The frame has no header and no payload."""
    FAULT = 6
    """`Failure`: the sender gave the stream up, and the connection ends."""


class Frame(NamedTuple):
    """A frame whose header was read and whose payload was not."""

    kind: Kind
    header: bytearray
    payload_bytes: int


def pack(kind: Kind, message: object | None = None, payload_bytes: int = 0, *, limits: Limits | None = None) -> bytes:
    """The prefix and the header of a frame.

    Raises:
        LocalError: the message is longer than `limits` allow: the other side would drop us.
    """
    header = b"" if message is None else encode(message)
    if limits is not None and len(header) > limits.header_bytes:
        raise LocalError(f"message of {len(header)} bytes, the most is {limits.header_bytes}: {type(message).__name__}")
    return _PREFIX.pack(kind, len(header), payload_bytes) + header


def payload_size(payload: Buffer | None) -> int:
    """Bytes in a payload, 0 for none."""
    if payload is None:
        return 0
    return payload.nbytes if isinstance(payload, memoryview) else len(payload)


async def read_frame(connection: Connection, limits: Limits) -> Frame:
    """Read the next frame's header; the caller reads its payload.

    Raises:
        PeerUnreachable: the connection ended.
        PeerProtocolError: an unknown kind or a length over the limit. Nothing was allocated for it.
    """
    prefix = bytearray(PREFIX_BYTES)
    await connection.readinto(prefix)
    number, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
    try:
        kind = Kind(number)
    except ValueError:
        raise PeerProtocolError(f"frame of unknown kind {number}", connection.peer_id) from None
    if header_bytes > limits.header_bytes:
        raise PeerProtocolError(
            f"frame header of {header_bytes} bytes, the limit is {limits.header_bytes}", connection.peer_id
        )
    if payload_bytes > (limits.payload_bytes if kind is Kind.DATA else 0):
        raise PeerProtocolError(f"payload of {payload_bytes} bytes in a {kind.name} frame", connection.peer_id)
    header = bytearray()
    while (missing := header_bytes - len(header)) > 0:
        # Memory is taken as bytes come, not as they are announced.
        piece = bytearray(min(missing, _PIECE_BYTES))
        await connection.readinto(piece)
        header = header + piece if header else piece
    return Frame(kind, header, payload_bytes)
