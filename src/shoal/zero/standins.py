"""Stand-ins in `.grad` of parameters whose gradients are not there, but with their owners.

A stand-in has the parameter's shape and no memory: all its elements are one and the same value, NaN. So a gradient
counts as cleared when its stand-in is gone from `.grad`, however that happened (`model.zero_grad()`, that of a module
around it or of a compiled one, `parameter.grad = None`), or when zeros were written over it (`set_to_none=False`).
Nobody can take it for a gradient either: everything computed from it is NaN, and torch refuses to scale it in place, as
its own `clip_grad_norm_` would.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping

import torch

from shoal.errors import LocalError

__all__ = ["StandIns", "warn_of_zeros"]

_logger = logging.getLogger("shoal.zero")


@functools.cache  # once
def warn_of_zeros() -> None:
    """Zeros were asked for in place of no gradients."""
    _logger.warning(
        "gradients were cleared with set_to_none=False, and are None: a parameter that gets no gradient until the next "
        "step is not stepped, where one process steps it with zeros (momentum and weight decay move it then). If "
        "that is meant, use set_to_none=True, the default"
    )


class StandIns:
    """The stand-ins of some parameters.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._taken: dict[str, None] = {}  # a set that keeps its order
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, each in parameters.items():
            kinds.setdefault((each.dtype, each.device), []).append(name)
        # One value for each parameter; those of a kind in one tensor, which is read at once.
        self._marks = [
            (torch.full((len(names),), math.nan, dtype=dtype, device=device), names)
            for (dtype, device), names in kinds.items()
        ]
        self._of = {
            name: mark.expand(parameters[name].shape)
            for marks, names in self._marks
            for name, mark in zip(names, marks, strict=True)
        }

    def put(self, name: str) -> None:
        """The gradient of a parameter was taken."""
        self._parameters[name].grad = self._of[name]
        self._taken[name] = None

    def lift(self, name: str) -> None:
        """A gradient is about to be added: take the stand-in away, since the earlier gradient is elsewhere."""
        if self._parameters[name].grad is self._of[name]:
            self._parameters[name].grad = None

    def loose(self, name: str) -> torch.Tensor | None:
        """A parameter's gradient, if there is one that was not taken."""
        gradient = self._parameters[name].grad
        return None if gradient is self._of[name] else gradient

    def clear(self) -> None:
        """Clear all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None
        for marks, _ in self._marks:
            marks.fill_(math.nan)
        self._taken.clear()

    def cleared(self) -> list[str]:
        """Names of parameters whose gradients others have cleared since they were taken; each is returned once.

        Raises:
            LocalError: other values than zeros were written over one.
        """
        if not self._taken:
            return []
        for marks, names in self._marks:
            values = marks.tolist()
            if all(map(math.isnan, values)):
                continue
            marks.fill_(math.nan)
            for name, value in zip(names, values, strict=True):
                if value == 0:
                    warn_of_zeros()
                    self.lift(name)
                elif not math.isnan(value):
                    raise LocalError(
                        f"the gradient of {name} was overwritten: it is reduced already, and with its owners. Change "
                        "the loss instead; clip with optimizer.clip_grad_norm_()"
                    )
        found = [name for name in self._taken if self._parameters[name].grad is None]
        for name in found:
            del self._taken[name]
        return found
