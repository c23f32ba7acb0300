"""Weights that a module computes from others (`torch.nn.utils.parametrize`), where a program assigns them."""

from __future__ import annotations

import sys

import torch
from torch.nn.utils.parametrize import ParametrizationList, remove_parametrizations

from shoal.errors import ConfigError
from shoal.zero.unsharded.lent import Shard

__all__ = ["keep_places"]


class _Kept(ParametrizationList):
    """Torch puts other tensors in the places of the original ones when a weight is assigned; this writes into them."""

    @property
    def is_tensor(self) -> bool:  # type: ignore[override]
        """Whether there is one original tensor. Raises `ConfigError` where torch takes all of it away in stage 3."""
        shard = next((each for each in self.parameters(recurse=False) if isinstance(each, Shard)), None)
        caller = sys._getframe(1).f_code  # noqa: SLF001 (it does not say so in any other way)
        if shard is not None and caller is remove_parametrizations.__code__:
            raise ConfigError(
                f"the parametrization of {shard.label} is taken away (remove_parametrizations) after shard(), by which "
                "another parameter would be in its place: do it before shard(), or in a model of one process that has "
                "loaded shoal.zero.full_state_dict(model)"
            )
        found: bool = self.__dict__["is_tensor"]
        return found

    def right_inverse(self, value: torch.Tensor) -> None:
        """Set the original tensors so that they give this weight."""
        if not all(hasattr(each, "right_inverse") for each in self):
            super().right_inverse(value)  # raises
        with torch.no_grad():
            found: object = value
            for each in reversed([*self]):
                found = each.right_inverse(found)
            parts = [found] if self.is_tensor else found
            names = ["original"] if self.is_tensor else [f"original{number}" for number in range(self.ntensors)]
            for name, part in zip(names, parts, strict=True):  # type: ignore[call-overload]
                getattr(self, name).copy_(part)


def keep_places(model: torch.nn.Module) -> None:
    """Let assignments of parametrized weights write into the parameters that are there."""
    for part in model.modules():
        if type(part) is ParametrizationList:
            part.__class__ = _Kept
