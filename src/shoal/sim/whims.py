"""Whims of machines and networks: rare, harmless each by itself, and on in every real run.

A fault plan names a host and a time. Whims have neither: bytes come in pieces or late, a connection breaks, a timer
fires late, hosts take their turns in another order, work takes time. A program that is right allows for all of them, at
every line. Each run draws which whims it has, and how strong they are, from its seed (`Whims.drawn`); a failure prints
them. The idea is FoundationDB's *buggify*.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import msgspec

__all__ = ["Mischief", "SlowExecutor", "Whims"]

P = ParamSpec("P")
T = TypeVar("T")

_MOST_PIECES = 4


class Whims(msgspec.Struct, frozen=True, kw_only=True):
    """How often each whim comes, and how much it takes. None of them at 0, the default.

    Attributes:
        short_reads: the share of deliveries whose bytes come in several pieces.
        late_bytes: the share of segments that come late.
        late_bytes_s: they come up to this much later, seconds.
        resets: the share of deliveries with which a connection breaks, on both sides.
        late_timers_s: each timer fires up to this much late, seconds.
        other_order: whether hosts that have something to do at the same instant take turns in another order.
        slow_work: the share of functions given to the executor that take time.
        slow_work_s: they take up to this long, seconds.
    """

    short_reads: float = 0.0
    late_bytes: float = 0.0
    late_bytes_s: float = 0.0
    resets: float = 0.0
    late_timers_s: float = 0.0
    other_order: bool = False
    slow_work: float = 0.0
    slow_work_s: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random) -> Whims:
        """Draw the whims of one run: each of them is there in half of the runs."""

        def maybe(*values: float) -> float:
            return rng.choice((0.0,) * len(values) + values)

        return cls(
            short_reads=maybe(0.1, 0.9),
            late_bytes=maybe(0.001, 0.05),
            late_bytes_s=rng.choice((0.05, 0.3)),
            resets=maybe(0.0001, 0.001),
            late_timers_s=maybe(0.001, 0.02),
            other_order=rng.random() < 0.5,
            slow_work=maybe(0.01, 0.3),
            slow_work_s=rng.choice((0.01, 0.2)),
        )


class Mischief:
    """The whims of one run, and its chance.

    Args:
        whims: which.
        rng: the source of chance.
    """

    def __init__(self, whims: Whims, rng: random.Random) -> None:
        self.whims, self._rng = whims, rng

    def calm(self) -> None:
        """No more whims from now on."""
        self.whims = Whims()

    def _comes(self, share: float) -> bool:
        return share > 0 and self._rng.random() < share

    def _up_to(self, most_s: float) -> float:
        return self._rng.random() * most_s

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """The bytes of a delivery, as they come."""
        if not self._comes(self.whims.short_reads):
            yield data
            return
        cuts = sorted(self._rng.randrange(len(data) + 1) for _ in range(self._rng.randrange(1, _MOST_PIECES)))
        for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
            if start < stop:
                yield data[start:stop]

    def late_s(self) -> float:
        """How much later a segment comes."""
        return self._up_to(self.whims.late_bytes_s) if self._comes(self.whims.late_bytes) else 0.0

    def breaks(self) -> bool:
        """Whether a connection breaks now."""
        return self._comes(self.whims.resets)

    def timer_late_s(self) -> float:
        """How much later a timer fires."""
        return self._up_to(self.whims.late_timers_s)

    def work_s(self) -> float:
        """How long a function takes."""
        return self._up_to(self.whims.slow_work_s) if self._comes(self.whims.slow_work) else 0.0

    def shuffled(self, count: int) -> list[float]:
        """A place in the order for each of so many hosts."""
        return [self._rng.random() for _ in range(count)]


class SlowExecutor:
    """Runs functions inline, as `InlineExecutor`, but some of them take time.

    Args:
        mischief: says how much.
    """

    def __init__(self, mischief: Mischief) -> None:
        self._mischief = mischief

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        before_s, after_s = self._mischief.work_s(), self._mischief.work_s()
        if before_s:
            await asyncio.sleep(before_s)
        result = function(*args, **kwargs)
        if after_s:
            await asyncio.sleep(after_s)
        return result
