"""The peers that have joined a leader, and whether they make a group. Sans-IO."""

from __future__ import annotations

from typing import NamedTuple

from shoal.matchmaking.signals import Rules
from shoal.peer import PeerID

__all__ = ["Follower", "Followers"]


class Follower(NamedTuple):
    """The leader's knowledge of one peer that joined."""

    reduces: bool
    contributes: bool


class Followers:
    """The peers that a leader leads while its group forms.

    Args:
        rules: the rules of the leader.

    Attributes:
        members: the peers that were accepted and have neither left nor been sent away, without the leader itself.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.members: dict[PeerID, Follower] = {}

    @property
    def size(self) -> int:
        """The size of the group, including the leader."""
        return 1 + len(self.members)

    def has_room(self, peer: PeerID, *, contributes: bool) -> bool:
        """Return whether this peer may join. If nobody has values yet, one with values may replace an auxiliary one."""
        there_is_a_place = peer in self.members or self.size < self._rules.full_size
        return there_is_a_place or (contributes and not self.contributes)

    def in_the_way(self, peer: PeerID) -> PeerID | None:
        """The peer that has to go so that this one can join; None if nobody has to."""
        if peer in self.members or self.size < self._rules.full_size:
            return None
        return next(reversed(self.members))

    @property
    def full(self) -> bool:
        """Return whether nobody else may join."""
        return self._rules.leads and self.size >= self._rules.full_size and self.contributes

    @property
    def enough(self) -> bool:
        """Return whether there are enough members for a group."""
        return self._rules.leads and self.size >= self._rules.min_size

    @property
    def reduces(self) -> bool:
        """Return whether anybody can reduce a slice."""
        return self._rules.reduces or any(member.reduces for member in self.members.values())

    @property
    def contributes(self) -> bool:
        """Return whether anybody has values."""
        return self._rules.contributes or any(member.contributes for member in self.members.values())

    @property
    def can_start(self) -> bool:
        """Return whether these are a group. One without values fails at once on each of its members (decision 0007)."""
        return self.enough and self.reduces

    def why_not(self) -> str:
        """The reason why these peers are no group, for when the window has ended."""
        return f"the window ended with {self.size} of at least {self._rules.min_size} peers"
