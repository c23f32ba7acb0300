"""Tensors that hardly move: an average that moves them by less than 16 bits can hold is lost, each time.

Only who reduces a tile knows its average in float32. So it looks, at some of its elements, whether the average is
another than the one before, and is that one again once it is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shoal.layout import Tile

__all__ = ["StillWatch"]

_ELEMENTS = 1 << 16
"""About so many elements are looked at in a round."""

_SHARE, _ROUNDS = 0.2, 5
"""The share of the elements that were to move and did not, in so many rounds one after another, which is told."""


class StillWatch:
    """Looks at the averages of one list of tensors that go on from them, as parameters do.

    Args:
        elements: of all tensors.
    """

    def __init__(self, elements: int) -> None:
        self._every = -(-elements // _ELEMENTS) or 1
        self._before: dict[str, torch.Tensor] = {}  # each so many-th average of the last round, by segment
        self._lost = self._meant = self._in_a_row = 0
        self._narrow = ""

    def begin(self) -> None:
        """A round begins; the last one may have failed."""
        self._lost = self._meant = 0

    def sample(self, values: torch.Tensor, offset: int) -> torch.Tensor:
        """A copy of the elements to look at, of values that begin so many places within a segment."""
        return values[-offset % self._every :: self._every].to(torch.float32, copy=True)

    def look(self, tile: Tile, average: torch.Tensor, rounded: torch.Tensor, narrow: str) -> None:
        """A tile was averaged, and rounded to this dtype.

        Args:
            tile: which.
            average: `sample` of the average.
            rounded: all of it, in its place.
            narrow: name of the dtype.
        """
        if (known := self._before.get(tile.name)) is None:
            return
        first = -(-tile.start // self._every)
        before, now = known[first : first + average.numel()], self.sample(rounded, tile.start)
        meant = average != before
        self._meant += int(meant.count_nonzero())
        self._lost += int((meant & (now == before)).count_nonzero())
        self._narrow = narrow

    def committed(self, averages: Mapping[str, torch.Tensor]) -> str | None:
        """The round counts.

        Args:
            averages: of the segments that are rounded, by name.

        Returns:
            What is to be told: which share stood still, and for what dtype. Once, and again if they have moved since.
        """
        self._before = {segment: self.sample(values, 0) for segment, values in averages.items()}
        if not self._meant:
            return None
        share = self._lost / self._meant
        self._in_a_row = self._in_a_row + 1 if share > _SHARE else 0
        if self._in_a_row != _ROUNDS:
            return None
        return (
            f"{share:.0%} of the elements did not move by the average, because {self._narrow} cannot hold so small a "
            "change"
        )
