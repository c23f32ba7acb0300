"""When a peer fetches better states while its trainer goes on, and the states of several parts of a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal import sim
from shoal.base.clock import InlineExecutor
from shoal.base.tasks import Changes
from shoal.errors import StateUnavailable
from shoal.run.chains import Chains
from shoal.run.decide.phases import PhaseMachine
from shoal.run.decide.state_name import StateName
from shoal.run.join.fetching import Fetching
from shoal.run.takeover import Takeover
from shoal.run.view.progress import SwarmView

VIEW = SwarmView(peers=(), together=frozenset(), coming=frozenset(), done=0, rate=0.0, epoch=1, behind=True)


@pytest.mark.parametrize(("fails", "fetches"), [(False, 9), (True, 3)])
def test_a_fetch_that_failed_is_followed_by_a_pause(*, fails: bool, fetches: int) -> None:
    """Each was: a peer that never stands still was behind for 5 s after each state, and merges went on without it.

    The first pause is short: a peer that wakes finds its connections lost, and has new ones soon.
    """
    begun = 0

    async def fetch(timeout_s: float) -> bool:
        nonlocal begun
        begun += 1
        if fails:
            raise StateUnavailable("nobody gave it")
        return True

    async def main() -> None:
        fetching = Fetching(fetch, Changes(), on_failure=lambda error: None)
        for _ in range(9):
            fetching.observe(VIEW, 60.0, asyncio.get_running_loop().time())
            await sim.sleep(1.0)
        assert begun == fetches
        await fetching.close()

    sim.run(main)


@pytest.mark.parametrize("taken", [True, False])
def test_a_state_that_came_too_late_gives_no_patience_back(*, taken: bool) -> None:
    """It counted as taken over: whoever gives old states slowly could stop the trainer again and again."""

    async def fetch(timeout_s: float) -> bool:
        await sim.sleep(30.0)
        return taken

    async def main() -> None:
        fetching, loop = Fetching(fetch, Changes(), on_failure=lambda error: None), asyncio.get_running_loop()
        assert not await fetching.wait(VIEW, 60.0, patient=lambda: False)  # the trainer goes on before
        await sim.sleep(15.0)
        assert fetching.waits(VIEW, loop.time()) is taken
        await fetching.close()

    sim.run(main)


@pytest.mark.parametrize(("trains_on", "stands_s"), [(True, 0.0), (False, 4.0)])
def test_a_trainer_that_waits_for_nobody_stands_still_for_what_is_here_only(
    *, trains_on: bool, stands_s: float
) -> None:
    """It stood still for a step that was still on its way, 3.9 s on a slow line; the next fetch brings that one."""
    ours, first, second = (StateName(epoch, bytes(32), epoch) for epoch in (1, 2, 3))
    names = iter((first, second))
    own: Any = SimpleNamespace(name=ours, committed=None, has_followed=lambda update: None)
    takeover: Any = None

    def step() -> None:
        own.name = own.update.name

    def follow(update: Any) -> None:
        own.update = update

    @asynccontextmanager
    async def hold() -> AsyncIterator[bool]:
        yield True

    async def coming(state: object, committed: object, *, until: float) -> Any:
        if own.name == first:
            if until <= asyncio.get_running_loop().time():
                return None
            await sim.sleep(4.0)
        name = next(names, None)
        return None if name is None else SimpleNamespace(name=name, is_step=True)

    async def give_up(took_s: float) -> None:
        pass

    @asynccontextmanager
    async def following(contacts: object) -> AsyncIterator[None]:
        yield

    async def fetch(timeout_s: float) -> bool:
        await takeover.run(timeout_s)
        return cast(bool, takeover.took_over)

    async def main() -> None:
        nonlocal takeover
        own.step, own.hold, own.follow, own.drop_update = step, hold, follow, lambda: None
        fetching = Fetching(fetch, Changes(), on_failure=lambda error: None)
        outlook: Any = SimpleNamespace(
            trains_on=trains_on,
            fetching=fetching,
            claimed=lambda: SimpleNamespace(behind=own.name != second, best=second.key),
            state_replaced=lambda: None,
        )
        parts: dict[str, Any] = dict.fromkeys(("core", "machine", "beginning", "gossip", "states", "notices", "news"))
        parts["core"] = SimpleNamespace(env=SimpleNamespace(executor=InlineExecutor()))
        parts["machine"], parts["beginning"] = PhaseMachine(), SimpleNamespace(state_taken=lambda: None)
        catch_up: Any = SimpleNamespace(next=coming, following=following, give_up=give_up)
        takeover = Takeover(own=own, outlook=outlook, catch_up=catch_up, **parts)
        loop, stood_s = asyncio.get_running_loop(), 0.0
        while own.name != second:
            fetching.observe(VIEW, 60.0, loop.time())
            await sim.sleep(1.0)
            if fetching.has_news:
                began = loop.time()
                await fetching.wait(VIEW, 60.0, patient=lambda: True)
                stood_s += loop.time() - began
        assert stood_s == stands_s
        await fetching.close()

    sim.run(main)


def test_states_of_several_parts_are_downloaded_at_once() -> None:
    """They came one after another, and the first was behind again when the last was here."""
    all_there = asyncio.Barrier(3)

    async def download(timeout_s: float) -> bool:
        await all_there.wait()
        return True

    def run(work: Any, timeout_s: float) -> Any:
        async def within() -> Any:
            async with asyncio.timeout(timeout_s):
                return await work

        return asyncio.run(within())

    chains = SimpleNamespace(participants=[SimpleNamespace(turn=SimpleNamespace(download=download))] * 3, _run=run)
    assert Chains.load_from_peers(cast(Chains, chains), 1.0)
