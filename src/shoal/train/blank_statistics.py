"""Statistics of an optimizer that has taken no step, for programs that ask for a place to load others into.

`torch.distributed.checkpoint` does: it calls `step` with gradients of zeros before it reads a state dict. No step is
taken then. The program is shown what an optimizer has before its first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.train.gradient_sum import values_of
from shoal.train.optimizer_state import is_number
from shoal.train.trial import blank_statistics
from shoal.train.workplace import Workplace

__all__ = ["BlankStatistics"]


class BlankStatistics:
    """The statistics of one optimizer as they are before its first step.

    Args:
        optimizer: whose.
        trained: its parameters that require a gradient.
        workplace: it is tried there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, trained: Sequence[torch.Tensor], workplace: Workplace) -> None:
        self._optimizer, self._trained, self._workplace = optimizer, trained, workplace

    def are_asked_for(self, *, began: bool) -> bool:
        """Whether a step is called to make statistics only.

        There are none yet, each gradient is zero, and so is each rate, or no batch was counted yet.

        Args:
            began: whether one was.
        """
        if self._optimizer.state or (began and any(group.get("lr") for group in self._optimizer.param_groups)):
            return False
        gradients = [parameter.grad for parameter in self._trained]
        return not any(gradient is None or bool(values_of(gradient).count_nonzero()) for gradient in gradients)

    def make(self) -> dict[torch.Tensor, dict[Any, Any]]:
        """Make them, by parameter: see `blank_statistics` of `trial`."""
        with self._workplace.at_work():
            return blank_statistics(self._optimizer)

    def state_dict(self, shown: Mapping[torch.Tensor, Any]) -> dict[str, Any]:
        """That of the optimizer; before its first step with these statistics."""
        saved = self._optimizer.state_dict()
        if not saved["state"]:
            parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            saved["state"] = {number: shown[each] for number, each in enumerate(parameters) if each in shown}
        return saved

    @property
    def were_stepped_to(self) -> bool:
        """Whether the optimizer has taken one step, and its statistics are zero: there were no gradients."""
        entries = [entry for entry in self._optimizer.state.values() if isinstance(entry, dict)]
        counts: list[Any] = [entry.get("step") for entry in entries]
        if not entries or not all(is_number(count) and float(count) == 1 for count in counts):
            return False
        values = [each for entry in entries for name, each in entry.items() if name != "step"]
        tensors = [each for each in values if isinstance(each, torch.Tensor) and each.numel()]
        return bool(tensors) and not any(bool(each.count_nonzero()) for each in tensors)
