"""Who takes part in the rounds of the matchmaking benchmark, and until when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks import allreduce, matchmaking
from benchmarks.matchmaking import FAILURES_IN_A_ROW, Round, Turns


class Swarm(allreduce.Contender):
    """A contender without peers."""

    def __init__(self) -> None:
        super().__init__("hivemind", [])
        self.stops = 0

    async def stop(self) -> None:
        self.stops += 1


@pytest.mark.parametrize(("outcomes", "played"), [("--+--+-", 7), ("+---+++", 4), ("---", 3)])
def test_contender_that_fails_again_and_again_is_left_out(
    outcomes: str, played: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many failures in a row it is stopped and asked no more; a success starts the count anew."""
    asked: list[int] = []

    async def one_round(_: Any, number: int) -> Round:
        asked.append(number)
        return [{"size": 2}] if outcomes[number] == "+" else []

    monkeypatch.setattr(matchmaking, "one_round", one_round)
    swarm = Swarm()
    turns = Turns("hivemind", swarm)

    async def main() -> None:
        for number in range(len(outcomes)):
            await turns.play(number, counts=True)

    asyncio.run(main())
    assert asked == list(range(played))
    assert len(turns.rounds) == played
    failed = outcomes[:played].endswith("-" * FAILURES_IN_A_ROW)
    assert (turns.left_out is not None) == (swarm.stops == 1) == failed
