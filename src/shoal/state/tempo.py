"""The pace of one donor's chunks, and its consequences. Pure logic: `now` is an argument.

Two questions are answered: how many chunks to ask for ahead, so that the donor never waits for our next message; and
when a chunk that it was asked for will be here, which tells whether to ask another donor for it too.
"""

from __future__ import annotations

__all__ = ["Tempo"]

_AHEAD_S = 0.5
"""Chunks for this long are asked for ahead: more than any round trip takes."""

MIN_AHEAD = 2
MAX_AHEAD = 64

_WEIGHT = 0.3
"""The weight of the latest gap between two chunks in the mean."""


class Tempo:
    """The pace of one donor. `asked` and `arrived` say what happens, in order."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._since = 0.0

    def asked(self, now: float) -> None:
        """The donor, which had nothing to send, was asked for chunks."""
        self._since = now

    def arrived(self, now: float) -> None:
        """A whole chunk has come."""
        gap_s = max(now - self._since, 1e-6)
        self._mean_s = gap_s if self._mean_s is None else (1 - _WEIGHT) * self._mean_s + _WEIGHT * gap_s
        self._since = now

    def ahead(self) -> int:
        """Return how many chunks should be under way."""
        if self._mean_s is None:
            return MIN_AHEAD
        return min(MAX_AHEAD, MIN_AHEAD + int(_AHEAD_S / self._mean_s))

    def takes_s(self, chunks: int) -> float:
        """Return how long so many chunks take in general; 0 if none has come yet."""
        return chunks * (self._mean_s or 0.0)

    def due_s(self, place: int, now: float) -> float:
        """Return how long until the chunk at this place of the queue is here: 0 is the one that comes now.

        A donor that is late is taken to be later still, by as long as it has been late.
        """
        waited_s, mean_s = now - self._since, self._mean_s or 0.0
        return max(mean_s, waited_s) * (place + 1) - min(mean_s, waited_s)
