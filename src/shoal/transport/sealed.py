r"""Records of AES-256-GCM: data goes in them once both sides have proved their identities.

TLS has done its work then. Inside it each side has sent 32 random bytes, made for this connection and this direction.
Data sealed with them is as secret and as fresh as data that TLS itself carries. TLS 1.3's own records hold 16 KiB, and
pass through two more buffers on each side: they took 2.3 CPU-seconds per GiB at both ends together, these take 0.8
(`docs/why/decisions/0010-sealed-records.md`).

====  ==============  ============================================================================================
size  field           meaning
====  ==============  ============================================================================================
4     length          big-endian, of what follows; more than a tag, at most `RECORD_BYTES` and a tag
\*     ciphertext      of 1 to `RECORD_BYTES` bytes
16    tag             GCM's: over the ciphertext
====  ==============  ============================================================================================

The nonce of a record is its number in its direction, from 0 on, as 12 bytes big-endian: a record that is left out,
repeated, moved or changed does not open, and the connection ends. After every `REKEY_BYTES` of plaintext a direction
goes on with the next key, HKDF-Expand-SHA256 of the key before, so that no key seals more than GCM is good for
(2^32 blocks: an attacker's advantage stays under 2^-64).
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from shoal.transport.base import Buffer
from shoal.transport.layers import RECORD_BYTES, BrokenLayer, ReceiveBuffer, Scratch

__all__ = ["KEY_BYTES", "PAUSE_BYTES", "REKEY_BYTES", "SealedLayer"]

KEY_BYTES = 32

REKEY_BYTES = 1 << 36
"""After so much plaintext a direction takes its next key."""

PAUSE_BYTES = 2 * RECORD_BYTES
"""The socket is not read while this much waits for a reader."""

_LENGTH_BYTES, _TAG_BYTES = 4, 16
_NEXT_KEY = b"shoal: next key of a connection"


class _Key:
    """The key of one direction, and the number of its next record."""

    def __init__(self, key: bytes) -> None:
        self._key, self._cipher = key, AESGCM(key)
        self._number = self._bytes = 0

    def seal(self, plain: memoryview, record: memoryview) -> None:
        """Encrypt into `record`, which is longer by a tag."""
        self._cipher.encrypt_into(self._next_nonce(), plain, None, record)
        self._count(len(plain))

    def open_into(self, record: memoryview, plain: memoryview) -> None:
        """Decrypt into `plain`, which is shorter by a tag. If it raises `BrokenLayer`, no plaintext is left there."""
        try:
            self._cipher.decrypt_into(self._next_nonce(), record, None, plain)
        except InvalidTag:
            plain[:] = bytes(len(plain))
            raise BrokenLayer("a record was changed on its way, or is not the next one") from None
        self._count(len(plain))

    def _next_nonce(self) -> bytes:
        nonce = self._number.to_bytes(12, "big")
        self._number += 1
        return nonce

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes >= REKEY_BYTES:
            self._key = HKDFExpand(SHA256(), KEY_BYTES, _NEXT_KEY).derive(self._key)
            self._cipher, self._bytes = AESGCM(self._key), 0


class SealedLayer:
    """Both directions of a connection, sealed.

    Args:
        sending_key: the 32 random bytes that this side gave to the other one.
        receiving_key: the 32 random bytes that the other side gave.
        scratch: shared memory.
        received: bytes that came before and were not read.
    """

    pause_bytes = PAUSE_BYTES

    def __init__(self, sending_key: bytes, receiving_key: bytes, scratch: Scratch, received: bytes = b"") -> None:
        self._sending, self._receiving, self._scratch = _Key(sending_key), _Key(receiving_key), scratch
        self._sealed = ReceiveBuffer(scratch, received)  # the beginning of a record, or whole records that nobody reads
        self._opened = memoryview(b"")  # the rest of a record that was longer than the read

    @property
    def pending(self) -> int:
        return len(self._sealed) + len(self._opened)

    def receive_buffer(self, target: memoryview) -> memoryview:
        return self._sealed.receive_buffer(len(target))

    def received(self, nbytes: int, target: memoryview) -> int:
        return self._take(self._sealed.received(nbytes), target)

    def read(self, target: memoryview) -> int:
        filled = min(len(self._opened), len(target))
        if filled:
            target[:filled], self._opened = self._opened[:filled], self._opened[filled:]
        if self._sealed and filled < len(target):
            filled += self._take(self._sealed.view, target[filled:])
        return filled

    def _take(self, sealed: memoryview, target: memoryview) -> int:
        """Open records while `target` has room, and keep the rest. Returns how many bytes of `target` are filled."""
        start = filled = 0
        wanted, size = len(target), len(sealed)
        while filled < wanted and size - start > _LENGTH_BYTES:
            first = start + _LENGTH_BYTES
            length = int.from_bytes(sealed[start:first], "big")
            if not _TAG_BYTES < length <= RECORD_BYTES + _TAG_BYTES:
                raise BrokenLayer(f"a record of {length} bytes")
            if size - first < length:
                break
            record, start, count = sealed[first : first + length], first + length, length - _TAG_BYTES
            if count <= wanted - filled:
                self._receiving.open_into(record, target[filled : filled + count])
                filled += count
            else:
                opened = memoryview(bytearray(count))
                self._receiving.open_into(record, opened)
                target[filled:], self._opened = opened[: wanted - filled], opened[wanted - filled :]
                filled = wanted
        self._sealed.keep(sealed[start:])
        return filled

    def protect(self, bunch: Sequence[memoryview]) -> Sequence[Buffer]:
        end, out = 0, self._scratch.sending
        for data in bunch:
            for start in range(0, len(data), RECORD_BYTES):
                plain = data[start : start + RECORD_BYTES]
                length = len(plain) + _TAG_BYTES
                first, end = end + _LENGTH_BYTES, end + _LENGTH_BYTES + length
                out[first - _LENGTH_BYTES : first] = length.to_bytes(_LENGTH_BYTES, "big")
                self._sending.seal(plain, out[first:end])
        return (out[:end],)
