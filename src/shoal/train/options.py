"""The options of a step: each peer proposes what its parameter groups hold, and all members of a round take one set.

Schedules of a trainer's own and rates set by hand change `param_groups` between two steps of the swarm. So what they
hold when a peer joins a round travels with its joining, every member sees what all have proposed, and `agreed` picks
the same set for all: that which the members of most weight have, to rounding (see `words`). Of two peers neither has
more weight: there the smaller change counts, against the step before. The set is applied exactly, and its digest goes
into the name of the state after the step.

Words come from anybody, and are read on the loop. So their cost follows from their bytes: a value that is the same in
all groups is looked at once, however many groups there are.

Left out: options that say how a step is computed (`foreach`), what schedules keep for themselves (`initial_lr`), and
values that are no number, text, bool or None, nor a tuple or a tensor of one. Pure functions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Annotated, Any, NamedTuple

import msgspec
import torch

from shoal.errors import ConfigError
from shoal.protocol.wire import encode

__all__ = [
    "HOW",
    "LEFT_OUT",
    "OUTER",
    "Difference",
    "Options",
    "agreed",
    "apply",
    "described",
    "differences",
    "given_options",
    "kinds",
    "merges",
    "misfit",
    "options_of",
    "text_of",
]

OUTER = "outer optimizer"
"""The setting that a run has where peers merge, and no other run has: the outer optimizer with its options."""

HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of torch optimizers that say how a step is computed, not what it is."""

_KEPT_BY_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
LEFT_OUT = HOW | _KEPT_BY_SCHEDULES | {"params", "param_names", "train_mode"}
"""Options that each peer has of its own in its parameter groups. `train_mode` tells two kinds of weights apart
(ScheduleFree): those of training travel."""


_MAX_BYTES = 32768
_RELATIVE, _ABSOLUTE = 1e-6, 1e-12
_CANDIDATES = 8
_COMPARED = 1 << 15
"""So many values are compared at most to find out whose options are equal to rounding. Peers that have words of that
size, and others to the bit, are not looked for."""

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

    def column(self, name: str) -> Iterable[Value]:
        """The values of one option, for each group."""
        values = self.values[name]
        return repeat(values[0], self.groups) if len(values) == 1 else values

    @property
    def size(self) -> int:
        """How many values these are; one that is the same in all groups is one."""
        lists = (each for values in self.values.values() for each in values if isinstance(each, list))
        return sum(map(len, self.values.values())) + sum(map(len, lists))

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


def agreed(
    proposals: Iterable[tuple[Options, int]], *, mine: Options | None = None, last: Options | None = None
) -> Options | None:
    """The set of most weight, to rounding. None if there is none.

    One that has more than half of the weight to the bit is that set. Else the 8 sets that have most weight to the bit
    are compared with all: fewer of them if there are many values, see `_COMPARED`.

    Of several of equal weight it is one that is no `misfit` here, so that nobody loses a step by the words of one other
    peer; of these the one that changes least, against `last`; of these the first one.

    Args:
        proposals: with the weight of each.
        mine: the options of this peer; None: any kind will do.
        last: the options of the step before, which all know; None if there was none.
    """
    weights: dict[bytes, tuple[int, Options]] = {}
    for options, weight in proposals:
        key = options.digest
        weights[key] = (weights.get(key, (0, options))[0] + weight, options)
    sets = sorted((each for each in weights.values() if each[0]), key=lambda each: -each[0])
    if not sets or 2 * sets[0][0] > sum(weight for weight, _ in sets):
        return sets[0][1] if sets else None
    few = min(_CANDIDATES, _COMPARED // max(1, sum(each.size for _, each in sets)))
    found = [(sum(weight for weight, other in sets if _close(each, other)), each) for _, each in sets[:few]] or sets
    most = max(support for support, _ in found)
    tied = [each for support, each in found[:_CANDIDATES] if support == most]
    tied = [each for each in tied if mine is None or misfit(mine, each) is None] or tied
    if last is None or not few:
        return tied[0]
    return min(tied, key=lambda each: _change(last, each))


def misfit(mine: Options, theirs: Options) -> str | None:
    """The reason why a peer with the options `mine` cannot take over `theirs`; None if it can."""
    if mine.groups != theirs.groups:
        return f"{theirs.groups} parameter groups, and there are {mine.groups} here"
    for name in sorted(mine.values.keys() & theirs.values.keys()):
        for here, there in _pairs(mine, theirs, name):
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


def _pairs(one: Options, other: Options, name: str) -> Iterator[tuple[Value, Value]]:
    """The values of one option in both, for each group; once if they are the same in all groups of each."""
    if len(one.values[name]) == len(other.values[name]):
        return zip(one.values[name], other.values[name], strict=True)
    return zip(one.column(name), other.column(name), strict=True)


def _near(one: object, other: object) -> bool:
    if type(one) is type(other) and not isinstance(one, list) and one == other:
        return True
    if _kind(one) != _kind(other):
        return False
    if isinstance(one, list) and isinstance(other, list):
        return all(map(_near, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    return one == other


def _close(one: Options, other: Options) -> bool:
    """Whether they are equal to rounding. Values that are equal to the bit in all groups of one peer only are not."""
    return one is other or (
        one.groups == other.groups
        and one.values.keys() == other.values.keys()
        and all(len(values) == len(other.values[name]) for name, values in one.values.items())
        and all(_near(values, other.values[name]) for name, values in one.values.items())
    )


def _change(last: Options, options: Options) -> float:
    """How much of the options is another one than the last time: from 0 to 1 for each name. Equal on all machines."""
    if last.groups != options.groups:
        return math.inf
    pairs = (list(_pairs(last, options, name)) for name in last.values.keys() & options.values.keys())
    changed = (math.fsum(_part_changed(*pair) for pair in each) / len(each) for each in pairs)
    return math.fsum([*changed, len(last.values.keys() ^ options.values.keys())])


def _part_changed(last: object, value: object) -> float:
    if _near(last, value):
        return 0.0
    if _kind(last) != _kind(value):
        return 1.0
    if isinstance(last, list) and isinstance(value, list):
        return math.fsum(map(_part_changed, last, value)) / len(last)
    if isinstance(last, int | float) and isinstance(value, int | float):
        apart = abs(last - value) / (abs(last) + abs(value))
        return apart if math.isfinite(apart) else 1.0
    return 1.0


def merges(settings: Mapping[str, str]) -> bool:
    """Whether these settings are of a run whose peers merge: its epochs are merges, its state has the anchors."""
    return OUTER in settings


def described(optimizer: torch.optim.Optimizer) -> str:
    """An optimizer and the options that it was made with."""
    options = given_options(optimizer.defaults)
    return f"{type(optimizer).__name__} {', '.join(f'{name} {text_of(options[name])}' for name in sorted(options))}"[
        :240
    ]


def given_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group, or of the defaults of an optimizer, that say what a step is."""
    return {name: value for name, value in values.items() if name not in HOW and value is not None}


def text_of(value: object) -> str:
    """Equal for equal numbers, whether they are of Python, numpy or torch."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, tuple | list):
        return f"({', '.join(map(text_of, value))})"
    if isinstance(value, bool | str):
        return str(value)
    try:
        return f"{float(value):g}"  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return type(value).__name__
