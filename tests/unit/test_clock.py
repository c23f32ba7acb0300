"""Pauses between tries, and the two ways to run functions."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shoal
from shoal import sim
from shoal.base.clock import (
    Backoff,
    Env,
    Executor,
    InlineExecutor,
    SystemClock,
    ThreadExecutor,
    seconds_text,
    shielded,
)
from shoal.events import EventBus


@pytest.mark.parametrize("seed", range(5))
def test_pauses_grow_with_jitter_to_a_limit(seed: int) -> None:
    """Each is between half of its step and all of it; the steps double up to the limit, and begin again at `reset`."""
    backoff = Backoff(random.Random(seed), first_s=0.1, max_s=1.0)
    for _ in range(2):
        for step_s in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0):
            assert step_s / 2 <= backoff.next_s() <= step_s
        backoff.reset()


def test_equal_seeds_pause_equally() -> None:
    """Chance comes from the given source alone."""
    one, other = (Backoff(random.Random(3)) for _ in range(2))
    assert [one.next_s() for _ in range(9)] == [other.next_s() for _ in range(9)]


def _divide(a: int, *, by: int) -> tuple[float, int]:
    return a / by, threading.get_ident()


def test_executors_return_and_raise_what_the_function_does() -> None:
    """Inline in the loop's thread, or in the pool's."""

    async def main(executor: Executor) -> int:
        result, thread = await executor.run(_divide, 6, by=4)
        assert result == 1.5
        with pytest.raises(ZeroDivisionError):
            await executor.run(_divide, 1, by=0)
        return thread

    assert asyncio.run(main(InlineExecutor())) == threading.get_ident()
    with ThreadPoolExecutor(1) as pool:
        assert asyncio.run(main(ThreadExecutor(pool))) != threading.get_ident()


def test_the_system_clock_goes_forward() -> None:
    """Both readings; the monotonic one never back."""
    clock = SystemClock()
    readings = [clock.monotonic() for _ in range(100)]
    assert readings == sorted(readings)
    assert clock.time() > 1.7e9


def test_each_environment_has_its_own_bus_and_chance() -> None:
    """Nothing is shared by default."""
    one, other = Env(), Env()
    assert one.events is not other.events
    assert one.rng is not other.rng
    assert isinstance(one.events, EventBus)


def test_what_must_not_be_left_half_done_is_waited_for_by_who_is_cancelled() -> None:
    """However often; then the cancellation counts, also over what came of the work."""

    async def main() -> None:
        for fails in (False, True):
            done, ended = asyncio.Event(), list[str]()

            async def work(done: asyncio.Event = done, ended: list[str] = ended, fails: bool = fails) -> None:
                await done.wait()
                ended.append("work")
                if fails:
                    raise ValueError("no")

            waiting = asyncio.create_task(shielded(work()))
            for _ in range(3):
                await sim.sleep(0.1)
                waiting.cancel()
            await sim.sleep(0.1)
            assert not waiting.done()
            done.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert ended == ["work"]

        async def fail() -> None:
            raise ValueError("no")

        async def succeed() -> str:
            return "result"

        with pytest.raises(ValueError, match="no"):
            await shielded(fail())
        assert await shielded(succeed()) == "result"

    sim.run(main)


def test_what_is_left_of_a_timeout_is_printed_short() -> None:
    """A wait that took the rest of its caller's 3 s was "not connected within 2.99999 s"."""
    texts = [seconds_text(seconds) for seconds in (2.99999, 3, 0.5, 12.3456, 300.0, 0.1 + 0.2)]
    assert texts == ["3 s", "3 s", "0.5 s", "12.35 s", "300 s", "0.3 s"]


def test_all_messages_print_timeouts_short() -> None:
    """A number of seconds that somebody's clock has run on is rounded by `seconds_text`."""
    root = Path(shoal.__file__).parent
    found = [
        path.name
        for path in root.rglob("*.py")
        if re.search(r"(timeout|limit|stall)_s:g\}", path.read_text(encoding="utf-8"))
    ]
    assert found == []
