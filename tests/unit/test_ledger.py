"""Which peers others do not count on for a while, and when they are forgiven."""

from __future__ import annotations

from shoal.base.ledger import Ledger
from shoal.base.peer import PeerID

PEER = PeerID(bytes(31) + b"\x01")
WINDOW_S, COST_S = 15.0, 12.0


def test_who_fails_every_other_time_is_not_forgiven_in_between() -> None:
    """It would cost the others half of their rounds. What it has cost is outweighed after ten times as long."""
    ledger = Ledger[PeerID](4 * WINDOW_S, 64 * WINDOW_S)
    assert ledger.failed(PEER, 0.0, COST_S) == 0
    ledger.forgive(PEER, 3.0)
    assert ledger.failed(PEER, 20.0, COST_S) == 2
    assert ledger.pausing(20.0 + 4 * WINDOW_S - 1) == {PEER}
    assert ledger.pausing(20.0 + 4 * WINDOW_S) == frozenset()
    ledger.forgive(PEER, 20.0 + 10 * COST_S - 1)
    assert ledger.failed(PEER, 150.0, COST_S) == 3
    ledger.forgive(PEER, 150.0 + 10 * COST_S)
    assert ledger.failed(PEER, 300.0, COST_S) == 0


def test_a_failure_that_costs_no_time_is_forgiven_at_once() -> None:
    """As that of a peer that comes to the next round."""
    ledger = Ledger[PeerID](4 * WINDOW_S, 64 * WINDOW_S)
    for now in (0.0, 10.0, 20.0):
        assert ledger.failed(PEER, now) == 0
        ledger.forgive(PEER, now)
