"""One member of a round, event by event: what it sends, averages, asks for, and when it gives up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from shoal.averaging.allreduce.commit import Ask, Average, Contribute, Order
from shoal.averaging.allreduce.member import AskOthers, Blame, Finish, LookAt, MemberMachine, MemberPhase
from shoal.base.peer import PeerID
from shoal.protocol.wire import Abort, Assign, Commit, Contact, Gone, Held, Member, PartAbsent, Report, Shown

ROUND = b"r" * 16
COORDINATOR = 0


def machine(reducers: list[int], me: int = 1, group: str = "ttt") -> MemberMachine:
    """A member of a group of `t`rainers, `a`uxiliary members and `c`lients; the first decides."""
    members = [
        Member(Contact(PeerID(bytes([index]) * 32)), kind != "c", None, b"", kind != "a")
        for index, kind in enumerate(group)
    ]
    return MemberMachine(ROUND, me, COORDINATOR, members, reducers, silence_s=5.0, now=0.0)


def held(tile: int, attempt: int = 0) -> Held:
    """An average of all three."""
    return Held(tile, attempt, b"\x07", 3.0, bytes([tile]) * 16)


def commit(*attempts: int) -> Commit:
    """The verdict: these attempts of the tiles, in order."""
    return Commit(ROUND, [held(tile, attempt) for tile, attempt in enumerate(attempts)])


def test_a_member_sends_its_values_to_each_reducer_and_averages_its_own_tiles() -> None:
    """An auxiliary member has no values to send."""
    assert machine([0, 1, 2]).start(0.0) == [Contribute(0, 0, 0), Average(1, 0), Contribute(2, 0, 2)]
    assert machine([0, 1, 2], group="tat").start(0.0) == [Average(1, 0)]


def test_a_reducer_that_waits_for_nobody_is_told_to_finish_at_once() -> None:
    """It got the tile when everybody else was left out, and has no values of its own."""
    auxiliary = machine([0, 0, 2], me=1, group="tat")
    assert auxiliary.contributions.exclude(0) == auxiliary.contributions.exclude(2) == []
    assert auxiliary.obey(Assign([0], 1, 1), 1.0) == [Average(0, 1), Finish(0, 1)]


def test_tiles_that_another_member_owned_are_averaged_sent_again_or_asked_for() -> None:
    """By the attempt, and by the reducer that the coordinator names."""
    member = machine([0, 1, 2])
    member.start(0.0)
    assert member.obey(Assign([0], 1, 2), 1.0) == [Contribute(0, 1, 2)]
    assert member.obey(Assign([0], 1, 2), 1.0) == [Ask(0, 1, 2)]
    assert member.obey(Assign([2], 1, 1), 1.0) == [Average(2, 1)]


@pytest.mark.parametrize(
    "order",
    [
        Assign([3], 1, 1),
        Assign([-1], 1, 1),
        Assign([0], 1, 3),
        Assign([1], 1 << 62, 1),
        Gone(7),
        Abort(b"another round id", "no"),
        Commit(ROUND, [held(0), held(1, 1 << 62), held(2)]),
        Commit(ROUND, [held(0), held(1)]),
    ],
    ids=["tile", "negative", "reducer", "attempt", "gone", "abort", "commit", "short"],
)
def test_orders_that_name_what_is_not_in_the_round_change_nothing(order: Order) -> None:
    """No coordinator of this round says them."""
    member = machine([0, 1, 2])
    member.start(0.0)
    assert not member.fits(order)
    assert member.obey(order, 1.0) == []
    assert not member.decided
    assert member.rules.attempt == [0, 0, 0]


def test_a_member_that_is_gone_by_its_own_coordinator_goes_on() -> None:
    """It is there."""
    member = machine([0, 1, 2])
    member.start(0.0)
    assert member.fits(Gone(1))
    assert member.obey(Gone(1), 1.0) == [LookAt(1)]  # to note that the word was false


def test_a_false_gone_of_everybody_halved_the_share_of_honest_peers() -> None:
    """The word of a leader is no fact: the member looks for itself, and goes on waiting for those that are there."""
    member = machine([0, 1, 2])
    member.start(0.0)
    assert [member.obey(Gone(other), 1.0) for other in (1, 2)] == [[LookAt(1)], [LookAt(2)]]
    assert member.contributions.expects(1, 0, 2)


@pytest.mark.parametrize(
    ("untold", "counted", "lost", "is_left_out"),
    [(1, 7, False, True), (0, 7, False, False), (1, 5, False, False), (1, 7, True, False)],
    ids=["left out", "told", "slow", "lost"],
)
def test_a_member_did_not_know_that_its_leader_had_left_it_out(
    untold: int, counted: int, lost: bool, is_left_out: bool
) -> None:
    """Others average its tile, and it was not told; the other reducers count it, and the leader's words come here."""
    member = machine([1, 0, 2])
    member.start(0.0)
    if lost:
        member.coordinator_lost("its stream ended")
    mine = replace(held(0, untold), contributors=b"\x05")
    member.obey(Commit(ROUND, [mine, held(1), replace(held(2), contributors=bytes([counted]))]), 1.0)
    assert member.left_out is is_left_out


@pytest.mark.parametrize("reducer", [0, 1, 2])
def test_an_assign_storm_of_a_leader_ends_where_all_others_have_been_replaced(reducer: int) -> None:
    """A leader may have values sent again only as often as members can fail; each loses its tiles once."""
    member = machine([0, 1, 2])
    member.start(0.0)
    others = [each for each in range(3) if each != reducer]
    for tile in others:
        assert member.fits(Assign([tile], 1, reducer))
        member.obey(Assign([tile], 1, reducer), 1.0)
    assert member.rules.replaced == set(others)
    for tile in range(3):
        for other in range(3):
            assert not member.fits(Assign([tile], 2, other))
    assert member.fits(Assign([others[0]], 1, others[1]))  # another source of what is averaged already


def test_assign_of_attempt_2_to_62_does_not_count_up_to_it() -> None:
    """A reducer forgets older attempts by what it has, not by a loop over what a message names."""
    member = machine([0, 1, 2])
    member.contributions.own(1, 0, 0.0)
    member.contributions.own(1, 1 << 62, 1.0)
    assert member.contributions.expects(1, 1 << 62, 0)
    assert not member.contributions.expects(1, 0, 0)


@pytest.mark.parametrize("said", [{"weight": 2.0}, {"contributors": b"\x03"}, {"attempt": 1}])
def test_a_commit_that_says_of_an_average_what_its_reducer_did_not_say_is_refused(said: dict[str, Any]) -> None:
    """A leader that gives each member another commit forked the names of the state; the digest binds all of it."""
    member = machine([0, 1, 2])
    member.start(0.0)
    member.averaged(held(0), 0.5, 0)
    lie = Commit(ROUND, [replace(held(0), **said), held(1), held(2)])
    assert not member.fits(lie)
    assert member.obey(lie, 1.0) == []
    assert not member.decided
    assert member.fits(commit(0, 0, 0))


def given_another() -> MemberMachine:
    """A member that was given another average of the last tile than the committed one."""
    member = machine([0, 1, 2])
    member.start(0.0)
    for tile in range(3):
        average = replace(held(tile), digest=b"another one 16 b") if tile == 2 else held(tile)
        assert member.averaged(average, 0.5, tile)
    assert member.obey(commit(0, 0, 0), 1.0) == [Ask(2, 0, 2)]
    return member


def test_a_reducer_that_gives_this_member_two_averages_is_named_by_it() -> None:
    """The committed one is taken from the reducer alone: anybody else may have made it up."""
    member = given_another()
    assert not member.takes(2, 0, 0)
    assert member.takes(2, 0, 2)
    assert member.averaged(held(2), 1.5, 2)
    assert member.given(2) == [Blame(2, "gave this peer another average of tile 2 than others", lied=True)]
    assert member.given(2) == []
    assert member.phase is MemberPhase.SUCCEEDED


def test_an_average_that_its_reducer_has_not_made_is_not_taken() -> None:
    """A leader committed averages of its own, and each honest reducer was named."""
    member = given_another()
    [blame] = member.source_lost(2, PartAbsent(2, 0))
    assert isinstance(blame, Blame)
    assert (blame.member, blame.lied) == (0, True)
    assert member.phase is MemberPhase.FAILED


def test_a_disputed_average_whose_reducer_is_gone_is_not_taken() -> None:
    """Nobody is named: who has lied cannot be known."""
    member = given_another()
    assert member.source_lost(2, None) == []
    assert member.phase is MemberPhase.FAILED


@pytest.mark.parametrize("giver", [2, 0])
def test_an_average_that_its_reducer_has_signed_is_taken_from_anybody(giver: int) -> None:
    """The reducer is named if it gave this member another one itself. A member that passed one on may be honest."""
    member = machine([0, 1, 2], group="tttt")
    member.start(0.0)
    if giver != 2:
        member.obey(Assign([2], 0, giver), 0.5)
    for tile in range(3):
        average = replace(held(tile), digest=b"another one 16 b") if tile == 2 else held(tile)
        assert member.averaged(average, 0.5, giver if tile == 2 else tile)
    blames = [Blame(2, "gave this peer another average of tile 2 than it has signed", lied=True)] * (giver == 2)
    assert member.obey(Shown(2, Report([held(0, 7), held(2)])), 1.0) == blames
    [ask] = member.obey(commit(0, 0, 0), 1.0)
    assert isinstance(ask, Ask)
    assert all(member.takes(2, 0, each) for each in (0, 2, 3))


@pytest.mark.parametrize(
    ("shown", "liars"),
    [
        (Shown(0, Report([held(2)])), []),  # it does not average this tile
        (Shown(2, Report([held(2, 1)])), []),  # of another attempt
        (Shown(2, Report([replace(held(2), digest=b"yet another one ")])), [2]),  # not the committed one
    ],
)
def test_a_signed_word_that_does_not_fit_the_commit_proves_nothing_about_it(shown: Shown, liars: list[int]) -> None:
    """The reducer alone is asked, as if nothing had been shown; the leader is named if that does not give it."""
    member = machine([0, 1, 2])
    member.start(0.0)
    member.averaged(held(1), 0.5, 1)
    member.averaged(replace(held(2), digest=b"another one 16 b"), 0.5, 2)
    assert member.fits(shown)
    assert [each.member for each in member.obey(shown, 1.0) if isinstance(each, Blame)] == liars
    assert Ask(2, 0, 2) in member.obey(commit(0, 0, 0), 1.0)
    assert [each.member for each in member.source_lost(2, PartAbsent(2, 0)) if isinstance(each, Blame)] == [0]


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("relayed", [True, False])
def test_a_commit_of_another_average_than_this_member_made_is_a_lie(averaged: bool, relayed: bool) -> None:
    """Also if it has not made it yet, and if another member tells of the commit: it is signed."""
    member = machine([0, 1, 2])
    member.start(0.0)
    if averaged:
        member.averaged(replace(held(1), digest=b"another one 16 b"), 0.5, 1)
    if relayed:
        member.coordinator_lost("silent")
    actions = member.obey(commit(0, 0, 0), 1.0)
    assert [each.member for each in actions if isinstance(each, Blame)] == [0]
    assert member.phase is MemberPhase.FAILED


def test_an_average_of_a_member_that_does_not_make_it_is_passed_over() -> None:
    """A member gave others' tiles on its own stream, and their reducers were named."""
    member = machine([0, 1, 2])
    member.start(0.0)
    assert not member.takes(2, 0, 0)
    assert member.takes(2, 0, 2)
    member.obey(Assign([2], 0, 0), 0.5)  # another source: both have it
    assert member.takes(2, 0, 0)
    assert member.takes(2, 0, 2)
    assert member.is_ahead(2, 1)  # of an assignment that has not come yet
    assert not member.is_ahead(2, 0)


def test_an_older_average_is_no_lie() -> None:
    """An older attempt's average is another one without a lie."""
    member = machine([0, 1, 2])
    member.start(0.0)
    member.averaged(held(1), 0.5, 1)
    member.averaged(replace(held(2), digest=b"another one 16 b"), 0.5, 2)
    assert not [each for each in member.obey(commit(0, 0, 1), 1.0) if isinstance(each, Blame)]


def test_nobody_waits_for_the_values_of_a_member_that_is_gone() -> None:
    """The tile is finished with those that came."""
    member = machine([0, 1, 2])
    member.start(0.0)
    for sender in (1, 0):
        assert member.contributions.contributed(1, 0, sender, counts=True, now=1.0) == []
    assert member.obey(Gone(2), 1.0) == [LookAt(2)]
    assert member.member_lost(2) == [Finish(1, 0)]


def test_a_silent_sender_is_left_out_and_blamed() -> None:
    """After `silence_s`, by the reducer alone: the coordinator hears of it in the contributors."""
    member = machine([0, 1, 2])
    member.start(0.0)
    member.contributions.contributed(1, 0, 1, counts=True, now=0.0)
    member.contributions.contributed(1, 0, 0, counts=True, now=4.0)
    assert member.tick(4.9) == []
    [blame, finish] = member.tick(5.0)
    assert isinstance(blame, Blame)
    assert blame.member == 2
    assert finish == Finish(1, 0)


def test_what_is_missing_after_the_commit_is_asked_from_one_member_after_another() -> None:
    """The reducer comes last among the trainers, then the auxiliary members; a client is never asked."""
    member = machine([2], me=1, group="tttac")
    member.start(0.0)
    assert member.obey(commit(0), 1.0) == [Ask(0, 0, 0)]
    assert set(member.awaited) == {0}
    assert member.source_lost(2, None) == []  # it was not asked
    assert member.source_lost(0, PartAbsent(0, 1)) == []  # an answer from before the commit
    assert member.source_lost(0, PartAbsent(0, 0)) == [Ask(0, 0, 2)]
    assert member.source_lost(2, None) == [Ask(0, 0, 3)]
    (blame,) = member.source_lost(3, None)
    assert isinstance(blame, Blame)
    assert blame.member == COORDINATOR  # it says that it has none of what it has committed
    assert member.rules.failed == "committed, but nobody who holds the averages could be reached"


def test_a_verdict_that_is_heard_twice_asks_nobody_anew() -> None:
    """Another member relays it first. The first one asked is about to give: a refusal of a second one is no end."""
    member = machine([0, 1, 2], group="attt", me=1)
    member.averaged(held(1), 0.5, 1)
    (ask,) = [each for each in member.obey(commit(0, 0, 0), 1.0) if isinstance(each, Ask) and each.tile == 2]
    assert member.obey(commit(0, 0, 0), 2.0) == []
    assert ask.reducer in member.awaited
    assert member.phase is MemberPhase.FETCHING


@pytest.mark.parametrize(
    "verdict",
    [
        Commit(b"x" * 16, [held(0)]),
        Commit(ROUND, []),
        Commit(ROUND, [held(1)]),
        Commit(ROUND, [Held(0, 0, b"\x00", 3.0, b"d" * 16)]),
        Commit(ROUND, [Held(0, 0, b"\xff", 3.0, b"d" * 16)]),
    ],
)
def test_a_commit_that_cannot_be_of_this_round_is_none(verdict: Commit) -> None:
    """Another round, too few tiles, another tile, contributors that do not fit the weight, or are not in the group."""
    member = machine([0])
    assert member.obey(verdict, 1.0) == []
    assert member.rules.commit is None


def test_a_member_that_loses_the_coordinator_asks_the_others_once() -> None:
    """And not after the verdict: then it knows it. The coordinator never loses itself."""
    member = machine([0])
    blame, asks = member.coordinator_lost("killed")
    assert blame == Blame(COORDINATOR, "lost, and it was to decide: killed")
    assert asks == AskOthers()
    assert not member.may_learn
    assert member.coordinator_lost("killed") == []
    late = machine([0])
    late.obey(commit(0), 1.0)
    assert [type(action) for action in late.coordinator_lost("killed")] == [Blame]
    assert machine([0], me=COORDINATOR).coordinator_lost("never") == []


@pytest.mark.parametrize("second", [Abort(ROUND, "no"), Commit(ROUND, [held(0, 1)])])
def test_a_verdict_that_is_taken_back_has_no_place_in_the_round(second: Order) -> None:
    """The round is committed: a member that still fetches goes on. It failed, and its leader was not named."""
    member = machine([0])
    member.obey(commit(0), 1.0)
    assert member.phase is MemberPhase.FETCHING
    assert not member.fits(second)
    assert member.fits(commit(0))
    assert member.obey(second, 2.0) == []
    assert member.phase is MemberPhase.FETCHING
    relayed = machine([0])
    relayed.coordinator_lost("silent")
    relayed.obey(commit(0), 1.0)
    assert relayed.fits(Abort(ROUND, "no"))  # another member has told us the commit: which of the two lies?
    assert relayed.obey(Abort(ROUND, "no"), 2.0) == []
    assert relayed.phase is MemberPhase.FETCHING


def test_a_report_has_all_news_since_the_last_one() -> None:
    """Averages that are held, and sources that give nothing; then only the bytes moved."""
    member = machine([0, 1, 2])
    member.rules.averaged(held(1))
    assert member.source_lost(0, None) == []
    assert member.source_lost(2, PartAbsent(2, 0)) == []
    assert member.news
    assert member.report(10) == Report([held(1)], [0, 2], 10)
    assert not member.news
    assert member.report(11) == Report([], [], 11)


def test_news_are_urgent_when_all_is_held_or_a_source_is_lost() -> None:
    """Others may wait for these; one average of several can wait for the next."""
    member = machine([0, 1, 2])
    assert not member.urgent
    member.rules.averaged(held(0))
    member.rules.averaged(held(1))
    assert member.news
    assert not member.urgent
    member.rules.averaged(held(2))
    assert member.urgent
    member.report(0)
    assert not member.urgent
    other = machine([0, 1, 2])
    other.source_lost(2, None)
    assert other.urgent


def test_a_member_that_gives_up_stays_failed_and_one_that_succeeded_does_not_fail() -> None:
    """The first reason stays. An `Abort` of the coordinator fails it too."""
    member = machine([0])
    assert member.give_up("first")
    assert member.give_up("second")
    assert member.rules.failed == "first"
    assert not member.may_learn
    done = machine([0])
    done.rules.averaged(held(0))
    done.obey(commit(0), 1.0)
    assert not done.give_up("late")
    assert done.rules.succeeded
    told = machine([0])
    told.obey(Abort(ROUND, "too few members are left"), 1.0)
    assert told.rules.failed == "too few members are left"


def test_a_late_reducer_that_was_replaced_is_late_in_the_eyes_of_all() -> None:
    """Only the coordinator that left it out judged it: the next groups were divided about it."""

    def round_of(*orders: Order, now: float) -> MemberMachine:
        member = machine([0, 1, 2, 3], group="tttt")
        member.start(0.0)
        member.averaged(held(0), 0.5, 0)
        member.averaged(held(2), 0.5, 2)
        for order in orders:
            member.obey(order, now)
        return member

    assert round_of(Assign([3], 1, 2), now=2.1).late(5.0, 1.0) == {3}
    assert round_of(Assign([3], 1, 2), now=2.0).late(5.0, 1.0) == set()  # it says so too early
    assert round_of(Assign([2], 1, 0), now=2.1).late(5.0, 1.0) == set()  # it gave its average here in time
    line = round_of(Assign([3], 0, 2), now=9.0)  # another one has it: only our line to it is bad
    assert (line.late(5.0, 1.0), line.unheard) == (set(), {3})
    gone = round_of(Assign([3], 1, 2), Gone(3), now=9.0)
    gone.member_lost(3)
    assert gone.late(5.0, 1.0) == set()
    slow = machine([0, 1, 2, 3], group="tttt")
    slow.start(0.0)
    for tile, now in ((2, 0.5), (3, 0.5), (0, 6.1)):
        slow.averaged(held(tile), now, tile)
    assert slow.late(5.0, 1.0) == {COORDINATOR}  # nobody else could leave it out
    assert slow.late(5.2, 1.0) == set()


def test_a_coordinator_that_decided_each_round_late_led_for_good() -> None:
    """It gave all in time. An honest one waits twice as long as a third of the members needed, and a little more."""
    member = machine([0, 1, 2, 3], group="tttt")
    member.start(0.0)
    assert not member.decided_late(100.0)  # it lacks averages itself
    for tile in range(4):
        member.averaged(held(tile), 2.0, tile)
    assert not member.decided_late(4.5)
    assert member.decided_late(4.6)


def test_the_values_of_a_late_reducer_are_not_waited_for_once_more() -> None:
    """It was not told of the new reducer, which waited for its values in vain. One that is replaced early is honest."""
    for now, finishes in ((2.1, [Finish(3, 1)]), (0.6, [])):
        member = machine([0, 1, 2, 3], group="tttt")
        member.start(0.0)
        for tile in (0, 2):
            member.averaged(held(tile), 0.5, tile)
        for sender in range(4):
            member.contributions.contributed(1, 0, sender, counts=True, now=0.5)
        assert member.obey(Assign([3], 1, 1), now) == [Average(3, 1)]
        told = [member.contributions.contributed(3, 1, sender, counts=True, now=now) for sender in (0, 1, 2)]
        assert told == [[], [], finishes]


def test_a_reducer_with_more_to_spare_waited_longer_for_a_sender_than_the_coordinator() -> None:
    """It was late itself for that, and all judged it. The sender gave nothing to it: that is seen here, too."""
    for now, finishes in ((2.1, [Finish(1, 0)]), (1.0, [])):
        member = machine([0, 1, 2, 3], group="tttt")
        member.start(0.0)
        for sender in (0, 1, 2):
            member.contributions.contributed(1, 0, sender, counts=True, now=1.0)
        assert member.obey(Assign([3], 1, 2), now) == [*finishes, Contribute(3, 1, 2)]
        assert member.unheard == ({3} if finishes else set())


def test_an_order_that_names_a_tile_twice_made_its_reducer_count_its_own_values_twice() -> None:
    """The coordinator that says so lies."""
    member = machine([0, 1, 2])
    member.start(0.0)
    assert not member.fits(Assign([2, 2], 1, 1))
    assert member.fits(Assign([0, 2], 1, 1))


def test_an_order_that_came_again_made_a_reducer_forget_the_values_that_it_had() -> None:
    """It has begun to average the tile: it goes on."""
    member = machine([0, 1, 2])
    member.start(0.0)
    assert member.obey(Assign([2], 1, 1), 1.0) == [Average(2, 1)]
    member.contributions.contributed(2, 1, 0, counts=True, now=1.5)
    assert member.obey(Assign([2], 1, 1), 2.0) == []
    assert not member.contributions.expects(2, 1, 0)


def test_a_reducer_that_is_named_a_source_averages_nothing_anew() -> None:
    """An honest coordinator names it only if it holds the average: one attempt is averaged once."""
    member = machine([0, 1, 2])
    member.start(0.0)
    assert member.obey(Assign([2], 0, 1), 1.0) == []
    assert not member.contributions.expects(2, 0, 0)


def test_a_coordinator_that_named_two_sources_in_turn_had_a_tile_asked_for_without_end() -> None:
    """Each source is asked once in an attempt."""
    member = machine([0, 0, 2], group="tttt")
    member.start(0.0)
    assert member.obey(Assign([0], 0, 2), 1.0) == [Ask(0, 0, 2)]
    assert member.obey(Assign([0], 0, 3), 1.0) == [Ask(0, 0, 3)]
    for source in (2, 3, 2, 3):
        assert member.obey(Assign([0], 0, source), 1.0) == []


@pytest.mark.parametrize(("group", "refuses", "blamed"), [("tttt", 2, True), ("ttat", 2, False)])
def test_a_commit_that_nobody_can_give_is_the_coordinators_fault(group: str, refuses: int, *, blamed: bool) -> None:
    """It says that each member that contributes held each average. An auxiliary one need not."""
    member = machine([0], me=1, group=group)
    member.start(0.0)
    asked = member.obey(commit(0), 1.0)
    actions: list[Any] = []
    while asked:
        (ask,) = asked
        assert isinstance(ask, Ask)
        actions = member.source_lost(ask.reducer, PartAbsent(0, 0) if ask.reducer == refuses else None)
        asked = [action for action in actions if isinstance(action, Ask)]
    assert member.phase is MemberPhase.FAILED
    assert member.committed_in_vain == blamed
    assert [action.member for action in actions if isinstance(action, Blame)] == ([COORDINATOR] if blamed else [])
