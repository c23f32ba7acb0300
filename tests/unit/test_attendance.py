"""The peers that a group waits for when it forms."""

from __future__ import annotations

from shoal.optim.attendance import Attendance
from shoal.peer import PeerID

ME, HERE, ABSENT = (PeerID(bytes([number]) * 32) for number in range(3))
ALL, PRESENT = frozenset({ME, HERE, ABSENT}), frozenset({ME, HERE})


def miss(attendance: Attendance, now: float) -> list[tuple[PeerID, int]]:
    """A round to which one of three does not come."""
    attendance.search()
    assert attendance.awaited(ALL, now - 15.0) == ALL
    assert attendance.awaited(ALL, now) == ALL
    return attendance.formed(PRESENT, now)


def test_who_missed_two_rounds_is_waited_for_ever_more_rarely() -> None:
    """Once may be chance. The others have their rounds without it, and try again now and then."""
    attendance, now = Attendance(15.0), 100.0
    attendance.formed(ALL, 0.0)
    assert miss(attendance, now) == []
    now += 15.0
    for missed, pause_s in [(2, 60.0), (3, 120.0), (4, 240.0), (5, 480.0), (6, 960.0), (7, 960.0), (8, 960.0)]:
        assert miss(attendance, now) == [(ABSENT, missed)]
        attendance.search()
        assert attendance.awaited(ALL, now + pause_s - 0.1) == PRESENT
        assert attendance.formed(PRESENT, now + pause_s - 0.1) == []  # it was not asked for
        now += pause_s + 15.0


def test_who_comes_again_is_waited_for_again() -> None:
    """Also when it came to a round in which nobody waited for it."""
    attendance = Attendance(15.0)
    attendance.formed(ALL, -30.0)
    miss(attendance, 0.0)
    miss(attendance, 15.0)
    assert attendance.awaited(ALL, 16.0) == PRESENT
    attendance.formed(ALL, 16.0)
    assert miss(attendance, 31.0) == []


def test_who_came_to_the_run_after_the_group_had_formed_missed_nothing() -> None:
    """Those who were awaited count, not those who are there when the round is over."""
    attendance = Attendance(15.0)
    attendance.formed(ALL, -30.0)
    for now in (0.0, 1.0, 2.0):
        assert attendance.awaited(PRESENT, now) == PRESENT
        assert attendance.formed(PRESENT, now) == []
    assert miss(attendance, 3.0) == []


def test_a_group_that_forms_at_once_without_somebody_does_not_expel_it() -> None:
    """Its leader had not heard of it; after two such chances it was not waited for, and never in time again."""
    attendance, now = Attendance(15.0), 100.0
    attendance.formed(ALL, 0.0)
    for _ in range(10):
        attendance.search()
        assert attendance.awaited(ALL, now) == ALL
        assert attendance.formed(PRESENT, now + 7.4) == []
        now += 10.0


def test_who_comes_under_new_names_is_one_absent_peer() -> None:
    """A stranger that misses a round is waited for under no other name either; who has come before is."""
    attendance = Attendance(15.0)
    attendance.formed(PRESENT, 0.0)
    strangers = [PeerID(bytes([number]) * 32) for number in range(10, 20)]
    waits = 0
    for number, stranger in enumerate(strangers):
        now = 100.0 + 20.0 * number
        attendance.search()
        waits += stranger in attendance.awaited(PRESENT | {stranger}, now)
        attendance.awaited(PRESENT | {stranger}, now + 15.0)
        attendance.formed(PRESENT, now + 15.0)
    assert waits == 3
    assert attendance.absent(strangers, 285.0) == frozenset(strangers)
    assert attendance.absent(PRESENT, 285.0) == frozenset()


def test_claims_under_ever_new_keys_cost_two_whole_windows() -> None:
    """Two waits of 15 s, while all the others were there. Strangers have a third of that, from the first of them on."""
    attendance = Attendance(15.0)
    attendance.formed(PRESENT, 0.0)
    waited_s, now = 0.0, 100.0
    for number in range(10, 300, 10):  # a round every 5 s
        attendance.search()
        for step in range(30):
            stranger = PeerID(bytes([(number + step) % 256]) * 32)  # another key each half second
            if stranger not in attendance.awaited(PRESENT | {stranger}, now):
                break
            waited_s, now = waited_s + 0.5, now + 0.5
        attendance.formed(PRESENT, now)
        now += 5.0
    assert waited_s <= 25.0
    assert HERE in attendance.awaited(PRESENT, now + 14.0)
