"""Which chunks are fetched from whom, and how fast a donor sends."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.peer import PeerID
from shoal.compression import NoCompression
from shoal.errors import ConfigError
from shoal.state.wire.arrivals import ArrivalRate
from shoal.state.wire.candidates import Candidates, Donor
from shoal.state.wire.manifest import Manifest, StateTensorSpec
from shoal.state.wire.pace import BackgroundLimit, Pacer
from shoal.state.wire.plan import ChunkPlan

CHUNK = 1024


def described(content: str, *, name: str = "s", chunk_bytes: int = CHUNK) -> Manifest:
    """A snapshot whose chunk i has the content `content[i]` (one letter each)."""
    spec = StateTensorSpec((len(content) * chunk_bytes,), torch.uint8, NoCompression())
    hashes = tuple(hashlib.sha256(letter.encode()).digest() for letter in content)
    return Manifest(name.encode() * 16, 0, None, (spec,), chunk_bytes, hashes)


def plan_with(content: str, *verified: int) -> ChunkPlan[str]:
    """A plan whose donor "a" has sent some chunks and is gone."""
    plan = ChunkPlan[str](described(content))
    plan.offer("a", described(content))
    plan.take("a")
    for chunk in verified:
        plan.verify(chunk, "a")
    plan.release("a")
    return plan


def test_one_donor_is_given_everything_in_order() -> None:
    """A fresh plan asks for all chunks, once."""
    plan = ChunkPlan[str](described("abcd"))
    assert plan.offer("a", described("abcd")) == 4
    assert plan.take("a") == [0, 1, 2, 3]
    assert plan.take("a") == []
    for chunk in range(4):
        assert not plan.complete
        plan.verify(chunk, "a")
    assert plan.complete
    assert plan.contributors == ("a",)


def test_what_a_donor_leaves_behind_is_missing_again() -> None:
    """The next donor is asked for what was not verified, and for nothing else."""
    plan = plan_with("abcd", 0, 2)
    assert plan.verified == 2
    plan.offer("b", described("abcd"))
    assert plan.take("b") == [1, 3]
    plan.verify(3, "b")
    plan.verify(1, "b")
    assert plan.complete
    assert plan.contributors == ("a", "b")


def test_several_donors_share_the_work_and_none_is_asked_for_what_it_lacks() -> None:
    """A donor of another snapshot serves those chunks whose hash is the same."""
    plan = ChunkPlan[str](described("abcdef"))
    plan.offer("a", described("abcdef"))
    assert plan.offer("b", described("aXcXeX")) == 3
    assert plan.take("b", 2) == [0, 2]
    assert plan.take("a", 2) == [1, 3]
    assert plan.take("b") == [4]
    assert plan.take("a") == [5]
    plan.release("b")
    assert plan.take("b") == []
    assert plan.take("a") == [0, 2, 4]


def test_a_donor_that_was_not_heard_is_given_nothing() -> None:
    """Only who offered something is asked."""
    assert ChunkPlan[str](described("ab")).take("a") == []


def test_moving_to_an_equal_manifest_keeps_what_was_verified() -> None:
    """Another donor's snapshot has another name and the same bytes."""
    plan = plan_with("abcd", 0, 1)
    assert plan.move_to(described("abcd", name="t"))
    assert plan.manifest.snapshot == b"t" * 16
    plan.offer("b", plan.manifest)
    assert plan.take("b") == [2, 3]


def test_moving_to_a_changed_state_keeps_only_equal_chunks() -> None:
    """What changed is fetched again, so the result is one version."""
    plan = plan_with("abcd", 0, 1, 3)
    assert plan.move_to(described("aXcd"))
    assert plan.verified == 2
    plan.offer("b", described("aXcd"))
    assert plan.take("b") == [1, 2]


@pytest.mark.parametrize("other", [described("abcde"), described("ab", chunk_bytes=2 * CHUNK), described("")])
def test_moving_to_another_layout_begins_anew(other: Manifest) -> None:
    """Equal hashes mean nothing where chunks lie elsewhere."""
    plan = plan_with("abcd", 0, 1)
    assert not plan.move_to(other)
    assert plan.verified == 0
    assert plan.offer("a", described("abcd")) == 0
    plan.offer("b", other)
    assert plan.take("b") == list(range(len(other.hashes)))


def test_a_complete_state_without_chunks_needs_nobody() -> None:
    """Nothing to fetch is complete at once."""
    assert ChunkPlan[str](described("")).complete


def test_a_late_chunk_is_doubled_by_one_donor_and_counts_for_whoever_was_first() -> None:
    """Only chunks of others, that this donor has, and that nobody doubles yet."""
    plan = ChunkPlan[str](described("abcd"))
    for donor in "xyz":
        plan.offer(donor, described("abcd"))
    plan.offer("w", described("aXXX"))
    plan.take("x", 3)
    plan.take("y")
    assert list(plan.doubtful("y")) == [(0, "x"), (1, "x"), (2, "x")]
    assert list(plan.doubtful("w")) == [(0, "x")]
    plan.double("y", 1)
    plan.double("y", 2)
    assert list(plan.doubtful("z")) == [(0, "x"), (3, "y")]
    plan.verify(1, "y")
    plan.verify(2, "x")
    assert (plan.owner(0), plan.owner(1), plan.is_verified(1)) == ("x", None, True)
    assert plan.contributors == ("y", "x")


def test_a_doubled_chunk_is_not_missing_when_one_of_its_donors_leaves() -> None:
    """The other one goes on with it; when both are gone it is missing."""
    plan = ChunkPlan[str](described("ab"))
    for donor in "xy":
        plan.offer(donor, described("ab"))
    plan.take("x")
    plan.double("y", 0)
    plan.release("x")
    assert (plan.owner(0), plan.owner(1), plan.missing) == ("y", None, 1)
    plan.release("y")
    assert plan.missing == 2


donor_moves = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "double", "send", "release"])))


@given(donor_moves)
def test_no_chunk_is_in_flight_more_than_twice_or_fetched_again(moves: list[tuple[str, str]]) -> None:
    """Whatever donors do: one owner, at most one more sender, verified once, and at the end nothing is lost."""
    plan = ChunkPlan[str](described("abcdefgh"))
    flying: dict[str, list[int]] = {donor: [] for donor in "abc"}
    done: set[int] = set()
    for donor, move in moves:
        if move == "take":
            plan.offer(donor, plan.manifest)
            taken = plan.take(donor, 3)
            assert not any(chunk in chunks for chunk in taken for chunks in flying.values())
            flying[donor] += taken
        elif move == "double" and (doubtful := list(plan.doubtful(donor))):
            plan.double(donor, doubtful[0][0])
            flying[donor].append(doubtful[0][0])
        elif move == "send" and flying[donor]:
            chunk = flying[donor].pop(0)
            assert plan.is_verified(chunk) == (chunk in done)
            if chunk not in done:
                plan.verify(chunk, donor)
                done.add(chunk)
        elif move == "release":
            plan.release(donor)
            flying[donor].clear()
        for chunk in range(8):
            senders = [each for each, chunks in flying.items() if chunk in chunks]
            assert len(senders) <= 2
            assert chunk in done or bool(senders) == (plan.owner(chunk) is not None)
    for donor in "abc":
        plan.release(donor)
    plan.offer("a", plan.manifest)
    assert done.union(plan.take("a")) == set(range(8))
    assert plan.complete == (len(done) == 8)


# --------------------------------------------------------------------------------------------------------------- rate


def test_more_is_asked_ahead_the_faster_chunks_come() -> None:
    """Half a second's worth and two, at most 64; two before anything is known."""
    for gap_s, ahead in ((10.0, 2), (0.25, 4), (0.01, 52), (0.0001, 64)):
        rate = ArrivalRate()
        assert rate.ahead() == 2
        rate.asked(5.0)
        for i in range(1, 40):
            rate.arrived(5.0 + i * gap_s)
        assert rate.ahead() == pytest.approx(ahead, abs=1)


def test_a_chunk_is_due_by_its_place_and_later_the_longer_nothing_comes() -> None:
    """One a second: the third in line in 3 s; half a second on, in 2.5; nothing for 10 s, in 29."""
    rate = ArrivalRate()
    rate.asked(0.0)
    for second in range(1, 10):
        rate.arrived(float(second))
    assert rate.takes_s(3) == pytest.approx(3)
    assert [rate.due_s(2, now) for now in (9.0, 9.5, 19.0)] == pytest.approx([3.0, 2.5, 29.0])
    assert rate.due_s(0, 10.0) == pytest.approx(0)
    assert rate.due_s(0, 12.0) == pytest.approx(2)


def test_a_donor_that_has_sent_nothing_yet_is_due_by_how_long_it_was_waited_for() -> None:
    """Nothing is known of its pace, so as much again for each chunk."""
    rate = ArrivalRate()
    rate.asked(7.0)
    assert (rate.takes_s(5), rate.due_s(0, 7.0), rate.due_s(1, 9.0)) == (0.0, 0.0, 4.0)


# ---------------------------------------------------------------------------------------------------------------- pace


def test_without_a_limit_nothing_waits() -> None:
    """Whole chunks, at once."""
    pacer = Pacer(None)
    assert pacer.piece_bytes(1 << 20) == 1 << 20
    assert [pacer.reserve(1 << 30, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_the_rate_is_kept_after_a_short_burst() -> None:
    """A quarter of a second's worth goes at once, then each piece waits for those before it."""
    pacer = Pacer(1_000_000)
    waits = [pacer.reserve(125_000, 10.0) for _ in range(6)]
    assert waits == pytest.approx([0.0, 0.0, 0.0, 0.125, 0.25, 0.375])
    assert pacer.reserve(1, 100.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 200_000)), max_size=50))
def test_no_interval_sees_more_than_the_rate_and_the_burst(steps: list[tuple[float, int]]) -> None:
    """From any piece to any later one, no more than the rate allows, the burst and the last piece."""
    rate, pacer, now = 100_000.0, Pacer(100_000), 0.0
    sent: list[tuple[float, int]] = []
    for pause, nbytes in steps:
        now += pause
        now += pacer.reserve(nbytes, now)
        sent.append((now, nbytes))
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            total = sum(nbytes for _, nbytes in sent[first:last])
            assert total <= rate * (sent[last][0] - sent[first][0] + 0.25) + 1


def test_pieces_are_small_enough_for_slow_lines() -> None:
    """An eighth of a second each, so sixteen receivers all hear something within the stall limit."""
    assert Pacer(32 << 10).piece_bytes(1 << 20) == 4096
    assert Pacer(80 << 20).piece_bytes(1 << 20) == 1 << 20


@pytest.mark.parametrize("rate", [0, -1, 1000, float("nan")])
def test_a_rate_that_would_look_dead_is_refused(rate: float) -> None:
    """Too slow for receivers to see that the donor lives."""
    with pytest.raises(ConfigError, match="too low"):
        Pacer(rate)


# ------------------------------------------------------------------------------------------------------------- limit


def test_without_other_traffic_states_are_not_held() -> None:
    """A few kilobytes of calls are no round."""
    limit = BackgroundLimit()
    for i in range(100):
        known = i * 0.02 >= 0.1
        assert limit.must_wait(0.1, i * 0.02, lambda i=i: i * 1000) != known  # type: ignore[misc]
        limit.sent(1 << 20, i * 0.02)


@given(st.floats(0.05, 1.0), st.integers(1 << 20, 1 << 28), st.lists(st.integers(1, 64 << 10), min_size=1))
def test_beside_other_traffic_states_get_their_fraction(fraction: float, rate: int, pieces: list[int]) -> None:
    """Whatever wants to go: over any second no more than the fraction, and one piece for each look."""
    limit, sent, log = BackgroundLimit(), 0, []
    for step in range(300):
        now = step * 0.01
        for nbytes in pieces:
            if limit.must_wait(fraction, now, lambda now=now: int(rate * now)):  # type: ignore[misc]
                break
            limit.sent(nbytes, now)
            sent += nbytes
        log.append(sent)
    assert log[-1] - log[100] <= fraction * rate * 2.5 + 50 * max(pieces)
    assert log[-1] > log[100]


def test_states_are_free_again_when_the_round_is_over() -> None:
    """Half a second after its last bytes."""
    limit = BackgroundLimit()
    limit.must_wait(0.1, 0.0, lambda: 0)
    limit.sent(1 << 20, 0.0)
    assert limit.must_wait(0.1, 0.1, lambda: 1 << 20)
    assert limit.busy
    assert limit.must_wait(0.1, 0.5, lambda: 1 << 20)
    assert not limit.must_wait(0.1, 0.7, lambda: 1 << 20)
    assert not limit.busy


# ---------------------------------------------------------------------------------------------------------- candidates


def candidates(*priorities: float, seed: int = 1) -> tuple[Candidates, list[Donor]]:
    """Donors of these priorities."""
    peers = [PeerID(bytes([i]) * 32) for i in range(len(priorities) + 1)]
    donors = [Donor(peer, priority) for peer, priority in zip(peers, priorities, strict=False)]
    return Candidates([*donors, Donor(peers[-1], 99)], random.Random(seed), peers[-1]), donors


def test_the_highest_come_first_and_together() -> None:
    """Lower ones only when nobody has a turn; this peer itself never."""
    who, donors = candidates(1, 3, 3)
    first = who.next(0.0, None)
    assert first in donors[1:]
    second = who.next(0.0, 3)
    assert {first, second} == set(donors[1:])
    assert who.next(0.0, 3) is None
    assert who.ready_at(3) is None
    assert (who.next(0.0, None), who.next(0.0, None)) == (donors[0], None)


def test_a_busy_donor_is_passed_over_and_asked_again() -> None:
    """After a pause, that is known."""
    who, (high, low) = candidates(2, 1)
    assert who.next(0.0, None) == high
    who.busy(high, 0.0)
    assert who.next(0.0, None) == low
    at = who.ready_at(None)
    assert at is not None
    assert 0.1 <= at <= 0.2
    assert who.next(at, 1) == high
    for _ in range(9):
        who.busy(high, at)
    longest = who.ready_at(None)
    assert longest is not None
    assert longest - at <= 2.0, "others may have left it soon"


def test_turns_come_to_an_end() -> None:
    """One that brought nothing is out; one that brought chunks may fail twice more; refusals are counted."""
    who, (donor,) = candidates(1)
    assert who.next(0.0, None) == donor
    who.failed(donor, "gone", 0.0, brought_chunks=True)
    for _ in range(2):
        assert who.next(9.0, None) == donor
        who.failed(donor, "gone", 0.0, brought_chunks=False)
    assert who.next(9.0, None) == donor
    who.failed(donor, "gone", 0.0, brought_chunks=False)
    assert (who.ready_at(None), who.describe()) == (None, f"{donor.peer.short()}: gone")
    who, (donor,) = candidates(1)
    for _ in range(5):
        assert who.next(99.0, None) == donor
        who.refused(donor, "no", 0.0)
    assert who.ready_at(None) is None


def test_a_donor_of_another_state_waits_until_nobody_has_a_turn() -> None:
    """And whoever has failed goes after those that have not; who was dropped never comes again."""
    who, (a, b, low) = candidates(2, 2, 1)
    turn = {who.next(0.0, None), who.next(0.0, 2)}
    assert turn == {a, b}
    who.other_state(b, 0.0)
    assert who.next(0.0, 2) is None
    who.failed(a, "gone", 0.0, brought_chunks=True)
    assert who.next(0.0, None) == b
    who.dropped(b.peer, "lied")
    who.again(b, 0.0)
    assert who.next(0.0, None) == low
    assert who.next(0.0, None) == a
    assert who.next(9.0, None) is None
