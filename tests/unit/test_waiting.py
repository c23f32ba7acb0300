"""How threads wait for shoal's: they lose no time while the process is stopped, and keep nothing when interrupted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from shoal.base import locks, waiting
from shoal.base.clock import LONGEST_TURN_S, SharedClock
from shoal.base.locks import SafeLock
from shoal.base.waiting import Gate, RunningTime
from shoal.errors import LocalError
from shoal.protocol import wire
from shoal.runtime import low_latency
from shoal.runtime import thread as thread_module
from shoal.runtime.leave import Leaving
from shoal.runtime.thread import LoopFuture, LoopThread

LONG_S = 60.0


def test_a_stop_is_one_long_turn_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """70 s within one turn count as half a second, whoever asks and however often; turns that are short count whole."""
    now = [100.0]
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = RunningTime()
    shown = clock.now()
    for _ in range(10):
        now[0] += 0.2
        clock.turn()
    assert clock.now() == pytest.approx(shown + 2.0)
    now[0] += 70.0
    for _ in range(3):
        assert clock.now() == pytest.approx(shown + 2.0 + LONGEST_TURN_S)
    clock.turn()
    assert clock.now() == pytest.approx(shown + 2.0 + LONGEST_TURN_S)
    now[0] += 0.1
    assert clock.now() == pytest.approx(shown + 2.1 + LONGEST_TURN_S)


def test_a_suspended_machine_loses_no_time_on_either_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monotonic clock stands still meanwhile, the wall clock is hours further, and no correction follows."""
    monotonic, wall = [100.0], [1_000_000.0]
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: monotonic[0]))
    own = SimpleNamespace(time=lambda: wall[0], monotonic=lambda: monotonic[0])
    running, shared = RunningTime(), SharedClock(own, settled=False)
    assert shared.told("other", "host", -30.0)  # this machine is 30 s ahead of the network
    shown = running.now()
    wall[0] += 5 * 3600.0
    running.turn()
    assert running.now() == shown
    assert shared.monotonic() == 100.0
    assert shared.time() == 1_000_000.0 + 5 * 3600.0 - 30.0
    assert not shared.told("other", "host", -30.0)
    assert not shared.told("third", "another host", -30.5)
    assert shared.ahead_s == -30.0
    monotonic[0], wall[0] = monotonic[0] + 0.3, wall[0] + 0.3
    running.turn()
    assert running.now() == pytest.approx(shown + 0.3)


async def nothing() -> None:
    """Done at once."""


async def never() -> None:
    """Waits for what does not come."""
    await asyncio.get_running_loop().create_future()


def test_a_loop_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock stands, and the thread's own slices go on; also where it does not hang, but its work does not end."""
    thread = LoopThread("test")
    monkeypatch.setattr(thread_module, "GRACE_S", 0.2)
    free = threading.Event()
    thread.call_soon(lambda: free.wait(LONG_S))
    with pytest.raises(LocalError, match=r"no answer from shoal's own thread within 0\.3 s"):
        thread.run(nothing(), 0.3)
    free.set()
    thread.run(nothing(), LONG_S)
    with pytest.raises(LocalError, match="no answer"):
        thread.run(never(), 0.3)
    thread.stop(nothing, LONG_S)


def test_a_thread_waits_for_all_that_its_work_has_set_off() -> None:
    """Writes to the DHT, the next look at the swarm: each step of the optimizer was told of its end after these."""
    thread, answered = LoopThread("test"), list[bool]()

    async def work() -> None:
        asyncio.get_running_loop().call_soon(lambda: answered.append(future.done()))

    future = LoopFuture[None](thread)
    thread.answer(future, work())
    future.result(LONG_S)
    thread.run(nothing(), LONG_S)
    assert answered == [True]
    thread.stop(nothing, LONG_S)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_what_ends_a_program_does_not_end_the_loop(error: BaseException) -> None:
    """A callback of the program raised it, and "the DHT was shut down". An interrupt is handed to the main thread."""
    thread, handed = LoopThread("test"), threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: handed.set())
    try:
        future = thread.submit(nothing())
        future.result(LONG_S)

        def raise_it(_: object = None) -> None:
            raise error

        thread.call_soon(raise_it)

        async def broken() -> None:
            raise_it()

        with pytest.raises(type(error)):
            thread.run(broken(), LONG_S)
        done: LoopFuture[None] = LoopFuture(thread)
        done.add_done_callback(raise_it)
        thread.answer(done, nothing())
        done.result(LONG_S)
        thread.run(nothing(), LONG_S)
        assert thread.alive
        if isinstance(error, KeyboardInterrupt):
            assert handed.wait(LONG_S)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.stop(nothing, LONG_S)
    assert not thread.alive


def test_work_that_is_cancelled_before_it_begins_is_closed() -> None:
    """Else Python warns of a coroutine that nobody has awaited."""
    thread, begun = LoopThread("test"), list[bool]()

    async def work() -> None:
        begun.append(True)

    coroutine, future = work(), LoopFuture[None](thread)

    def cancel_all() -> None:
        for task in asyncio.all_tasks():
            task.cancel()

    def begin() -> None:  # so both run in one turn of the loop
        thread.answer(future, coroutine)
        thread.call_soon(cancel_all)

    thread.call_soon(begin)
    assert future.ended.wait(LONG_S)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
    assert not begun
    thread.stop(nothing, LONG_S)


def test_a_gate_lets_all_through() -> None:
    """Callers that wait, and callers that come later."""
    gate, passed = Gate(), []
    threads = [threading.Thread(target=lambda: passed.append(gate.wait(LONG_S))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not gate.wait(0.001)
    gate.open()
    for thread in threads:
        thread.join(LONG_S)
    assert passed == [True] * 3
    assert gate.wait(0.0)


class Interrupt:
    """Raises KeyboardInterrupt at one moment in what a future does: where Python looks for signals.

    That is when a function of Python begins, and after one of C, but not before that. A function of Python that ends is
    such a moment for the caller's next call; there is none between an `__enter__` that ends and its block.
    """

    files = frozenset({waiting.__file__, thread_module.__file__, locks.__file__, concurrent.futures._base.__file__})

    def __init__(self, moment: int) -> None:
        self.moments, self._moment = 0, moment

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        no_moment = event == "return" and (code.co_flags & inspect.CO_GENERATOR or code.co_name == "__enter__")
        if code.co_filename in self.files and not no_moment and event != "c_call":
            self.moments += 1
            if self.moments == self._moment:
                raise KeyboardInterrupt

    def during(self, call: Callable[[], object]) -> None:
        """Make the call, and interrupt it."""
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            with contextlib.suppress(KeyboardInterrupt, concurrent.futures.TimeoutError):
                call()
        finally:
            sys.setprofile(before)


@pytest.mark.parametrize("what", ["result", "wait", "cancel", "done"])
def test_an_interrupt_keeps_no_future_from_the_loop(what: str) -> None:
    """Its base class would keep its condition, and the loop would wait for that for ever."""
    thread = LoopThread("test")
    kept: list[LoopFuture[None]] = []

    def ask() -> None:
        future: LoopFuture[None] = LoopFuture(thread)
        kept.append(future)
        call: Any = getattr(future, what)
        call(*(0.001,) * (what in ("result", "wait")))

    whole = Interrupt(0)
    whole.during(ask)
    assert whole.moments > 5
    for moment in range(1, whole.moments + 1):
        Interrupt(moment).during(ask)
    free: list[bool] = []

    def settle() -> None:
        for future in kept:
            free.append(future._condition.acquire(blocking=False))
            if free[-1]:
                future._condition.release()

    thread.call_soon(settle)
    thread.run(nothing(), LONG_S)
    assert free == [True] * len(kept)
    thread.stop(nothing, LONG_S)


def test_signals_keep_no_lock() -> None:
    """Real ones, in a loop that does nothing but take a lock. CPython 3.14 loses most locks made in C so."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    used = [SafeLock() for _ in range(100)]
    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        for lock in used:
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.001)
                for _ in range(200_000):  # not for ever: what is raised in a finalizer is lost
                    with lock:
                        pass
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    free: list[bool] = []
    other = threading.Thread(target=lambda: free.extend(lock.acquire(blocking=False) for lock in used))
    other.start()
    other.join()
    assert all(free)


def test_locks_that_any_thread_takes_had_a_window_on_python_3_14() -> None:
    """One that an interrupt kept would stop all decoding, a forked child's rounds, or the way out of SIGTERM."""
    assert isinstance(wire._one_at_a_time, SafeLock)
    assert isinstance(low_latency._holders.guard, SafeLock)
    assert isinstance(Leaving((), 0.0, None)._guard, SafeLock)


def test_a_state_is_taken_over_while_an_interrupted_trainer_computes() -> None:
    """An interrupted caller goes on when the awaited work has ended, as that may be at the parameters just then."""
    thread, changing, ended = LoopThread("test"), threading.Event(), list[bool]()
    waiter = threading.main_thread().ident
    assert waiter is not None

    async def take_over() -> None:
        loop = asyncio.get_running_loop()
        try:
            changing.set()
            await loop.create_future()
        finally:
            changed = loop.create_future()
            loop.call_later(0.2, changed.set_result, None)
            await changed
            ended.append(True)

    def interrupt() -> None:
        changing.wait(LONG_S)
        signal.pthread_kill(waiter, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            thread.run(take_over(), LONG_S)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [True]
    interrupting.join()
    thread.stop(nothing, LONG_S)


def test_an_interrupt_at_any_moment_leaves_a_thread_that_answers() -> None:
    """`run` and `stop`: the next call is answered, and the last one ends the thread."""
    thread = LoopThread("test")

    def ask() -> None:
        work = nothing()
        try:
            thread.run(work, LONG_S)
        finally:
            work.close()

    whole = Interrupt(0)
    whole.during(ask)
    for moment in range(1, min(whole.moments, 200) + 1):
        Interrupt(moment).during(ask)
        thread.run(nothing(), LONG_S)
    for moment in range(1, 60):
        ending = LoopThread("ending")
        Interrupt(moment).during(lambda thread=ending: thread.stop(nothing, LONG_S))  # type: ignore[misc]
        ending.stop(nothing, LONG_S)
        assert not ending._thread.is_alive()
    thread.stop(nothing, LONG_S)
