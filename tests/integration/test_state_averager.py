"""`TrainingStateAverager`, as programs written for hivemind use it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import ConfigError, LocalError, RoundFailed
from shoal.events import Warned
from tests.integration.test_runtime import two_peers
from tests.integration.workers import LONG_S, until


class Peer:
    """A model with other values on each peer, an SGD that halves its rate with each epoch, and an averager."""

    def __init__(self, dht: shoal.DHT, seed: int, *, empty: bool = False, **options: Any) -> None:
        self.weight = torch.nn.Parameter(torch.full((3,), float(seed)))
        groups: list[dict[str, Any]] = [{"params": [self.weight]}, *([{"params": []}] if empty else [])]
        self.averager = shoal.TrainingStateAverager(
            dht=dht,
            prefix="s",
            start=True,
            target_group_size=2,
            params=groups,
            optimizer=partial(torch.optim.SGD, lr=1.0),
            scheduler=lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5),
            **options,
        )

    def step(self, **options: Any) -> Any:
        """With a gradient of ones."""
        self.weight.grad = torch.ones(3)
        return self.averager.step(optimizer_step=True, zero_grad=True, **options)


def values(*peers: Peer) -> list[float]:
    """The first number of the weights of each."""
    return [float(peer.weight.detach()[0]) for peer in peers]


def both(peers: tuple[Peer, Peer], **options: Any) -> list[Any]:
    """One round of both."""
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(each.averager.step, averaging_round=True, **options) for each in peers]
        return [call.result() for call in calls]


def test_steps_epochs_and_averages() -> None:
    """Its own step, the schedule, which follows the epoch, and a round; each only where it is asked for."""
    with two_peers() as (first, second):
        peers = one, two = Peer(first, 0), Peer(second, 1, sync_epoch_when_averaging=True)
        assert one.step() is None
        assert (values(one), one.weight.grad, one.averager.local_epoch) == ([-1.0], None, 0)
        one.step(increment_epoch=True)
        assert (values(one), one.averager.optimizer.param_groups[0]["lr"]) == ([-2.0], 0.5)
        control = one.averager.schedule_step(timeout=LONG_S, gather=one.averager.local_epoch)
        with ThreadPoolExecutor() as threads:
            other = threads.submit(two.averager.step, averaging_round=True)
            gathered = one.averager.step(averaging_round=True, averaging_control=control)
            assert gathered == other.result() == {first.peer_id: 1, second.peer_id: 0}
        assert values(one, two) == [-0.5, -0.5]
        with pytest.raises(LocalError, match="averaging_control is of a round that was begun"):
            one.averager.step(averaging_round=True, averaging_control=control)
        assert (two.averager.local_epoch, two.averager.optimizer.param_groups[0]["lr"]) == (1, 0.5)
        assert len(both(peers, averaging_opts={"timeout": LONG_S})[0]) == 2


@pytest.mark.parametrize("delta", [False, True])
def test_a_round_in_the_background(*, delta: bool) -> None:
    """It is applied by a later call; changes since it began are kept with the delta rule."""
    with two_peers() as (first, second):
        peers = one, two = Peer(first, 0, delta_rule_averaging=delta), Peer(second, 2, delta_rule_averaging=delta)
        assert both(peers, delay_averaging=True) == [None, None]
        one.step(apply_delayed_updates=False)
        until(lambda: not one.averager.averaging_in_progress and not two.averager.averaging_in_progress)
        assert values(one, two) == [-1.0, 2.0]
        for each in peers:
            assert len(each.averager.step(wait_for_delayed_updates=True)) == 2
        assert values(one, two) == [0.0 if delta else 1.0, 1.0]


def test_a_failed_round_changes_nothing() -> None:
    """At once it is an error; in the background a warning."""
    said: list[str] = []
    with shoal.DHT(start=True) as dht:
        dht.events.subscribe(lambda event: said.append(event.message) if isinstance(event, Warned) else None)
        one = Peer(dht, 3)
        with pytest.raises(RoundFailed):
            one.averager.step(averaging_round=True, averaging_opts={"timeout": 0.2})
        one.averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"timeout": 0.2})
        with pytest.raises(ConfigError, match="averaging_round=True needs the end of the round before"):
            one.averager.step(averaging_round=True, wait_for_delayed_updates=False)
        assert one.averager.step(wait_for_delayed_updates=True) is None
        until(lambda: len(said) == 1)
        assert said[0].startswith("a round in the background failed")
        assert values(one) == [3.0]


@pytest.mark.parametrize("empty", [False, True])
def test_a_newcomer_takes_over_the_epoch(*, empty: bool) -> None:
    """With parameters and rates; a state of an earlier epoch is not taken. An empty group was "out of range"."""
    with two_peers() as (first, second):
        one, two = Peer(first, 5, empty=empty), Peer(second, 1, empty=empty)
        one.step(increment_epoch=True)
        until(lambda: two.averager.load_state_from_peers(timeout=LONG_S))
        assert (values(two), two.averager.local_epoch) == ([4.0], 1)
        for each in (one, two):
            each.step(increment_epoch=True)
        assert values(one, two) == [3.5, 3.5]
        two.averager.step(increment_epoch=True)
        assert not two.averager.load_state_from_peers(timeout=LONG_S)


def test_what_cannot_be_done_is_named() -> None:
    """With what to do instead."""
    with shoal.DHT(start=True) as dht:
        with pytest.raises(ConfigError, match="custom_gradients=True has no counterpart"):
            Peer(dht, 0, custom_gradients=True)
        with pytest.raises(ConfigError, match="offload_optimizer must be True or False, got 'no'"):
            Peer(dht, 0, offload_optimizer="no")
        one = Peer(dht, 0, offload_optimizer=False, reuse_tensors=None, performance_ema_alpha=0.1)
        one.averager.step(delay_optimizer_step=True)
        with pytest.raises(ConfigError, match="averaging_opts and averaging_control need averaging_round=True"):
            one.averager.step(averaging_opts={"weight": 1})
        with pytest.raises(TypeError, match="unexpected keyword argument 'average'"):
            one.averager.step(average=True)
