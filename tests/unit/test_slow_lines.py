"""Which members with slow lines a round waits for, and how long; every time is written down."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoal.averaging.allreduce.slow_lines import promised_s


def promises(seconds: Sequence[float | None], since_last_s: float, most_s: float = 1000.0) -> list[float]:
    """Of members that need so long by their own words; a line that takes 2/3 of a promise sends that many bytes."""
    bandwidths = [None if each is None else 1000.0 / each for each in seconds]
    found = promised_s([1000.0] * len(seconds), bandwidths, since_last_s=since_last_s, margin_s=3.0, most_s=most_s)
    return [round(each, 6) for each in found]


def test_a_slow_line_is_worth_as_much_time_as_its_member_gives() -> None:
    """Three need 10 s (18 allowed), one 22 (36 allowed): 4 / (way + 36) is more than 3 / (way + 18) from 36 s on."""
    assert promises([10, 10, 10, 22], 37.0) == [18.0, 18.0, 18.0, 36.0]
    assert promises([10, 10, 10, 22], 35.0) == [18.0, 18.0, 18.0, 0.0]


@pytest.mark.parametrize("members", [3, 10, 100])
def test_a_line_that_is_announced_in_vain_costs_no_more_than_its_share(members: int) -> None:
    """However slow one claims to be: the others count for as much of the time as if they were one fewer, or more."""
    for claimed in range(10, 2000, 10):
        *others, slowest = promises([10.0] * (members - 1) + [float(claimed)], 300.0)
        assert (members - 1) / (300.0 + max(slowest, *others)) >= (members - 2) / (300.0 + others[0])


def test_several_with_slow_lines_are_worth_more() -> None:
    """A third of twelve on lines that one alone would not be waited for."""
    assert promises([2.0] * 11 + [22.0], 300.0)[-1] == 0.0
    assert promises([2.0] * 8 + [22.0] * 4, 300.0)[-4:] == [36.0] * 4


def test_who_announces_nothing_or_needs_longer_than_a_round_may_take_gets_nothing_more() -> None:
    """Nor does anybody where rounds follow each other closely."""
    assert promises([10, 10, None, 22], 1000.0, most_s=35.0) == [18.0, 18.0, 0.0, 0.0]
    assert promises([10, 10, None, 22], 0.0) == [0.0] * 4
