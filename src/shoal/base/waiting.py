"""How threads wait for shoal's thread: an interrupt leaves nothing locked, and a stop of the process costs no time.

**Interrupts.** Python runs a signal's handler in the main thread between any two calls, and an exception of the handler
is raised there. `threading.Condition` and all that is built on it (`Event`, `Thread.join`, `concurrent.futures.wait`)
is Python code. An interrupt may leave it with its lock taken, or with a living thread marked as dead (cpython issue
90882). All waits of this module are in `queue.SimpleQueue.get`, which is one call of C. The locks of futures, decoders,
calls into the loop, step plans and leaving on SIGTERM are `SafeLock`s.

**Stops.** A process that is stopped (SIGSTOP, a laptop's lid) must not find all its deadlines passed when it goes on.
So threads wait in slices, of which each counts once, however long it took; and the loop's clock (`RunningTime`) counts
no turn of the loop as longer than `LONGEST_TURN_S`.
"""

from __future__ import annotations

import queue
import selectors
import time

from shoal.base.clock import LONGEST_TURN_S
from shoal.base.locks import SafeLock

__all__ = ["SLICE_S", "Gate", "RunningTime", "SafeCondition", "SlicingSelector"]

SLICE_S = LONGEST_TURN_S / 2
"""The longest time between two looks at the clock, for the loop and for threads that wait for it."""


class RunningTime:
    """A clock that stands still while the loop does: seconds of `time.monotonic`, without those of stops.

    If the process was stopped, or something kept the loop busy, nothing could be heard or answered meanwhile. So no
    peer's silence and no deadline counts that time. Read from any thread; `turn` is called by the loop.
    """

    def __init__(self) -> None:
        now = time.monotonic()
        self._turn = now, now
        self.turns = 0

    def now(self) -> float:
        """The time of this clock, seconds."""
        at, shown = self._turn
        return shown + min(time.monotonic() - at, LONGEST_TURN_S)

    def turn(self) -> None:
        """The loop goes on now."""
        at, shown = self._turn
        now = time.monotonic()
        self._turn = now, shown + min(now - at, LONGEST_TURN_S)
        self.turns += 1


class SlicingSelector(selectors.DefaultSelector):
    """The loop's selector, which returns after `SLICE_S` at the latest and tells the clock.

    Args:
        clock: the clock of the loop.
    """

    def __init__(self, clock: RunningTime) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Select as every selector does. It may return without events before the timeout."""
        self._clock.turn()
        found = super().select(SLICE_S if timeout is None else min(timeout, SLICE_S))
        self._clock.turn()
        return found


class Gate:
    """A gate that is opened once; any number of threads wait for it."""

    def __init__(self) -> None:
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.is_open = False

    def open(self) -> None:
        """Let all through, now and later."""
        self.is_open = True
        self._tokens.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait for so many seconds, and return whether it was opened."""
        waited_s = 0.0
        while not self.is_open and waited_s < timeout_s:
            slice_s = min(SLICE_S, timeout_s - waited_s)
            try:
                self._tokens.get(timeout=slice_s)
                self._tokens.put(None)  # for the next one; interrupted before that, the others look after a slice
            except queue.Empty:
                waited_s += slice_s
        return self.is_open


class SafeCondition(SafeLock):  # type: ignore[misc]  # see SafeLock
    """The lock of a `concurrent.futures.Future` that the loop must settle, in the place of its `threading.Condition`.

    An interrupted thread that kept such a condition would stop the loop for ever. Nobody waits on this lock: `Gate` is
    for that.
    """

    def notify_all(self) -> None:
        """Does nothing: nobody waits here."""
