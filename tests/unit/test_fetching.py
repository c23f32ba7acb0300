"""When a peer fetches better states while its trainer goes on, and the states of several parts of a model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal import sim
from shoal.errors import StateUnavailable
from shoal.optim.fetching import Fetching
from shoal.optim.optimizer import Optimizer
from shoal.progress import SwarmView
from shoal.tasks import Changes

VIEW = SwarmView(peers=(), together=frozenset(), coming=frozenset(), samples=0, rate=0.0, epoch=1, behind=True)


@pytest.mark.parametrize(("fails", "fetches"), [(False, 3), (True, 1)])
def test_a_fetch_that_failed_is_followed_by_a_pause(*, fails: bool, fetches: int) -> None:
    """Each was: a peer that never stands still was behind for 5 s after each state, and merges went on without it."""
    begun = 0

    async def fetch(timeout_s: float) -> None:
        nonlocal begun
        begun += 1
        if fails:
            raise StateUnavailable("nobody gave it")

    async def main() -> None:
        fetching = Fetching(fetch, Changes(), on_failure=lambda error: None)
        for _ in range(3):
            fetching.observe(VIEW, 60.0, asyncio.get_running_loop().time())
            await sim.sleep(1.0)
        assert begun == fetches
        await fetching.close()

    sim.run(main)


def test_states_of_several_parts_are_downloaded_at_once() -> None:
    """They came one after another, and the first was behind again when the last was here."""
    all_there = asyncio.Barrier(3)

    async def download(timeout_s: float, *, patient: bool) -> bool:
        await all_there.wait()
        return True

    def run(work: Any, timeout_s: float) -> Any:
        async def within() -> Any:
            async with asyncio.timeout(timeout_s):
                return await work

        return asyncio.run(within())

    swarm: Any = SimpleNamespace(load_state_timeout=1.0, auxiliary=False, _run=run)
    Optimizer._download(cast(Optimizer, swarm), [cast(Any, SimpleNamespace(download=download)) for _ in range(3)])
