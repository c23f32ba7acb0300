"""Strategies by the names that command lines give them."""

from __future__ import annotations

from shoal.strategies import Decoupled, DiLoCo, LocalSGD, Strategy, StreamingDiLoCo, Synchronous

__all__ = ["NAMES", "named"]

NAMES = ("synchronous", "local", "diloco", "streaming", "decoupled")


def named(name: str, *, every: int, fragments: int, quorum: int) -> Strategy:
    """The strategy of this name; those that have no parts or no quorum take none.

    Args:
        name: one of `NAMES`.
        every: batches between two merges of a part.
        fragments: the number of parts.
        quorum: peers that a merge takes.
    """
    match name:
        case "synchronous":
            return Synchronous()
        case "local":
            return LocalSGD(every)
        case "diloco":
            return DiLoCo(every)
        case "streaming":
            return StreamingDiLoCo(every, fragments=fragments, overlap=max(1, min(5, every - 1)))
        case "decoupled":
            return Decoupled(every, fragments=fragments, quorum=quorum)
    raise ValueError(f"no strategy is called {name!r}")
