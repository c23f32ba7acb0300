"""Whether a newcomer may begin at epoch 0, beside a run that is further."""

from __future__ import annotations

import pytest

from shoal.base.peer import PeerID
from shoal.run.decide.beginning import Beginning, Stance

A, B, C = (PeerID(bytes([number]) * 32) for number in range(3))


def test_who_knows_of_no_other_run_begins_at_once() -> None:
    """The first peer of a run waits for nobody."""
    assert Beginning(600.0).judge({}, others_here=0, now=0.0) is Stance.FREE


def test_a_newcomer_whose_only_donor_died_waits_before_it_begins() -> None:
    """It began at epoch 0 in the moment in which its donor was lost."""
    begins = Beginning(600.0)
    assert begins.judge({A: 50}, others_here=0, now=10.0) is Stance.WAITING
    assert begins.judge({}, others_here=0, now=20.0) is Stance.WAITING
    assert begins.judge({}, others_here=0, now=609.9) is Stance.WAITING
    assert begins.judge({}, others_here=0, now=610.0) is Stance.TIMED_OUT
    assert begins.epoch == 50
    assert begins.peers == (A,)


def test_it_waits_as_long_as_two_peers_name_a_later_state() -> None:
    """One peer alone holds it up for a limited time."""
    begins = Beginning(600.0)
    assert begins.judge({A: 50, B: 51}, others_here=0, now=0.0) is Stance.WAITING
    assert begins.judge({A: 50, B: 51}, others_here=0, now=10_000.0) is Stance.WAITING
    assert begins.judge({B: 51}, others_here=0, now=10_001.0) is Stance.TIMED_OUT


@pytest.mark.parametrize(("here", "stance"), [(0, Stance.WAITING), (1, Stance.WAITING), (2, Stance.FREE)])
def test_one_peer_that_claims_to_be_further_does_not_hold_up_a_swarm_that_begins(here: int, stance: Stance) -> None:
    """More peers stand where we stand than have named another state."""
    assert Beginning(600.0).judge({A: 10**6}, others_here=here, now=0.0) is stance


@pytest.mark.parametrize(("here", "stance"), [(0, Stance.WAITING), (1, Stance.FREE)])
def test_two_peers_go_on_beside_one_that_lives_and_gives_nothing(here: int, stance: Stance) -> None:
    """One that was lost may come back; one that was asked in vain has had its time."""
    begins = Beginning(600.0)
    assert begins.judge({A: 100}, others_here=here, now=0.0) is Stance.WAITING
    assert begins.judge({A: 100}, others_here=here, now=1.0, refusing={A}) is stance
    assert begins.judge({}, others_here=here, now=2.0, refusing={A}) is Stance.WAITING


def test_with_require_state_nobody_begins_alone() -> None:
    """Also where no other run is known; a beginning that others have is one of the swarm's."""
    begins = Beginning(600.0, required=True)
    assert begins.judge({}, others_here=0, now=5.0) is Stance.WAITING
    assert begins.judge({}, others_here=1, now=6.0) is Stance.FREE
    assert begins.judge({}, others_here=0, now=605.0) is Stance.TIMED_OUT


def test_what_was_named_before_a_state_was_taken_over_is_forgotten() -> None:
    """A peer that goes back to a beginning later knows of nobody."""
    begins = Beginning(600.0)
    begins.judge({A: 50, C: 40}, others_here=0, now=0.0)
    begins.state_taken()
    assert begins.judge({}, others_here=0, now=1.0) is Stance.FREE


def test_newcomers_that_are_given_a_state_do_not_begin_beside_its_only_donor() -> None:
    """Three newcomers counted themselves against one donor on a slow line, and began at epoch 0."""
    begins = Beginning(600.0)
    assert begins.judge({A: 50}, others_here=2, now=0.0) is Stance.FREE
    assert begins.judge({A: 50}, others_here=2, now=1.0, giving={A}) is Stance.WAITING
    assert begins.judge({A: 50}, others_here=2, now=599.0, giving={A}) is Stance.WAITING
    assert begins.judge({A: 50}, others_here=2, now=600.0, giving={A}) is Stance.FREE


def test_who_stops_giving_has_made_a_claim_and_no_more() -> None:
    """Unless it is lost: then it may come back."""
    begins = Beginning(600.0)
    assert begins.judge({A: 50}, others_here=2, now=0.0, giving={A}) is Stance.WAITING
    assert begins.judge({A: 50}, others_here=2, now=30.0) is Stance.FREE
    assert begins.judge({}, others_here=2, now=31.0) is Stance.WAITING
    assert begins.judge({}, others_here=2, now=600.0) is Stance.FREE


def test_a_donor_that_nobody_was_told_of_holds_nobody_up() -> None:
    """What is known of the run is what its peers have named."""
    begins = Beginning(600.0)
    begins.note_giving({A})
    assert begins.judge({B: 50}, others_here=2, now=0.0) is Stance.FREE


@pytest.mark.parametrize(
    ("required", "hosts", "here", "left_out"),
    [
        (None, [A], 0, True),
        (True, [A], 0, True),
        (False, [A], 0, False),
        (None, [], 0, False),  # nobody has invited it: the run is its own
        (None, [C], 0, True),
        (None, [C], 1, False),  # as many stand here as name another state, which costs them nothing
        (None, [A], 5, True),
    ],
)
def test_who_was_invited_is_left_out_after_a_while(
    *, required: bool | None, hosts: list[PeerID], here: int, left_out: bool
) -> None:
    """As long as the others live, and it has had no part in their run."""
    begins = Beginning(600.0, required=required, hosts=hosts)
    assert not begins.is_left_out({A}, others_here=here, now=0.0)
    assert not begins.is_left_out({A}, others_here=here, now=599.0)
    assert begins.is_left_out({A}, others_here=here, now=600.0) is left_out
    assert not begins.is_left_out(set(), others_here=here, now=601.0)
    assert not begins.is_left_out({A}, others_here=here, now=602.0)
    assert begins.is_left_out({A}, others_here=here, now=1202.0) is left_out
    begins.joined()
    assert not begins.is_left_out({A}, others_here=here, now=1300.0)


def test_the_wait_for_a_state_counts_from_its_first_word() -> None:
    """Peers that come and go while a newcomer waits make it no longer."""
    begins = Beginning(600.0, required=None, hosts=[A])
    assert begins.judge({A: 50}, others_here=0, now=0.0) is Stance.WAITING
    assert not begins.is_left_out({A}, others_here=0, now=0.0)
    assert not begins.is_left_out(set(), others_here=0, now=500.0)
    assert begins.is_left_out({A}, others_here=0, now=600.0)
    assert begins.judge({A: 50, B: 50}, others_here=0, now=700.0) is Stance.WAITING
    begins.state_taken()
    assert not begins.is_left_out({A}, others_here=0, now=5000.0)
