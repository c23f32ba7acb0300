"""What a training loop is told about its gradients: `step()` without any, and gradients that were not cleared.

Backward adds to `.grad`. Who does not clear it after `step()` counts a batch twice. Whether it was cleared is seen when
the next gradient of one small parameter comes: what is there then must be nothing, or zero.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

__all__ = ["GradientWatch"]

_SURE_AFTER = 3


class GradientWatch:
    """Looks at the gradients of one training loop; each thing is told once.

    Args:
        trained: the parameters that require a gradient.
    """

    def __init__(self, trained: Sequence[torch.Tensor]) -> None:
        self._trained = trained
        self._armed = self._kept = self._kept_told = self._none_told = False
        self._cleared = 0
        watched = min(trained, key=torch.Tensor.numel)
        me, parameter = weakref.ref(self), weakref.ref(watched)

        def coming(_gradient: torch.Tensor) -> None:
            if (watch := me()) is not None and (held := parameter()) is not None:
                watch.coming(held)

        self._hook = watched.register_hook(coming)  # type: ignore[no-untyped-call]

    def coming(self, parameter: torch.Tensor) -> None:
        """Backward is about to add to the gradient of this one."""
        if not self._armed or self._cleared >= _SURE_AFTER:
            return
        self._armed = False
        gradient = parameter.grad
        self._kept = gradient is not None and gradient.layout is torch.strided and bool(gradient.count_nonzero())
        self._cleared += not self._kept

    def at_step(self) -> str | None:
        """`step` was called: what the user is to be told; None if nothing is."""
        self._armed = True
        if not self._none_told and all(parameter.grad is None for parameter in self._trained):
            self._none_told = True
            return (
                "step() was called and no parameter has a gradient, so it counts nothing: call loss.backward() before"
            )
        if self._kept and not self._kept_told:
            self._kept_told = True
            return (
                "the gradients were not cleared between two steps, so batches are counted twice: call "
                "optimizer.zero_grad() after each step()"
            )
        return None

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()
