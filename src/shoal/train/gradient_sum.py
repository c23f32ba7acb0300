"""The sum of the gradients that one peer has computed since the last step. No network, no lock.

A batch of n samples adds its mean gradient times n / unit. So the sums of peers with batches of different sizes have
one scale, and a sum of about `unit` samples is no larger than a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.averaging.allreduce.segments import LARGEST, sum_dtype
from shoal.train.finite import first_beyond

__all__ = ["GradientSum", "SampleCount", "values_of"]


class GradientSum:
    """A sum of gradients.

    Args:
        trained: the parameters whose `.grad` is summed.
        unit: samples whose gradients count as one.
        device: of the tensors; None: that of each parameter.

    Attributes:
        unit: as given.
        tensors: one for each parameter, in float32 at least.
        samples: that are in the sum.
        bound: no value of the sum is larger, by the norms of what was added; infinite if one was not known.
        had_gradient: for each parameter, whether it had a gradient.
        is_spent: the values of the tensors mean nothing any more: the next gradients take their place.
    """

    def __init__(self, trained: Sequence[torch.Tensor], unit: int, device: torch.device | None = None) -> None:
        self._trained, self.unit = trained, unit
        self.tensors = [
            torch.zeros(each.shape, dtype=_sum_dtype(each), device=device or each.device) for each in trained
        ]
        self.samples, self.bound, self.had_gradient, self.is_spent = 0, 0.0, [False] * len(trained), False

    def add(self, numbers: Sequence[int], samples: int, norm: float = math.inf) -> None:
        """Add the gradients of the parameters with these numbers: their mean over so many samples.

        Args:
            numbers: of the parameters.
            samples: that the gradients are the mean of.
            norm: of all these gradients together, or more.
        """
        try:
            self._add(numbers, samples)
            self.bound += norm * samples / self.unit
        except BaseException:
            self.forget()  # interrupted: a part may be added
            raise

    def _add(self, numbers: Sequence[int], samples: int) -> None:
        tensors = [self.tensors[index] for index in numbers]
        gradients = [gradient for index in numbers if (gradient := self._trained[index].grad) is not None]
        share = samples / self.unit
        with torch.no_grad():
            if self.is_spent and any(p.grad is None or p.grad.layout is not torch.strided for p in self._trained):
                self.clear()
            if self.is_spent:
                for tensor, gradient in zip(tensors, gradients, strict=True):
                    if (tensor.dtype, tensor.device) == (gradient.dtype, gradient.device):
                        torch.mul(gradient, share, out=tensor)  # goes through the memory once
                    else:
                        tensor.copy_(gradient).mul_(share)
            elif numbers:
                # The sum is on the CPU, or the model was moved since it was made.
                if any(tensor.device != each.device for tensor, each in zip(tensors, gradients, strict=True)):
                    gradients = [each.to(tensor.device) for tensor, each in zip(tensors, gradients, strict=True)]
                torch._foreach_add_(tensors, gradients, alpha=share)
        self._count(numbers, samples)

    def take_in(self, other: GradientSum) -> None:
        """Add all of another sum, which is over afterwards."""
        samples, bound, numbers = (
            other.samples,
            other.bound,
            [index for index, has in enumerate(other.had_gradient) if has],
        )
        if not samples:
            return
        other.forget()  # first: nothing counts twice if an interrupt comes in between
        with torch.no_grad():
            if self.is_spent:
                torch._foreach_copy_(self.tensors, other.tensors)
            else:
                torch._foreach_add_(self.tensors, other.tensors)
        self.bound += bound
        self._count(numbers, samples)

    def _count(self, numbers: Sequence[int], samples: int) -> None:
        self.is_spent = False
        for index in numbers:
            self.had_gradient[index] = True
        self.samples += samples

    @property
    def lacking(self) -> list[int]:
        """The numbers of the parameters that had no gradient."""
        return [index for index, has in enumerate(self.had_gradient) if not has]

    def unused(self) -> bytes:
        """The same as bits, the lowest first."""
        mask = bytearray(-(-len(self.had_gradient) // 8))
        for index in self.lacking:
            mask[index // 8] |= 1 << index % 8
        return bytes(mask.rstrip(b"\0"))

    def unfit(self) -> int | None:
        """The parameter whose sum cannot be averaged; None if all can. Stricter than a round is."""
        if self.is_spent:
            return None
        return first_beyond(self.tensors, lambda dtype: LARGEST[dtype] / (2 * self.unit), self.bound)

    def clear(self) -> None:
        """Set all values to 0."""
        torch._foreach_zero_(self.tensors)
        self.is_spent = False

    def forget(self) -> None:
        """Begin anew. The values stay until the next gradients come."""
        self.samples, self.bound, self.had_gradient, self.is_spent = 0, 0.0, [False] * len(self.tensors), True


class SampleCount(GradientSum):
    """Counts what was trained, where no gradients are summed. Its tensors may hold what a round is given.

    Attributes:
        batches: that were trained.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters, 1)
        self.batches = 0
        self.had_gradient = [True] * len(parameters)  # one that has not moved gives zeros

    def count(self, samples: int, batches: int = 1) -> None:
        """So many samples were trained, in so many batches."""
        self.samples += samples
        self.batches += batches

    def take_out(self, samples: int, batches: int) -> None:
        """So many of them are in a step."""
        self.samples, self.batches = max(0, self.samples - samples), max(0, self.batches - batches)

    def take_in(self, other: GradientSum) -> None:
        assert isinstance(other, SampleCount)
        samples, batches = other.samples, other.batches
        other.forget()
        self.count(samples, batches)

    def forget(self) -> None:
        self.samples = self.batches = 0


def _sum_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype for a sum of its gradients. A dtype that is no floating point is refused later, by its name."""
    return sum_dtype(parameter.dtype) if parameter.dtype.is_floating_point else parameter.dtype


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """All of its values, or those of the rows that it has."""
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()
