"""The cost of work, counted and not timed: the same on each machine, however busy it is.

A line of Python costs about 0.1 µs. What is done in C costs time without lines: there the memory that it takes at its
peak is counted, as no code touches much more than it allocates.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

__all__ = ["Cost", "cost_of"]


class Cost(NamedTuple):
    """The cost of some work.

    Attributes:
        lines: of Python that were run, and functions that were called.
        peak_bytes: the most memory that it has taken at a time.
    """

    lines: int
    peak_bytes: int


def cost_of(work: Callable[[], object]) -> Cost:
    """The cost of this work, whether it returns or raises."""
    lines = 0

    def count(_frame: FrameType, _event: str, _arg: object) -> Any:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    tracemalloc.start()
    sys.settrace(count)
    try:
        work()
    except Exception:  # noqa: BLE001 (a message that is refused has its cost, too)
        pass
    finally:
        sys.settrace(before)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return Cost(lines, peak)
