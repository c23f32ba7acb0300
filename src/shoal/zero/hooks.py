"""Helpers for autograd's hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["hooks_of", "present_pass", "weakly"]


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
    """How many hooks run when a gradient was added to its own."""
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
