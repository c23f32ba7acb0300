"""The whole model, from its shards."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = ["full_state_dict"]


def full_state_dict(
    model: torch.nn.Module, *, rank0_only: bool = False, but: Collection[int] = ()
) -> dict[str, torch.Tensor]:
    """The unsharded weights and buffers, as `model.state_dict()` of the model before sharding would have them.

    All ranks call it. One parameter at a time is gathered; tied ones come under each of their names.

    Args:
        model: sharded or not.
        rank0_only: only rank 0 keeps them.
        but: the `id` of parameters to leave out.

    Returns:
        Tensors on the CPU, copies; without any on other ranks if `rank0_only`.
    """
    keep = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    found: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in but:
            continue
        if id(value) not in seen:
            whole = value.detach()
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            seen[id(value)] = whole.to("cpu", copy=True) if keep else torch.empty(0)
        if keep:
            found[name] = seen[id(value)]
    return found
