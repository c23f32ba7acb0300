"""The lock of the tensors between threads; `tests/sim/test_averager_lock.py` has what rounds do with it."""

from __future__ import annotations

import threading

from shoal.averager import TensorLock

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
        assert lock.acquire(name, LONG_S)
        had.append(lock.holder)
        lock.release()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("b", "c", "d")]
    assert lock.acquire("a", 0.0)
    for count, thread in enumerate(threads, 1):
        thread.start()
        in_line(lock, count)
    lock.release()
    assert lock.acquire("a", LONG_S)
    had.append(lock.holder)
    lock.release()
    for thread in threads:
        thread.join(LONG_S)
    assert had == ["b", "c", "d", "a"]
    assert lock.holder == ""


def test_who_gives_up_leaves_the_line() -> None:
    """After its time is over a thread gets False, and whoever stands behind it is not held up."""
    lock = TensorLock()
    assert lock.acquire("a")
    assert not lock.acquire("b", 0.001)
    assert lock.holder == "a"
    lock.release()
    assert lock.holder == ""
    with lock:
        assert lock.holder == f"thread {threading.current_thread().name!r}"
    assert lock.acquire("c", 0.0)
