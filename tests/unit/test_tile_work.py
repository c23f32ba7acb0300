"""The work on tiles: a tile is free when no thread touches its memory any more, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

import torch

from shoal import sim
from shoal.averaging.allreduce.round_tiles import TileWork
from shoal.averaging.allreduce.vector import Vector, describe
from shoal.compression import Uniform8BitQuantization

P = ParamSpec("P")
T = TypeVar("T")

NUMEL = 100_000
"""More than is computed in the loop."""


class SlowExecutor:
    """Begins at once, and does it when it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As a thread would: nobody can stop it."""
        await self.go.wait()
        return function(*args, **kwargs)


def test_a_tile_is_not_free_while_a_thread_works_on_it() -> None:
    """The waiting task is cancelled: the next attempt of the tile, in the same memory, waits for the thread."""

    async def main() -> None:
        tensors = [torch.zeros(NUMEL)]
        vector = Vector(tensors, describe(tensors, [Uniform8BitQuantization()]))
        executor, order = SlowExecutor(), list[str]()
        tile = vector.tiling([NUMEL], 1 << 20).tiles[0]
        work = TileWork(vector, executor, 1)

        async def attempt(name: str) -> None:
            async with work.locks[0]:
                await work.light(tile, order.append, name)

        first = asyncio.create_task(attempt("first"))
        await sim.sleep(0.1)
        second = asyncio.create_task(attempt("second"))
        for _ in range(5):
            await sim.sleep(0.1)
            first.cancel()
        assert work.locks[0].locked()
        assert not first.done()
        executor.go.set()
        with suppress(asyncio.CancelledError):
            await first
        await second
        assert order == ["first", "second"]

    sim.run(main)
