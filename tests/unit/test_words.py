"""Whose word counts how much, and how many samples are believed of a peer."""

from __future__ import annotations

import pytest

from shoal.optim.agreement import Contributor
from shoal.optim.committed import Committed
from shoal.optim.words import (
    MOST_STEPS,
    believed,
    committed_weights,
    heaviest,
    heeds,
    hosts_of,
    may_give,
    recorded,
    shared_out,
    typical,
    weigh,
)
from shoal.peer import Address, PeerID
from shoal.wire import Contact


def peer(number: int) -> PeerID:
    """Some peer; a lower number is a lower id."""
    return PeerID(bytes([number]) * 32)


A, B, C, D = map(peer, range(1, 5))


def steps(*made: dict[PeerID, int]) -> list[list[Contributor]]:
    """Steps with so many samples of each."""
    return [[Contributor(who, samples) for who, samples in step.items()] for step in made]


def test_a_key_weighs_nothing_before_it_has_contributed_to_a_third_of_the_last_steps() -> None:
    """And then its samples in them: of a step no more than all others gave to it."""
    known = {A: 10, B: 10}
    for rounds, weight in ((1, None), (2, None), (3, 60)):
        last = steps(*[known] * (10 - rounds), *[known | {C: 100}] * rounds)
        found = committed_weights(last)
        assert found == {A: 100, B: 100} | ({} if weight is None else {C: weight})
        assert weigh([A, C], committed=found, hosts={}) == {A: 100, C: weight or 0}
    assert committed_weights(steps(known, known | {C: 15})) == {A: 20, B: 20, C: 15}, "a young run"
    assert committed_weights(steps({A: 10, B: 5})) == {A: 5, B: 5}
    assert committed_weights([]) == {}


def test_where_nobody_has_come_often_those_count_that_came_most() -> None:
    """Ten peers that made a step each: all weigh what they gave."""
    each = steps(*[{peer(number): number} for number in range(1, 11)])
    assert committed_weights(each) == {peer(number): number for number in range(1, 11)}


def test_a_host_has_one_voice_which_its_keys_share() -> None:
    """Where nothing is known of any that say something. Those without an address are one host."""
    contacts = [Contact(who, (Address("192.0.2.1", 1, who),)) for who in (A, B)]
    hosts = hosts_of([*contacts, Contact(C, (Address("192.0.2.2", 1, C),)), Contact(D)])
    assert hosts == {A: "192.0.2.1", B: "192.0.2.1", C: "192.0.2.2"}
    found = weigh([A, B, C, D], committed={}, hosts=hosts)
    assert found[A] == found[B] < found[C] == found[D]
    assert found[C] < found[A] + found[B] < found[C] + found[D]
    assert len(set(weigh([A, B, C, D], committed={}, hosts={}).values())) == 1
    assert weigh([], committed={}, hosts={}) == {}


@pytest.mark.parametrize("order", [(A, B, C), (C, B, A)])
def test_of_equal_weights_the_word_of_the_lowest_peer_is_first(order: tuple[PeerID, ...]) -> None:
    """The same for all, in whatever order they hear it."""
    said = {A: "x", B: "y", C: "z"}
    words = {who: said[who] for who in order}
    assert heaviest(words, {A: 1, B: 2, C: 1}) == ["y", "x", "z"]
    assert heaviest(words, {}) == ["x", "y", "z"]


def test_samples_count_as_far_as_a_peer_has_been_able_to_give_them() -> None:
    """Claims up to twice what it gave to one of the steps; given up to what the fastest key gives in the time."""
    last = steps({A: 96, B: 40}, {A: 80, B: 60}, {A: 90, B: 50, C: 500}, {A: 1, B: 1}, {A: 1, B: 1}, {A: 1, B: 1})
    assert believed(last) == {A: 192, B: 120, C: 1000}
    found = typical(last)
    assert found == (96 + 80 + 90 + 3) / 6, "C has contributed to one of six"
    assert may_give(found, 1) == 4 * found
    assert may_give(found, 20) == 42 * found
    assert may_give(found, 10**9) == 2 * (1 + MOST_STEPS) * found
    assert typical([]) is None
    assert may_give(None, 0) == float("inf")


def test_two_keys_of_small_work_had_16_times_the_samples_of_all_others_recorded() -> None:
    """Each counted the claims of the other one as those of others. Those far ahead have one bound, however many."""
    honest = {A: 96, B: 96}
    for liars in ({C: 10**6}, {C: 10**6, D: 10**6}, {C: 10**6, D: 10**9}):
        assert recorded(honest | liars, None) == honest | dict.fromkeys(liars, 16 * 192)
    assert recorded(honest | {C: 3072}, None) == honest | {C: 3072}, "as much faster"
    assert recorded({A: 7}, None) == {A: 7}
    assert recorded(honest, 50) == {A: 50, B: 50}


def test_claims_are_cut_to_what_all_have_given() -> None:
    """Two keys gave one sample each, said a million, and were recorded with all that the others gave."""
    assert shared_out({A: 100, B: 90, C: 10**6, D: 10**6}, 192) == {A: 48, B: 48, C: 48, D: 48}
    assert shared_out({A: 100, B: 5, C: 10**6}, 106) == {A: 50, B: 5, C: 50}
    assert shared_out({A: 100, B: 5}, 105) == {A: 100, B: 5}
    assert shared_out({A: 100, B: 5}, 300) == {A: 100, B: 5}, "trained since they said so"
    assert shared_out({}, 0) == {}


def test_ground_ids_decide_no_ties() -> None:
    """The lowest id won, and ids can be made as low as one likes. Chance gives the peers another order each time."""
    words = {A: "x", B: "y", C: "z"}
    first = {heaviest(words, {}, bytes([number]))[0] for number in range(20)}
    assert first == {"x", "y", "z"}
    assert all(heaviest(words, {A: 1, B: 2, C: 1}, bytes([number]))[0] == "y" for number in range(20))


def test_a_record_holds_no_more_than_a_peer_may_give() -> None:
    """Two keys that claim 10^12 each had nearly all of the weight from their first step on."""
    honest = {A: 96, B: 96}
    committed = Committed()
    for epoch in range(3):
        committed = committed.after(steps(honest)[0], epoch)
    committed = committed.after(steps(honest | {C: 10**12, D: 10**12})[0], 3)
    assert committed.steps[-1] == steps(honest | {C: 384, D: 384})[0]
    first = Committed().after(steps(honest | {C: 10**12})[0], 0)
    assert first.samples == honest | {C: 16 * 192}
    assert first.weights == honest | {C: 192}


@pytest.mark.parametrize("ratio", [1, 3, 10, 60])
def test_a_fast_machine_was_clamped_beside_a_slow_one(ratio: int) -> None:
    """All that both give may be given again, and is believed: it was four times, and twice, what the slow one gave."""
    committed = Committed()
    for epoch in range(12):
        committed = committed.after(steps({A: 6, B: 6 * ratio})[0], epoch)
        assert committed.typical is not None
        assert may_give(committed.typical, 1) >= 6 * ratio
        assert committed.believed[B] >= 6 * min(ratio, 30)
    assert committed.weights == {A: 60, B: 60}


def test_one_stranger_with_other_settings_ended_a_founders_program() -> None:
    """Who is asked to join gives way to those that are there; a founder, and one with a state of the run, does not."""
    nothing: dict[PeerID, int] = {}
    assert not heeds([A], committed=nothing, given=(), begun=False), "it founds the run"
    assert not heeds([A], committed={B: 7}, given=(), begun=True)
    assert not heeds([A], committed={B: 7}, given={C}, begun=True)
    assert heeds([A], committed=nothing, given={C}, begun=False), "it was invited, and nobody else is there"
    assert heeds([A, B], committed={B: 7}, given=(), begun=True), "a contributor to its own state"
    assert heeds([A], committed=nothing, given={A}, begun=True), "its user has named it"
    assert not heeds([], committed={B: 7}, given={A}, begun=True)
