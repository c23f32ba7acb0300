"""Whose word counts how much, and how many samples are believed of a peer."""

from __future__ import annotations

import math

import pytest

from shoal.base.peer import Address, PeerID
from shoal.protocol.wire import Contact
from shoal.run.decide.agreement import Contributor
from shoal.run.decide.committed import Committed
from shoal.run.view.words import Record, believes, heaviest, may_give, recorded, shared_out, sites_of, weigh


def peer(number: int) -> PeerID:
    """Some peer; a lower number is a lower id."""
    return PeerID(bytes([number]) * 32)


A, B, C, D = map(peer, range(1, 5))


def steps(*made: dict[PeerID, int], sites: dict[PeerID, bytes] | None = None) -> list[list[Contributor]]:
    """Steps with so many samples of each. Each is at a site of its own, unless it is said."""
    at = sites or {}
    return [[Contributor(who, samples, site=at.get(who, who[:4])) for who, samples in step.items()] for step in made]


def after(*made: dict[PeerID, int], sites: dict[PeerID, bytes] | None = None) -> Committed:
    """What is known after these steps."""
    committed = Committed()
    for epoch, step in enumerate(steps(*made, sites=sites)):
        committed = committed.after(step, epoch)
    return committed


def parts(committed: Committed) -> dict[PeerID, float]:
    """The part of all weight that each has."""
    total = sum(committed.weights.values())
    return {who: weight / total for who, weight in committed.weights.items()}


def test_a_key_weighs_nothing_before_it_has_contributed_to_a_third_of_the_last_steps() -> None:
    """And then its samples in them."""
    known = {A: 10, B: 10}
    for rounds, weight in ((1, None), (2, None), (3, 30)):
        found = Record(steps(*[known] * (10 - rounds), *[known | {C: 10}] * rounds)).weights
        assert found == {A: 100, B: 100} | ({} if weight is None else {C: weight})
        assert weigh([A, C], committed={A: 10, C: 0}, sites={}) == {A: 10, C: 0}
    assert Record(steps(known, known | {C: 15})).weights == {A: 20, B: 20, C: 15}, "a young run"
    assert Record(steps({A: 10, B: 5})).weights == {A: 5, B: 5}
    assert Record([]).weights == {}


def test_who_gets_into_few_steps_keeps_its_word() -> None:
    """Its record was ten steps long: a peer that was shut out of eight of them had no word beside who did that."""
    known = {A: 10, B: 10, C: 10}
    rare = [{A: 10, D: 10}, {B: 10, D: 10}, {C: 10, D: 10}]
    assert after(*[known] * 3, *[{D: 10}] * 7, *rare).weights.keys() == {A, B, C, D}
    assert after(*[known] * 3, *[{D: 10}] * 8, rare[0]).weights.keys() == {A, D}, "the others are gone"
    assert after(*[known] * 3, *[{D: 10}] * 3, rare[0], *[{D: 10}] * 5).weights.keys() == {D}, "so is A"
    away = after(*[known] * 100, *[{A: 10, B: 10}] * 10, *[known] * 2)
    assert away.weights == {A: 100, B: 100}, "C was away for all steps that are kept"


@pytest.mark.parametrize("every", [4, 5])
def test_a_slow_peer_weighed_nothing_beside_a_key_that_came_late(every: int) -> None:
    """It came to two or three of ten steps, with as much as the others. The other key had given to three."""
    run = [{A: 16, **({B: 16 * every} if number % every == 0 else {})} for number in range(40)]
    for last in range(every):
        run.append({A: 16, **({B: 16 * every} if last == 0 else {})})
        late = [step | {C: 16} for step in run[-3:]]
        weights = after(*run[:-3], *late).weights
        assert weights[C] <= 48 < weights[B]


@pytest.mark.parametrize("claim", [20, 10**6])
def test_one_key_without_work_takes_the_weight_of_a_run(claim: int) -> None:
    """A key that claims a million samples, and is alone in most steps, had all of the weight. Now it has not half."""
    honest = {A: 4, B: 4, C: 4}
    run = [honest] * 10
    for _ in range(30):
        run += [{D: claim}] * 3 + [{D: claim, A: 4}, {D: claim, B: 4}, {D: claim, C: 4}]
    committed = after(*run)
    assert 0.4 < parts(committed)[D] < 0.5
    said = {A: 5, B: 5, C: 5, D: 7}
    assert heaviest(said, committed.weights)[0] == 5
    assert weigh([A, D], committed=committed.weights, sites={A: b"a", D: b"d"})[D] <= committed.weights[A], "both there"


def test_the_keys_of_one_site_take_the_weight_of_a_run_together() -> None:
    """Each was the other's witness. But the keys of a laboratory count as any others, if they claim no more."""
    honest, liars = {peer(number): 4 for number in range(1, 5)}, {peer(10): 10**6, peer(11): 10**6}
    committed = after(*[honest] * 10, *[honest | liars] * 100, sites=dict.fromkeys(liars, b"one"))
    assert sum(parts(committed)[liar] for liar in liars) < 0.5
    laboratory = {peer(number): 4 for number in range(20, 52)}
    sites = dict.fromkeys(laboratory, b"laboratory")
    for beside in ({A: 4}, {A: 4, B: 4}):
        found = parts(after(*[laboratory | beside] * 10, sites=sites))
        assert sum(found[each] for each in laboratory) == pytest.approx(32 / (32 + len(beside)))
    found = parts(after(*[laboratory | {A: 1, B: 1}] * 10, sites=sites))
    assert sum(found[each] for each in laboratory) == pytest.approx(32 / 34), "each as much as one elsewhere"


def test_where_nobody_has_come_often_those_count_that_came_most() -> None:
    """Ten peers that made a step each: all weigh what they gave."""
    each = steps(*[{peer(number): number} for number in range(1, 11)])
    assert Record(each).weights == {peer(number): number for number in range(1, 11)}


def test_a_site_has_one_voice_which_its_keys_share() -> None:
    """Where nothing is known of any that say something. Those without an address are one site."""
    contacts = [Contact(who, (Address(host, 1, who),)) for who, host in ((A, "2001:db8::1"), (B, "2001:db8::2"))]
    sites = sites_of([*contacts, Contact(C, (Address("192.0.2.2", 1, C),)), Contact(D)])
    assert sites[A] == sites[B] != sites[C]
    assert sites[D] == b""
    found = weigh([A, B, C, D], committed={}, sites=sites)
    assert found[A] == found[B] < found[C] == found[D]
    assert found[C] < found[A] + found[B] < found[C] + found[D]
    assert len(set(weigh([A, B, C, D], committed={}, sites={}).values())) == 1
    assert weigh([], committed={}, sites={}) == {}


@pytest.mark.parametrize("order", [(A, B, C), (C, B, A)])
def test_of_equal_weights_the_word_of_the_lowest_peer_is_first(order: tuple[PeerID, ...]) -> None:
    """The same for all, in whatever order they hear it."""
    said = {A: "x", B: "y", C: "z"}
    words = {who: said[who] for who in order}
    assert heaviest(words, {A: 1, B: 2, C: 1}) == ["y", "x", "z"]
    assert heaviest(words, {}) == ["x", "y", "z"]


def test_samples_count_as_far_as_a_peer_has_been_able_to_give_them() -> None:
    """Claims up to twice what it gave to one of the steps; given up to what the fastest other gives in the time."""
    record = Record(
        steps({A: 96, B: 40}, {A: 80, B: 60}, {A: 90, B: 50, C: 500}, {A: 1, B: 1}, {A: 1, B: 1}, {A: 1, B: 1})
    )
    rate = record.rate(B)
    assert rate == 2 * (96 + 80 + 90 + 3) / 6, "C has contributed to one of six"
    assert may_give(rate, 1) == 2 * rate
    assert may_give(rate, 20) == 21 * rate
    assert may_give(rate, 10**9) == 65 * rate
    assert record.rate(D) == rate, "a newcomer"
    assert record.rate(C) == 1.25 / 2 * 500
    assert record.believed == {A: 120, B: 120, C: 625}
    assert Record(steps({A: 7})).rate(A) is None
    assert Record([]).rate(A) is None
    assert may_give(None, 0) == float("inf")


def test_the_record_of_a_claimant_raised_its_own_bound() -> None:
    """It was the fastest key of weight, so it might give four times its mean in each step. Now a quarter more."""
    honest, site = {A: 4, B: 4, C: 4}, {D: b"one", peer(5): b"one"}
    for liars in ([D], [D, peer(5)]):  # at one site they are no witnesses of each other
        claims = dict.fromkeys(liars, 10**9)
        committed, before = after(*[honest] * 10, sites=site), 0
        for epoch in range(10, 60):
            committed = committed.after(steps(honest | claims, sites=site)[0], epoch)
            gave = committed.samples_of(D, epoch, epoch + 1)
            assert gave <= max(16, 1.25 * before)
            before = gave
        assert before <= 1.25 * 64 * 12


@pytest.mark.parametrize("ratio", [4, 20, 60])
def test_a_much_faster_newcomer_is_let_in_within_a_bounded_number_of_steps(ratio: int) -> None:
    """By a quarter more with each step."""
    committed, cut = after(*[{A: 10, B: 10, C: 10}] * 10), 0.0
    for epoch in range(10, 40):
        committed = committed.after(steps({A: 10, B: 10, C: 10, D: 10 * ratio})[0], epoch)
        cut += 1 - committed.samples_of(D, epoch, epoch + 1) / (10 * ratio)
    assert committed.samples_of(D, 39, 40) == 10 * ratio
    assert cut <= {4: 0.0, 20: 4.5, 60: 9.0}[ratio]


def test_two_keys_of_small_work_had_many_times_the_samples_of_all_others_recorded() -> None:
    """Each counted the claims of the other one as those of others. Those far ahead have one bound, however many."""
    honest = {A: 96, B: 96}
    for liars in ({C: 10**6}, {C: 10**6, D: 10**6}, {C: 10**6, D: 10**9}):
        assert recorded(honest | liars, {}) == honest | dict.fromkeys(liars, 64 * 192)
    assert recorded(honest | {C: 3072}, {}) == honest | {C: 3072}, "as much faster"
    assert recorded({A: 7}, {}) == {A: 7}
    assert recorded(honest, {A: 50.5, B: math.inf}) == {A: 50, B: 96}


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
    committed = after(honest, honest, honest, honest | {C: 10**12, D: 10**12})
    assert {each.peer: each.samples for each in committed.steps[-1]} == honest | {C: 384, D: 384}
    first = after(honest | {C: 10**12})
    assert first.samples == honest | {C: 64 * 192}
    assert first.weights == honest | {C: 191}


@pytest.mark.parametrize("ratio", [1, 3, 10, 60])
def test_a_fast_machine_was_clamped_beside_a_slow_one(ratio: int) -> None:
    """All that both give may be given again, and is believed: it was four times, and twice, what the slow one gave."""
    for count in range(1, 12):
        committed = after(*[{A: 6, B: 6 * ratio}] * count)
        assert may_give(committed.record.rate(B), 1) >= 6 * ratio
        assert committed.believed[B] >= 6 * ratio
        assert committed.weights[A] == committed.weights[B]


def test_one_stranger_with_other_settings_ended_a_founders_program() -> None:
    """Who is asked to join gives way to those that are there; a founder, and one with a state of the run, does not."""
    nothing: dict[PeerID, int] = {}
    assert not believes([A], committed=nothing, given=(), begun=False), "it founds the run"
    assert not believes([A], committed={B: 7}, given=(), begun=True)
    assert not believes([A], committed={B: 7}, given={C}, begun=True)
    assert believes([A], committed=nothing, given={C}, begun=False), "it was invited, and nobody else is there"
    assert believes([A, B], committed={B: 7}, given=(), begun=True), "a contributor to its own state"
    assert believes([A], committed=nothing, given={A}, begun=True), "its user has named it"
    assert not believes([A], committed={A: 9, B: 10, C: 10}, given=(), begun=True), "one of three contributors"
    assert believes([A, B], committed={A: 9, B: 10, C: 10}, given=(), begun=True)
    assert not believes([], committed={B: 7}, given={A}, begun=True)
