"""Packets as TUN devices with segmentation offload hand them over: one header for TCP segments that follow each other.

A *train* is what one read of such a device gives: `HEAD_BYTES` of the kernel's (`struct virtio_net_hdr`), then an IPv4
packet, which stands for one or more packets of at most the MTU. It saves the emulator most system calls; on a line
it counts as the packets that it stands for, each with its own headers.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["HEAD_BYTES", "Train", "cut", "measure"]

HEAD = struct.Struct("=BBHHHH")
"""Flags, kind of segmentation (0: none, 1: TCP over IPv4), header bytes, payload of a segment, two for checksums."""

HEAD_BYTES = HEAD.size
_FIN_PSH = 0x09


class Train(NamedTuple):
    """What a train stands for: `packets` packets of `wire_bytes` in all, their headers included."""

    packets: int
    wire_bytes: int


def measure(data: bytes) -> Train:
    """How many packets a train stands for."""
    size = len(data) - HEAD_BYTES
    if not data[1]:
        return Train(1, size)
    headers, segment = _header_bytes(data), HEAD.unpack_from(data)[3]
    count = max(1, -(-(size - headers) // segment))
    return Train(count, size + (count - 1) * headers)


def cut(data: bytes, first: int, stop: int) -> bytes:
    """The train of the packets `first` to `stop` of a train."""
    count = measure(data).packets
    flags, kind, _, segment, *checksums = HEAD.unpack_from(data)
    headers = _header_bytes(data)
    payload = data[HEAD_BYTES + headers :][first * segment : stop * segment]
    packet = bytearray(data[HEAD_BYTES : HEAD_BYTES + headers])
    ip = (packet[0] & 15) * 4
    packet[2:4] = (headers + len(payload)).to_bytes(2, "big")
    packet[10:12] = b"\0\0"
    packet[10:12] = _checksum(packet[:ip]).to_bytes(2, "big")
    sequence = int.from_bytes(packet[ip + 4 : ip + 8], "big") + first * segment
    packet[ip + 4 : ip + 8] = (sequence & 0xFFFFFFFF).to_bytes(4, "big")
    if stop < count:
        packet[ip + 13] &= ~_FIN_PSH & 0xFF  # the last packet alone has them
    if stop - first == 1:
        kind = segment = 0
    return HEAD.pack(flags, kind, headers, segment, *checksums) + bytes(packet) + payload


def _header_bytes(data: bytes) -> int:
    """Of IP and TCP together."""
    ip = (data[HEAD_BYTES] & 15) * 4
    return ip + (data[HEAD_BYTES + ip + 12] >> 4) * 4


def _checksum(header: bytes | bytearray) -> int:
    """Of an IPv4 header whose own field for it is 0 (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(header) // 2}H", header))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF
