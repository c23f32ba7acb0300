"""How much one host may ask of us: calls cost, and a host that has spent too much is not read for a while. Bookkeeping.

Keys are free, so the host counts, with all its peers and links together. Honest peers stay far below the limit: the
messages of 1,000 others take 2% of a core, some 200 calls a second. TCP holds back data that is not read.
"""

from __future__ import annotations

__all__ = ["Allowance", "call_cost"]

_BURST_S = 4.0
"""So much of the future may be spent at once."""

_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
"""Each time that a link is read again disturbs the trainer: rather seldom and more at once. But never so seldom that
the link seems dead."""

_BYTES_PER_CALL = 256
"""A message costs as much as a small call for each so many bytes."""


def call_cost(nbytes: int) -> float:
    """The cost of a message of so many bytes, in small calls."""
    return 1.0 + nbytes / _BYTES_PER_CALL


class Allowance:
    """Of one host.

    Args:
        rate: small calls a second that it may go on asking for.
        now: local time, seconds.
    """

    def __init__(self, rate: float, now: float) -> None:
        self._left, self._at = rate * _BURST_S, now
        self.links = 0
        """That share it now."""

    def is_over(self, now: float) -> bool:
        """Whether nobody needs it, and a new one would be no better."""
        return not self.links and now - self._at > 2 * _BURST_S

    def spend(self, cost: float, rate: float, now: float) -> float:
        """Count this; how long nothing more is to be read, seconds.

        Args:
            cost: in small calls.
            rate: that this host has now, calls a second.
            now: local time, seconds.
        """
        # A debt is bounded as a pause is: honest peers of the same host go on when the others have stopped.
        self._left = max(min(rate * _BURST_S, self._left + (now - self._at) * rate) - cost, -rate * _LONGEST_PAUSE_S)
        self._at = now
        if self._left >= 0.0:
            return 0.0
        return min(max(-self._left / rate, _LEAST_PAUSE_S), _LONGEST_PAUSE_S)
