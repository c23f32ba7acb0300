"""Whose word for a state counts, and how far a run can have come, by what one peer has measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from shoal.base.peer import PeerID
from shoal.run.view.progress import StateKey
from shoal.run.view.witness import Witness

ME, A, B, C, D = (PeerID(bytes([number]) * 32) for number in range(1, 6))
ALL = {ME: 10, A: 10, B: 10, C: 10}


def key(epoch: int, samples: int | None = None) -> StateKey:
    """Of a state of this epoch: ten samples a step."""
    return StateKey.of(epoch, 10 * epoch if samples is None else samples, b"")


class Timed(Witness):
    """A witness whose time is set."""

    def __init__(self, *, given: Collection[PeerID] = (), begins_s: float = 600.0) -> None:
        self.now = 0.0
        super().__init__(ME, given=given, begins_s=begins_s, time=lambda: self.now)

    def at(self, now: float) -> Timed:
        """It is so late now."""
        self.now = now
        return self


def stepped(until: int, weights: Mapping[PeerID, int], witness: Timed | None = None, first: int = 1) -> Timed:
    """One that has taken a step each second until this one, with these."""
    found = witness or Timed(given=[D])
    for epoch in range(first, until + 1):
        found.at(float(epoch)).gave(list(weights))
        found.stepped(epoch, 10 * epoch, gave=list(weights), weights=weights)
    return found


def taken(witness: Timed, own: StateKey, named: Mapping[PeerID, StateKey], now: float) -> set[PeerID]:
    """Those of these whose states may be taken."""
    heeded = witness.at(now).heeded(own, named, named)
    assert not heeded.vouched & heeded.others
    return {*heeded.vouched, *heeded.others}


def test_what_strangers_claim_beside_contributors_is_where_the_run_can_be() -> None:
    """However many they are, and however young this peer is."""
    witness = stepped(20, ALL)
    for epoch, samples, likely in ((21, None, True), (1021, 1 << 60, False), (21, 1 << 60, False), (1021, 201, False)):
        strangers = {PeerID(bytes([number]) * 32): key(epoch, samples) for number in range(5, 60)}
        assert taken(witness, key(20), {A: key(20), **strangers}, 20.5) == {A, *(strangers if likely else ())}


def test_a_newcomer_that_alone_knows_a_step_is_followed() -> None:
    """It weighs nothing yet. The others went on apart from it until the end."""
    light = {ME: 40, A: 40, B: 8}
    witness = stepped(20, light)
    assert taken(witness, key(20), {A: key(20), B: key(21), D: key(21)}, 20.5) == {A, B, D}
    assert taken(witness, key(20), {A: key(20), B: key(1 << 20), D: key(1 << 20)}, 20.5) == {A}


@pytest.mark.parametrize("restarted", [False, True])
def test_peers_that_are_started_again_take_the_newest_checkpoint(*, restarted: bool) -> None:
    """Two that came seven seconds earlier knew each other by then, and refused it: its key was new."""
    witness = Timed()
    witness.at(1.0).heeded(key(10 * restarted), {}, {})
    stepped(14, {ME: 10, A: 10}, witness, first=11)
    named = {A: key(14), D: key(20)}
    assert taken(witness, key(14), named | {D: key(2000)}, 15.0) == ({A, D} if restarted else {A})
    assert taken(witness, key(14), named | {D: key(1 << 20)}, 130.0) == {A}


def test_a_claim_grows_with_the_time_that_it_was_out_of_sight() -> None:
    """A quarter may be so far as the run can have come; more than half may be anywhere."""
    witness = stepped(20, ALL)
    for now, epoch in ((21.0, 40), (30.0, 180), (120.0, 1600)):
        for weights, taking in (([A], {A}), ([A, B, C], {A, B, C})):
            named = {A: key(20), B: key(20), C: key(20)} | {peer: key(epoch) for peer in weights}
            assert taken(witness, key(20), named, now) >= taking
    named = {A: key(3000), B: key(20), C: key(20)}
    assert A not in taken(witness, key(20), named, 30.0)
    assert A not in taken(witness, key(20), named | {A: key(21, 1 << 60)}, 30.0)
    assert A in taken(witness, key(20), named | {B: key(3000), C: key(3000)}, 30.0)


def test_two_parts_know_each_other_by_the_steps_before() -> None:
    """Thirty steps with A alone: B and C have contributed to none of the last ten, and did before."""
    witness = stepped(50, {ME: 10, A: 10}, stepped(20, ALL), first=21)
    assert taken(witness, key(50), {A: key(50), B: key(60), C: key(60), D: key(70)}, 51.0) == {A, B, C}


def test_steps_that_a_peer_takes_alone_say_nothing_against_the_others() -> None:
    """Its weight grows with each of them."""
    witness = stepped(40, {ME: 100}, stepped(20, ALL), first=21)
    assert taken(witness, key(40), {A: key(42)}, 41.0) == {A}


def test_a_stranger_stands_there_the_longer_the_more_there_is_to_lose() -> None:
    """Where nobody else is there. One that has just begun, or measured nothing, heeds all."""
    alone = stepped(1000, {ME: 10})
    assert not taken(alone, key(1000), {A: key(1001)}, 1000.0)
    assert not taken(alone, key(1000), {A: key(1001)}, 1240.0)
    assert taken(alone, key(1000), {A: key(1001)}, 1260.0) == {A}
    assert not taken(alone, key(1000), {A: key(10**6)}, 1260.0), "the run cannot have come so far"
    slept = stepped(1000, ALL)
    assert taken(slept, key(1000), {D: key(1300)}, 1030.0) == {D}, "it has nothing to lose"
    assert taken(stepped(20, {ME: 10}), key(20), {A: key(10**6)}, 20.0) == {A}
    assert taken(Timed(begins_s=0.0), key(7), {A: key(9)}, 50.0) == {A}


def test_a_newcomer_takes_the_state_of_who_invited_it_first() -> None:
    """It knows nobody else: their words are as good as any other's."""
    heeded = Timed(given=[D]).at(1.0).heeded(key(0), {A: key(90), D: key(7)}, [A, D])
    assert heeded.vouched == {D}
    assert heeded.others == {A, D}


@pytest.mark.parametrize("there", [True, False])
def test_who_was_there_before_the_first_step_counts_while_the_run_begins(there: bool) -> None:
    """A line may have failed before the first step: nobody else can know who that peer is."""
    witness = Timed()
    witness.at(0.5).heeded(key(0), {A: key(0)} | ({C: key(0)} if there else {}), [])
    stepped(20, {ME: 10, A: 10}, witness)
    assert taken(witness, key(20), {A: key(20), C: key(60)}, 21.0) == ({A, C} if there else {A})
    stepped(700, {ME: 10, A: 10}, witness, first=21)
    assert taken(witness, key(700), {A: key(700), C: key(1 << 20)}, 701.0) == {A}


def test_clients_heed_strangers_where_no_contributor_can_give_a_state() -> None:
    """An auxiliary peer contributes nothing, and is the only one that they can dial. One that was given comes first."""
    witness = stepped(20, ALL)
    named = {A: key(21), C: key(21), PeerID(b"x" * 32): key(2200)}
    stranger = max(named)
    assert witness.at(21.0).heeded(key(20), named, [A, stranger]).others == frozenset()
    assert witness.at(21.0).heeded(key(20), named, [stranger]).others == {stranger}
    assert witness.at(21.0).heeded(key(20), named | {D: key(21)}, [D, stranger]).others == {D}


def test_the_time_since_a_peer_gave() -> None:
    """In steps. Of one that came later since then; of one that was there before, nobody knows."""
    witness = Timed()
    witness.at(0.5).heeded(key(0), {D: key(0)}, [])
    stepped(20, {ME: 10, A: 10}, witness)
    witness.at(20.0).heeded(key(20), {C: key(20)}, [])
    assert witness.at(23.0).steps_since(A) == 3.0
    assert witness.at(24.0).steps_since(C) == 4.0
    assert witness.at(24.0).steps_since(D) is None
    witness.at(30.0).took_over(30, 300, gave=[A, B], weights={A: 10, B: 10})
    assert witness.at(31.0).steps_since(A) == witness.at(31.0).steps_since(B) == 31.0 - 20.0, "it may be so long"
    witness.took_over(31, 310, gave=[ME], weights={A: 10, B: 10})
    assert witness.at(32.0).steps_since(ME) == 1.0, "what it had trained before is over"


def test_the_time_since_a_peer_gave_does_not_begin_when_the_step_is_taken_here() -> None:
    """A trainer in a long batch takes it late. It would refuse what a peer has trained since the round."""
    witness = stepped(20, {ME: 10, A: 10})
    witness.at(21.0).gave([ME, A])
    witness.at(26.0).stepped(21, 210, gave=[ME, A], weights={ME: 10, A: 10})
    assert witness.steps_since(A) == (26.0 - 21.0) / witness._speed.step_s
