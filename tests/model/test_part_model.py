"""The fork rule of a model in parts, exhaustively; and rules that must fail."""

from __future__ import annotations

import pytest

from tests.model.fork_model import Broken, State, name
from tests.model.part_model import PartSearch, PartWorld


def test_each_part_follows_the_fork_rule_by_itself() -> None:
    """Every order of rounds, lost verdicts and downloads of two parts ends at one state of each."""
    assert PartSearch(epochs=(1, 1)).run() > 1_000


def test_one_download_for_all_parts_takes_a_part_back() -> None:
    """A donor that is further in one part may be behind in the other one."""

    def adopt_all(world: PartWorld, part: int, me: int, donor: int) -> PartWorld:
        return PartWorld(tuple(tuple(s[donor] if p == me else s[p] for p in range(3)) for s in world.parts))

    with pytest.raises(Broken, match="went back"):
        PartSearch(adopt_all, epochs=(1, 1)).run()


def test_a_name_without_its_part_is_of_two_states() -> None:
    """Rounds of equal members of two parts that begin alike must not get one name."""

    def without(parent: State, members: tuple[int, ...], part: int) -> bytes:
        return name(State.of(0, 0, bytes(32), ()), members, "step")

    with pytest.raises(Broken, match="one name"):
        PartSearch(named=without, epochs=(1, 1)).run()
