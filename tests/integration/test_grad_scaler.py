"""torch's GradScaler over a `shoal.Optimizer`: each peer scales for itself, and what is averaged is unscaled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from tests.integration.test_runtime import two_peers
from tests.integration.workers import LONG_S

BATCH, EPOCHS, SCALE = 4, 4, 1024.0


Step = Callable[[torch.amp.GradScaler, shoal.Optimizer], object]
WAYS: dict[str, Step] = {
    "scaler.step(swarm)": lambda scaler, swarm: scaler.step(swarm),
    "scaler.step(swarm, batch_size=...)": lambda scaler, swarm: scaler.step(swarm, batch_size=BATCH),
    "swarm.step(grad_scaler=scaler)": lambda scaler, swarm: swarm.step(grad_scaler=scaler),
}


def train(
    peer: int,
    dht: shoal.DHT,
    dtype: torch.dtype,
    both: Barrier,
    *,
    clip: bool,
    step: Step = WAYS["scaler.step(swarm)"],
    kind: type[torch.amp.GradScaler] = torch.amp.GradScaler,
    parameters: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], float]:
    """The weights at the end of the run, and the scale. The third batch of peer 1 has infinite gradients.

    Peer 0 begins after it, at `both`: a fast peer 0 would end the run before peer 1 comes to its third batch.
    """
    generator = torch.Generator().manual_seed(peer)
    model = torch.nn.Linear(3, 2).to(parameters)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    scaler = kind("cpu", init_scale=SCALE, growth_interval=10**6)
    with shoal.Optimizer(
        dht=dht,
        run_id="scaled",
        target_batch_size=4 * BATCH,
        batch_size_per_step=BATCH,
        params=model.parameters(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    ) as swarm:
        swarm.announce_end(EPOCHS)
        number = 0
        if peer == 0:
            both.wait()
        while not swarm.finished:
            inputs = torch.randn(BATCH, 3, generator=generator).to(parameters)
            with torch.autocast("cpu", dtype):
                loss = model(inputs).float().square().mean()
            if (peer, number) == (1, 2):
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(swarm)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            step(scaler, swarm)
            scaler.update()
            swarm.zero_grad()
            if (peer, number) == (1, 2):
                both.wait()
            number += 1
        assert swarm.local_epoch == EPOCHS
        return [parameter.detach().clone() for parameter in model.parameters()], scaler.get_scale()


def check(dtype: torch.dtype, *, clip: bool = False, **options: Any) -> None:
    """Both peers have equal weights; the batch with infinite gradients is left out, by its peer."""
    both = Barrier(2, timeout=LONG_S)
    with two_peers() as peers, ThreadPoolExecutor() as threads:
        runs = [threads.submit(train, peer, dht, dtype, both, clip=clip, **options) for peer, dht in enumerate(peers)]
        (weights, scale), (others, other_scale) = (run.result() for run in runs)
    assert all(map(torch.equal, weights, others))
    assert all(bool(torch.isfinite(each).all()) for each in weights)
    assert 0 < float(weights[0].abs().max()) < 0.2, "the average was not unscaled"
    assert (scale, other_scale) == (SCALE, SCALE / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", [False, True])
def test_a_grad_scaler_does_not_work(dtype: torch.dtype, *, clip: bool) -> None:
    """So the docs said."""
    check(dtype, clip=clip)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, shoal.GradScaler])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_given_to_step_as_hivemind_has_it(way: str, kind: type[torch.amp.GradScaler]) -> None:
    """And as torch has it: the same."""
    check(torch.float16, step=WAYS[way], kind=kind)


def test_parameters_in_float16() -> None:
    """With shoal's; torch's own refuses their gradients."""
    check(torch.float16, kind=shoal.GradScaler, parameters=torch.float16)
    with pytest.raises(ValueError, match="FP16"), shoal.DHT(start=True) as dht:
        train(1, dht, torch.float16, Barrier(1), clip=False, parameters=torch.float16)


def test_a_scaled_closure_and_what_is_no_scaler() -> None:
    """The result of the closure is returned; anything else is refused by name."""
    model = torch.nn.Linear(3, 2)
    scaler = shoal.GradScaler("cpu", init_scale=SCALE)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(BATCH, 3)).square().mean()
        scaler.scale(loss).backward()
        return torch.tensor(7.0)

    with (
        shoal.DHT(start=True) as dht,
        shoal.Optimizer(
            dht=dht, run_id="scaled", target_batch_size=BATCH, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
        ) as swarm,
    ):
        with torch.no_grad():
            assert swarm.step(closure, batch_size=BATCH, grad_scaler=scaler) == 7
        scaler.update()
        assert swarm.local_epoch == 1
        with pytest.raises(ConfigError, match=r"grad_scaler must be a torch.amp.GradScaler, got int"):
            swarm.step(batch_size=BATCH, grad_scaler=4)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="closure must be a function, got 4"):
            swarm.step(4, grad_scaler=scaler)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["shoal's scaler.step(swarm)", "swarm.step(grad_scaler=scaler)", "with a closure"])
def test_a_left_out_batch_with_reused_gradients_ended_the_training(way: str) -> None:
    """Its infinite gradients stayed in `.grad`: no later batch counted, without a word, and the scale fell to 0."""
    model = torch.nn.Linear(3, 2)
    scaler = shoal.GradScaler("cpu", init_scale=SCALE) if "shoal" in way else torch.amp.GradScaler("cpu", SCALE)
    with (
        shoal.DHT(start=True) as dht,
        shoal.Optimizer(
            dht=dht,
            run_id="reused",
            target_batch_size=BATCH,
            batch_size_per_step=BATCH,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            reuse_grad_buffers=True,
        ) as swarm,
    ):
        for factor in (1.0, torch.inf, 1.0, 1.0):

            def closure(factor: float = factor) -> torch.Tensor:
                loss: torch.Tensor = model(torch.ones(BATCH, 3)).square().mean() * factor
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                return loss

            if way == "with a closure":
                swarm.step(closure, grad_scaler=scaler)
            else:
                closure()
                scaler.step(swarm) if "shoal" in way else swarm.step(grad_scaler=scaler)
            scaler.update()
        assert (swarm.local_epoch, scaler.get_scale()) == (3, SCALE / 2)
