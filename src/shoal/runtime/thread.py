"""An event loop in a thread of its own, and futures for what runs there.

The thread is a daemon: it never keeps a program alive. After `stop` nothing is left. In a forked child (a DataLoader
worker) every call raises `ClosedError`: the loop did not come along.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shoal.clock import ThreadExecutor
from shoal.errors import ClosedError, LocalError

__all__ = ["GRACE_S", "LoopFuture", "LoopThread"]

T = TypeVar("T")
_logger = logging.getLogger("shoal.runtime")

GRACE_S = 5.0
"""Work in the loop keeps its own deadlines; who waits for it from outside adds this before giving the loop itself up."""


class LoopFuture(concurrent.futures.Future[T]):
    """A future whose result must not be waited for in the loop thread: that would wait for itself."""

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

    def _check(self) -> None:
        if not self.done() and self._thread.is_current():
            raise LocalError(
                "waiting for a result in shoal's own thread would never end: use a callback or another thread"
            )


class LoopThread:
    """An event loop in a daemon thread, and a small pool for tensor work.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._pool = concurrent.futures.ThreadPoolExecutor(
            max_workers=2, thread_name_prefix=f"{name}-work", initializer=_one_thread_each
        )
        self._ended = threading.Event()
        self._closing = False
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def executor(self) -> ThreadExecutor:
        """Where tensor work runs."""
        return ThreadExecutor(self._pool)

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return not self._closing and self._thread.is_alive() and os.getpid() == self._pid

    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.get_ident() == self._thread.ident

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._ended.set()

    def submit(self, work: Coroutine[Any, Any, T]) -> LoopFuture[T]:
        """Run a coroutine in the loop. Cancelling the future cancels it."""
        if not self.alive:
            work.close()
            if os.getpid() != self._pid:
                raise ClosedError("this process is a fork of the one that made the DHT: make another DHT here")
            raise ClosedError("the DHT was shut down")
        future: LoopFuture[T] = LoopFuture(self)

        def start() -> None:
            if not future.set_running_or_notify_cancel():
                work.close()
                return
            task = self._loop.create_task(work)
            task.add_done_callback(lambda done: _copy(done, future))
            future.task = task  # type: ignore[attr-defined]

        self._loop.call_soon_threadsafe(start)
        return future

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call `function` in the loop, soon; does nothing after `stop`."""
        if self.alive:
            self._loop.call_soon_threadsafe(function)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the loop and wait for it, at most `timeout_s` (then it is cancelled).

        Raises:
            LocalError: called in the loop thread.
            TimeoutError: it took longer.
        """
        if self.is_current():
            work.close()
            raise LocalError("a blocking call in shoal's own thread would never end: call it from another thread")
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except BaseException:
            if not future.done():
                self.cancel(future)
            raise

    def cancel(self, future: LoopFuture[Any]) -> None:
        """Cancel the work behind a future."""
        task = getattr(future, "task", None)
        if task is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(task.cancel)
        else:
            future.cancel()

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Run `last`, cancel what is left, and end the thread. Safe to call twice, and from a forked child."""
        with self._guard:
            if self._closing or os.getpid() != self._pid:
                return
            self._closing = True

        async def end() -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await last()
            except TimeoutError:
                _logger.warning("not everything was closed within %g s", timeout_s)
            finally:
                tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                asyncio.get_running_loop().stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        if not self.is_current():
            self._ended.wait(timeout_s + GRACE_S)
            self._thread.join(GRACE_S)
        # Work in the pool is short; waiting for it leaves no thread behind.
        self._pool.shutdown(wait=not self.is_current(), cancel_futures=True)


def _copy(done: asyncio.Task[T], future: LoopFuture[T]) -> None:
    if done.cancelled():
        future.set_exception(ClosedError("the DHT was shut down, or the call was cancelled"))
    elif (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def _one_thread_each() -> None:
    """Tensor work beside a training loop takes one core, not all of them."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
