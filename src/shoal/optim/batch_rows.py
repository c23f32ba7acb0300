"""The samples behind a gradient, counted by the model: the rows of the first tensor that it is given.

Loops that own the call of `step`, such as Accelerate's, leave no place for the size of a batch. A batch is counted when
its backward pass comes, so a second pass of the model over it adds nothing, and neither does a pass without one. If the
gradient was cleared before that, nothing counts that came before: a `GradScaler` may have left its step out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["BatchRows", "rows_of"]


class BatchRows:
    """Counts the samples that one model is trained on.

    Args:
        model: that is given the batches.
        trained: its parameters that require a gradient.
    """

    def __init__(self, model: torch.nn.Module, trained: Sequence[torch.Tensor]) -> None:
        self._forward = self._samples = 0
        watched = min(trained, key=torch.Tensor.numel)
        me, parameter = weakref.ref(self), weakref.ref(watched)

        def at_backward(_gradient: torch.Tensor) -> None:
            if (rows := me()) is not None and (held := parameter()) is not None:
                rows.backward(begins=held.grad is None)

        self._hooks = [
            model.register_forward_pre_hook(_BeforeForward(me), with_kwargs=True),
            watched.register_hook(at_backward),  # type: ignore[no-untyped-call]
        ]

    def forward(self, rows: int) -> None:
        """The model is given so many."""
        self._forward = max(self._forward, rows)

    def backward(self, *, begins: bool) -> None:
        """Their gradient comes; `begins` if it is the first one since gradients were cleared."""
        self._samples = (0 if begins else self._samples) + self._forward
        self._forward = 0

    def take(self) -> int:
        """The samples since the last time; 0 if the model was given no tensor."""
        samples = self._samples or self._forward  # the watched parameter may have no part in this loss
        self._samples = self._forward = 0
        return samples

    def close(self) -> None:
        """Count no more."""
        for hook in self._hooks:
            hook.remove()


class _BeforeForward:
    """The hook of the model. In a copy of the model, also one that was pickled, it does nothing."""

    def __init__(self, counts: Callable[[], BatchRows | None] | None = None) -> None:
        self._counts = counts

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = None if self._counts is None else self._counts()
        if rows is not None and module.training and torch.is_grad_enabled():
            rows.forward(_rows([args, kwargs]))

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()


def rows_of(
    model: torch.nn.Module | None, batch_size_per_step: int | None, trained: Sequence[torch.Tensor]
) -> BatchRows | None:
    """Count the batches of a model whose size is not given."""
    return None if model is None or batch_size_per_step is not None else BatchRows(model, trained)


def _rows(given: Iterable[Any]) -> int:
    """The rows of the first tensor that has any."""
    for each in given:
        if isinstance(each, torch.Tensor):
            if each.ndim:
                return len(each)
        elif isinstance(each, Mapping):
            if rows := _rows(each.values()):
                return rows
        elif isinstance(each, list | tuple) and (rows := _rows(each)):
            return rows
    return 0
