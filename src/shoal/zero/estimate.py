"""The laws for a real model: its own dtypes, tied parameters counted once, frozen ones neither trained nor reduced."""

from __future__ import annotations

import torch

from shoal.errors import ConfigError
from shoal.zero.laws import Cost, Precision, Sizes, costs_of, optimizer_kind

__all__ = ["estimate", "sizes_of"]


def estimate(
    model: torch.nn.Module,
    ranks: int | None = None,
    *,
    stage: int | None = None,
    optimizer: str = "adam",
    micro_batches: int = 1,
    backend: str = "gloo",
) -> list[Cost]:
    """The costs of each stage and engine for this model: see `shoal.zero.costs`.

    Args:
        model: on any device, `meta` included; nothing is allocated.
        ranks: how many share it, at least 1; None for those of the default process group, 1 where there is none.
        stage: only this one, 0 to 3; None for all.
        optimizer: `adam` (also AdamW), `momentum` or `sgd`. It keeps float32 state for each parameter that requires a
            gradient, and a float32 copy of those that have 16 bits.
        micro_batches: in one optimizer step, at least 1.
        backend: `nccl` or `gloo`.

    Returns:
        One entry for each engine, bytes per rank, without padding.

    Raises:
        ConfigError: the model has no parameters, or an argument is out of its range; it is named.
    """
    if ranks is None:
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        ranks = torch.distributed.get_world_size() if grouped else 1
    return costs_of(sizes_of(model, optimizer), ranks, stage=stage, micro_batches=micro_batches, backend=backend)


def sizes_of(model: torch.nn.Module, optimizer: str) -> Sizes:
    """How large a model is with this optimizer. Raises `ConfigError` as `estimate` does."""
    kind = optimizer_kind(optimizer)
    parameters = gradients = state = 0
    for parameter in model.parameters():  # tied ones come once
        nbytes = parameter.numel() * parameter.itemsize
        parameters += nbytes
        if parameter.requires_grad:
            precision = Precision.MIXED if parameter.itemsize == Precision.MIXED.width else Precision.FLOAT32
            gradients += nbytes
            state += parameter.numel() * kind.state_bytes(precision)
    if not parameters:
        raise ConfigError("model has no parameters: there is nothing to estimate")
    return Sizes(parameters, gradients, state)
