"""The plan of a group: who reduces how much."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from shoal.averaging import AveragerSettings
from shoal.averaging.group import Group
from shoal.averaging.group_finder import GroupFinder
from shoal.base.peer import Address, PeerID
from shoal.protocol.wire import Contact, Member


def member(number: int, bandwidth: float | None) -> Member:
    """One that can be dialed."""
    peer = PeerID(number.to_bytes(32, "big"))
    return Member(Contact(peer, (Address("10.0.0.1", 4000, peer),)), True, bandwidth, b"")


def finder_of(numel: int, **settings: Any) -> GroupFinder:
    """One that averages so many elements."""
    finder: Any = GroupFinder.__new__(GroupFinder)
    finder._vector = SimpleNamespace(layout=SimpleNamespace(numel=numel), check_tile_bytes=lambda *_: None)
    finder._settings = AveragerSettings(**settings)
    return finder  # type: ignore[no-any-return]


def group(members: list[Member], shares: list[int], tile_bytes: int, fair: list[int]) -> Group:
    """As a follower sees it."""
    return Group(
        round_id=bytes(16),
        members=tuple(members),
        my_index=1,
        coordinator=0,
        shares=tuple(shares),
        tile_bytes=tile_bytes,
        controls={},
        on_release=lambda: None,
        fair=tuple(fair),
    )


def drawn(rng: random.Random) -> list[Member]:
    """Members of any kind: clients, assistants, with lines that are slow, fast, or not known."""
    members = list[Member]()
    for number in range(rng.choice([2, 3, 4, 5, 8, 20, 300])):
        bandwidth = rng.choice([None, rng.uniform(1e3, 1e8), 10 ** rng.uniform(-3, 18), 1e6])
        kind = rng.random()
        one = member(number, 0.0 if kind < 0.1 else bandwidth)
        contributes = kind < 0.8 or not number
        members.append(replace(one, reduces=kind >= 0.2 or number == 1, contributes=contributes))
    members[1] = replace(members[1], bandwidth=members[1].bandwidth or None)
    return members


@pytest.mark.parametrize("seed", range(150))
def test_no_honest_plan_is_unfair(seed: int) -> None:
    """Whatever the lines, the smallest share, the kinds of members, and the tile size of the leader are."""
    rng = random.Random(seed)
    members = drawn(rng)
    numel = rng.choice([1, 3, 100, 10_007, 1 << 24])
    least = rng.choice([0, 0, 1, 1000, numel, 10 * numel])
    leader, follower = (
        finder_of(numel, min_vector_size=least, part_size_bytes=size)
        for size in rng.choices([1 << 10, 1 << 16, 1 << 20, 8 << 20], k=2)
    )
    assert not follower.is_unfair(group(members, *leader._plan(members), follower._plan(members)[0]))


def test_a_leader_may_do_without_half_of_the_others() -> None:
    """It may know that it cannot reach them, and the others may not."""
    finder = finder_of(1 << 20)
    members = [member(number, None) for number in range(4)]
    some = [replace(each, reduces=number < 2) for number, each in enumerate(members)]
    assert not finder.is_unfair(group(members, *finder._plan(some), finder._plan(members)[0]))


@pytest.mark.parametrize("others", [None, 1e6, 1e8])
@pytest.mark.parametrize("count", [3, 4, 10])
def test_all_for_one_slow_member_is_unfair(count: int, others: float | None) -> None:
    """It halved the pace of all, for as long as this leader led; the slow member was named for it."""
    finder = finder_of(1 << 20)
    members = [member(number, 1e6 if number == 2 else others) for number in range(count)]
    shares = [(1 << 20) * (number == 2) for number in range(count)]
    fair, tile_bytes = finder._plan(members)
    assert finder.is_unfair(group(members, shares, tile_bytes, fair))
    assert not finder.is_unfair(group(members, shares, tile_bytes, []))  # we lead, or know nobody that reduces


def test_a_stranger_that_owns_nothing_excuses_no_plan() -> None:
    """It says that its line is slower than any plan could be."""
    finder = finder_of(1 << 20)
    members = [member(number, 1.0 if number == 3 else 1e6) for number in range(4)]
    fair, tile_bytes = finder._plan(members)
    assert not fair[3]
    assert finder.is_unfair(group(members, [0, 0, 1 << 20, 0], tile_bytes, fair))


def test_tiles_that_are_too_large_for_a_slow_line_are_unfair() -> None:
    """The averages of its share would leave when all values have come."""
    finder = finder_of(1 << 20)
    members = [member(number, 1e6 if number else 1e5) for number in range(4)]
    shares, tile_bytes = finder._plan(members)
    assert tile_bytes < 1 << 20
    assert finder.is_unfair(group(members, shares, 8 << 20, shares))
    assert not finder.is_unfair(group([member(number, None) for number in range(4)], shares, 8 << 20, shares))


@pytest.mark.parametrize(("members", "reducers"), [(256, 256), (257, 128), (1024, 128)])
def test_a_large_group_has_few_reducers(members: int, reducers: int) -> None:
    """Each member has a connection with each of them: the fastest ones."""
    finder = finder_of(1 << 20)
    fast = dict.fromkeys(range(0, members, 2), 2e6) if members > 256 else {}
    shares, _ = finder._plan([member(number, fast.get(number, 1e6)) for number in range(members)])
    assert sum(shares) == 1 << 20
    assert sum(map(bool, shares)) == reducers
    assert {place for place, elements in enumerate(shares) if elements} <= (fast.keys() or set(range(members)))
