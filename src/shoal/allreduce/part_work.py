"""Where the numbers of a part are worked on: one piece of work at a time for each part, in the loop or beside it.

One lock for each part keeps what is summed, finished or received in its place apart. Nothing waits under such a lock
but the bytes of that part.
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
"""Up to this size the same holds for what takes little more than a copy: adding, looking for NaN, finishing. A hop
there and back costs the loop 0.1 ms, adding 1 MiB takes as long."""

P = ParamSpec("P")
T = TypeVar("T")


class PartWork:
    """The work on the parts of one round.

    Args:
        vector: the numbers.
        executor: where large parts are computed.
        parts: how many parts there are.

    Attributes:
        locks: one for each part.
    """

    def __init__(self, vector: Vector, executor: Executor, parts: int) -> None:
        self.locks = [asyncio.Lock() for _ in range(parts)]
        self._vector, self._executor = vector, executor

    async def light(self, part: Part, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `compute`, for what is little work where the codec is little work."""
        if part.numel <= _LIGHT_ELEMENTS and self._vector.is_light(part):
            return function(*args, **kwargs)
        return await self.compute(part, function, *args, **kwargs)

    async def compute(self, part: Part, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on a part: in the loop or in another thread, as its size advises."""
        if part.numel <= _INLINE_ELEMENTS:
            return function(*args, **kwargs)
        # A function that runs in another thread cannot be stopped: until it has ended the part is not free, also for
        # who is cancelled meanwhile. Its memory is given to the next attempt as soon as the lock is.
        return await to_the_end(self._executor.run(function, *args, **kwargs))
