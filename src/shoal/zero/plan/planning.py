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
from shoal.zero.plan.laws import Cost, Precision, costs

if TYPE_CHECKING:
    from shoal.zero.plan.transformer import Transformer

__all__ = ["Plan", "fewest_ranks", "plans"]


class Plan(NamedTuple):
    """A way to train a model.

    Attributes:
        cost: bytes on each rank's device, and sent, as of `costs`.
        checkpointing: only the input of each layer is kept for the backward pass.
        offloaded: bytes that each rank keeps on the CPU or on disk; 0 without offload.
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


def plans(  # noqa: PLR0913 (the choices of its users)
    parameters: float,
    ranks: int,
    *,
    stage: int | None = None,
    precision: Precision | str = Precision.MIXED,
    optimizer: str = "adam",
    micro_batches: int = 1,
    backend: str = "nccl",
    transformer: Transformer | None = None,
    replicas: int = 1,
    ema: bool = False,
) -> list[Plan]:
    """Every way to train a model with `shoal.zero`, or with DDP; the one to prefer comes first.

    For example::

        shape = shoal.zero.Transformer.of(7.5e9, batch=1, sequence=2048)
        best = next(each for each in shoal.zero.plans(7.5e9, 8, transformer=shape) if each.memory <= 24e9)

    Args: as of `shoal.zero.costs`. Without `transformer` no activations count, and there are no plans with checkpoints.
    With several `replicas` there is none of stage 0. `ema` counts moving averages of the weights (`shoal.zero.EMA`), 4
    bytes for each weight that a rank owns (stage 0: for all). They are not offloaded.

    Raises:
        ConfigError: an argument is out of its range; it is named.
    """

    def each_way() -> Iterator[Plan]:
        share = parameters * replicas / ranks
        shapes = [replace(transformer, checkpointing=each) for each in (False, True)] if transformer else [None]
        for shape in shapes:
            for each in costs(
                parameters,
                ranks,
                stage=stage,
                precision=precision,
                optimizer=optimizer,
                micro_batches=micro_batches,
                backend=backend,
                transformer=shape,
                replicas=replicas,
            ):
                cost = each._replace(averages=4 * ema * (share if each.engine.stage else parameters))
                checkpointing = shape is not None and shape.checkpointing
                if cost.engine.name in {"DDP", "shoal.zero"}:
                    yield Plan(cost, checkpointing, 0.0)
                if cost.engine.name == "shoal.zero":
                    here = _here(cost, 4 * share if Precision(precision) is Precision.MIXED else 0.0)
                    if here.memory < cost.memory:
                        yield Plan(here, checkpointing, cost.memory - here.memory)

    return sorted(each_way(), key=lambda plan: (plan.cost.sent, plan.offloaded > 0, plan.checkpointing, plan.stage))


def _here(cost: Cost, means: float) -> Cost:
    """What stays on the device with offload: parameters in stages 1 and 2, in stage 1 gradients without their means."""
    stage = cost.engine.stage
    return cost._replace(
        parameters=cost.parameters if stage < 3 else 0.0,
        gradients=cost.gradients - means if stage == 1 else 0.0,
        state=0.0,
    )


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
    # Each way takes a part that is the same on any number of ranks, and a part of which N ranks keep 1 / N each.
    replicas = asked.get("replicas", 1)
    one, two = (
        {
            (plan.stage, plan.checkpointing, plan.offloaded > 0): plan.memory
            for plan in plans(parameters, ranks * replicas, **asked)
        }
        for ranks in (1, 2)
    )
    shared = {way: 2 * (one[way] - two[way]) for way in one}
    left = {way: memory - (one[way] - shared[way]) for way in one}
    enough = [math.ceil(shared[way] / left[way] * (1 - 1e-12)) for way in one if left[way] > 0]
    # No rank can keep less than one parameter.
    return max(1, min(enough)) * replicas if enough and min(enough) <= parameters else None
