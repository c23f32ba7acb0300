"""A member that comes to each round and gives nothing: the others wait for it now and then, not in every round."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal import sim
from shoal.allreduce.round import Outcome
from shoal.averager import Averager
from shoal.errors import RoundFailed
from shoal.strategies import DiLoCo, Strategy
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.strategy_kit import MEAN

BATCH, BATCH_S, BATCHES = 4, 0.5, 3


def gives_nothing(averager: Averager, first: Trainer) -> None:
    """From now on it comes to each group, leads some, and does nothing until the others have gone on, or for 30 s."""
    begin: Any = averager._begin_round

    async def begin_nothing(group: Any, *rest: Any) -> Any:
        async def run() -> Outcome:
            before = first.participant.epoch
            for _ in range(150):
                if first.participant.epoch == before:
                    await sim.sleep(0.2)
            raise RoundFailed("it gives nothing", [], round_id=group.round_id)

        round_ = await begin(group, *rest)
        round_.run = run
        return round_

    averager._begin_round = begin_nothing  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("strategy", "count"),
    [
        pytest.param(None, 4, id="synchronous"),
        pytest.param(None, 2, id="two"),
        pytest.param(DiLoCo(BATCHES, MEAN), 4, id="merges", marks=pytest.mark.long),
    ],
)
def test_a_member_that_gives_nothing_is_not_waited_for_in_each_round(strategy: Strategy | None, count: int) -> None:
    """It cost each round 12 s, and 120 s where it led: three peers made a sixth of their steps, with DiLoCo a tenth.

    One that trained with it alone made none.
    """

    async def main() -> None:
        run = Run(target=count * BATCH * BATCHES if strategy is None else 1)
        names = [f"p{number}" for number in range(count)]
        for name in names:
            await run.add(name, strategy=strategy)
        first, idle, end = run.swarm.peer(names[0]), run.swarm.peer(names[-1]), asyncio.Event()
        for name in names:
            run.swarm.spawn(name, run.swarm.peer(name).train(BATCH, duration_s=BATCH_S, until=end.is_set))
        await sim.sleep(10.0)

        async def steps(seconds: float) -> int:
            before = first.participant.epoch
            await sim.sleep(seconds)
            return first.participant.epoch - before

        calm = await steps(30.0)
        gives_nothing(idle.participant._averager, first)
        await sim.sleep(60.0)
        assert await steps(60.0) > 2 * 0.6 * calm * (count - 1) / count

    sim.run(main, seed=1)
