"""What a round leaves in memory: nothing, also before Python's cycle collector comes.

That one runs when there are many new objects. A round has few, but they hold buffers: in cycles, rounds would pile up
until a process that averages all day is several times as large as it needs to be.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from shoal import sim
from shoal.errors import RoundFailed
from tests.sim.averaging_kit import Trial


@pytest.fixture
def cycles() -> Iterator[None]:
    """No collection goes on, but for those of the test."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def left() -> Counter[str]:
    """What of ours only the collector can free; it is freed now."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = Counter(type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("shoal."))
    gc.garbage.clear()
    gc.collect()
    return found


@pytest.mark.usefixtures("cycles")
def test_rounds_leave_no_cycles() -> None:
    """Searches, groups, streams, rounds: all are gone with their last reference."""

    async def main() -> None:
        trial = Trial()
        names = ["p0", "p1", "p2"]
        for name in names:
            await trial.add(name, [torch.zeros(20_000)], target_group_size=3)
        await asyncio.gather(*(trial.step(name) for name in names))
        await sim.sleep(10.0)
        left()
        for _ in range(3):
            await asyncio.gather(*(trial.step(name) for name in names))
        await sim.sleep(10.0)
        assert left() == Counter()
        await trial.close()

    sim.run(main, seed=1)


@pytest.mark.usefixtures("cycles")
def test_a_search_that_fails_leaves_no_cycles() -> None:
    """Nobody is there: the search has an exception, whose traceback knows the frames that it came through."""

    async def main() -> None:
        trial = Trial()
        await trial.add("p0", [torch.zeros(20_000)], target_group_size=2)
        for _ in range(3):
            with pytest.raises(RoundFailed):
                await trial.swarm.peer("p0").step(timeout_s=3.0, allow_retries=False)
            await sim.sleep(10.0)
            found = left()  # the first of them brings what is made once
        assert found == Counter()
        await trial.close()

    sim.run(main, seed=2)
