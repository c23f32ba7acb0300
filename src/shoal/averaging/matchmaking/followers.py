"""The peers that a leader has accepted: are they a group with it, and which of them gives way to another? Sans-IO."""

from __future__ import annotations

from shoal.averaging.matchmaking.config import MatchmakingConfig
from shoal.averaging.matchmaking.events import JoinRequested, Precedence
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.protocol.wire import Member

__all__ = ["Followers"]


class Followers(dict[PeerID, JoinRequested]):
    """The peers that a leader has accepted and that have neither left nor been sent away.

    Args:
        leader: the leader's word about itself.
        config: the sizes of groups.
        precedence: of the others: which of them are strangers.
    """

    def __init__(self, leader: Member, config: MatchmakingConfig, precedence: Precedence) -> None:
        super().__init__()
        self._leader, self._config, self._precedence = leader, config, precedence
        self._leads = bool(leader.contact.addresses)

    @property
    def size(self) -> int:
        """The size of the group, including the leader."""
        return 1 + len(self)

    @property
    def full(self) -> bool:
        """Return whether nobody else may join."""
        return self._leads and self.size >= self._config.full_size and self.contributes

    @property
    def enough(self) -> bool:
        """Return whether there are enough members for a group."""
        return self._leads and self.size >= self._config.min_group_size

    @property
    def reduces(self) -> bool:
        """Return whether anybody can reduce a share."""
        return self._leader.reduces or any(each.reduces for each in self.values())

    @property
    def contributes(self) -> bool:
        """Return whether anybody has values."""
        return self._leader.contributes or any(each.contributes for each in self.values())

    @property
    def can_start(self) -> bool:
        """Return whether these are a group. One without values fails at once on each of its members (decision 0007)."""
        return self.enough and self.reduces

    def has_place(self, peer: PeerID) -> bool:
        """Return whether this peer can join, or has joined, and nobody has to go."""
        return peer in self or self.size < self._config.full_size

    def gives_way(self, asker: JoinRequested) -> PeerID | None:
        """The follower in a full group whose place this peer takes; None if there is none."""
        if not self.contributes and asker.contributes:  # nobody has values yet
            sometimes("a peer with values takes the place of an auxiliary one")
            return next(reversed(self))
        if self._precedence.is_strange(asker.contact.peer):
            return None
        return next((peer for peer in reversed(self) if self._precedence.is_strange(peer)), None)
