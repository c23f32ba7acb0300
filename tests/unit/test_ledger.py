"""Which peers others do not count on for a while, and when they are forgiven."""

from __future__ import annotations

import math

from shoal.base.ledger import Budget, Ledger
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


def test_each_failure_doubles_the_pause_up_to_the_longest() -> None:
    """The free ones begin none, and who is forgiven begins anew."""
    ledger = Ledger[PeerID](2, 10, free=2.0)
    assert [ledger.failed(PEER, 0, weight=0.75) for _ in range(3)] == [0, 0, 2]
    ends = [ledger.until(PEER)]
    for _ in range(3):
        ledger.failed(PEER, 100)
        ends.append(ledger.until(PEER))
    assert ends == [2, 104, 108, 110]
    ledger.forgive(PEER)
    assert ledger.until(PEER) == -math.inf
    assert not ledger.unforgiven


def test_a_failure_that_costs_too_much_begins_a_pause_at_once() -> None:
    """It lasts until the failure can be forgiven."""
    ledger = Ledger[PeerID](4 * WINDOW_S, 64 * WINDOW_S, costly_s=COST_S)
    assert ledger.failed(PEER, 0.0, COST_S - 1) == 0
    ledger.clear()
    assert ledger.failed(PEER, 0.0, COST_S) == 1
    assert ledger.until(PEER) == 10 * COST_S


def test_who_fails_on_purpose_is_not_forgiven_before_the_longest_pause_is_over() -> None:
    """However well it does meanwhile."""
    ledger = Ledger[PeerID](4 * WINDOW_S, 64 * WINDOW_S)
    ledger.condemn(PEER, 10.0)
    ends = 10.0 + 64 * WINDOW_S
    ledger.forgive(PEER, ends - 1)
    assert ledger.pausing(ends - 1) == {PEER}
    assert ledger.pausing(ends) == frozenset()
    ledger.condemn(PEER, ends)
    assert ledger.until(PEER) == ends + 64 * WINDOW_S
    ledger.forgive(PEER, ends + 64 * WINDOW_S)
    assert not ledger.unforgiven


def test_a_budget_is_paid_for_all_and_comes_back_slowly() -> None:
    """The time that is lost brings nothing back itself, and nobody saves up more than there was at first."""
    budget = Budget(4.0, 0.1)
    budget.pay(3.5, 3.5)
    assert budget.left_s(3.5) == 0.5
    assert budget.is_spent(3.5)
    budget.pay(9.0, 12.5)
    assert budget.left_s(12.5) == 0.0
    assert budget.left_s(22.5) == 1.0
    assert not budget.is_spent(22.5)
    assert budget.left_s(1000.0) == 4.0
