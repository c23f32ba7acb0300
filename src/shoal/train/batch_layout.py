"""Where a model has its batch, as its layers say: in the first dimension, in the second one, or nowhere.

Rows are counted along the first dimension of what a model is given. Recurrent layers and attention have their batch in
the second one unless `batch_first` is set, and take one sample without a batch, as convolutions and linear layers do.
A model may also be given one sample without a batch, and make a batch of one of it. A cell (`GRUCell`) is given one
step of all sequences at a time, cut out of either dimension. Only the layers know. So in the
first call with tensors of so many dimensions hooks look at what such layers are given. A layer speaks for the model if
its tensor has the sizes of one that the model was given. What was found holds for all calls of that kind, and the hooks
are gone: a compiled model never has them, and its outputs are asked instead.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from shoal.base.nested import tensors_in, within

__all__ = ["BatchLayout", "alike", "has_compiled", "looked", "sizes_of"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_MOST_KINDS = 32
"""A model whose calls have ever more kinds of tensors is not looked at any more: its rows count."""

_SEQUENCES = (nn.RNNBase, nn.MultiheadAttention)


class _Seen(NamedTuple):
    """What a layer was given that has its batch in the second dimension, or one sample.

    Attributes:
        layer: its name.
        shape: of the tensor.
        batch: the dimension of the batch; None if there is none.
        sequence: whether the rows of one sample may be samples.
        mixes: whether the layer mixes the rows of a sample: its input may have other features than the model's.
    """

    layer: str
    shape: tuple[int, ...]
    batch: int | None
    sequence: bool
    mixes: bool

    @property
    def one(self) -> tuple[int, ...] | None:
        """The shape of the one sample that it was given; None if it was given more."""
        if self.batch is None:
            return self.shape
        before, size, after = self.shape[: self.batch], self.shape[self.batch], self.shape[self.batch + 1 :]
        return (*before, *after) if size == 1 else None


class _Cell(NamedTuple):
    """What a cell was given in one step of a loop.

    Attributes:
        layer: its name.
        batch: its rows; 0 for a step of one sample, without a batch.
        has_state: whether it was given a state of the steps before, too.
    """

    layer: str
    batch: int
    has_state: bool


class _Looks(NamedTuple):
    """What was seen in a call, and the hooks that look."""

    seen: list[_Seen | _Cell | str]
    hooks: list[RemovableHandle]


class _Found(NamedTuple):
    """Where the batch is: in the second dimension of this tensor; nowhere, if there is none; or why it is not known."""

    tensor: int | None = None
    why: str | None = None


def looked(look: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | str:
    """What a look finds; if it raises, that, as the reason why nothing is known.

    Users' models are given tensors of any kind, and a look at them must not fail where the user calls the model.
    """
    try:
        return look(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 (whatever a user's tensor raises)
        return f"what the model was given or returned cannot be looked at ({type(error).__name__}: {f'{error}'[:200]})"


def sizes_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor; none of a nested one, whose parts have their own."""
    return () if tensor.is_nested else tuple(tensor.shape)


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
        if model is None or kind in self._found or len(self._found) >= _MOST_KINDS or has_compiled(model):
            return
        seen, hooks = self._looks[threading.get_ident()] = _Looks([], [])
        for name, layer in model.named_modules():
            if not isinstance(layer, (*_SEQUENCES, nn.RNNCellBase, _ConvNd, nn.Linear)):
                continue
            look = _Look(seen, _named(name, layer))
            if layer is model:
                look(layer, tuple(args), dict(kwargs))  # torch calls no hook that comes so late
            else:
                hooks.append(layer.register_forward_pre_hook(look, with_kwargs=True))

    def rows(
        self,
        counted: int | str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any,
        thread: int | None = None,
    ) -> int | str:
        """The samples of a call that is over.

        Args:
            counted: its rows along the first dimension, or why they are not known.
            args: what the model was given by position.
            kwargs: what it was given by name.
            output: what it returned.
            thread: in which it began; None: this one.
        """
        seen, kind = self.end(thread), _kind_of(args, kwargs)
        given = list(tensors_in([*args, *kwargs.values()]))
        if kind in self._found:
            found = self._found[kind]
        elif len(self._found) >= _MOST_KINDS:
            found = None
        else:
            layers: Sequence[_Seen | _Cell | str] = _possible(self._model(), given) if seen is None else seen
            outputs = list(tensors_in(output))
            lone = [tensor for each in (*args, *kwargs.values()) for tensor in _lone(each)]
            found, is_sure = _judged(layers, given, lone, outputs, is_seen=seen is not None)
            if found is None and is_sure and isinstance(counted, int) and _is_of_one(outputs, counted, self._model()):
                found = _Found(why=f"the model was given {counted} rows, and returned one: they may be one sample")
            if is_sure:
                self._found[kind] = found
        if found is None:
            return counted
        if found.why is not None:
            return found.why
        return 1 if found.tensor is None else given[found.tensor].size(1)

    def end(self, thread: int | None = None) -> list[_Seen | _Cell | str] | None:
        """The call that goes on in a thread (None: this one) is over: look at no layer any more.

        Returns:
            What was seen in it; None if it was not looked at.
        """
        if (looks := self._looks.pop(threading.get_ident() if thread is None else thread, None)) is None:
            return None
        for hook in looks.hooks:
            hook.remove()
        return looks.seen

    def close(self) -> None:
        """Look at no layer any more, for whatever call."""
        for thread in list(self._looks):
            self.end(thread)


class _Look:
    """The hook of a layer. In a copy of the model, and in other threads than the call's, it does nothing."""

    def __init__(self, seen: list[_Seen | _Cell | str] | None = None, name: str = "") -> None:
        self._into, self._name, self._thread = seen, name, threading.get_ident()

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next(iter((*args, *kwargs.values())), None)
        if self._into is None or not isinstance(given, torch.Tensor) or self._thread != threading.get_ident():
            return
        if isinstance(layer, nn.RNNCellBase):
            sizes = sizes_of(given)
            has_state = any(each is not None for each in (*args[1:], kwargs.get("hx")))
            self._into.append(_Cell(self._name, sizes[0] if len(sizes) > 1 else 0, has_state))
            return
        seen = looked(_seen_by, layer, self._name, given)
        self._into += [] if seen is None else [seen]

    def __reduce__(self) -> tuple[type[_Look], tuple[()]]:
        return _Look, ()


def _seen_by(layer: nn.Module, name: str, given: torch.Tensor) -> _Seen | None:
    """What this layer says of the batch; None if that is the first dimension."""
    sizes, batch = sizes_of(given), 0
    if isinstance(layer, _SEQUENCES):
        least, batch = 2, 0 if layer.batch_first else 1
    else:
        least = 1 + len(layer.kernel_size) if isinstance(layer, _ConvNd) else 1
    is_batched = len(sizes) > least
    mixes = isinstance(layer, _SEQUENCES)
    sequence = mixes or (isinstance(layer, nn.Linear) and len(sizes) > 2)
    seen = _Seen(name, sizes, batch if is_batched else None, sequence, mixes)
    return seen if len(sizes) >= least and (batch or seen.one is not None) else None


def _named(name: str, layer: nn.Module) -> str:
    return f"its {type(layer).__name__}" + (f" {name!r}" if name else "")


def _kind_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(each.ndim for each in tensors_in([*args, *kwargs.values()]))


def has_compiled(model: nn.Module) -> bool:
    """Whether a hook in it would become a part of what was compiled."""
    return any(
        type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None  # noqa: SLF001 (no other way)
        for each in model.modules()
    )


def _possible(model: nn.Module | None, given: Sequence[torch.Tensor]) -> list[_Seen]:
    """What the first layer may have been given that has its batch in the second dimension: nobody has looked."""
    for name, layer in () if model is None else model.named_modules():
        is_cell = isinstance(layer, nn.RNNCellBase)
        if is_cell or (isinstance(layer, _SEQUENCES) and not layer.batch_first):
            return [
                _Seen(_named(name, layer), sizes_of(each), batch=1, sequence=True, mixes=True)
                for each in given
                if each.ndim > (2 if is_cell and each.is_floating_point() else 1)  # a cell may be given one step
            ]
    return []


def alike(given: Sequence[Any]) -> bool:
    """Whether these are tensors of one sort."""
    return (
        all(isinstance(each, torch.Tensor) for each in given) and len({(each.ndim, each.dtype) for each in given}) == 1
    )


def _lone(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, without those of a list that may hold one for each sample."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields") and len(value) > 1
    if is_list and (alike(value) or not any(isinstance(each, torch.Tensor) for each in value)):
        return
    for each in within(value):
        yield from _lone(each)


def _judged(
    seen: Sequence[_Seen | _Cell | str],
    given: Sequence[torch.Tensor],
    lone: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    is_seen: bool,
) -> tuple[_Found | None, bool]:
    """What the layers say of the batch, and whether other sizes would say the same."""
    cells: dict[str, list[_Cell]] = {}
    for each in seen:
        if isinstance(each, str):
            return _Found(why=each), False
        if isinstance(each, _Cell):
            cells.setdefault(each.layer, []).append(each)
            continue
        place = next((number for number, tensor in enumerate(given) if _is_batch(each, sizes_of(tensor))), None)
        if place is None:
            rows = next((sizes_of(tensor)[0] for tensor in lone if _is_one(each, tensor)), None)
            if rows is not None:
                return _judged_one(each, rows, outputs), rows > 1
            continue
        steps, batch = each.shape[:2]
        if steps == batch:
            return None, False
        by_outputs, by_given = (_rows_beside(each.shape[:2], tensors) for tensors in (outputs, given))
        if by_outputs == {steps}:
            return None, True  # one result for each row
        if by_outputs == {batch} or (is_seen and steps not in by_outputs | by_given):
            return _Found(place), True
        why = f"{each.layer} has the batch second, and it is not clear whether a batch has {steps} samples or {batch}"
        return _Found(why=why), True
    judged = [_judged_cell(steps, given, lone, outputs) for steps in cells.values()]
    return next((each for each in judged if each != (None, True)), (None, True))


def _judged_cell(
    calls: Sequence[_Cell],
    given: Sequence[torch.Tensor],
    lone: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> tuple[_Found | None, bool]:
    """What a cell says of the batch: it has as many rows as one dimension of what the model was given."""
    layer, batch = calls[0].layer, max(each.batch for each in calls)  # sequences that have ended may be left out
    has_state, shapes = any(each.has_state for each in calls), list(map(sizes_of, given))
    if any(sizes[:2] == (batch, batch) for sizes in shapes):
        return None, False
    first = [sizes for sizes in shapes if sizes[:1] == (batch,)]
    place = next((number for number, sizes in enumerate(shapes) if sizes[1:2] == (batch,)), None)
    if first and (place is None or max(map(len, first)) >= len(shapes[place])):
        return None, True
    if place is not None:
        steps, _ = sizes = shapes[place][:2]
        by_outputs, by_given = (_rows_beside(sizes, tensors) for tensors in (outputs, given))
        # Without a state, the parts that it was given may as well be samples.
        is_clear = has_state or len(calls) == 1
        if is_clear and (by_outputs == {batch} or steps not in by_outputs | by_given):
            return _Found(place), True
        why = f"{layer} was given {batch} rows, and it is not clear whether a batch has {steps} samples or {batch}"
        return _Found(why=why), True
    rows = max((sizes[0] for tensor in lone if (sizes := sizes_of(tensor))), default=0)
    if batch > 1:
        if not rows or batch % rows == 0:
            return None, True
    elif not has_state or rows < 2 or any(len(calls) == math.prod(sizes[:2]) for sizes in shapes if len(sizes) > 2):
        return None, True  # a loop over the samples
    elif len(calls) == rows:
        return _judged_one(_Seen(layer, (rows,), 1 if batch else None, sequence=True, mixes=True), rows, outputs), True
    why = (
        f"{layer} was given {batch or 1} rows in {len(calls)} steps, and it is not clear which of {rows} rows they are"
    )
    return _Found(why=why), True


def _judged_one(seen: _Seen, rows: int, outputs: Sequence[torch.Tensor]) -> _Found:
    """What a layer says that took so many rows for one sample."""
    results = {sizes[0] for each in outputs if (sizes := sizes_of(each))}
    if seen.sequence and rows > 1 and (rows in results or (seen.batch is not None and not results)):
        how = "without a batch" if seen.batch is None else "as a batch of one"
        return _Found(why=f"{seen.layer} was given {rows} rows {how}, which may be one sequence or {rows} samples")
    return _Found()


def _is_batch(seen: _Seen, sizes: tuple[int, ...]) -> bool:
    """Whether a layer with the batch in the second dimension was given this tensor, or what was made of it by rows."""
    return seen.batch == 1 and len(sizes) > 1 and sizes[:2] == seen.shape[:2]


def _is_one(seen: _Seen, given: torch.Tensor) -> bool:
    """Whether the one sample that a layer was given is this tensor, or was made of it row by row."""
    one, sizes = seen.one, sizes_of(given)
    if one is None or not sizes:
        return False
    bare, bare_one = ([size for size in shape if size != 1] for shape in (sizes, one))
    if not seen.sequence:  # the features of a picture may come last
        bare, bare_one = sorted(bare), sorted(bare_one)
    if len(sizes) <= len(one) and bare == bare_one:
        return True
    if not seen.sequence:
        return False
    if not given.is_floating_point():
        return sizes == one[:-1]  # an embedding
    return seen.mixes and sizes[:-1] == one[:-1]


def _is_of_one(outputs: Sequence[torch.Tensor], rows: int, model: nn.Module | None) -> bool:
    """Whether all that a model returned for these rows is of one row, and is more than a number."""
    shapes = [sizes for each in outputs if (sizes := sizes_of(each))]
    if rows <= max(1, len(shapes)) or model is None or not any(math.prod(sizes) > 1 for sizes in shapes):
        return False
    if any(isinstance(each, nn.RNNBase) for each in model.modules()):  # of its last states the second dimension counts
        shapes = [sizes[1:] if len(sizes) == 3 and sizes[1] == rows else sizes for sizes in shapes]
    return all(sizes[0] == 1 for sizes in shapes)


def _rows_beside(sizes: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> set[int]:
    """Which of two sizes the other tensors have rows of. Square ones are masks."""
    shapes = [shape for each in tensors if (shape := sizes_of(each)) and shape[:2] != sizes]
    return {shape[0] for shape in shapes if shape[0] in sizes and (len(shape) < 2 or shape[0] != shape[1])}
