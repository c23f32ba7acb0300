"""Plain values in JSON, with their types: JSON allows only texts as keys, and has neither tuples nor sets.

Such a value becomes an object of one entry, whose key names its type: ``{"(dict)": [[KEY, VALUE], …]}``, ``{"(tuple)":
[VALUE, …]}``. A tensor becomes ``{"(tensor)": [PLACE, STRIDES]}``, and is kept elsewhere.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.errors import ConfigError

__all__ = ["exact", "number", "pack", "typed", "unpack", "untyped"]

_PLAIN = (bool, int, float, str)  # in this order: a bool is an int
_MOST_BITS = 14_284  # of an integer that Python writes and reads: of 4300 digits, `sys.set_int_max_str_digits`
_PAIRS: dict[str, type[dict[Any, Any]]] = {"(dict)": dict, "(Counter)": Counter, "(OrderedDict)": OrderedDict}
_LISTED: dict[str, type] = {"(tuple)": tuple, "(set)": set}
_NAMES: dict[type, str] = {kind: name for name, kind in (_PAIRS | _LISTED).items()}
_TENSOR = "(tensor)"
_SPECIAL = {*_PAIRS, *_LISTED, _TENSOR}


def pack(value: Any, where: str = "extra", tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """The same in what JSON knows; a number of another library becomes Python's own.

    Args:
        value: numbers, texts and None, in lists, tuples, sets and dictionaries (also `Counter` and `OrderedDict`).
        where: it is, for people.
        tensors: where to put those in it, under their places; None if there must be none.

    Raises:
        ConfigError: it holds anything else.
    """
    if value is None:
        return None
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ConfigError(
            f"{where} is an integer of more than 4300 digits, which Python does not read: give it as text"
        )
    for plain in _PLAIN:
        if isinstance(value, plain):
            return plain(value)
    kind = type(value)
    if tensors is not None and isinstance(value, torch.Tensor):
        tensors[where] = value
        # Products of matrices are rounded otherwise if one lies otherwise in memory.
        return {_TENSOR: [where, list(torch.empty_like(value, device="meta").stride())]}
    if kind is list:
        return [pack(each, f"{where}[{index}]", tensors) for index, each in enumerate(value)]
    if kind is dict and all(type(key) is str and key not in _SPECIAL for key in value):
        return {key: pack(each, f"{where}[{key!r}]", tensors) for key, each in value.items()}
    if kind in _PAIRS.values():
        pairs = [
            [pack(key, f"a key of {where}"), pack(each, f"{where}[{key!r}]", tensors)] for key, each in value.items()
        ]
        return {_NAMES[kind]: pairs}
    if kind in _LISTED.values():
        return {_NAMES[kind]: [pack(each, f"{where}[{index}]", tensors) for index, each in enumerate(value)]}
    raise ConfigError(
        f"{where} is of type {kind.__name__}, which a checkpoint cannot bring back: give numbers, texts and None, in "
        "lists, tuples, sets and dictionaries"
    )


def unpack(value: Any, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
    """The value that was given to `pack`.

    Args:
        value: what that returned.
        tensor: finds the tensor of a place; None if there is none.
    """
    if isinstance(value, list):
        return [unpack(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    if tensor is not None and _TENSOR in value:
        place, steps = value[_TENSOR]
        found = tensor(place)
        return torch.empty_strided(found.shape, steps, dtype=found.dtype, device=found.device).copy_(found)
    for name, kind in _PAIRS.items():
        if name in value:
            return kind({unpack(key): unpack(each, tensor) for key, each in value[name]})
    for name, listed in _LISTED.items():
        if name in value:
            return listed(unpack(each, tensor) for each in value[name])
    return {key: unpack(each, tensor) for key, each in value.items()}


def exact(value: float) -> torch.Tensor:
    """A number of Python's, without rounding."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")


def number(value: torch.Tensor, kind: str) -> float:
    """Read the result of `exact` for a number of this type."""
    kinds: dict[str, type[float]] = {"bool": bool, "int": int, "float": float}
    return kinds[kind](value.item())


def typed(value: Any) -> list[Any]:
    """A number or a tensor, with its type, for JSON."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    return [type(value).__name__, value]


def untyped(entry: Sequence[Any]) -> Any:
    """The value that `typed` was given."""
    kind, value = entry
    return torch.tensor(value, dtype=getattr(torch, kind[6:]), device="cpu") if kind.startswith("torch.") else value
