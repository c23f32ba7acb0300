"""An upload limit, as arithmetic: when may the next bytes go. Pure logic: no loop, no clock.

Each sender reserves one piece at a time and waits for as long as it is told, so senders take turns and share the rate
evenly. After a pause at most `burst_s` worth of bytes goes at once.
"""

from __future__ import annotations

from shoal.errors import ConfigError

__all__ = ["Pacer"]

MIN_BYTES_PER_S = 32 << 10
_PIECE_S = 0.125
_BURST_S = 0.25


class Pacer:
    """Shares a rate among senders.

    Args:
        bytes_per_s: the rate, at least 32 KiB/s; None for no limit.

    Raises:
        ConfigError: the rate is too low for receivers to see that the donor lives.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and not bytes_per_s >= MIN_BYTES_PER_S:
            raise ConfigError(
                f"an upload limit of {bytes_per_s} bytes/s is too low for sharing state: "
                f"allow {MIN_BYTES_PER_S} or more, or share none"
            )
        self._bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    def piece_bytes(self, nbytes: int) -> int:
        """How many of `nbytes` to reserve at once."""
        if self._bytes_per_s is None:
            return nbytes
        return max(1, min(nbytes, int(self._bytes_per_s * _PIECE_S)))

    def reserve(self, nbytes: int, now: float) -> float:
        """Reserve `nbytes`; returns how long to wait from `now`, in seconds, before they may go."""
        if self._bytes_per_s is None:
            return 0.0
        starts_at = max(self._free_at, now - _BURST_S)
        self._free_at = starts_at + nbytes / self._bytes_per_s
        return max(0.0, starts_at - now)
