"""Public names of a package that are loaded on first use, so that importing it takes no time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["lazy"]


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package (PEP 562).

    Args:
        package: the package's name.
        homes: the module that has each public name. For a submodule of the package this is the package itself.
    """
    there = sys.modules[package].__dict__

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value: object = import_module(f"{package}.{name}") if home == package else getattr(import_module(home), name)
        there[name] = value
        return value

    return load, lambda: sorted({*there, *homes})
