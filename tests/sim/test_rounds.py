"""How a peer looks at the swarm while a round of its own searches for a group, and the end of a round itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shoal import sim
from shoal.averaging import Averager, AveragerSettings, StepResult
from shoal.averaging.allreduce.round import Outcome
from shoal.averaging.strangers import NO_STRANGERS
from shoal.base.clock import Env
from shoal.base.tasks import Changes
from shoal.run.rounds import Rounds
from shoal.run.view.progress import SwarmView
from shoal.sim import run
from tests.sim.round_kit import RoundPeer, gather_group
from tests.sim.rpc_kit import SimNet, on_sim
from tests.situations import reaches


class _Searching:
    """An averager that finds no group."""

    looking, prefix, settings = True, "run_grad", AveragerSettings()

    async def step(self, **_: Any) -> None:
        await sim.sleep(30)


async def searched(rounds: Rounds) -> StepResult | None:
    """A round that finds no group, until a better state is seen."""
    return await rounds.run(
        cast("Averager", _Searching()),
        tag="",
        hopeless=lambda view: view.behind,
        expected=frozenset,
        prepare=lambda _: (1.0, 1.0),
        most_weight=lambda _: 1.0,
        strangers=NO_STRANGERS,
        apply=lambda _: None,
    )


def test_news_right_after_a_look_are_seen_at_once() -> None:
    """The news of several peers can come in one turn of the loop: the last ones do not wait for the next second."""

    async def main() -> float:
        loop, news, came_at = asyncio.get_running_loop(), Changes(), list[float]()

        def arrive() -> None:
            came_at.append(loop.time())
            news.notify()

        def look() -> SwarmView:
            if not came_at:
                loop.call_soon(arrive)
            return cast("SwarmView", SimpleNamespace(behind=bool(came_at)))

        loop.call_later(0.1, news.notify)
        assert await searched(Rounds(Env(), look, news)) is None
        return loop.time() - came_at[0]

    assert run(main()) < 0.01


def test_news_during_a_search_make_no_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task for each wait made epochs of small models slower. A round is one task, however much is heard meanwhile."""

    async def main() -> int:
        loop, news, made = asyncio.get_running_loop(), Changes(), list[object]()
        create_task = loop.create_task

        def counted(work: Any, **options: Any) -> asyncio.Task[Any]:
            made.append(work)
            return create_task(work, **options)

        monkeypatch.setattr(loop, "create_task", counted)
        for number in range(5):
            loop.call_later(0.1 * number, news.notify)
        looks: list[None] = []

        def look() -> SwarmView:
            looks.append(None)
            return cast("SwarmView", SimpleNamespace(behind=len(looks) == 5))

        await searched(Rounds(Env(), look, news))
        return len(made)

    assert run(main()) == 1


@pytest.mark.parametrize("who", [0, 1], ids=["the coordinator", "another member"])
def test_a_round_that_is_cancelled_in_the_moment_of_its_success_has_succeeded(who: int) -> None:
    """Its caller hears of the cancellation. The others have the averages, and get from this member what they lack."""

    async def scenario(net: SimNet) -> None:
        group = [await RoundPeer.make(net, f"p{i}", torch.full((300,), float(i))) for i in range(3)]
        await gather_group(group)
        rounds = [each.round(group, [100, 100, 100]) for each in group]
        tasks = [asyncio.ensure_future(each.run()) for each in rounds]
        rounds[who]._done.add_done_callback(lambda _: tasks[who].cancel())
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ends[who], asyncio.CancelledError)
        assert rounds[who].machine.rules.succeeded
        others = [end for end in ends if isinstance(end, Outcome)]
        assert len(others) == 2
        assert (commit := rounds[who].machine.rules.commit) is not None
        assert others[0].commit == others[1].commit == commit.unsigned
        await asyncio.gather(*(each.close() for each in rounds))
        for each in group:
            each.vector.overwrite()
            assert each.vector.tensors[0].eq(1.0).all()
            each.release()

    with reaches("a round is given up in the moment in which it succeeds here"):
        on_sim(scenario)
