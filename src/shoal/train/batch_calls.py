"""One call of a model, or of a layer apart from it: its rows, and which tensors it was given."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C import _functorch

from shoal.base.nested import tensors_in
from shoal.train.batch_layout import looked, sizes_of
from shoal.train.gradient_watch import TensorMark

__all__ = ["BatchCall", "differentiable"]


@dataclasses.dataclass(eq=False)
class BatchCall:
    """What is known of a call.

    Attributes:
        rows: of what it was given, or why they are not known.
        within: the number of the backward pass that made it, to compute an activation once more; else -1.
        given: the tensors.
        units: what else may be counted: the rows of each sample, and their rows, of the tensor of most dimensions.
        tokens: elements of its largest tensor of whole numbers.
        is_layer: whether it was a layer.
        thread: in which it was made.
        taken: whether a step has counted it, and another one may not.
        joined: whether it is part of a later call of the model, and tells nothing.
    """

    rows: int | str
    within: int = -1
    given: tuple[TensorMark, ...] = ()
    units: tuple[int, ...] = ()
    tokens: int = 0
    is_layer: bool = False
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    taken: bool = False
    joined: bool = False

    def take_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BatchCall:
        """It was given these, by position and by name; nothing is known of what cannot be looked at."""

        def look() -> None:
            tensors = list(tensors_in([*args, *kwargs.values()]))
            self.given, (self.units, self.tokens) = tuple(map(TensorMark, tensors)), _units(tensors)

        looked(look)
        return self

    def take(self) -> None:
        """A step has counted it, and another one may not."""
        self.taken = True

    def join(self) -> None:
        """A call of the model has its rows, and it tells nothing."""
        self.joined = True

    def like(self, other: BatchCall) -> bool:
        """Whether both were given the same tensors."""
        same = len(self.given) == len(other.given) > 0
        return same and all(mine.equals(theirs) for mine, theirs in zip(self.given, other.given, strict=True))

    def has_of(self, other: BatchCall) -> bool:
        """Whether all that it was given was given to the other one, too."""
        return len(self.given) > 0 and all(any(mine.equals(theirs) for theirs in other.given) for mine in self.given)


def differentiable(output: Any) -> list[torch.Tensor]:
    """The tensors of what a call returned that autograd knows."""
    return [each for each in map(_unwrapped, tensors_in(output)) if each.requires_grad]


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd sees: transforms of `torch.func` wrap it, each in a layer of its own."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def _units(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], int]:
    """What may be counted in the place of rows (see `BatchCall`)."""
    shape = max(map(sizes_of, tensors), key=len, default=())
    is_whole = [not each.is_floating_point() for each in tensors if sizes_of(each) == shape]
    depth = len(shape) if any(is_whole) else len(shape) - 1
    units = tuple(math.prod(shape[: each + 1]) for each in range(1, depth))
    return units, max((each.numel() for each in tensors if each.ndim > 1 and not each.is_floating_point()), default=0)
