"""Changes that a program makes to a weight of stage 3 between steps, where each rank has some of its rows.

A program writes as if the weight were whole: `load_state_dict`, `torch.nn.init`, ``weight.data = values``. Whole values
that it gives are the same on all ranks, so each rank takes its own rows of them. Random values are drawn for the whole
weight, as in one process, and each rank keeps its rows: torch would draw the same rows on all ranks.

A change that treats each value by itself is made to the rows. Any other one is made to a whole weight, as in one
process, and each rank keeps its rows of that: where a value depends on other rows (``weight.cumsum_(0)``), all ranks
gather it; where none does (``weight[3:5] = 0``), the other rows are blank. So it is with a part of a weight that torch
takes as a copy (``weight[0].zero_()``): it remembers how it was taken, and changes of it are made to the weight.

What needs others waits for them, so a rank that does it alone waits for good: `Sending` names it then.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shoal.base.nested import tensors_in
from shoal.errors import ConfigError

__all__ = [
    "TAKES",
    "Sending",
    "Taken",
    "Writes",
    "as_whole",
    "assign",
    "by_place",
    "by_rows",
    "called_in",
    "compute_whole",
    "draws",
    "is_drawn",
    "refresh",
    "refused",
    "shares_memory",
    "spread",
    "take",
    "ways_to_take",
    "write_whole",
]

_BETWEEN = ("shoal.", "torch._compile", "torch._dynamo.")
"""Modules of what is called between a function of torch and the code that looks for it (`untraced`)."""
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
_BY_PLACE = _BY_VALUE | frozenset(
    {"__setitem__", "fill_diagonal_", "index_add_", "index_copy_", "index_fill_", "index_put_", "masked_scatter_"}
    | {"scatter_", "scatter_add_", "tril_", "triu_"}
)
"""Functions that make each value of itself, its place, and what they are given."""
TAKES = frozenset({"__getitem__", "chunk", "diagonal", "flatten", "narrow", "ravel", "reshape", "select", "split"}) | {
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
    | {"module_load", "swap_tensors"}
)
"""Functions that change where values are, or their shape."""


_LOOKED_AT = 16
"""So many values of a tensor that all ranks give alike are compared."""


class Taken(NamedTuple):
    """How a value was taken from another one, in memory of its own, where one process has a view.

    Attributes:
        base: the other one, a `Shard`.
        take: takes it, from any tensor of that shape.
    """

    base: Any
    take: Callable[[torch.Tensor], torch.Tensor]


class _Sends(Exception):
    """An operation on shards is about to send something."""


class Sending(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names what torch sends for an operation on a shard.

    Args:
        shard: a `Shard`.
        name: of the operation.
        refused: whether to raise `_Sends` instead.
    """

    def __init__(self, shard: Any, name: str, *, refused: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch, self._doing, self._refused = shard.watch, f"to gather {shard.label} for {name}", refused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it makes an operation on rows of it, and what is sent
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        if self._refused:
            raise _Sends
        with self._watch.named(self._watch.turn(self._doing)):
            found = func(*args, **(kwargs or {}))
            return torch.ops._c10d_functional.wait_tensor(found) if isinstance(found, torch.Tensor) else found  # noqa: SLF001


class Writes:
    """What a program has written into a weight: alike on all ranks, or rows of several changes would be mixed.

    Attributes:
        count: how many changes there were.
        digest: another one if their values, as far as they are looked at, or their kinds differ.
    """

    def __init__(self) -> None:
        self.count = self.digest = 0

    def note(self, name: str, *given: Any) -> None:
        """A function of this name has changed the weight; it was given this."""
        self.count += 1
        said = [name, *(_glimpse(each) for each in tree_leaves(given))]
        self.digest = zlib.crc32("\n".join(said).encode(), self.digest)

    def forget(self) -> None:
        """All ranks have written alike so far."""
        self.count = self.digest = 0


def _glimpse(value: Any) -> str:
    """Some of a value that all ranks give alike; nothing of those of which each rank has its own rows."""
    if isinstance(value, torch.Tensor):
        own = isinstance(value, DTensor) or value.is_meta or not value.numel()
        some = value.detach().reshape(-1) if not own else None
        return "" if some is None else str(some[:: max(1, len(some) // _LOOKED_AT)].tolist())
    return repr(value) if isinstance(value, bool | int | float | str | slice | None) else type(value).__name__


def is_drawn(func: Callable[..., Any], name: str) -> bool:
    """Whether a function fills a tensor with random values, or those that depend on its whole shape."""
    return name in _DRAWN or getattr(func, "__module__", "") == "torch.nn.init"


def draws(name: str) -> bool:
    """Whether a function reads a tensor, or its shape alone, and draws random values for it."""
    return name in _DRAWS or name in _DRAWN_LIKE


def called_in(module: str) -> bool:
    """Whether a function of this module of torch, which all ranks call alike, has called shoal."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (nothing else tells)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == module


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


def by_rows(name: str, targets: Sequence[Any], read: Sequence[torch.Tensor]) -> bool:
    """Whether a change can be made to the rows of this rank.

    Args:
        name: of the function.
        targets: what it changes, each a `Shard`.
        read: the tensors that it reads.
    """
    values = name.startswith("_foreach_") or name in _BY_VALUE
    return (
        values
        and all(each.taken is None for each in targets)
        and all(
            not isinstance(each, DTensor) or not each.ndim or each.placements == targets[0].placements for each in read
        )
    )


def by_place(name: str, targets: Sequence[Any], read: Sequence[torch.Tensor]) -> bool:
    """Whether the rows of this rank are enough for a change, though it is made to a whole weight.

    Args:
        name: of the function.
        targets: what it changes, each a `Shard`.
        read: the tensors that it reads.
    """
    return (name in _BY_PLACE or name.startswith("_foreach_")) and not any(
        isinstance(each, DTensor) and each.ndim and not any(each is target for target in targets) for each in read
    )


def write_whole(
    func: Callable[..., Any],
    name: str,
    targets: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    fresh: bool,
    alone: bool,
) -> Any:
    """Let a function change whole tensors, and keep the rows of this rank. All ranks call it.

    Args:
        func: the function.
        name: of it.
        targets: what it changes, each a `Shard`.
        args: its arguments, `targets` among them.
        kwargs: the same.
        fresh: it overwrites all values, and needs none of the old ones.
        alone: no row depends on others.

    Returns:
        The target, or what it returns else.

    Raises:
        ConfigError: it gives a target another shape.
    """
    wholes: dict[Any, tuple[Any, torch.Tensor]] = {}  # of each weight, also where it is given as `weight.data`
    parts: dict[int, tuple[Any, torch.Tensor]] = {}  # by the `id` of the target
    for target in targets:
        root, ways = target, list[Callable[[torch.Tensor], torch.Tensor]]()
        while root.taken is not None:
            ways.append(root.taken.take)
            root = root.taken.base
        weight = id(root.writes or root), root.shape
        if weight not in wholes:
            whole = _blank(root) if fresh and not ways else _placed(root) if fresh or alone else _gathered(root)
            if whole.data_ptr() == root.to_local().data_ptr():  # of one rank
                whole = whole.clone()
            # A change of a leaf that requires a gradient is torch's error, as in one process.
            wholes[weight] = root, whole.requires_grad_(root.requires_grad)
        found = wholes[weight][1]
        for way in reversed(ways):
            found = way(found)
        parts[id(target)] = target, found

    def each(value: Any) -> Any:
        return parts[id(value)][1] if id(value) in parts else _gathered(value)

    given = [args[1:], kwargs]
    args, kwargs = tree_map(each, (list(args), dict(kwargs)))
    result = func(*args, **kwargs)
    # Rows of others may be blank: so what is compared is where a part lies, and what it was given or is now.
    said: list[Any] = [f"{each.storage_offset()} {tuple(each.shape)} {each.stride()}" for _, each in parts.values()]
    said += [part for _, part in parts.values()] if fresh else given
    with torch.no_grad():
        for root, whole in wholes.values():
            if whole.shape != root.shape:
                refused("resize_", root.label)
            root.copy_(spread(root, whole))
            if root.requires_grad != whole.requires_grad:  # as of `torch.zeros(..., out=weight)`
                root.requires_grad_(whole.requires_grad)
            if root.writes is not None:
                root.writes.note(name, *(said if fresh or alone else [whole]))
    return next((target for target, part in parts.values() if part is result), result)


def compute_whole(
    func: Callable[..., Any], name: str, shard: DTensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The result of a function of whole tensors: of each tensor of the shard's shape, the rows of this rank."""

    def each(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == shard.shape:
            return spread(shard, value).redistribute(placements=shard.placements)
        return value

    found = _blank if name in _DRAWN_LIKE else _gathered
    shards = partial(tree_map, lambda value: found(value) if isinstance(value, DTensor) else value)
    args, kwargs = shards((list(args), dict(kwargs)))
    return tree_map(each, func(*args, **kwargs))


def as_whole(shard: Any) -> torch.Tensor:
    """All of a weight, for a function that all ranks call. No gradient can go through it."""
    with torch.no_grad():
        whole: torch.Tensor = _gathered(shard)
    if not torch.is_grad_enabled() or not shard.requires_grad:
        return whole

    def refuse(_: torch.Tensor) -> None:
        raise ConfigError(
            f"a gradient goes through all of {shard.label} (parameters_to_vector), and each rank would add its own to "
            "it: make the vector within torch.no_grad(). For a penalty on weights use weight_decay, or stage 1 or 2"
        )

    found = whole.requires_grad_().clone()
    found.register_hook(refuse)  # type: ignore[no-untyped-call]
    return found


def _blank(shard: DTensor) -> torch.Tensor:
    """Memory for a whole weight."""
    return torch.empty(shard.shape, dtype=shard.dtype, device=shard.to_local().device)


def _placed(shard: DTensor) -> torch.Tensor:
    """A whole weight that has the rows of this rank, and zeros in place of others."""
    found = _blank(shard).zero_()
    count = -(-len(found) // shard.device_mesh.size())
    first = count * shard.device_mesh.get_local_rank()
    found[first : first + count].copy_(shard.to_local().detach())
    return found


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
    if getattr(func, "__name__", "") not in TAKES or not args or args[0] is not base:
        return []

    def take(number: int, value: torch.Tensor) -> torch.Tensor:
        return list(tensors_in(func(value, *args[1:], **kwargs)))[number]

    nothing = torch.empty(base.shape, dtype=base.dtype, device="meta")
    listed = list[tuple[Any, Taken]]()
    for number, each in enumerate(tensors_in(found)):
        own = isinstance(each, DTensor) and (base.taken is not None or not shares_memory(each, base))
        if own and take(number, nothing)._is_view():  # noqa: SLF001 (there is no other way to ask)
            listed.append((each, Taken(base, partial(take, number))))
    return listed


def take(func: Callable[..., Any], shard: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function takes of a shard. A part that needs others is blank until it is read: see `refresh`."""
    name = getattr(func, "__name__", "")
    if name in TAKES and args[0] is shard and not (torch.is_grad_enabled() and shard.requires_grad):
        try:
            with Sending(shard, name, refused=True):
                return func(*args, **kwargs)
        except _Sends:
            if (parts := _parts(func, shard, args, kwargs)) is not None:
                return parts
    with Sending(shard, name):
        return func(*args, **kwargs)


def _parts(func: Callable[..., Any], shard: DTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Memory for what a function takes of a shard; None if that would be no view in one process."""
    nothing, device = torch.empty(shard.shape, dtype=shard.dtype, device="meta"), shard.to_local().device
    try:
        found = func(nothing, *args[1:], **kwargs)
    except (RuntimeError, NotImplementedError):  # by a mask: it depends on values
        return None
    if not all(each._is_view() for each in tensors_in(found)):  # noqa: SLF001 (there is no other way to ask)
        return None

    def blank(part: torch.Tensor) -> DTensor:
        memory = torch.empty(part.shape, dtype=part.dtype, device=device)
        return DTensor.from_local(memory, shard.device_mesh, [Replicate()] * shard.device_mesh.ndim, run_check=False)

    return tree_map_only(torch.Tensor, blank, found)


def is_itself(target: Any, key: Any, value: Any) -> bool:
    """Whether a value is the part of a shard that lies there, as in the second half of ``weight[0] += 1``."""
    if getattr(value, "taken", None) is None or value.taken.base is not target:
        return False
    nothing = torch.empty(target.shape, dtype=target.dtype, device="meta")
    mine, there = value.taken.take(nothing), nothing[key]
    return (mine.storage_offset(), mine.shape, mine.stride()) == (there.storage_offset(), there.shape, there.stride())


def refresh(value: Any) -> None:
    """Take a value anew: what it was taken from may have changed since. All ranks call it."""
    if value.taken is not None:
        refresh(value.taken.base)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), Sending(value, "a part"):  # noqa: SLF001 (torch's own way)
            found = value.taken.take(value.taken.base).redistribute(placements=value.placements)
            value._local_tensor = found.to_local()  # noqa: SLF001 (the same object)


def shares_memory(one: DTensor, other: DTensor) -> bool:
    """Whether the rows of this rank are in the same memory."""
    # That of no values has no address.
    mine, its = (each._local_tensor.untyped_storage() for each in (one, other))  # noqa: SLF001 (not in any graph)
    return bool(mine._cdata == its._cdata)  # noqa: SLF001 (as above)


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
