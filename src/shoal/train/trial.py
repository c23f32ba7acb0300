"""One step with copies: whether an optimizer can go on from options and statistics that somebody else gives it.

Which statistics an optimizer needs, and of which shapes, only its own `step` knows. So it is asked: a twin of the
optimizer, with a copy of one parameter and of what belongs to it, takes a step. The smallest parameter of each sort is
tried; two are of one sort if their statistics have equal names and dtypes, and shapes that relate to theirs in the
same way. If the step fails with what is offered, and not with what is here now, the offer is no good.

An optimizer whose twin cannot be made, or which cannot step one parameter alone, is not judged.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.base.names import known_as
from shoal.train.twin import same_chance, twin_of

__all__ = [
    "blank_statistics",
    "draws_random_numbers",
    "first_statistics",
    "mixes_values",
    "needs",
    "try_step",
    "weight_copies",
]

_GRADIENT = 1e-3
_MOVED = 1.0
_EXACT = frozenset(
    (
        *("_local_scalar_dense", "alias", "as_strided", "clone", "copy_", "detach", "expand", "flip", "index_put_"),
        *("lift_fresh", "permute", "select", "slice", "split", "squeeze", "stack", "t", "transpose", "unbind"),
        *("_reshape_alias", "_to_copy", "_unsafe_view", "cat", "unsqueeze", "view"),
        *("empty", "empty_like", "fill_", "full", "full_like", "new_full", "new_zeros", "ones", "ones_like"),
        *("zero_", "zeros", "zeros_like"),
        *("abs", "abs_", "scalar_tensor"),
        *("all", "amax", "amin", "aminmax", "any", "max", "min"),
    )
)
"""Operations that move values, make them or choose among them."""

_NOT_FINITE = "it is not finite afterwards"
_CROPPED = 8
"""Elements in each dimension of a parameter whose statistics are looked at for their kind alone."""


def try_step(
    optimizer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any],
    attributes: Mapping[str, Any],
) -> None:
    """Look whether `optimizer` could step with these options, statistics and attributes. It is not changed.

    Args:
        optimizer: whose parameters they are for.
        options: of each group.
        state: by parameter, or by a name of the optimizer's own.
        attributes: of the optimizer; it keeps the others that it has.

    Raises:
        ValueError: it could not, and can with its own; says which statistic is the reason, if it shows.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for group, offered in zip(optimizer.param_groups, options, strict=True):
        own = _options(group)
        for parameter in _of_each_sort(group, state):
            failure, entry = _step(optimizer, parameter, offered, state, attributes=attributes)
            if failure is None:
                continue
            own_failure, expected = _step(optimizer, parameter, own, optimizer.state)
            if own_failure is None:
                why = _difference(expected, entry) or failure
                name = known_as(parameter, numbers[id(parameter)])
                raise ValueError(f"parameter {name} cannot be stepped from it: {why}")


def needs(optimizer: torch.optim.Optimizer, states: Sequence[Mapping[Any, Any]]) -> str | None:
    """The need of an optimizer beside gradients before its first step, as that step says. It is not changed.

    One with statistics or gradients is not asked: if it wraps another one, its twin might touch its parameters.

    Args:
        optimizer: that is asked.
        states: its statistics, and those of the optimizers that it wraps.

    Returns:
        "a closure", "gradients of gradients" (AdaHessian), "backward" (LOMO, which has no step), or None for neither.
    """
    pairs = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    trained = [(parameter, group) for group, parameter in pairs if parameter.requires_grad and parameter.numel()]
    if not trained or any(states) or any(parameter.grad is not None for _, parameter in pairs):
        return None
    parameter, group = min(trained, key=lambda pair: pair[0].numel())
    failure, _ = _step(optimizer, parameter, _options(group), {})
    signs = {
        "NotImplementedError": "backward",
        "closure": "a closure",
        "does not have a grad_fn": "gradients of gradients",
    }
    return next((what for sign, what in signs.items() if failure is not None and sign in failure), None)


def first_statistics(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Mapping[Any, Any]]]:
    """The kinds of statistics that a first step leaves behind, for a corner of one parameter of each sort.

    Their values and sizes mean nothing. A parameter that cannot be stepped so is left out. Nothing is changed.

    Yields:
        The number of the parameter, and its statistics.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for group in optimizer.param_groups:
        for parameter in _of_each_sort(group, {}):
            corner = parameter.detach()[(slice(_CROPPED),) * parameter.dim()]
            failure, statistics = _step(optimizer, parameter, _options(group), {}, corner)
            if failure is None:
                yield numbers[id(parameter)], statistics


def blank_statistics(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[Any, Any]]:
    """The statistics of an optimizer that has taken no step, for a program that asks for a place to load others into.

    They are those of a step without gradient, at a counter of 0: a step from them is a first step. Nothing is changed.
    A parameter that cannot be stepped alone is left out.
    """
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                failure, statistics = _step(optimizer, parameter, _options(group), {}, gradient=0.0)
                if failure is None and statistics:
                    found[parameter] = {
                        name: _reset(each) if name == "step" else each for name, each in statistics.items()
                    }
    return found


def _reset(counter: Any) -> Any:
    return torch.zeros_like(counter) if isinstance(counter, torch.Tensor) else type(counter)()


def weight_copies(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The names of statistics that are weights, as `z` of ScheduleFree is. Nothing is changed.

    A first step is taken from a small parameter of each sort, and from the same one with all values moved. What has
    moved by as much, element by element, is weights. A parameter that cannot be stepped so is left out. An optimizer
    that wraps another one is not tried, as its twin might step the parameters themselves.
    """
    if any(isinstance(each, torch.optim.Optimizer) for each in vars(optimizer).values()):
        return frozenset({"z"})  # of a wrapper that makes any optimizer ScheduleFree
    found = set[str]()
    for group in optimizer.param_groups:
        for parameter in _of_each_sort(group, {}):
            shape = [max(2, min(size, _CROPPED)) for size in parameter.shape] or [1]
            small = torch.linspace(0.1, 0.9, math.prod(shape), dtype=torch.float32, device=parameter.device).to(
                parameter.dtype
            )
            steps = [_step(optimizer, parameter, _options(group), {}, small.view(shape) + by) for by in (0.0, _MOVED)]
            if all(failure is None for failure, _ in steps):
                (_, here), (_, there) = steps
                found.update(name for name in here if _has_moved(here[name], there.get(name), small.numel()))
    return frozenset(found)


def _has_moved(here: object, there: object, numel: int) -> bool:
    if not isinstance(here, torch.Tensor) or not isinstance(there, torch.Tensor):
        return False
    if not here.is_floating_point() or not here.numel() == there.numel() == numel:
        return False
    return bool(((there - here - _MOVED).abs() < _MOVED / 10).all())


def draws_random_numbers(optimizer: torch.optim.Optimizer) -> tuple[bool, str]:
    """Whether a step of this optimizer draws on torch's generators. It is not changed.

    The generators themselves do not tell: other threads of the program (that load data, say) draw on them too.

    Returns:
        Whether it was seen to draw; and why no step could be tried, empty if it was.
    """
    watch, failed = _Watch(), None
    states: list[Mapping[Any, Any]] = [{}, optimizer.state]  # some draw in their first step alone
    for group in optimizer.param_groups:
        for parameter in _of_each_sort(group, optimizer.state):
            for state in states:
                with watch:
                    failure, _ = _step(optimizer, parameter, _options(group), state)
                if any(torch.Tag.nondeterministic_seeded in each.tags for each in watch.called):
                    return True, ""
                if failure not in (None, _NOT_FINITE):
                    failed = failure
    return False, failed or ""


def mixes_values(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step makes values of several others: sums, products of matrices. It is not changed.

    How these are rounded depends on the processor, on the number of cores and on settings of torch; what is done to
    each value by itself does not. True if it cannot be tried, as with an optimizer that wraps another one.
    """
    if any(isinstance(each, torch.optim.Optimizer) for each in vars(optimizer).values()):
        return True
    watch = _Watch()
    for group in optimizer.param_groups:
        for parameter in _of_each_sort(group, {}):
            corner = parameter.detach()[(slice(_CROPPED),) * parameter.dim()]
            with watch:
                failure, _ = _step(optimizer, parameter, _options(group), {}, corner)
            if failure not in (None, _NOT_FINITE):
                return True
    return not all(map(_keeps_apart, watch.called))


def _keeps_apart(operation: Any) -> bool:
    """Whether it rounds nothing, or each value by itself."""
    space, _, name = operation.name().partition("::")
    name = name.partition(".")[0]
    if space != "aten" or torch.Tag.pointwise in operation.tags or name in _EXACT:
        return space in ("aten", "profiler")
    return name.startswith("_fused_") or (
        name.startswith("_foreach_") and name not in ("_foreach_norm", "_foreach_powsum")
    )


class _Watch(TorchDispatchMode):
    """Notes the operations of torch that this thread calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called = set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(func)
        return func(*args, **(kwargs or {}))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _of_each_sort(group: Mapping[str, Any], state: Mapping[Any, Any]) -> Iterable[torch.Tensor]:
    """The smallest trained parameter of each sort."""
    smallest: dict[Hashable, torch.Tensor] = {}
    for parameter in sorted(group["params"], key=torch.numel):
        if parameter.requires_grad and parameter.numel():
            smallest.setdefault(_sort(parameter, state.get(parameter, {})), parameter)
    return smallest.values()


def _sort(parameter: torch.Tensor, entry: Mapping[Any, Any]) -> Hashable:
    return parameter.dim(), parameter.dtype, parameter.device, _form(entry, parameter.shape)


def _form(value: object, shape: Sequence[int]) -> Hashable:
    if isinstance(value, torch.Tensor):
        related = tuple(shape.index(size) if size in shape else -size for size in value.shape)
        return value.dtype, value.device, "same" if value.shape == shape else related
    if isinstance(value, Mapping):
        return tuple((name, _form(each, shape)) for name, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_form(each, shape) for each in value)
    return type(value).__name__


def _step(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    options: Mapping[str, Any],
    state: Mapping[Any, Any],
    values: torch.Tensor | None = None,
    attributes: Mapping[str, Any] = MappingProxyType({}),
    gradient: float = _GRADIENT,
) -> tuple[str | None, Mapping[Any, Any]]:
    """The reason why the step failed, None if it did not; and the statistics afterwards.

    `values` are those of the copy that is stepped in place of the parameter; None: the parameter's own.
    """
    own = parameter.detach() if values is None else values
    substitute = torch.nn.Parameter(own.clone())
    substitute.grad = torch.full_like(own, gradient)
    # An optimizer that wraps others would step the real parameters.
    nothing = torch.nn.Parameter(torch.empty(0, dtype=own.dtype, device=own.device))
    memo: dict[int, Any] = {id(each): nothing for each_group in optimizer.param_groups for each in each_group["params"]}
    memo[id(parameter)] = substitute
    statistics: defaultdict[Any, Any] = defaultdict(dict)
    memo[id(optimizer.state)] = statistics
    try:
        twin = twin_of(optimizer, memo)
        vars(twin).update(attributes)
        for key, entry in state.items():
            if key is parameter or not isinstance(key, torch.Tensor):
                statistics[substitute if key is parameter else key] = copy.deepcopy(entry, memo)
        twin.param_groups = [{"params": [substitute], **copy.deepcopy(options, memo)}]
        with same_chance({own.device}):
            _unhooked(type(optimizer).step)(twin)
    except Exception as error:  # noqa: BLE001 (any code at all; what fails on both sides is not judged)
        return f"{type(error).__name__}: {error}", statistics.get(substitute, {})
    finite = bool(torch.isfinite(substitute).all()) or not bool(torch.isfinite(own).all())
    return None if finite else _NOT_FINITE, statistics.get(substitute, {})


def _unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step without the hooks of all optimizers, which torch has put around that of the class: this one is none."""
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def _difference(expected: Mapping[Any, Any], offered: Mapping[Any, Any]) -> str | None:
    """A sentence that names the statistic that is not as it should be; None if all are."""
    for name, mine in expected.items():
        what = f"statistic {name!r}"
        if name not in offered:
            return f"{what} is missing"
        theirs = offered[name]
        if isinstance(mine, torch.Tensor) != isinstance(theirs, torch.Tensor):
            return f"{what} is a {type(theirs).__name__}, and a {type(mine).__name__} here"
        if isinstance(mine, torch.Tensor) and mine.shape != theirs.shape:
            return f"{what} has shape {tuple(theirs.shape)}, and {tuple(mine.shape)} here"
    return None
