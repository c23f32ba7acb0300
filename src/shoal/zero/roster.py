"""The parameters that a model had when it was sharded, and which were trained: others are not handled."""

from __future__ import annotations

import weakref

import torch

from shoal.errors import LocalError
from shoal.zero.names import named_parameters

__all__ = ["Roster"]


class Roster:
    """For one model, as it is now.

    Args:
        model: not kept alive.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known = {name: (each, each.requires_grad) for name, each in named_parameters(model)}

    def check(self) -> None:
        """Raise `LocalError` if the model has another parameter now, or trains one that was frozen."""
        model = self._model()
        for name, parameter in named_parameters(model) if model is not None else ():
            known, trained = self._known.get(name, (None, False))
            if known is not parameter and (trained or parameter.requires_grad):
                raise LocalError(
                    f"{name} is another parameter than when the model was sharded, and would not be trained: write "
                    "into parameters instead of replacing them (load_state_dict without assign=True), or do it before "
                    "shard()"
                )
            if parameter.requires_grad and not trained:
                raise LocalError(
                    f"{name} was frozen when the model was sharded, and would not be trained: call shard() after you "
                    "unfreeze, on a model that has the weights of this one"
                )
