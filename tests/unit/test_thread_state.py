"""What torch keeps for each thread: taken in one, put in force in another, and nothing of it stays there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from threading import Thread
from typing import TypeVar

import pytest
import torch

from shoal.base.thread_state import OWN, ThreadState
from tests.odd_torch import ODD

T = TypeVar("T")
OF_THREADS = ["no memory by default", "autocast", "no_grad", "inference_mode", "two threads", "flushed denormals"]


def elsewhere(function: Callable[[], T]) -> T:
    """Call a function in a new thread."""
    found: list[T] = []
    thread = Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("odd", OF_THREADS)
def test_the_state_of_one_thread_is_put_in_force_in_another_and_taken_back(odd: str) -> None:
    """Each of its parts; and threads that begin meanwhile or later know nothing of it."""
    plain = elsewhere(ThreadState.here)
    with ODD[odd]():
        taken = ThreadState.here()
    assert taken != plain

    def within() -> tuple[ThreadState, ThreadState, ThreadState]:
        with taken.in_force():
            inside, beside = ThreadState.here(), elsewhere(ThreadState.here)
        return inside, beside, ThreadState.here()

    inside, beside, after = elsewhere(within)
    assert inside == taken
    assert after == plain
    assert beside._replace(flushes=False) == plain  # the processor's own mode is inherited, as it is without shoal
    assert elsewhere(ThreadState.here) == plain


def test_what_shoal_computes_itself_is_computed_in_one_state() -> None:
    """Whatever is set around it, all at once."""
    before = ThreadState.here()
    with ExitStack() as stack:
        for odd in OF_THREADS:
            stack.enter_context(ODD[odd]())
        odd_one = ThreadState.here()
        with OWN.in_force():
            assert ThreadState.here() == OWN
            values = torch.ones(3, dtype=torch.float32, device="cpu")
        assert ThreadState.here() == odd_one
    assert not values.is_inference()
    assert ThreadState.here() == before


def test_a_state_is_taken_back_if_the_block_raises() -> None:
    """The next work of the same thread begins as the one before did."""
    with torch.no_grad():
        taken = ThreadState.here()
    with pytest.raises(ZeroDivisionError), taken.in_force():
        _ = 1 / 0
    assert torch.is_grad_enabled()
