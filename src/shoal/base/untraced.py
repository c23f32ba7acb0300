"""Methods that `torch.compile` calls as they are, when a user's compiled function calls them.

Otherwise Dynamo would trace shoal's own locks, threads and rounds: minutes for a few calls, and pages of warnings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

__all__ = ["untraced"]

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Have `torch.compile` call this function, and trace nothing in it.

    As `torch.compiler.disable`, which imports Dynamo: 1.5 seconds. Where nobody has imported it, nothing is compiled,
    and the function is called as it is.
    """
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return call
