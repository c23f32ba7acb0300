"""What a peer makes of those that lead its groups: which it shuns, avoids or puts on trial, and which it expects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest

from shoal.averaging.matchmaking.config import MatchmakingConfig
from shoal.averaging.matchmaking.expected import LOOKED_AT, Expected
from shoal.averaging.matchmaking.leaders import LeaderMemory, Leaders
from shoal.base.peer import PeerID
from tests.property.matchmaking_world import contact_of, peer_id

WINDOW_S = 5.0
ME = 50


def ids(*numbers: int) -> frozenset[PeerID]:
    """The peers of these numbers."""
    return frozenset(map(peer_id, numbers))


def search(
    memory: LeaderMemory,
    *expected: int,
    shunned: Collection[int] = (),
    silent: Collection[int] = (),
    followers: Iterable[int] = (),
    **sizes: Any,
) -> Leaders:
    """A search that begins at time 0, for which these are expected."""
    known = Expected(
        lambda: ids(*expected) or None, lambda peer, _: peer in ids(*silent), dict.fromkeys(ids(*followers))
    )
    config = MatchmakingConfig(window_s=WINDOW_S, **sizes)
    return Leaders(peer_id(ME), config, memory, known, shunned=ids(*shunned), now=0.0)


def follows(leaders: Leaders, leader: int, *members: int, sent_on: Collection[int] = ()) -> None:
    """This leader accepts us, we send these on to it, and it begins at once with the members, us and itself."""
    leaders.accepted(peer_id(leader), (), 0.0)
    for number in sent_on:
        leaders.sent_on(peer_id(number))
    leaders.begun(peer_id(leader), ids(leader, ME, *members), 0.0)


def missing_twice(leader: int, missing: int) -> LeaderMemory:
    """It has led us twice, to groups without a peer that we had sent on to it."""
    memory = LeaderMemory(last=contact_of(leader))
    for _ in range(2):
        follows(search(memory), leader, sent_on=(missing,))
        memory.played(peer_id(leader), ids(leader, ME))
    return memory


def test_takes_the_lead_where_two_that_do_not_reach_each_other_lead_in_turns() -> None:
    """Each is in every other group. Two groups stepped side by side, and half of the steps were thrown away."""
    memory = LeaderMemory()
    for leader in (1, 2, 1):
        assert not memory.missed(peer_id(leader))
        follows(search(memory, 1, 2), leader)
        memory.played(peer_id(leader), ids(leader, ME))
    assert memory.missed(peer_id(1)) == ids(2)


def test_a_peer_that_comes_to_our_leader_after_all_is_not_stranded() -> None:
    """It asked us when the last group had begun already."""
    memory = LeaderMemory()
    for members in ((), (60,), (60,), ()):
        follows(search(memory), 1, *members, sent_on=(60,))
        memory.played(peer_id(1), ids(1, ME, *members))
    assert not memory.missed(peer_id(1))


def test_a_member_that_was_only_listed_counted_as_there() -> None:
    """Its leader had told it nothing. It is there if something comes from it in time."""
    memory = LeaderMemory()
    for _ in range(2):
        follows(search(memory), 1, 60)
        memory.played(peer_id(1), ids(1, ME))
    assert memory.missed(peer_id(1)) == ids(60)


def test_a_leader_that_told_each_member_nothing_in_turns_led_on() -> None:
    """None of them was missing twice of three times."""
    memory = LeaderMemory()
    for missing in (60, 61):
        follows(search(memory), 1, 60, 61)
        memory.played(peer_id(1), ids(1, ME, 60, 61) - ids(missing))
    assert memory.missed(peer_id(1)) == ids(60, 61)


def test_in_a_trial_neither_the_leader_nor_who_was_missing_leads() -> None:
    """Whoever leads is in its own group, and may keep the other one out. Both are waited for a while nevertheless."""
    leaders = search(missing_twice(1, 60), 1, 60, 61)
    assert [leaders.avoids(peer_id(number)) for number in (1, 60, 61)] == [True, True, False]
    assert leaders.at_once() is None
    assert leaders.head_starts == 2
    assert leaders.expected() == ids(60, 61)
    late = {"joined_at": 0.0, "now": 10.0}
    assert leaders.may_be_on_its_way(ids(60, 61), awaits=True, **late)
    assert not leaders.may_be_on_its_way(ids(60, 61), awaits=False, **late)


@pytest.mark.parametrize(("now", "waits"), [(0.9, True), (1.1, False)])
def test_who_was_missing_gets_a_second_to_come_to_another_leader(now: float, waits: bool) -> None:
    """Though nobody expects it any more: else nothing would be known of it, or of the leader on trial."""
    leaders = search(missing_twice(1, 60), 1, 61)
    assert leaders.may_be_on_its_way(ids(61), awaits=False, joined_at=0.0, now=now) is waits


@pytest.mark.parametrize(("came", "led_by"), [((60,), 1), ((61,), None), ((60, 61), 1)])
def test_the_leader_on_trial_is_found_where_the_missing_peer_comes(came: Sequence[int], led_by: int | None) -> None:
    """Otherwise the missing one is to blame; the trial is over either way."""
    memory = missing_twice(1, 60)
    search(memory, 1, 60, 61).ended(ids(*came), 0.0)
    assert memory.played(None, ids(ME, *came)) == (led_by and peer_id(led_by))
    assert memory.on_trial is None
    assert not memory.stranded


def test_a_peer_that_leads_itself_shows_nothing_about_the_leader_before() -> None:
    """A liar that came to nobody's groups led the next one, and the honest leader was avoided for that."""
    memory = missing_twice(1, 60)
    search(memory, 1, 60, 61)
    assert memory.on_trial == peer_id(1)
    assert memory.played(peer_id(60), ids(60, 61, ME)) is None


def test_where_fewer_come_than_to_the_leader_on_trial_the_trial_is_over() -> None:
    """The others stay with it, and so do we."""
    memory = missing_twice(1, 60)
    memory.there = 4
    leaders = search(memory, 1, 60, 61)
    leaders.most_stay(ids(61, 62, 63))
    assert leaders.avoids(peer_id(1))
    leaders.most_stay(ids(61))
    assert not leaders.avoids(peer_id(1))
    assert memory.on_trial is None


@pytest.mark.parametrize("code", ["declined", "full", "what"])
def test_a_leader_that_refuses_us_in_whatever_words_is_avoided(code: str) -> None:
    """Only "full" counted as turned away: with another word it refused one peer in each search, for ever."""
    memory = LeaderMemory()
    for _ in range(2):
        assert not memory.avoided
        leaders = search(memory, 1, 2)
        leaders.refused(peer_id(1), code)
        leaders.gave_up(None, (), 0.0)
    assert list(memory.avoided) == [peer_id(1)]


@pytest.mark.parametrize("code", ["later", "not-looking", "started", "replaced"])
def test_a_refusal_for_a_passing_reason_is_no_failure(code: str) -> None:
    """Any peer gives it that is not asked in the right moment."""
    memory = LeaderMemory()
    for _ in range(3):
        leaders = search(memory, 1, 2)
        leaders.refused(peer_id(1), code)
        leaders.gave_up(None, (), 0.0)
    assert not memory.avoided


def test_a_leader_fails_us_as_often_as_we_rely_on_it_in_vain() -> None:
    """It was lost, or others sent us there; not if it is in our group after all, or sent us on itself."""

    def avoided(told: Callable[[Leaders], None], *group: int) -> list[PeerID]:
        memory = LeaderMemory()
        for _ in range(2):
            leaders = search(memory, 1, 2)
            told(leaders)
            leaders.ended(ids(*group), 0.0)
        return list(memory.avoided)

    def sends_us_on(leaders: Leaders) -> None:
        leaders.accepted(peer_id(1), (), 0.0)
        leaders.redirected(peer_id(1), None)

    assert avoided(lambda leaders: leaders.lost(peer_id(1))) == [peer_id(1)]
    assert avoided(lambda leaders: leaders.lost(peer_id(1)), 1) == []
    assert avoided(lambda leaders: leaders.redirected(peer_id(2), peer_id(1))) == [peer_id(1)]
    assert avoided(sends_us_on) == []


@pytest.mark.parametrize(
    ("members", "shuns", "avoids"),
    [((), False, True), (None, False, True), ((60,), False, False), ((), True, True)],
    ids=["begins", "holds back", "most come", "shuns"],
)
def test_a_leader_to_which_the_others_did_not_come_kept_one_peer_for_itself(
    members: tuple[int, ...] | None, shuns: bool, avoids: bool
) -> None:
    """It had lied to the others alone. Each search was over before half of a window, so it was never judged."""
    memory, avoided = LeaderMemory(), list[list[PeerID]]()
    for _ in range(2):
        leaders = search(memory, 1, 60, 61, shunned=(61,) if shuns else ())
        leaders.accepted(peer_id(1), (), 0.0)
        leaders.look_at_others(peer_id(1))
        if members is None:
            leaders.gave_up(peer_id(1), (), 0.3 * WINDOW_S)
        else:
            leaders.begun(peer_id(1), ids(1, ME, *members), 0.3 * WINDOW_S)
        avoided.append(list(memory.avoided))
    assert avoided == [[], [peer_id(1)] if avoids else []]


def test_a_leader_that_kept_one_peer_for_half_of_a_window_is_avoided_at_once() -> None:
    """Though that search ended without a group."""
    memory = LeaderMemory()
    leaders = search(memory, 1, 60, 61)
    leaders.accepted(peer_id(1), (), 0.0)
    leaders.look_at_others(peer_id(1))
    leaders.gave_up(peer_id(1), (), 0.6 * WINDOW_S)
    assert list(memory.avoided) == [peer_id(1)]


def test_who_was_lost_and_asks_us_is_here_again() -> None:
    """It is waited for as before."""
    expected = Expected(lambda: ids(60), lambda *_: False, {})
    expected.lost(peer_id(60))
    assert not expected.not_gone(ids(60), among=1)
    expected.came(peer_id(60))
    assert expected.not_gone(ids(60), among=1) == ids(60)


def test_who_is_silent_or_declines_is_not_expected() -> None:
    """A leader waits neither for these, nor for one that it shuns or avoids."""
    memory = LeaderMemory(avoided={peer_id(63): 1.0})
    leaders = search(memory, ME, 60, 61, 62, 63, 64, shunned=(64,), silent=(61,))
    leaders.declined(peer_id(62))
    assert leaders.expected() == ids(60)
    assert leaders.doubts(peer_id(63))
    assert leaders.doubts(peer_id(64))
    assert search(memory).expected() is None


def test_of_many_expected_peers_only_a_leader_looks() -> None:
    """To look at a peer is to ask it."""
    many = range(LOOKED_AT + 1)
    assert len(search(LeaderMemory(), *many, silent=many).expected() or ()) == LOOKED_AT + 1
    assert search(LeaderMemory(), *many, silent=many, followers=(0,)).expected() == ids(0)


def test_half_of_the_peers_lead_in_any_case() -> None:
    """Else a peer that stays away from the groups of all others in turns would leave nobody that leads."""
    memory = LeaderMemory()
    for number in range(6):
        memory.avoid(peer_id(number), 0.0, WINDOW_S, 7)
    assert list(memory.avoided) == [peer_id(number) for number in (3, 4, 5)]


@pytest.mark.parametrize("here", [2, 15])
def test_a_leader_that_says_that_its_group_is_full_and_cannot_be_has_turned_us_away(here: int) -> None:
    """It is the peer that is left out who can tell: others may have been told a lie."""
    memory = LeaderMemory()
    search(memory, *range(1, here + 1), target_group_size=4).refused(peer_id(1), "full")
    assert memory.take_failures() == ([], set(ids(1)) if here == 2 else set())
    assert memory.take_failures() == ([], set())


@pytest.mark.parametrize("seconds", [0.4 * WINDOW_S, 0.6 * WINDOW_S])
def test_a_leader_that_is_left_after_half_of_a_window_is_shunned(seconds: float) -> None:
    """It began no group in that time, and would have us wait again; one that was followed briefly is not."""
    memory = LeaderMemory()
    leaders = search(memory, 1)
    leaders.accepted(peer_id(1), (), 1.0)
    shunned = seconds > WINDOW_S / 2
    assert leaders.left(peer_id(1), 1.0 + seconds) is shunned
    assert leaders.shuns(peer_id(1)) is shunned
    assert memory.take_failures()[0] == ([peer_id(1)] if shunned else [])
