"""What `step(wait=False)` returns, from real threads: it steers the step, and is a future of its result."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import shoal
from shoal.averaging import AveragingStage
from shoal.errors import ClosedError, ConfigError, LocalError
from tests.integration.workers import LONG_S, until


@contextmanager
def pair(**options: Any) -> Iterator[tuple[shoal.DecentralizedAverager, shoal.DecentralizedAverager]]:
    """Two averagers in this process, of ones and of zeros."""
    with shoal.DHT(start=True) as first, shoal.DHT([first.invite()], start=True) as second:
        made = [
            shoal.DecentralizedAverager(
                [torch.full((4,), value)], dht, start=True, prefix="p", target_group_size=2, **options
            )
            for value, dht in ((1.0, first), (0.0, second))
        ]
        yield made[0], made[1]


def value(averager: shoal.DecentralizedAverager) -> list[float]:
    """Of its tensor."""
    with averager.get_tensors() as tensors:
        return [float(number) for number in tensors[0]]


def test_a_step_is_steered_until_its_values_are_taken() -> None:
    """Weight from another thread, then the trigger; afterwards nothing can be changed any more."""
    with pair() as (one, two):
        control = one.step(wait=False, require_trigger=True, timeout=LONG_S, gather="one")
        until(lambda: control.stage is AveragingStage.AWAITING_TRIGGER)
        assert not control.triggered
        assert not control.began_allreduce
        assert 0 < control.get_timeout() <= LONG_S
        thread = threading.Thread(target=setattr, args=(control, "weight", 3.0))
        thread.start()
        thread.join()
        control.allow_allreduce()
        other = two.step(wait=False, timeout=LONG_S, gather="two")
        assert sorted(control.result(LONG_S).values()) == ["one", "two"]
        assert other.result(LONG_S) == control.result()
        assert control.stage is AveragingStage.FINISHED
        assert control.triggered
        assert control.began_allreduce
        assert value(one) == value(two) == [0.75] * 4
        with pytest.raises(LocalError, match="weight cannot be changed any more: this step is over"):
            control.weight = 1.0
        with pytest.raises(LocalError, match="scheduled_time cannot be changed any more"):
            control.scheduled_time = None


def test_a_schedule_is_set_checked_and_moved() -> None:
    """A time in the far future; then now."""
    with pair() as (one, two):
        control = one.step(wait=False, scheduled_time=shoal.get_dht_time() + 1000, timeout=2000)
        assert control.scheduled_time is not None
        assert control.stage is AveragingStage.IDLE
        with pytest.raises(ConfigError, match="must be before the step's end"):
            control.scheduled_time = time.time() + 3000
        other = two.step(wait=False, timeout=LONG_S)
        control.scheduled_time = time.time()
        assert len(control.result(LONG_S)) == len(other.result(LONG_S)) == 2
        with pytest.raises(ConfigError, match="give an earlier one, or a longer timeout"):
            one.step(scheduled_time=time.time() + 100, timeout=10)
        with pytest.raises(ConfigError, match="pass wait=False"):
            one.step(require_trigger=True)


def test_a_step_is_cancelled() -> None:
    """At once; the next one works."""
    with pair() as (one, two):
        control = one.step(wait=False, timeout=1000)
        assert control.cancel()
        assert control.stage is AveragingStage.FINISHED
        until(lambda: not one._core().looking)
        coming = two.step(wait=False, timeout=LONG_S)
        one.step(timeout=LONG_S)
        coming.result(LONG_S)
        assert value(one) == value(two) == [0.5] * 4


def test_group_bits_are_read_and_set() -> None:
    """At once, or by a future; they change after a round."""
    with pair(initial_group_bits="00") as (one, two):
        assert one.get_group_bits() == one.get_group_bits(wait=False).result(LONG_S) == "00"
        assert one.set_group_bits("11") is None
        two.set_group_bits("11", wait=False).result(LONG_S)
        coming = two.step(wait=False, timeout=LONG_S)
        one.step(timeout=LONG_S)
        coming.result(LONG_S)
        assert {one.get_group_bits(), two.get_group_bits()} == {"10", "11"}
        with pytest.raises(ConfigError, match="group_bits must be a text of 0 and 1"):
            one.set_group_bits("2")


def test_two_names_of_one_argument() -> None:
    """`min_matchmaking_time` is `averaging_expiration`; both at once are refused."""
    with shoal.DHT(start=True) as dht:
        options: dict[str, Any] = {"start": True, "prefix": "p"}
        with pytest.raises(ConfigError, match="two names of one thing"):
            shoal.DecentralizedAverager(
                [torch.ones(1)], dht, averaging_expiration=5.0, min_matchmaking_time=5.0, **options
            )
        with pytest.raises(ConfigError, match="lower request_timeout or raise min_matchmaking_time"):
            shoal.DecentralizedAverager([torch.ones(1)], dht, min_matchmaking_time=2.0, request_timeout=3.0, **options)
        one = shoal.DecentralizedAverager(
            [torch.ones(1)], dht, min_matchmaking_time=0.4, request_timeout=0.2, **options
        )
        with pytest.raises(shoal.RoundFailed):
            one.step(timeout=0.5)


def test_coroutines_run_in_shoals_thread() -> None:
    """With the node of the DHT; as hivemind's `run_coroutine`, without pickling."""

    async def both(dht: shoal.DHT, node: Any) -> tuple[shoal.PeerID, Any]:
        await node.store("key", "value", shoal.get_dht_time() + 60)
        return dht.peer_id, (await node.get("key")).value

    async def breaks(dht: shoal.DHT, node: Any) -> None:
        raise KeyError("mine")

    dht = shoal.DHT(start=True)
    assert dht.run_coroutine(both) == (dht.peer_id, "value")
    assert dht.run_coroutine(both, return_future=True).result(LONG_S) == (dht.peer_id, "value")
    with pytest.raises(KeyError, match="mine"):
        dht.run_coroutine(breaks)
    dht.shutdown()
    with pytest.raises(ClosedError):
        dht.run_coroutine(both)


def test_a_step_ends_at_its_timeout_while_a_thread_holds_the_tensors() -> None:
    """With the thread's name in the reason, untouched; once they are free the next step works."""
    with pair() as (one, two):
        inside, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with one.get_tensors():
                inside.set()
                leave.wait(LONG_S)

        thread = threading.Thread(target=hold, name="holder")
        thread.start()
        assert inside.wait(LONG_S)
        with pytest.raises(shoal.RoundFailed, match=r"a get_tensors\(\) block in thread 'holder' held them"):
            one.step(wait=False, timeout=0.5).result(LONG_S)
        leave.set()
        thread.join(LONG_S)
        assert value(one) == [1.0] * 4
        coming = two.step(wait=False, timeout=LONG_S)
        one.step(timeout=LONG_S)
        coming.result(LONG_S)


def test_a_thread_that_holds_the_tensors_nearly_always_starves_no_step() -> None:
    """It leaves its block and enters the next at once: a step that waits comes in between."""
    with pair() as (one, two):
        pause, over = threading.Event(), threading.Event()

        def busy() -> None:
            while not over.is_set():
                with two.get_tensors():
                    pause.wait(0.01)

        thread = threading.Thread(target=busy)
        thread.start()
        try:
            coming = two.step(wait=False, timeout=LONG_S)
            one.step(timeout=LONG_S)
            coming.result(LONG_S)
        finally:
            over.set()
            thread.join(LONG_S)
        assert value(one) == value(two) == [0.5] * 4


def test_tensors_that_are_held_are_not_waited_for_in_shoals_own_thread() -> None:
    """An event subscriber gets them if they are free, and `LocalError` at once if not: nothing could free them."""
    with pair() as (one, _):
        got: list[object] = []

        def look() -> None:
            try:
                with one.get_tensors() as tensors:
                    got.append(len(tensors))
            except LocalError as error:
                got.append(str(error))

        with one.get_tensors():
            one.dht.loop_thread.call_soon(look)
            until(lambda: got)
        one.dht.loop_thread.call_soon(look)
        until(lambda: len(got) == 2)
        assert got == ["no access to the tensors within 0 s: a get_tensors() block in thread 'MainThread' held them", 1]
