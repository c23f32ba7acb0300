"""A member whose line is far slower than the others': it is heard where rounds are far apart, and holds nobody up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from shoal.sim import run
from tests.sim.averaging_kit import Trial

FAST, SLOW = 125_000.0, 25_000.0
SETTINGS: dict[str, Any] = {"silence_s": 5.0, "min_group_size": 3, "target_group_size": 4, "part_size_bytes": 1 << 15}
NAMES = ("a", "b", "c", "slow")


@pytest.mark.parametrize(
    ("since_last_s", "line", "announced", "heard", "limit_s"),
    [
        (100.0, SLOW, SLOW, True, 26.0),
        (0.0, SLOW, SLOW, False, 20.0),
        (100.0, SLOW, None, False, 27.0),  # it reduces as much as the others
        (100.0, SLOW / 2, SLOW, False, 20.0),
        (100.0, SLOW / 8, SLOW / 8, False, 20.0),
    ],
    ids=["heard", "rounds without a way between", "not announced", "slower than announced", "not worth the time"],
)
def test_a_slow_line_that_was_announced_is_heard_where_rounds_are_far_apart(
    since_last_s: float, line: float, announced: float | None, heard: bool, limit_s: float
) -> None:
    """500 kB: 20 s on the slow line, 6.7 on the others. Otherwise the round ends as it did, without that member."""

    async def main() -> None:
        trial = Trial(bandwidth_bytes_s=FAST)
        trial.swarm.network.add_host("slow", up_bytes_s=line, down_bytes_s=FAST)
        for number, name in enumerate(NAMES):
            width = {"slow": announced}.get(name, FAST)
            values = torch.full((125_000,), float(number))
            await trial.add(name, [values], bandwidth=width, **SETTINGS)
        loop = asyncio.get_running_loop()
        began = loop.time()
        steps = (trial.begin(name, timeout_s=120.0, allow_retries=False, since_last_s=since_last_s) for name in NAMES)
        results = await asyncio.gather(*steps, return_exceptions=True)
        left_out = [each.outcome.left_out for each in results[:3] if not isinstance(each, BaseException)]
        slow = trial.swarm.peer("slow").core.peer_id
        assert left_out == [() if heard else (slow,)] * 3
        assert loop.time() - began < limit_s
        assert not trial.warnings
        await trial.close()

    run(main)
