"""The samples behind a gradient, counted by the model: the rows of what it is given.

Loops that own the call of `step`, such as Accelerate's, leave no place for the size of a batch. So each call of the
model is noted with its rows, and counts once the backward pass of *its output* has added to the gradient of a trained
parameter. A pass that nobody differentiates (a metric, a rollout) counts nothing, in whatever mode the model is.
A loss may also be made of derivatives of the model. Its gradient need not come through the output, so a call whose
derivative can be differentiated (`create_graph=True`, `torch.func`) has a part in each backward pass that follows.
Layers that are given data apart from the model make the number unknown (`shoal.train.batch_parts`).

Samples are counted right or not at all. Where rows and samples may be two things, or a gradient came from elsewhere,
`take` raises `ConfigError`: a guess could be wrong by a factor, and then so is the weight of this peer.

- One backward pass is one batch. Several calls of the model in it are counted once if they were given the same tensors;
  else they may be several batches, or parts of one.
- The first dimension is the batch, unless the layers say another thing (`shoal.train.batch_layout`).
- A size that is given otherwise is compared with what was counted, and a warning names both if they differ. Samples
  need not be rows: tokens, frames, or two calls for each sample are no mistake.
- If the gradients were cleared since, nothing counts that came before: a `GradScaler` may have left its step out.
- A Trainer that hands out its batches, and calls no model as a whole (Lightning's), tells each one (`begin_batch`).
  That is one call then, to which all backward passes until the next one belong.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._C import _functorch
from torch.autograd import Variable, forward_ad

from shoal.base.checks import whole
from shoal.base.untraced import untraced
from shoal.errors import ConfigError
from shoal.protocol.wire import MAX_SAMPLES_OF_STEP
from shoal.train.batch_calls import BatchCall, differentiable
from shoal.train.batch_layout import BatchLayout, looked
from shoal.train.batch_parts import BatchParts
from shoal.train.gradient_watch import TensorMark
from shoal.train.rows import rows_in, rows_of_call

__all__ = ["BatchRows", "rows_of", "samples_of"]

_CHECKED = 100
"""So many steps are looked at for what a loop of their kind does not do: it costs nothing afterwards."""

_CURE = "Give the size to step(), or batch_size_per_step to the optimizer"
_NO_CALL = (
    "not all gradients came from calls of the model as it was given (model(...)): another method than forward, a "
    "layer, a copy of the model, or a loss of derivatives alone, is not seen. Give as model= what you call (the "
    "compiled model, too)"
)
_AGAIN = "several steps were taken from one batch, and each of them may be from all of its samples, or from a part"
_SEVERAL = (
    "one backward pass went through several calls of the model that were given other tensors, and these may be several "
    "batches, or parts of one"
)
_TRANSFORMED = "a transform of torch.func called the model, and hides how many samples it is given"


class BatchRows:
    """Counts the samples that one model is trained on.

    Args:
        model: that is given the batches.
        trained: its parameters that require a gradient.
        one_batch: whether each backward pass is about one batch, however often the model is called in it.
        rows: says how many samples a call has that was given these arguments, by position and by name, or why that is
            not known.
        fixed: the samples of each step, as the optimizer was given them: the count only checks that.
        by_batch: whether `begin_batch` tells each batch. Then calls of the model say nothing.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trained: Sequence[torch.Tensor],
        *,
        one_batch: bool = False,
        rows: Callable[[Sequence[Any], Mapping[str, Any]], int | str] | None = None,
        fixed: int | None = None,
        by_batch: bool = False,
    ) -> None:
        self._trained, self._one_batch, self._rows, self._fixed = trained, one_batch, rows, fixed
        self._by_batch = by_batch
        self._told_batch: tuple[Any, int | str, int] | None = None  # without a backward pass; its rows, its thread
        self._batch: BatchCall | None = None  # once it has one
        self._checked, self._told = 0, False
        self._layout, me = BatchLayout(model), weakref.ref(self)
        self._parts = BatchParts(model, [] if by_batch else trained, _AfterLayer(me))
        self._under_way: dict[int, list[BatchCall]] = {}  # the calls that a backward pass has come to, by its number
        self._added: set[int] = set()  # backward passes that have added to a gradient, and are not counted yet
        self._clear()

        @untraced
        def added(_parameter: torch.Tensor) -> None:
            if (rows := me()) is not None:
                rows._added.add(torch._C._current_graph_task_id())  # noqa: SLF001 (as torch's own hooks do)

        @untraced
        def before(_gradient: torch.Tensor) -> None:
            if (rows := me()) is not None:
                rows.before_adding()

        self._hooks = [parameter.register_post_accumulate_grad_hook(added) for parameter in trained]  # type: ignore[no-untyped-call]
        if by_batch:
            self._hooks += [parameter.register_hook(before) for parameter in trained]  # type: ignore[no-untyped-call]
        else:
            self._hooks.append(model.register_forward_pre_hook(_BeforeForward(me), with_kwargs=True))
            self._hooks.append(model.register_forward_hook(_AfterForward(me), with_kwargs=True, always_call=True))

    def _clear(self) -> None:
        self._why: str | None = None
        self._key = -1  # the number of the last backward pass
        self._batches = list[list[BatchCall]]()  # the calls of each
        self._known = set[BatchCall]()
        self._derived = list[BatchCall]()  # those whose derivatives a backward pass may go through, and not the output
        self._mark: TensorMark | None = None  # the gradient that the last of them left
        self._added.clear()

    def begin_batch(self, batch: Any, *, collated: bool = False) -> None:
        """A batch comes. All backward passes until the next one are about it, and it counts once in each step.

        Args:
            batch: what a training step is given.
            collated: see `rows_in`.
        """
        self._under_way.clear()  # those of the batches before are over, or have raised
        counted = rows_in(batch, collated=collated) if self._rows is None else self._rows([batch], {})
        self._told_batch, self._batch = (batch, counted, threading.get_ident()), None
        self.begins([batch], {})

    def before_adding(self) -> None:
        """A backward pass is about to add to the gradient of a trained parameter."""
        if self._told_batch is not None:
            (batch, counted, thread), self._told_batch = self._told_batch, None
            if self._rows is None:  # only now the layers have had it; on a GPU this is a thread of torch's
                counted = looked(self._layout.rows, counted, [batch], {}, None, thread)
            self._batch = BatchCall(counted)
        if self._batch is not None and torch._C._current_graph_task_id() not in self._under_way:  # noqa: SLF001
            self.coming(self._batch)

    @property
    def batches(self) -> int:
        """Backward passes that count in the next step; with `begin_batch`: batches."""
        return len(self._batches)

    @property
    def samples_of_batch(self) -> int:
        """Those of the batch that was told last, once it had a backward pass; 0 if they are not known."""
        return 0 if self._batch is None or isinstance(self._batch.rows, str) else self._batch.rows

    def begins(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The model is about to be called."""
        self._parts.begins()
        if self._rows is None and torch.is_grad_enabled() and not _is_transformed():
            looked(self._layout.begins, args, kwargs)

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """The model was called; without an output if it has raised."""
        self._parts.ends()
        outputs: list[torch.Tensor] | str = looked(differentiable, output) if torch.is_grad_enabled() else []
        if not outputs:
            self._layout.end()
            return
        within = torch._C._current_graph_task_id()  # noqa: SLF001 (an activation checkpoint calls it within backward)
        if within == -1:
            self._forget_raised()
            if not self._under_way:
                self._forget_cleared()
        if isinstance(outputs, str):
            self._why = self._why or outputs
            self._layout.end()
            return
        counted: int | str
        if _is_transformed():
            counted = _TRANSFORMED
        elif self._rows is None:
            counted = looked(self._layout.rows, rows_of_call(args, kwargs), args, kwargs, output)
        else:
            counted = self._rows(args, kwargs)
        looked(self._parts.join, args, kwargs)
        call = BatchCall(counted, within).take_in(args, kwargs)
        if counted == _TRANSFORMED or forward_ad._current_level >= 0:  # noqa: SLF001 (it has no public name)
            self._derived.append(call)
        self._watch(call, outputs)

    def layer_called(self, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """A layer of the model was called."""
        if not self._parts.is_apart():
            return
        outputs, call = looked(differentiable, output), BatchCall(_NO_CALL, is_layer=True)
        if outputs and not isinstance(outputs, str) and looked(self._parts.add, call, args, kwargs, outputs) is True:
            self._watch(call.take_in(args, kwargs), outputs)

    def _watch(self, call: BatchCall, outputs: Sequence[torch.Tensor]) -> None:
        """Note when a backward pass comes to one of these outputs of a call."""
        me = weakref.ref(self)

        def coming(_gradient: torch.Tensor) -> None:
            if (rows := me()) is not None and not call.joined:
                rows.coming(call)

        for each in outputs:
            each.register_hook(coming)  # type: ignore[no-untyped-call]

    def coming(self, call: BatchCall) -> None:
        """A backward pass has come to the output of this call."""
        now = torch._C._current_graph_task_id()  # noqa: SLF001
        if torch.is_grad_enabled():  # create_graph=True
            self._derived.append(call)
        if now not in self._under_way:
            if not self._under_way:
                self._forget_cleared()
                self._without_call({now, call.within})
            self._under_way[now] = []
            Variable._execution_engine.queue_callback(partial(self.ended, now))  # noqa: SLF001
        self._under_way[now].append(call)

    @untraced
    def ended(self, number: int) -> None:
        """This backward pass is over."""
        calls = self._under_way.pop(number, [])
        if not calls or not (self._added or self._by_batch):
            return  # it has only computed a gradient for the loss (`torch.autograd.grad`)
        # Of a told batch that may be what the user writes to .grad: whether somebody has, the next look tells.
        gradients = (each.grad for each in self._trained if self._added and each.grad is not None)
        gradient = next(gradients, None)
        self._mark = None if gradient is None else TensorMark(gradient)
        self._added.clear()
        new = [call for call in dict.fromkeys(calls + self._derived) if call not in self._known]
        if new and self._why is None:
            key = number if new[0].within == -1 else new[0].within
            if key != self._key:
                self._key = key
                self._batches.append([])
            self._known.update(new)
            self._batches[-1] += new
            self._batches[-1].sort(key=lambda each: each.is_layer)  # they come last
            self._why = self._why_not(self._batches[-1])

    def _why_not(self, batch: Sequence[BatchCall]) -> str | None:
        """Why the rows of a batch are not known; None if they are those of its first call."""
        first = batch[0]
        if first.taken:
            return _AGAIN
        for each in batch:
            if each.is_layer and any(each.has_of(other) for other in batch if not other.is_layer):
                continue
            if isinstance(each.rows, str):
                return each.rows
            if not first.like(each) and each is not first and (not self._one_batch or first.rows != each.rows):
                return _SEVERAL
        return None

    @property
    def _samples(self) -> int:
        return sum(rows for batch in self._batches if isinstance(rows := batch[0].rows, int))

    def _forget_cleared(self) -> None:
        """If the gradients are none, or zero again, nothing counts that came before."""
        if not self._known and not self._added:
            return
        gradients = [gradient for each in self._trained if (gradient := each.grad) is not None]
        if gradients and self._mark is not None and self._mark.is_of(gradients[0]):
            return  # nobody has written to them
        values = (each if each.layout is torch.strided else each.coalesce().values() for each in gradients)
        if not any(bool(each.count_nonzero()) for each in values):
            self._clear()

    def _forget_raised(self) -> None:
        """This thread calls the model: backward passes through its calls before are over, or have raised.

        Other threads may be within theirs: an actor plays with the model that a trainer trains.
        """
        me = threading.get_ident()
        for number, calls in list(self._under_way.items()):
            if any(call.thread == me for call in calls):
                self._under_way.pop(number, None)

    def _without_call(self, passes: set[int]) -> None:
        if self._added - passes:
            self._why = self._why or _NO_CALL

    def take(self, cure: str = _CURE) -> int:
        """The samples since the last time; 1, of nothing, if there is no gradient.

        Args:
            cure: says what to do if they are not known.

        Raises:
            ConfigError: it is not known, or none; the count stays.
        """
        self._forget_cleared()
        if self._by_batch and not (self._known or self._added or self._why):
            # They were counted before, or are zeros: there was no backward pass since.
            for each in self._trained:
                each.grad = None
        if all(each.grad is None for each in self._trained):
            self.forget()
            return 1
        self._without_call(set())
        if self._why is None and not self._known:
            self._why = _NO_CALL
        if self._why is None and not self._samples:
            self._why = "the batch of the model is empty: leave it out"
        if self._why is not None:
            raise ConfigError(f"batch_size is missing: {self._why}. {cure}")
        samples = self._samples
        for batch in self._batches if self._by_batch and self._rows is None else ():
            batch[0].take()
        self.forget()
        return samples

    def check(self, given: int, *, may_be_pairs: bool = False) -> str | None:
        """The size was given: a warning if it is not what was counted, once; then the count begins anew.

        Args:
            given: the samples of this step.
            may_be_pairs: whether each sample may have several backward passes, as in a GAN.
        """
        found = None if self._told else self._difference(given, may_be_pairs=may_be_pairs)
        self._told = self._told or found is not None
        self.forget()
        if self._fixed is not None and (self._told or self._checked >= _CHECKED):
            self.close()
        return found

    def _difference(self, given: int, *, may_be_pairs: bool) -> str | None:
        self._forget_cleared()
        self._without_call(set())
        if self._why is not None or not self._known or given == (rows := self._samples):
            return None
        firsts = [batch[0] for batch in self._batches]
        if given in map(sum, zip(*(each.units for each in firsts), strict=False)):
            return None  # frames, or tokens
        tokens = sum(each.tokens for each in firsts)
        if (tokens / 2 if given == self._fixed else rows) < given <= tokens:
            return None  # those that are no padding
        if may_be_pairs and len(firsts) > 1 and all(each.rows == given for each in firsts):
            return None
        passes = "" if len(firsts) < 2 else f" in {len(firsts)} backward passes"
        return (
            f"step() was told that its gradients are of {given} samples, and the model was given {rows} rows for "
            f"them{passes}. If a sample is a row, give batch_size={rows} to step(), or leave batch_size and "
            "batch_size_per_step out, and rows are counted: a wrong number gives this peer a wrong weight. If samples "
            "are something else here, let all peers count them so"
        )

    def forget(self) -> None:
        """Count the next step: this one was taken, or its size was given otherwise."""
        self._checked += 1
        self._parts.clear(last=self._checked >= _CHECKED)
        self._under_way.clear()
        self._clear()

    def close(self) -> None:
        """Count no more."""
        self._layout.close()
        self._parts.close()
        for hook in self._hooks:
            hook.remove()


class _Hook:
    """A hook of the model. In a copy of the model, also one that was pickled, it does nothing."""

    def __init__(self, counts: Callable[[], BatchRows | None] | None = None) -> None:
        self._counts = counts

    @property
    def __name__(self) -> str:
        """What TorchScript asks for, before it compiles the hooks of a model."""
        raise ConfigError(
            "torch.jit.script cannot compile a model whose samples are counted: script it before shoal.Optimizer() is "
            f"made, or give the shoal.Optimizer batch_size_per_step and script it after {_CHECKED} steps"
        )

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return type(self), ()


class _BeforeForward(_Hook):
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and self._counts is not None and (rows := self._counts()) is not None:
            rows.begins(args, kwargs)


class _AfterForward(_Hook):
    @torch.compiler.disable(reason="it counts samples for shoal.Optimizer: give the compiled model as its model=")  # type: ignore[untyped-decorator, no-untyped-call]
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if (rows := None if self._counts is None else self._counts()) is not None:
            rows.called(args, kwargs, output)


class _AfterLayer(_Hook):
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.compiler.is_compiling() and self._counts is not None and (rows := self._counts()) is not None:
            rows.layer_called(args, kwargs, output)


def rows_of(
    model: torch.nn.Module | None, batch_size_per_step: int | None, trained: Sequence[torch.Tensor]
) -> BatchRows | None:
    """Count the batches of a model; None if nothing can count (TorchScript)."""
    if model is None or isinstance(model, torch.jit.ScriptModule):
        return None
    return BatchRows(model, trained, fixed=batch_size_per_step)


def samples_of(
    given: int | None, rows: BatchRows | None, warn: Callable[[str], None], *, may_be_pairs: bool = False
) -> int:
    """The samples behind the gradients that are there: as given, or else as counted.

    Args:
        given: as the user says.
        rows: counts them.
        warn: is told if both are known, and differ.
        may_be_pairs: whether each sample may have several backward passes, as in a GAN.

    Raises:
        ConfigError: neither is there, or it is no number of samples; nothing was changed.
    """
    if given is None and rows is None:
        raise ConfigError(f"batch_size is missing. {_CURE}")
    if given is None and rows is not None:
        return whole("batch_size", rows.take(), most=MAX_SAMPLES_OF_STEP)
    samples = whole("batch_size", given, most=MAX_SAMPLES_OF_STEP)
    if rows is not None and (message := rows.check(samples, may_be_pairs=may_be_pairs)) is not None:
        warn(message)
    return samples


def _is_transformed() -> bool:
    """Whether a transform of `torch.func` calls the model: `vmap` gives it one sample at a time."""
    return _functorch.peek_interpreter_stack() is not None
