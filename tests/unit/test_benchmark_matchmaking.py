"""The peers in the rounds of the matchmaking benchmark, and until when they take part."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks import allreduce, matchmaking
from benchmarks.matchmaking import NOT_FULL_S, Round, Turns


class Swarm(allreduce.Contender):
    """A contender without peers."""

    def __init__(self) -> None:
        super().__init__("hivemind", [])
        self.stops = 0

    async def stop(self) -> None:
        self.stops += 1


JOINS: dict[str, Round] = {
    "+": [{"size": 2, "failure": None}] * 2,
    "-": [{"size": 0, "failure": "alone"}, {"size": 2, "failure": None}],
    "0": [],
}
"""A round in which all met, one in which one step failed, one that failed as a whole."""


def play(outcomes: str, monkeypatch: pytest.MonkeyPatch, name: str = "hivemind") -> tuple[Turns, Swarm, int]:
    """Play rounds that end so. Returns also how many were asked for."""
    asked: list[int] = []

    async def one_round(_: Any, number: int) -> Round:
        asked.append(number)
        return JOINS[outcomes[number]]

    monkeypatch.setattr(matchmaking, "one_round", one_round)
    swarm = Swarm()
    turns = Turns(name, swarm)

    async def main() -> None:
        for number in range(len(outcomes)):
            await turns.play(number, counts=True)

    asyncio.run(main())
    assert asked == list(range(len(asked)))
    return turns, swarm, len(asked)


@pytest.mark.parametrize(
    ("outcomes", "played", "why"),
    [
        ("--+--+-", 7, None),
        ("+-0-+++", 4, "left out after round 3: 3 failures in a row"),
        ("000", 3, "left out after round 2: 3 failures in a row"),
        ("--+--+--++", 8, "left out after round 7: 6 failures"),
    ],
)
def test_contender_that_fails_again_and_again_is_left_out(
    outcomes: str, played: int, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped and asked no more; what it did before stays."""
    turns, swarm, asked = play(outcomes, monkeypatch)
    assert (asked, len(turns.rounds), turns.left_out) == (played, played, why)
    assert swarm.stops == (why is not None)


def test_shoal_is_never_left_out_for_its_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what is measured."""
    turns, _, asked = play("0" * 20, monkeypatch, "shoal")
    assert (asked, turns.left_out) == (20, None)


def test_rounds_without_a_full_group_may_not_take_long_altogether() -> None:
    """Groups that are not full are no failures, but cost time; those that are full cost none."""
    turns = Turns("hivemind", Swarm())
    small: Round = [{"size": 2, "failure": None}] * 3
    full: Round = [{"size": 3, "failure": None}] * 3
    assert turns.enough(full, 1000.0) is None
    assert [turns.enough(small, NOT_FULL_S / 4) for _ in range(4)] == [None] * 4
    assert turns.enough(full, 1000.0) is None
    assert turns.enough(small, 1.0) == f"{NOT_FULL_S + 1:.0f} s without a full group"


def test_contender_whose_peers_are_gone_is_left_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for them again."""
    swarm = Swarm()

    async def ask_all(*_: Any, **__: Any) -> list[dict[str, Any]]:
        raise allreduce.ContenderFailed("no answer to 'average' within 90 s")

    monkeypatch.setattr(swarm, "ask_all", ask_all)
    turns = Turns("hivemind", swarm)
    asyncio.run(turns.play(7, counts=True))
    assert turns.left_out == "left out after round 7: no answer to 'average' within 90 s"
    assert (turns.rounds, swarm.stops) == ([[]], 1)


def test_rounds_that_failed_as_a_whole_count_as_joins_that_failed() -> None:
    """Otherwise who fails often would look as good as who never does."""
    join = {"called": 1.0, "formed": 2.0, "size": 2, "group": "a", "failure": None}
    result = matchmaking.report([[join, join], []], 2)
    assert (result["joins"], result["full_joins"], result["full_part"]) == (4, 2, 0.5)
    assert result["last_s"]["p50"] == 1.0
