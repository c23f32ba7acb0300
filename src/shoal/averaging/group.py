"""A group of peers that are about to average: matchmaking forms it, a round of averaging takes place in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.base.peer import PeerID
from shoal.protocol.wire import Begin, Member
from shoal.rpc import Stream

__all__ = ["ControlStream", "Group"]

ControlStream = Stream[Any, Any]
"""A stream that began with `Join`, seen from either side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group that is about to average.

    Attributes:
        round_id: names the round, 16 bytes.
        members: all members, in the order that the leader drew.
        my_index: our place among the members.
        coordinator: the place of the member that decides the round: the leader.
        shares: how many elements each member reduces, in order.
        tile_bytes: the most bytes of one tile, as encoded.
        fair: how many elements each would reduce if we were the leader; empty if we are, or know nobody that reduces.
        controls: the streams that carry the round's control from now on, open. The coordinator has one for each other
            member (also for a member that is gone already, whose stream is broken); any other member has one, to the
            coordinator. Nobody else reads or writes them until `release`.
    """

    round_id: bytes
    members: tuple[Member, ...]
    my_index: int
    coordinator: int
    shares: tuple[int, ...]
    tile_bytes: int
    controls: Mapping[PeerID, ControlStream]
    on_release: Callable[[], None] = field(repr=False)
    fair: tuple[int, ...] = ()

    @property
    def begin(self) -> Begin:
        """The message with which the leader began it; the same for all members, if the leader does not lie."""
        return Begin(self.round_id, list(self.members), self.coordinator, list(self.shares), self.tile_bytes)

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
