"""What a peer concludes from one round after another: who is not waited for, who does not lead, which line is bad."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.averaging.allreduce.interface import Outcome
from shoal.averaging.allreduce.witness import Seen
from shoal.averaging.conduct import Conduct
from shoal.averaging.strangers import NO_STRANGERS, Strangers
from shoal.base.ledger import Budget
from shoal.base.peer import PeerID

A, B, C = (PeerID(bytes([number]) * 32) for number in range(3))
NOBODY, ALL = frozenset[PeerID](), frozenset({A, B, C})
WINDOW_S, ROUND_S = 5.0, 2.0


class Rounds:
    """Rounds of three peers, as one of them sees them; A leads, and that is this one if nothing is said."""

    def __init__(self, *, leads: bool = True) -> None:
        self.leads = leads
        self.warnings: list[str] = []
        self.conduct = Conduct(WINDOW_S, lambda message, *_: self.warnings.append(message))
        self.now, self.leader = 0.0, A

    def play(self, *, succeeds: bool = True, gave: frozenset[PeerID] = ALL, unfair: bool = False, **seen: Any) -> None:
        """One round, in which this was seen; by default all three gave and own parts."""
        given: dict[str, Any] = {"late": NOBODY, "unheard": NOBODY, "bad_lines": NOBODY, "reduced": ALL}
        given |= {"hurried": NOBODY, "waited_s": 0.0, "lost_s": 0.0}
        all_seen = Seen(**{**given, "led_badly": False, "decided_late": False, **seen})
        in_part = {A: Fraction(1, 2)} if A in gave else {A: Fraction(0)}
        outcome: Any = SimpleNamespace(contributors=sorted(gave - {A}), counted_in_part=in_part)
        outcome.gave = Outcome.gave.fget(outcome)  # type: ignore[attr-defined]
        outcome = outcome if succeeds else None
        ended = self.now + ROUND_S
        self.conduct.played(all_seen, self.leader, outcome, self.now, ended, leads=self.leads, unfair=unfair)
        self.now += ROUND_S

    def shut_out(self) -> tuple[frozenset[PeerID], frozenset[PeerID], frozenset[PeerID]]:
        """Who is not waited for, who does not lead, and to whom the line is bad."""
        conduct = self.conduct
        return (
            conduct.idle.pausing(self.now),
            conduct.bad_leaders.pausing(self.now),
            conduct.bad_lines.pausing(self.now),
        )


def test_once_is_not_enough() -> None:
    """Any round may go wrong."""
    rounds = Rounds()
    rounds.play(late=frozenset({B}), gave=frozenset({A, C}))
    rounds.play(led_badly=True, succeeds=False)
    assert rounds.shut_out() == (NOBODY, NOBODY, NOBODY)
    assert rounds.warnings == []


@pytest.mark.parametrize("how", ["late", "unheard"])
def test_a_member_that_was_waited_for_and_gave_nothing_is_idle(how: str) -> None:
    """Whether the others left it out, or only its values did not come here: they came to nobody."""
    rounds = Rounds()
    for _ in range(2):
        seen: dict[str, Any] = {how: frozenset({B}), "gave": frozenset({A, C})}
        rounds.play(**seen)
    assert rounds.shut_out() == (frozenset({B}), NOBODY, NOBODY)
    assert rounds.conduct.precedence(NO_STRANGERS, rounds.now).shunned == {B}
    assert "gave nothing" in rounds.warnings[0]


@pytest.mark.parametrize("leaders", [(A, A), (A, C), (A, A, A)])
def test_a_leader_that_told_a_member_nothing_had_it_named(leaders: tuple[PeerID, ...]) -> None:
    """The second time under one leader does not count; under another one, or if it leads all the same, it does."""
    rounds = Rounds(leads=False)
    for rounds.leader in leaders:
        rounds.play(late=frozenset({B}), gave=frozenset({A, C}))
    idle = leaders != (A, A)
    assert rounds.shut_out() == (frozenset({B} if idle else ()), NOBODY, NOBODY)
    assert bool(rounds.warnings) == idle


def test_a_member_that_does_not_end_its_streams_is_idle() -> None:
    """It gives what it should. But each round waited a second for it, and nobody was named."""
    rounds = Rounds()
    for _ in range(2):
        rounds.play()
        rounds.conduct.ended(frozenset({B}), 1.0, rounds.now)
    assert rounds.shut_out() == (frozenset({B}), NOBODY, NOBODY)
    assert "did not end its streams" in rounds.warnings[0]
    rounds.now += 10.0  # in its pause nobody waits for it, and it is not forgiven as long as it goes on so
    for _ in range(2):
        rounds.conduct.ended(frozenset({B}), 0.0, rounds.now)
        rounds.play()
    assert rounds.conduct.idle.unforgiven == {B}
    rounds.conduct.ended(NOBODY, 0.0, rounds.now)
    rounds.play()
    assert rounds.conduct.idle.unforgiven == NOBODY


def test_streams_that_nobody_waited_for_cost_nobody_anything() -> None:
    """A member with a slow line may fetch averages until the next round needs the memory."""
    rounds = Rounds()
    for _ in range(4):
        rounds.play()
        rounds.conduct.ended(frozenset({B}), 0.0, rounds.now)
    rounds.play(late=frozenset({B}), gave=frozenset({A, C}))
    rounds.conduct.ended(frozenset({B}), 1.0, rounds.now)  # it is one failure, not two
    assert rounds.shut_out() == (NOBODY, NOBODY, NOBODY)


def test_open_streams_are_paid_for() -> None:
    """Keys are free: many could take turns."""
    rounds, strangers = Rounds(), Strangers({A, C}, Budget(5.0, 0.0), Budget(5.0, 0.0))
    assert strangers.others is not None
    rounds.conduct._strangers = strangers
    rounds.conduct.ended(frozenset({B}), 1.0, rounds.now)
    rounds.conduct.ended(frozenset({A}), 2.0, rounds.now)
    assert (strangers.budget.left_s(rounds.now), strangers.others.left_s(rounds.now)) == (4.0, 3.0)


def test_a_member_that_gave_to_others_has_a_bad_line_to_us() -> None:
    """It may lead: it does nothing wrong."""
    rounds = Rounds()
    for _ in range(2):
        rounds.play(unheard=frozenset({B}))
    assert rounds.shut_out() == (NOBODY, NOBODY, frozenset({B}))
    assert rounds.conduct.precedence(NO_STRANGERS, rounds.now).shunned == NOBODY
    assert "the line between the two" in rounds.warnings[0]


def test_a_line_that_is_not_waited_for_proves_nothing_until_its_pause_is_over() -> None:
    """That its values came to others says nothing of the line to us."""
    rounds = Rounds()
    for _ in range(2):
        rounds.play(unheard=frozenset({B}))
    rounds.play(bad_lines=frozenset({B}))
    assert rounds.shut_out() == (NOBODY, NOBODY, frozenset({B}))
    rounds.now += 4 * WINDOW_S
    rounds.play()
    assert rounds.shut_out() == (NOBODY, NOBODY, NOBODY)


def test_a_member_that_only_averages_is_forgiven() -> None:
    """An auxiliary peer has no values that could count."""
    rounds = Rounds()
    rounds.play(late=frozenset({B}), gave=frozenset({A, C}))
    rounds.now += 11 * ROUND_S  # by ten times what it cost
    rounds.play(gave=frozenset({A, C}))
    rounds.play(late=frozenset({B}), gave=frozenset({A, C}))
    assert rounds.shut_out() == (NOBODY, NOBODY, NOBODY)


def test_a_peer_that_leads_badly_may_be_a_member() -> None:
    """Two rounds are enough; so is one search that it let go by, and one round."""
    rounds = Rounds()
    for _ in range(2):
        rounds.play(led_badly=True, succeeds=False)
    assert rounds.shut_out() == (NOBODY, frozenset({A}), NOBODY)
    rounds = Rounds()
    rounds.conduct.searched([A], (), rounds.now)
    rounds.play(led_badly=True, succeeds=False)
    assert rounds.conduct.precedence(NO_STRANGERS, rounds.now).shunned == {A}


def test_leaders_and_slow_members_are_paid_from_one_budget() -> None:
    """Each key had its own patience: eight of them, in turns, left a tenth of the pace."""
    conduct = Conduct(WINDOW_S, lambda *_: None)
    budget = Budget(4.0, 0.1)
    strangers = Strangers({A, B, C}, Budget(0.0, 0.0), budget)
    assert strangers.spare_s(0.0) == 4.0
    conduct.searched([A], (), 10.0, strangers)
    assert budget.left_s(10.0) == 1.5
    assert conduct.precedence(strangers, 10.0).shunned == {A}
    assert conduct.precedence(strangers, 1000.0).shunned == NOBODY
    strangers.pay(B, 4.0, 1000.0)
    assert strangers.spare_s(1000.0) == 0.25
    assert conduct.precedence(strangers, 1000.0).shunned == {A}  # nothing is left for another try
    assert conduct.precedence(strangers, 1040.0).shunned == NOBODY


def test_for_a_plan_that_is_slow_the_leader_alone_is_to_blame() -> None:
    """The member that got all of the vector was late: it was named, and its leader never."""
    rounds = Rounds()
    for _ in range(2):
        rounds.play(unfair=True, late=frozenset({B}), unheard=frozenset({B}), gave=frozenset({A, C}))
    assert rounds.shut_out() == (NOBODY, frozenset({A}), NOBODY)
    (warning,) = rounds.warnings
    assert warning.startswith(f"{A.short()} led 2 groups badly")
    assert "divided the work so that it takes far longer" in warning


def test_a_leader_whose_lie_is_proved_leads_nothing_for_the_longest_pause() -> None:
    """The first time, and it may be a member of rounds that succeed."""
    rounds = Rounds()
    rounds.conduct.was_lied_to(A, rounds.now)
    rounds.play()
    assert rounds.shut_out() == (NOBODY, frozenset({A}), NOBODY)
    assert "told its members different verdicts" in rounds.warnings[0]
    rounds.now = 64 * WINDOW_S
    assert rounds.shut_out() == (NOBODY, NOBODY, NOBODY)
