"""The peers that a group waits for when it forms."""

from __future__ import annotations

from shoal.base.peer import PeerID
from shoal.run.view.attendance import Attendance

ME, HERE, ABSENT = (PeerID(bytes([number]) * 32) for number in range(3))
ALL, PRESENT = frozenset({ME, HERE, ABSENT}), frozenset({ME, HERE})


def miss(attendance: Attendance, began: float) -> tuple[list[tuple[PeerID, int]], float]:
    """A round to which one of three does not come: who is given up, and when the round began after all."""
    attendance.search()
    now = began
    while ABSENT in attendance.wait_for(ALL, now):
        now += 0.5
    assert began < now <= began + 15.5
    return attendance.formed(PRESENT, now), now


def test_who_missed_two_rounds_is_waited_for_ever_more_rarely() -> None:
    """Once may be chance. The others have their rounds without it, and try again now and then."""
    attendance = Attendance(15.0)
    attendance.formed(ALL, 0.0)
    given_up, now = miss(attendance, 100.0)
    assert given_up == []
    for missed, pause_s in [(2, 60.0), (3, 120.0), (4, 240.0), (5, 480.0), (6, 960.0), (7, 960.0), (8, 960.0)]:
        given_up, now = miss(attendance, now)
        assert given_up == [(ABSENT, missed)]
        attendance.search()
        assert attendance.wait_for(ALL, now + pause_s - 0.1) == PRESENT
        assert attendance.formed(PRESENT, now + pause_s - 0.1) == []  # it was not asked for
        now += pause_s


def test_who_comes_again_is_waited_for_again() -> None:
    """Also when it came to a round in which nobody waited for it."""
    attendance = Attendance(15.0)
    attendance.formed(ALL, -30.0)
    _, now = miss(attendance, 0.0)
    given_up, now = miss(attendance, now)
    assert given_up == [(ABSENT, 2)]
    assert attendance.wait_for(ALL, now) == PRESENT
    attendance.formed(ALL, now)
    assert miss(attendance, now)[0] == []


def test_who_came_to_the_run_after_the_group_had_formed_missed_nothing() -> None:
    """Those who were awaited count, not those who are there when the round is over."""
    attendance = Attendance(15.0)
    attendance.formed(ALL, -30.0)
    for now in (0.0, 1.0, 2.0):
        assert attendance.wait_for(PRESENT, now) == PRESENT
        assert attendance.formed(PRESENT, now) == []
    assert miss(attendance, 3.0)[0] == []


def test_a_group_that_forms_at_once_without_somebody_does_not_expel_it() -> None:
    """Its leader had not heard of it; after two such chances it was not waited for, and never in time again."""
    attendance, now = Attendance(15.0), 100.0
    attendance.formed(ALL, 0.0)
    for _ in range(10):
        attendance.search()
        assert attendance.wait_for(ALL, now) == ALL
        assert attendance.formed(PRESENT, now + 2.0) == []
        now += 10.0


def test_all_strangers_have_one_account() -> None:
    """A stranger that misses rounds is waited for under no other name for longer than a moment; contributors are."""
    attendance = Attendance(15.0)
    attendance.contributed(PRESENT, alone=False)
    strangers = [PeerID(bytes([number]) * 32) for number in range(10, 20)]
    waited_s, given_up = 0.0, []
    for number, stranger in enumerate(strangers):
        now = began = 100.0 + 20.0 * number
        attendance.search()
        while stranger in attendance.wait_for(PRESENT | {stranger}, now):
            now += 0.1
        waited_s += now - began
        given_up += attendance.formed(PRESENT, now)
    assert 4.0 <= waited_s <= 4.0 + 0.02 * 200.0 + 1.0 + 10 * 0.3
    assert given_up[0] == (strangers[0], 1)
    assert attendance.absent(strangers, now) == attendance.unawaited(strangers, now) == frozenset(strangers)
    assert attendance.absent(PRESENT, now) == frozenset()
    assert attendance.absent(strangers, now + 50.0) == frozenset()


def test_claims_that_are_taken_back_are_paid_for() -> None:
    """A key that claims for two seconds in each round, and then goes: that is no missed round, but lost time."""
    attendance, waited_s, now = Attendance(15.0), 0.0, 100.0
    attendance.contributed(PRESENT, alone=False)
    for number in range(10, 110):
        stranger, began = PeerID(bytes([number]) * 32), now
        attendance.search()
        while stranger in attendance.wait_for(PRESENT | {stranger}, now) and now < began + 2.0:
            now += 0.1
        assert attendance.wait_for(PRESENT, now) == PRESENT
        attendance.formed(PRESENT, now)
        waited_s += now - began
        now += 1.0
    assert waited_s <= 4.0 + 0.02 * (now - 100.0) + 1.0 + 100 * 0.3
    last = frozenset({stranger})
    assert attendance.absent(last, now) == last  # for a moment each search waits: it may be about to come
    assert attendance.wait_for(last, now) == attendance.wait_for(last, now + 0.25) == last
    assert attendance.wait_for(last, now + 0.3) == frozenset()


def test_keys_that_have_worked_a_little_are_bounded_together() -> None:
    """Each contributed to a round, claims for a part of a window in others, and takes that back."""
    attendance, waited_s, now = Attendance(15.0), 0.0, 100.0
    keys = [PeerID(bytes([number]) * 32) for number in range(10, 40)]
    attendance.contributed(PRESENT.union(keys), alone=False)
    for number in range(300):
        key, began = keys[number % len(keys)], now
        attendance.search()
        while key in attendance.wait_for(PRESENT | {key}, now) and now < began + 7.0:
            now += 0.1
        attendance.formed(PRESENT, now)
        waited_s += now - began
        now += 9.0
    assert waited_s <= 30.0 + 0.2 * (now - 100.0)


def test_a_peer_that_is_alone_waits_for_a_newcomer_on_a_slow_line() -> None:
    """It holds up nobody else: two windows, and a tenth of the time. A liar stops it no longer than that."""
    attendance, waited_s, now = Attendance(15.0), 0.0, 100.0
    attendance.contributed(frozenset({ME}), alone=True)
    others = frozenset({ABSENT})
    for _ in range(50):
        attendance.search()
        began = now
        while ABSENT in attendance.wait_for(others, now):
            now += 0.5
        assert attendance.unawaited(others, now) == others
        attendance.formed({ME}, now)
        waited_s += now - began
        now += 2.0
    assert 30.0 <= waited_s <= 32.0 + 0.2 * (now - 100.0)


def test_who_does_not_come_while_most_wait_for_an_epoch_has_missed_the_round() -> None:
    """A search waited for a whole window, in which a peer that heard nobody made a whole step of its own."""
    attendance = Attendance(15.0)
    attendance.formed(ALL, -30.0)
    for began, given_up in ((0.0, []), (10.0, [(ABSENT, 2)])):
        attendance.search(2.0)
        assert attendance.patience_s == 2.0
        assert attendance.wait_for(ALL, began) == ALL
        assert attendance.formed(PRESENT, began + 2.1) == given_up
    for patience_s, most_s in ((0.1, 1.0), (60.0, 15.0)):
        attendance.search(patience_s)
        assert attendance.patience_s == most_s


def test_peers_that_had_met_elsewhere_were_given_up_by_the_one_that_was_left_out() -> None:
    """A leader had not told it of their group. After two searches it stepped alone."""
    attendance = Attendance(15.0)
    for began in (0.0, 100.0, 200.0):
        attendance.search(2.0)
        assert attendance.wait_for(ALL, began) == ALL
        assert attendance.formed((), began + 1.5, elsewhere=ALL) == []


def test_who_goes_to_another_state_while_a_search_waits_for_it_has_missed_the_round() -> None:
    """It was not expected any more when the group began: each round waited for it, and none counted."""
    attendance = Attendance(15.0)
    attendance.formed(ALL, -30.0)
    for began, given_up in [(0.0, []), (100.0, [(ABSENT, 2)])]:
        attendance.search(2.0)
        assert attendance.wait_for(ALL, began) == ALL
        assert attendance.wait_for(PRESENT, began + 1.0) == PRESENT
        assert attendance.formed(PRESENT, began + 1.5) == given_up
