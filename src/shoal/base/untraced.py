"""Methods that `torch.compile` calls as they are, when a user's compiled function calls them.

Otherwise Dynamo would trace shoal's own locks, threads and rounds: minutes for a few calls, and pages of warnings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

__all__ = ["untraced"]

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Have `torch.compile` call this function, and trace nothing in it.

    As `torch.compiler.disable`, which imports Dynamo at once: a second or two. This imports it at the first call. By
    then it is there, as torch's own optimizers do the same.
    """
    return _disable_dynamo(function)
