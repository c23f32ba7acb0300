"""The work on the numbers of parts: one piece of work at a time for each part, in the loop or beside it.

Summing, finishing and receiving a part use the same memory; one lock for each part keeps them apart. Under such a lock
code waits only for the bytes of that part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from shoal.allreduce.partition import Part
from shoal.allreduce.vector import Vector
from shoal.clock import Executor, to_the_end

__all__ = ["PartWork"]

_INLINE_ELEMENTS = 1 << 14
"""Smaller parts are computed in the loop: a hop to another thread would cost more."""

_LIGHT_ELEMENTS = 1 << 19
"""Up to this size the same holds for work that takes little more than a copy: adding, looking for NaN, finishing. A hop
there and back costs the loop 0.1 ms, adding 1 MiB takes as long."""

P = ParamSpec("P")
T = TypeVar("T")


class PartWork:
    """The work on the parts of one round.

    Args:
        vector: the numbers.
        executor: computes large parts.
        parts: how many parts there are.

    Attributes:
        locks: one for each part.
    """

    def __init__(self, vector: Vector, executor: Executor, parts: int) -> None:
        self.locks = [asyncio.Lock() for _ in range(parts)]
        self._vector, self._executor = vector, executor

    async def light(self, part: Part, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `compute`, for work that is small if the codec's work is small."""
        if part.numel <= _LIGHT_ELEMENTS and self._vector.is_light(part):
            return function(*args, **kwargs)
        return await self.compute(part, function, *args, **kwargs)

    async def compute(self, part: Part, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on a part: in the loop or in another thread, as its size advises."""
        if part.numel <= _INLINE_ELEMENTS:
            return function(*args, **kwargs)
        # A function that runs in another thread cannot be stopped: the part is not free until it has ended, even if the
        # caller is cancelled meanwhile. The next attempt gets the memory as soon as it gets the lock.
        return await to_the_end(self._executor.run(function, *args, **kwargs))
