"""Which peers others do not count on for a while, and when they are forgiven."""

from __future__ import annotations

from shoal.averaging import Pauses
from shoal.base.peer import PeerID

PEER = PeerID(bytes(31) + b"\x01")
WINDOW_S, COST_S = 15.0, 12.0


def test_who_fails_every_other_time_is_not_forgiven_in_between() -> None:
    """It would cost the others half of their rounds. What it has cost is outweighed after ten times as long."""
    pauses = Pauses(WINDOW_S)
    assert pauses.failed(PEER, 0.0, COST_S) == 0
    pauses.forgive(PEER, 3.0)
    assert pauses.failed(PEER, 20.0, COST_S) == 2
    assert pauses.now(20.0 + 4 * WINDOW_S - 1) == {PEER}
    assert pauses.now(20.0 + 4 * WINDOW_S) == frozenset()
    pauses.forgive(PEER, 20.0 + 10 * COST_S - 1)
    assert pauses.failed(PEER, 150.0, COST_S) == 3
    pauses.forgive(PEER, 150.0 + 10 * COST_S)
    assert pauses.failed(PEER, 300.0, COST_S) == 0


def test_a_failure_that_costs_no_time_is_forgiven_at_once() -> None:
    """As that of a peer that comes to the next round."""
    pauses = Pauses(WINDOW_S)
    for now in (0.0, 10.0, 20.0):
        assert pauses.failed(PEER, now) == 0
        pauses.forgive(PEER, now)
