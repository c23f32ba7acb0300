"""Names of tensors: whatever errors and warnings say of a tensor, they say it by its name, as far as that is known.

A program tells names with its model (`model=`) or with named parameters (`model.named_parameters()`). They are kept
here, for the whole process, because a tensor comes to most places without its name. They go with the object that has
the tensors, and not with weak references of these: torch exchanges no tensors that have such (`swap_tensors`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import TypeVar

import torch

__all__ = ["known_as", "learn", "learn_from"]

T = TypeVar("T")

_names: dict[int, tuple[weakref.ref[object], str]] = {}
"""By the `id` of the tensor: what has it, and its name."""


def learn(owner: object, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Remember these names while there is this object, which has the tensors."""
    names = {id(tensor): name for name, tensor in named}
    has = weakref.ref(owner, partial(_forget, list(names)))
    _names.update({number: (has, name) for number, name in names.items()})


def _forget(numbers: list[int], has: weakref.ref[object]) -> None:
    for number in numbers:
        if number in _names and _names[number][0] is has:
            del _names[number]


def learn_from(optimizer: torch.optim.Optimizer) -> None:
    """Remember the names that an optimizer was given."""
    groups = [group for group in optimizer.param_groups if "param_names" in group]
    learn(optimizer, (pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)))


def known_as(tensor: torch.Tensor, otherwise: T) -> str | T:
    """The name of a tensor; `otherwise` (its number, as a rule) if nobody has told it."""
    found = _names.get(id(tensor))
    return otherwise if found is None else found[1]
