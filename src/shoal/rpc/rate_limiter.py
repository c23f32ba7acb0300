"""How much of something each asker may have: a token bucket for each. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["RateLimiter"]


class RateLimiter:
    """A token bucket for each asker: a peer, or a host whatever the number of its keys.

    Args:
        rate_per_s: what each may use in the long run.
        burst: what it may use at once.
        max_askers: for how many this is remembered; the one heard from longest ago is forgotten first.
    """

    def __init__(self, rate_per_s: float, burst: float, *, max_askers: int = 4096) -> None:
        self._rate_per_s, self._burst, self._max_askers = rate_per_s, burst, max_askers
        self._left: dict[Hashable, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def allows(self, asker: Hashable, cost: float, now: float) -> bool:
        """Use `cost` tokens of this asker at this time (seconds on a clock that never goes back), if it has them."""
        left = self._refill(asker, now)
        allowed = cost <= left
        self._put_back(asker, left - cost if allowed else left, now)
        return allowed

    def charge(self, asker: Hashable, cost: float, now: float) -> None:
        """Take `cost` tokens for what was done already; the asker may owe some after it."""
        self._put_back(asker, self._refill(asker, now) - cost, now)

    def _refill(self, asker: Hashable, now: float) -> float:
        left, at = self._left.pop(asker, (self._burst, now))
        return min(self._burst, left + (now - at) * self._rate_per_s)

    def _put_back(self, asker: Hashable, left: float, now: float) -> None:
        self._left[asker] = (left, now)
        if len(self._left) > self._max_askers:
            self._left.pop(next(iter(self._left)))
