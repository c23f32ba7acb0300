"""Which tensors of a state hold values that are not finite: such a state went wrong, unless infinities are meant.

It is neither given to others nor saved, and none is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from shoal.errors import ConfigError

__all__ = ["infinite_tensors", "worst_values"]

_SMALL_ELEMENTS = 1 << 12


def worst_values(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, str]]:
    """The positions of the tensors with values that are not finite, in order, and the worst of these.

    It is `NaN` if there is one, else `infinity`.
    """
    small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    doubtful: list[int] = []
    for position, tensor in enumerate(tensors):
        if tensor.dtype.is_floating_point and (numel := tensor.numel()):
            among = small.setdefault((tensor.dtype, tensor.device), []) if numel <= _SMALL_ELEMENTS else doubtful
            among.append(position)
    for positions in small.values():  # together, since a call of torch takes longer than to look at a small tensor
        largest = torch.stack(torch._foreach_norm([tensors[each] for each in positions], math.inf))  # noqa: SLF001
        if not bool(torch.isfinite(largest).all()):
            doubtful += positions
    for position in sorted(doubtful):
        if worst := _worst_value(tensors[position]):
            yield position, worst


def _worst_value(tensor: torch.Tensor) -> str:
    # NaN comes through both, an infinity through one of them; ten times as fast as to ask every element.
    low, high = torch.aminmax(tensor.detach())
    if bool(torch.isnan(low)):
        return "NaN"
    return "" if bool(torch.isfinite(low)) and bool(torch.isfinite(high)) else "infinity"


def infinite_tensors(
    tensors: Sequence[torch.Tensor], share: range, allowed: Collection[int], called: Callable[[int], str]
) -> list[int]:
    """The positions of the tensors that hold infinities.

    Args:
        tensors: the state.
        share: the positions to look at.
        allowed: where infinities are meant to be.
        called: what people call the tensor of a position.

    Raises:
        ConfigError: there is NaN somewhere, or an infinity elsewhere; names the tensor.
    """
    found = []
    for index, worst in worst_values([tensors[position] for position in share]):
        position = share[index]
        if worst == "NaN" or position not in allowed:
            raise ConfigError(f"{called(position)} holds {worst}, so it is not given to others")
        found.append(position)
    return found
