"""Averages that a group commits are those that their reducers made, whoever leads and however many say otherwise."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from shoal.averaging.allreduce.round import Outcome, Round
from shoal.protocol.wire import Held, PartAverage
from tests.sim.rpc_kit import SimNet, on_sim
from tests.sim.test_lying_members import NUMEL, bits, members, named


def holds_its_own(liar: Round) -> None:
    """It reports, and gives, averages of its own in place of those that it was given; it commits them if it leads."""
    tiles = liar._tiles
    wrong = [torch.full((tile.numel,), 1e4).numpy().tobytes() for tile in tiles._tiles]

    def of(held: Held) -> Held:
        return replace(held, digest=tiles._digests.of(held, wrong[held.tile]))

    averaged, mine, arrived = liar.machine.averaged, dict[int, Held](), defaultdict[int, asyncio.Event](asyncio.Event)

    def lie(held: Held, now: float, giver: int) -> bool:
        mine[held.tile] = of(held)
        arrived[held.tile].set()
        return averaged(mine[held.tile], now, giver)

    async def give(number: int) -> Any:
        await arrived[number].wait()
        return PartAverage(mine[number]), bytearray(wrong[number])

    liar.machine.averaged, tiles.average = lie, give  # type: ignore[method-assign]
    if (leader := liar._coordinating) is not None:
        agreed = leader.rules._agreed
        leader.rules._agreed = lambda tile: of(agreed(tile))  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("count", "liars", "reducer"),
    [(3, {0}, 1), (5, {0}, 1), (3, {1, 2}, 0), (7, {3, 4, 5, 6}, 1), (5, {3, 4}, 1)],
    ids=["a leader of three", "a leader of five", "two of three", "four of seven", "two of five"],
)
def test_averages_that_no_reducer_gave_were_committed_and_the_reducer_was_accused(
    count: int, liars: Collection[int], reducer: int
) -> None:
    """All held what one leader, or most members, had made up; and each of them named the reducer that was honest."""

    async def scenario(net: SimNet) -> None:
        group = await members(net, [f"p{place}" for place in range(count)])
        shares = [NUMEL if place == reducer else 0 for place in range(count)]
        before = {place: bits(each) for place, each in enumerate(group)}
        rounds = [each.round(group, shares) for each in group]
        for place in liars:
            holds_its_own(rounds[place])
        ends = await asyncio.gather(*(round_.run() for round_ in rounds), return_exceptions=True)
        for place, (each, end) in enumerate(zip(group, ends, strict=True)):
            if place in liars:
                continue
            if isinstance(end, Outcome):
                each.vector.overwrite()
            true = torch.full((NUMEL,), (count - 1) / 2).numpy().tobytes()
            assert bits(each) == (true if isinstance(end, Outcome) else before[place]), place
            assert named(each) <= {group[liar].peer.peer_id for liar in liars}, place
        await asyncio.gather(*(round_.close() for round_ in rounds))
        for each in group:
            each.release()

    on_sim(scenario)
