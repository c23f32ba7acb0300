"""The lock of the tensors between threads; `tests/sim/test_averager_lock.py` has what rounds do with it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from shoal.averaging import TensorLock
from shoal.averaging import lock as lock_module
from shoal.runtime import tensors as tensors_module
from shoal.runtime.tensors import LockedTensors

LONG_S = 60.0


def in_line(lock: TensorLock, count: int) -> None:
    """Wait until so many stand in line."""
    pause = threading.Event()
    while len(lock._line) < count:
        pause.wait(0.001)


def test_a_thread_that_comes_again_waits_behind_the_others() -> None:
    """Three threads ask one after another, then the first one again: that is the order in which they have it."""
    lock, had = TensorLock(), []

    def work(name: str) -> None:
        with lock.acquire_in_thread(name, LONG_S) as has_come:
            assert has_come
            had.append(lock.holder)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("b", "c", "d")]
    with lock.acquire_in_thread("a", 0.0) as has_come:
        assert has_come
        for count, thread in enumerate(threads, 2):
            thread.start()
            in_line(lock, count)
    work("a")
    for thread in threads:
        thread.join(LONG_S)
    assert had == ["b", "c", "d", "a"]
    assert lock.holder == ""


def in_a_thread(lock: TensorLock) -> bool:
    """Have it; whether it came."""
    with lock.acquire_in_thread("b", LONG_S) as has_come:
        return has_come


def in_a_loop(lock: TensorLock) -> bool:
    """The same from a coroutine."""

    async def work() -> bool:
        async with lock.acquire(LONG_S) as has_come:
            return has_come

    return asyncio.run(work())


@pytest.mark.parametrize("have", [in_a_thread, in_a_loop])
def test_who_waits_has_it_when_the_other_leaves(have: Callable[[TensorLock], bool]) -> None:
    """A thread and a coroutine alike, though nobody tells them."""
    lock, had = TensorLock(), []
    thread = threading.Thread(target=lambda: had.append(have(lock)))
    with lock.acquire_in_thread("a"):
        thread.start()
        in_line(lock, 2)
    thread.join(LONG_S)
    assert had == [True]


def test_who_gives_up_leaves_the_line() -> None:
    """After its time is over a thread goes on without, and whoever stands behind it is not held up."""
    lock = TensorLock()
    with lock.acquire_in_thread("a"):
        assert lock.held_by_this_thread
        with lock.acquire_in_thread("b", 0.001) as has_come:
            assert not has_come
            assert lock.holder == "a"
        assert lock.holder == "a"
    assert lock.holder == ""
    assert not lock.held_by_this_thread
    with lock.acquire_in_thread():
        assert lock.holder == f"thread {threading.current_thread().name!r}"
    with lock.acquire_in_thread("c", 0.0) as has_come:
        assert has_come


class Interrupt:
    """Raises KeyboardInterrupt at one moment in the code of the lock: before or after its n-th call.

    Python looks for signals when a function begins, and after calls: there, and not between any two bytes of code.

    Attributes:
        moments: how many there were.
    """

    files = frozenset({lock_module.__file__, tensors_module.__file__, contextlib.__file__})

    def __init__(self, moment: int) -> None:
        self.moments, self._moment = 0, moment

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        yields = event == "return" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if frame.f_code.co_filename in self.files and not yields:
            self.moments += 1
            if self.moments == self._moment:
                raise KeyboardInterrupt

    def during_a_block(self, held: LockedTensors, kept: list[BaseException]) -> bool:
        """Hold the tensors for a moment; whether it was interrupted. Notebooks keep the error, too, with its frames."""
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            with held.acquire():
                pass
        except KeyboardInterrupt as error:
            kept.append(error)
            return True
        finally:
            sys.setprofile(before)
        return False


def test_an_interrupt_at_any_moment_costs_nobody_the_lock() -> None:
    """Ctrl+C while a thread takes the tensors, has them, or gives them back: the next one gets them."""
    held, kept = LockedTensors([torch.zeros(1)]), list[BaseException]()
    whole = Interrupt(0)
    assert not whole.during_a_block(held, kept)
    assert whole.moments > 20
    interrupted = 0
    for moment in range(1, whole.moments + 1):
        interrupted += Interrupt(moment).during_a_block(held, kept)
        assert held.lock.holder == "", moment
        with held.acquire(wait=False):
            assert held.lock.held_by_this_thread
    assert interrupted >= whole.moments - 1
