"""The pace at which a donor sends: arithmetic that says when the next bytes may go. Pure logic: no loop, no clock.

`Pacer` is a fixed limit. Each sender reserves one piece at a time and waits for as long as it is told, so senders take
turns and share the rate evenly. After a pause at most `burst_s` worth of bytes goes at once.

`BackgroundLimit` keeps newcomers from slowing this peer's main work: as long as it sends other things (rounds of
averaging), states get a fraction of that traffic. If all bytes cost the same, on a line or on a processor, a round
takes longer by about that fraction, however many newcomers there are. The rule measures the rounds' own traffic, so it
needs to know neither the line nor the processor, nor when a round begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from shoal.errors import ConfigError

__all__ = ["BackgroundLimit", "Pacer"]

MIN_BYTES_PER_S = 32 << 10
"""The lowest upload limit."""

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
        """Return how many of `nbytes` to reserve at once."""
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


QUIET_BYTES = 64 << 10
"""Other traffic below this, within the window, is no round."""

FREE_PIECE_BYTES, QUICK_PIECE_BYTES = 256 << 10, 1 << 20
"""Before each piece the pacer checks whether a round has begun. The larger pieces are for very fast lines."""

QUICK_S = 0.02
"""The next piece is twice as large if it may go so soon after the one before."""

HELD_PIECE_BYTES = 64 << 10
"""A piece beside rounds."""

LONGEST_HOLD_S = 1.5
"""A piece is not held for longer: so every receiver gets 43 kB/s, which is no stall."""

LOOK_AGAIN_S = 0.02
_WINDOW_S = 0.5
"""The time over which traffic is compared."""

_WATCH_S = 0.1
"""Nothing is sent before other traffic was watched for so long: sent bytes cannot leave the queues of the line."""


class BackgroundLimit:
    """Compares the traffic of states with all other traffic, over the last half second.

    Attributes:
        busy: whether there was other traffic at the last look.
    """

    def __init__(self) -> None:
        self._state_bytes = 0
        self._samples: deque[tuple[float, int, int]] = deque()
        self.busy = False
        self._free_bytes, self._sent_at = FREE_PIECE_BYTES, float("-inf")

    @property
    def piece_bytes(self) -> int:
        """The largest piece to send at once."""
        return HELD_PIECE_BYTES if self.busy else self._free_bytes

    def must_wait(self, fraction: float, now: float, other_bytes: Callable[[], int]) -> bool:
        """Whether states have used up their share, or may have: then look again after `LOOK_AGAIN_S`.

        Args:
            fraction: the fraction of the other traffic that states may have.
            now: seconds.
            other_bytes: bytes that this peer has sent so far, beside states. Called only as often as needed.
        """
        samples = self._samples
        if not samples or now - samples[-1][0] >= LOOK_AGAIN_S:
            samples.append((now, other_bytes(), self._state_bytes))
        while len(samples) > 2 and samples[1][0] <= now - _WINDOW_S:
            samples.popleft()
        (since, other_before, state_before), (_, other_now, _) = samples[0], samples[-1]
        if now - since < _WATCH_S:
            return True
        other = other_now - other_before
        self.busy = other >= QUIET_BYTES
        return self.busy and self._state_bytes - state_before > fraction * other

    def sent(self, nbytes: int, now: float) -> None:
        """Count so many bytes of a state, which go now."""
        self._state_bytes += nbytes
        quick = now - self._sent_at < QUICK_S
        self._free_bytes = min(2 * self._free_bytes, QUICK_PIECE_BYTES) if quick else FREE_PIECE_BYTES
        self._sent_at = now
