"""How fast a peer is: samples per second, smoothed over the last seconds."""

from __future__ import annotations

__all__ = ["RateMeter"]

_PERIOD_S = 0.5
_NEW_SHARE = 0.3


class RateMeter:
    """Counts samples, from any thread; `measure` is called now and then.

    Attributes:
        rate: samples per second; 0 before anything was measured.
        processed: samples so far.
        batches: in how many batches.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self.processed = self.batches = 0
        self._last: tuple[int, float] | None = None

    def count(self, samples: int) -> None:
        """So many were processed, whether they counted for a step or not."""
        self.processed += samples
        self.batches += 1

    def measure(self, now: float) -> None:
        """Bring the rate up to date; `now` in seconds."""
        if self._last is None:
            self._last = self.processed, now
        processed, since = self._last
        if now - since >= _PERIOD_S:
            rate = (self.processed - processed) / (now - since)
            self.rate = (1 - _NEW_SHARE) * self.rate + _NEW_SHARE * rate if self.rate else rate
            self._last = self.processed, now
