"""What the ranks of a group do with unusual models (see `tests.sim.unusual_kit`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

import shoal
import shoal.zero
from shoal.errors import ConfigError
from shoal.integrations.ddp import GroupOptimizer
from tests.integration.scripts import digest
from tests.sim.unusual_kit import MODELS, Unusual, made, optimizer_of, set_gradients

BATCHES = 12


def grouped() -> dict[str, Any]:
    """Train each one as a `GroupOptimizer`; the epoch and the bits after the last batch."""
    rank = dist.get_rank()
    dht = shoal.DHT(start=True) if rank == 0 else None
    found = {}
    try:
        for number, name in enumerate(MODELS):
            unusual = made(name, rank)
            settings = {"run_id": f"run {number}", "target_batch_size": 8, "batch_size_per_step": 4}
            with GroupOptimizer(dht=dht, optimizer=optimizer_of(unusual), **settings) as swarm:  # type: ignore[arg-type]
                for batch in range(BATCHES):
                    set_gradients(unusual, batch, 0)
                    swarm.step()
                state = swarm._training.optimizer.state_dict()["state"]
                kept = [value for key in sorted(state) for _, value in sorted(state[key].items())]
                values = [each.detach() for group in unusual.groups for each in group]
                found[name] = [swarm.local_epoch, digest([*values, *kept])]
    finally:
        if dht is not None:
            dht.shutdown()
    return found


class Pulled(torch.nn.Module):
    """A module of these parameters, whose loss pulls them to 1."""

    def __init__(self, unusual: Unusual) -> None:
        super().__init__()
        self.count = sum(map(len, unusual.groups))
        for number, each in enumerate(each for group in unusual.groups for each in group):
            self.register_parameter(f"p{number}", each)  # type: ignore[arg-type]

    def forward(self, has_gradient: list[bool]) -> torch.Tensor:
        """The loss of the parameters that take part."""
        every = [getattr(self, f"p{number}") for number in range(self.count)]
        parts = [(each - 1).square().sum() for each, has in zip(every, has_gradient, strict=True) if has]
        return torch.stack(parts).sum()


def partitioned(stage: int) -> dict[str, str]:
    """Train each one with ZeRO; how it differs from one process, or the error that names it; empty if it does not."""
    found = {}
    for name in MODELS:
        mine, plain = made(name, 0), made(name, 0)
        sizes = [sum(each.requires_grad for each in group) for group in mine.groups]

        def optimizer(params: Iterable[torch.Tensor], sizes: list[int] = sizes) -> torch.optim.Optimizer:
            trained = [*params]
            cut = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
            return optimizer_of(Unusual([trained[a:b] for a, b in itertools.pairwise(cut)]))

        try:
            model, sharded = shoal.zero.shard(Pulled(mine), optimizer, stage=stage)
        except ConfigError as error:
            found[name] = f"{error}"
            continue
        expected = Pulled(plain)
        stepped = optimizer([each for each in expected.parameters() if each.requires_grad])
        for batch in range(BATCHES):
            takes_part = [mine.has_gradient(batch, index) for index in range(expected.count)]
            for each, taker in ((model, sharded), (expected, stepped)):
                torch.autograd.backward([each(takes_part)])
                taker.step()
                taker.zero_grad()
        whole = shoal.zero.full_state_dict(model)
        apart = [
            float((whole[key] - value).abs().max()) for key, value in expected.state_dict().items() if value.numel()
        ]
        found[name] = "" if max(apart) < 1e-12 else f"differs by {max(apart)}"
    return found
