"""An asyncio event loop on virtual time: when nothing is ready the clock jumps to the next timer.

Hours pass in milliseconds, and the run follows from the program and its seed alone. Invariants:

- Time moves only when nothing can run, and only to a timer that will run: a cancelled one moves nothing.
- Timers of the same instant fire in the order in which they were set.
- Nothing waits for the machine: sockets, threads and executors are refused, with a hint at what to use instead.
- A deadlock, a loop without progress and a run past its limits are errors. They name the waiting tasks and the places
  where these wait.

Every task and timer belongs to an `Owner`, one life of one simulated process, named by a context variable that tasks
inherit. `freeze` holds an owner's code back (SIGSTOP, a closed lid), and `thaw` lets it go on: its clock has stood
still meanwhile, like the clock of shoal's real loop (`shoal.base.waiting`). `kill` ends it (SIGKILL): its tasks are
cancelled at once, its timers never fire, and its unwinding takes no time and may not wait. Owners are looked up when
code runs, not when it is scheduled, and only while some owner is not running.

The same seed gives the same run within one process. Across processes Python shuffles sets of strings and bytes: set
PYTHONHASHSEED, or do not iterate over sets where order matters.
"""

# ruff: noqa: SLF001 (an event loop works on the inside of asyncio's handles and tasks: that is its side of the contract)

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from shoal.base.clock import LONGEST_TURN_S
from shoal.errors import ClosedError, SimulationError
from shoal.sim.owner import OWNER, Handle, Owner, Task, Tasks, Timer
from shoal.sim.whims import Mischief

__all__ = ["VirtualLoop", "world_time"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_TIME_S = 7 * 86_400.0
MAX_TURNS = 50_000_000
MAX_TURNS_AT_ONE_INSTANT = 1_000_000
_BURY_AFTER_TURNS = 64
_ROUNDING_S = 1e-9
"""If a host's clock has stood still, its timers fire so much later: never before their time by that clock."""
_CANCEL_AGAIN_TURNS = 16
_SWEEP_ABOVE = 64
_CLOSED = "Event loop is closed"  # asyncio's own words
_NOBODY = contextvars.Context()


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop of a simulation. `shoal.sim.run` makes, runs and closes one.

    Args:
        seed: the seed of the simulation, from which all parts that need chance derive theirs.
        max_time_s: virtual time at which the run is given up.
        max_turns: turns of the loop after which the run is given up.
        max_turns_at_one_instant: turns without time passing that count as a loop without progress.
        mischief: the whims of the run; None for none.

    Attributes:
        seed: the seed of the simulation.
        mischief: as given.
        turns: the number of turns that the loop has made.
        failures: exceptions of callbacks, and of tasks and futures that nobody awaited, in the order of their notice.
        owners: all owners that ever had a task.
    """

    _closed: bool  # the base class's

    def __init__(
        self,
        *,
        seed: int = 0,
        max_time_s: float = MAX_TIME_S,
        max_turns: int = MAX_TURNS,
        max_turns_at_one_instant: int = MAX_TURNS_AT_ONE_INSTANT,
        mischief: Mischief | None = None,
    ) -> None:
        super().__init__()
        self.mischief = mischief
        self.set_debug(enabled=False)
        self.set_exception_handler(_note_failure)
        self.seed = seed
        self.turns = 0
        self.failures: list[BaseException] = []
        self.owners: dict[Owner, None] = {}
        self._now = 0.0
        self._ready: deque[Handle | Timer] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._timers_cancelled = 0
        self._timer_serial = 0
        self._task_serial = 0
        self._tasks = Tasks()  # of nobody: the test's own
        self._gated = False  # some owner does not run
        self._has_stood = False  # some owner's clock has
        self._stopping = False
        self.set_limits(max_time_s, max_turns, max_turns_at_one_instant)

    def set_limits(self, max_time_s: float, max_turns: int, max_turns_at_one_instant: int) -> None:
        """Change the limits at which the run is given up."""
        self._max_time_s, self._max_turns, self._max_still = max_time_s, max_turns, max_turns_at_one_instant
        self._turn_limit = min(max_turns, self.turns + max_turns_at_one_instant)

    # ------------------------------------------------------------------------------------------------- time and turns

    def time(self) -> float:
        """Virtual seconds since the simulation began; for an owner that was frozen, without most of that time."""
        if not self._has_stood:  # nearly always, and nothing is asked more often
            return self._now
        owner = OWNER.get()
        return self._now if owner is None else self._now - owner.stood_s

    def world_time(self) -> float:
        """Virtual seconds since the simulation began, the same for every caller."""
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
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> Timer:
        if self._closed:
            raise RuntimeError(_CLOSED)
        timer = Timer(when, callback, args, self, context)
        if self.mischief is not None:
            when += self.mischief.timer_late_s()
        if self._has_stood and (owner := OWNER.get()) is not None and owner.stood_s:
            when = when + owner.stood_s + _ROUNDING_S
        self._push(when, timer)
        return timer

    def call_at_world_time(self, when: float, callback: Callable[[], object], context: contextvars.Context) -> Timer:
        """As `call_at`, in the time that is the same for every caller."""
        timer = Timer(when, callback, (), self, context)
        self._push(when, timer)
        return timer

    def _push(self, world_time: float, timer: Timer) -> None:
        self._timer_serial = serial = self._timer_serial + 1
        heapq.heappush(self._timers, (world_time, serial, timer))

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
            del timer
        self.turns += 1
        if self.turns > self._turn_limit:
            self._give_up_turning()
        if self.mischief is not None and self.mischief.whims.other_order and len(ready) > 1:
            self._reorder(self.mischief)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled and (not self._gated or self._admit(handle)):
                try:  # as `Handle._run`: a call less for each handle
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 (raised at the end of the run)
                    self.call_exception_handler(
                        {"message": "exception in a callback", "exception": error, "handle": handle}
                    )
            # From Python 3.12 on a kept traceback keeps this frame, too. It should not keep what ran in the frame.
            del handle

    def _reorder(self, mischief: Mischief) -> None:
        """Let the owners of what is ready take turns in another order; each keeps the order of its own."""
        owners = list(dict.fromkeys(handle.owner() for handle in self._ready))
        place = dict(zip(owners, mischief.shuffled(len(owners)), strict=True))
        ordered = sorted(self._ready, key=lambda handle: place[handle.owner()])
        self._ready.clear()
        self._ready.extend(ordered)

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
        waiting = [task for tasks in (self._tasks, *(owner.tasks for owner in self.owners)) for task in tasks.pending()]
        lines = [f"\n  {task.describe()}" for task in waiting[:12]]
        more = f"\n  … and {len(waiting) - 12} more" if len(waiting) > 12 else ""
        return f"Waiting tasks: {len(waiting)}{''.join(lines)}{more}"

    # ---------------------------------------------------------------------------------------------------------- tasks

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
        **_unused: object,  # 3.14's `eager_start` would run code outside of its turn
    ) -> asyncio.Task[T]:
        if self._closed:
            coro.close()
            raise RuntimeError(_CLOSED)
        self._task_serial += 1
        text = f"task-{self._task_serial}" if name is None else str(name)
        owner = OWNER.get() if context is None else context.get(OWNER)
        task = Task(self._task_serial, owner, coro, loop=self, name=text, context=context)
        (self._tasks if owner is None else owner.tasks).add(task)
        return task

    def living_tasks(self) -> Iterator[Tasks]:
        """The tasks without an owner, and those of every owner that was not killed."""
        yield self._tasks
        for owner in self.owners:
            if not owner.killed:
                yield owner.tasks

    def note_failed(self, task: Task[Any]) -> None:
        """Keep the exception of a task that nobody awaited."""
        error = task.exception()
        if error is not None:
            error.add_note(f"raised in {task.describe()}, which nobody awaited")
            self.failures.append(error)

    # --------------------------------------------------------------------------------------------------------- owners

    def spawn(self, owner: Owner, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a task that belongs to `owner`, with all that it starts.

        Raises:
            ClosedError: the owner was killed.
        """
        if owner.killed:
            coroutine.close()
            raise ClosedError(f"{owner.name} was killed: nothing can be started in it")
        self.owners[owner] = None
        if owner.ended is None:
            owner.ended = self.create_future()
        context = contextvars.copy_context()
        context.run(OWNER.set, owner)
        return self.create_task(coroutine, name=name, context=context)

    def freeze(self, owner: Owner) -> None:
        """Run nothing of this owner until `thaw`."""
        if owner.running:
            self.owners[owner] = None
            owner.running, owner.frozen_at = False, self._now
            self._gated = True

    def thaw(self, owner: Owner) -> None:
        """Let an owner go on where `freeze` stopped it."""
        if owner.running or owner.killed:
            return
        owner.running = True
        # One turn of its loop has taken all that time, and counts as a turn of the longest length.
        stood_s = max(0.0, self._now - owner.frozen_at - LONGEST_TURN_S)
        owner.stood_s += stood_s
        self._has_stood = True
        for _, _, timer in owner.held_timers:
            timer._scheduled = True
        self._timers[:] = [
            (when + stood_s + _ROUNDING_S if timer.owner() is owner else when, serial, timer)
            for when, serial, timer in (*self._timers, *owner.held_timers)
            if not timer._cancelled
        ]
        heapq.heapify(self._timers)
        self._timers_cancelled = 0
        self._ready.extend(owner.held_ready)
        owner.held_timers, owner.held_ready = [], []
        self._gated = any(not owner.running for owner in self.owners)

    def kill(self, owner: Owner) -> None:
        """End this owner: its timers never fire again, its tasks are cancelled and unwind without time passing.

        A task that does not end is cancelled a few times more and then never resumed. Errors of its tasks while they
        unwind are not reported: a killed process has nobody to tell. `owner.ended` is done when all this is over.
        """
        if owner.killed:
            return
        self.thaw(owner)
        self.owners[owner] = None
        owner.running, owner.killed = False, True
        self._gated = True
        if owner.ended is None:
            owner.ended = self.create_future()
        failed_before = owner.tasks.failed()
        for task in owner.tasks.pending():
            task.cancel("killed")
        self.call_soon(self._bury, owner, owner.ended, failed_before, 1, context=_NOBODY)

    def _bury(self, owner: Owner, ended: asyncio.Future[None], failed_before: list[Task[Any]], turns: int) -> None:
        pending = owner.tasks.pending()
        if pending and turns < _BURY_AFTER_TURNS:
            if turns % _CANCEL_AGAIN_TURNS == 0:
                for task in pending:
                    task.cancel("killed")
            self.call_soon(self._bury, owner, ended, failed_before, turns + 1, context=_NOBODY)
            return
        owner.buried = True
        for task in pending:
            task._log_destroy_pending = False
        for task in owner.tasks.failed():
            if task in failed_before:
                self.note_failed(task)
            else:
                task._log_traceback = False
        ended.set_result(None)

    def _admit(self, handle: Handle | Timer) -> bool:
        """Whether a handle may run now. If it belongs to a frozen owner it is kept for later."""
        owner = handle.owner()
        if owner is None or owner.running:
            return True
        if owner.killed:
            # While it unwinds its tasks go on; they find that no timer fires and that the network is gone.
            return not owner.buried and isinstance(handle, Handle)
        owner.held_ready.append(handle)
        return False

    # -------------------------------------------------------------------------------------------- what is not allowed

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> Handle:
        """Do as `call_soon`: there is only this thread."""
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

    def close(self) -> None:
        """Close the loop and drop everything that was to happen."""
        super().close()
        self._timers.clear()


def world_time(loop: asyncio.AbstractEventLoop) -> float:
    """The time of a simulation, the same for every caller; outside of a simulation the loop's time."""
    return loop.world_time() if isinstance(loop, VirtualLoop) else loop.time()


def _note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The loop's exception handler: keeps errors that would only be logged elsewhere."""
    if isinstance(loop, VirtualLoop):
        error = context.get("exception") or SimulationError(context["message"])
        whose = context.get("handle") or context.get("task") or context.get("future")
        error.add_note(f"{context['message']} ({whose})")
        loop.failures.append(error)
