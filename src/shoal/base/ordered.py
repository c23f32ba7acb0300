"""A set that is read in the order in which things were put into it."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["OrderedSet"]

T = TypeVar("T")


class OrderedSet(dict[T, None]):
    """A set of objects of ours, in the order in which they came.

    Python orders a set of them by their addresses in memory. Whoever is served first would then differ from run to run,
    and a simulation would not repeat by its seed.
    """

    def add(self, item: T) -> None:
        """Put it at the end, unless it is there."""
        self.setdefault(item, None)

    def discard(self, item: T) -> None:
        """Take it out, if it is there."""
        self.pop(item, None)
