"""The user's `extra` of a checkpoint, written in JSON so that its types come back.

JSON allows only texts as keys, and has neither tuples nor sets. Such a value becomes an object of one entry, whose key
names its type: ``{"(dict)": [[KEY, VALUE], …]}``, ``{"(tuple)": [VALUE, …]}``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from shoal.errors import ConfigError

__all__ = ["pack", "unpack"]

_PLAIN = (bool, int, float, str)  # in this order: a bool is an int
_PAIRS: dict[str, type[dict[Any, Any]]] = {"(dict)": dict, "(Counter)": Counter, "(OrderedDict)": OrderedDict}
_LISTED: dict[str, type] = {"(tuple)": tuple, "(set)": set}
_NAMES: dict[type, str] = {kind: name for name, kind in (_PAIRS | _LISTED).items()}


def pack(value: Any, where: str = "extra") -> Any:
    """The same in what JSON knows; a number of another library becomes Python's own.

    Args:
        value: numbers, texts and None, in lists, tuples, sets and dictionaries (also `Counter` and `OrderedDict`).
        where: it is, for people.

    Raises:
        ConfigError: it holds anything else.
    """
    if value is None:
        return None
    for plain in _PLAIN:
        if isinstance(value, plain):
            return plain(value)
    kind = type(value)
    if kind is list:
        return [pack(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if kind is dict and all(type(key) is str and key not in _PAIRS | _LISTED for key in value):
        return {key: pack(each, f"{where}[{key!r}]") for key, each in value.items()}
    if kind in _PAIRS.values():
        pairs = [[pack(key, f"a key of {where}"), pack(each, f"{where}[{key!r}]")] for key, each in value.items()]
        return {_NAMES[kind]: pairs}
    if kind in _LISTED.values():
        return {_NAMES[kind]: [pack(each, f"{where}[{index}]") for index, each in enumerate(value)]}
    raise ConfigError(
        f"{where} is of type {kind.__name__}, which a checkpoint cannot bring back: give numbers, texts and None, in "
        "lists, tuples, sets and dictionaries"
    )


def unpack(value: Any) -> Any:
    """The value that was given to `pack`."""
    if isinstance(value, list):
        return [unpack(each) for each in value]
    if not isinstance(value, dict):
        return value
    for name, kind in _PAIRS.items():
        if name in value:
            return kind({unpack(key): unpack(each) for key, each in value[name]})
    for name, listed in _LISTED.items():
        if name in value:
            return listed(unpack(each) for each in value[name])
    return {key: unpack(each) for key, each in value.items()}
