"""Whether a download will be complete in time, by what it has received."""

from __future__ import annotations

from shoal.base.peer import PeerID
from shoal.state.wire.arrivals import Intake, Line

A, B = (PeerID(bytes([number]) * 32) for number in range(2))
MIB = 1 << 20


def test_a_state_that_comes_fast_enough_is_in_time() -> None:
    """1,000 bytes a second, which may become 4,000, and 50,000 are missing."""
    intake = Intake(0.0)
    assert not intake.in_time(1.0, 1000.0)
    intake.received(A, 2000)
    assert not intake.in_time(2.0, 1000.0)
    intake.missing_bytes = 50_000
    assert intake.in_time(2.0, 14.5)
    assert not intake.in_time(2.0, 14.4)
    assert intake.donors == {A}


def test_a_donor_that_stops_is_not_in_time_for_long() -> None:
    """What it gave before counts for two windows of ten seconds at most."""
    intake = Intake(0.0)
    intake.missing_bytes = 1000
    intake.received(A, 500)
    gives = [second for second in range(1, 60) if intake.in_time(float(second), 600.0)]
    assert gives == list(range(1, 21))


def test_bytes_of_a_donor_that_breaks_the_protocol_do_not_count() -> None:
    """Nor does it: what it sent was not the state."""
    intake = Intake(0.0)
    intake.missing_bytes = 100_000
    intake.received(A, 500)
    intake.received(B, 1)
    assert intake.in_time(1.0, 600.0)
    intake.dropped(A)
    assert intake.donors == {B}
    assert not intake.in_time(1.5, 600.0)
    intake.dropped(A)


def test_our_line_is_the_limit_while_each_donor_has_its_share_of_it() -> None:
    """Not while a donor is slow on its own, nor while nothing comes at all."""
    line = Line()
    for second in range(4):
        line.look({A: second * MIB, B: second * MIB}, 2 * second * MIB, float(second))
    assert line.is_limit(A, 3.5)
    assert line.is_limit(B, 3.5)
    for second in range(4, 8):
        line.look({A: 3 * MIB + (second - 3) * 100, B: second * MIB}, (3 + second) * MIB, float(second))
    assert not line.is_limit(A, 7.5)
    assert line.is_limit(B, 7.5)
    assert not line.is_limit(B, 7.75), "nothing has come for a while"
