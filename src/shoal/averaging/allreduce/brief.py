"""The members of a round that are waited for only briefly. Pure bookkeeping.

Keys are free, and a member that gives nothing costs a round all the time that the others wait for it. So the members
that have proved nothing yet are waited for no longer than this peer can spare for all of them, and those that gave
nothing to the last rounds not at all. They count if they are as fast as the others: for a moment, up to the *usual*
time of the others (`Lateness`), each is waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal.averaging.allreduce.lateness import LEAST_S

__all__ = ["Brief"]


class Brief:
    """Counts how long a round waits for these members alone, and says which of them it waits for no longer.

    Args:
        patience_s: for each of these members, how long it is waited for beyond that when all others have done their
            tile, seconds.

    Attributes:
        patience_s: as given.
        waited_s: how long nobody else was waited for, beyond that, seconds.
        left: those that are not waited for any more.
    """

    def __init__(self, patience_s: Mapping[int, float]) -> None:
        self.patience_s, self.waited_s = dict(patience_s), 0.0
        self.left: set[int] = set()
        self._since: float | None = None

    def add(self, member: int) -> None:
        """This one is not waited for any more when all others have done their part."""
        self.patience_s[member] = 0.0

    def late(self, awaited: Collection[int], now: float, usual_until: float) -> list[int]:
        """Those to be left out now.

        Args:
            awaited: the members that are waited for.
            now: seconds.
            usual_until: until then it is usual to wait; but no longer than `LEAST_S` for these alone.
        """
        if self._since is not None:
            self.waited_s += max(0.0, now - self._since)
        if not awaited or not self.patience_s or not self.patience_s.keys() >= set(awaited):
            self._since = None
            return []
        self._since = max(now, min(usual_until, now + LEAST_S) if self._since is None else self._since)
        if now < self._since:
            return []
        late = sorted(member for member in awaited if self.waited_s >= self.patience_s[member])
        self.left.update(late)
        return late
