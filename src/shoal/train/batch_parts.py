"""The layers of a model that are given data apart from the calls of the model.

`model(a)` and `model.encoder(b)` in one loss are two batches, and calls of the model tell of one. So a hook at each
layer with trained parameters looks for such layers: as long as there are any, else for a while.

A layer's output is no batch of its own where the model is given it: `model(model.embed(ids))`. Neither is the output of
a layer that gets tensors which were computed before (the outputs of the model), or parameters alone.

A compiled model runs without the hook at which a call begins, so nothing tells what its layers are called for. They are
left alone. Hooks that were compiled with them stay, and do nothing: to remove them compiles the model once more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from shoal.base.nested import tensors_in
from shoal.train.batch_calls import BatchCall
from shoal.train.batch_layout import has_compiled

__all__ = ["BatchParts"]


class BatchParts:
    """Tells which layers are given data apart from the calls of one model.

    Args:
        model: that has the layers.
        trained: its parameters that require a gradient.
        hook: at each layer, after its call.
    """

    def __init__(self, model: torch.nn.Module, trained: Sequence[torch.Tensor], hook: Callable[..., object]) -> None:
        self._calls: dict[int, int] = {}  # of the model, that go on; by thread
        # By the numbers of the operations that made what they returned. Its graph keeps a call.
        self._apart = weakref.WeakValueDictionary[int, BatchCall]()
        self._found, self._model = False, weakref.ref(model)
        owned = set(map(id, trained))
        self._hooks = [
            layer.register_forward_hook(hook, with_kwargs=True)
            for layer in ([] if has_compiled(model) else model.modules())
            if layer is not model and not isinstance(layer, torch.jit.ScriptModule)  # which takes no hooks
            if any(id(each) in owned for each in layer.parameters())
        ]

    def begins(self) -> None:
        """A call of the model begins."""
        if self._hooks:
            thread = threading.get_ident()
            self._calls[thread] = self._calls.get(thread, 0) + 1

    def ends(self) -> None:
        """A call of the model is over, or has raised."""
        if not self._hooks:
            return
        thread = threading.get_ident()
        calls = self._calls.pop(thread, 0)
        if calls > 1:
            self._calls[thread] = calls - 1
        elif not calls:  # nothing told that it begins
            self.close(is_compiled=True)

    def is_apart(self) -> bool:
        """Whether a layer that is called now is called apart from the model."""
        if self._calls or not self._hooks:
            return False
        # An activation checkpoint calls layers within the backward pass, to compute once more what a call has computed.
        return torch._C._current_graph_task_id() == -1  # noqa: SLF001 (as torch's own hooks do)

    def add(
        self, call: BatchCall, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]
    ) -> bool:
        """A layer was called apart.

        Args:
            call: its own.
            args: what it was given by position.
            kwargs: what it was given by name.
            outputs: what it returned that can be differentiated.

        Returns:
            Whether it was given data.
        """
        data = [each for each in tensors_in([*args, *kwargs.values()]) if not isinstance(each, torch.nn.Parameter)]
        if not data or any(each.grad_fn is not None for each in data):
            return False
        self._apart.update({each.grad_fn._sequence_nr(): call for each in outputs if each.grad_fn is not None})  # noqa: SLF001
        self._found = True
        return True

    def join(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The model was called with these: layers that have made them are a part of that call."""
        if not self._apart:
            return
        nodes, seen = [each.grad_fn for each in tensors_in([*args, *kwargs.values()])], set[Node]()
        while nodes:
            if (node := nodes.pop()) is not None and node not in seen:
                seen.add(node)
                if (call := self._apart.get(node._sequence_nr())) is not None:  # noqa: SLF001 (the only name that a node has)
                    call.join()
                nodes += [each for each, _ in node.next_functions]

    def clear(self, *, last: bool) -> None:
        """A step was made.

        Args:
            last: whether layers need not be looked at any more if none was called apart.
        """
        self._calls.pop(threading.get_ident(), None)  # a call that was interrupted
        if last and self._hooks and not self._found:
            self.close()

    def close(self, *, is_compiled: bool = False) -> None:
        """Look at no layer any more.

        Args:
            is_compiled: whether the model is, by the look of its calls.
        """
        hooks, self._hooks = self._hooks, []
        for call in list(self._apart.values()):
            call.join()
        if is_compiled or ((model := self._model()) is not None and has_compiled(model)):
            return
        for hook in hooks:
            hook.remove()
