"""Digests of averaged tiles: equal bytes of one round, of which the same is said, have one; all else has another."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest
from blake3 import blake3
from msgspec.structs import replace

from shoal.averaging.allreduce.vector import NO_DIGEST, TileDigests
from shoal.protocol.wire import Held

ROUND = b"round id 16 byte"
HELD = Held(5, 2, b"\x07", 3.5, NO_DIGEST)


def test_a_digest_is_blake3() -> None:
    """As the protocol's page says it."""
    data = bytes(range(256)) * 9
    key = hashlib.sha256(b"shoal parts" + ROUND).digest()
    said = b"\x07" + struct.pack(">IIdI", 5, 2, 3.5, 1)
    digest = TileDigests(ROUND).of(HELD, data)
    assert digest == blake3(data + said, key=key).digest()[:16]
    assert len(digest) == len(NO_DIGEST) == 16


def test_any_buffer_will_do() -> None:
    """Bytes, a writable buffer, a view of one that lies anywhere."""
    digests, data = TileDigests(ROUND), bytes(range(100))
    beside = bytearray(b"?" + data + b"?")
    assert digests.of(HELD, data) == digests.of(HELD, bytearray(data)) == digests.of(HELD, memoryview(beside)[1:-1])


def test_other_bytes_and_rounds_have_other_digests() -> None:
    """One bit, one zero more at the end, the round."""
    digests, data = TileDigests(ROUND), bytes(1000)
    others = [bytes(999) + b"\x01", b"\x80" + bytes(999), bytes(1001), bytes(999), b""]
    found = {digests.of(HELD, data), TileDigests(b"another round id").of(HELD, data)}
    found |= {digests.of(HELD, other) for other in others}
    assert len(found) == 2 + len(others)


@pytest.mark.parametrize(
    "said", [{"tile": 4}, {"attempt": 1}, {"weight": 3.25}, {"contributors": b"\x03"}, {"contributors": b"\x07\x00"}]
)
def test_what_is_said_of_an_average_is_in_its_digest(said: dict[str, Any]) -> None:
    """A weight or a contributor that only one member hears of cannot stand under the digest of all."""
    digests = TileDigests(ROUND)
    assert digests.of(HELD, bytes(8)) != digests.of(replace(HELD, **said), bytes(8))
    assert digests.of(HELD, bytes(8)) == digests.of(replace(HELD, digest=b"x" * 16), bytes(8))
