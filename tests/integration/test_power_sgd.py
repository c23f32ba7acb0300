"""`PowerSGDGradientAverager`, alone and in a `shoal.Optimizer`, as programs written for hivemind use it."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import shoal
from shoal.compression import ErrorFeedback, Float16Compression, Uniform8BitQuantization
from shoal.errors import ConfigError, RoundFailed, SchemaMismatch
from shoal.strategies.low_rank import LowRank
from tests.integration.test_runtime import two_peers
from tests.integration.workers import LONG_S, until

STEPS = 6


def model() -> list[torch.nn.Parameter]:
    """A matrix that is worth factors of rank 2, and a vector; in float64."""
    return [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((12, 10), (5,))]


def gradients(peer: int, step: int) -> list[torch.Tensor]:
    """Those of one batch."""
    draw = torch.Generator().manual_seed(100 * peer + step)
    return [torch.randn(each.shape, dtype=each.dtype, generator=draw) for each in model()]


def made(dht: shoal.DHT, parameters: list[torch.nn.Parameter], **options: Any) -> shoal.PowerSGDGradientAverager:
    """Over these parameters."""
    options = {"averager_rank": 2, "target_group_size": 2, "min_compression_ratio": 0.5, **options}
    return shoal.PowerSGDGradientAverager(parameters, dht=dht, prefix="g", start=True, **options)


def take(
    averager: shoal.PowerSGDGradientAverager, given: list[torch.Tensor], samples: int = 4, **options: Any
) -> list[torch.Tensor]:
    """One step with these gradients: the average as it is used."""
    for parameter, mine in zip(averager.parameters, given, strict=True):
        parameter.grad = mine.clone()
    averager.accumulate_grads_(samples)
    averager.step(timeout=LONG_S, **options)
    with averager.use_averaged_gradients():
        return [gradient.clone() for parameter in averager.parameters if (gradient := parameter.grad) is not None]


def expected(samples: tuple[int, int]) -> list[list[torch.Tensor]]:
    """The averages of one process that has the gradients of both, from the third step on: see `test_two_peers`."""
    low = LowRank(model(), rank=2, min_compression_ratio=0.5)
    averages = []
    for step in range(STEPS):
        both = zip(gradients(0, step), gradients(1, step), strict=True)
        sums = [(a * samples[0] + b * samples[1]) for a, b in both]
        low.shrink(sums)
        for each in low.tensors(sums):
            each.div_(sum(samples))
        low.expand(sums, 0)
        low.counted()
        low.advance()
        averages.append(sums)
    return averages


@pytest.mark.parametrize("samples", [(4, 4), (1, 7)])
def test_two_peers_make_what_one_process_makes(samples: tuple[int, int]) -> None:
    """In each step; batches of different sizes count by their samples, also in what factors have lost."""
    with two_peers() as peers, ThreadPoolExecutor() as threads:
        averagers = [made(dht, model()) for dht in peers]
        for step, wanted in enumerate(expected(samples)):
            runs = [
                threads.submit(take, each, gradients(peer, step), samples[peer], gather=peer)
                for peer, each in enumerate(averagers)
            ]
            ours, theirs = (run.result() for run in runs)
            for mine, other, want in zip(ours, theirs, wanted, strict=True):
                torch.testing.assert_close(mine, want, rtol=0, atol=1e-10)
                torch.testing.assert_close(other, want, rtol=0, atol=1e-10)
        assert averagers[0]._digest == averagers[1]._digest


def test_a_peer_that_missed_a_round_meets_the_others_again() -> None:
    """Their bases differ, so that round uses drawn ones; the next one does not."""
    with two_peers() as peers, ThreadPoolExecutor() as threads:
        averagers = [made(dht, model()) for dht in peers]

        def both(step: int) -> list[list[torch.Tensor]]:
            runs = [threads.submit(take, each, gradients(peer, step)) for peer, each in enumerate(averagers)]
            return [run.result() for run in runs]

        both(0)
        fresh = LowRank(model(), rank=2, min_compression_ratio=0.5)
        averagers[1]._low.use(fresh.bases)
        averagers[1]._remember()  # as of a peer that has just started
        for step in (1, 2):
            ours, theirs = both(step)
            assert all(map(torch.equal, ours, theirs))
            assert averagers[0]._digest == averagers[1]._digest


def test_a_failed_step_keeps_gradients_and_what_was_lost() -> None:
    """Alone nobody is met: the next step has all of it."""
    with two_peers() as (first, second), ThreadPoolExecutor() as threads:
        averagers = [made(first, model()), made(second, model())]
        for step in range(2):
            runs = [threads.submit(take, each, gradients(peer, step)) for peer, each in enumerate(averagers)]
            for run in runs:
                run.result()
        kept = averagers[0]._low._matrices[0].residual
        assert kept is not None
        kept = kept.clone()
        for parameter, gradient in zip(averagers[0].parameters, gradients(0, 2), strict=True):
            parameter.grad = gradient
        averagers[0].accumulate_grads_(4)
        with pytest.raises(RoundFailed):
            averagers[0].step(timeout=1.0, allow_retries=False)
        now = averagers[0]._low._matrices[0].residual
        assert now is not None
        assert torch.equal(now, kept)
        assert averagers[0].local_samples_accumulated == 4


def test_steps_that_are_scheduled_and_not_waited_for() -> None:
    """What was gathered is what was given; the gradients are there once the step has ended."""
    with two_peers() as peers:
        averagers = [made(dht, model()) for dht in peers]
        for step in range(3):
            controls = [each.schedule_step(gather={"peer": peer}) for peer, each in enumerate(averagers)]
            for peer, (averager, control) in enumerate(zip(averagers, controls, strict=True)):
                for parameter, gradient in zip(averager.parameters, gradients(peer, step), strict=True):
                    parameter.grad = gradient
                averager.accumulate_grads_(4)
                averager.step(control=control, wait=False)
            gathered = [control.result(LONG_S) for control in controls]
            assert gathered[0] == gathered[1] == {dht.peer_id: {"peer": peer} for peer, dht in enumerate(peers)}
            with averagers[0].use_averaged_gradients() as ours, averagers[1].use_averaged_gradients() as theirs:
                assert all(map(torch.equal, ours, theirs))


@pytest.mark.long
def test_what_does_not_fit_is_refused() -> None:
    """Another rank is another schema; feedback is there already."""
    with two_peers() as (first, second), ThreadPoolExecutor() as threads:
        with pytest.raises(ConfigError, match="compression=ErrorFeedback does not go with PowerSGD"):
            made(first, model(), compression=ErrorFeedback(Uniform8BitQuantization()))
        pair = made(first, model(), compression=Float16Compression()), made(second, model(), averager_rank=1)
        runs = [threads.submit(take, each, gradients(0, 0), allow_retries=False) for each in pair]
        with pytest.raises((SchemaMismatch, RoundFailed)):
            runs[0].result()
        with pytest.raises((SchemaMismatch, RoundFailed)):
            runs[1].result()


def test_an_optimizer_averages_factors() -> None:
    """The loss falls, both peers hold the same weights, and a round takes a fraction of the bytes."""

    def train(dht: shoal.DHT, factory: Any, peer: int) -> tuple[list[torch.Tensor], float, float]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
        goal, first = torch.randn(64, 64, generator=torch.Generator().manual_seed(9)) / 8, copy.deepcopy(net)
        draw = torch.Generator().manual_seed(peer)
        with shoal.Optimizer(
            dht=dht,
            run_id="low",
            target_batch_size=64,
            batch_size_per_step=32,
            params=net.parameters(),
            optimizer=partial(torch.optim.AdamW, lr=3e-3),
            grad_averager_factory=factory,
            grad_compression=Float16Compression(),
        ) as swarm:
            swarm.announce_end(60)
            until(lambda: len(swarm.status().peers) == 2)
            while not swarm.finished:
                inputs = torch.randn(32, 64, generator=draw)
                loss = (net(inputs) - inputs @ goal).square().mean()
                torch.autograd.backward(loss)
                swarm.step()
                swarm.zero_grad()
        inputs = torch.randn(1000, 64, generator=draw)
        with torch.no_grad():
            after, before = (float((made - inputs @ goal).square().mean()) for made in (net(inputs), first(inputs)))
        return [each.detach() for each in net.parameters()], before, after

    with two_peers() as peers, ThreadPoolExecutor() as threads:
        factory = shoal.PowerSGDGradientAverager.get_factory(averager_rank=4)
        runs = [threads.submit(train, dht, factory, peer) for peer, dht in enumerate(peers)]
        (ours, before, after), (theirs, *_) = (run.result() for run in runs)
    assert all(map(torch.equal, ours, theirs))
    assert after < 0.8 * before
