"""Time, chance and threads as arguments, so that a whole swarm can run on virtual time from one seed.

Code above the sans-IO parts is async and waits through the running asyncio loop (`asyncio.timeout`, `call_later`),
whose time the simulator replaces. What the loop does not give is here: the wall clock that record expirations are
written in, the random source, and the executor that tensor work runs in. `Env` carries all of them, and the event bus,
to every part.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor as ConcurrentExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar

from shoal.events import EventBus

__all__ = [
    "Backoff",
    "Clock",
    "Env",
    "Executor",
    "InlineExecutor",
    "SystemClock",
    "ThreadExecutor",
    "get_dht_time",
    "to_the_end",
]

P = ParamSpec("P")
T = TypeVar("T")


class Clock(Protocol):
    """Reads the time; never waits."""

    def time(self) -> float:
        """Wall-clock time in seconds since the epoch: for expirations that other peers read."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back: for deadlines and durations within this process."""
        ...


class SystemClock:
    """The clock of the machine."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


def get_dht_time() -> float:
    """Wall-clock seconds, in which expirations of DHT records and scheduled times are given."""
    return time.time()


class Executor(Protocol):
    """Runs functions that compute (encode, decode, reduce, hash) away from the loop."""

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` and return what it returns, or raise what it raises."""
        ...


class InlineExecutor:
    """Runs the function at once in the loop: for simulation, where everything must follow from the seed."""

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)


class ThreadExecutor:
    """Runs functions in a thread pool that somebody else (`runtime`) starts and stops."""

    def __init__(self, pool: ConcurrentExecutor) -> None:
        self._pool = pool

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))


async def to_the_end(work: Awaitable[T]) -> T:
    """Wait for what must not be left half done: who is cancelled meanwhile is so only when it has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nobody asks for it any more
        raise


@dataclass(frozen=True, slots=True)
class Env:
    """What a part of shoal needs from its surroundings, handed in so that tests can hand in something else.

    Attributes:
        clock: reads the time.
        rng: the only source of chance. Not used for keys and nonces of real peers.
        executor: where tensor work runs.
        events: where the part tells what happened.
        prompt: makes a block in which the loop's thread is not kept waiting by the program's own threads.
    """

    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random = field(default_factory=random.Random)
    executor: Executor = field(default_factory=InlineExecutor)
    events: EventBus = field(default_factory=EventBus)
    prompt: Callable[[], AbstractContextManager[None]] = nullcontext


class Backoff:
    """Growing, jittered pauses between tries.

    Args:
        rng: source of the jitter.
        first_s: the first pause, seconds.
        max_s: no pause is longer, seconds.
        factor: growth from one pause to the next.
    """

    def __init__(self, rng: random.Random, *, first_s: float = 0.1, max_s: float = 5.0, factor: float = 2.0) -> None:
        self._rng, self._first_s, self._max_s, self._factor = rng, first_s, max_s, factor
        self._next_s = first_s

    def next_s(self) -> float:
        """The length of the next pause in seconds: between half of the current step and all of it."""
        pause_s = self._next_s * (0.5 + 0.5 * self._rng.random())
        self._next_s = min(self._max_s, self._next_s * self._factor)
        return pause_s

    def reset(self) -> None:
        """Start again from `first_s`, after a success."""
        self._next_s = self._first_s
