"""Who was waited for in vain, and how much time may be lost so: a backoff for each peer, a budget for all together.

Pure bookkeeping: times are arguments. Rounds and runs keep all their accounts of others with these two.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from shoal.base.bounded import put_last

__all__ = ["WORTH_S", "Budget", "Ledger"]

K = TypeVar("K", bound=Hashable)

WORTH_S = 1.0
"""Shorter waits are of little use: newcomers on slow lines would not come."""

_MAX_REMEMBERED = 4096

_OUTWEIGHED_S = 10.0
"""A failure that cost a second is forgiven so many seconds later at the earliest: a peer that fails every other time
costs the others a tenth of their time at most."""


class _Record(NamedTuple):
    """The failures of one: their weight, the last pause for them and its end, and from when on it can be forgiven."""

    weight: float = 0.0
    pause: float = 0.0
    until: float = -math.inf
    forgivable: float = -math.inf


class Ledger(Generic[K]):
    """Remembers who has failed others, and until when nobody counts on them.

    A failure may be chance. Those that are not free begin a pause, in which nobody counts on who has failed. Then it
    has another chance. After each further failure the pause is twice as long. Who does what it should is forgiven, once
    ten times as much time has passed as it has cost.

    Args:
        first: the first pause: seconds, or whatever `now` counts in the methods.
        longest: no pause is longer.
        free: failures up to this weight begin no pause.
        costly_s: a failure that costs as much time begins a pause at once, which lasts until it can be forgiven.
    """

    def __init__(self, first: float, longest: float, *, free: float = 1.0, costly_s: float = math.inf) -> None:
        self._first, self._longest, self._free, self._costly_s = first, longest, free, costly_s
        self._failed: dict[K, _Record] = {}

    def failed(self, who: K, now: float, cost_s: float = 0.0, *, weight: float = 1.0) -> int:
        """Somebody failed: that cost so much time, and weighs as much.

        Returns:
            How many times it has failed and was not forgiven, if a pause begins; else 0.
        """
        before = self._failed.get(who, _Record())
        weight, forgivable = before.weight + weight, max(before.forgivable, now + _OUTWEIGHED_S * cost_s)
        pause, until = before.pause, before.until
        if begins := weight > self._free:
            pause = min(2 * pause, self._longest) or self._first
            until = now + pause
        if costly := cost_s >= self._costly_s:
            until = max(until, forgivable)
        put_last(self._failed, who, _Record(weight, pause, until, forgivable), _MAX_REMEMBERED)
        return int(weight) if begins or costly else 0

    def condemn(self, who: K, now: float) -> None:
        """Somebody has failed others on purpose: the longest pause begins, and it is not forgiven before its end."""
        weight, until = self._failed.get(who, _Record()).weight + 1, now + self._longest
        put_last(self._failed, who, _Record(weight, self._longest, until, until), _MAX_REMEMBERED)

    def forgive(self, who: K, now: float = math.inf) -> None:
        """Somebody did what it should; without a time what it has cost does not matter."""
        if who in self._failed and now >= self._failed[who].forgivable:
            del self._failed[who]

    def clear(self) -> None:
        """All is forgiven: the reason was here, and is gone."""
        self._failed.clear()

    def pausing(self, now: float) -> frozenset[K]:
        """Those whose pause is not over."""
        return frozenset(who for who, failed in self._failed.items() if failed.until > now)

    def until(self, who: K) -> float:
        """When the last pause of this one is over."""
        return self._failed[who].until if who in self._failed else -math.inf

    @property
    def unforgiven(self) -> frozenset[K]:
        """Those that have failed and were not forgiven, whether their pause is over or not."""
        return frozenset(self._failed)


class Budget:
    """The time that may be lost to some peers, however many they are: a token bucket.

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
        """This time was lost until now."""
        self._left_s = max(0.0, self.left_s(now - seconds) - seconds)
        self._at = max(now, self._at)
