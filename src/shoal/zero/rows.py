"""Changes that a program makes to a weight of stage 3 between steps, where each rank has some of its rows.

A program writes as if the weight were whole: `load_state_dict`, `torch.nn.init`, ``weight.data = values``. Whole values
that it gives are the same on all ranks, so each rank takes its own rows of them. Random values are drawn for the whole
weight, as in one process, and each rank keeps its rows: torch would draw the same rows on all ranks.

A change that treats each value by itself is made to the rows. For any other one (``weight[3:5] = 0``) all ranks gather
the weight, change it as in one process, and keep their rows of it. So it is with a part of a weight that torch takes as
a copy (``weight[0].zero_()``): it remembers how it was taken, and changes of it are made to the weight.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map

from shoal.errors import ConfigError
from shoal.runtime.nested import tensors_in

__all__ = [
    "Taken",
    "assign",
    "by_rows",
    "compute_whole",
    "draw_like",
    "draws",
    "draws_like",
    "in_init",
    "is_drawn",
    "refresh",
    "refused",
    "spread",
    "ways_to_take",
    "write_drawn",
    "write_whole",
]

_DRAWN = frozenset(
    {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
)
_DRAWN_LIKE = frozenset({"rand_like", "randint_like", "randn_like"})
_DRAWS = frozenset(
    {"alpha_dropout", "bernoulli", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"}
) | {"gumbel_softmax", "multinomial", "normal", "poisson", "rrelu"}
"""Functions that read a tensor, and draw for it."""
_BY_VALUE = (
    frozenset({"copy_", "fill_", "zero_", "add_", "sub_", "subtract_", "mul_", "multiply_", "div_"})
    | {"divide_", "true_divide_", "pow_", "neg_", "abs_", "square_", "sqrt_", "rsqrt_", "reciprocal_", "exp_", "log_"}
    | {"sign_", "round_", "floor_", "ceil_", "trunc_", "tanh_", "sigmoid_", "relu_", "erf_", "erfinv_", "nan_to_num_"}
    | {"clamp_", "clamp_min_", "clamp_max_", "lerp_", "addcmul_", "addcdiv_", "masked_fill_"}
    | {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
)
"""Functions that change each value by itself."""
_TAKES = frozenset({"__getitem__", "chunk", "diagonal", "flatten", "narrow", "ravel", "reshape", "select", "split"}) | {
    "tensor_split",
    "unflatten",
    "unfold",
    "view",
    "view_as",
    "permute",
    "squeeze",
    "t",
    "transpose",
    "unsqueeze",
}
"""Functions whose result is a part of a tensor, in one process."""
_MOVES = frozenset(
    {"as_strided_", "resize_", "resize_as_", "set_", "share_memory_", "squeeze_", "swapaxes_", "t_", "transpose_"}
)
"""Functions that change where values are, or their shape."""


class Taken(NamedTuple):
    """How a value was taken from another one, in memory of its own, where one process has a view.

    Attributes:
        base: the other one, a `Shard`.
        take: takes it, from any tensor of that shape.
    """

    base: Any
    take: Callable[[torch.Tensor], torch.Tensor]


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


def draws(name: str) -> bool:
    """Whether a function reads a tensor, and draws random values for it."""
    return name in _DRAWS


def in_init(depth: int) -> bool:
    """Whether the caller so many frames up is of `torch.nn.init`, which all ranks call to fill a weight."""
    return sys._getframe(depth + 1).f_globals.get("__name__") == "torch.nn.init"  # noqa: SLF001 (nothing else tells)


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


def by_rows(name: str, target: Any, read: Sequence[torch.Tensor]) -> bool:
    """Whether a change can be made to the rows of this rank.

    Args:
        name: of the function.
        target: what it changes, a `Shard`.
        read: the tensors that it reads.
    """
    values = name.startswith("_foreach_") or (name in _BY_VALUE and target.taken is None)
    return values and all(
        not isinstance(each, DTensor) or not each.ndim or each.placements == target.placements for each in read
    )


def write_whole(func: Callable[..., Any], target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let a function change a whole tensor, and keep the rows of this rank. All ranks call it.

    Args:
        func: the function.
        target: what it changes, a `Shard`.
        args: its arguments, `target` among them.
        kwargs: the same.

    Returns:
        `target`, or what it returns else.
    """
    root, ways = target, list[Callable[[torch.Tensor], torch.Tensor]]()
    while root.taken is not None:
        ways.append(root.taken.take)
        root = root.taken.base
    with torch.no_grad():
        whole = _gathered(root)
        if whole.data_ptr() == root.to_local().data_ptr():  # of one rank
            whole = whole.clone()
    # A change of a leaf that requires a gradient is torch's error, as in one process.
    found = whole.requires_grad_(root.requires_grad)
    for way in reversed(ways):
        found = way(found)
    args, kwargs = tree_map(lambda each: found if each is target else _gathered(each), (list(args), dict(kwargs)))
    result = func(*args, **kwargs)
    with torch.no_grad():
        root.copy_(spread(root, whole))
    return target if result is found else result


def compute_whole(func: Callable[..., Any], shard: DTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function of whole tensors: of each tensor of the shard's shape, the rows of this rank."""

    def each(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == shard.shape:
            return spread(shard, value).redistribute(placements=shard.placements)
        return value

    args, kwargs = tree_map(_gathered, (list(args), dict(kwargs)))
    return tree_map(each, func(*args, **kwargs))


def _gathered(value: Any) -> Any:
    """A sharded tensor as a whole one of this rank; any other value as it is."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        whole = value.full_tensor()
    return whole.to(value.to_local().device)


def ways_to_take(
    func: Callable[..., Any], base: Any, found: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[Any, Taken]]:
    """The results of a function that would be views in one process, and are in memory of their own; how to take each.

    Args:
        func: took them.
        base: from this, a `Shard`.
        found: its result.
        args: its arguments, the first one `base`.
        kwargs: the same.
    """
    if getattr(func, "__name__", "") not in _TAKES or not args or args[0] is not base:
        return []

    def take(number: int, value: torch.Tensor) -> torch.Tensor:
        return list(tensors_in(func(value, *args[1:], **kwargs)))[number]

    nothing = torch.empty(base.shape, dtype=base.dtype, device="meta")
    memory, listed = _memory(base), list[tuple[Any, Taken]]()
    for number, each in enumerate(tensors_in(found)):
        own = isinstance(each, DTensor) and (base.taken is not None or _memory(each) != memory)
        if own and take(number, nothing)._is_view():  # noqa: SLF001 (there is no other way to ask)
            listed.append((each, Taken(base, partial(take, number))))
    return listed


def refresh(value: Any) -> None:
    """Take a value anew: what it was taken from may have changed since. All ranks call it."""
    if value.taken is not None:
        refresh(value.taken.base)
        with torch.no_grad():
            value._local_tensor = value.taken.take(value.taken.base)._local_tensor  # noqa: SLF001 (the same object)


def _memory(value: DTensor) -> int:
    return int(value._local_tensor.untyped_storage()._cdata)  # noqa: SLF001 (that of no values has no address)


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
