"""How much each asker may use: a token bucket for each. This is pure bookkeeping."""

from __future__ import annotations

from collections.abc import Hashable

from shoal.base.bounded import put_last

__all__ = ["RateLimiter"]


class RateLimiter:
    """A token bucket for each asker: for each peer, or for each host however many keys it has.

    Args:
        rate_per_s: tokens a second that each asker may use in the long run.
        burst: tokens that it may use at once.
        max_askers: how many askers are remembered; the one heard from longest ago is forgotten first.
    """

    def __init__(self, rate_per_s: float, burst: float, *, max_askers: int = 4096) -> None:
        self._rate_per_s, self._burst, self._max_askers = rate_per_s, burst, max_askers
        self._left: dict[Hashable, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def allows(self, asker: Hashable, cost: float, now: float) -> bool:
        """Use `cost` tokens of this asker if it has them. `now` is seconds on a clock that never goes back."""
        left = self._refill(asker, now)
        allowed = cost <= left
        put_last(self._left, asker, (left - cost if allowed else left, now), self._max_askers)
        return allowed

    def charge(self, asker: Hashable, cost: float, now: float) -> None:
        """Take `cost` tokens for work that was done already. The asker may owe some afterwards."""
        put_last(self._left, asker, (self._refill(asker, now) - cost, now), self._max_askers)

    def _refill(self, asker: Hashable, now: float) -> float:
        left, at = self._left.get(asker, (self._burst, now))
        return min(self._burst, left + (now - at) * self._rate_per_s)
