"""The result of matchmaking, a `Group`, and what it needs from others: a `GroupDirectory`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.peer import PeerID
from shoal.rpc import Stream
from shoal.wire import Contact, Member

__all__ = ["ControlStream", "Group", "GroupDirectory"]

ControlStream = Stream[Any, Any]
"""A stream that began with `Join`, seen from either side."""


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
        ...

    async def withdraw(self, group_key: str) -> None:
        """Take our entry out, as far as that is possible."""
        ...

    async def read(self, group_key: str) -> Sequence[tuple[Contact, float]]:
        """The peers that look for a group under this key, and until when.

        Raises:
            ShoalError: it could not be read.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group that is about to average.

    Attributes:
        round_id: names the round, 16 bytes.
        members: all members, in the order that the leader drew.
        my_index: our place among the members.
        coordinator: the place of the member that decides the round: the leader.
        slices: how many elements each member reduces, in order.
        part_bytes: the most bytes of one part, as encoded.
        controls: the streams that carry the round's control from now on, open. The coordinator has one for each other
            member (also for a member that is gone already, whose stream is broken); any other member has one, to the
            coordinator. Nobody else reads or writes them until `release`.
    """

    round_id: bytes
    members: tuple[Member, ...]
    my_index: int
    coordinator: int
    slices: tuple[int, ...]
    part_bytes: int
    controls: Mapping[PeerID, ControlStream]
    on_release: Callable[[], None] = field(repr=False)

    @property
    def peers(self) -> tuple[PeerID, ...]:
        """The members' ids, in order."""
        return tuple(member.contact.peer for member in self.members)

    @property
    def leads(self) -> bool:
        """Return whether we are the coordinator."""
        return self.my_index == self.coordinator

    def release(self) -> None:
        """The round is over: end the control streams in order (those that still work). Safe to call twice.

        The owner of the group must call this once, whatever the outcome of the round: until then the streams stay open.
        """
        self.on_release()
