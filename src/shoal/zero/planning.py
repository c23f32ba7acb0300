"""Which stage fits a given memory, with activation checkpoints and offload or without.

A `Plan` is one way for `shoal.zero` to train a model (stage 0: DDP). `plans` lists them all, by preference: those that
send least come first; of these, those that do least extra work (none; checkpoints, which compute the forward pass
again; offload, which moves the optimizer's state in each step; both); of these, those of the lowest stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.errors import ConfigError
from shoal.zero.laws import Cost, Precision, costs

if TYPE_CHECKING:
    from shoal.zero.transformer import Transformer

__all__ = ["Plan", "fewest_ranks", "plans"]

_SUMS = {1: 4, 2: 2}
"""In each stage so many bytes more for each gradient that a rank owns: sums of 16-bit gradients are in float32."""


class Plan(NamedTuple):
    """A way to train a model.

    Attributes:
        cost: bytes on each rank's device, and sent. The gradients of 16-bit parameters include their float32 sums.
        checkpointing: only the input of each layer is kept for the backward pass.
        offloaded: bytes of optimizer state that each rank keeps on the CPU or on disk; 0 without offload.
    """

    cost: Cost
    checkpointing: bool
    offloaded: float

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return self.cost.engine.stage

    @property
    def memory(self) -> float:
        """Bytes on the device, in all."""
        return self.cost.memory


def plans(
    parameters: float,
    ranks: int,
    *,
    stage: int | None = None,
    precision: Precision | str = Precision.MIXED,
    optimizer: str = "adam",
    micro_batches: int = 1,
    backend: str = "nccl",
    transformer: Transformer | None = None,
) -> list[Plan]:
    """Every way to train a model with `shoal.zero`, or with DDP; the one to prefer comes first.

    For example::

        shape = shoal.zero.Transformer.of(7.5e9, batch=1, sequence=2048)
        best = next(each for each in shoal.zero.plans(7.5e9, 8, transformer=shape) if each.memory <= 24e9)

    Args: as of `shoal.zero.costs`. Without `transformer` no activations count, and there are no plans with checkpoints.

    Raises:
        ConfigError: an argument is out of its range; it is named.
    """

    def each_way() -> Iterator[Plan]:
        shapes = [replace(transformer, checkpointing=each) for each in (False, True)] if transformer else [None]
        for shape in shapes:
            for cost in costs(
                parameters,
                ranks,
                stage=stage,
                precision=precision,
                optimizer=optimizer,
                micro_batches=micro_batches,
                backend=backend,
                transformer=shape,
            ):
                checkpointing = shape is not None and shape.checkpointing
                if cost.engine.name == "DDP":
                    yield Plan(cost, checkpointing, 0.0)
                elif cost.engine.name == "shoal.zero":
                    more = _SUMS.get(cost.engine.stage, 0) * parameters / ranks
                    ours = cost._replace(gradients=cost.gradients + more * (Precision(precision) is Precision.MIXED))
                    yield Plan(ours, checkpointing, 0.0)
                    if cost.state:
                        yield Plan(ours._replace(state=0.0), checkpointing, cost.state)

    return sorted(each_way(), key=lambda plan: (plan.cost.sent, plan.offloaded > 0, plan.checkpointing, plan.stage))


def fewest_ranks(memory: float, parameters: float, **asked: Any) -> int | None:
    """How many ranks it takes until any plan fits.

    Args:
        memory: bytes of each rank's device, above 0.
        parameters: how many.
        asked: as of `plans`.

    Returns:
        None if no number is enough.

    Raises:
        ConfigError: an argument is out of its range; it is named.
    """
    if not memory > 0:
        raise ConfigError(f"memory must be above 0 bytes, got {memory!r}")
    one, two = (min(plan.memory for plan in plans(parameters, ranks, **asked)) for ranks in (1, 2))
    shared = 2 * (one - two)  # of one rank; of N ranks each has 1 / N of it
    left = memory - (one - shared)
    return max(1, math.ceil(shared / left * (1 - 1e-12))) if left > 0 else None
