"""The order in which a tensor's values are counted: tiles are ranges of it.

It is that of the shape, or that of `torch.channels_last` (and `channels_last_3d`), in which the values lie in memory.
None stands for the former. The rows of a sparse embedding are counted in an order of their own, which is not that of
memory (`Scattered`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Order", "Scattered", "flat", "like", "order_of", "shaped"]


@dataclass(frozen=True)
class Scattered:
    """An order of rows in which neighbours are far from each other: row `r` is at ``r * factor % count``.

    With a factor near ``count / 1.618`` the first rows, however many, lie evenly between all others. So do those of any
    range: each range of places has its share of them.

    Attributes:
        count: how many rows there are.
        factor: has no divisor in common with `count`.
    """

    count: int
    factor: int

    @classmethod
    def of(cls, count: int) -> Scattered:
        """The order of so many rows, at least one."""
        factor = max(round(count * (math.sqrt(5) - 1) / 2), 1)
        while math.gcd(factor, count) != 1:
            factor += 1
        return cls(count, factor)

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        """Where rows are, int64."""
        return rows * self.factor % self.count

    def rows(self, places: torch.Tensor) -> torch.Tensor:
        """Which rows are at these places, int64."""
        return places * pow(self.factor, -1, self.count) % self.count


Order = Sequence[int] | Scattered | None
"""The dimensions that values run through in memory, the slowest first; or the order of rows."""
_CHANNELS_LAST = {4: (torch.channels_last, (0, 2, 3, 1)), 5: (torch.channels_last_3d, (0, 2, 3, 4, 1))}


def order_of(tensor: torch.Tensor) -> Order:
    """The order of a tensor's values."""
    kind, order = _CHANNELS_LAST.get(tensor.ndim, (None, None))
    if kind is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=kind):
        return None
    return order


def flat(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Its values in an order; a view, if they lie so."""
    if isinstance(order, Scattered):
        return tensor[order.rows(torch.arange(order.count, dtype=torch.int64, device=tensor.device))].reshape(-1)
    return (tensor if order is None else tensor.permute(*order)).reshape(-1)


def shaped(values: torch.Tensor, shape: Sequence[int], order: Order) -> torch.Tensor:
    """A tensor of a shape whose values were put into an order; a view, unless it is an order of rows."""
    if isinstance(order, Scattered):
        return values.view(*shape)[order.places(torch.arange(order.count, dtype=torch.int64, device=values.device))]
    if order is None:
        return values.view(*shape) if shape else values.view(())
    there = values.view([shape[each] for each in order])
    return there.permute([list(order).index(each) for each in range(len(shape))])


def like(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """One-dimensional values with the shape of a tensor, in its order; a view."""
    return shaped(values, tensor.shape, order_of(tensor))
