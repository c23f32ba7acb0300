"""What a training loop is told about its gradients: none at all, none any more, or gradients that were not cleared.

Backward adds to `.grad`. Who does not clear it after `step()` counts a batch twice. Whether it was cleared is seen when
the next gradient of one small parameter comes: what is there then must be nothing, or zero.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

__all__ = ["GradientWatch"]

_SURE_AFTER = 3
_GONE_AFTER = 50


class GradientWatch:
    """Looks at the gradients of one training loop; each thing is told once.

    Args:
        trained: the parameters that require a gradient.
    """

    def __init__(self, trained: Sequence[torch.Tensor]) -> None:
        self._trained = trained
        self._armed = self._kept = self._kept_told = self._none_told = False
        self._cleared = 0
        self._without: list[int | None] = [None] * len(trained)  # steps in a row; None: it never had one
        self._gone_told = False
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
        if (gone := self._gone()) is not None and not self._gone_told:
            self._gone_told = True
            return (
                f"trained parameter {gone} had gradients, and none in the last {_GONE_AFTER} steps: if it was replaced "
                "in the model (load_state_dict(assign=True)), make a new shoal.Optimizer"
            )
        if self._kept and not self._kept_told:
            self._kept_told = True
            return (
                "the gradients were not cleared between two steps, so batches are counted twice: call "
                "optimizer.zero_grad() after each step()"
            )
        return None

    def _gone(self) -> int | None:
        """The first parameter that had gradients, and none for long."""
        for index, parameter in enumerate(self._trained):
            if parameter.grad is not None:
                self._without[index] = 0
            elif (steps := self._without[index]) is not None:
                self._without[index] = steps + 1
                if steps + 1 == _GONE_AFTER:
                    return index
        return None

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()
