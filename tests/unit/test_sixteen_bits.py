"""Parameters in 16 bits that hardly move: what a merge changes by less than they can hold adds up."""

from __future__ import annotations

from functools import partial
from typing import cast

import pytest
import torch

from shoal.averaging.allreduce.vector import Vector
from shoal.strategies import Decoupled, DiLoCo, LocalSGD, Merges, StreamingDiLoCo
from shoal.strategies.outer import LocalSteps

BATCH, MERGES, SIZE = 4, 40, 64
MEAN = partial(torch.optim.SGD, lr=1.0)
STRATEGIES = [
    LocalSGD(1),
    DiLoCo(1),
    StreamingDiLoCo(2, 1, 1),
    StreamingDiLoCo(2, 1, 1, 0.5),
    Decoupled(1, 1),
    Decoupled(1, 1, outer=MEAN),
]


class Average:
    """What a round has come to."""

    def __init__(self, into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        self._into, self._values = into, values

    def overwrite(self) -> None:
        """Set the accumulators to it."""
        for mine, value in zip(self._into, self._values, strict=True):
            mine.copy_(value)


def swarm_of(strategy: Merges, dtype: torch.dtype, shift: float) -> list[LocalSteps]:
    """Two peers after some merges: each batch moves the parameters of the first one, and not those of the second."""
    peers = []
    for _ in range(2):
        start = torch.linspace(0.5, 1.9, SIZE).bfloat16().to(dtype)
        parameter = torch.nn.Parameter(start)
        peers.append(LocalSteps(torch.optim.SGD([parameter], lr=1.0), None, (), strategy.merging))
    for _ in range(MERGES):
        for moved, peer in zip((shift, 0.0), peers, strict=True):
            (trained,) = peer.trained
            trained.grad = torch.full_like(trained, -moved)
            peer.accumulate(BATCH)
        fragments = [peer.fragments[0] for peer in peers]
        weights = [fragment.contribute()[0] for fragment in fragments]
        given = [[each.clone() for each in fragment.accumulators] for fragment in fragments]
        mean = [
            torch.stack([w * t for w, t in zip(weights, tensors, strict=True)]).sum(0) / sum(weights)
            for tensors in zip(*given, strict=True)
        ]
        for fragment in fragments:
            fragment.counted()
            fragment.use_average(cast("Vector", Average(list(fragment.accumulators), mean)))
            fragment.step()
    return peers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_small_merges_of_parameters_in_16_bits_were_lost(strategy: Merges, dtype: torch.dtype) -> None:
    """One peer of two moves by the least that the dtype can: half of that is no step of it, and the anchor stood still.

    In float32 the same steps move it each time.
    """
    step = 2 * torch.finfo(dtype).eps
    (one, other), (reference, _) = swarm_of(strategy, dtype, step), swarm_of(strategy, torch.float32, step)
    anchors = [peer.fragments[0].trained[0].detach() for peer in (one, other, reference)]
    assert torch.equal(anchors[0], anchors[1])
    moved = (anchors[2] - torch.linspace(0.5, 1.9, SIZE).bfloat16()).mean()
    assert moved > MERGES * step / 3
    mixes = strategy.merging.mixing is not None
    # What a peer keeps of its own parameters is in 16 bits.
    assert ((anchors[0] - anchors[2]).abs() < (0.2 if mixes else 0.1) * moved).all()
    assert mixes or torch.equal(other.trained[0], anchors[0].to(dtype))
