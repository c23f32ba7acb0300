"""Slow members, in the eyes of the coordinator; and its remedy for reducers that nobody can get tiles from."""

from __future__ import annotations

from shoal.averaging.allreduce.brief import Brief
from shoal.averaging.allreduce.coordinator import Coordinator, Send
from shoal.protocol.wire import Assign, Commit, Held, Report

REDUCER = [0, 1, 2, 3]
ALL = {0, 1, 2, 3}


def coordinator(
    me: int = 0, *, least: int = 2, margin_s: float | None = None, allowed_s: float = 0.0, reduces: int = 4
) -> Coordinator:
    """Four members, each the reducer of one tile; the first ones can average others."""
    able, every = [member < reduces for member in range(4)], [True] * 4
    return Coordinator(
        b"r" * 16,
        REDUCER,
        able,
        every,
        me,
        min_group_size=least,
        stall_s=6.0,
        now=0.0,
        margin_s=margin_s,
        allowed_s=allowed_s,
    )


def late(rules: Coordinator, tiles: list[set[int]], now: float) -> list[int]:
    """The late members, once each has said that it holds these tiles."""
    for member, held_tiles in enumerate(tiles):
        rules.reported(member, Report([held(tile, rules.rules.attempt[tile]) for tile in sorted(held_tiles)]), now)
    return rules.slow(now)


KEPT = [{0, 1, 2}, {0, 1, 2}, {0, 1, 2}, {0, 1, 2, 3}]
"""The last reducer has given its tile to nobody."""


def test_a_reducer_that_gives_its_tile_to_nobody_is_late() -> None:
    """The others' tiles were there after 2 s: twice that and the margin is the limit."""
    rules = coordinator(margin_s=3.0)
    assert late(rules, KEPT, 2.0) == []
    assert rules.slow(6.9) == []
    assert rules.slow(7.0) == [3]


def test_a_reducer_that_may_wait_for_a_slow_line_is_not_late() -> None:
    """Others may have given that member up before: it is no fault to wait for as long as it promised."""
    rules = coordinator(allowed_s=30.0)
    assert late(rules, KEPT, 2.0) == []
    assert rules.slow(32.9) == []
    assert rules.slow(33.0) == [3]


def test_a_receiver_is_late_only_when_all_tiles_are_given() -> None:
    """A member that lacks a tile which its reducer gives to nobody is not at fault."""
    rules = coordinator(margin_s=1.0)
    lacks = [{0, 1, 2}, {0}, {0, 1, 2}, {0, 1, 2, 3}]
    assert late(rules, lacks, 2.0) == []
    assert late(rules, lacks, 5.0) == [3]
    whole = set(REDUCER)
    assert late(rules, [whole, {0, 1}, whole, whole], 6.0) == []
    assert rules.slow(12.2) == []
    assert rules.slow(12.25) == [1]


def test_most_receivers_that_report_late_keep_nobody_waiting() -> None:
    """The median was one of them: the others waited in each round, and it was no lateness. Their values count."""
    rules = coordinator(margin_s=5.0)
    tiles = set(REDUCER)
    assert late(rules, [tiles, tiles, {0, 2}, {0, 1, 3}], 1.0) == []
    assert rules.slow(2.2) == []
    assert rules.slow(2.25) == [2, 3]


def test_nobody_is_late_as_long_as_the_median_is_not_done() -> None:
    """A slow network is slow for all."""
    assert late(coordinator(margin_s=1.0), [{0}, {0, 1}, {0, 2}, {0, 3}], 1000.0) == []


def test_a_new_reducer_gets_the_usual_time_again() -> None:
    """What happened before it owned the tiles is not its fault, and it waits for nobody's values as long as for all."""
    rules = coordinator(margin_s=1.0, reduces=1)
    assert late(rules, KEPT, 2.0) == []
    rules.tick(10.0)
    assert rules.rules.reducer == [0, 1, 2, 0]
    assert late(rules, [{0, 1, 2}] * 4, 10.0) == []
    assert rules.slow(14.9) == []
    assert rules.slow(15.0) == [0]


def held(tile: int, attempt: int = 0) -> Held:
    """An average of all four."""
    return Held(tile, attempt, b"\x0f", 4.0, bytes([tile]) * 16)


def report(rules: Coordinator, member: int, tiles: list[int], *lost: int, now: float = 1.0) -> list[Send]:
    """A member says what it holds, and whom it lost."""
    actions = rules.reported(member, Report([held(tile) for tile in tiles], list(lost)), now)
    return [action for action in actions if isinstance(action, Send)]


def test_a_member_that_was_given_up_as_a_sender_does_not_get_its_time_once_more_as_a_reducer() -> None:
    """It owes a tile, too. One that owes nothing is left in: only its line to the coordinator may be slow."""
    rules = coordinator()
    for member in range(4):
        report(rules, member, [0, 1, 2])
    rules.tick(1.1)
    assert rules.rules.live == {0, 1, 2, 3}
    rules.tick(1.2, {2})
    assert rules.rules.live == {0, 1, 2, 3}
    rules.tick(1.3, {3})
    assert rules.rules.live == {0, 1, 2}


def test_a_reducer_that_all_others_have_lost_owns_nothing_any_more() -> None:
    """It holds its tile, and can give it to nobody: somebody else averages it anew; the reducer stays a member."""
    rules = coordinator()
    report(rules, 3, [0, 1, 2, 3])
    for member in (0, 1):
        assert report(rules, member, [0, 1, 2], 3) == []
    sends = report(rules, 2, [0, 1, 2], 3)
    assigned = [send.message for send in sends if isinstance(send.message, Assign)]
    assert len(assigned) == 4
    assert {(message.attempt, message.reducer in (0, 1, 2)) for message in assigned} == {(1, True)}
    assert rules.rules.live == ALL
    for member in ALL:
        told = rules.reported(member, Report([held(3, 1)]), 2.0)
    assert [isinstance(send, Send) and isinstance(send.message, Commit) for send in told] == [True] * 4


def test_a_silent_reducer_is_left_out_before_those_that_wait_for_it() -> None:
    """It holds its tile, gives it to nobody, and nobody makes progress: it is the one."""
    rules = coordinator()
    report(rules, 3, [0, 1, 2, 3])
    for member in (0, 1, 2):
        report(rules, member, [0, 1, 2])
    rules.tick(7.5)
    assert rules.rules.live == {0, 1, 2}


def test_a_coordinator_that_cannot_get_a_tile_does_not_hold_up_the_others() -> None:
    """All others hold everything: it leaves itself out as a member, and commits."""
    rules = coordinator(me=0)
    for member in (1, 2, 3):
        report(rules, member, [0, 1, 2, 3])
    report(rules, 0, [0], 1, 2, 3)
    sends = [action for action in rules.tick(7.5) if isinstance(action, Send)]
    assert rules.rules.live == {1, 2, 3}
    assert {send.member for send in sends if isinstance(send.message, Commit)} == ALL


def test_a_coordinator_that_lacks_what_others_lack_too_stays() -> None:
    """It is not the one to blame: the reducer goes."""
    rules = coordinator(me=0)
    report(rules, 3, [0, 1, 2, 3])
    for member in (0, 1, 2):
        report(rules, member, [0, 1, 2])
    rules.tick(7.5)
    assert 0 in rules.rules.live


def test_nobody_is_left_out_for_slowness_where_too_few_would_be_left() -> None:
    """Waiting costs less than failing."""
    rules = coordinator(least=4, margin_s=1.0)
    for member in (0, 1, 2):
        report(rules, member, [0, 1, 2, 3])
    report(rules, 3, [3])
    assert rules.slow(1.0) == rules.slow(1000.0) == []


def test_members_that_are_waited_for_briefly_are_left_out_as_soon_as_all_others_are_done() -> None:
    """Others average their tiles; if too few others are left, they are waited for as all."""
    rules = coordinator()
    rules.brief = Brief({3: 0.0})
    for member in (0, 1):
        report(rules, member, [0, 1, 2])
    assert rules.rules.live == ALL
    report(rules, 2, [0, 1, 2])
    assert rules.rules.live == ALL
    rules.tick(1.25)
    assert rules.rules.live == {0, 1, 2}
    assert 3 not in rules.rules.reducer
    rules = coordinator(least=4)
    rules.brief = Brief({3: 0.0})
    for member in (0, 1, 2):
        report(rules, member, [0, 1, 2])
    assert rules.rules.live == ALL


def test_all_that_are_waited_for_briefly_share_one_patience() -> None:
    """Two of them do not cost twice the time, and time in which others are awaited, too, does not count."""
    brief = Brief({2: 4.0, 3: 4.0})
    assert brief.late({1, 2, 3}, 10.0, 19.0) == []
    assert brief.late({2, 3}, 20.0, 19.0) == []
    assert brief.late({2, 3}, 23.9, 19.0) == []
    assert brief.late({1, 3}, 24.0, 19.0) == []
    assert brief.late({3}, 30.0, 19.0) == [3]
    assert (brief.waited_s, brief.left) == (4.0, {3})


def test_one_that_is_as_fast_as_the_others_was_left_out_once_nothing_was_left_for_strangers() -> None:
    """It was milliseconds later. Up to the usual time, a moment at most, it is waited for, and that is free."""
    brief = Brief({3: 0.0})
    assert brief.late({2, 3}, 10.0, 10.1) == []
    assert brief.late({3}, 10.05, 10.1) == []
    assert brief.late({3}, 10.1, 10.1) == [3]
    assert brief.waited_s == 0.0
    slow = Brief({3: 0.0})
    assert slow.late({3}, 10.0, 20.0) == []
    assert slow.late({3}, 10.25, 20.0) == [3]
    assert slow.waited_s == 0.0
