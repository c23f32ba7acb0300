"""`GradientAverager`, as programs written for hivemind use it: their own loop, and their own optimizer's step."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import ClosedError, ConfigError, LocalError, RoundFailed
from shoal.events import Warned
from tests.integration.test_pages import last_lines_of_two, python_blocks
from tests.integration.test_runtime import two_peers
from tests.integration.workers import LONG_S, until


def model() -> torch.nn.Linear:
    """The same at all peers, in float64, so that sums in another order are equal to 1e-12."""
    made = torch.nn.Linear(3, 2).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    return made


def batches(seed: int, sizes: list[int]) -> list[torch.Tensor]:
    """The inputs of one peer for one step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 3, dtype=torch.float64, generator=generator) for size in sizes]


def loss_of(net: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """A mean over the batch."""
    outputs: torch.Tensor = net(inputs)
    return outputs.square().sum(1).mean()


def made(dht: shoal.DHT, net: torch.nn.Linear, **options: Any) -> shoal.GradientAverager:
    """Over all its parameters."""
    return shoal.GradientAverager(net.parameters(), dht=dht, prefix="g", start=True, target_group_size=2, **options)


def accumulate(averager: shoal.GradientAverager, net: torch.nn.Linear, inputs: list[torch.Tensor]) -> None:
    """Backward of each batch."""
    for each in inputs:
        if not averager.reuse_grad_buffers:
            net.zero_grad()
        loss_of(net, each).backward()  # type: ignore[no-untyped-call]
        averager.accumulate_grads_(len(each))


SIZES = [[4, 4], [1, 7, 2]]


def train(peer: int, dht: shoal.DHT, sizes: list[int], options: dict[str, Any]) -> list[torch.Tensor]:
    """Three steps of Adam."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    with made(dht, net, **options) as averager:
        for step in range(3):
            accumulate(averager, net, batches(2 * step + peer, sizes))
            assert len(averager.step(timeout=LONG_S)) == 2
            with averager.use_averaged_gradients() as averaged:
                assert averaged[0].data_ptr() == net.weight.grad.data_ptr()  # type: ignore[union-attr]
                optimizer.step()
            assert (averager.local_samples_accumulated, averager.local_times_accumulated) == (0, 0)
        return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (SIZES, {}),
        (SIZES, {"accumulate_grads_on": "cpu"}),
        ([[5, 5], [3, 3]], {"reuse_grad_buffers": True}),
    ],
)
def test_two_loops_equal_one_on_all_batches(sizes: list[list[int]], options: dict[str, Any]) -> None:
    """Bit by bit between the peers; and to rounding a single process that has the batches of both."""
    with two_peers() as dhts, ThreadPoolExecutor() as threads:
        runs = [threads.submit(train, peer, dht, sizes[peer], options) for peer, dht in enumerate(dhts)]
        one, other = (run.result() for run in runs)
    assert all(map(torch.equal, one, other))
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for step in range(3):
        net.zero_grad()
        union = torch.cat([each for peer in (0, 1) for each in batches(2 * step + peer, sizes[peer])])
        loss_of(net, union).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for mine, alone in zip(one, net.parameters(), strict=True):
        torch.testing.assert_close(mine, alone.detach(), rtol=1e-12, atol=1e-12)


def test_a_scheduled_step_and_one_in_the_background() -> None:
    """Their control is handed on; each is for one step, and a step under way refuses others."""
    with two_peers() as (first, second):
        nets = model(), model()
        one, two = made(first, nets[0]), made(second, nets[1])
        accumulate(one, nets[0], batches(0, [4]))
        accumulate(two, nets[1], batches(1, [4]))
        control = one.schedule_step(scheduled_time=shoal.get_dht_time(), timeout=LONG_S, gather="one")
        assert one.step(control=control, wait=False) is control
        assert one.local_samples_accumulated == 0
        with pytest.raises(LocalError, match="control is of a step that was taken"):
            one.step(control=control)
        for early in (one.step, one.load_accumulators_into_averager_, one.use_averaged_gradients().__enter__):
            with pytest.raises(LocalError, match="the step before is under way"):
                early()
        accumulate(one, nets[0], batches(2, [3]))  # for the next step
        assert two.step(timeout=LONG_S, gather="two") == control.result(LONG_S)
        assert sorted(control.result().values()) == ["one", "two"]
        assert one.local_samples_accumulated == 3
        with one.use_averaged_gradients() as mine, two.use_averaged_gradients() as theirs:
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("wait", [False, True])
def test_a_failed_step_keeps_the_gradients(*, wait: bool, reuse: bool) -> None:
    """Alone: its accumulators have them, also those that came meanwhile; and there is no average to use."""
    with shoal.DHT(start=True) as dht:
        net, again = model(), model()
        averager = made(dht, net, reuse_grad_buffers=reuse)
        accumulate(averager, net, batches(0, [4]))
        if wait:
            with pytest.raises(RoundFailed):
                averager.step(timeout=0.3)
        else:
            control = averager.step(timeout=0.3, wait=False)
            assert not control.done()
            assert averager.local_samples_accumulated == 0
        accumulate(averager, net, batches(1, [4]))
        if not wait:
            with pytest.raises(RoundFailed):
                control.result(LONG_S)
        with pytest.raises(LocalError, match="the last step made no average"), averager.use_averaged_gradients():
            pass
        assert (averager.local_samples_accumulated, averager.local_times_accumulated) == (8, 2)
        averager.load_accumulators_into_averager_()  # what hivemind's users do: go on alone
        with averager.use_averaged_gradients() as own:
            loss_of(again, torch.cat([*batches(0, [4]), *batches(1, [4])])).backward()  # type: ignore[no-untyped-call]
            for mine, theirs in zip(own, again.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs.grad, rtol=1e-12, atol=1e-12)


def test_a_step_that_is_given_up_leaves_the_next_one_free() -> None:
    """By a limit for a prepared step, or by `cancel`: the gradients count in the next step."""
    with two_peers() as (first, second):
        nets = model(), model()
        one, two = made(first, nets[0]), made(second, nets[1])
        accumulate(one, nets[0], batches(0, [4]))
        with pytest.raises(RoundFailed, match=r"no average within timeout=0.2 s"):
            one.step(control=one.schedule_step(), timeout=0.2)
        assert one.step(wait=False).cancel()
        with ThreadPoolExecutor() as threads:
            other = threads.submit(two.step, timeout=LONG_S, gather="none")  # has no gradients, and does not count
            assert len(one.step(timeout=LONG_S)) == 2
            other.result()
        with one.use_averaged_gradients() as mine, two.use_averaged_gradients() as theirs:
            assert all(map(torch.equal, mine, theirs))
            net = model()
            loss_of(net, batches(0, [4])[0]).backward()  # type: ignore[no-untyped-call]
            for average, alone in zip(mine, net.parameters(), strict=True):
                torch.testing.assert_close(average, alone.grad, rtol=1e-12, atol=1e-12)
        one.shutdown()
        with pytest.raises(ClosedError):
            one.step()


def test_what_is_forgotten_is_a_warning() -> None:
    """Sums that were averaged already and are added to; an average that nobody used. `warn=False`: none."""
    said: list[str] = []
    with two_peers() as (first, second), ThreadPoolExecutor() as threads:
        nets = model(), model()
        one, two = made(first, nets[0]), made(second, nets[1], warn=False)
        for dht in (first, second):
            dht.events.subscribe(lambda event: said.append(event.message) if isinstance(event, Warned) else None)

        def step(net: torch.nn.Linear, averager: shoal.GradientAverager, seed: int) -> None:
            accumulate(averager, net, batches(seed, [4]))
            averager.step(timeout=LONG_S, reset_accumulators=False)

        for seed in range(2):
            both = [threads.submit(step, *each, seed) for each in zip(nets, (one, two), strict=True)]
            assert [each.result() for each in both] == [None, None]
        until(lambda: len(said) == 2)
        assert "count again" in said[0]
        assert "was not used" in said[1]
        assert one.local_samples_accumulated == 8
        one.reset_accumulated_grads_()
        one.notify_used_averaged_gradients()
        accumulate(one, nets[0], batches(0, [4]))
        with pytest.raises(RoundFailed):
            one.step(timeout=0.2)
        assert len(said) == 2


def test_it_is_dropped_with_its_last_reference() -> None:
    """Also after a step, whose control it keeps: its prefix is free again, and no cycle collector is needed."""
    gc.disable()
    try:
        with two_peers() as (first, second):
            nets = model(), model()
            one, two = made(first, nets[0]), made(second, nets[1])
            accumulate(one, nets[0], batches(0, [4]))
            control = one.step(wait=False)
            two.step(timeout=LONG_S)
            assert len(control.result(LONG_S)) == 2
            gone = weakref.ref(one)
            del one
            until(lambda: gone() is None)
    finally:
        gc.enable()


def test_wrong_arguments_are_named() -> None:
    """And a call that comes too early."""
    dht, net = shoal.DHT(start=False), model()
    frozen = model().requires_grad_(False)
    make = partial(shoal.GradientAverager, dht=dht, prefix="g", start=False)
    wrongs: list[Any] = [net.weight, [], frozen.parameters(), None]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="parameters must be tensors that require a gradient"):
            make(wrong)
    with pytest.raises(ConfigError, match="accumulate_grads_on must be a device, got 'gpu'"):
        make(net.parameters(), accumulate_grads_on="gpu")
    with pytest.raises(ConfigError, match="averaged_grads must be one tensor for each parameter"):
        make(net.parameters(), averaged_grads=[torch.zeros(2, 3)])
    with pytest.raises(TypeError, match="unexpected keyword argument 'group_size'"):
        make(net.parameters(), group_size=2)
    averager = make(net.parameters())
    with pytest.raises(LocalError, match="no parameter has a gradient"):
        averager.accumulate_grads_(4)
    with pytest.raises(LocalError, match="no averaged gradients yet"), averager.use_averaged_gradients():
        pass
    loss_of(net, batches(0, [4])[0]).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match="batch_size must be a whole number of at least 1, got 0"):
        averager.accumulate_grads_(0)
    with pytest.raises(LocalError, match="not started"):
        averager.step()
    with pytest.raises(ConfigError, match="weight cannot be given to schedule_step"):
        averager.schedule_step(weight=1.0)


@pytest.mark.long
def test_two_processes_run_the_program_of_the_page(tmp_path: Path) -> None:
    """A loop of its own, as hivemind's users have: both end with the same bits."""
    code = next(block for block in python_blocks("docs/how-to/own-steps.md") if "GradientAverager" in block)
    said = last_lines_of_two(tmp_path, code)
    assert said[0] == said[1]
    assert said[0].startswith("20 steps, weights ")
