"""What the engines need of autograd's hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

__all__ = ["present_pass", "weakly"]


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that ends with its object: what autograd refers to, Python's garbage collector does not see through."""
    found = weakref.WeakMethod(method)

    def call(*args: object) -> None:
        if (alive := found()) is not None:
            alive(*args)

    return call


def present_pass() -> int:
    """Autograd's number of the backward pass that is under way."""
    return torch._C._current_graph_task_id()  # noqa: SLF001 (there is no other way to ask)
