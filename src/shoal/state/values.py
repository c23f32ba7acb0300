"""The values that a state may hold: NaN nowhere, infinities where its owner allows them.

A donor checks its tensors when it copies them, does not share a bad state, and says which tensors hold infinities. A
receiver checks the tensors that it has put together: if any other value is not finite, the donor has not told the
truth.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from shoal.errors import ConfigError

__all__ = ["infinite_tensors", "worst_value"]


def worst_value(tensor: torch.Tensor) -> str:
    """`NaN` if there is one, else `infinity` if there is one, else an empty text."""
    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return ""
    # NaN comes through both, an infinity through one of them; ten times as fast as to ask every element.
    low, high = torch.aminmax(tensor.detach())
    if bool(torch.isnan(low)):
        return "NaN"
    return "" if bool(torch.isfinite(low)) and bool(torch.isfinite(high)) else "infinity"


def infinite_tensors(tensors: Sequence[torch.Tensor], share: range, allowed: Collection[int]) -> list[int]:
    """The positions of the tensors that hold infinities.

    Args:
        tensors: the state.
        share: the positions to look at.
        allowed: where infinities are meant to be.

    Raises:
        ConfigError: there is NaN somewhere, or an infinity elsewhere; names the tensor.
    """
    found = []
    for position in share:
        worst = worst_value(tensors[position])
        if worst == "NaN" or (worst and position not in allowed):
            raise ConfigError(f"tensor {position} of the state holds {worst}, so it is not given to others")
        if worst:
            found.append(position)
    return found
