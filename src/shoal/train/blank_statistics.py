"""Statistics of an optimizer that has taken no step, for programs that ask for a place to load others into.

`torch.distributed.checkpoint` does: it calls `step` with gradients of zeros before it reads a state dict. No step is
taken then, and the program is shown what the optimizer has before its first one: see `blank_statistics` of `trial`. If
the torch optimizer has taken such a step before shoal knew it, that step does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.train.gradient_sum import values_of
from shoal.train.optimizer_state import is_number

__all__ = ["are_asked_for", "shown_in", "without_blank_step"]


def are_asked_for(optimizer: torch.optim.Optimizer, trained: Sequence[torch.Tensor], *, began: bool) -> bool:
    """Whether a step is called to make statistics only.

    There are none yet, each gradient is zero, and so is each rate, or no batch was counted yet.

    Args:
        optimizer: that is to step.
        trained: its parameters that require a gradient.
        began: whether a batch was counted.
    """
    if optimizer.state or (began and any(group.get("lr") for group in optimizer.param_groups)):
        return False
    gradients = [each.grad for each in trained]
    return not any(gradient is None or bool(values_of(gradient).count_nonzero()) for gradient in gradients)


def shown_in(optimizer: torch.optim.Optimizer, shown: Mapping[torch.Tensor, Any]) -> dict[str, Any]:
    """The state dict of the optimizer; before its first step with these statistics, by parameter."""
    saved = optimizer.state_dict()
    if not saved["state"]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        saved["state"] = {number: shown[each] for number, each in enumerate(parameters) if each in shown}
    return saved


def without_blank_step(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """These statistics of an optimizer; if they are those of one step without gradients, as they were before it.

    All are zero then, as before the first step, and the counters go back to 0. Otherwise Adam's first step would be
    smaller, and the peer would begin with one step more than the others.
    """
    entries = [entry for entry in state.values() if isinstance(entry, dict)]
    counts: list[Any] = [entry.get("step") for entry in entries]
    values = [each for entry in entries for name, each in entry.items() if name != "step"]
    tensors = [each for each in values if isinstance(each, torch.Tensor) and each.numel()]
    blank = tensors and all(is_number(count) and float(count) == 1 for count in counts)
    if not blank or any(bool(each.count_nonzero()) for each in tensors):
        return dict(state)
    return {
        key: {**entry, "step": entry["step"] - entry["step"]} if isinstance(entry, dict) else entry
        for key, entry in state.items()
    }
