"""The order of a parameter's values in memory: stages 1 and 2 keep it, and their tiles are ranges of that order.

It is that of the shape, or that of `torch.channels_last` (and `channels_last_3d`). None stands for the former.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Order", "flat", "order_of", "shaped"]

Order = Sequence[int] | None
"""The dimensions that values run through in memory, the slowest first."""
_CHANNELS_LAST = {4: (torch.channels_last, (0, 2, 3, 1)), 5: (torch.channels_last_3d, (0, 2, 3, 4, 1))}


def order_of(tensor: torch.Tensor) -> Order:
    """The order of a tensor's values."""
    kind, order = _CHANNELS_LAST.get(tensor.ndim, (None, None))
    if kind is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=kind):
        return None
    return order


def flat(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Its values in an order; a view, if they lie so."""
    return (tensor if order is None else tensor.permute(*order)).reshape(-1)


def shaped(values: torch.Tensor, shape: Sequence[int], order: Order) -> torch.Tensor:
    """A tensor of a shape whose values were put into an order; a view."""
    if order is None:
        return values.view(*shape) if shape else values.view(())
    there = values.view([shape[each] for each in order])
    return there.permute([list(order).index(each) for each in range(len(shape))])
