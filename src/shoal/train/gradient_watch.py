"""The gradients of a training loop: those that are spent, and warnings about them.

The warnings are about none, none any more, not cleared, sparse ones that travel whole, or those of a batch that a
scaler has left out.

Backward adds to `.grad`. A loop that does not clear it after `step()` counts a batch twice. This is seen when the next
gradient of one small parameter comes: the gradient that is there must then be None, changed since, or zero. Looking for
zeros costs a wait for the device, so it is done a few times only.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils.weak import TensorWeakRef

from shoal.base.names import known_as

__all__ = ["GradientWatch", "SpentGradients", "TensorMark"]

_SURE_AFTER = 3
"""A loop that has written zeros through `.data` so often goes on doing it."""

_GONE_AFTER = 50

_MUCH = 1 << 20
"""Bytes of a parameter: below, it does not matter how its gradient travels."""


class TensorMark:
    """Remembers which tensor this is, and whether somebody has written to it since.

    It keeps no tensor alive, and asks no device. What is written through `.data` goes unseen.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = TensorWeakRef(tensor), _version(tensor)

    def is_of(self, tensor: torch.Tensor | None) -> bool:
        """Whether it is this tensor, with the values that it had."""
        return tensor is not None and self._tensor() is tensor and _version(tensor) == self._version

    def equals(self, other: TensorMark) -> bool:
        """Whether both are of one tensor, which is still there, with the same values."""
        return self._version == other._version and (mine := self._tensor()) is not None and mine is other._tensor()


class SpentGradients:
    """The gradients that are in `.grad` now, and do not count when `step` comes with them.

    Either a call of `step` that raised has counted them, or another state was taken over since they were computed.

    Args:
        trained: the parameters that require a gradient.
    """

    def __init__(self, trained: Sequence[torch.Tensor]) -> None:
        self._trained = trained
        self._spent = [None if each.grad is None else TensorMark(each.grad) for each in trained]

    def are_there(self) -> bool:
        """Whether all of them are still there, and nobody has written to one since (except through `.data`)."""
        for parameter, spent in zip(self._trained, self._spent, strict=True):
            gradient = parameter.grad
            if gradient is None or spent is None:
                if (gradient is None) != (spent is None):
                    return False
            elif not spent.is_of(gradient):
                return False
        return True


class GradientWatch:
    """Looks at the gradients of one training loop; each thing is told once.

    Args:
        trained: the parameters that require a gradient.
        whole: whether all rows of a sparse gradient are sent, as they are.
        tell: takes the warning about a batch that was left out, if nobody but `step` clears gradients. `step` is not
            called then, so it cannot tell.
    """

    def __init__(
        self, trained: Sequence[torch.Tensor], *, whole: bool = False, tell: Callable[[str], None] | None = None
    ) -> None:
        self._trained, self._may_be_sparse = trained, whole
        self._armed = self._kept = self._kept_told = self._none_told = False
        self._left: TensorMark | None = None  # of the gradient that `step` has seen last
        self._tell, self._scaled = tell, False
        self._zeroed = 0
        self._without: list[int | None] = [None] * len(trained)  # steps in a row; None: it never had one
        self._gone_told = False
        # One with elements: many losses have no use for an empty one, so its gradient never comes.
        self._watched = watched = min(trained, key=lambda each: each.numel() or math.inf)
        me, parameter = weakref.ref(self), weakref.ref(watched)

        def coming(_gradient: torch.Tensor) -> None:
            if (watch := me()) is not None and (held := parameter()) is not None:
                watch.coming(held)

        self._hook = watched.register_hook(coming)  # type: ignore[no-untyped-call]

    def coming(self, parameter: torch.Tensor) -> None:
        """Backward is about to add to the gradient of this one."""
        armed, self._armed = self._armed, False
        gradient = parameter.grad
        if self._tell is not None and self._was_left_out():
            self._tell(
                "a GradScaler of torch has left out a step with reuse_grad_buffers=True, so its gradients, which are "
                "not finite, were not cleared, and no step follows: use a shoal.GradScaler, or "
                "step(grad_scaler=scaler)"
            )
            self._tell = None
        if self._kept_told or self._zeroed >= _SURE_AFTER or not (armed or self._kept):
            return
        if armed and (gradient is None or self._left is None or not self._left.is_of(gradient)):
            return
        # The loss of another model may have come first (the generator's, in a GAN): the loop clears what that leaves.
        self._kept = gradient is not None and gradient.layout is torch.strided and bool(gradient.count_nonzero())
        self._zeroed += not self._kept

    def scaler_steps(self) -> None:
        """A scaler is about to call `step`, unless gradients are not finite."""
        self._scaled = True

    def _was_left_out(self) -> bool:
        """Whether the scaler has not called `step`, and nobody has cleared the gradients."""
        scaled, self._scaled = self._scaled, False
        if not scaled:  # a look waits for the device
            return False
        dense = [each.grad for each in self._trained if each.grad is not None and each.grad.layout is torch.strided]
        return not all(bool(torch.isfinite(each).all()) for each in dense)

    def at_step(self) -> str | None:
        """`step` was called: the warning for the user, or None."""
        self._scaled = False
        kept, self._kept, self._armed = self._kept, False, True
        self._left = None if self._watched.grad is None else TensorMark(self._watched.grad)
        if not self._none_told and all(parameter.grad is None for parameter in self._trained):
            self._none_told = True
            return (
                "step() was called and no parameter has a gradient, so it counts nothing: call loss.backward() before"
            )
        if (gone := self._gone()) is not None and not self._gone_told:
            self._gone_told = True
            name = known_as(self._trained[gone], gone)
            return (
                f"trained parameter {name} had gradients, and none in the last {_GONE_AFTER} steps: if it was replaced "
                "in the model (load_state_dict(assign=True)), make a new shoal.Optimizer"
            )
        if (sparse := self._sparse()) is not None:
            self._may_be_sparse = False
            parameter = self._trained[sparse]
            rows, mib, name = parameter.shape[0], parameter.nbytes >> 20, known_as(parameter, sparse)
            return (
                f"trained parameter {name} has sparse gradients, and a round sends all its {rows} rows ({mib} MiB), "
                "touched or not: give it ErrorFeedback(TopKCompression(...)) as the strategy's compression"
            )
        if kept and not self._kept_told:
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
            elif not parameter.requires_grad:  # it was frozen, so nothing is missing
                self._without[index] = None
            elif (steps := self._without[index]) is not None:
                self._without[index] = steps + 1
                if steps + 1 == _GONE_AFTER:
                    return index
        return None

    def _sparse(self) -> int | None:
        """A large parameter with a sparse gradient."""
        if not self._may_be_sparse:
            return None
        large = ((number, each.grad) for number, each in enumerate(self._trained) if each.nbytes >= _MUCH)
        return next((number for number, grad in large if grad is not None and grad.layout is not torch.strided), None)

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 (asks no device)
