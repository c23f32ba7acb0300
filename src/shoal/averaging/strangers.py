"""The peers of a run that have proved nothing yet, and the time that may be lost to all of them. Pure bookkeeping.

Keys are free: whoever has cost a peer its patience comes back under another one. So patience is not counted for each
key, but for all *strangers* together, on one `Budget`: what searches and rounds wait for them is paid from it. Another
one is for all others, contributors and leaders (decision 0086).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from shoal.averaging.allreduce.lateness import LEAST_S
from shoal.base.ledger import Budget
from shoal.base.peer import PeerID

__all__ = ["NO_STRANGERS", "Strangers"]


class Strangers(NamedTuple):
    """Who is a stranger now, and what may be lost to strangers, and to all others."""

    known: Collection[PeerID]
    """The others are strangers, unless these are none."""
    budget: Budget
    others: Budget | None = None
    """What may be lost to the others; None: nobody keeps a budget."""

    def among(self, peers: Collection[PeerID]) -> frozenset[PeerID]:
        """The strangers among these."""
        return frozenset(peer for peer in peers if peer not in self.known) if self.known else frozenset()

    def patience_s(self, now: float) -> float:
        """How long a round waits for them when all others have done their part, seconds."""
        return 0.0 if self.budget.is_spent(now) else self.budget.left_s(now)

    def pay(self, peer: PeerID, seconds: float, now: float) -> None:
        """This time was lost to this peer until now."""
        budget = self.budget if self.among((peer,)) else self.others
        if budget is not None and seconds > 0:
            budget.pay(seconds, now)

    def are_spent(self, now: float) -> bool:
        """Whether nothing may be lost to others that are no strangers."""
        return self.others is not None and self.others.is_spent(now)

    def spare_s(self, now: float) -> float:
        """How long a round waits for others that are slower than most, seconds."""
        return math.inf if self.others is None else LEAST_S if self.are_spent(now) else self.others.left_s(now)


NO_STRANGERS = Strangers((), Budget(0.0, 0.0))
"""Where nobody knows who has given anything: everybody is waited for."""
