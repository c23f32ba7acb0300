"""A few daemon threads for tensor work and name lookups.

Why not `concurrent.futures.ThreadPoolExecutor`: it refuses work as soon as the interpreter begins to end, before
`atexit` handlers run, and a program that ends without `shutdown` would fail in the middle of its last round. It also
makes the program wait for a name lookup that hangs.

Tensor work beside a training loop takes one core, not all of them: each thread tells torch so, for itself alone.
Threads of the user keep their setting.
"""

from __future__ import annotations

import concurrent.futures
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["DaemonPool", "use_cores"]

P = ParamSpec("P")
T = TypeVar("T")

# A second thread between `set_num_threads` and its undoing would take the 1 for the user's choice.
_one_by_one = threading.Lock()

_Work = tuple["concurrent.futures.Future[object]", Callable[[], object]]


class DaemonPool(concurrent.futures.Executor):
    """Runs functions in up to `size` threads, made when they are needed.

    Args:
        size: the most threads.
        name: the name of the threads; each gets a number, too.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._news = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        """Run `function` in one of the threads. Raises `RuntimeError` after `shutdown`, as every executor does."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._news:
            if self._closed:
                raise RuntimeError("this pool was shut down")
            self._waiting.append((future, lambda: function(*args, **kwargs)))  # type: ignore[arg-type]
            if self._idle >= len(self._waiting) or not self._began_thread():
                self._news.notify()
            if not self._threads:
                self._waiting.pop()
                raise RuntimeError("no thread can be started: raise the limits of memory and of threads (`ulimit`)")
        return future

    def shutdown(
        self,
        wait: bool = True,  # noqa: FBT002 (as in the base class)
        *,
        cancel_futures: bool = False,
        timeout_s: float = 5.0,
    ) -> None:
        """Take no more work; end the threads when they have finished their present work.

        Args:
            wait: wait until they have ended, at most `timeout_s`.
            cancel_futures: drop work that was not begun.
            timeout_s: after so many seconds a thread that hangs is left behind.
        """
        with self._news:
            self._closed = True
            if cancel_futures:
                for future, _ in self._waiting:
                    future.cancel()
                self._waiting.clear()
            self._news.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads if wait else ():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        alone = False
        while (work := self._next()) is not None:
            alone = alone or use_cores(1)
            _run(*work)
            del work  # nothing of it is held while this thread waits

    def _began_thread(self) -> bool:
        if len(self._threads) >= self._size:
            return False
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory for another, or a limit of threads: those that there are do the work
            return False
        self._threads.append(thread)
        return True

    def _next(self) -> _Work | None:
        with self._news:
            self._idle += 1
            self._news.wait_for(lambda: self._waiting or self._closed)
            self._idle -= 1
            return self._waiting.popleft() if self._waiting else None


def _run(future: concurrent.futures.Future[object], work: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 (the task that waits for the future gets it)
        future.set_exception(error)
    else:
        future.set_result(result)


def use_cores(count: int) -> bool:
    """Make torch use so many cores for the calling thread, and for no other. False if that is not possible yet."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "set_num_threads"):  # not there, or just being imported
        return False
    with _one_by_one:
        if torch.get_num_threads() == count:  # to ask comes first: else torch would set what threads begin with later
            return True
        try:
            others = _in_a_new_thread(torch.get_num_threads)
        except RuntimeError:  # no thread to be had
            return False
        torch.set_num_threads(count)
        try:
            # The last call also decides for threads that torch has not seen yet: the main thread may be one of them.
            _in_a_new_thread(lambda: torch.set_num_threads(others))
        except RuntimeError:  # this one uses the cores that others do rather than the user one
            torch.set_num_threads(others)
            return False
    return True


def _in_a_new_thread(function: Callable[[], T]) -> T:
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join()
    return found[0]
