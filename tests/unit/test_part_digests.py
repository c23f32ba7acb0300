"""Digests of averaged parts: equal bytes of one round and part have one, all else has another."""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from shoal.allreduce.vector import NO_DIGEST, PartDigests

ROUND = b"round id 16 byte"


def test_a_digest_is_gmac() -> None:
    """As the protocol's page says it, by another way through the library."""
    data = bytes(range(256)) * 9
    key = hashlib.sha256(b"shoal parts" + ROUND).digest()[:16]
    gcm = Cipher(algorithms.AES(key), modes.GCM((5).to_bytes(12, "big"))).encryptor()
    gcm.authenticate_additional_data(data)
    gcm.finalize()
    digest = PartDigests(ROUND).of(5, data)
    assert digest == gcm.tag
    assert len(digest) == len(NO_DIGEST) == 16


def test_any_buffer_will_do() -> None:
    """Bytes, a writable buffer, a view of one that lies anywhere."""
    digests, data = PartDigests(ROUND), bytes(range(100))
    beside = bytearray(b"?" + data + b"?")
    assert digests.of(0, data) == digests.of(0, bytearray(data)) == digests.of(0, memoryview(beside)[1:-1])


def test_other_bytes_parts_and_rounds_have_other_digests() -> None:
    """One bit, one zero more at the end, the place in the vector, the round."""
    digests, data = PartDigests(ROUND), bytes(1000)
    others = [bytes(999) + b"\x01", b"\x80" + bytes(999), bytes(1001), bytes(999), b""]
    found = {digests.of(0, data), digests.of(1, data), PartDigests(b"another round id").of(0, data)}
    found |= {digests.of(0, other) for other in others}
    assert len(found) == 3 + len(others)
