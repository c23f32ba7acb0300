"""Values within what a program hands to a model, or gets from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType
from typing import Any

import torch

__all__ = ["tensors_in", "within"]

_NOTHING_WITHIN = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, torch.Size, torch.device, torch.dtype, torch.layout}
)
"""Most arguments of operations are of these types. To ask whether such a value is a mapping takes 1 µs."""


def within(value: Any) -> Iterable[Any]:
    """The values in a mapping, a list, a tuple or a dataclass; nothing of anything else."""
    if type(value) in _NOTHING_WITHIN:
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, however deep, in their order; the value itself if it is one."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for each in within(value):
            if type(each) not in _NOTHING_WITHIN:
                yield from tensors_in(each)
