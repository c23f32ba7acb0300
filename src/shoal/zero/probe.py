"""How finely the parameters of an optimizer may be shared out to ranks in stages 1 and 2: tried out, on copies.

Copies of the optimizer step small tensors of the dimensions that its parameters have. One copy steps all of them. Two
others step flat tiles, as two ranks would: if weights are the same, the optimizer treats each value by itself
(`Unit.VALUE`). If not, two others step whole tensors, each of them one half, and a third steps none: if weights are the
same now, the optimizer treats each tensor by itself (`Unit.TENSOR`).

Gradients go through several regimes, since some optimizers look beyond a value only now and then: AdamP where gradient
and weight are nearly orthogonal (SGDP changes nothing where they are wholly so), others behind a spike, or when a
gradient keeps its direction. Weight decay is raised: AdamS divides it by a mean of all values, and 1e-4 of that is lost
in the tolerance. An optimizer needs whole tensors, too, if it keeps anything other than a value for each value and
single numbers that do not depend on the cuts, even if its weights are equal: Shampoo may first use its other values
after a thousand steps.

An optimizer that cannot be tried is refused: one whose step raises, or draws random numbers. Stage 3 cuts nothing that
an optimizer sees, but each rank has random numbers of its own, so a draw is refused there, too. A probe leaves nothing
behind: model, optimizer and generators of random numbers are as they were, and it always finds the same.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal.errors import ConfigError
from shoal.train.twin import same_chance, twin_of
from shoal.zero.packing import pack
from shoal.zero.parameters import local, wide_dtype

__all__ = [
    "Finding",
    "Unit",
    "finding",
    "tried_in_windows",
    "why_not_by_rows",
    "why_not_lazy",
    "why_not_saved",
    "why_not_sharded",
]


class Unit(enum.Enum):
    """The least that a rank can step by itself."""

    VALUE = "value"
    TENSOR = "tensor"


_SEED = 20261123
_STEPS, _COMPARED_EVERY = 36, 6
_STEPS_BY_ROWS = 12
"""SOAP changes its bases after ten."""
_TOLERANCE = {Unit.VALUE: 5e-5, Unit.TENSOR: 1e-6}
"""Relative to the movement of the weights. Rounding of tiles made 7e-6 at most, real differences 3e-4 at least. Whole
tensors that are stepped apart differ by nothing, or by 6e-5 at least."""
_LEAST_RATE = 1e-3
"""A warm-up begins with 0, with which nothing moves."""
_LEAST_DECAY = 0.1
"""If there is any."""
_ALONG = 0.02
"""The share of its part along a row of weights that a gradient keeps, where it is nearly orthogonal to that row."""
_DRAWS = "draws random numbers, and each rank has others"
_CUTS = (0.0, 0.29, 0.71, 1.0)
"""Where tensors are cut: within rows. The middle tile is another rank's."""
_SHAPES: dict[int, Sequence[tuple[int, ...]]] = {0: [()], 1: [(67,)], 2: [(17, 23)], 4: [(6, 5, 3, 3)]}
_LARGE = {2: [(131, 130)]}
"""Some optimizers look at rows only above 128 of them, or keep 8 bits only above 4,096 values."""
_OTHERWISE = {Unit.VALUE: "if it is cut into pieces", Unit.TENSOR: "if another rank steps the other tensors"}
_PLAIN: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the program's defaults are


class Finding(NamedTuple):
    """A capability of an optimizer, found by trying.

    Attributes:
        unit: it may be stepped by itself; None if all of the model must be stepped by one optimizer.
        reason: why it may not be less: words that follow the name of the optimizer.
        irregular: names of statistics of a tensor that are not one value for each of its values, nor a single one.
    """

    unit: Unit | None
    reason: str
    irregular: frozenset[str] = frozenset()

    @property
    def whole(self) -> bool:
        """Whether ranks share out whole tensors."""
        return self.unit is Unit.TENSOR


class _Subject(NamedTuple):
    """A tensor to try, in the place of parameters of a kind.

    Attributes:
        group: whose number it has in the optimizer.
        real: one of those parameters.
        values: its first values.
        state: the optimizer's state of such a tensor before its first step.
    """

    group: int
    real: torch.Tensor
    values: torch.Tensor
    state: Mapping[str, Any]


class _Tile(NamedTuple):
    """The values `start` to `stop` of the subject with a number, which the optimizer of a rank steps."""

    rank: int
    number: int
    start: int
    stop: int
    tensor: torch.Tensor


def finding(inner: torch.optim.Optimizer, model: torch.nn.Module) -> Finding:
    """What the ranks of stages 1 and 2 may share out among them.

    Args:
        inner: the optimizer, built of the model's parameters, before its first step.
        model: the model that it was built of.
    """
    irregular: set[str] = set()
    why = _why_not(Unit.VALUE, inner, model, irregular)
    if why is None:
        return Finding(Unit.VALUE, "")
    worse = _why_not(Unit.TENSOR, inner, model, irregular)
    return Finding(Unit.TENSOR, why, frozenset(irregular)) if worse is None else Finding(None, worse)


def _why_not(unit: Unit, inner: torch.optim.Optimizer, model: torch.nn.Module, irregular: set[str]) -> str | None:
    """Why ranks cannot share out such units: words that follow the optimizer's name. None if they can.

    Names of statistics of tensors that stay whole are added to `irregular`, as in `Finding`.
    """
    reals = [each for group in inner.param_groups for each in group["params"]]
    if problem := _of_state(inner.state, reals, unit, irregular):
        return problem
    with _in_vain(inner) as chance:
        try:  # optimizers that make a matrix of a tensor's rows are slow on large tensors: small ones show them first
            for shapes in (_SHAPES, _LARGE):
                subjects = list(_subjects(inner, shapes, 1 if unit is Unit.VALUE else 2))
                # Of large tensors that stay whole only the state matters.
                steps = _COMPARED_EVERY if unit is Unit.TENSOR and shapes is _LARGE else _STEPS
                if subjects and (problem := _tried(unit, steps, subjects, inner, model, chance, irregular)):
                    return problem
        except Exception as error:  # noqa: BLE001 (whatever it is: it was not seen to work)
            return f"raises when it steps small tensors: {_said(error)}"
    return None


def why_not_saved(inner: torch.optim.Optimizer) -> str | None:
    """Why the statistics of an optimizer would be in no checkpoint: words that follow its name. None if they are."""
    for name, each in vars(inner).items():
        if isinstance(each, torch.optim.Optimizer) and each.state is not inner.state:
            return f"has statistics in the {type(each).__name__} that it wraps ({name!r}), which would not be saved"
    own = {} if type(inner).state_dict is torch.optim.Optimizer.state_dict else inner.state_dict()
    for name in own.keys() & vars(inner).keys():
        if isinstance(vars(inner)[name], int | float):
            return f"keeps the number {name!r} beside its statistics, which would not be saved"
    return None


def why_not_lazy(inner: torch.optim.Optimizer, model: torch.nn.Module, lazy: Collection[int]) -> str | None:
    """Why an optimizer, whose parameters may be cut, cannot step a few rows of some of them: words behind its name.

    A row that is touched for the first time finds zeros for its statistics, or what there was before the first step. So
    they must begin so: it is seen with gradients of zeros, and without decay.

    Args:
        inner: the optimizer, before its first step.
        model: the model that it was built of.
        lazy: the `id`s of the parameters.
    """
    with _in_vain(inner):
        subjects = list(_subjects(inner, _SHAPES, only=lazy))
        if not subjects:
            return None
        whole = _whole(subjects)
        one = _copy(inner, model, subjects, whole)
        for group in one.param_groups:
            group.update({key: 0.0 for key in group if key == "weight_decay"})
        for tile in whole:
            tile.tensor.grad = torch.zeros_like(tile.tensor)
        one.step()
        for tile in whole:
            for key, value in one.state.get(tile.tensor, {}).items():
                begun = key in subjects[tile.number].state
                if not begun and isinstance(value, torch.Tensor) and value.numel() > 1 and value.any():
                    return f"keeps {key!r} for each value, which does not begin with zeros"
    return None


def why_not_sharded(inner: torch.optim.Optimizer, model: torch.nn.Module) -> str | None:
    """Why an optimizer cannot be shared out by rows in stage 3: words that follow its name. None if it may.

    Here it steps small tensors, and all that counts is whether it draws random numbers (`why_not_by_rows`: the rest).

    Args:
        inner: the optimizer, before its first step.
        model: the model that it was built of.
    """
    with _in_vain(inner) as chance:
        before = chance()
        with contextlib.suppress(Exception):  # one that needs a closure, say
            subjects = list(_subjects(inner, _SHAPES, states=False))
            whole = _whole(subjects)
            one, made = _copy(inner, model, subjects, whole), torch.Generator().manual_seed(_SEED)
            for step in range(_STEPS):
                for tile in whole:
                    tile.tensor.grad = _gradient(tile.tensor, step, made)
                one.step()
        return _DRAWS if chance() != before else None


def why_not_by_rows(inner: torch.optim.Optimizer, model: torch.nn.Module) -> str | None:
    """Why an optimizer cannot step rows of each parameter, which are DTensors, in stage 3: words that follow its name.

    Small DTensors are stepped, of rows that can be dealt out equally to the ranks, or not, as the model's own can. A
    step may be a collective: all ranks call it, for the same optimizer.

    Args:
        inner: the optimizer, before its first step.
        model: the model that it was built of.
    """
    reals = [each for group in inner.param_groups for each in group["params"] if isinstance(each, DTensor)]
    if not reals:
        return None
    mesh = reals[0].device_mesh
    shapes: dict[int, list[tuple[int, ...]]] = {}
    for each in reals:
        usual, rest = _SHAPES.get(each.ndim, [(3,) * each.ndim])[0], len(each) % mesh.size() > 0
        shape = (2 * mesh.size() + rest, *usual[1:])
        if shape not in shapes.setdefault(each.ndim, []):
            shapes[each.ndim].append(shape)
    with _in_vain(inner):
        try:
            subjects = list(_subjects(inner, shapes))
            tiles = [
                _Tile(0, number, 0, each.values.numel(), _rows_of(each.values, mesh))
                for number, each in enumerate(subjects)
            ]
            one, made = _copy(inner, model, subjects, tiles), torch.Generator().manual_seed(_SEED)
            for step in range(_STEPS_BY_ROWS):
                for tile in tiles:
                    tile.tensor.grad = _rows_of(_gradient(subjects[tile.number].values, step, made), mesh)
                one.step()
        except Exception as error:  # noqa: BLE001 (whatever it is: it was not seen to work)
            return f"raises when it steps DTensors: {_said(error)}"
    return None


def _rows_of(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor as FSDP2 shards parameters."""
    count = -(-len(whole) // mesh.size())
    rows = whole[mesh.get_local_rank() * count :][:count].clone()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'it says no more').splitlines()[0]}"


def tried_in_windows(
    inner: torch.optim.Optimizer,
    model: torch.nn.Module,
    in_windows: Callable[
        [torch.optim.Optimizer, Sequence[Sequence[torch.Tensor]]], contextlib.AbstractContextManager[Iterable[object]]
    ],
) -> tuple[str | None, float]:
    """Why an optimizer cannot step some of its parameters at a time, with the bits of a step of all.

    Args:
        inner: the optimizer, before its first step.
        model: the model that it was built of.
        in_windows: lets it step some at a time (`shoal.zero.memory.offload.in_windows`).

    Returns:
        The words, or None; and how many bytes it keeps for each value of a parameter, at most.
    """
    with _in_vain(inner):
        try:
            subjects = list(_subjects(inner, _SHAPES, 2))
            at_once, apart = _whole(subjects), _whole(subjects)
            one, other = (_copy(inner, model, subjects, tiles) for tiles in (at_once, apart))
            windows = [[tile.tensor for tile in half] for half in (apart[::2], apart[1::2])]
            made = torch.Generator().manual_seed(_SEED)
            for step in range(_STEPS):
                for tile, twin in zip(at_once, apart, strict=True):
                    tile.tensor.grad = _gradient(tile.tensor, step, made)
                    twin.tensor.grad = tile.tensor.grad.clone()
                one.step()
                with in_windows(other, windows) as some:
                    for _ in some:
                        other.step()
            for tile, twin in zip(at_once, apart, strict=True):
                if not torch.equal(tile.tensor.nan_to_num(), twin.tensor.nan_to_num()):
                    return "makes a parameter's step depend on other parameters", 0.0
            for there, here in [
                (_common(one), _common(other)),
                *zip(one.param_groups, other.param_groups, strict=True),
            ]:
                for key, value in there.items():
                    if (number := _number(value)) is not None and number != _number(here.get(key)):
                        return f"keeps {key!r}, which depends on all parameters", 0.0
            return None, max((_kept(one, tile.tensor) for tile in at_once), default=0.0)
        except Exception:  # noqa: BLE001 (whatever it is, its first step says so)
            return None, 0.0


def _kept(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> float:
    """Bytes for each of a tensor's values."""
    state = [each for each in optimizer.state.get(tensor, {}).values() if isinstance(each, torch.Tensor)]
    return sum(each.nbytes for each in state if each.shape == tensor.shape and each.ndim) / tensor.numel()


def _subjects(
    inner: torch.optim.Optimizer,
    shapes: Mapping[int, Sequence[tuple[int, ...]]],
    times: int = 1,
    *,
    states: bool = True,
    only: Collection[int] | None = None,
) -> Iterator[_Subject]:
    """The subjects: tensors for each kind of parameters, in each kind of groups. Learning rates make no new kind.

    Args:
        inner: the optimizer.
        shapes: theirs, by the number of dimensions.
        times: so many of each.
        states: whether the optimizer's first statistics make a kind.
        only: the `id`s of the parameters that count; None for all.
    """
    known = set()
    for number, group in enumerate(inner.param_groups):
        settings = repr({key: each for key, each in group.items() if key not in ("params", "lr", "initial_lr")})
        for real in group["params"]:
            state = inner.state.get(real, {}) if states else {}
            kind = (settings, real.ndim, real.dtype, real.device, *sorted(state))
            counts = real.requires_grad and real.numel() and (only is None or id(real) in only)
            if not counts or kind in known:
                continue
            known.add(kind)
            found = shapes.get(real.ndim, [(3,) * real.ndim] if shapes is _SHAPES else [])
            for shape, copy in itertools.product(found, range(times)):
                made = torch.Generator().manual_seed(_SEED + len(known) + 1000 * copy)
                values = torch.randn(shape, generator=made, **_PLAIN).mul_(_by_row(shape))
                values = values.to(real.device, wide_dtype(real.dtype))
                yield _Subject(number, real, values, {key: _fitted(each, real, shape) for key, each in state.items()})


def _tried(
    unit: Unit,
    steps: int,
    subjects: Sequence[_Subject],
    inner: torch.optim.Optimizer,
    model: torch.nn.Module,
    chance: Callable[[], object],
    irregular: set[str],
) -> str | None:
    whole = _whole(subjects)
    shares = _shares(whole, unit)
    one = _copy(inner, model, subjects, whole)
    ranks = [_copy(inner, model, subjects, [each for each in shares if each.rank == rank]) for rank in (0, 1)]
    made, before = torch.Generator().manual_seed(_SEED), chance()
    for step in range(steps):
        gradients = [_gradient(tile.tensor, step, made) for tile in whole]
        for tile in (*whole, *shares):
            values = gradients[tile.number].reshape(-1)[tile.start : tile.stop]
            tile.tensor.grad = values.reshape(tile.tensor.shape).clone()
        for optimizer in (one, *ranks):
            optimizer.step()
        if chance() != before:
            return _DRAWS
        if problem := _of_state(one.state, [tile.tensor for tile in whole], unit, irregular):
            return problem
        if step % _COMPARED_EVERY == _COMPARED_EVERY - 1 and (
            problem := _of_weights(subjects, whole, shares, unit) or _of_numbers(one, ranks, whole, shares, unit)
        ):
            return problem
    idle = _copy(inner, model, subjects, [])  # a rank may have none of the tensors
    for _ in range(steps):
        idle.step()
    return _of_numbers(one, [idle], [], [], unit)


def _whole(subjects: Sequence[_Subject]) -> list[_Tile]:
    return [_Tile(0, number, 0, each.values.numel(), each.values.clone()) for number, each in enumerate(subjects)]


def _shares(whole: Sequence[_Tile], unit: Unit) -> list[_Tile]:
    """The same tensors as ranks would share them out."""
    if unit is Unit.TENSOR:
        return [tile._replace(rank=tile.number % 2, tensor=tile.tensor.clone()) for tile in whole]
    return [
        _Tile(rank, tile.number, start, stop, tile.tensor.reshape(-1)[start:stop].clone())
        for tile in whole
        for rank, (start, stop) in zip((0, 1, 0), pairwise(round(cut * tile.stop) for cut in _CUTS), strict=True)
        if start < stop
    ]


def _gradient(weight: torch.Tensor, step: int, made: torch.Generator) -> torch.Tensor:
    """Noise: about one direction at first and at last, else nearly orthogonal to rows of weights, small, or a spike."""
    rows = _by_row(weight.shape)
    noise = torch.randn(weight.shape, generator=made, **_PLAIN).mul_(rows)
    if step < 8 or step >= 30:
        noise = noise * 0.1 + rows
    elif 18 <= step < 24:
        noise *= 1e-3
    elif step == 24:
        noise *= 30.0
    noise = noise.to(weight.device, weight.dtype)
    if not 10 <= step < 18 or not weight.ndim:
        return noise
    flat, values = (each.reshape(len(weight) if weight.ndim > 1 else 1, -1) for each in (noise, weight.detach()))
    along = (flat * values).sum(1, keepdim=True) / values.square().sum(1, keepdim=True)
    return (flat - (1 - _ALONG) * along * values).reshape(weight.shape)


def _by_row(shape: Sequence[int]) -> torch.Tensor:
    """Rows of different sizes: to be multiplied with values."""
    return (
        torch.linspace(0.5, 1.5, shape[0], **_PLAIN).reshape(-1, *[1] * (len(shape) - 1))
        if shape
        else torch.ones((), **_PLAIN)
    )


@contextlib.contextmanager
def _in_vain(inner: torch.optim.Optimizer) -> Iterator[Callable[[], object]]:
    """Nothing that is done in this block is recorded, warned of, or known to chance: see `same_chance`."""
    devices = {each.device for group in inner.param_groups for each in group["params"]}
    with same_chance(devices) as chance, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield chance


# --------------------------------------------------------------------------------------------------------------- copies


def _copy(
    inner: torch.optim.Optimizer, model: torch.nn.Module, subjects: Sequence[_Subject], tiles: Sequence[_Tile]
) -> torch.optim.Optimizer:
    """The same optimizer, of these tensors; it has no reference to the model."""
    state: defaultdict[Any, Any] = defaultdict(dict)
    state.update(deepcopy(_common(inner)))
    memo: dict[int, Any] = {id(inner.state): state}
    memo.update(dict.fromkeys(map(id, [*model.modules(), *model.parameters(), *model.buffers()])))
    made = twin_of(inner, memo)
    for group in made.param_groups:
        group["params"] = []
        if isinstance(rate := group.get("lr"), float | int | torch.Tensor) and not rate > _LEAST_RATE:
            group["lr"] = rate * 0 + _LEAST_RATE
        if isinstance(decay := group.get("weight_decay"), float | int) and 0 < decay < _LEAST_DECAY:
            group["weight_decay"] = _LEAST_DECAY
    for tile in tiles:
        subject, tensor = subjects[tile.number], tile.tensor.requires_grad_()
        made.param_groups[subject.group]["params"].append(tensor)
        if subject.state:
            state[tensor] = {key: _cut(each, subject.values, tile) for key, each in subject.state.items()}
    return made


def _fitted(value: Any, real: torch.Tensor, shape: Sequence[int]) -> Any:
    """The optimizer's first state of a parameter, for a tensor in its place: its values, repeated."""
    if not isinstance(value, torch.Tensor) or value.shape != real.shape:
        return value
    numel, flat = math.prod(shape), local(value).reshape(-1)
    flat = flat[:numel] if len(flat) else flat.new_zeros(1)  # of few rows a rank may have none
    return flat.repeat(-(-numel // len(flat)))[:numel].reshape(shape)


def _cut(value: Any, whole: torch.Tensor, tile: _Tile) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != whole.shape:
        return deepcopy(value)
    if isinstance(tile.tensor, DTensor):
        return _rows_of(value, tile.tensor.device_mesh)
    return value.reshape(-1)[tile.start : tile.stop].reshape(tile.tensor.shape).clone()


# ------------------------------------------------------------------------------------------------------------- findings


def _of_state(state: Mapping[Any, Any], tensors: Iterable[torch.Tensor], unit: Unit, irregular: set[str]) -> str | None:
    """Whether something is kept of a tensor that cannot be cut, or cannot be saved."""
    for tensor in tensors:
        for key, value in state.get(tensor, {}).items():
            shape = value.shape if isinstance(value, torch.Tensor) else None
            if isinstance(value, bool | int | float) or shape in (tensor.shape, ()):
                continue
            if unit is Unit.TENSOR:
                irregular.add(key)
                try:
                    pack(value, repr(key), {})
                except ConfigError as error:
                    return f"keeps {str(error).split(',')[0].replace(' is of', ', of', 1)}, which cannot be saved"
            elif shape is None:
                return f"keeps {key!r} for each tensor, which is no tensor or number but a {type(value).__name__}"
            elif shape.numel() != 1:
                return f"keeps {key!r} of shape {tuple(shape)} for a tensor of shape {tuple(tensor.shape)}"
    return None


def _of_weights(
    subjects: Sequence[_Subject], whole: Sequence[_Tile], shares: Sequence[_Tile], unit: Unit
) -> str | None:
    for tile in whole:
        weights = tile.tensor.detach().reshape(-1)
        others = torch.cat([each.tensor.detach().reshape(-1) for each in shares if each.number == tile.number])
        moved = float((weights - subjects[tile.number].values.reshape(-1)).abs().max())
        apart = float((weights - others).abs().max())
        if not moved > 0:
            return "does not move small tensors in a few steps, so that it cannot be tried"
        if not apart <= _TOLERANCE[unit] * moved:
            return f"gives a tensor other weights {_OTHERWISE[unit]}"
    return None


def _of_numbers(
    one: torch.optim.Optimizer,
    ranks: Sequence[torch.optim.Optimizer],
    whole: Sequence[_Tile],
    shares: Sequence[_Tile],
    unit: Unit,
) -> str | None:
    """Whether single numbers, of tensors, groups or all together, depend on the cuts: weights will, sooner or later."""
    pairs = [
        (one.state.get(tile.tensor, {}), ranks[share.rank].state.get(share.tensor, {}))
        for tile in whole
        for share in shares
        if share.number == tile.number
    ]
    pairs += [(_common(one), _common(rank)) for rank in ranks]
    pairs += [each for rank in ranks for each in zip(one.param_groups, rank.param_groups, strict=True)]
    for there, here in pairs:
        for key, value in there.items():
            number = _number(value)
            if number is not None and not math.isclose(number, _number(here.get(key)) or 0.0, rel_tol=_TOLERANCE[unit]):
                return f"keeps another {key!r} for a tensor {_OTHERWISE[unit]}"
    return None


def _common(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None
