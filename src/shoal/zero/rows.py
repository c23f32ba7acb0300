"""Changes that a program makes to a weight of stage 3 between steps, where each rank has some of its rows.

A program writes as if the weight were whole: `load_state_dict`, `torch.nn.init`, ``weight.data = values``. Whole values
that it gives are the same on all ranks, so each rank takes its own rows of them. Random values are drawn for the whole
weight, as in one process, and each rank keeps its rows: torch would draw the same rows on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map

from shoal.errors import ConfigError

__all__ = ["assign", "draw_like", "draws_like", "is_drawn", "refused", "spread", "write_drawn"]

_DRAWN = frozenset(
    {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
)
_DRAWN_LIKE = frozenset({"rand_like", "randint_like", "randn_like"})
_MOVES = frozenset(
    {"as_strided_", "resize_", "resize_as_", "set_", "share_memory_", "squeeze_", "swapaxes_", "t_", "transpose_"}
)
"""Functions that change where values are, or their shape."""


def is_drawn(func: Callable[..., Any], name: str) -> bool:
    """Whether a function fills a tensor with random values, or those that depend on its whole shape."""
    return name in _DRAWN or _is_init(func)


def draw_like(func: Callable[..., Any], target: DTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Random values for each value of a weight: the rows of this rank."""
    found = func(torch.empty(target.shape, dtype=target.dtype, device=target.to_local().device), *args[1:], **kwargs)
    return spread(target, found).redistribute(placements=target.placements)


def draws_like(name: str) -> bool:
    """Whether a function makes a tensor of random values like the one that it is given."""
    return name in _DRAWN_LIKE


def _is_init(func: Callable[..., Any]) -> bool:
    return getattr(func, "__module__", "") == "torch.nn.init"


def refused(name: str, label: str) -> None:
    """Raise `ConfigError` if a change of this name cannot be carried."""
    if name in _MOVES:
        raise ConfigError(
            f"{label} is changed ({name}) after shard(), by which its memory or its shape would be another one: write "
            "values into it with copy_(), or do it before shard()"
        )


def spread(target: DTensor, values: Any) -> Any:
    """Whole tensors among values, as those that all ranks have alike."""

    def each(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not value.ndim:
            return value
        here = value.detach().to(target.to_local().device)
        return DTensor.from_local(here, target.device_mesh, [Replicate()] * target.device_mesh.ndim, run_check=False)

    return tree_map(each, values)


def write_drawn(func: Callable[..., Any], target: DTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    """Let a function fill a whole tensor, and keep the rows of this rank."""
    whole = torch.empty(target.shape, dtype=target.dtype, device=target.to_local().device)
    args, kwargs = tree_map(lambda each: whole if each is target else each, (list(args), dict(kwargs)))
    with torch.no_grad() if _is_init(func) else contextlib.nullcontext():
        func(*args, **kwargs)
        target.copy_(spread(target, whole))
    return target


def assign(target: DTensor, label: str, values: Any, source: str) -> None:
    """Carry out ``target.data = values``.

    Args:
        target: the rows of this rank.
        label: the name of the weight, and its unit.
        values: whole ones, or rows of them all.
        source: the label of the weight whose memory `values` shares; empty for none.

    Raises:
        ConfigError: they have another shape or dtype, or are another weight.
    """
    if source and source != label:
        raise ConfigError(
            f"the data of {label} is set to the memory of {source}, to tie them: tie weights before shard(), or write "
            "values with copy_()"
        )
    if (values.shape, values.dtype) != (target.shape, target.dtype):
        raise ConfigError(
            f"the data of {label} is set to values of shape {tuple(values.shape)} and {values.dtype}, and it has "
            f"{tuple(target.shape)} and {target.dtype}: give values of these, or do it before shard()"
        )
    with torch.no_grad():
        target.copy_(spread(target, values))
