r"""Frames: how messages lie on a connection.

====  =====================  =============================================================================
size  field                  meaning
====  =====================  =============================================================================
1     kind                   see `Kind`
4     header bytes           big-endian; at most `Limits.header_bytes`, checked before anything is allocated
4     payload bytes          big-endian; at most `Limits.payload_bytes`; 0 except on DATA
\*     header                 one MessagePack message (`shoal.wire`)
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
from shoal.transport.base import Buffer, Connection
from shoal.wire import encode

__all__ = ["PREFIX_BYTES", "Frame", "Kind", "Limits", "pack", "read_frame"]

_PREFIX = struct.Struct(">BII")
_PIECE_BYTES = 64 << 10
PREFIX_BYTES = _PREFIX.size


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer may cost us. All checked before memory is taken.

    Attributes:
        header_bytes: the largest message.
        payload_bytes: the largest payload of one frame.
        calls_per_peer: calls of one peer that are served at the same time; more are answered `busy`.
        streams_per_peer: streams that one peer may have open to us at the same time.
        calls_per_host_s: small calls a second that all peers of one host may go on making, and four times as many at
            once; a message counts as one more for each 256 bytes, and so does our reply to it, beyond 64 KiB. A host
            that asks for more is not read for a while.
        calls_s: the same for all hosts together: each gets its share of it, but 10 a second at least.
        outbox_bytes: small frames that may wait on one call link; beyond, our own calls to that peer fail.
        idle_streams: idle stream connections kept per peer for the next stream.
        dial_timeout_s: longest time to make one connection.
        beat_s: silence on a peer with open streams after which a sign of life is asked for.
        silence_s: silence after which such a peer counts as lost. Never under 1 s: see `docs/protocol.md`.
        idle_beat_s: as `beat_s`, for a peer without streams; it counts as lost after three times this.
        idle_close_s: a call link without calls and streams is closed after this.
    """

    header_bytes: int = 1 << 20
    payload_bytes: int = 16 << 20
    calls_per_peer: int = 128
    streams_per_peer: int = 64
    calls_per_host_s: float = 500.0
    calls_s: float = 4000.0
    outbox_bytes: int = 8 << 20
    idle_streams: int = 4
    dial_timeout_s: float = 5.0
    beat_s: float = 1.0
    silence_s: float = 5.0
    idle_beat_s: float = 10.0
    idle_close_s: float = 120.0


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    """`Hello`; first frame of a call link."""
    CALL = 2
    """`Call`, `Reply`, `Failure`, `Note`, `Beat`, `BeatReply` or `Bye`, on a call link."""
    OPEN = 3
    """`OpenStream`; first frame of a stream."""
    DATA = 4
    """A message of the stream, perhaps with a payload."""
    END = 5
    """The sender will send nothing more on this stream. No header, no payload."""
    FAULT = 6
    """`Failure`: the sender gave the stream up."""


class Frame(NamedTuple):
    """A frame whose header was read and whose payload was not."""

    kind: Kind
    header: bytearray
    payload_bytes: int


def pack(kind: Kind, message: object | None = None, payload_bytes: int = 0, *, limits: Limits | None = None) -> bytes:
    """Prefix and header of a frame.

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
