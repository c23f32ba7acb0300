"""The options of a step: each peer proposes what its parameter groups hold, and all members of a round take one set.

Schedules of a trainer's own and rates set by hand change `param_groups` between two steps of the swarm. So what they
hold when a peer joins a round travels with its joining, every member sees what all have proposed, and `agreed` picks
the same set for all: that which the members of most weight have, to rounding (see `words`). It is applied exactly, and
its digest goes into the name of the state after the step.

Left out: options that say how a step is computed (`foreach`), what schedules keep for themselves (`initial_lr`), and
values that are no number, text, bool or None, nor a tuple or a tensor of one. Pure functions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import torch

from shoal.errors import ConfigError
from shoal.wire import encode

__all__ = [
    "HOW",
    "LEFT_OUT",
    "Difference",
    "Options",
    "agreed",
    "apply",
    "differences",
    "kinds",
    "misfit",
    "options_of",
]

HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of torch optimizers that say how a step is computed, not what it is."""

_KEPT_BY_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
LEFT_OUT = HOW | _KEPT_BY_SCHEDULES | {"params", "param_names", "train_mode"}
"""Options that each peer has of its own in its parameter groups. `train_mode` tells two kinds of weights apart
(ScheduleFree): those of training travel."""


_MAX_BYTES = 32768
_RELATIVE, _ABSOLUTE = 1e-6, 1e-12
_CANDIDATES = 8

Scalar = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)] | None | bool | float | str
Value = Scalar | Annotated[list[Scalar], msgspec.Meta(max_length=16)]


class Options(msgspec.Struct, frozen=True, array_like=True):
    """The options in the parameter groups of one peer.

    Attributes:
        groups: how many there are.
        values: by name, one value for each group; a single one if it is the same in all of them.
    """

    groups: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    values: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=128)], Annotated[list[Value], msgspec.Meta(min_length=1)]],
        msgspec.Meta(max_length=256),
    ]

    def column(self, name: str) -> list[Value]:
        """The values of one option, for each group."""
        values = self.values[name]
        return values * self.groups if len(values) == 1 else values

    def problem(self) -> str | None:
        """The reason why no step can be taken with these; None if one can."""
        for name, values in self.values.items():
            if len(values) not in (1, self.groups):
                return f"{len(values)} values of {name[:40]} for {self.groups} groups"
            if not all(map(_is_number, values)):
                return f"{name[:40]} is not a number"
        return None

    @property
    def digest(self) -> bytes:
        """SHA-256 of all of them."""
        return hashlib.sha256(encode([self.groups, sorted(self.values.items())])).digest()


class Difference(NamedTuple):
    """One option that is another one here than in the round."""

    name: str
    group: int
    mine: Value
    theirs: Value


def options_of(groups: Sequence[Mapping[str, Any]], without: Collection[str] = ()) -> Options:
    """The options that these parameter groups hold, but for those of the names in `without`.

    Raises:
        ConfigError: they are more than can be told to others.
    """
    values: dict[str, list[Value]] = {}
    for name in list(groups[0]):  # a copy: a trainer's schedule may add one meanwhile
        if name in LEFT_OUT or name in without or not isinstance(name, str) or len(name) > 128:
            continue
        plain = [_plain(group.get(name, _NOTHING)) for group in groups]
        if any(each is _NOTHING for each in plain):
            continue
        column: list[Value] = plain  # type: ignore[assignment]
        values[name] = column[:1] if all(_same(each, column[0]) for each in column) else column
    options = Options(len(groups), values)
    if (size := len(encode([options.groups, options.values]))) > _MAX_BYTES:
        raise ConfigError(
            f"the options of {len(groups)} parameter groups take {size} bytes, the most is {_MAX_BYTES}: put "
            "parameters with equal options into one group"
        )
    return options


def agreed(proposals: Iterable[tuple[Options, int]]) -> Options | None:
    """The set of most weight, to rounding; of several of equal weight the first one. None if there is none.

    The order decides ties, so it should be the same in the next round. At most the 8 sets that have most weight to the
    bit are compared with all.

    Args:
        proposals: with the weight of each.
    """
    weights: dict[bytes, tuple[int, Options]] = {}
    for options, weight in proposals:
        key = options.digest
        weights[key] = (weights.get(key, (0, options))[0] + weight, options)
    by_weight = sorted(weights.values(), key=lambda each: -each[0])
    best, support = None, 0
    for _, candidate in by_weight[:_CANDIDATES]:
        close = sum(weight for weight, other in by_weight if _close(candidate, other))
        if close > support:
            best, support = candidate, close
    return best


def misfit(mine: Options, theirs: Options) -> str | None:
    """The reason why a peer with the options `mine` cannot take over `theirs`; None if it can."""
    if mine.groups != theirs.groups:
        return f"{theirs.groups} parameter groups, and there are {mine.groups} here"
    for name in sorted(mine.values.keys() & theirs.values.keys()):
        for here, there in zip(mine.column(name), theirs.column(name), strict=True):
            if here is not None and _kind(here) != _kind(there):
                return f"{name} of {there!r:.80}, which is {here!r:.80} here"
    return None


def kinds(options: Options) -> object:
    """How many groups there are, and of what kind each value is: with others of the same kinds there is no `misfit`."""
    return options.groups, {name: [_kind(value) for value in options.column(name)] for name in options.values}


def differences(mine: Options, theirs: Options) -> list[Difference]:
    """The options that both have and that differ by more than rounding; `misfit` found nothing."""
    return [
        Difference(name, group, here, there)
        for name in sorted(mine.values.keys() & theirs.values.keys())
        for group, (here, there) in enumerate(zip(mine.column(name), theirs.column(name), strict=True))
        if not _near(here, there)
    ]


def apply(groups: Sequence[dict[str, Any]], options: Options, without: Collection[str] = ()) -> None:
    """Let these groups hold exactly this, but for the names in `without`; `misfit` found nothing.

    Tensors stay the ones that they are.
    """
    for name in options.values.keys() - without:
        for group, value in zip(groups, options.column(name), strict=True):
            if name in group and _plain(group[name]) is not _NOTHING:
                group[name] = _with(group[name], value)


# ------------------------------------------------------------------------------------------------------------- values


class _Nothing:
    """No value that could be told to others."""


_NOTHING = _Nothing()


def _plain(value: object) -> Value | _Nothing:
    if isinstance(value, tuple | list):
        items = [_plain(each) for each in value]
        plain = all(item is None or isinstance(item, bool | int | float | str) for item in items)
        return items if plain and len(items) <= 16 else _NOTHING  # type: ignore[return-value]
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and not value.is_complex() else _NOTHING
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return _told(kind(value))
    item = getattr(value, "item", None)  # numbers of numpy's own kinds
    return _plain(item()) if callable(item) and getattr(value, "size", 0) == 1 else _NOTHING


def _told(value: float | str) -> float | str | _Nothing:
    if isinstance(value, str):
        return value if len(value) <= 256 else _NOTHING
    if isinstance(value, int):
        return value if abs(value) <= 1 << 53 else _NOTHING
    return value


def _with(mine: object, value: Value) -> object:
    """`value` in the form that the group has."""
    if isinstance(mine, torch.Tensor):
        with torch.no_grad():
            return mine.fill_(value)  # type: ignore[arg-type]
    if isinstance(mine, tuple | list) and isinstance(value, list):
        items = value if len(mine) != len(value) else [_with(*pair) for pair in zip(mine, value, strict=True)]
        return type(mine)(items) if type(mine) in (tuple, list) else tuple(items)
    return tuple(value) if isinstance(value, list) else value


def _is_number(value: Value) -> bool:
    if isinstance(value, list):
        return all(map(_is_number, value))
    return not isinstance(value, float) or not math.isnan(value)


def _kind(value: object) -> object:
    if isinstance(value, list):
        return [_kind(each) for each in value]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def _near(one: object, other: object) -> bool:
    if _kind(one) != _kind(other):
        return False
    if isinstance(one, list) and isinstance(other, list):
        return all(map(_near, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    return one == other


def _close(one: Options, other: Options) -> bool:
    return (
        one.groups == other.groups
        and one.values.keys() == other.values.keys()
        and all(_near(one.column(name), other.column(name)) for name in one.values)
    )
