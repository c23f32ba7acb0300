"""The place in which peers that look for a group find each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.protocol.wire import Contact

__all__ = ["GroupDirectory"]


class GroupDirectory(Protocol):
    """The place in which peers that look for a group declare themselves; in a swarm, a dictionary record in the DHT.

    The directory is only a hint which peers to ask: entries may be late, missing or stale. But once `declare` has
    returned, reads that begin later should find the entry. If two peers declare at the same time, at least one should
    be told of the other. Of several writes by one peer the last call wins, even if the call before it was cancelled or
    still goes on, and even if a declaration comes back with the expiration that it had before it was withdrawn. Entries
    should be kept for a few seconds past their expiration: clocks differ, so each reader judges whether an entry has
    expired.
    """

    async def declare(self, group_key: str, expiration: float, contact: Contact) -> Sequence[tuple[Contact, float]]:
        """Say that we look for a group until `expiration` (wall clock, seconds); returns when it can be found.

        Returns:
            The other peers that look for a group under this key, and until when; we ourselves may be among them.

        Raises:
            ShoalError: it could not be stored.
        """

    async def withdraw(self, group_key: str) -> None:
        """Take our entry out, as far as that is possible."""

    async def read(self, group_key: str) -> Sequence[tuple[Contact, float]]:
        """The peers that look for a group under this key, and until when.

        Raises:
            ShoalError: it could not be read.
        """
