"""Strategies by the names that command lines give them."""

from __future__ import annotations

from shoal.strategies import Decoupled, DiLoCo, LocalSGD, Strategy, StreamingDiLoCo, Synchronous

__all__ = ["NAMES", "named"]

NAMES = ("synchronous", "local", "diloco", "streaming", "decoupled")


def named(name: str, *, every: int | str, fragments: int, quorum: int, overlap: int = 5) -> Strategy:
    """The strategy of this name; those that have no parts or no quorum take none.

    Args:
        name: one of `NAMES`.
        every: batches between two merges of a part, or a time.
        fragments: the number of parts.
        quorum: peers that a merge takes.
        overlap: of streaming, batches; fewer if `every` is not more.
    """
    match name:
        case "synchronous":
            return Synchronous()
        case "local":
            return LocalSGD(every)
        case "diloco":
            return DiLoCo(every)
        case "streaming":
            most = overlap if isinstance(every, str) else max(1, min(overlap, every - 1))
            return StreamingDiLoCo(every, fragments=fragments, overlap=most)
        case "decoupled":
            return Decoupled(every, fragments=fragments, quorum=quorum)
    raise ValueError(f"no strategy is called {name!r}")
