"""An event loop in a thread of its own, and futures for what runs there.

- The thread is a daemon: it never keeps a program alive. After `stop` nothing is left: no thread, no task, and no
  future that nobody will ever answer.
- In a forked child (a DataLoader worker) every call raises `ClosedError`: the loop did not come along.
- Signals stay the user's: nothing here installs a handler, and a caller that waits can be interrupted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from shoal.clock import ThreadExecutor
from shoal.errors import ClosedError, LocalError
from shoal.runtime.pool import DaemonPool, take_one_core

__all__ = ["GRACE_S", "LoopFuture", "LoopThread"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_logger = logging.getLogger("shoal.runtime")

GRACE_S = 5.0
"""Work in the loop keeps its own deadlines; who waits for it from outside adds this before it gives up the loop."""

_POOL_THREADS = 2
_CANCEL_S = 2.0


class LoopFuture(concurrent.futures.Future[T]):
    """A future whose result must not be waited for in the loop thread: that would wait for itself.

    Coroutines `await` it, in whichever event loop they run; as long as one does, cancelling the one cancels the other.
    """

    def __init__(self, thread: LoopThread) -> None:
        super().__init__()
        self._thread = thread

    def result(self, timeout: float | None = None) -> T:
        """As `concurrent.futures.Future.result`; raises `LocalError` in the loop thread before it is done."""
        self._check()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `concurrent.futures.Future.exception`; raises `LocalError` in the loop thread before it is done."""
        self._check()
        return super().exception(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    def _check(self) -> None:
        if not self.done() and self._thread.is_current():
            raise LocalError(
                "waiting for a result in shoal's own thread would never end: use a callback or another thread"
            )


class _Loop(asyncio.SelectorEventLoop):
    """The loop, whatever policy the program has set; name lookups run in a pool of shoal's, not in asyncio's own."""

    def __init__(self, lookups: DaemonPool) -> None:
        super().__init__()
        self._lookups = lookups
        self._alone = False

    def run_in_executor(
        self, executor: concurrent.futures.Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        # Small tensor work is done in the loop itself; it begins with work for the pool (to copy the tensors).
        self._alone = self._alone or (executor is not None and take_one_core())
        return super().run_in_executor(executor or self._lookups, func, *args)


class LoopThread:
    """An event loop in a daemon thread, and a small pool for tensor work.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._pool = DaemonPool(_POOL_THREADS, f"{name}-work")
        # Of its own: a name server that does not answer, and whoever names such hosts, must not hold up tensor work.
        self._lookups = DaemonPool(_POOL_THREADS, f"{name}-names")
        self._loop = _Loop(self._lookups)
        self._guard = threading.RLock()  # again in the same thread: by a finalizer, which may come at any point
        self._closing = False
        self._limit_s = 0.0
        self._answering = True
        self._open: set[LoopFuture[Any]] = set()  # loop thread only
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def executor(self) -> ThreadExecutor:
        """Where tensor work runs."""
        return ThreadExecutor(self._pool)

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return not self._closing and os.getpid() == self._pid and self._thread.is_alive()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made the thread."""
        return os.getpid() != self._pid

    def check_alive(self) -> None:
        """Raise `ClosedError` if no calls can be made."""
        if self.forked:
            raise ClosedError("this process is a fork of the one that made the DHT: make another DHT here")
        if not self.alive:
            raise _shut_down()

    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.get_ident() == self._thread.ident and not self.forked

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            # By `stop` as a rule; or some callback raised SystemExit in here.
            with self._guard:
                self._closing = True
            self._loop.run_until_complete(self._cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            for future in self._open if self._answering else ():  # of tasks that would not be cancelled
                _settle(future, partial(future.set_exception, _shut_down()))
            self._lookups.shutdown(wait=False, cancel_futures=True)
            self._pool.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------------- calling

    def submit(self, work: Coroutine[Any, Any, T]) -> LoopFuture[T]:
        """Run a coroutine in the loop. Cancelling the future cancels it.

        Raises:
            ClosedError: the thread was stopped, or belongs to the process that this one is a fork of.
        """
        future: LoopFuture[T] = LoopFuture(self)
        self.answer(future, work)
        return future

    def answer(self, future: LoopFuture[T], work: Coroutine[Any, Any, T]) -> None:
        """As `submit`, for a future that is there already."""

        def start() -> None:
            if future.cancelled():
                future.set_running_or_notify_cancel()
                work.close()
                return
            task = self._loop.create_task(work)
            self._open.add(future)
            task.add_done_callback(lambda done: self._done(done, future))
            future.add_done_callback(lambda done: self.call_soon(task.cancel) if done.cancelled() else None)

        try:
            self._call_soon(start)
        except ClosedError:
            work.close()
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call `function` in the loop, soon; does nothing after `stop`."""
        try:
            self._call_soon(function)
        except ClosedError:
            return

    def _call_soon(self, function: Callable[[], object]) -> None:
        self.check_alive()  # before the lock: in a forked child nobody may be there to give it back
        with self._guard:
            self.check_alive()
            self._loop.call_soon_threadsafe(function)

    def _done(self, task: asyncio.Task[T], future: LoopFuture[T]) -> None:
        self._open.discard(future)
        error = _shut_down() if task.cancelled() else task.exception()
        if self._answering:
            answer = (
                partial(future.set_result, task.result()) if error is None else partial(future.set_exception, error)
            )
            _settle(future, answer)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the loop and wait for it. Whatever interrupts the wait cancels it.

        Args:
            work: keeps its own deadline; here it is only made sure that nobody waits for ever.
            timeout_s: longest wait, seconds.

        Raises:
            LocalError: called in the loop thread; or no answer in time: something blocks the thread.
            ClosedError: the thread was stopped.
        """
        if self.is_current():
            work.close()
            raise LocalError("a blocking call in shoal's own thread would never end: call it from another thread")
        future = self.submit(work)
        try:
            # Not `result(timeout_s)`: its TimeoutError could not be told from one that the work raised.
            concurrent.futures.wait([future], timeout_s)
            if future.done():
                return future.result()
        finally:
            future.cancel()  # without effect if it is done
        raise LocalError(
            f"no answer from shoal's own thread within {timeout_s:g} s: "
            "does an event subscriber, or get_current_state, block it?"
        )

    # ------------------------------------------------------------------------------------------------------ stopping

    def stop(
        self,
        last: Callable[[], Coroutine[Any, Any, None]],
        timeout_s: float,
        *,
        wait: bool = True,
        answer: bool = True,
    ) -> None:
        """Run `last`, cancel what is left, and end the thread; returns when nothing is left.

        Safe to call twice, and from any thread; from the loop thread itself it returns at once. In a forked child it
        does nothing.

        Args:
            last: leaves in order.
            timeout_s: for `last`, seconds; what is not done by then is cancelled.
            wait: False returns at once.
            answer: False leaves unanswered who waits for a result: at the end of the program these are daemon threads,
                which would only die of the error, with a traceback for everybody to see.
        """
        if self.forked:
            return
        with self._guard:
            if not self._closing and self._thread.is_alive():
                self._closing, self._limit_s, self._answering = True, timeout_s, answer
                ending = self._end(last, timeout_s)
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(ending))
        if self.is_current() or not wait:
            return
        self._thread.join(self._limit_s + _CANCEL_S + 2 * GRACE_S)
        if self._thread.is_alive():
            _logger.warning("shoal's thread did not end: does an event subscriber block it?")

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await last()
        except TimeoutError:
            _logger.warning("not everything was closed within %g s", timeout_s)
        except Exception:
            _logger.exception("closing failed")
        finally:
            self._loop.stop()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_S)


def _shut_down() -> ClosedError:
    return ClosedError("the DHT was shut down")


def _settle(future: concurrent.futures.Future[Any], settle: Callable[[], None]) -> None:
    """Answer a future that somebody may cancel at this moment."""
    if future.set_running_or_notify_cancel():
        settle()
