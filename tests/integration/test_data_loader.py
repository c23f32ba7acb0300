"""`PeerSampler` with a real optimizer and a loader that has processes of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

import shoal

BATCH, TARGET, STEPS = 4, 8, 30


def test_a_loader_with_workers_draws_what_the_steps_deal() -> None:
    """A pass gives each sample once, but for what was drawn before the first step and ahead of it."""
    data: Any = torch.arange(200.0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    with (
        shoal.DHT(start=True) as dht,
        shoal.Optimizer(
            dht=dht,
            run_id="data",
            target_batch_size=TARGET,
            batch_size_per_step=BATCH,
            optimizer=torch.optim.SGD([parameter], lr=1e-3),
        ) as swarm,
    ):
        sampler = shoal.data.PeerSampler(data, swarm, endless=True)
        drawn: list[float] = []
        loader = DataLoader(
            data, BATCH, sampler=sampler, num_workers=2, prefetch_factor=1, multiprocessing_context="spawn"
        )
        for batch in loader:
            drawn += batch.tolist()
            (parameter * batch).mean().backward()
            swarm.step()
            swarm.zero_grad()
            if swarm.local_epoch == STEPS:
                break
        assert swarm.dealt[-1].stop == len(drawn) == STEPS * TARGET
        state = sampler.state_dict()
        ahead = 2 * BATCH
        assert state["place"] <= TARGET + ahead
        assert state["ahead"] <= TARGET + ahead
        assert len(set(drawn[: len(data)])) >= len(data) - state["place"]
