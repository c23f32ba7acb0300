"""Names for the averages of a round, made from their bytes.

The commit of a round names each average by a digest, so that members which succeed hold the same bytes. Members are
trusted not to lie (`docs/decisions/0006-part-digests.md`): a digest must tell different bytes apart, but need not
resist an attacker who looks for equal ones. GMAC does that (different bytes of 1 MiB: one chance in 2^112) at the speed
of memory where the processor has instructions for AES: SHA-512 takes sixteen times as long.

Source: GMAC is AES-GCM over associated data alone, NIST SP 800-38D.
"""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.transport.base import Buffer

__all__ = ["NO_DIGEST", "PartDigests"]

NO_DIGEST = bytes(16)
"""The digest of a part to which no member contributes: it has no average."""


class PartDigests:
    """Digests of one round: another round has another key, so equal bytes have other digests there.

    Args:
        round_id: the id of the round, which all its members know.
    """

    def __init__(self, round_id: bytes) -> None:
        self._gcm = AESGCM(hashlib.sha256(b"shoal parts" + round_id).digest()[:16])

    def of(self, part: int, data: Buffer) -> bytes:
        """The digest of the encoded average of this part, 16 bytes. The attempt does not matter: the bytes do."""
        return self._gcm.encrypt(part.to_bytes(12, "big"), b"", data)
