"""The hash of a state, on the wire and on disk: BLAKE3, 32 bytes (decision 0012).

Donors and receivers hash chunks with it, files of tensors have the digest of each tensor, and of their own header.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

__all__ = ["DIGEST_BYTES", "digest_of", "hasher"]

DIGEST_BYTES = 32
"""The length of a digest."""


def hasher() -> blake3:
    """A hash that is given its bytes piece by piece."""
    return blake3()


def digest_of(pieces: Iterable[memoryview | bytes]) -> bytes:
    """The digest of what lies in these pieces."""
    found = hasher()
    for piece in pieces:
        found.update(piece)
    return found.digest()
