"""The whole parameters of a model that FSDP2 has sharded, and the gradients in them.

FSDP2 makes a whole parameter once, frees and fills its memory, and puts it into the module in place of the shard while
a unit runs. Autograd adds gradients to it; behind a pass they are reduced into the shard's, or wait in the whole one
if nothing is to be sent yet (`no_sync`), where no program sees them: so the shard has a gradient of zeros meanwhile. It
shows when the gradient is cleared, by anybody, and FSDP2 adds the rest to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shoal.errors import LocalError
from shoal.zero.parameters import local, present_pass, weakly
from shoal.zero.ranks.watch import Watch
from shoal.zero.unsharded.freed import keep_readable
from shoal.zero.unsharded.lent import Loan, Shard, lend, watch_shard
from shoal.zero.unsharded.rows import Writes

__all__ = ["BROKE_OFF", "Unsharded"]

BROKE_OFF = (
    "the last backward pass broke off, and only a part of its gradients is there: clear them (optimizer.zero_grad()) "
    "before the next one"
)


class _Mark(NamedTuple):
    """The state of a shard's gradient when whole ones began to wait, to notice changes by others."""

    gradient: torch.Tensor
    version: int


class Unsharded:
    """The whole parameters of one model.

    Args:
        shards: the parameters, by name.
        units: the modules whose parameters are gathered together, by name. Each of them is gathered once, here, so that
            every whole parameter is known before it is used, in whichever way.
        watch: that of the ranks.

    Attributes:
        parameters: the whole ones, by name. Their memory may be freed.
    """

    def __init__(self, shards: Mapping[str, DTensor], units: Mapping[str, FSDPModule], watch: Watch) -> None:
        self._shards = dict(shards)
        self.parameters: dict[str, torch.Tensor] = {}
        self._writes: list[Writes] = []  # of programs, into each of them
        self._managed: dict[str, Any] = {}  # FSDP2's own entry for each: no other place has all kinds of gradients
        self._used: set[str] = set()  # in backward passes here, since they were cleared
        self._reduced: set[str] = set()  # had a gradient when they were last looked at
        self._passes: dict[str, tuple[torch.Tensor, int]] = {}  # a shard's gradient, and how often it was added to
        self._marks: dict[str, _Mark] = {}  # of those whose whole gradient waits
        self._task = -1
        self._nodes: list[torch.autograd.graph.Node] = []  # hooks live as long
        self._together: list[list[str]] = []  # the parameters that FSDP2 reduces at once
        names = {id(shard): name for name, shard in shards.items()}
        for place, unit in units.items():
            unit.unshard()
            state = unit._get_fsdp_state()  # noqa: SLF001
            for group in state._fsdp_param_groups:  # noqa: SLF001
                self._together.append([names[id(managed.sharded_param)] for managed in group.fsdp_params])
                for managed in group.fsdp_params:
                    name = names[id(managed.sharded_param)]
                    self._watch(name, managed, group)
                    label = f"{name} of {f'unit {place}' if place else 'the model'}"
                    shard = self._shards[name]
                    watch_shard(shard, label, watch, Writes(), managed.unsharded_param)
                    if isinstance(shard, Shard) and shard.writes is not None:
                        self._writes.append(shard.writes)
                    self._guard(label, managed, state)
            unit.reshard()

    def _watch(self, name: str, managed: Any, group: Any) -> None:
        whole = managed.unsharded_param
        self.parameters[name], self._managed[name] = whole, managed
        if not whole.is_floating_point():
            return
        trained = whole.requires_grad
        whole.requires_grad_()  # or it takes no hooks; a program may unfreeze it later
        self._nodes.append(get_gradient_edge(whole).node)
        self._nodes[-1].register_prehook(weakly(self._before))
        whole.register_hook(partial(weakly(self._hooked), name))
        whole.register_post_accumulate_grad_hook(partial(weakly(self._arrived), name, group))
        whole.requires_grad_(trained)
        managed.sharded_param.requires_grad_()
        managed.sharded_param.register_post_accumulate_grad_hook(partial(weakly(self._count), name))
        managed.sharded_param.requires_grad_(trained)

    @staticmethod
    def _guard(name: str, managed: Any, state: Any) -> None:
        """A program may use it only while its unit runs."""
        if len(managed.all_gather_outputs) == 1:  # otherwise an extension of FSDP2 has its own memory
            memory = managed.all_gather_outputs[0].untyped_storage()
            lend(managed.unsharded_param, Loan(name, memory, weakly(state._pre_backward)))  # noqa: SLF001
            keep_readable(managed)

    def _hooked(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Run what a program has registered (`register_hook`) with the parameter, or with the shard in its place."""
        for hook in [*(self._shards[name]._backward_hooks or {}).values()]:  # noqa: SLF001
            found = hook(gradient)
            gradient = gradient if found is None else found
        return gradient

    def _before(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """A gradient is about to be added to that of a whole parameter."""
        if gradients[0] is not None and self._task != (task := present_pass()):
            self._task = task
            self._look()
            self._widen()

    def _arrived(self, name: str, group: Any, _: torch.Tensor) -> None:
        """A whole parameter has a gradient of this pass."""
        self._used.add(name)
        if group._orig_dtype is None:  # noqa: SLF001 (all of the unit was frozen when FSDP2 looked at dtypes)
            group._init_mp_dtypes()  # noqa: SLF001
        if not group.reduce_grads:
            self._mark(name)

    def _mark(self, name: str) -> None:
        """The whole gradient waits."""
        shard = self._shards[name]
        if shard.grad is None:
            shard.grad = torch.zeros_like(shard, requires_grad=False)
        self._marks[name] = _Mark(shard.grad, shard.grad._version)  # noqa: SLF001 (counts changes)

    def _widen(self) -> None:
        """Gradients that are reduced at once must have one dtype: if some wait in float32, all of them do."""
        for names in self._together:
            trained = [name for name in names if self.parameters[name].requires_grad]
            waiting = [self._managed[name].unsharded_accumulated_grad for name in trained]
            wide = next((each.dtype for each in waiting if each is not None), None)
            for name, gradient in zip(trained, waiting, strict=True):
                if wide is not None and gradient is None:
                    whole = self.parameters[name]
                    self._managed[name].unsharded_accumulated_grad = torch.zeros(
                        whole.shape, dtype=wide, device=whole.device
                    )
                    self._mark(name)

    def _count(self, name: str, shard: torch.Tensor) -> None:
        """A shard has more of a gradient."""
        assert shard.grad is not None
        known, count = self._passes.get(name, (None, 0))
        self._passes[name] = shard.grad, count + 1 if known is shard.grad else 1

    def _look(self) -> None:
        """Let go of the gradients that others have cleared."""
        for name, (gradient, version) in list(self._marks.items()):
            now = self._shards[name].grad
            if not self._waits(name):
                del self._marks[name]
            elif now is None:
                self._drop(name)
            elif now is not gradient or now._version != version:  # noqa: SLF001
                raise LocalError(
                    f"the gradient of {name} was changed, while that of a backward pass within no_sync() is whole and "
                    "elsewhere: change the loss instead; clear with optimizer.zero_grad(), or by setting gradients "
                    "to None"
                )
        for name in [name for name in self._reduced if self._shards[name].grad is None]:
            self._reduced.discard(name)
            self._used.discard(name)

    def _waits(self, name: str) -> bool:
        """Whether a parameter has a whole gradient, not reduced yet."""
        return self.parameters[name].grad is not None or self._managed[name].unsharded_accumulated_grad is not None

    def _drop(self, name: str) -> None:
        self.parameters[name].grad = self._managed[name].unsharded_accumulated_grad = None
        self._used.discard(name)
        self._marks.pop(name, None)

    def clear(self, *, set_to_none: bool = True) -> None:
        """Let go of all gradients, those of the shards too; or set those that there are to zeros."""
        self._reduced.clear()
        self._passes.clear()
        for name, shard in self._shards.items():
            kept = None if set_to_none or not self.used(name) else shard.grad
            shard.grad = None if kept is None else kept.zero_()
            self._drop(name)
            if kept is not None:
                self._used.add(name)
                self._reduced.add(name)

    def forget(self) -> None:
        """Let go of the gradients of a pass that broke off. Raises `LocalError` unless all were cleared since."""
        if any(shard.grad is not None for shard in self._shards.values()):
            raise LocalError(BROKE_OFF)
        self.clear()

    def waiting(self) -> list[torch.Tensor]:
        """The whole gradients that were not reduced yet. Raises `LocalError` if others have changed some."""
        self._look()
        every = [
            gradient
            for name, whole in self.parameters.items()
            for gradient in (whole.grad, self._managed[name].unsharded_accumulated_grad)
        ]
        return [each for each in every if each is not None]

    @property
    def meant_to_wait(self) -> bool:
        """Whether some of them are of a pass that was to reduce nothing."""
        return bool(self._marks)

    def reduced(self) -> dict[str, DTensor]:
        """The gradients of shards, by the names of those that have one."""
        found = {name: shard.grad for name, shard in self._shards.items() if isinstance(shard.grad, DTensor)}
        self._reduced = set(found)
        return found

    def passes(self, name: str) -> int:
        """The number of backward passes that added to a shard's gradient, since it was cleared."""
        gradient, count = self._passes.get(name, (None, 0))
        return count if gradient is not None and gradient is self._shards[name].grad else 0

    def used(self, name: str) -> bool:
        """Whether a parameter got a gradient that was not cleared since; FSDP2 makes zeros for others."""
        gradient = self._shards[name].grad
        return gradient is not None and (name in self._used or bool(local(gradient).any()))

    def change(self) -> None:
        """The parameters are about to change: values computed from them cannot be differentiated any more."""
        increment_version(list(self.parameters.values()))
        for each in self._writes:
            each.forget()
