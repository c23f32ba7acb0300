"""Dictionaries that keep their latest entries only."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

__all__ = ["bound", "put_last"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def bound(remembered: dict[Any, Any], most: int) -> None:
    """Forget the oldest entries of this until it has so many at most."""
    while len(remembered) > most:
        del remembered[next(iter(remembered))]


def put_last(remembered: dict[K, V], key: K, value: V, most: int) -> None:
    """Set an entry, which is the newest then, and forget the oldest ones beyond `most`."""
    remembered.pop(key, None)
    remembered[key] = value
    bound(remembered, most)
