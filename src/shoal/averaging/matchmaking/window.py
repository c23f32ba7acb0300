"""The window of a search: when it ends, until when we declare ourselves, and when the search is over. Sans-IO."""

from __future__ import annotations

import math

from shoal.averaging.matchmaking.config import MatchmakingConfig
from shoal.averaging.matchmaking.declarations import Memory

__all__ = ["Window"]

_LATER_S = 1e-3
_HEAD_START_S = 1.0
"""The leader of the last group declares itself earlier than the others by this, so that it can lead them again."""


class Window:
    """The window of a search: one follows another until the search is over.

    Args:
        config: times.
        memory: holds the last expiration that we declared ourselves with.
        now: loop time, seconds.
        deadline_s: see `GroupMachine`.
        one_window: see `GroupMachine`.

    Attributes:
        ends_at: when this window ends (loop time, seconds).
        over_at: when the search is over, whatever goes on (loop time, seconds); infinity without a deadline.
        expiration: until when we declare ourselves (wall clock, seconds).
    """

    def __init__(
        self, config: MatchmakingConfig, memory: Memory, *, now: float, deadline_s: float | None, one_window: bool
    ) -> None:
        self._window_s, self._timeout_s, self._memory = config.window_s, config.request_timeout_s, memory
        self._started_at = self.ends_at = now
        self.over_at = math.inf if deadline_s is None else now + deadline_s
        last_window = one_window or deadline_s is None
        self._end = min(now + config.window_s, self.over_at) if last_window else self.over_at
        self.expiration = math.inf

    def begin(self, now: float, *, wall_offset_s: float, head_starts: int) -> None:
        """A window begins.

        Args:
            now: loop time, seconds.
            wall_offset_s: wall clock minus loop time, seconds.
            head_starts: we declare ourselves earlier than others by so many head starts.
        """
        self.ends_at = min(now + self._window_s, self._end)
        # Later than our last expiration: others were told between two searches that the last one is over.
        last, self.expiration = self._memory.declared, self.ends_at + wall_offset_s
        self.expiration -= head_starts * min(_HEAD_START_S, self._window_s / 10)
        if 0 <= last - self.expiration < self._window_s:  # a larger gap means that the clock was set back
            self.expiration = last + _LATER_S
        self._memory.declared = self.expiration

    def come_after(self, expiration: float) -> None:
        """From now on we come after the peer that has declared itself until then."""
        self.expiration = self._memory.declared = max(self.expiration, expiration) + _LATER_S

    def is_last(self, now: float) -> bool:
        """Whether no other window begins."""
        return now >= self._end

    @property
    def follow_end(self) -> float:
        """When a leader must have begun (loop time, seconds)."""
        return self.ends_at + self._timeout_s

    def waited(self, now: float) -> str:
        """How long the search took, in words."""
        return f"no group within {now - self._started_at:.1f} s"
