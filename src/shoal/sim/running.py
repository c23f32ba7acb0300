"""Runs a simulation to its end, and hides none of its failures.

When `main` has ended, all other tasks are cancelled and may unwind, for a bounded virtual time. Then the loop is
closed. If a task or callback raised an exception that nobody retrieved, it is raised here: a simulation hides no crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shoal.base.sometimes import counted
from shoal.errors import ConfigError, SimulationError
from shoal.sim.loop import MAX_TIME_S, MAX_TURNS, MAX_TURNS_AT_ONE_INSTANT, VirtualLoop
from shoal.sim.whims import Mischief, Whims

__all__ = ["calm", "run", "sleep"]

T = TypeVar("T")

_WIND_DOWN_S = 60.0
_WIND_DOWN_TURNS = 1_000_000


def run(
    main: Callable[[], Coroutine[Any, Any, T]] | Coroutine[Any, Any, T],
    *,
    seed: int = 0,
    whims: Whims | None = None,
    max_time_s: float = MAX_TIME_S,
    max_turns: int = MAX_TURNS,
    max_turns_at_one_instant: int = MAX_TURNS_AT_ONE_INSTANT,
) -> T:
    """Run a coroutine on virtual time and return its result: `asyncio.run` for simulations.

    Args:
        main: a coroutine, or a function without arguments that makes one.
        seed: the source of all chance in the simulation (`Swarm` takes it from the loop). A failure names it.
        whims: of hosts and network, until `calm`; None for none. A failure names them.
        max_time_s: virtual seconds after which the run fails.
        max_turns: turns of the loop after which the run fails.
        max_turns_at_one_instant: turns without time passing after which the run fails.

    Raises:
        SimulationError: a deadlock, or a limit.
        ConfigError: `main` is not a coroutine, or an event loop is already running in this thread.
        BaseException: the exception of `main`; otherwise the exception of a task or callback that nobody retrieved (of
            several a group).
    """
    coroutine = main() if callable(main) else main
    if not isinstance(coroutine, Coroutine):
        raise ConfigError(f"main must be a coroutine, or a function that makes one; got {type(main).__name__}")
    if asyncio._get_running_loop() is not None:  # noqa: SLF001 (the only way to ask without raising)
        coroutine.close()
        raise ConfigError("shoal.sim.run cannot be called while an event loop runs in this thread")
    loop = VirtualLoop(
        seed=seed,
        max_time_s=max_time_s,
        max_turns=max_turns,
        max_turns_at_one_instant=max_turns_at_one_instant,
        mischief=None if whims is None else Mischief(whims, random.Random(f"{seed}/whims")),
    )
    error: BaseException | None = None
    with counted():
        try:
            result = loop.run_until_complete(loop.create_task(coroutine, name="main"))
        except BaseException as raised:  # noqa: BLE001 (raised again below, with other failures)
            error = raised
        _wind_down(loop)
    error = _account(loop, error)
    if error is not None:
        error.add_note(f"simulation seed: {seed}" if whims is None else f"simulation seed: {seed}; {whims}")
        try:
            raise error
        finally:
            del error  # no cycle between the exception and this frame
    return result


async def sleep(delay_s: float) -> None:
    """Let virtual time pass, for tests, which must never sleep for real.

    Raises:
        SimulationError: the running loop is not virtual.
    """
    if not isinstance(asyncio.get_running_loop(), VirtualLoop):
        raise SimulationError("shoal.sim.sleep is for virtual time only: run this under shoal.sim.run")
    await asyncio.sleep(delay_s)


def calm() -> None:
    """End the whims of the simulation that runs.

    Raises:
        SimulationError: the running loop is not virtual.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise SimulationError("shoal.sim.calm is for simulations only: run this under shoal.sim.run")
    if loop.mischief is not None:
        loop.mischief.calm()


def _account(loop: VirtualLoop, error: BaseException | None) -> BaseException | None:
    """The error of the run, from the exception of `main` and unseen failures."""
    failures = list({id(failure): failure for failure in loop.failures if failure is not error}.values())
    if error is None:
        if len(failures) > 1:
            return BaseExceptionGroup("several tasks of the simulation failed unseen", failures)
        return failures[0] if failures else None
    for failure in failures:
        error.add_note(f"also failed, unseen: {failure!r}")
    if failures and isinstance(error, SimulationError) and error.__cause__ is None:
        error.__cause__ = failures[0]  # a crash is the likeliest reason for a deadlock
    return error


def _wind_down(loop: VirtualLoop) -> None:
    """Cancel all remaining tasks and let them unwind, for a bounded time; then close."""
    if loop.mischief is not None:
        loop.mischief.calm()
    for owner in loop.owners:
        loop.thaw(owner)
    loop.set_limits(loop.time() + 5 * _WIND_DOWN_S, loop.turns + _WIND_DOWN_TURNS, _WIND_DOWN_TURNS)
    for _ in range(3):  # a cancelled task may start something new
        left = [task for tasks in loop.living_tasks() for task in tasks.pending()]
        dying = [owner.ended for owner in loop.owners if owner.killed and not owner.buried and owner.ended is not None]
        if not left and not dying:
            break
        for task in left:
            task.cancel("the simulation is over")
        _go_on(loop, asyncio.wait([*left, *dying], timeout=_WIND_DOWN_S))
    _go_on(loop, loop.shutdown_asyncgens())
    for tasks in loop.living_tasks():
        for task in tasks.pending():
            task._log_destroy_pending = False  # noqa: SLF001 (reported here)
            loop.failures.append(SimulationError(f"a task does not end when it is cancelled: {task.describe()}"))
        for task in tasks.failed():
            loop.note_failed(task)
    for owner in loop.owners:
        for task in owner.tasks.pending():
            coroutine = task.get_coro()
            if coroutine is not None:
                with contextlib.suppress(Exception):  # a killed process, or reported above
                    coroutine.close()
    loop.close()


def _go_on(loop: VirtualLoop, coroutine: Coroutine[Any, Any, object]) -> None:
    try:
        loop.run_until_complete(loop.create_task(coroutine, name="wind-down"))
    except SimulationError as error:
        loop.failures.append(error)
