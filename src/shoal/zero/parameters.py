"""What all stages need to know of parameters: their names, their hooks, and the tiles that a rank keeps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shoal.errors import LocalError
from shoal.layout import Tile

__all__ = [
    "UNFROZEN",
    "OwnTile",
    "Roster",
    "bottom_up",
    "hooks_of",
    "local",
    "named_parameters",
    "present_pass",
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


class OwnTile(NamedTuple):
    """A tile that this rank keeps.

    Attributes:
        tile: its place, in the carrier's order.
        parameter: the tensor that the optimizer steps; its state is `optimizer.state[parameter]`.
        values: one-dimensional, the tile's, in memory that may be written.
        whole: `parameter` is all of it, and has its shape.
    """

    tile: Tile
    parameter: torch.Tensor
    values: torch.Tensor
    whole: bool = False


# ---------------------------------------------------------------------------------------------------------- memory


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
