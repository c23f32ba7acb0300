"""The whole model, from its shards."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = ["full_state_dict", "overwrite"]


def full_state_dict(
    model: torch.nn.Module,
    *,
    rank0_only: bool = False,
    group: dist.ProcessGroup | None = None,
    but: Collection[int] = (),
) -> dict[str, Any]:
    """The unsharded weights and buffers, as `model.state_dict()` of the model before sharding would have them.

    All ranks call it. One parameter at a time is gathered; tied ones come under each of their names. Where the model
    computes in 16 bits, the weights of stages 1 and 2 are those; `save(consolidated=True)` has the float32 ones.

    Args:
        model: sharded or not.
        rank0_only: only rank 0 of the group keeps them.
        group: the group that the model was sharded over; None: all ranks.
        but: the `id` of parameters to leave out.

    Returns:
        Tensors on the CPU, copies, and modules' extra state as it is; empty on other ranks if `rank0_only`.
    """
    keep = not rank0_only or not dist.is_initialized() or dist.get_rank(group) == 0
    found: dict[str, Any] = {}
    seen: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in but:
            continue
        if not isinstance(value, torch.Tensor):  # the result of a module's get_extra_state
            if keep:
                found[name] = value
            continue
        if id(value) not in seen:
            whole = value.detach()
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            seen[id(value)] = whole.to("cpu", copy=True) if keep else torch.empty(0)
        if keep:
            found[name] = seen[id(value)]
    return found


def overwrite(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write values of its shape into a tensor; memory that it repeats along a dimension (`expand`) once."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())
    target[once].copy_(values[once])
