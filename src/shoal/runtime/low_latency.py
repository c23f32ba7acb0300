"""How soon shoal's thread gets the interpreter beside a program that computes in Python.

A thread that wants Python's interpreter lock waits until the holder lets go, and asks for it after
`sys.getswitchinterval()`: 5 ms, unless the program chose otherwise. Shoal's thread gives the lock up for every system
call. So beside a loop that never gives it up, a round of averaging would wait a thousand times 5 ms. While a round or a
download goes on, the interval is shorter for the whole process; afterwards it is as before.

The program's loop loses time to shoal's thread: in all about as much as with longer waits, because the round ends
sooner.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.base.locks import SafeLock

__all__ = ["SWITCH_INTERVAL_S", "low_latency"]

SWITCH_INTERVAL_S = 0.0001


class _Holders:
    """Counts the open blocks of `low_latency` in this process, and keeps the interval to go back to."""

    def __init__(self) -> None:
        self.guard = SafeLock()
        self.count = 0
        self.before_s = 0.0

    def enter(self) -> None:
        with self.guard:
            self.count += 1
            if self.count == 1:
                self.before_s = sys.getswitchinterval()
                if self.before_s > SWITCH_INTERVAL_S:
                    sys.setswitchinterval(SWITCH_INTERVAL_S)

    def leave(self) -> None:
        with self.guard:
            self.count -= 1
            # If the program has chosen another interval meanwhile, that one stays.
            if self.count == 0 and math.isclose(sys.getswitchinterval(), SWITCH_INTERVAL_S):
                sys.setswitchinterval(self.before_s)

    def forget(self) -> None:
        """Begin anew in a forked child: the holder does not exist there, and its lock may be taken for ever."""
        self.guard = SafeLock()
        while self.count:
            self.leave()


_holders = _Holders()
os.register_at_fork(after_in_child=_holders.forget)


@contextmanager
def low_latency() -> Iterator[None]:
    """Within the block, threads of this process wait at most `SWITCH_INTERVAL_S` for the interpreter."""
    _holders.enter()
    try:
        yield
    finally:
        _holders.leave()
