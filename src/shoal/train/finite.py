"""Whether values are finite, and small enough to be summed: most often one norm of all of them tells."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

__all__ = ["first_beyond", "norm_of", "not_finite", "rough_norm"]

_WIDE = (torch.float32, torch.float64)


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """The norm of all their values: `torch.nn.utils.get_total_norm` without what it does besides."""
    norms = torch._foreach_norm(list(tensors))  # noqa: SLF001 (as torch itself does)
    if len({each.device for each in norms}) > 1:
        norms = tuple(each.cpu() for each in norms)
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def rough_norm(tensors: Sequence[torch.Tensor]) -> float:
    """No less than the largest of their values, to rounding; infinite already above 1e19. On a CPU it is the faster."""
    if not all(each.device.type == "cpu" and each.dtype in _WIDE and each.is_contiguous() for each in tensors):
        return norm_of(tensors)
    return math.sqrt(sum(float(torch.dot(flat, flat)) for flat in (each.view(-1) for each in tensors)))


def not_finite(tensors: Sequence[torch.Tensor]) -> int | None:
    """The first of these with a value that is not finite; None if there is none."""
    return first_beyond(tensors, lambda dtype: torch.finfo(dtype).max)


def first_beyond(
    tensors: Sequence[torch.Tensor], limit: Callable[[torch.dtype], float], bound: float = math.inf
) -> int | None:
    """The first tensor with a value that is NaN, or larger than the limit of its dtype; None if there is none.

    Args:
        tensors: the values.
        limit: of a dtype.
        bound: no value is larger, if it is known; where it is below all limits, nothing is read.
    """
    limits = {dtype: limit(dtype) for dtype in {each.dtype for each in tensors}}
    least = min(limits.values(), default=math.inf)
    # A norm takes half as long as what is below, and one wait for the device.
    if bound <= least or (bound == math.inf and rough_norm(tensors) <= least):
        return None
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            low, high = torch.aminmax(tensor)  # NaN goes through
            largest = limits[tensor.dtype]
            if not (-largest <= float(low) and float(high) <= largest):
                return index
    return None
