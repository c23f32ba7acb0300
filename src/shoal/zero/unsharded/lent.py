"""What a program may do with the weights of stage 3, whose memory is there only while their unit runs.

FSDP2 frees and fills the memory of a whole weight again and again. Whatever shares it reads freed memory in between,
and torch ends the process there, without an error. A program gets a weight as a `Whole` while its unit runs, as a
`Shard` otherwise, and has a `Replaced` if it kept one from before. Each operation of torch on any of them goes through
`_Lent.__torch_function__`: there, a read of freed memory is an error that names weight and unit, and so is an operation
on a shard beside plain tensors.

A value that was computed from a weight may leave its unit by another way than the unit's result (an attribute, a list).
FSDP2 does not see that, and would not gather the unit for its gradient: so each such value gathers the unit itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shoal.base.nested import tensors_in
from shoal.base.untraced import untraced
from shoal.errors import ConfigError
from shoal.zero.ranks.watch import Watch
from shoal.zero.unsharded import rows

__all__ = [
    "LOOKS",
    "Loan",
    "Shard",
    "is_in_place",
    "is_lent",
    "lend",
    "replace",
    "unwatched",
    "watch_shard",
    "writes_of",
]

_CURE = (
    "compute with it in the forward method of that unit, or in a method of which torch.distributed.fsdp."
    "register_fsdp_forward_method(module, name) was told after shard(); or give shard() units= without this one, so "
    "that it stays gathered while the model runs; or use stage 1 or 2. For a penalty on weights use weight_decay. "
    "Prune, fuse and parametrize modules before shard()"
)
_OF_SHARDS = ("dtensor", "placement", "sharding", "subclass", "distributed operator", "used in the graph")
"""Words of torch's errors that come of a tensor's being in shards."""
_MIXED = "mixed torch.Tensor and DTensor"
_IN_PLACE = frozenset({"data =", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})
LOOKS = (
    frozenset({"__get__", "__set__", "__delete__", "__hash__", "__len__", "__dlpack_device__", "_is_view"})
    | {"backward", "grad", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"}
    | {"dim", "dim_order", "ndimension", "size", "numel", "nelement", "stride", "storage_offset", "element_size"}
    | {"is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_neg", "is_pinned"}
    | {"is_same_size", "is_shared", "is_signed", "get_device", "untyped_storage"}
    | {"empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros"}
    | {"detach", "expand", "movedim", "narrow", "permute", "squeeze", "swapaxes", "t", "transpose", "unflatten"}
    | {"unsqueeze", "view"}
)
"""Functions that read no values, by name."""
_LEAVES = frozenset({"expand_as", "view_as"})
"""Of a tensor and itself: torch, and programs, find so the place in a graph that adds to the tensor's gradient."""
_NUMBERS = frozenset({"__bool__", "__complex__", "__float__", "__index__", "__int__", "item"})
_watching = True
_INIT, _VECTOR = "torch.nn.init", "torch.nn.utils.convert_parameters"
_EXPORTS = frozenset(("numpy", "__array__", "__dlpack__"))
"""Functions that give memory to others, who do not know when it is freed: they get that of a copy."""


@dataclasses.dataclass(frozen=True, eq=False)
class Loan:
    """A whole weight, for those who use it.

    Attributes:
        name: of the weight, and its unit, for people.
        memory: freed while the unit does not run.
        gather: gathers the unit within a backward pass; takes a gradient, and returns it.
    """

    name: str
    memory: torch.UntypedStorage
    gather: Callable[[torch.Tensor], Any]

    @property
    def over(self) -> bool:
        """Whether the memory is freed."""
        return not self.memory.size()

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares this memory."""
        # Freed memory has no address.
        return bool(tensor.untyped_storage()._cdata == self.memory._cdata)  # noqa: SLF001

    def needed(self, gradient: torch.Tensor) -> None:
        """A gradient has come to a value that was computed from the weight."""
        if self.over:
            self.gather(gradient)


class _Lent:
    """A tensor on which not every operation is possible at any time."""

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], _: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch's own way to run the function itself)
            given = [each for each in tensors_in([*args, *kwargs.values()]) if isinstance(each, _Lent)]
            setting = func.__self__.__name__ if name == "__set__" else ""  # type: ignore[attr-defined]
            if name not in LOOKS:
                _check_reads(name, given, args, kwargs)
                if name in _EXPORTS and is_lent(args[0]):
                    args = [args[0].detach().clone(), *args[1:]]
            if setting == "grad" and isinstance(args[0], Shard):
                _check_gradient(args[0].label, args[1])
            if name in _LEAVES and args[0] is args[-1] and torch.is_grad_enabled():
                args = given = [_leaf(each) for each in args]
            if func is torch.autograd.backward and not any(isinstance(each, Shard) for each in tensors_in(args[0])):
                kwargs = {**kwargs, "inputs": [_leaf(each) for each in kwargs.get("inputs") or ()] or None}
            if args and (plain := _plain(name, args[0])) is not None:
                args, given = [plain, *args[1:]], []
            if changed := _changed(f"{setting} =" if setting == "data" else name, args, kwargs):
                return _write(func, setting or name, changed, args, kwargs)
            found = _called(func, name, args, kwargs, given)
            if name != "__set__":
                _mark(found, given)
            if _watching and args and isinstance(args[0], Shard):
                for each, taken in rows.ways_to_take(func, args[0], found, args, kwargs):
                    each.taken, each.writes = taken, args[0].writes
            return found

    def check_read(self, name: str) -> None:
        """Raise `ConfigError` if a function of this name cannot read it now."""


class _Guarded(_Lent):
    loan: Loan

    def check_read(self, name: str) -> None:
        """The memory may be freed."""
        if self.loan.over:
            raise ConfigError(
                f"{self.loan.name} is used ({name}) while that unit does not run: in stage 3 its memory is freed then. "
                f"Keep a clone() of what you need, or {_CURE}"
            )


class Whole(_Guarded, torch.nn.Parameter):
    """A whole weight, while its unit runs."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A plain one."""
        memo[id(self)] = found = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class View(_Guarded, torch.Tensor):
    """A tensor that shares a whole weight's memory."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain one."""
        memo[id(self)] = found = self.detach().clone()
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Shard(_Lent, DTensor):
    """This rank's rows of a weight, in its place while its unit does not run; or a value computed from them.

    Attributes:
        label: the name of the weight, and its unit, for people.
        whole: the weight, through which passes go; None for a computed value.
        watch: that of the ranks.
        taken: how it was taken from another shard of which it would be a view in one process; None if it was not.
        writes: of the weight, or of the one of which it would be a view in one process; None for any other value.
    """

    label = "a parameter"
    whole: torch.Tensor | None = None
    watch: Watch | None = None
    taken: rows.Taken | None = None
    writes: rows.Writes | None = None

    def set_(self, *_: Any, **__: Any) -> Any:
        """Not possible; torch lets nobody see it."""
        rows.refused("set_", self.label)

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """All rows, without a gradient."""
        if torch.is_grad_enabled() and self.requires_grad:
            raise ConfigError(
                f"{self.label} is gathered (full_tensor) in a graph, in which each rank would add its own gradient to "
                f"it: gather it within torch.no_grad(), or {_CURE}"
            )
        rows.refresh(self)
        if self.watch is None or not self.numel():  # gloo cannot gather no values
            return super().full_tensor(**options)
        with self.watch.named(self.watch.turn(f"to gather {self.label}")):
            return super().full_tensor(**options)

    @property
    def __class__(self) -> type[Shard]:
        """As of any object. `swap_tensors` asks for it, and would raise an error that names no weight."""
        caller = sys._getframe(1)  # noqa: SLF001 (nothing else tells)
        asks = caller.f_code is torch.utils.swap_tensors.__code__
        if asks and sys._getframe(2).f_globals.get("__name__") != "torch.nn.modules.module":  # noqa: SLF001 (`module.to` swaps, too)
            rows.refused("swap_tensors", self.label)
        return Shard

    @__class__.setter
    def __class__(self, kind: type) -> None:
        object.__dict__["__class__"].__set__(self, kind)

    def check_read(self, name: str) -> None:
        """It may have been taken from another one that has changed since."""
        if name == "module_load":  # of `load_state_dict`, as torch.__future__ has it; swap_tensors would follow
            rows.refused(name, self.label)
        rows.refresh(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain one."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch's own way)
            memo[id(self)] = found = self.detach().clone().requires_grad_(self.requires_grad)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch's own way)
            plain = self.detach().requires_grad_(self.requires_grad)
            return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Replaced(_Lent, torch.nn.Parameter):
    """A parameter as it was before `shard`."""

    label: str

    def check_read(self, name: str) -> None:
        """It has old values, and is not trained."""
        raise ConfigError(
            f"{self.label} is used ({name}) as it was before shard(): stage 3 has put a shard in its place, which is "
            "trained instead. Take it from its module each time (module.weight), not from an earlier reference, or use "
            "stage 1 or 2"
        )


def lend(whole: torch.nn.Parameter, loan: Loan) -> None:
    """Guard a whole weight."""
    if type(whole) is torch.nn.Parameter and whole.numel():
        whole.__class__ = Whole
        whole.loan = loan  # type: ignore[attr-defined]


def watch_shard(
    shard: DTensor, name: str, watch: Watch | None, writes: rows.Writes | None, whole: torch.Tensor | None = None
) -> None:
    """Guard a shard, of a whole weight or of a computed value (None)."""
    if type(shard) is DTensor:
        shard.__class__ = Shard
        shard.label = name  # type: ignore[attr-defined]
        shard.watch = watch  # type: ignore[attr-defined]
        shard.writes = writes  # type: ignore[attr-defined]
        shard.whole = whole  # type: ignore[attr-defined]


def writes_of(named: Mapping[str, object]) -> dict[str, tuple[bool, str]]:
    """Of the weights among these whether a program has changed each since the last step; and a digest of the changes.

    Args:
        named: shards, by name; anything else is left out.
    """
    found = {name: each.writes for name, each in named.items() if isinstance(each, Shard)}
    return {name: (each.count > 0, f"{each.count} {each.digest}") for name, each in found.items() if each is not None}


def replace(original: torch.nn.Parameter, name: str) -> None:
    """Guard a parameter in whose place is a shard now."""
    if type(original) is torch.nn.Parameter:
        original.__class__ = Replaced
        original.label = name  # type: ignore[attr-defined]


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """What an optimizer computes from shards, and keeps, is its own."""
    global _watching  # noqa: PLW0603 (all shards of the process)
    before, _watching = _watching, False
    try:
        yield
    finally:
        _watching = before


def is_lent(value: object) -> bool:
    """Whether it is a whole weight, or shares the memory of one."""
    return isinstance(value, _Guarded)


def _leaf(value: Any) -> Any:
    """A trained weight in place of its shard: passes add to its gradient. Any other value as it is."""
    if isinstance(value, Shard) and value.whole is not None and value.requires_grad:
        return value.whole.requires_grad_()  # as FSDP2 does when its unit runs next
    return value


def _plain(name: str, value: Any) -> torch.Tensor | None:
    """What a function of torch that all ranks call alike works with, in place of a shard."""
    if isinstance(value, Shard) and name == "new_empty" and rows.called_in(_INIT):
        return value.to_local().detach()  # it is filled alike on all ranks
    if isinstance(value, Shard) and name == "view" and rows.called_in(_VECTOR):
        return rows.as_whole(value)
    return None


def is_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of this name changes its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True


def _check_reads(name: str, given: Sequence[_Lent], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Look whether a function can read what it was given; what it changes of shards is taken from the weight itself."""
    if name == "__setitem__" and rows.is_itself(*args):
        return
    changes = _targets(name, args, kwargs)
    for each in given:
        if not (isinstance(each, Shard) and any(each is other for other in changes)):
            each.check_read(name)


def _targets(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a function changes."""
    targets = [kwargs.get("out")]
    if name not in LOOKS and is_in_place(name, kwargs):
        targets.append(args[0] if args else kwargs.get("tensor", kwargs.get("self")))
    return [*tensors_in(targets)]


def _changed(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Shard]:
    """The shards that a function changes. Raises `ConfigError` if the change would be lost."""
    found = {}
    for each in _targets(name, args, kwargs):
        if isinstance(each, _Guarded):
            raise ConfigError(
                f"{each.loan.name} is changed ({name}) while that unit runs: in stage 3 the change would be lost, as "
                "this is a copy of the shards. Change the shards, between steps, or compute with a clone() of it, or "
                "use stage 1 or 2"
            )
        if isinstance(each, Shard):
            found[id(each)] = each
    return list(found.values())


def _write(
    func: Callable[..., Any], name: str, targets: list[Shard], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Change shards by a function, or set an attribute of this name."""
    changed = targets[0]
    rows.refused(name, changed.label)
    if name == "__setitem__" and rows.is_itself(*args):
        return None
    if name == "data" and isinstance(args[1], torch.Tensor):
        other = args[1] if isinstance(args[1], Shard) and args[1].writes not in (None, changed.writes) else None
        rows.assign(changed, changed.label, args[1], "" if other is None else other.label)
        _note(targets, name, args[1])
        return None
    read = [*tensors_in([*args, *(value for key, value in kwargs.items() if key != "out")])]
    drawn = rows.is_drawn(func, name) or (
        kwargs.get("out") is not None and not any(isinstance(each, Shard) for each in read)
    )
    if drawn or (_watching and not rows.by_rows(name, targets, read)):
        alone = rows.by_place(name, targets, read)
        write = partial(rows.write_whole, func, name, targets, fresh=drawn, alone=alone)
        return _called(write, name, [args, kwargs], {}, targets)
    found = _called(func, name, rows.spread(changed, list(args)), rows.spread(changed, dict(kwargs)), targets)
    _mark(found, targets)
    _note(targets, name, args[1:], kwargs)
    return found


def _note(targets: list[Shard], name: str, *given: Any) -> None:
    """Shards were changed by a program, which gave this."""
    for each in targets:
        if _watching and each.writes is not None:
            each.writes.note(name, *given)


def _called(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Collection[Any]
) -> Any:
    """The result of a function. What torch cannot do with shards is a `ConfigError`."""
    shard = next((each for each in given if isinstance(each, Shard)), None)
    if name in _NUMBERS and isinstance(args[0], Shard) and not all(each.is_replicate() for each in args[0].placements):
        if rows.called_in(_INIT):
            return func(args[0].full_tensor())
        raise ConfigError(
            f"a number is made ({name}) of {args[0].label}, or of values computed from it, and it would be that of "
            "this rank's rows alone: let all ranks call full_tensor() of it first, within torch.no_grad(). "
            "optimizer.clip_grad_norm_() returns the norm of gradients"
        )
    try:
        if shard is not None and name == "_foreach_copy_":  # torch has none for shards
            return [one.copy_(other) for one, other in zip(args[0], args[1], strict=True)]
        if shard is not None and rows.draws(name) and args[0] is shard:
            return rows.compute_whole(func, name, shard, args, kwargs)
        sends = name not in LOOKS or name in rows.TAKES
        if sends and shard is not None and shard.watch is not None and _watching and not isinstance(func, partial):
            return rows.take(func, shard, args, kwargs)
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        said = str(error).strip()
        if shard is None or not any(word in said.lower() for word in _OF_SHARDS):
            raise
        if name == "grad":
            raise ConfigError(
                f"the gradient of {shard.label} is asked for (torch.autograd.grad): in stage 3 passes go through whole "
                "weights, of which a program has the shards: run backward(), and read .grad behind it, or use stage 1 "
                "or 2"
            ) from error
        what = f"{shard.label} is used ({name})"
        if _MIXED in said:
            raise ConfigError(
                f"{what} beside tensors of this rank, while its unit does not run: in stage 3 each rank has some rows "
                f"of it then. To use all of it, {_CURE}"
            ) from error
        raise ConfigError(
            f"{what} while its unit does not run: in stage 3 each rank has some rows of it then, and torch cannot do "
            f"that with them ({said.splitlines()[0]:.200}). To change it, write whole values with copy_(). To read all "
            f"of it, take it from shoal.zero.full_state_dict(model). To compute with it, {_CURE}"
        ) from error


def _check_gradient(label: str, gradient: Any) -> None:
    """Raise `ConfigError` if a whole gradient is given to a shard."""
    if isinstance(gradient, torch.Tensor) and not isinstance(gradient, DTensor):
        raise ConfigError(
            f"the gradient of {label} is set by hand to a tensor of this rank: in stage 3 it is in shards, and only "
            "backward passes reduce any. Change the loss instead, or clear it (None)"
        )


def _mark(found: Any, given: Collection[Any]) -> None:
    """Results that share a weight's memory are views of it; others gather its unit when a gradient comes to them."""
    loans = {id(each.loan): each.loan for each in given if isinstance(each, _Guarded)}.values()
    shards = [each for each in given if isinstance(each, Shard)]
    for each in tensors_in(found):
        if type(each) is DTensor and shards and (_watching or each.grad_fn is not None):
            of = next((shard for shard in shards if rows.shares_memory(each, shard)), None)
            near = shards[0] if of is None else of
            watch_shard(each, near.label, near.watch, near.writes if near is of else None)
        if type(each) is not torch.Tensor or each.layout != torch.strided or _is_functional(each):
            continue
        owner = next((loan for loan in loans if loan.has(each)), None)
        if owner is not None:
            each.__class__ = View
            each.loan = owner  # type: ignore[attr-defined]
        elif each.grad_fn is not None and torch.is_grad_enabled():
            for loan in loans:
                each.register_hook(loan.needed)  # type: ignore[no-untyped-call]


def _is_functional(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))  # noqa: SLF001 (such a one has no memory)
