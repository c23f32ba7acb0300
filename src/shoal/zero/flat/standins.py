"""Stand-ins in `.grad` of parameters whose gradients are not there, but with their owners.

A stand-in has the parameter's shape and one value in memory. A gradient counts as cleared when its stand-in is gone
from `.grad`, however that happened (`model.zero_grad()`, that of a module around it or of a compiled one,
`parameter.grad = None`). It is zeros when somebody wrote zeros over the stand-in (`set_to_none=False`), which it sees.
Any other use of its values is an error that says what to do instead: those of one rank would be no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from shoal.base.nested import tensors_in
from shoal.errors import LocalError
from shoal.zero.unsharded.lent import LOOKS, is_in_place

__all__ = ["StandIn", "StandIns"]

_LOOKS = LOOKS | {"data_ptr"}
_TEXTS = frozenset({"__repr__", "__str__", "__format__"})


class StandIn(torch.Tensor):
    """In place of a gradient.

    Attributes:
        label: the name of the parameter.
        first: the one that is in `.grad`, of which this may be a view.
        zeros: the gradient was set to zeros, so values may be read.
    """

    label: str
    first: StandIn
    zeros = False

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> StandIn:
        """The stand-in of a parameter's gradient."""
        value = torch.full((1,) * parameter.ndim, math.nan, dtype=parameter.dtype, device=parameter.device)
        found = value.expand(parameter.shape).as_subclass(cls)
        found.label, found.first = name, found
        return found

    def set(self, value: float) -> None:
        """To NaN or to zeros."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001 (torch's own way)
            self.as_strided((min(self.numel(), 1),), (1,)).fill_(value)
        self.zeros = value == 0

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        given = [each for each in tensors_in([*args, *kwargs.values()]) if isinstance(each, StandIn)]
        if name in _TEXTS:
            return f"<gradient of {given[0].label}: reduced, and with its owners>"
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch's own way to run the function itself)
            if name in ("zero_", "_foreach_zero_"):
                for each in tensors_in(args[0]):
                    each.first.set(0) if isinstance(each, StandIn) else each.zero_()
                return args[0]
            for each in given:
                if name not in _LOOKS and (not each.first.zeros or is_in_place(name, kwargs)):
                    raise LocalError(
                        f"the gradient of {each.label} is used ({name}): in stages 1 and 2 it is reduced behind each "
                        "backward pass, and with its owners. Clip with optimizer.clip_grad_norm_(), which returns the "
                        "norm; change the loss instead of the gradient, or change it in a hook (register_hook). A step "
                        "with infinite gradients is left out on all ranks. In stage 3 gradients are in .grad"
                    )
            found = func(*args, **kwargs)
            for each in tensors_in(found):
                if name in LOOKS and type(each) is torch.Tensor and _memory(each) == _memory(given[0]):
                    each.__class__ = StandIn
                    each.label, each.first = given[0].label, given[0].first  # type: ignore[attr-defined]
            return found


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 (that of no values has no address)


class StandIns:
    """The stand-ins of some parameters.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._taken: dict[str, None] = {}  # a set that keeps its order
        self._zeroed: set[str] = set()  # known to be zeros
        self._of = {name: StandIn.of(name, each) for name, each in parameters.items()}

    def put(self, name: str) -> None:
        """The gradient of a parameter was taken."""
        if self._of[name].zeros:
            self._of[name].set(math.nan)
            self._zeroed.discard(name)
        self._parameters[name].grad = self._of[name]
        self._taken[name] = None

    def zero(self, names: Collection[str]) -> None:
        """The gradients of some parameters are zeros, and taken."""
        for name in names:
            self.put(name)
            self._of[name].set(0)
        self._zeroed.update(names)

    def lift(self, name: str) -> None:
        """A gradient is about to be added: take the stand-in away, since the earlier gradient is elsewhere."""
        if self._parameters[name].grad is self._of[name]:
            self._parameters[name].grad = None

    def loose(self, name: str) -> torch.Tensor | None:
        """A parameter's gradient, if there is one that was not taken."""
        gradient = self._parameters[name].grad
        return None if gradient is self._of[name] else gradient

    def present(self) -> list[str]:
        """Names of parameters that have a gradient, taken or not."""
        return [name for name, each in self._parameters.items() if each.grad is not None]

    def clear(self) -> None:
        """Clear all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._taken.clear()

    def cleared(self) -> list[str]:
        """Names of parameters whose gradients others have cleared since they were taken; each is returned once."""
        found = [name for name in self._taken if self._parameters[name].grad is None]
        for name in found:
            del self._taken[name]
        return found

    def zeroed(self) -> list[str]:
        """Names of parameters whose gradients others have set to zeros since they were taken; each is returned once."""
        found = [name for name in self._taken if self._of[name].zeros and name not in self._zeroed]
        self._zeroed.update(found)
        return found
