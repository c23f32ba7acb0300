"""The settings of matchmaking: one object, from the arguments of the user's class to the machine. Pure values."""

from __future__ import annotations

import msgspec

from shoal.protocol.wire import MAX_GROUP_SIZE

__all__ = ["CLOCK_GRACE_S", "MANY", "SETTLE_MAX_S", "SETTLE_S", "MatchmakingConfig"]

MANY = 256
"""In a group of more members the leader reduces nothing: it has a connection with each member already."""

SETTLE_S = 0.05
"""The shortest quiet time after a join before a group that is not full may start."""

SETTLE_MAX_S = 10 * SETTLE_S
"""The longest such quiet time."""

CLOCK_GRACE_S = 3.0
"""A declaration counts until this long after its expiration, because clocks differ."""


class MatchmakingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one peer forms groups. `AveragerSettings` extends it, and checks the values.

    Attributes:
        target_group_size: a group of this many members starts at once, at least 2; None: no size is full.
        min_group_size: no group is smaller, and a round that loses more members fails.
        window_s: how long one declaration stands. At its end the group starts, or the peer declares again, or the
            search is over. At most 1800.
        request_timeout_s: the longest wait for another peer's answer while searching; for a declared peer to join; for
            a leader's `Begin` after the end of the own window.
        bandwidth: bytes per second of this peer; 0 reduces nothing; None: as measured, if it was.
        auxiliary: this peer reduces for others; its own tensors are neither read nor changed.
        client_mode: this peer cannot be dialed: it only follows, and never declares, leads or reduces.
    """

    target_group_size: int | None = None
    min_group_size: int = 2
    window_s: float = 15.0
    request_timeout_s: float = 3.0
    bandwidth: float | None = None
    auxiliary: bool = False
    client_mode: bool = False

    @property
    def full_size(self) -> int:
        """The number of members at which a group is full."""
        return self.target_group_size or MAX_GROUP_SIZE
