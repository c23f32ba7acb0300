"""The fork rule of a model in fragments, exhaustively; and rules that must fail."""

from __future__ import annotations

import pytest

from tests.model.fork_model import Broken, State, name
from tests.model.fragment_model import FragmentSearch, FragmentWorld


def test_each_fragment_follows_the_fork_rule_by_itself() -> None:
    """Every order of rounds, lost verdicts and downloads of two fragments ends at one state of each."""
    assert FragmentSearch(epochs=(1, 1)).run() > 1_000


def test_one_download_for_all_fragments_takes_one_back() -> None:
    """A donor that is further in one fragment may be behind in the other one."""

    def adopt_all(world: FragmentWorld, fragment: int, me: int, donor: int) -> FragmentWorld:
        return FragmentWorld(tuple(tuple(s[donor] if p == me else s[p] for p in range(3)) for s in world.fragments))

    with pytest.raises(Broken, match="went back"):
        FragmentSearch(adopt_all, epochs=(1, 1)).run()


def test_a_name_without_its_fragment_is_of_two_states() -> None:
    """Rounds of equal members of two fragments that begin alike must not get one name."""

    def without(parent: State, members: tuple[int, ...], fragment: int) -> bytes:
        return name(State.of(0, 0, bytes(32), ()), members, "step")

    with pytest.raises(Broken, match="one name"):
        FragmentSearch(named=without, epochs=(1, 1)).run()
