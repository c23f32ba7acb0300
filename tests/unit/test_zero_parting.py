"""When ranks of ZeRO that all wait can never meet."""

from __future__ import annotations

import sys

from shoal.zero.ranks.parting import Waiting, apart, line_of


def waiting(watch: int, number: int, doing: str = "to agree", **begun: int) -> Waiting:
    """A rank that has begun so many operations of the watches `w1`, `w2`, ..."""
    return Waiting(watch, number, doing, {int(key[1:]): count for key, count in begun.items()}, "")


def nothing(_: int, __: int) -> None:
    """No operation is remembered."""


def test_ranks_in_operations_of_different_models() -> None:
    """Neither begins what the other one waits for."""
    assert apart([waiting(1, 5, w1=5), waiting(2, 1, w1=4, w2=1)], nothing)


def test_ranks_on_a_slow_line() -> None:
    """A rank may be ahead, and wait for bytes that are on their way: of the same watch, or of one that is over."""
    assert not apart([waiting(1, 5, w1=8), waiting(1, 7, w1=7)], nothing)
    assert not apart([waiting(1, 5, w1=5), waiting(2, 1, w1=5, w2=1)], nothing)
    assert not apart([waiting(1, 5, w1=5), waiting(70, 1, w69=2, w70=1)], nothing)
    assert not apart([waiting(1, 5, w1=5), waiting(2, 1, w1=4, w2=1), waiting(1, 4, w1=4)], nothing)


def test_the_same_operation_is_another_one_on_another_rank() -> None:
    """One saves, and another one steps."""
    done = {(1, 5): "an all-reduce", (1, 6): "to tell"}
    waits = [waiting(1, 6, "to tell", w1=6), waiting(1, 5, "to agree", w1=5)]
    assert apart(waits, lambda watch, number: done.get((watch, number)))
    assert not apart(waits, lambda watch, number: {(1, 5): "to agree"}.get((watch, number)))


def test_what_waits_is_the_same_behind_the_store() -> None:
    """Each rank reads what others have written."""
    assert Waiting.unpacked(waiting(2, 3, w1=4, w2=3).packed()) == waiting(2, 3, w1=4, w2=3)


def test_the_line_of_the_program() -> None:
    """The innermost one that is not of shoal, torch or Python."""
    assert "called in test_zero_parting.py:" in line_of(sys._getframe())
    assert "line_of(sys._getframe())" in line_of(sys._getframe())
    assert line_of(None) == ""
