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

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shoal.errors import ConfigError
from shoal.runtime.nested import tensors_in

__all__ = ["Loan", "is_lent", "lend", "replace", "watch_shard"]

_CURE = (
    "compute with it in the forward method of that unit, or in a method of which torch.distributed.fsdp."
    "register_fsdp_forward_method(module, name) was told after shard(); or give shard() units= without this one, so "
    "that it stays gathered while the model runs; or use stage 1 or 2. For a penalty on weights use weight_decay"
)
_MIXED = "mixed torch.Tensor and DTensor"
_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})
_LOOKS = (
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
    def __torch_function__(
        cls, func: Callable[..., Any], _: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch's own way to run the function itself)
            given = [each for each in tensors_in([*args, *kwargs.values()]) if isinstance(each, _Lent)]
            if name not in _LOOKS:
                for each in given:
                    each.check_read(name)
                _check_changed(name, args, kwargs)
                if name in _EXPORTS:
                    args = [args[0].detach().clone(), *args[1:]]
            try:
                found = func(*args, **kwargs)
            except RuntimeError as error:
                shard: Any = next((each for each in given if isinstance(each, Shard)), None)
                if shard is None or _MIXED not in str(error):
                    raise
                raise ConfigError(
                    f"{shard.label} is used ({name}) beside tensors of this rank, while its unit does not run: in "
                    f"stage 3 each rank has some rows of it then. To use all of it, {_CURE}"
                ) from error
            if name != "__set__":
                _mark(found, given)
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
        """As a plain one."""
        return self.__deepcopy__({}).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class View(_Guarded, torch.Tensor):
    """A tensor that shares a whole weight's memory."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain one."""
        memo[id(self)] = found = self.detach().clone()
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain one."""
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Shard(_Lent, DTensor):
    """This rank's rows of a weight, in its place while its unit does not run; or a value computed from them."""

    label = "a parameter"


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


def watch_shard(shard: DTensor, name: str) -> None:
    """Guard a shard."""
    if type(shard) is DTensor:
        shard.__class__ = Shard
        shard.label = name  # type: ignore[attr-defined]


def replace(original: torch.nn.Parameter, name: str) -> None:
    """Guard a parameter in whose place is a shard now."""
    if type(original) is torch.nn.Parameter:
        original.__class__ = Replaced
        original.label = name  # type: ignore[attr-defined]


def is_lent(value: object) -> bool:
    """Whether it is a whole weight, or shares the memory of one."""
    return isinstance(value, _Guarded)


def _check_changed(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a change would be lost."""
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    for each in tensors_in([kwargs.get("out"), args[0] if in_place and args else None]):
        if isinstance(each, _Guarded):
            raise ConfigError(
                f"{each.loan.name} is changed ({name}) while that unit runs: in stage 3 the change would be lost, as "
                "this is a copy of the shards. Change the shards, between steps, or compute with a clone() of it, or "
                "use stage 1 or 2"
            )


def _mark(found: Any, given: Collection[Any]) -> None:
    """Results that share a weight's memory are views of it; others gather its unit when a gradient comes to them."""
    loans = {id(each.loan): each.loan for each in given if isinstance(each, _Guarded)}.values()
    shard = next((each for each in given if isinstance(each, Shard)), None)
    for each in tensors_in(found):
        if type(each) is DTensor and shard is not None and each.grad_fn is not None:
            watch_shard(each, shard.label)
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
