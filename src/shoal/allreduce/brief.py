"""The members of a round that are waited for only briefly. Pure bookkeeping.

Keys are free, and a member that gives nothing costs a round all the time that the others wait for it. So the members
that have proved nothing yet are waited for no longer than this peer can spare for all of them, and those that gave
nothing to the last rounds not at all. They count if they are as fast as the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

__all__ = ["Brief"]


class Brief:
    """Counts how long a round waits for these members alone, and says which of them it waits for no longer.

    Args:
        patience_s: for each of these members, how long it is waited for when all others have done their part, seconds.

    Attributes:
        patience_s: as given.
        waited_s: how long nobody else was waited for, seconds.
        left: those that are not waited for any more.
    """

    def __init__(self, patience_s: Mapping[int, float]) -> None:
        self.patience_s, self.waited_s = dict(patience_s), 0.0
        self.left: set[int] = set()
        self._since: float | None = None

    def add(self, member: int) -> None:
        """This one is not waited for any more when all others have done their part."""
        self.patience_s[member] = 0.0

    def late(self, awaited: Collection[int], now: float) -> list[int]:
        """Those to be left out now, where these are the members that are waited for (`now`: seconds)."""
        if self._since is not None:
            self.waited_s += now - self._since
            self._since = None
        if not awaited or not self.patience_s or not self.patience_s.keys() >= set(awaited):
            return []
        self._since = now
        late = sorted(member for member in awaited if self.waited_s >= self.patience_s[member])
        self.left.update(late)
        return late
