"""Which members of a round are late, and how much time they cost. Pure bookkeeping.

Senders, reducers and receivers are each compared among themselves. The median of them takes some time to do its part;
twice that is *usual*. What a round waits beyond that is lost, and is paid from an account (decision 0086). A member is
*late* that takes longer than usual by more than a margin. So nobody is late that needs at most twice as long as the
median, and nobody as long as the median is not done: a slow network is slow for all.

Of receivers the first third says what is usual, and the margin is always the least one (decision 0105). A round loses
nothing by a receiver that it does not wait for: its values count, and it can get the averages after the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["LEAST_S", "Lateness"]

LEAST_S = 0.25
"""Nobody is late by less than this, seconds."""


class Lateness:
    """When members have done their part of a round.

    Args:
        members: those that are compared.
        now: when they begin: local time, seconds.
        least_s: at least this is usual, seconds: some may have announced slow lines (`slow_lines`).
        first: one of so many of them says what is usual; 2: the median.

    Attributes:
        left_out: those that were waited for no longer, and since when. They are not compared any more.
    """

    def __init__(self, members: Iterable[int], *, now: float, least_s: float = 0.0, first: int = 2) -> None:
        self._members, self._least_s, self._first = set(members), least_s, first
        self._done_at: dict[int, float] = {}
        self.left_out: dict[int, float] = {}
        self.begin(now)

    def begin(self, now: float) -> None:
        """They begin now."""
        self._began = self._anew = now

    def again(self, now: float) -> None:
        """Others took over what was not done: those that are waited for now get the usual time once more."""
        self._anew = now

    def done(self, members: Iterable[int], now: float) -> None:
        """These have done their part; the first time counts."""
        for member in self._members.intersection(members):
            self._done_at.setdefault(member, now)

    def leave(self, member: int) -> None:
        """This one is not compared any more."""
        self._members.discard(member)

    def forget(self, member: int) -> None:
        """This one is gone: that is no lateness."""
        self.leave(member)
        self.left_out.pop(member, None)

    def leave_out(self, member: int, now: float) -> None:
        """This one is not waited for any more."""
        if member in self._members:
            self.leave(member)
            self.left_out[member] = now

    @property
    def usual_until(self) -> float:
        """Until when it is usual to wait; infinite as long as too few are done."""
        done, middle = self._times(), (len(self._members) - 1) // self._first
        if len(done) <= max(middle, 0):
            return math.inf
        return max(self._anew + 2 * (done[middle] - self._began), self._began + self._least_s)

    def lost_s(self, until: float | None = None) -> float:
        """How much longer than usual was waited until then, or until the last was done or left out, seconds."""
        last = max([self._began, *self._times(), *self.left_out.values()])
        return max(0.0, (last if until is None else until) - self.usual_until)

    def late(self, margin_s: float) -> set[int]:
        """Those that were done, or left out, later than usual by more than this margin."""
        ends, limit = {**self.left_out, **self._done_at}, self.usual_until + margin_s
        return {member for member, at in ends.items() if at > limit}

    def _times(self) -> list[float]:
        return sorted(at for member, at in self._done_at.items() if member in self._members)
