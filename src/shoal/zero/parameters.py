"""What all stages need to know of parameters: their names, the order of their values, their hooks, and their pieces.

Stages 1 and 2 keep the order of a parameter's values in memory, and their tiles are ranges of that order. It is that of
the shape, or that of `torch.channels_last` (and `channels_last_3d`). None stands for the former. The rows of a sparse
embedding are counted in an order of their own, which is not that of memory (`Scattered`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shoal.errors import LocalError

__all__ = [
    "UNFROZEN",
    "Order",
    "Piece",
    "Roster",
    "Scattered",
    "bottom_up",
    "flat",
    "hooks_of",
    "like",
    "local",
    "named_parameters",
    "order_of",
    "present_pass",
    "shaped",
    "unique_bytes",
    "weakly",
    "wide_dtype",
]

_WRAPPED = "_checkpoint_wrapped_module."
"""The part that torch's `checkpoint_wrapper` puts into names, and takes out of names in state dictionaries."""


def named_parameters(
    model: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """As `model.named_parameters`, with the same names whether activation checkpoints are around layers or not."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield name.replace(_WRAPPED, ""), parameter


def bottom_up(module: torch.nn.Module, seen: set[int] | None = None) -> Iterator[torch.nn.Module]:
    """All modules of one, each once, members first: the order in which they are made."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from bottom_up(child, seen)
    yield module


UNFROZEN = (
    "{} was frozen when the model was sharded, and would not be trained: call shard() after you unfreeze, on a model "
    "that has the weights of this one"
)


class Roster:
    """For one model, as it is now.

    Args:
        model: not kept alive.

    Attributes:
        trained: names of the parameters that require a gradient.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known = dict(named_parameters(model))
        self.trained = {name for name, each in self._known.items() if each.requires_grad}

    def check(self) -> None:
        """Raise `LocalError` if the model has another parameter now."""
        model = self._model()
        for name, parameter in named_parameters(model) if model is not None else ():
            if self._known.get(name) is not parameter and (name in self.trained or parameter.requires_grad):
                raise LocalError(
                    f"{name} is another parameter than when the model was sharded, and would not be trained: write "
                    "into parameters instead of replacing them (load_state_dict without assign=True), or do it before "
                    "shard()"
                )


class Piece(NamedTuple):
    """A range of a parameter that this rank keeps.

    Attributes:
        name: the name of the parameter.
        start: the first of its flat values, in the carrier's order.
        stop: behind the last one.
        parameter: the tensor that the optimizer steps; its state is `optimizer.state[parameter]`.
        values: one-dimensional, `stop - start` of them, in memory that may be written.
        whole: `parameter` is all of it, and has its shape.
    """

    name: str
    start: int
    stop: int
    parameter: torch.Tensor
    values: torch.Tensor
    whole: bool = False


# -------------------------------------------------------------------------------------------------- values in memory


@dataclass(frozen=True)
class Scattered:
    """An order of rows in which neighbours are far from each other: row `r` is at ``r * factor % count``.

    With a factor near ``count / 1.618`` the first rows, however many, lie evenly between all others. So do those of any
    range: each range of places has its share of them.

    Attributes:
        count: how many rows there are.
        factor: has no divisor in common with `count`.
    """

    count: int
    factor: int

    @classmethod
    def of(cls, count: int) -> Scattered:
        """The order of so many rows, at least one."""
        factor = max(round(count * (math.sqrt(5) - 1) / 2), 1)
        while math.gcd(factor, count) != 1:
            factor += 1
        return cls(count, factor)

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        """Where rows are, int64."""
        return rows * self.factor % self.count

    def rows(self, places: torch.Tensor) -> torch.Tensor:
        """Which rows are at these places, int64."""
        return places * pow(self.factor, -1, self.count) % self.count


Order = Sequence[int] | Scattered | None
"""The dimensions that values run through in memory, the slowest first; or the order of rows."""
_CHANNELS_LAST = {4: (torch.channels_last, (0, 2, 3, 1)), 5: (torch.channels_last_3d, (0, 2, 3, 4, 1))}


def order_of(tensor: torch.Tensor) -> Order:
    """The order of a tensor's values."""
    kind, order = _CHANNELS_LAST.get(tensor.ndim, (None, None))
    if kind is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=kind):
        return None
    return order


def flat(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Its values in an order; a view, if they lie so."""
    if isinstance(order, Scattered):
        return tensor[order.rows(torch.arange(order.count, dtype=torch.int64, device=tensor.device))].reshape(-1)
    return (tensor if order is None else tensor.permute(*order)).reshape(-1)


def shaped(values: torch.Tensor, shape: Sequence[int], order: Order) -> torch.Tensor:
    """A tensor of a shape whose values were put into an order; a view, unless it is an order of rows."""
    if isinstance(order, Scattered):
        return values.view(*shape)[order.places(torch.arange(order.count, dtype=torch.int64, device=values.device))]
    if order is None:
        return values.view(*shape) if shape else values.view(())
    there = values.view([shape[each] for each in order])
    return there.permute([list(order).index(each) for each in range(len(shape))])


def like(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """One-dimensional values with the shape of a tensor, in its order; a view."""
    return shaped(values, tensor.shape, order_of(tensor))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are added up and stepped."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The memory behind some tensors, each storage counted once; bytes."""
    storages = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        storages[storage.data_ptr(), tensor.device] = storage.nbytes()
    return sum(storages.values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, if it is sharded; not part of any graph."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


# ----------------------------------------------------------------------------------------------------- autograd's hooks


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that ends with its object, because Python's garbage collector does not see autograd's references."""
    found = weakref.WeakMethod(method)

    def call(*args: object) -> Any:
        return None if (alive := found()) is None else alive(*args)

    return call


def present_pass() -> int:
    """Autograd's number of the backward pass that is under way."""
    return torch._C._current_graph_task_id()  # noqa: SLF001 (there is no other way to ask)


def hooks_of(parameter: torch.Tensor) -> int:
    """The number of hooks that run when a gradient was added to the parameter's."""
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
