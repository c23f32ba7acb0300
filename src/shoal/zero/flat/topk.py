"""Top-k with error feedback: each rank sends the largest values of its gradient, and keeps the rest for later steps.

The part that a rank has not sent yet is its residual; it is added to the next gradient. So every part of a gradient
arrives, sooner or later, and what rounding to 16 bits takes away, too. A step that is left out, or gradients that are
cleared, leave the residual as it was before.

Source: Stich et al., "Sparsified SGD with Memory" (2018); Lin et al., "Deep Gradient Compression" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from shoal.errors import ConfigError
from shoal.zero.parameters import wide_dtype

__all__ = ["Fraction", "Residual", "share"]


def share(value: object) -> float:
    """The value of `top_k`. Raises `ConfigError` if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"top_k must be a number above 0 and at most 1, the share that is sent, got {value!r}")
    return float(value)


class Fraction:
    """How much of each tile is sent; one for all parameters of a model.

    Attributes:
        value: above 0, at most 1.
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def of(self, numel: int) -> int:
        """How many of so many values: at least one."""
        return math.ceil(self.value * numel)


class Residual:
    """What this rank has not sent yet of a parameter's gradients.

    Args:
        parameter: the parameter.
        tile: the largest values are chosen among so many that follow each other.
        fraction: how many of them.

    Attributes:
        kept: one-dimensional, in the order of the parameter's values; float32 for 16 bits.
    """

    def __init__(self, parameter: torch.Tensor, tile: int, fraction: Fraction) -> None:
        self._tile, self._fraction = tile, fraction
        self.kept = torch.zeros(parameter.numel(), dtype=wide_dtype(parameter.dtype), device=parameter.device)
        self._next: torch.Tensor | None = None  # what it will be, if the gradients are stepped

    def choose(self, gradient: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The values of gradient and residual together that are sent, and where they are, in increasing order.

        Args:
            gradient: one-dimensional, as wide as `kept`.
            dtype: in which they are sent.
        """
        whole = gradient + (self.kept if self._next is None else self._next)
        places = self._largest(whole)
        sent = whole[places].to(dtype)
        whole[places] -= sent.to(whole.dtype)
        self._next = whole
        return places, sent

    def _largest(self, values: torch.Tensor) -> torch.Tensor:
        sizes = values.abs()
        even = len(values) // self._tile * self._tile
        found = []
        for start, part in ((0, sizes[:even].view(-1, self._tile)), (even, sizes[even:].view(1, -1))):
            if part.numel():
                inside = part.topk(self._fraction.of(part.shape[1]), dim=1, sorted=False).indices
                begins = start + self._tile * torch.arange(len(part), dtype=torch.int64, device=values.device)
                found.append((begins[:, None] + inside).view(-1))
        places = torch.cat(found).sort().values
        return places[values[places] != 0]

    def advance(self) -> None:
        """What was chosen is being stepped."""
        if self._next is not None:
            self.kept, self._next = self._next, None

    def keep(self) -> None:
        """What was chosen is not stepped: go back."""
        self._next = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """The memory that it takes."""
        yield self.kept
        if self._next is not None:
            yield self._next
