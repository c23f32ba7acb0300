"""Checks of plain arguments (flags, numbers, paths). Each message names the argument.

They need no torch, because a peer without tensors needs none. Numbers of numpy and torch count as Python's own.
"""

from __future__ import annotations

import math
import operator
import os
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import TypeVar

from shoal.errors import ConfigError

__all__ = ["flag", "own_number", "path", "positive", "seconds", "share", "whole"]

T = TypeVar("T")


def flag(name: str, value: object) -> bool:
    """A flag: True or False, also numpy's, 1 or 0.

    Raises:
        ConfigError: the value is anything else. A text such as "no" would count as True.
    """
    with suppress(Exception):  # arrays and tensors of several values cannot be compared with one
        if value in (True, False):
            return bool(value)
    raise ConfigError(f"{name} must be True or False, got {value!r:.80}")


def own_number(value: T) -> T:
    """A number of another library as Python's own; any other value as it is, for a check that names it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    with suppress(TypeError):
        return operator.index(value)  # type: ignore[arg-type, return-value]
    return float(value) if isinstance(value, Real) else value  # type: ignore[return-value]


def whole(name: str, value: object, *, least: int = 1, most: int | None = None) -> int:
    """A whole number; raises `ConfigError` for anything else."""
    number: object = own_number(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if most is not None and number > most:
        raise ConfigError(f"{name} must be at most {most:,}, got {number:,}")
    return number


def seconds(name: str, value: object, default: float) -> float:
    """A number of seconds, or the default for None; raises `ConfigError` for anything else."""
    if value is None:
        return default
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"{name} must be a number of seconds above 0, got {value!r}")
    return number


def positive(name: str, value: object) -> float:
    """A finite number above 0; raises `ConfigError` for anything else."""
    number = own_number(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ConfigError(f"{name} must be a number above 0, or None for none, got {value!r:.80}")
    return float(number)


def share(name: str, value: object) -> float:
    """A part of a whole, from 0 to below 1; raises `ConfigError` for anything else."""
    number = own_number(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1:
        raise ConfigError(f"{name} must be a number from 0 to below 1, got {value!r:.80}")
    return float(number)


def path(name: str, value: object) -> Path:
    """The path of a file or folder, as it is now: the program may change its folder. `~` is the user's home.

    Raises:
        ConfigError: it is none.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} must be the path of a file or folder, got {value!r:.80}")
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no such user; or the present folder is gone
        raise ConfigError(f"{name}={text!r:.80} is no path here: {error}. Give the whole path") from error
