"""An event loop in a thread of its own, and futures for its work.

- The thread is a daemon: it never keeps a program alive. After `stop` nothing is left: no thread, no task, and no
  future that nobody will ever answer.
- In a forked child (a DataLoader worker) every call raises `ClosedError`: the loop did not come along.
- Signals stay the user's: nothing here installs a handler, and a caller that waits can be interrupted. The loop owns
  all work: if a caller is interrupted, its work is cancelled, and in every case the next call works.
- Time in which the process is stopped does not count, neither for the loop nor for threads that wait for it
(`waiting`).
"""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import logging
import math
import os
import threading
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from shoal.base.clock import ThreadExecutor, seconds_text
from shoal.base.locks import SafeLock
from shoal.base.pool import DaemonPool, use_cores
from shoal.base.waiting import SLICE_S, Gate, RunningTime, SafeCondition, SlicingSelector
from shoal.base.warning_names import named
from shoal.errors import ClosedError, LocalError

__all__ = ["GRACE_S", "LoopFuture", "LoopThread"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_logger = logging.getLogger("shoal.runtime")

GRACE_S = 5.0
"""A waiting thread takes the loop for stuck this long after the deadline that the work in the loop keeps itself."""

_POOL_THREADS = 2
_CANCEL_S = 2.0


class LoopFuture(concurrent.futures.Future[T]):
    """A future whose result the loop thread must not wait for: it would wait for itself.

    Coroutines in any event loop can `await` it; then cancelling the coroutine cancels the future, and the other way
    round.
    """

    def __init__(self, thread: LoopThread) -> None:
        super().__init__()
        # Of the base class: the loop takes it, and must never find it kept.
        self._condition: SafeCondition = SafeCondition()  # type: ignore[assignment]
        self._thread, self._settled = thread, (settled := Gate())
        self.ended = Gate()
        """Open when nothing is done for it any more: later than it is cancelled."""
        self.add_done_callback(lambda _: settled.open())

    def wait(self, timeout_s: float) -> bool:
        """Wait for so many seconds, and return whether it is done. Time of a stopped process does not count."""
        self._check()
        return self._settled.wait(timeout_s) or self.done()

    def result(self, timeout: float | None = None) -> T:
        """As `concurrent.futures.Future.result`; raises `LocalError` in the loop thread before it is done."""
        self._wait(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `concurrent.futures.Future.exception`; raises `LocalError` in the loop thread before it is done."""
        self._wait(timeout)
        return super().exception()

    def _wait(self, timeout: float | None) -> None:
        if not self.wait(math.inf if timeout is None else timeout):
            raise TimeoutError

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    def _check(self) -> None:
        if not self.done() and self._thread.is_current():
            raise LocalError(
                "waiting for a result in shoal's own thread would never end: use a callback or another thread"
            )


class _Loop(asyncio.SelectorEventLoop):
    """The loop, whatever policy the program has set. Name lookups run in a pool of shoal's, not in asyncio's own.

    Its time stands still while the process is stopped: no timer and no limit counts that.
    """

    def __init__(self, lookups: DaemonPool) -> None:
        self.clock = RunningTime()
        super().__init__(SlicingSelector(self.clock))
        self._lookups = lookups
        self._alone = False

    def time(self) -> float:
        return self.clock.now()

    def run_in_executor(
        self, executor: concurrent.futures.Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        # Small tensor work is done in the loop itself. Tensor work begins with work for the pool (copying the tensors).
        self._alone = self._alone or (executor is not None and use_cores(1))
        return super().run_in_executor(executor or self._lookups, func, *args)


class LoopThread:
    """An event loop in a daemon thread, and a small pool for tensor work.

    Args:
        name: the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._pool = DaemonPool(_POOL_THREADS, f"{name}-work")
        # A pool of its own: a name server that does not answer, or a peer that names such hosts, must not hold up
        # tensor work.
        self._lookups = DaemonPool(_POOL_THREADS, f"{name}-names")
        self._loop = _Loop(self._lookups)
        self._guard = SafeLock()  # the same thread may take it again: a finalizer may run at any point
        self._closing = self._ending = False
        self._ended = Gate()
        self._limit_s = 0.0
        self._answering = True
        self._open: set[LoopFuture[Any]] = set()  # loop thread only
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def executor(self) -> ThreadExecutor:
        """The executor for tensor work."""
        return ThreadExecutor(self._pool)

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return not self._closing and os.getpid() == self._pid

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that started the thread."""
        return os.getpid() != self._pid

    def check_alive(self) -> None:
        """Raise `ClosedError` if no calls can be made."""
        if self.forked:
            raise ClosedError(
                "objects of shoal do not survive a fork: make the DHT, and all that uses it, in this process"
            )
        if not self.alive:
            raise _shut_down()

    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.get_ident() == self._thread.ident and not self.forked

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._ending_turn():
                pass
        finally:
            with self._guard:
                self._closing = True
            self._loop.run_until_complete(self._cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            for future in self._open if self._answering else ():  # of tasks that would not be cancelled
                _settle(future, partial(future.set_exception, _shut_down()))
            self._lookups.shutdown(wait=False, cancel_futures=True)
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._ended.open()

    def _ending_turn(self) -> bool:
        """Run the loop until `stop`; False if a callback of the program's (a codec, a future's) has broken it off."""
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio hands on nothing else
            _logger.exception("%s was raised in shoal's own thread, where it ends nothing", type(error).__name__)
            if isinstance(error, KeyboardInterrupt):
                _thread.interrupt_main()
            return False
        return True

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
        """As `submit`, but for an existing future."""

        async def work_and_answer() -> None:
            # At the very end of the task: a callback would come after all that the work has set off in the loop.
            self._settle(future, partial(future.set_result, await work))

        def start() -> None:
            if future.cancelled():
                future.set_running_or_notify_cancel()
                work.close()
                future.ended.open()
                return
            task = self._loop.create_task(work_and_answer())
            self._open.add(future)
            task.add_done_callback(lambda done: self._done(done, future, work))
            future.add_done_callback(lambda done: self.call_soon(task.cancel) if done.cancelled() else None)

        try:
            self._call_soon(start)
        except ClosedError:
            work.close()
            future.ended.open()
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

    def _done(self, task: asyncio.Task[None], future: LoopFuture[Any], work: Coroutine[Any, Any, Any]) -> None:
        work.close()  # it has not begun if it was cancelled at once
        future.ended.open()
        error = _shut_down() if task.cancelled() else task.exception()
        if error is not None:
            self._settle(future, partial(future.set_exception, error))

    def _settle(self, future: LoopFuture[Any], answer: Callable[[], None]) -> None:
        self._open.discard(future)
        if self._answering:
            _settle(future, answer)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the loop and wait for it. An interrupt of the wait cancels it, and waits for its end.

        Args:
            work: the coroutine. It keeps its own deadline; this method only makes sure that nobody waits for ever.
            timeout_s: the longest wait, seconds.

        Raises:
            LocalError: the loop thread called; or no answer came in time, because something blocks the thread.
            ClosedError: the thread was stopped.
        """
        if self.is_current():
            work.close()
            raise LocalError("a blocking call in shoal's own thread would never end: call it from another thread")
        future: LoopFuture[T] = LoopFuture(self)
        try:
            self.answer(future, work)
            if self._answered(future, timeout_s):
                return future.result()
        except BaseException:
            if future.cancel():  # its work may still change state that the interrupted thread uses
                self.call_soon(lambda: None if future in self._open else future.ended.open())
                future.ended.wait(GRACE_S)
            raise
        future.cancel()
        raise LocalError(
            f"no answer from shoal's own thread within {seconds_text(timeout_s)}: "
            "does an event subscriber, or get_current_state, block it?"
        )

    def _answered(self, future: LoopFuture[Any], timeout_s: float) -> bool:
        """Wait for a result by the loop's clock; by our own, if the loop's clock stands because the loop hangs."""
        clock = self._loop.clock
        deadline, turns, waited_s, still_s = clock.now() + timeout_s, clock.turns, 0.0, 0.0
        while not future.wait(slice_s := min(SLICE_S, timeout_s - waited_s) if waited_s < timeout_s else SLICE_S):
            waited_s += slice_s
            still_s = still_s + slice_s if clock.turns == turns else 0.0
            turns = clock.turns
            if waited_s >= timeout_s and (clock.now() >= deadline or still_s >= min(timeout_s, GRACE_S)):
                return False
        return True

    # ------------------------------------------------------------------------------------------------------ stopping

    def stop(
        self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float, *, wait: bool = True, answer: bool = True
    ) -> None:
        """Run `last`, cancel all other work, and end the thread; returns when nothing is left.

        Safe to call twice, and from any thread; from the loop thread itself it returns at once. In a forked child it
        does nothing.

        Args:
            last: the work that leaves the network in order.
            timeout_s: the time for `last`, seconds. Work that is not done by then is cancelled.
            wait: False returns at once.
            answer: False leaves threads that wait for a result without an answer. At the end of the program these are
                daemon threads, which would only die of the error, with a traceback.
        """
        if self.forked:
            return
        with self._guard:
            if not self._closing:
                self._limit_s, self._answering = timeout_s, answer
                self._loop.call_soon_threadsafe(self._begin_end, last, timeout_s)
                self._closing = True
        if self.is_current() or not wait:
            return
        if self._ended.wait(self._limit_s + _CANCEL_S + 2 * GRACE_S):
            self._thread.join()  # it does nothing more
        else:
            _logger.warning(named("shoal's thread did not end: does an event subscriber block it?"))

    def _begin_end(self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Begin the end, once: an interrupted caller asks again."""
        self._closing = True
        if not self._ending:
            self._ending = True
            self._end_task = self._loop.create_task(self._end(last, timeout_s))

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await last()
        except TimeoutError:
            _logger.warning(named("not everything was closed within %s"), seconds_text(timeout_s))
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
    """Answer a future that another thread may cancel at this moment."""
    if future.set_running_or_notify_cancel():
        settle()
