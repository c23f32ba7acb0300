"""The commit rule with auxiliary members and slow coordinators, event by event; `tests/model` has every order."""

from __future__ import annotations

from typing import TypeVar

import pytest
from msgspec.structs import replace

from shoal.averaging.allreduce.commit import Average, MemberRules
from shoal.averaging.allreduce.coordinator import Coordinator, CoordinatorAction, LeftOut, Lied, Send
from shoal.protocol.wire import Abort, Assign, Commit, Held, Report, Shown

ROUND = b"r" * 16

T = TypeVar("T")


def coordinator(reducers: list[int], contributes: list[bool], *, min_group_size: int = 2) -> Coordinator:
    """Of a group in which everybody can reduce; the first decides."""
    reduces = [True] * len(contributes)
    return Coordinator(ROUND, reducers, reduces, contributes, 0, min_group_size=min_group_size, stall_s=5.0, now=0.0)


def sends(actions: list[CoordinatorAction]) -> list[Send]:
    """What the coordinator tells the members."""
    return [action for action in actions if isinstance(action, Send)]


def held(tile: int, attempt: int = 0) -> Held:
    """An average of somebody."""
    return Held(tile, attempt, b"\x03", 2.0, bytes([tile]) * 16)


def test_the_commit_waits_for_those_who_contribute() -> None:
    """An auxiliary reducer's word is not enough, and nobody waits for it to hold the rest."""
    rules = coordinator([2, 1], [True, True, False])
    assert not rules.reported(2, Report([held(0)]), 1.0)
    assert not rules.reported(0, Report([held(0), held(1)]), 1.0)
    told = sends(rules.reported(1, Report([held(0), held(1)]), 1.0))
    assert [send.member for send in told] == [0, 1, 2]
    assert all(isinstance(send.message, Commit) for send in told)


def test_without_contributors_there_is_no_commit() -> None:
    """The last of them is left out: the round ends, however many auxiliary members there are."""
    rules = coordinator([0, 1], [False, False, True, False])
    [*_, last] = sends(rules.leave_out(2, "lost", 1.0))
    assert isinstance(last.message, Abort)
    assert last.message.reason == "no member that contributes values is left"
    assert rules.rules.verdict is last.message


def test_auxiliary_members_count_for_the_size_of_the_group() -> None:
    """One contributor with one auxiliary member are two members; one alone is too few."""
    rules = coordinator([1], [True, True, False])
    assert [send.message for send in sends(rules.leave_out(1, "lost", 1.0))] == [Assign([0], 1, 2)] * 2
    [*_, last] = sends(rules.leave_out(2, "lost", 2.0))
    assert isinstance(last.message, Abort)
    assert "too few" in last.message.reason


def test_a_dead_auxiliary_reducer_is_replaced_for_those_who_lack_its_tiles() -> None:
    """What all contributors hold needs no new reducer; what one holds is asked from it; the rest is averaged again."""
    rules = coordinator([3, 3, 3], [True, True, False, False])
    rules.reported(0, Report([held(0), held(1)]), 1.0)
    rules.reported(1, Report([held(0)]), 1.0)
    told = {
        (send.member, tuple(send.message.tiles), send.message.attempt, send.message.reducer)
        for send in sends(rules.leave_out(3, "lost", 2.0))
        if isinstance(send.message, Assign)
    }
    assert {(tiles, attempt) for _, tiles, attempt, _ in told} == {((1,), 0), ((2,), 1)}
    assert {member for member, *_ in told} == {0, 1, 2}


def other(tile: int, letter: str, attempt: int = 0) -> Held:
    """Another average, of that name."""
    return replace(held(tile, attempt), digest=letter.encode() * 16)


def said(actions: list[CoordinatorAction], kind: type[T]) -> list[T]:
    """What the coordinator tells the members, of one kind."""
    return [send.message for send in sends(actions) if isinstance(send.message, kind)]


def test_of_a_disputed_average_the_word_of_its_maker_counts() -> None:
    """Most members were believed, and a reducer was named because two others said so. They are shown its word."""
    rules = coordinator([1], [False, True, True, True, True])
    word = Report([other(0, "r")], signature=b"s" * 64)
    rules.reported(1, replace(word, moved_bytes=9), 1.0)
    for member in (2, 3):
        rules.reported(member, Report([other(0, "m")]), 1.0)
    told = rules.reported(4, Report([other(0, "r")]), 1.0)
    assert [commit.tiles for commit in said(told, Commit)] == [[other(0, "r")]] * 5
    assert [each.member for each in sends(told) if each.message == Shown(1, word)] == [2, 3]
    assert not [action for action in told if isinstance(action, Lied)]


def test_nothing_is_committed_before_the_maker_of_a_disputed_average_has_said_what_it_made() -> None:
    """It is auxiliary, and not waited for otherwise. If it says nothing, another member averages the tile anew."""
    rules = coordinator([2, 2], [True, True, False])
    rules.reported(0, Report([held(0), held(1)]), 1.0)
    assert rules.reported(1, Report([other(0, "v"), held(1)]), 1.0) == []
    for now in range(2, 5):
        rules.reported(2, Report(), float(now))
        assert rules.tick(float(now)) == []
    told = rules.tick(5.0)
    assert [action.member for action in told if isinstance(action, LeftOut)] == [2]
    assert {(tuple(each.tiles), each.attempt) for each in said(told, Assign)} == {((0,), 1)}


@pytest.mark.parametrize("says", ["nothing", "the same again"])
def test_a_maker_that_does_not_say_which_of_two_averages_it_made_is_not_waited_for(says: str) -> None:
    """The bytes that it moves put it off for ever, up to the end of the round. Now its tile is averaged anew."""
    rules = coordinator([2, 2], [True, True, False])
    rules.reported(0, Report([held(0), held(1)]), 1.0)
    rules.reported(1, Report([other(0, "v"), held(1)]), 1.0)
    for now in (2.0, 3.0, 4.0):
        again = [held(1)] if says == "the same again" else []
        rules.reported(2, Report(again, moved_bytes=int(now)), now)
        assert rules.tick(now) == []
    told = rules.tick(4.5)
    assert [action.member for action in told if isinstance(action, Lied)] == [2]
    assert said(told, Assign) == [Assign([0], 1, 1)] * 3
    assert rules.rules.live == {0, 1, 2}


def test_a_maker_has_the_margin_to_say_what_it_made_once_all_others_have_their_averages() -> None:
    """A slow line brings their values, and its word later. A coordinator that stood still has not read it yet."""
    rules = coordinator([2, 2], [True, True, False])
    for member in (0, 1):
        rules.reported(member, Report([other(0, "uv"[member])]), 1.0)
    for now in (2.0, 3.0, 4.0):
        for member in (0, 1, 2):
            rules.reported(member, Report(moved_bytes=int(now)), now)
        assert rules.tick(now) == []
    for member in (0, 1):
        rules.reported(member, Report([held(1)]), 4.5)
    assert rules.tick(5.0) == []
    rules.reported(2, Report(moved_bytes=9), 6.0)
    assert rules.tick(8.0) == []
    assert said(rules.reported(2, Report([other(0, "u"), held(1)]), 8.1), Commit)


@pytest.mark.parametrize("says", ["the same", "another one"])
def test_a_second_report_of_a_tile_is_no_progress(says: str) -> None:
    """A member that owed averages put off its end with it."""
    rules = coordinator([1, 1], [True] * 3)
    for now in range(1, 5):
        rules.reported(1, Report([held(0) if says == "the same" else other(0, str(now))]), float(now))
        rules.reported(0, Report([held(0)], moved_bytes=now), float(now))
        assert not [action for action in rules.tick(float(now)) if isinstance(action, LeftOut)]
    assert [action.member for action in rules.tick(6.0) if isinstance(action, LeftOut)] == [1]


@pytest.mark.parametrize("signs", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_reducer_that_reports_another_average_than_it_gave_reduces_no_more(*, signs: bool, first: bool) -> None:
    """Or that has not signed its report. Its tiles are averaged anew; it stays a member, and gives its values."""
    every = [True] * 3
    asked = list[tuple[int, Report]]()

    def is_signed(member: int, report: Report) -> bool:
        asked.append((member, report))
        return signs

    rules = Coordinator(ROUND, [1, 1], every, every, 0, min_group_size=2, stall_s=5.0, now=0.0, is_signed=is_signed)
    mine = Report([other(0, "a" if signs else "b"), held(1)])
    reports = [(0, mine), (1, Report([other(0, "b"), held(1)])), (2, Report([other(0, "c"), held(1)]))]
    told = [action for each in (reports if first else reports[::-1]) for action in rules.reported(*each, 1.0)]
    assert {action.member for action in told if isinstance(action, Lied)} == {1}
    assert {tuple(each.tiles) for each in said(told, Assign) if each.attempt} == {(0,)}
    assert rules.rules.live == {0, 1, 2}
    assert asked == [(1, reports[1][1])]
    assert rules.rules.verdict is None


def test_a_report_is_checked_once_however_many_dispute_it() -> None:
    """A member could have a long one hashed for each word of its own."""
    asked, tiles, every = list[int](), range(50), [True] * 3

    def is_signed(member: int, _: Report) -> bool:
        asked.append(member)
        return True

    reducers = [1] * len(tiles)
    rules = Coordinator(ROUND, reducers, every, every, 0, min_group_size=2, stall_s=5.0, now=0.0, is_signed=is_signed)
    rules.reported(1, Report([held(tile) for tile in tiles]), 1.0)
    for tile in tiles:
        rules.reported(2, Report([other(tile, "v")]), 1.0)
    told = rules.reported(0, Report([held(tile) for tile in tiles]), 1.0)
    assert asked == [1]
    assert [each.member for each in sends(told) if isinstance(each.message, Shown)] == [2]
    assert said(told, Commit)


def test_an_average_that_nobody_but_its_maker_has_got_is_made_anew() -> None:
    """It was handed on, and the others have it from a member that lies; or the maker does. Nobody is named."""
    rules = coordinator([1], [True] * 4)
    rules.reported(1, Report([other(0, "r")]), 1.0)
    rules.rules.assign(0, 0, 2)
    rules._source[0][0] = 2
    told = [action for member in (0, 2, 3) for action in rules.reported(member, Report([other(0, "l")]), 1.0)]
    assert said(told, Assign) == [Assign([0], 1, 2)] * 4
    assert not [action for action in told if isinstance(action, Lied)]


def test_what_another_source_of_a_lost_reducer_gave_is_not_laid_to_the_reducer() -> None:
    """It had reported its tile, and was lost. The one that took its place said something else, and gave it here."""
    rules = coordinator([1], [True] * 4)
    rules.reported(1, Report([other(0, "r")]), 1.0)
    rules.reported(2, Report([other(0, "l")]), 1.0)
    assert said(rules.leave_out(1, "lost", 2.0), Assign) == [Assign([0], 0, 2)] * 3
    told = [action for member in (0, 3) for action in rules.reported(member, Report([other(0, "l")]), 3.0)]
    assert said(told, Assign) == [Assign([0], 1, 2)] * 3
    assert not [action for action in told if isinstance(action, Lied)]


def test_a_disputed_average_of_a_member_that_is_gone_is_made_anew() -> None:
    """It has said nothing of it: nobody knows which of the two it made. Most members were believed."""
    rules = coordinator([3], [True] * 4)
    rules.reported(0, Report([held(0)]), 1.0)
    assert said(rules.leave_out(3, "lost", 2.0), Assign) == [Assign([0], 0, 0)] * 3
    assert said(rules.reported(1, Report([other(0, "v")]), 3.0), Assign) == [Assign([0], 1, 1)] * 3
    first, second = held(0, 1), other(0, "w", 1)
    rules.reported(1, Report([first]), 4.0)
    rules.reported(0, Report([first]), 4.0)
    told = rules.reported(2, Report([second]), 4.0)
    assert [commit.tiles for commit in said(told, Commit)] == [[first]] * 4


def test_an_auxiliary_member_sends_and_asks_for_nothing() -> None:
    """Of what the coordinator assigns only its own tiles concern it."""
    rules = MemberRules(2, [0, 0, 2], contributes=False)
    assert not rules.assigned(Assign([0], 0, 1))
    assert not rules.assigned(Assign([0], 1, 1))
    assert rules.assigned(Assign([1], 1, 2)) == [Average(1, 1)]
    assert not rules.missing()
    assert not rules.succeeded


def test_an_auxiliary_member_succeeds_with_the_verdict() -> None:
    """It keeps what it averaged if that was committed, to give it to others; anything else is void."""
    rules = MemberRules(2, [0, 2, 2], contributes=False)
    assert rules.averaged(held(1))
    assert rules.averaged(held(2))
    assert not rules.succeeded
    assert not rules.committed(Commit(ROUND, [held(0), held(1), Held(2, 1, b"\x03", 2.0, b"?" * 16)]))
    assert rules.succeeded
    assert [each is not None for each in rules.held] == [False, True, False]
    assert not rules.give_up("too late")


def test_the_last_contributor_is_never_too_slow() -> None:
    """Nobody else can hold its tiles, so it looks as if it owed them: it is left out for silence only."""
    rules = coordinator([0, 1, 2, 3, 4], [True, False, False, False, False])
    rules.reported(0, Report([held(tile) for tile in (0, 1, 2, 3)]), 1.0)
    assert rules.slow(1.0) == []
    assert rules.slow(100.0) == [4]


def test_progress_counts_from_the_beginning() -> None:
    """What came before somebody began is no stall of anybody."""
    rules = coordinator([1, 2], [False, True, True])
    rules.begin(100.0)
    assert not rules.tick(104.0)
    assert rules.rules.live == {0, 1, 2}
    rules.tick(106.0)
    assert rules.rules.live != {0, 1, 2}


def everything_but(missing: int, tiles: int) -> Report:
    """What a member holds that lacks one tile."""
    return Report([held(tile) for tile in range(tiles) if tile != missing])


def test_a_coordinator_whose_tiles_are_all_that_is_missing_steps_aside() -> None:
    """It moves no bytes, and the others hold each other's tiles: they do its part again, and it commits for them."""
    rules = coordinator([0, 1, 2], [True] * 3)
    rules.reported(0, Report([held(0)]), 1.0)
    for member in (1, 2):
        rules.reported(member, everything_but(0, 3), 1.0)
    for now in range(2, 6):
        assert rules.tick(float(now)) == []
        for member in (1, 2):
            rules.reported(member, Report([]), float(now))
    told = sends(rules.tick(6.0))
    assert [(send.member, send.message) for send in told] == [(1, Assign([0], 1, 2)), (2, Assign([0], 1, 2))]
    assert rules.rules.live == {1, 2}
    assert rules.reported(1, Report([held(0, 1)]), 7.0) == []
    told = sends(rules.reported(2, Report([held(0, 1)]), 7.0))
    assert [send.member for send in told] == [0, 1, 2]
    assert all(isinstance(send.message, Commit) for send in told)


def test_of_two_it_cannot_be_told_who_is_slow() -> None:
    """The coordinator's tiles are missing at the only other one that wants any: both are waited for, and so is it."""
    rules = coordinator([0, 0], [True, True, False])
    rules.reported(0, Report([held(0), held(1)]), 1.0)
    for now in range(2, 30):
        for member in (1, 2):
            rules.reported(member, Report([], moved_bytes=now), float(now))
        assert rules.tick(float(now)) == []
    assert rules.rules.live == {0, 1, 2}


def test_a_coordinator_that_hears_from_hardly_anybody_is_itself_to_blame() -> None:
    """Everybody reports all the time: if most are not heard, its own line is in the way. One that is silent is not."""
    rules = coordinator([0, 1, 2, 3], [True] * 4)
    for now in (1.0, 2.0, 2.4):
        assert rules.tick(now) == []
        for member in (1, 2):
            rules.reported(member, Report([]), now)
    assert rules.tick(3.5) == []
    rules.reported(1, Report([]), 3.5)
    assert rules.tick(4.4) == []
    assert rules.rules.live == {0, 1, 2, 3}
    assert rules.tick(4.95) != []  # neither 2 nor 3, since 2.4 and from the beginning
    assert rules.rules.live == {1, 2, 3}


def test_a_coordinator_that_stood_still_blames_nobody_for_it() -> None:
    """Its own process was stopped: the reports are there, only not read yet."""
    rules = coordinator([0, 1, 2, 3], [True] * 4)
    assert rules.tick(1.0) == []
    assert rules.tick(4.0) == []
    assert rules.rules.live == {0, 1, 2, 3}


class EverybodyIsLate(Coordinator):
    """As when one is slow and the rest wait for its values."""

    def _late(self, now: float) -> list[int]:
        return [0, 1, 2, 3]


def test_of_several_slow_ones_only_as_many_are_left_out_as_can_be_done_without() -> None:
    """Two must be left, or `min_group_size`; and one that contributes."""
    every: list[tuple[list[bool], int, list[int]]] = [
        ([True, False, True, True], 2, [0, 1]),
        ([True, False, True, True], 3, [0]),
        ([False, True, False, False], 2, [2, 3]),
    ]
    for contributes, least, late in every:
        reduces = [True] * 4
        rules = EverybodyIsLate(ROUND, [1, 2, 3], reduces, contributes, 0, min_group_size=least, stall_s=5.0, now=0.0)
        assert rules.slow(1.0) == late
