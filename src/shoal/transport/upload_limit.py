"""A limit on all that a peer sends: when the next bytes may go. Pure logic: no loop, no clock.

It is a token bucket for the whole peer, with two kinds of bytes. Small messages go at once, and what they take is
missing to bulk data, which waits: so calls are never late because of the limit. Only if small messages alone are more
than the limit do they wait for each other. A long message counts as bulk data, or it would hold up the small ones.
"""

from __future__ import annotations

from shoal.errors import ConfigError

__all__ = ["MIN_BYTES_PER_S", "SMALL_BYTES", "UploadLimit"]

MIN_BYTES_PER_S = 32 << 10
"""The lowest limit: with less a receiver cannot see that a sender lives."""

SMALL_BYTES = 16 << 10
"""A message of at most this size goes before bulk data."""

_PIECE_S, _BURST_S, _AHEAD_S = 0.05, 0.05, 0.5
"""The time of one piece of bulk data, of what goes at once after a pause, and for which small messages are ahead."""


class UploadLimit:
    """The limit of one peer.

    Args:
        bytes_per_s: at least 32 KiB/s.

    Raises:
        ConfigError: it is too low, or no number.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if isinstance(bytes_per_s, bool) or not isinstance(bytes_per_s, int | float):
            raise ConfigError(f"upload_limit must be a number of bytes per second, or None, got {bytes_per_s!r}")
        if not bytes_per_s >= MIN_BYTES_PER_S:
            raise ConfigError(
                f"upload_limit must be at least {MIN_BYTES_PER_S} bytes per second, got {bytes_per_s!r}: with less the "
                "others would take this peer for a dead one"
            )
        self.bytes_per_s = float(bytes_per_s)
        self._free_at = self._small_free_at = float("-inf")

    @property
    def piece_bytes(self) -> int:
        """The most to reserve at once."""
        return int(min(self.bytes_per_s * _PIECE_S, 1 << 30))

    def reserve(self, nbytes: int, now: float, *, bulk: bool) -> float:
        """Reserve `nbytes`; returns how long to wait from `now`, in seconds, before they may go."""
        if bulk:
            return max(0.0, self.charge(nbytes, now) - now)
        self.charge(nbytes, now)
        starts_at = max(self._small_free_at, now)
        self._small_free_at = starts_at + nbytes / self.bytes_per_s
        return max(0.0, starts_at - now - _AHEAD_S)

    def charge(self, nbytes: int, now: float) -> float:
        """Count bytes that go, or have gone, without being asked for; returns when they would have been free to go."""
        starts_at = max(self._free_at, now - _BURST_S)
        self._free_at = starts_at + nbytes / self.bytes_per_s
        return starts_at
