"""torch's GradScaler over a `shoal.Optimizer`: each peer scales for itself, and what is averaged is unscaled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch

import shoal
from tests.integration.test_runtime import two_peers
from tests.integration.workers import LONG_S

BATCH, EPOCHS, SCALE = 4, 4, 1024.0


def train(
    peer: int, dht: shoal.DHT, dtype: torch.dtype, both: Barrier, *, clip: bool
) -> tuple[list[torch.Tensor], float]:
    """The weights at the end of the run, and the scale. The third batch of peer 1 has infinite gradients.

    Peer 0 begins after it, at `both`: a fast peer 0 would end the run before peer 1 comes to its third batch.
    """
    generator = torch.Generator().manual_seed(peer)
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**6)
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
            inputs = torch.randn(BATCH, 3, generator=generator)
            with torch.autocast("cpu", dtype):
                loss = model(inputs).float().square().mean()
            if (peer, number) == (1, 2):
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(swarm)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(swarm)
            scaler.update()
            swarm.zero_grad()
            if (peer, number) == (1, 2):
                both.wait()
            number += 1
        assert swarm.local_epoch == EPOCHS
        return [parameter.detach().clone() for parameter in model.parameters()], scaler.get_scale()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", [False, True])
def test_a_grad_scaler_does_not_work(dtype: torch.dtype, *, clip: bool) -> None:
    """So the docs said. Both peers have equal weights; the batch with infinite gradients is left out, by its peer."""
    both = Barrier(2, timeout=LONG_S)
    with two_peers() as peers, ThreadPoolExecutor() as threads:
        runs = [threads.submit(train, peer, dht, dtype, both, clip=clip) for peer, dht in enumerate(peers)]
        (weights, scale), (others, other_scale) = (run.result() for run in runs)
    assert all(map(torch.equal, weights, others))
    assert all(bool(torch.isfinite(each).all()) for each in weights)
    assert 0 < float(weights[0].abs().max()) < 0.2, "the average was not unscaled"
    assert (scale, other_scale) == (SCALE, SCALE / 2)
