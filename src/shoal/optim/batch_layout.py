"""Where a model has its batch, as its layers say: in the first dimension, in the second one, or nowhere.

Rows are counted along the first dimension of what a model is given. Recurrent layers and attention have their batch in
the second one unless `batch_first` is set, and take one sample without a batch, as convolutions and linear layers do.
Only the layers know. So in the first call with tensors of so many dimensions hooks look at what such layers are given.
A layer speaks for the model if its tensor has the sizes of one that the model was given. What was found holds for all
calls of that kind, and the hooks are gone: a compiled model never has them, and its outputs are asked instead.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from shoal.runtime.nested import tensors_in

__all__ = ["BatchLayout"]

_MOST_KINDS = 32
"""A model whose calls have ever more kinds of tensors is not looked at any more: its rows count."""

_SEQUENCES = (nn.RNNBase, nn.MultiheadAttention)


class _Seen(NamedTuple):
    """What a layer was given that has its batch in the second dimension, or no batch."""

    layer: str
    shape: tuple[int, ...]
    batched: bool
    sequence: bool


class _Looks(NamedTuple):
    """What was seen in a call, and the hooks that look."""

    seen: list[_Seen]
    hooks: list[RemovableHandle]


class _Found(NamedTuple):
    """Where the batch is: in the second dimension of this tensor; nowhere, if there is none; or why it is not known."""

    tensor: int | None = None
    why: str | None = None


class BatchLayout:
    """Learns where one model has its batch.

    Args:
        model: that is given the batches.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._found: dict[tuple[int, ...], _Found | None] = {}  # None: the rows count
        self._looks: dict[int, _Looks] = {}  # by thread: at the call that goes on there, if it is looked at

    def begins(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The model is about to be called: look at its layers, if nothing is known of such a call."""
        self.end()
        model, kind = self._model(), _kind_of(args, kwargs)
        if model is None or kind in self._found or len(self._found) >= _MOST_KINDS or _is_compiled(model):
            return
        seen, hooks = self._looks[threading.get_ident()] = _Looks([], [])
        for name, layer in model.named_modules():
            if not isinstance(layer, (*_SEQUENCES, _ConvNd, nn.Linear)):
                continue
            look = _Look(seen, _named(name, layer))
            if layer is model:
                look(layer, tuple(args), dict(kwargs))  # torch calls no hook that comes so late
            else:
                hooks.append(layer.register_forward_pre_hook(look, with_kwargs=True))

    def rows(self, counted: int | str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> int | str:
        """The samples of a call that is over.

        Args:
            counted: its rows along the first dimension, or why they are not known.
            args: what the model was given by position.
            kwargs: what it was given by name.
            output: what it returned.
        """
        seen, kind = self.end(), _kind_of(args, kwargs)
        given = list(tensors_in([*args, *kwargs.values()]))
        if kind in self._found:
            found = self._found[kind]
        elif len(self._found) >= _MOST_KINDS:
            found = None
        else:
            layers = _possible(self._model(), given) if seen is None else seen
            found, is_sure = _judged(layers, given, list(tensors_in(output)), is_seen=seen is not None)
            if is_sure:
                self._found[kind] = found
        if found is None:
            return counted
        if found.why is not None:
            return found.why
        return 1 if found.tensor is None else given[found.tensor].size(1)

    def end(self) -> list[_Seen] | None:
        """The call that goes on in this thread is over: look at no layer any more.

        Returns:
            What was seen in it; None if it was not looked at.
        """
        return self._end(threading.get_ident())

    def _end(self, thread: int) -> list[_Seen] | None:
        if (looks := self._looks.pop(thread, None)) is None:
            return None
        for hook in looks.hooks:
            hook.remove()
        return looks.seen

    def close(self) -> None:
        """Look at no layer any more, for whatever call."""
        for thread in list(self._looks):
            self._end(thread)


class _Look:
    """The hook of a layer. In a copy of the model, and in other threads than the call's, it does nothing."""

    def __init__(self, seen: list[_Seen] | None = None, name: str = "") -> None:
        self._into, self._name, self._thread = seen, name, threading.get_ident()

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next(iter((*args, *kwargs.values())), None)
        if self._into is None or not isinstance(given, torch.Tensor) or self._thread != threading.get_ident():
            return
        if isinstance(layer, _SEQUENCES):
            if given.ndim == 3 and layer.batch_first:
                return
            batched, sequence = given.ndim == 3, True
        elif given.ndim == (2 + len(layer.kernel_size) if isinstance(layer, _ConvNd) else 2) - 1:
            batched, sequence = False, False
        else:
            return
        self._into.append(_Seen(self._name, tuple(given.shape), batched, sequence))

    def __reduce__(self) -> tuple[type[_Look], tuple[()]]:
        return _Look, ()


def _named(name: str, layer: nn.Module) -> str:
    return f"its {type(layer).__name__}" + (f" {name!r}" if name else "")


def _kind_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(each.ndim for each in tensors_in([*args, *kwargs.values()]))


def _is_compiled(model: nn.Module) -> bool:
    """Whether a hook in it would become a part of what was compiled."""
    return any(
        type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None  # noqa: SLF001 (no other way)
        for each in model.modules()
    )


def _possible(model: nn.Module | None, given: Sequence[torch.Tensor]) -> list[_Seen]:
    """What the first layer may have been given that has its batch in the second dimension: nobody has looked."""
    for name, layer in () if model is None else model.named_modules():
        if isinstance(layer, _SEQUENCES) and not layer.batch_first:
            return [_Seen(_named(name, layer), tuple(each.shape), batched=True, sequence=True) for each in given]
    return []


def _judged(
    seen: Sequence[_Seen], given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, is_seen: bool
) -> tuple[_Found | None, bool]:
    """What the layers say of the batch, and whether other sizes would say the same."""
    for each in seen:
        place = next((number for number, tensor in enumerate(given) if _is_of(each, tensor)), None)
        if place is None:
            continue
        size = each.shape[0]
        if not each.batched:
            if each.sequence and any(out.ndim and out.size(0) == size for out in outputs):
                why = f"{each.layer} was given {size} rows without a batch, which may be one sequence or {size} samples"
                return _Found(why=why), True
            return _Found(), True
        steps, batch = each.shape[:2]
        if steps == batch:
            return None, False
        by_outputs, by_given = (_rows_beside(each.shape[:2], tensors) for tensors in (outputs, given))
        if by_outputs == {steps}:
            return None, True  # one result for each row
        if by_outputs == {batch} or (is_seen and steps not in by_outputs | by_given):
            return _Found(place), True
        why = f"{each.layer} has batch_first=False, and it is not clear whether a batch has {steps} samples or {batch}"
        return _Found(why=why), True
    return None, True


def _is_of(seen: _Seen, given: torch.Tensor) -> bool:
    """Whether a layer was given this tensor, or what was made of it row by row."""
    shape = tuple(given.shape)
    if seen.batched:
        return len(shape) > 1 and shape[:2] == seen.shape[:2]
    if not seen.sequence:
        return shape == seen.shape
    return shape == seen.shape[:-1] if not given.is_floating_point() else shape[:-1] == seen.shape[:-1] and bool(shape)


def _rows_beside(sizes: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> set[int]:
    """Which of two sizes the other tensors have rows of. Square ones are masks."""
    shapes = [each.shape for each in tensors if each.ndim and each.shape[:2] != sizes]
    return {shape[0] for shape in shapes if shape[0] in sizes and (len(shape) < 2 or shape[0] != shape[1])}
