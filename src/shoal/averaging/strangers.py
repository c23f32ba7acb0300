"""The peers of a run that have proved nothing yet, and the time that may be lost to all of them. Pure bookkeeping.

Keys are free: whoever has cost a peer its patience comes back under another one. So patience is not counted for each
key, but for all *strangers* together, on one `Account`: what searches and rounds wait for them is paid from it. Another
one is for all others, contributors and leaders (decision 0086).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from shoal.averaging.allreduce.lateness import LEAST_S
from shoal.base.peer import PeerID

__all__ = ["WORTH_S", "Account", "Strangers"]

WORTH_S = 1.0
"""Shorter waits are of little use: newcomers on slow lines would not come."""


class Account:
    """An account of the time that may be lost to some peers.

    Args:
        most_s: seconds, at the beginning and at most.
        part: this part of the time is added.
    """

    def __init__(self, most_s: float, part: float) -> None:
        self._most_s, self._part = most_s, part
        self._left_s, self._at = most_s, -math.inf

    def left_s(self, now: float) -> float:
        """The time that is left (`now`: local time, seconds)."""
        return min(self._most_s, self._left_s + max(0.0, now - self._at) * self._part)

    def is_spent(self, now: float) -> bool:
        """Whether what is left is not worth waiting."""
        return self.left_s(now) < WORTH_S

    def pay(self, seconds: float, now: float) -> None:
        """So much time was lost until now."""
        self._left_s = max(0.0, self.left_s(now - seconds) - seconds)
        self._at = max(now, self._at)


class Strangers(NamedTuple):
    """Who is a stranger now, and what may be lost to strangers, and to all others."""

    known: Collection[PeerID]
    """The others are strangers, unless these are none."""
    account: Account
    others: Account | None = None
    """What may be lost to the others; None: nobody keeps an account."""

    def among(self, peers: Collection[PeerID]) -> frozenset[PeerID]:
        """The strangers among these."""
        return frozenset(peer for peer in peers if peer not in self.known) if self.known else frozenset()

    def patience_s(self, now: float) -> float:
        """How long a round waits for them when all others have done their part, seconds."""
        return 0.0 if self.account.is_spent(now) else self.account.left_s(now)

    def pay(self, peer: PeerID, seconds: float, now: float) -> None:
        """So much time was lost to this peer until now."""
        account = self.account if self.among((peer,)) else self.others
        if account is not None and seconds > 0:
            account.pay(seconds, now)

    def are_spent(self, now: float) -> bool:
        """Whether nothing may be lost to others that are no strangers."""
        return self.others is not None and self.others.is_spent(now)

    def spare_s(self, now: float) -> float:
        """How long a round waits for others that are slower than most, seconds."""
        return math.inf if self.others is None else LEAST_S if self.are_spent(now) else self.others.left_s(now)


NO_STRANGERS = Strangers((), Account(0.0, 0.0))
"""Where nobody knows who has given anything: everybody is waited for."""
