"""The cost of work, counted and not timed: the same on each machine, however busy it is.

A line of Python costs about 0.1 µs. What is done in C costs time without lines: there the memory that it takes at its
peak is counted, as no code touches much more than it allocates.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import shoal
from shoal.sim.loop import VirtualLoop

__all__ = ["Cost", "Turns", "cost_of", "most_lines", "most_of"]

MOMENT = 700_000
"""Lines that take 20 ms on a machine of 2023."""

_TURN = VirtualLoop._run_once.__code__


def most_lines(nbytes: int, beside: int = 100_000) -> int:
    """The most lines for a message of so many bytes: linear in these, with a constant beside, and never a moment."""
    return min(MOMENT, beside + 30 * nbytes)


class Cost(NamedTuple):
    """The cost of some work.

    Attributes:
        lines: of Python that were run, and functions that were called.
        peak_bytes: the most memory that it has taken at a time.
    """

    lines: int
    peak_bytes: int


def cost_of(work: Callable[[], object], *, memory: bool = True) -> Cost:
    """The cost of this work, whether it returns or raises; without `memory` in half the time, and the lines alone."""
    lines = 0

    def count(_frame: FrameType, _event: str, _arg: object) -> Any:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    gc.disable()  # what other tests have left would be taken down within this work, by code of its own
    if memory:
        tracemalloc.start()
    sys.settrace(count)
    try:
        work()
    except Exception:  # noqa: BLE001 (a message that is refused has its cost, too)
        pass
    finally:
        sys.settrace(before)
        gc.enable()
        _, peak = tracemalloc.get_traced_memory()  # 0 where none is traced
        tracemalloc.stop()
    return Cost(lines, peak)


def most_of(work: Coroutine[Any, Any, object]) -> Cost:
    """The cost of the turn of the loop that costs most, for work that waits for nothing but its next turn."""
    turns, over = list[Cost](), False

    def turn() -> None:
        nonlocal over
        try:
            work.send(None)
        except BaseException:
            over = True
            raise

    while not over:
        turns.append(cost_of(turn, memory=False))
    return max(turns)


class Turns:
    """Counts the lines of shoal's own code in each turn of a simulation's loop; what only simulates is left out.

    Attributes:
        most: lines of the turn that had most of them.
    """

    _own, _not = shoal.__path__[0], f"{shoal.__path__[0]}/sim"

    def __init__(self) -> None:
        self.most = self._lines = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count within this block."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)
            self.most, self._lines = max(self.most, self._lines), 0

    def _called(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if frame.f_back is not None and frame.f_back.f_code is _TURN:
            self.most, self._lines = max(self.most, self._lines), 0
        name = frame.f_code.co_filename
        return self._line if name.startswith(self._own) and not name.startswith(self._not) else None

    def _line(self, _frame: FrameType, _event: str, _arg: object) -> Any:
        self._lines += 1
        return self._line
