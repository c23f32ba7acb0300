"""The result and the needs of matchmaking: the formed group, the directory, the checks of what peers say.

Everything that comes from the network is checked here before it is used: a `Join` before the machine hears of it, a
`Begin` before it becomes a `Group`. A message that does not pass costs its sender its place and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.errors import PeerProtocolError
from shoal.matchmaking.signals import MAX_GROUP_SIZE
from shoal.peer import PeerID
from shoal.rpc import Stream
from shoal.wire import Begin, Contact, Join, Member

__all__ = ["MAX_GATHERED_BYTES", "WHERE", "ControlStream", "Group", "GroupDirectory", "check_begin", "check_join"]

ControlStream = Stream[Any, Any]
"""A stream that began with `Join`, seen from either side."""

WHERE = "matchmaking"
"""The `where` of the events of matchmaking."""

MAX_GATHERED_BYTES = 65536
"""The longest `gathered` value of one member."""


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


def _broken(text: str, peer: PeerID) -> PeerProtocolError:
    return PeerProtocolError(text, peer)


def _check_member(member: Member, peer: PeerID) -> None:
    contact, bandwidth = member.contact, member.bandwidth
    if any(address.peer_id != contact.peer for address in contact.addresses):
        raise _broken("a member's address names another peer", peer)
    if bandwidth is not None and not (math.isfinite(bandwidth) and bandwidth >= 0):
        raise _broken(f"a member's bandwidth is {bandwidth}", peer)
    if member.reduces and (not contact.addresses or bandwidth == 0):
        raise _broken("a member would reduce, but has no address or no bandwidth", peer)
    if not member.reduces and not member.contributes:
        raise _broken("a member neither contributes nor reduces", peer)


def check_join(join: Join, peer: PeerID) -> None:
    """Check a peer's word about itself when it asks to join.

    Raises:
        PeerProtocolError: it names another peer, or contradicts itself.
    """
    if join.member.contact.peer != peer:
        raise _broken("asks to join in another peer's name", peer)
    if not math.isfinite(join.expiration):
        raise _broken(f"asks to join with the expiration {join.expiration}", peer)
    _check_member(join.member, peer)


def check_begin(begin: Begin, *, mine: Member, leader: PeerID, min_size: int) -> int:
    """Check a leader's `Begin` and return our index in it.

    Raises:
        PeerProtocolError: it is not a group that we can be in.
    """
    members, count = begin.members, len(begin.members)
    peers = [member.contact.peer for member in members]
    if len(set(peers)) != count:
        raise _broken("begins a group with a member twice", leader)
    if not min_size <= count <= MAX_GROUP_SIZE:
        raise _broken(f"begins a group of {count}", leader)
    if mine not in members:
        raise _broken("begins a group without us, or says of us what we did not say", leader)
    if not 0 <= begin.coordinator < count or peers[begin.coordinator] != leader:
        raise _broken("begins a group with another coordinator than itself", leader)
    if len(begin.slices) != count or begin.part_bytes < 1:
        raise _broken("begins a group without a slice for each member", leader)
    for member, elements in zip(members, begin.slices, strict=True):
        _check_member(member, leader)
        if elements < 0 or (elements and not member.reduces):
            raise _broken("begins a group in which one reduces that cannot", leader)
    return members.index(mine)
