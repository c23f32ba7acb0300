"""Whose contributions the reducer of a tile waits for; every time is written down."""

from __future__ import annotations

from itertools import permutations

import pytest

from shoal.averaging.allreduce.lateness import Lateness
from shoal.averaging.allreduce.member import Contributions, Work


def rules(*members: int, me: int = 0, silence_s: float = 5.0, now: float = 100.0) -> Contributions:
    """Of a reducer with these members."""
    return Contributions(me, members or (0, 1, 2, 3), silence_s=silence_s, now=now)


def deadline(reducer: Contributions) -> float | None:
    """When the next sender will be left out, if nothing comes."""
    return min(reducer._limits().values(), default=None)


def give(reducer: Contributions, sender: int, tiles: list[int], now: float, *, attempt: int = 0) -> list[Work]:
    """Contributions of one sender to several tiles; what is ready after each."""
    return [work for tile in tiles for work in reducer.contributed(tile, attempt, sender, counts=True, now=now)]


# ------------------------------------------------------------------------------------------------------------ readiness


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_tile_is_ready_with_the_last_contribution(order: tuple[int, ...]) -> None:
    """In any order, the reducer's own included; exactly once."""
    reducer = rules()
    assert reducer.own(7, 0, 100.0) == []
    ready = [give(reducer, sender, [7], 101.0) for sender in order]
    assert ready == [[], [], [], [(7, 0)]]
    assert reducer.contributors[7, 0] == {0, 1, 2, 3}
    assert give(reducer, 1, [7], 102.0) == []
    assert deadline(reducer) is None


def test_a_member_alone_is_ready_with_its_own() -> None:
    """Nobody else contributes."""
    reducer = rules(0)
    assert reducer.own(1, 0, 100.0) == []
    assert deadline(reducer) is None
    assert give(reducer, 0, [1], 100.0) == [(1, 0)]


def test_weight_zero_is_an_answer_that_does_not_count() -> None:
    """It is not waited for any more, and is no contributor."""
    reducer = rules(0, 1)
    reducer.own(1, 0, 100.0)
    assert reducer.contributed(1, 0, 1, counts=False, now=101.0) == []
    assert reducer.contributed(1, 0, 0, counts=True, now=101.0) == [(1, 0)]
    assert reducer.contributors[1, 0] == {0}


def test_only_what_is_owed_is_expected() -> None:
    """Unknown tiles, other attempts, strangers and repetitions change nothing."""
    reducer = rules(0, 1)
    reducer.own(1, 2, 100.0)
    assert reducer.expects(1, 2, 1)
    for tile, attempt, sender in ((1, 1, 1), (1, 3, 1), (2, 2, 1), (1, 2, 9), (-1, 0, 1)):
        assert not reducer.expects(tile, attempt, sender)
        assert reducer.contributed(tile, attempt, sender, counts=True, now=101.0) == []
    give(reducer, 1, [1], 101.0, attempt=2)
    assert not reducer.expects(1, 2, 1)
    assert reducer.contributors == {(1, 2): {1}}


def test_a_new_attempt_forgets_the_old_one() -> None:
    """What was contributed to the old one does not count for the new one."""
    reducer = rules(0, 1, 2)
    reducer.own(1, 0, 100.0)
    reducer.own(2, 0, 100.0)
    give(reducer, 1, [1], 101.0)
    assert reducer.own(1, 1, 102.0) == []
    assert not reducer.expects(1, 0, 2)
    assert reducer.expects(1, 1, 1)
    assert reducer.expects(2, 0, 1)
    assert give(reducer, 2, [1], 103.0) == []
    assert reducer.contributors[1, 1] == set()


# ------------------------------------------------------------------------------------------------------------ exclusion


def test_who_is_excluded_is_waited_for_nowhere() -> None:
    """Tiles that waited for nobody else are ready at once, all of them; later ones do not wait at all."""
    reducer = rules(0, 1, 2)
    for tile in range(3):
        reducer.own(tile, 0, 100.0)
    give(reducer, 0, [0, 1, 2], 100.0)
    give(reducer, 1, [0, 1], 101.0)
    assert reducer.exclude(2) == [(0, 0), (1, 0)]
    assert reducer.exclude(2) == []
    assert reducer.contributors[0, 0] == {0, 1}
    reducer.own(3, 0, 102.0)
    assert not reducer.expects(3, 0, 2)
    assert give(reducer, 1, [2], 103.0) == [(2, 0)]


def test_contributions_before_the_exclusion_stay() -> None:
    """What was added is added, also in tiles that are not done yet."""
    reducer = rules(0, 1, 2)
    reducer.own(1, 0, 100.0)
    give(reducer, 2, [1], 100.5)
    reducer.exclude(2)
    give(reducer, 1, [1], 101.0)
    assert give(reducer, 0, [1], 101.0) == [(1, 0)]
    assert reducer.contributors[1, 0] == {0, 1, 2}


def test_the_reducer_is_never_excluded() -> None:
    """Nor judged: its own values come when it gets to them."""
    reducer = rules(0, 1)
    reducer.own(1, 0, 100.0)
    assert reducer.exclude(0) == []
    give(reducer, 1, [1], 100.0)
    assert reducer.stalled(1e9) == []
    assert deadline(reducer) is None
    assert give(reducer, 0, [1], 1e9) == [(1, 0)]


# -------------------------------------------------------------------------------------------------------------- silence


def test_who_owes_and_is_silent_is_stalled() -> None:
    """From the begin of the tile, or the last byte, for `silence_s`; the deadline says when."""
    reducer = rules(0, 1, 2)
    reducer.own(1, 0, 110.0)
    assert deadline(reducer) == 115.0
    assert reducer.stalled(114.99) == []
    assert reducer.stalled(115.0) == [1, 2]
    reducer.heard(1, 113.0)
    assert reducer.stalled(115.0) == [2]
    assert deadline(reducer) == 115.0
    reducer.heard(2, 114.0)
    assert deadline(reducer) == 118.0
    assert reducer.stalled(117.9) == []
    assert reducer.stalled(118.0) == [1]
    assert reducer.stalled(119.0) == [1, 2]


def test_who_owes_nothing_may_be_silent() -> None:
    """All its contributions are here: it waits like everybody."""
    reducer = rules(0, 1, 2)
    reducer.own(1, 0, 100.0)
    give(reducer, 1, [1], 101.0)
    assert reducer.stalled(1e6) == [2]
    reducer.exclude(2)
    assert reducer.stalled(1e6) == []
    assert deadline(reducer) is None


def test_who_is_excluded_is_not_stalled_again() -> None:
    """It is told of once."""
    reducer = rules(0, 1, 2)
    reducer.own(1, 0, 100.0)
    assert reducer.stalled(200.0) == [1, 2]
    reducer.exclude(1)
    assert reducer.stalled(200.0) == [2]


def test_a_tile_that_comes_later_gives_new_time() -> None:
    """A member that was silent because there was nothing to send has `silence_s` from then on."""
    reducer = rules(0, 1)
    reducer.own(1, 0, 100.0)
    give(reducer, 1, [1], 101.0)
    reducer.own(2, 1, 150.0)
    assert reducer.stalled(154.9) == []
    assert reducer.stalled(155.0) == [1]


# ------------------------------------------------------------------------------------------------------------------ lag


def test_who_falls_far_behind_the_median_is_stalled_though_it_sends() -> None:
    """The median was at its place after 10 s: another 10 s and `silence_s` later it is left out."""
    reducer = rules(0, 1, 2, 3)
    for tile in range(10):
        reducer.own(tile, 0, 100.0)
    for tile in range(10):
        give(reducer, 1, [tile], 110.0 + tile)
        give(reducer, 2, [tile], 110.0 + tile)
    # Sender 3 has nothing delivered; the median (of 1, 2, 3) had its first contribution at 110.
    limit = 110.0 + 10.0 + 5.0
    reducer.heard(3, 124.0)
    assert deadline(reducer) == limit
    assert reducer.stalled(124.9) == []
    reducer.heard(3, 124.99)
    assert reducer.stalled(limit) == [3]
    # With two contributions its place is the third, which the median reached at 112.
    give(reducer, 3, [0, 1], 124.99)
    reducer.heard(3, 128.0)
    assert reducer.stalled(128.9) == []
    assert reducer.stalled(112.0 + 12.0 + 5.0) == [3]


def test_who_needs_twice_as_long_is_not_left_out() -> None:
    """Slow but steady, at half the speed of the others: it keeps its place to the end."""
    reducer = rules(0, 1, 2, 3)
    for tile in range(20):
        reducer.own(tile, 0, 100.0)
    deliveries = sorted(
        [(100.0 + 1.0 * (tile + 1), sender, tile) for tile in range(20) for sender in (1, 2)]
        + [(100.0 + 2.0 * (tile + 1), 3, tile) for tile in range(20)]
    )
    for now, sender, tile in deliveries:
        assert reducer.stalled(now) == []
        give(reducer, sender, [tile], now)


def test_who_needs_three_times_as_long_is_left_out() -> None:
    """Slower than that, with `silence_s` to spare: at some place it is."""
    reducer = rules(0, 1, 2, 3, silence_s=2.0)
    for tile in range(20):
        reducer.own(tile, 0, 100.0)
    deliveries = sorted(
        [(100.0 + 1.0 * (tile + 1), sender, tile) for tile in range(20) for sender in (1, 2)]
        + [(100.0 + 3.0 * (tile + 1), 3, tile) for tile in range(20)]
    )
    stalled_at = None
    for now, sender, tile in deliveries:
        if 3 in reducer.stalled(now):
            stalled_at = now
            break
        give(reducer, sender, [tile], now)
    assert stalled_at is not None
    assert reducer.stalled(stalled_at) == [3]


def test_one_fast_sender_makes_nobody_slow() -> None:
    """The median of three: one that is far ahead does not count against the other two."""
    reducer = rules(0, 1, 2, 3)
    for tile in range(10):
        reducer.own(tile, 0, 100.0)
    give(reducer, 1, list(range(10)), 100.1)
    for now in (104.0, 108.0, 112.0, 116.0, 120.0):
        reducer.heard(2, now)
        reducer.heard(3, now)
        assert reducer.stalled(now + 4.9) == []


def test_of_two_the_one_far_behind_the_other_is_left_out() -> None:
    """Three members, one at 1% of its speed: the other two do not wait for it a hundred times as long."""
    reducer = rules(0, 1, 2)
    for tile in range(10):
        reducer.own(tile, 0, 100.0)
    give(reducer, 1, list(range(10)), 101.0)
    reducer.heard(2, 106.0)
    assert deadline(reducer) == 101.0 + 1.0 + 5.0
    assert reducer.stalled(106.9) == []
    assert reducer.stalled(107.0) == [2]


def test_a_slow_sender_is_waited_for_as_long_as_there_is_time_to_spare() -> None:
    """Peers that were late in turns, or always nearly late, cost each round five seconds; what is lost is counted."""
    reducer = Contributions(0, range(4), silence_s=5.0, now=100.0, spare_s=0.25)
    reducer.own(0, 0, 100.0)
    give(reducer, 0, [0], 100.0)
    for sender in (1, 2):
        give(reducer, sender, [0], 101.0)
    assert reducer.lateness.lost_s() == 0.0
    assert deadline(reducer) == 101.0 + 1.0 + 0.25
    assert reducer.stalled(102.25) == [3]
    assert reducer.lateness.lost_s() == 0.25
    late = rules(0, 1, 2, 3)
    late.own(0, 0, 100.0)
    for sender, now in ((0, 100.0), (1, 101.0), (2, 101.0), (3, 105.0)):
        give(late, sender, [0], now)
    assert late.lateness.lost_s() == 3.0


def test_what_late_reducers_and_missing_reports_cost_is_counted() -> None:
    """Only what senders cost was: a reducer that gave its averages late cost each round four seconds, for good."""
    reducers = Lateness((1, 2, 3), now=100.0)
    assert reducers.lost_s(200.0) == 0.0  # nobody is done: all may be slow
    reducers.done((1,), 100.5)
    assert reducers.lost_s(200.0) == 0.0
    reducers.done((2,), 101.0)
    assert reducers.lost_s(102.0) == 0.0
    assert reducers.lost_s(106.0) == 4.0
    reducers.done((3,), 106.0)
    assert reducers.late(3.9) == {3}
    assert reducers.late(4.0) == set()


def test_what_a_member_that_is_not_waited_for_has_needed_is_no_measure_for_the_others() -> None:
    """It was given up after 2 s, that is, 1 s later than usual; one that has left is not compared with the others."""
    reducers = Lateness((1, 2, 3), now=100.0)
    reducers.done((1,), 100.5)
    reducers.leave_out(2, 102.0)
    reducers.leave(3)
    assert (reducers.usual_until, reducers.lost_s()) == (101.0, 1.0)
    assert reducers.late(0.9) == {2}
    assert reducers.late(1.0) == set()


def test_a_member_whose_tiles_others_average_does_not_cost_its_time_once_more() -> None:
    """The new reducer waited as long for its values as everybody had waited for its averages."""
    reducer = rules(0, 1, 2, 3)
    reducer.own(0, 0, 100.0)
    for sender in range(4):
        give(reducer, sender, [0], 100.1)
    reducer.own(3, 1, 104.0)
    reducer.brief.add(3)
    for sender in (0, 1):
        assert give(reducer, sender, [3], 104.1, attempt=1) == []
    assert give(reducer, 2, [3], 104.1, attempt=1) == [(3, 1)]


def test_the_values_of_a_tile_that_was_moved_are_late_by_the_time_since_then() -> None:
    """Nobody could give them before: the wait for a slow one began with the round, and was as long as that."""
    reducer = Contributions(0, range(4), silence_s=5.0, now=100.0, spare_s=0.25)
    reducer.own(0, 0, 100.0)
    for sender in range(4):
        give(reducer, sender, [0], 100.5)
    reducer.own(3, 1, 110.0)
    for sender in (0, 1, 2):
        give(reducer, sender, [3], 111.0, attempt=1)
    assert deadline(reducer) == 111.0 + 1.0 + 0.25


def test_a_death_among_the_senders_does_not_excuse_a_slow_one() -> None:
    """What the dead one had given in time does not count any more; what the other one that lives gave does."""
    reducer = rules(0, 1, 2, 3)
    for tile in range(10):
        reducer.own(tile, 0, 100.0)
    give(reducer, 1, list(range(10)), 101.0)
    give(reducer, 3, list(range(10)), 102.0)
    reducer.heard(2, 108.0)
    assert deadline(reducer) == 102.0 + 2.0 + 5.0  # of two others the slower one
    reducer.exclude(3)
    assert deadline(reducer) == 101.0 + 1.0 + 5.0
    assert reducer.stalled(107.0) == [2]


def test_a_slow_line_that_was_announced_is_waited_for_at_its_pace() -> None:
    """It promised ten tiles in 40 s, one in 4: who is later than that is left out, as are others that are so slow."""
    reducer = Contributions(0, range(5), silence_s=5.0, now=100.0, promised_s=(0.0, 0.0, 0.0, 40.0, 0.0))
    for tile in range(10):
        reducer.own(tile, 0, 100.0)
    give(reducer, 1, list(range(10)), 101.0)
    give(reducer, 2, list(range(10)), 101.0)
    for sender in (3, 4):
        give(reducer, sender, [0, 1, 2, 3], 107.0)
        reducer.heard(sender, 119.0)
    assert reducer.stalled(119.9) == [4]
    reducer.exclude(4)
    assert reducer.stalled(119.9) == []
    assert reducer.stalled(120.0) == [3]  # the fifth tile was promised for now
    give(reducer, 3, list(range(4, 9)), 120.0)
    reducer.heard(3, 139.0)
    assert reducer.stalled(139.9) == []
    assert reducer.stalled(140.0) == [3]


def test_a_slow_line_that_was_announced_is_no_excuse_for_silence() -> None:
    """After `silence_s` nobody waits for it, as for anybody else."""
    reducer = Contributions(0, (0, 1, 2, 3), silence_s=5.0, now=100.0, promised_s=(0.0, 0.0, 0.0, 40.0))
    reducer.own(0, 0, 100.0)
    reducer.heard(3, 110.0)
    assert 3 in reducer.stalled(115.0)


def test_the_median_goes_on_without_the_excluded() -> None:
    """Of the senders that are left."""
    reducer = rules(0, 1, 2, 3)
    for tile in range(4):
        reducer.own(tile, 0, 100.0)
    reducer.exclude(2)
    reducer.exclude(3)
    give(reducer, 1, [0, 1, 2], 101.0)
    reducer.heard(1, 140.0)
    assert deadline(reducer) == 145.0  # alone, it is its own median
