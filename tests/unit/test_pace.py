"""When there is enough for a merge, as one peer counts it."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest

from shoal.base.peer import Address, PeerID
from shoal.protocol.wire import Contact, Progress, Standing
from shoal.run.view.progress import SwarmProgress, SwarmView
from shoal.strategies import Merging, SamplesPace
from shoal.strategies.merge_pace import NEAR_WAY, WAY, MergePace, merge_pace

PEERS = [PeerID(bytes([number]) * 32) for number in range(12)]


def said(peer: PeerID, samples: int, time: float) -> Progress:
    """So far a peer is on its way, and still trains."""
    contact = Contact(peer, (Address("10.0.0.1", 4000, peer),))
    return Progress(contact, 5, b"d" * 32, 1000, samples, 1.0, time, {})


def recounted(merging: Merging, view: SwarmView) -> tuple[bool, int]:
    """What a pace that has seen nothing before makes of a view."""
    pace = merge_pace(merging)
    return pace.enough(view), pace.target(view)


@pytest.mark.parametrize("quorum", [None, 4])
def test_a_peer_counts_the_others_again_only_when_it_heard_something(quorum: int | None) -> None:
    """A swarm of a thousand is looked at thousands of times between two words."""
    rng, merging = random.Random(7), Merging(every=10, overlap=None if quorum else 0, quorum=quorum)
    known, pace = SwarmProgress(PEERS[0], {}, ttl_s=20.0), merge_pace(merging)
    known.contributed(PEERS[:5])
    answers = set()
    for at in range(200):
        known.heard(said(rng.choice(PEERS[1:]), rng.randrange(2 * WAY), float(at)), float(at) / 100)
        view = known.view(said(PEERS[0], rng.randrange(2 * WAY), 0.0), float(at) / 100)
        assert (pace.enough(view), pace.target(view)) == recounted(merging, view)
        answers.add(pace.enough(dataclasses.replace(view, others={})))  # nothing is read of them again
    assert answers == {True, False}


@pytest.mark.parametrize(
    ("own", "known", "strangers", "enough"),
    [
        (WAY, [], [WAY, WAY], True),  # of three that gave to the last merges two are gone
        (0, [], [WAY, WAY], False),
        (0, [], [WAY, WAY, WAY], False),  # a merge without anybody who gave to one
        (0, [0, 0], [WAY] * 5, False),
        (WAY, [0, 0], [WAY] * 5, False),
        (WAY, [WAY, 0], [WAY], True),
        (0, [WAY, WAY], [WAY] * 5, True),
        (WAY, [], [0, 0, 0, WAY, WAY], True),
    ],
)
def test_strangers_make_no_quorum_and_complete_one(
    own: int, known: list[int], strangers: list[int], *, enough: bool
) -> None:
    """As many keys as it takes were a quorum; and two newcomers were none for the one that was left of three."""
    swarm, pace = SwarmProgress(PEERS[0], {}, ttl_s=20.0), merge_pace(Merging(every=10, overlap=None, quorum=3))
    swarm.contributors = PEERS[:3]
    for peer, samples in [*zip(PEERS[1:3], known, strict=False), *zip(PEERS[3:], strangers, strict=False)]:
        swarm.heard(said(peer, samples, 1.0), 0.0)
    assert pace.enough(swarm.view(said(PEERS[0], own, 0.0), 0.0)) is enough


@pytest.mark.parametrize(("present", "enough"), [([], True), ([WAY], True), ([0], False), ([0, WAY], False)])
def test_peers_that_no_round_waits_for_count_where_a_quorum_lacks_them(present: list[int], *, enough: bool) -> None:
    """Each of two peers counted the other one no more, a minute at a time, and in turns: they never merged again."""
    swarm, pace = SwarmProgress(PEERS[0], {}, ttl_s=20.0), merge_pace(Merging(every=10, overlap=None, quorum=3))
    absent = PEERS[1:3]
    for peer, samples in [*((peer, WAY) for peer in absent), *zip(PEERS[3:], present, strict=False)]:
        swarm.heard(said(peer, samples, 1.0), 0.0)
    assert pace.enough(swarm.view(said(PEERS[0], WAY, 0.0), 0.0, absent=absent)) is enough
    assert not pace.enough(swarm.view(said(PEERS[0], 0, 0.0), 0.0, absent=absent))


@pytest.mark.parametrize("quorum", [None, 2])
def test_batches_matter_once_a_merge_is_near(quorum: int | None) -> None:
    """By this peer's own way, or without a quorum by that of all in the mean: each batch of each fragment was asked."""
    rng = random.Random(5)
    for _ in range(300):
        steps, fragment = rng.randint(1, 150), rng.randrange(4)
        merging = Merging(every=steps, overlap=None if quorum else 0, quorum=quorum, fragments=4)
        known, pace = SwarmProgress(PEERS[0], {}, ttl_s=20.0), merge_pace(merging, fragment)
        pace.state_changed(rng.randrange(2), 0.0)
        assert pace.near_at == 0  # the others are not known yet
        others = [rng.randrange(3 * WAY) for _ in range(rng.randrange(4))]
        for peer, samples in zip(PEERS[1:], others, strict=False):
            known.heard(said(peer, samples, 1.0), 0.0)

        def is_near(batches: int, pace: MergePace = pace, others: list[int] = others) -> bool:
            own = pace.done(0, batches, 0.0, pace.epoch)
            mean = 0.0 if quorum else (own + sum(others)) / (1 + len(others))
            return max(own, mean) >= NEAR_WAY

        pace.enough(known.view(said(PEERS[0], 0, 0.0), 0.0))
        assert [batches >= pace.near_at for batches in range(steps)] == [*map(is_near, range(steps))]


def test_peers_at_other_states_are_not_missing_for_a_quorum() -> None:
    """In a swarm of 256 a peer that was late said that only 20 of the peers that train can be seen."""
    known = SwarmProgress(PEERS[0], {}, ttl_s=20.0)
    pace = merge_pace(Merging(every=10, overlap=0, quorum=5))
    for number, peer in enumerate(PEERS[1:5]):
        known.heard(said(peer, WAY, 1.0), 0.0)
        view = known.view(said(PEERS[0], WAY, 0.0), 0.0)
        assert pace.missing(WAY, view) == 3 - number
        assert pace.missing(WAY - 1, view) == 0
    known.heard(msgspec.structs.replace(said(PEERS[1], WAY, 2.0), digest=b"e" * 32), 0.0)
    view = known.view(said(PEERS[0], WAY, 0.0), 0.0)
    assert PEERS[1] not in view.together
    assert pace.missing(WAY, view) == 0


def test_the_time_until_the_first_merge_begins_with_the_first_batch_that_somebody_trains() -> None:
    """It began when the optimizer was made: where loading took longer, all fragments were merged at that batch."""
    known, pace = SwarmProgress(PEERS[0], {}, ttl_s=20.0), merge_pace(Merging(every="2s", overlap=None, quorum=2))
    other = merge_pace(Merging(every="2s", overlap=None, quorum=2))
    for each in (pace, other):
        each.state_changed(0, 0.0)
    assert (pace.done(0, 0, 9.0, 0), pace.due_s(9.0)) == (0, 2.0)
    assert [pace.done(4, 1, at, 0) for at in (9.5, 10.9, 11.1)] == [1, 1, WAY]
    assert [pace.done(4, batches, 11.1, 1) for batches in (0, 1)] == [0, 1]  # the trainer has just merged
    assert other.due_s(9.0) is None
    assert other.done(0, 0, 9.0, 0) == 0
    known.heard(said(PEERS[1], 1, 1.0), 0.0)
    other.enough(known.view(said(PEERS[0], 0, 0.0), 0.0))
    assert (other.done(0, 0, 10.0, 0), other.due_s(10.0)) == (0, 1.0)


def test_all_peers_at_a_state_see_the_same_merge_as_due() -> None:
    """Strangers counted themselves beside the contributors, and came later than these: a merge waited for them in vain.

    Those that have nothing count neither for themselves nor for others.
    """
    rng, due = random.Random(3), set()
    for _ in range(200):
        here, way = rng.sample(PEERS[:-1], rng.randint(2, 11)), rng.randrange(WAY, 3 * WAY)
        contributors = here[: rng.randint(1, len(here))] if rng.random() < 0.7 else PEERS[-1:]  # perhaps all are gone
        done = {peer: rng.randint(1, way) for peer in here}
        answers = set()
        for me in here:
            swarm, pace = SwarmProgress(me, {}, ttl_s=20.0), merge_pace(Merging(every=10, overlap=0))
            swarm.contributors = contributors
            for peer in here:
                if peer != me:
                    swarm.heard(said(peer, done[peer], 1.0), 0.0)
            answers.add(pace.enough(swarm.view(said(me, done[me], 0.0), 0.0)))
        assert len(answers) == 1
        due |= answers
    assert due == {True, False}


def calls(known: SwarmProgress, peer: PeerID, done: int) -> None:
    """It says that a merge is due."""
    known.relayed(said(peer, done, 2.0), [Standing(PEERS[0], done, 1.0)], 0.0)


@pytest.mark.parametrize(("calling", "due"), [([3], False), ([1, 3], True), ([1, 2], True)])
def test_a_peer_that_named_less_to_one_of_the_others_shut_that_one_out(calling: list[int], *, due: bool) -> None:
    """The others had begun the merge, and it was not due by what that peer knew. One that calls alone is no reason."""
    known, pace = SwarmProgress(PEERS[0], {}, ttl_s=20.0), merge_pace(Merging(every=4, overlap=0))
    known.contributed(PEERS[:4])
    pace.state_changed(1, 0.0)
    for peer, done in zip(PEERS[1:4], (WAY, WAY, 0), strict=True):
        known.heard(said(peer, done, 1.0), 0.0)
    mine = said(PEERS[0], 3 * WAY // 4, 0.0)
    known.view(mine, 0.0)
    assert not pace.enough(known.view(mine, 0.0))
    for number in calling:
        calls(known, PEERS[number], WAY)
    assert pace.enough(known.view(mine, 0.0)) == due
    assert pace.reaches(0, 0, 1) == due
    assert (pace.near_at == 0) == due


def test_a_batch_is_not_begun_when_most_of_the_others_have_one_left() -> None:
    """Each round waited for the batch of the peer that was told less. It is held once on each way."""
    known, pace = SwarmProgress(PEERS[0], {}, ttl_s=20.0), merge_pace(Merging(every=4, overlap=0))
    known.contributed(PEERS[:4])
    pace.state_changed(1, 0.0)
    for peer, done in zip(PEERS[1:4], (3 * WAY // 4, 3 * WAY // 4, 0), strict=True):
        known.heard(said(peer, done, 1.0), 0.0)
    pace.enough(known.view(said(PEERS[0], WAY, 0.0), 0.0))
    assert [pace.hold_s(batches, float(batches), 1) for batches in range(2, 7)] == [0.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(("peers", "least"), [(2, 0), (3, 600), (4, 667), (8, 800)])
def test_a_peer_that_claimed_far_more_than_all_others_made_merges_due_before_they_had_a_batch(
    peers: int, least: int
) -> None:
    """No one counts for more than three times the next one. Of two nobody knows which of them is the one that lies."""

    def due(done: int) -> bool:
        known, pace = SwarmProgress(PEERS[0], {}, ttl_s=20.0), merge_pace(Merging(every=10, overlap=0))
        for peer in PEERS[1 : peers - 1]:
            known.heard(said(peer, done, 1.0), 0.0)
        known.heard(said(PEERS[peers - 1], 10**12, 1.0), 0.0)
        return pace.enough(known.view(said(PEERS[0], done, 0.0), 0.0))

    assert next(done for done in range(WAY + 1) if due(done)) == least


@pytest.mark.parametrize(("there", "called"), [(0, False), (1, False), (2, True)])
def test_one_peer_that_said_it_was_time_called_all_others_to_each_merge(there: int, *, called: bool) -> None:
    """By time each peer has a clock of its own: more than half of the others call it, and no single one."""
    known, pace = SwarmProgress(PEERS[0], {}, ttl_s=20.0), merge_pace(Merging(every="2s", overlap=0))
    pace.state_changed(1, 0.0)
    for peer in PEERS[1:4]:
        known.heard(said(peer, WAY if peer in PEERS[1 : 1 + there] else 1, 1.0), 0.0)
    pace.enough(known.view(said(PEERS[0], 1, 0.0), 0.0))
    assert (pace.done(4, 1, 0.5, 1) == WAY) == called


@pytest.mark.parametrize("contributor_is_here", [False, True])
def test_others_that_do_nothing_keep_a_stranger_waiting_for_some_ways_only(*, contributor_is_here: bool) -> None:
    """It does not count itself where others come first, so it could wait for these for ever."""
    swarm, pace = SwarmProgress(PEERS[5], {}, ttl_s=20.0), merge_pace(Merging(every=10, overlap=0))
    swarm.contributors = PEERS[:1]
    for peer in PEERS[not contributor_is_here : 4]:
        swarm.heard(said(peer, 0, 1.0), 0.0)
    assert not pace.enough(swarm.view(said(PEERS[5], 4 * WAY - 1, 0.0), 0.0))
    assert not pace.reaches(0, 39, 0)
    assert pace.enough(swarm.view(said(PEERS[5], 4 * WAY, 0.0), 0.0))
    assert pace.reaches(0, 40, 0)


def test_fragments_that_were_overdue_are_merged_one_after_another_again_and_end_together() -> None:
    """By time. A quorum was lacking, so all were merged at once, and stayed so; the last merges came apart then."""
    merging = Merging(every="8s", overlap=None, quorum=2, fragments=4)
    first = merge_pace(merging)
    paces = [first, *(merge_pace(merging, number, first) for number in (1, 2, 3))]
    for pace in paces:
        pace.state_changed(0, 0.0)
        pace.done(4, 1, 0.0, 0)
    assert [pace.due_s(0.0) for pace in paces] == [8.0, 6.0, 4.0, 2.0]
    for pace in paces:
        pace.state_changed(1, 20.0)
    assert [pace.due_s(20.0) for pace in paces] == [8.0, 14.0, 12.0, 10.0]
    for pace, at in ((first, 28.0), (paces[3], 30.0), (paces[2], 32.1), (paces[1], 33.9)):
        pace.state_changed(2, at)
    assert [pace.due_s(34.0) for pace in paces] == pytest.approx([2.0, 8.0, 6.0, 4.0])
    for pace in paces:
        pace.ends_at(3, others_left=False)
    assert [pace.due_s(34.0) for pace in paces] == pytest.approx([2.0] * 4)
    first.state_changed(3, 36.0)
    assert [pace.done(4, 1, 36.5, 2) for pace in paces[1:]] == [WAY] * 3


def waiting(own: int, others: list[int], *, every: int | str = 10) -> MergePace:
    """A peer that has trained so many batches of a second each, where others have; the merge is not due."""
    known, pace = SwarmProgress(PEERS[0], {}, ttl_s=20.0), merge_pace(Merging(every=every, overlap=0))
    pace.state_changed(1, 0.0)
    for peer, batches in zip(PEERS[1:], others, strict=False):
        known.heard(said(peer, WAY * batches // 10, 1.0), 0.0)
    pace.enough(known.view(said(PEERS[0], WAY * own // 10, 0.0), float(own)))
    return pace


@pytest.mark.parametrize(
    ("own", "others", "hold_s"),
    [
        (9, [9, 9], 0.0),  # it has not gone its own way
        (10, [9, 9], 1.0),
        (10, [9, 8], 0.0),  # it can end another batch before
        (12, [4, 12], 0.0),  # the last one waits or is ahead, so only one batch is known to be under way
        (13, [4, 12], 1.0),
        (18, [1], 1.0),  # a batch may take that one far longer
    ],
)
def test_a_peer_begins_no_batch_that_would_be_lost(own: int, others: list[int], hold_s: float) -> None:
    """It waits for the batches of the others that are under way, for the time of one of its own."""
    assert waiting(own, others).hold_s(own, float(own), 1) == hold_s
    assert waiting(own, others).hold_s(own, float(own), 2) == 0.0  # of the way before
    assert merge_pace(Merging(every=10, overlap=1)).hold_s(own, 1.0, 0) == 0.0


@pytest.mark.parametrize(
    ("own", "others", "news"), [(4, [4, 4], False), (9, [4, 4], True), (4, [13, 13], True), (4, [12, 8], False)]
)
def test_a_batch_that_makes_no_merge_due_is_no_reason_to_look(own: int, others: list[int], *, news: bool) -> None:
    """The swarm was looked at after each of them, for each fragment of the model."""
    assert waiting(own, others).is_news(own) == news


@pytest.mark.parametrize(("at", "hold_s"), [(6.0, 0.0), (8.0, 0.0), (9.0, 1.0), (9.6, 0.4), (10.0, 0.0)])
def test_by_time_a_peer_begins_no_batch_that_would_be_lost(at: float, hold_s: float) -> None:
    """It waits until the merge is due, if that is nearer than a batch is long."""
    assert waiting(6, [6], every="10s").hold_s(int(at), at, 1) == pytest.approx(hold_s)


def test_a_merge_waits_for_a_batch_that_is_under_way_as_long_as_the_mean_one_takes() -> None:
    """A tenth of the way by time; not at all where peers do not wait for merges."""
    assert waiting(15, [5]).grace_s(15.0) == 1.5
    assert waiting(6, [6], every="10s").grace_s(10.0) == 1.0
    assert merge_pace(Merging(every=10, overlap=None)).grace_s(10.0) == 0.0


def test_a_step_that_one_place_filled_alone_comes_a_tenth_sooner_at_most() -> None:
    """Its claims filled each step before the others were done with a batch. A first step waits for nobody."""
    known, pace = SwarmProgress(PEERS[0], {}, ttl_s=200.0), SamplesPace(32)
    known.contributed(PEERS[:3])
    known.heard(said(PEERS[1], 50, 1.0), 0.0)
    known.heard(said(PEERS[2], 0, 1.0), 0.0)

    def enough(now: float, own: int = 4) -> bool:
        pace.done(own, 1, now, 5)
        return pace.enough(known.view(said(PEERS[0], own, 0.0), now))

    pace.state_changed(5, 10.0)
    assert enough(10.1), "nobody knows how long a step takes"
    pace.state_changed(6, 20.0)
    assert not enough(20.1)
    assert not pace.reaches(4, 1, 6)
    assert pace.due_s(20.1) == pytest.approx(8.9)
    assert enough(29.1)
    assert pace.due_s(29.1) is None
    assert not enough(28.9)
    known.heard(said(PEERS[2], 4, 2.0), 28.9)
    assert enough(28.9), "all are done with a batch"
    pace.state_changed(6, 30.0)
    assert enough(30.1, own=0), "it was no step"
