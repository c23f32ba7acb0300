"""How long a trainer stands still for a better state that others say they have. Pure bookkeeping: seconds come in.

Such a claim costs nothing, and nobody can tell beforehand whether the state will be given. So the time is bounded, for
all claims together and under however many keys: `_LIMIT_S` in all, less than 4% of the time in the long run. If a state
was taken over, its wait does not count. When the time is used up, the trainer goes on with its own state. Meanwhile the
better one is fetched, and it is taken over when it is here.
"""

from __future__ import annotations

__all__ = ["Patience"]

_LIMIT_S = 20.0
_REGAINED_S = 600.0
"""All of it comes back in this time."""

_ENOUGH_S = _LIMIT_S / 2
"""A peer that has waited in vain waits again only when it has this much time: not for a moment at each step."""


class Patience:
    """The time that is left to wait."""

    def __init__(self) -> None:
        self._left_s = _LIMIT_S
        self._at: float | None = None
        self._used_up = False

    def left_s(self, now: float) -> float:
        """How long may be waited now (`now`: local time, seconds); 0 for not at all."""
        if self._at is not None:
            self._left_s = min(_LIMIT_S, self._left_s + (now - self._at) * _LIMIT_S / _REGAINED_S)
        self._at = now
        if self._left_s >= _ENOUGH_S:
            self._used_up = False
        return 0.0 if self._used_up else self._left_s

    def waited(self, seconds: float) -> None:
        """So long was waited in vain."""
        self._left_s = max(0.0, self._left_s - seconds)
        self._used_up = self._used_up or self._left_s < 0.01

    def rewarded(self) -> None:
        """A state was taken over."""
        self._left_s, self._used_up = _LIMIT_S, False
