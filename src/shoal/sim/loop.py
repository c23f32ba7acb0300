"""An asyncio event loop on virtual time: when nothing is ready the clock jumps to the next timer.

Hours pass in milliseconds, and what happens follows from the program and its seed alone. Invariants:

- Time moves only when nothing can run, and only to a timer that will run: a cancelled one moves nothing.
- Timers of the same instant fire in the order in which they were set.
- Nothing waits for the machine: no sockets, no threads, no executor; each is refused with what to do instead.
- A simulation hides no crash. What nobody retrieved is raised when it ends; a deadlock, a loop without progress and a
  run past its time limit are errors that say who was waiting where.

Every task and timer belongs to an `Owner`, one life of one simulated process, named by a context variable that tasks
inherit. `freeze` holds what an owner would run (SIGSTOP), `thaw` lets it go on, late; `kill` ends it (SIGKILL): its
tasks are cancelled at once, its timers never fire, and what it still does while it unwinds takes no time and may not
wait. Owners are looked up when something runs, not when it is set, and only while some owner is not running.

The same seed gives the same run within one process. Across processes Python shuffles sets of strings and bytes: set
PYTHONHASHSEED, or do not iterate over sets where order matters.
"""

# ruff: noqa: SLF001 (an event loop works on the inside of asyncio's handles and tasks: that is its side of the contract)

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, NoReturn, TypeVar, TypeVarTuple, cast

from shoal.errors import ClosedError, ConfigError, SimulationError
from shoal.sim.owner import OWNER, Handle, Owner, Task, Tasks, Timer

__all__ = ["VirtualLoop", "run", "sleep"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_TIME_S = 7 * 86_400.0
MAX_TURNS = 50_000_000
MAX_TURNS_AT_ONE_INSTANT = 1_000_000
_WIND_DOWN_S = 60.0
_WIND_DOWN_TURNS = 1_000_000
_BURY_AFTER_TURNS = 64
_CANCEL_AGAIN_TURNS = 16
_SWEEP_ABOVE = 64

_CLOSED = "Event loop is closed"  # asyncio's own words
_nobody = contextvars.Context()


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop of a simulation. `run` makes, runs and closes one; tests rarely need it themselves.

    Args:
        seed: the seed of the simulation; parts that need chance derive theirs from it (`loop.seed`).
        max_time_s: virtual time at which the run is given up.
        max_turns: turns of the loop after which the run is given up.
        max_turns_at_one_instant: turns without time passing that count as a loop without progress.
    """

    _closed: bool  # the base class's

    def __init__(
        self,
        *,
        seed: int = 0,
        max_time_s: float = MAX_TIME_S,
        max_turns: int = MAX_TURNS,
        max_turns_at_one_instant: int = MAX_TURNS_AT_ONE_INSTANT,
    ) -> None:
        super().__init__()
        self.set_debug(enabled=False)
        self.seed = seed
        self.turns = 0
        self._now = 0.0
        self._max_time_s, self._max_turns, self._max_still = max_time_s, max_turns, max_turns_at_one_instant
        self._turn_limit = min(max_turns, max_turns_at_one_instant)
        self._ready: deque[Handle | Timer] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._timers_cancelled = 0
        self._timer_serial = 0
        self._task_serial = 0
        self._tasks = Tasks()  # of nobody: the test's own
        self._owners: dict[Owner, None] = {}
        self._gated = False
        self._failures: list[BaseException] = []
        self._stopping = False
        self.set_exception_handler(_note_failure)

    # --------------------------------------------------------------------------------------------------- time and turns

    def time(self) -> float:
        """Virtual seconds since the simulation began."""
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> Handle:
        if self._closed:
            raise RuntimeError(_CLOSED)
        handle = Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> Timer:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> Timer:
        if self._closed:
            raise RuntimeError(_CLOSED)
        handle = Timer(when, callback, args, self, context)
        self._timer_serial = serial = self._timer_serial + 1
        heapq.heappush(self._timers, (when, serial, handle))
        return handle

    def _timer_handle_cancelled(self, handle: Timer) -> None:
        if not handle._scheduled:
            return
        self._timers_cancelled += 1
        if self._timers_cancelled > _SWEEP_ABOVE and self._timers_cancelled * 2 > len(self._timers):
            # `handle` itself is marked as cancelled only after this call: it stays in the heap, and is counted.
            self._timers[:] = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._timers_cancelled = 1

    def _run_once(self) -> None:
        """One turn: jump if nothing is ready, collect the timers that are due, run what is ready."""
        ready, timers = self._ready, self._timers
        if not ready and not self._stopping:
            self._jump()
        now = self._now
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False
            if timer._cancelled:
                self._timers_cancelled -= 1
            else:
                ready.append(timer)
        self.turns += 1
        if self.turns > self._turn_limit:
            self._give_up_turning()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled and (not self._gated or self._admit(handle)):
                handle._run()

    def _jump(self) -> None:
        """Move the clock to the next timer that will run."""
        timers = self._timers
        while timers:
            when, _, timer = timers[0]
            if timer._cancelled:
                self._timers_cancelled -= 1
            elif self._gated and (owner := timer.owner()) is not None and not owner.running:
                if not owner.killed:
                    owner.held_timers.append(timers[0])
            else:
                break
            heapq.heappop(timers)
            timer._scheduled = False
        else:
            raise SimulationError(
                f"deadlock at {self._now:.6g} s: everything waits and no timer is set. {self._who_waits()}"
            )
        if when > self._max_time_s:
            raise SimulationError(
                f"the simulation did not end within {self._max_time_s:g} virtual seconds (the next timer is at {when:g}"
                f" s). {self._who_waits()}"
            )
        if when > self._now:
            self._now = when
            self._turn_limit = min(self._max_turns, self.turns + self._max_still)

    def _give_up_turning(self) -> NoReturn:
        if self.turns > self._max_turns:
            raise SimulationError(
                f"the simulation did not end within {self._max_turns} turns of the loop (it is {self._now:.6g} s)."
                f" {self._who_waits()}"
            )
        raise SimulationError(
            f"no progress: {self._max_still} turns of the loop and it is still {self._now:.6g} s. A task that polls"
            f" without waiting? {self._who_waits()}"
        )

    def _who_waits(self) -> str:
        waiting = [task for tasks in self._all_tasks() for task in tasks.pending()]
        lines = [f"\n  {task.describe()}" for task in waiting[:12]]
        more = f"\n  … and {len(waiting) - 12} more" if len(waiting) > 12 else ""
        return f"Waiting tasks: {len(waiting)}{''.join(lines)}{more}"

    # ----------------------------------------------------------------------------------------------- tasks and failures

    # What asyncio leaves to each version: 3.14 adds `eager_start`, which would run code outside of its turn.
    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
        **_unused: object,
    ) -> asyncio.Task[T]:
        if self._closed:
            coro.close()
            raise RuntimeError(_CLOSED)
        self._task_serial += 1
        text = f"task-{self._task_serial}" if name is None else str(name)
        owner = OWNER.get() if context is None else context.get(OWNER)
        task = Task(
            self._task_serial, owner, cast("Coroutine[Any, Any, T]", coro), loop=self, name=text, context=context
        )
        (self._tasks if owner is None else owner.tasks).add(task)
        return task

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` to its end, then cancel what is left, close the loop and raise what nobody retrieved."""
        error: BaseException | None = None
        try:
            result = self.run_until_complete(self.create_task(main, name="main"))
        except BaseException as raised:  # noqa: BLE001 (raised again below, with what else went wrong)
            error = raised
        self._wind_down()
        failures = list({id(failure): failure for failure in self._failures if failure is not error}.values())
        if error is None and len(failures) == 1:
            error = failures.pop()
        elif error is None and failures:
            error, failures = BaseExceptionGroup("several tasks of the simulation failed unseen", failures), []
        if error is not None:
            for failure in failures:
                error.add_note(f"before that, unseen: {failure!r}")
            if isinstance(error, SimulationError) and error.__cause__ is None and failures:
                error.__cause__ = failures[0]
            error.add_note(f"simulation seed: {self.seed}")
            try:
                raise error
            finally:
                del error, failures
        return result

    def _wind_down(self) -> None:
        """Cancel what is left and let it unwind, for a bounded time; then close."""
        for owner in self._owners:
            self.thaw(owner)
        self._max_time_s = self._now + 2 * _WIND_DOWN_S
        self._max_turns = self.turns + _WIND_DOWN_TURNS
        self._max_still = _WIND_DOWN_TURNS
        self._turn_limit = self._max_turns
        self._stopping = False
        for _ in range(3):
            left = [task for tasks in self._living_tasks() for task in tasks.pending()]
            dying = [owner.ended for owner in self._owners if owner.ended is not None and not owner.ended.done()]
            if not left and not dying:
                break
            for task in left:
                task.cancel("the simulation is over")
            self._go_on(asyncio.wait([*left, *dying], timeout=_WIND_DOWN_S))
        self._go_on(self.shutdown_asyncgens())
        for tasks in self._living_tasks():
            for task in tasks.pending():
                task._log_destroy_pending = False
                self._failures.append(SimulationError(f"a task does not end when it is cancelled: {task.describe()}"))
            for task in tasks.failed():
                self._note_failed(task)
        for owner in self._owners:
            for task in owner.tasks.pending():
                with contextlib.suppress(Exception):  # a killed process: nobody is there to hear of it
                    task.get_coro().close()
        self.close()
        self._timers.clear()

    def _go_on(self, coroutine: Coroutine[Any, Any, object]) -> None:
        try:
            self.run_until_complete(self.create_task(coroutine, name="wind-down"))
        except SimulationError as error:
            self._failures.append(error)

    def _note_failed(self, task: Task[Any]) -> None:
        error = task.exception()
        if error is not None:
            error.add_note(f"raised in {task.describe()}, which nobody awaited")
            self._failures.append(error)

    def _all_tasks(self) -> Iterator[Tasks]:
        yield self._tasks
        for owner in self._owners:
            yield owner.tasks

    def _living_tasks(self) -> Iterator[Tasks]:
        yield self._tasks
        for owner in self._owners:
            if not owner.killed:
                yield owner.tasks

    # ----------------------------------------------------------------------------------------------------------- owners

    def spawn(self, owner: Owner, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a task that belongs to `owner`, as does all that it starts.

        Raises:
            ClosedError: the owner was killed.
        """
        if owner.killed:
            coroutine.close()
            raise ClosedError(f"{owner.name} was killed: nothing can be started in it")
        self._owners[owner] = None
        context = contextvars.copy_context()
        context.run(OWNER.set, owner)
        return self.create_task(coroutine, name=name, context=context)

    def freeze(self, owner: Owner) -> None:
        """Run nothing of this owner until `thaw`. Its clock goes on: afterwards its timers are late."""
        if owner.running:
            self._owners[owner] = None
            owner.running = False
            self._gated = True

    def thaw(self, owner: Owner) -> None:
        """Go on where `freeze` stopped."""
        if owner.running or owner.killed:
            return
        owner.running = True
        for entry in owner.held_timers:
            if not entry[2]._cancelled:
                entry[2]._scheduled = True
                heapq.heappush(self._timers, entry)
        self._ready.extend(owner.held_ready)
        owner.held_timers, owner.held_ready = [], []
        self._gated = any(not owner.running for owner in self._owners)

    def kill(self, owner: Owner) -> None:
        """End this owner: its timers never fire again, its tasks are cancelled and unwind without time passing.

        A task that does not end is cancelled a few times more and then never resumed. What its tasks raise while they
        unwind is not reported: a killed process has nobody to tell.
        """
        if owner.killed:
            return
        self.thaw(owner)
        self._owners[owner] = None
        owner.running, owner.killed = False, True
        self._gated = True
        owner.ended = self.create_future()
        failed_before = owner.tasks.failed()
        for task in owner.tasks.pending():
            task.cancel("killed")
        self.call_soon(self._bury, owner, failed_before, 0, context=_nobody.copy())

    def _bury(self, owner: Owner, failed_before: list[Task[Any]], turns: int) -> None:
        pending = owner.tasks.pending()
        if pending and turns < _BURY_AFTER_TURNS:
            if turns % _CANCEL_AGAIN_TURNS == _CANCEL_AGAIN_TURNS - 1:
                for task in pending:
                    task.cancel("killed")
            self.call_soon(self._bury, owner, failed_before, turns + 1, context=_nobody.copy())
            return
        owner.buried = True
        for task in pending:
            task._log_destroy_pending = False
        for task in owner.tasks.failed():
            if task in failed_before:
                self._note_failed(task)
            else:
                task._log_traceback = False
        cast("asyncio.Future[None]", owner.ended).set_result(None)

    def _admit(self, handle: Handle | Timer) -> bool:
        """Whether this may run now; if it belongs to a frozen owner it is kept for later."""
        owner = handle.owner()
        if owner is None or owner.running:
            return True
        if owner.killed:
            # While it unwinds its tasks go on; they find that no timer fires and that the network is gone.
            return not owner.buried and not isinstance(handle, Timer)
        owner.held_ready.append(handle)
        return False

    # ---------------------------------------------------------------------------------------------- what is not allowed

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> Handle:
        """As `call_soon`: there is only this thread."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: object, func: Callable[[*Ts], object], *args: *Ts) -> NoReturn:
        """Refused: a thread takes real time.

        Raises:
            SimulationError: always.
        """
        raise SimulationError(
            "no threads in a simulation (run_in_executor, to_thread, name lookups):"
            " use Env.executor, which runs inline here"
        )


def _note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The loop's exception handler: keeps what would only be logged elsewhere."""
    if isinstance(loop, VirtualLoop):
        error = context.get("exception") or SimulationError(context["message"])
        error.add_note(
            f"{context['message']} ({context.get('handle') or context.get('task') or context.get('future')})"
        )
        loop._failures.append(error)


async def sleep(delay_s: float) -> None:
    """Let virtual time pass: for tests, which must never sleep for real.

    Raises:
        SimulationError: the running loop is not virtual.
    """
    if not isinstance(asyncio.get_running_loop(), VirtualLoop):
        raise SimulationError("shoal.sim.sleep is for virtual time only: run this under shoal.sim.run")
    await asyncio.sleep(delay_s)


def run(
    main: Callable[[], Coroutine[Any, Any, T]] | Coroutine[Any, Any, T],
    *,
    seed: int = 0,
    max_time_s: float = MAX_TIME_S,
    max_turns: int = MAX_TURNS,
    max_turns_at_one_instant: int = MAX_TURNS_AT_ONE_INSTANT,
) -> T:
    """Run a coroutine on virtual time and return what it returns. `asyncio.run` for simulations.

    Args:
        main: a coroutine, or a function without arguments that makes one.
        seed: where all chance of the simulation comes from (`Swarm` takes it from the loop). A failure names it.
        max_time_s: virtual seconds after which the run fails.
        max_turns: turns of the loop after which the run fails.
        max_turns_at_one_instant: turns without time passing after which the run fails.

    Raises:
        SimulationError: a deadlock, or a limit.
        ConfigError: `main` is not a coroutine, or an event loop is already running in this thread.
        BaseException: what `main` raised; else what a task or callback raised and nobody retrieved (several: in a
            group).
    """
    coroutine = main() if callable(main) else main
    if not isinstance(coroutine, Coroutine):
        raise ConfigError(f"main must be a coroutine, or a function that makes one; got {type(main).__name__}")
    if asyncio._get_running_loop() is not None:
        coroutine.close()
        raise ConfigError("shoal.sim.run cannot be called while an event loop runs in this thread")
    loop = VirtualLoop(
        seed=seed, max_time_s=max_time_s, max_turns=max_turns, max_turns_at_one_instant=max_turns_at_one_instant
    )
    return loop.run(coroutine)
