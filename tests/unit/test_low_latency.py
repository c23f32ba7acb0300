"""The switch interval while shoal is busy, and what it is again afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from shoal.runtime.low_latency import SWITCH_INTERVAL_S, low_latency

USUAL_S = 0.005


def interval_s() -> float:
    """Python keeps whole microseconds."""
    return round(sys.getswitchinterval(), 6)


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    """Whatever a test leaves, the others find what was there."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL_S)
    yield
    sys.setswitchinterval(before)


def test_the_interval_is_short_until_the_last_one_leaves() -> None:
    """Blocks may be nested, and of different peers."""
    with low_latency():
        with low_latency():
            assert interval_s() == SWITCH_INTERVAL_S
        assert interval_s() == SWITCH_INTERVAL_S
    assert interval_s() == USUAL_S


def test_a_shorter_interval_of_the_program_stays() -> None:
    """It is never made longer."""
    sys.setswitchinterval(SWITCH_INTERVAL_S / 10)
    with low_latency():
        assert interval_s() == SWITCH_INTERVAL_S / 10
    assert interval_s() == SWITCH_INTERVAL_S / 10


def test_what_the_program_chose_meanwhile_stays() -> None:
    """It knows better."""
    with low_latency():
        sys.setswitchinterval(0.02)
    assert interval_s() == 0.02


def test_an_exception_ends_it() -> None:
    """A round that failed leaves nothing behind."""
    with pytest.raises(ZeroDivisionError), low_latency():
        raise ZeroDivisionError
    assert interval_s() == USUAL_S


def test_a_forked_child_has_the_usual_interval() -> None:
    """The threads that were busy did not come along."""
    with low_latency():
        child = os.fork()
        if child == 0:
            with low_latency():
                inside = interval_s() == SWITCH_INTERVAL_S
            os._exit(0 if inside and interval_s() == USUAL_S else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert interval_s() == SWITCH_INTERVAL_S
