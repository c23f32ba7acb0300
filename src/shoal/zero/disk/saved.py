"""What a checkpoint of ZeRO holds, and how values are found in it.

A checkpoint is a folder that all ranks write together, on a file system that they share, in the format of
`shoal.state.disk`::

    step-1000/
        checkpoint.json                   what there is
        rank-00000-of-00004.safetensors   what rank 0 kept: its tiles of the parameters, and their optimizer state

A tile is a range of a parameter's values in their flat order. A loading rank looks up which saved tiles overlap with
its own, so the number of ranks, the stage and the owners may all differ from before. A tile has its state and its step
counter with it: it can be moved or replaced on its own.

==================================  ================================================================================
name of a tensor                    meaning
==================================  ================================================================================
``NAME``                            a trained parameter, in tiles; or a frozen one or a buffer, whole, of rank 0
``NAME|state|KEY``                  a statistic: one value for each of the parameter's, or one for each tile
``NAME|average``                    the moving average of a parameter
``NAME|whole|PLACE``                a tensor of a statistic of another shape (the rows' means of Adafactor, the matrices
                                    of Shampoo), which is of a whole parameter
``NAME|residual|RANK``              what a rank has not sent of a parameter's gradients (`top_k`), whole
==================================  ================================================================================

An ``order`` of a parameter's values is its dimensions, the slowest first (channels last), or ``["rows", FACTOR]``: row
`r` is at ``r * FACTOR % ROWS`` (`layout.Scattered`).

===================  ==============================================================================================
among the values     meaning
===================  ==============================================================================================
``aliases``          other names of tied parameters: the name that they are under
``others``           names of frozen parameters and buffers
``groups``           the optimizer's groups: ``parameters`` by name, ``listed`` with those that are frozen, ``settings``
``optimizer``        its class
``common``           what the optimizer keeps of no parameter: its type, and the value (not in older checkpoints)
``numbers``          statistics that are no tensors: the names of their types (not in older checkpoints)
``whole``            statistics of other shapes, by parameter and name: as `pack` writes them (not in older checkpoints)
``ema``              of moving averages: ``updates`` and ``decay`` (only if they were saved)
``extra``            what the user gave, as `pack` writes it
===================  ==============================================================================================

Checkpoints of a run (`shoal.Optimizer`) and of plain torch are read as such ones, too: see `foreign`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from shoal.base.checks import path as checked_path
from shoal.errors import ConfigError
from shoal.layout import Order, Scattered, Tile, flat, shaped
from shoal.state.disk.folder import SavedState, read_state
from shoal.state.disk.tensor_file import Damaged, Kind, Missing
from shoal.zero.disk.foreign import Asker, of_run, of_torch, warn_unchecked
from shoal.zero.packing import number, unpack, untyped

__all__ = [
    "Saved",
    "Statistics",
    "average_key",
    "consolidate",
    "location",
    "named",
    "residual_key",
    "state_key",
    "value_key",
    "whole_key",
    "written",
]

_ROWS = "rows"


def value_key(tile: Tile) -> str:
    """The key of a tile's values."""
    return f"{tile.name}|{tile.start}:{tile.stop}"


def state_key(tile: Tile, key: str) -> str:
    """The key of one of a tile's statistics."""
    return f"{tile.name}|state|{key}|{tile.start}:{tile.stop}"


def average_key(tile: Tile) -> str:
    """The key of the moving average of a tile's values."""
    return f"{tile.name}|average|{tile.start}:{tile.stop}"


def whole_key(name: str, place: str) -> str:
    """The key of a tensor in what is kept of a whole parameter."""
    return f"{name}|whole|{place}"


def residual_key(name: str, rank: int) -> str:
    """The key of what a rank has not sent of a parameter's gradients."""
    return f"{name}|residual|{rank}"


def location(path: object, name: str = "path") -> Path:
    """The path that a user gave, as the argument of this name. Raises `ConfigError` if no file can have it."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} must be a path, a text that is not empty, got {path!r}")
    return checked_path(name, text)


def written(order: Order) -> list[Any]:
    """An order that is not that of the shape, for JSON."""
    return [_ROWS, order.factor] if isinstance(order, Scattered) else list(order or ())


def _read(entry: Sequence[Any] | None, rows: int) -> Order:
    if entry and entry[0] == _ROWS:
        return Scattered(rows, entry[1])
    return tuple(entry) if entry else None


class Statistics(NamedTuple):
    """The state of an optimizer for a range of a parameter's values.

    Attributes:
        each: one value for each of them, one-dimensional.
        others: numbers, and what the optimizer keeps of the whole parameter, as it keeps it.
    """

    each: dict[str, torch.Tensor]
    others: dict[str, Any]


@contextlib.contextmanager
def named(where: object) -> Iterator[None]:
    """In this block damage of a state is an error that names the state."""
    try:
        yield
    except Missing as error:
        raise ConfigError(f"{where} is no whole checkpoint: {error}") from error
    except Damaged as error:
        raise ConfigError(f"{where} is damaged: {error}") from error


class Saved:
    """A checkpoint, or the weights of a model.

    Args:
        where: it is, for people.
        state: under the names above.
        orders: in which order whoever asks counts the values of a parameter.
        is_of_run: whether a run wrote it: then it may lack frozen parameters.

    Attributes:
        index: the values, as above, and of the trained ``parameters`` ``shape`` and ``order``.
        identity: a text without spaces; the same for copies, another one for every other checkpoint.
        where, is_of_run: as given.
    """

    def __init__(
        self,
        where: object,
        state: SavedState,
        orders: Mapping[str, Order] = MappingProxyType({}),
        *,
        is_of_run: bool = False,
    ) -> None:
        self.where, self._state, self._orders, self.is_of_run = str(where), state, orders, is_of_run
        self.identity = state.identity
        self.index: dict[str, Any] = {**state.values, "parameters": state.tensors}
        self._keys: dict[str, list[str]] = {}
        for name in state.tiles:
            of, _, key = name.rpartition("|state|")
            self._keys.setdefault(of, []).append(key)

    @classmethod
    def at(cls, path: Path, orders: Mapping[str, Order] = MappingProxyType({}), asker: Asker | None = None) -> Saved:
        """The checkpoint in a folder; or in a file of plain torch, if it is read for an optimizer (`asker`).

        Raises:
            ConfigError: it is none, or not whole.
        """
        with named(path):
            if asker is not None and path.is_file():
                return cls(path, of_torch(path, asker), orders)
            state = read_state(path)
            if "run_id" in state.values:
                return cls(path, of_run(path, state, asker), orders, is_of_run=True)
            return cls(path, _unpacked(state), orders)

    def counted(self, orders: Mapping[str, Order]) -> Saved:
        """The same for somebody who counts values in these orders."""
        return Saved(self.where, self._state, orders, is_of_run=self.is_of_run)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """In this block values can be read. Raises `ConfigError` if a file is damaged."""
        with named(self.where), self._state.opened():
            if not self._state.is_checked:
                warn_unchecked(self.where)
            yield

    def other(self, name: str) -> torch.Tensor:
        """A frozen parameter or a buffer."""
        return self._state.whole(name)

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """What each parameter, frozen parameter and buffer looks like, by name."""
        found = {name: self._state.tiles[name][0].kind for name in self.index["others"]}
        for name, entry in self.index["parameters"].items():
            tiles = self._state.tiles.get(name)
            found[name] = Kind(tuple(entry["shape"]), tiles[0].kind.dtype if tiles else torch.float32)
        return found

    def residual(self, name: str, rank: int, ranks: int) -> torch.Tensor | None:
        """What one of `ranks` ranks begins with of the gradients of a parameter that were not sent; None if all were.

        The mean over the ranks stays the same: a rank takes those of every `ranks`-th saved rank, and as much more of
        them as the mean is over more ranks.
        """
        count = len(self._state.files)
        here = [key for each in range(rank, count, ranks) if (key := residual_key(name, each)) in self._state.tiles]
        if not here:
            return None
        total = torch.zeros((), dtype=torch.float32, device="cpu")
        for key in here:
            total = total + self._state.whole(key) * (ranks / count)
        entry = self.index["parameters"][name]
        there = _read(entry.get("order"), 0)
        if there == (order := self._orders.get(name)):
            return total
        return flat(shaped(total, entry["shape"], there), order)

    def values(self, wanted: Tile) -> torch.Tensor:
        """The values of a range of a parameter, a frozen one or a buffer."""
        return self._in_order(wanted, wanted.name)

    def averages(self, wanted: Tile) -> torch.Tensor:
        """The moving average of these values, if the index has ``ema``."""
        return self._in_order(wanted, f"{wanted.name}|average")

    def _in_order(self, wanted: Tile, name: str) -> torch.Tensor:
        """A range of what belongs to a parameter; it is converted if the values were saved in another order."""
        shape, here = torch.Size(self.kinds[wanted.name].shape), self._orders.get(wanted.name)
        there = _read(self._state.tensors.get(wanted.name, {}).get("order"), shape[0] if shape else 1)
        if there == here:
            return self._state.read(name, wanted.start, wanted.stop)
        whole = shaped(self._state.read(name, 0, shape.numel()), shape, there)
        return flat(whole, here)[wanted.start : wanted.stop].clone()

    def statistics(self, wanted: Tile) -> Statistics:
        """The optimizer's of a range; a single value, such as a step counter, is that of where the range begins.

        Each call gives memory of its own: tiles that lie in a saved one count their steps in place.
        """
        found, kinds = Statistics({}, self._of_the_whole(wanted)), self.index.get("numbers", {})
        for key in sorted(self._keys.get(wanted.name, ())):
            name = f"{wanted.name}|state|{key}"
            if not self._state.has(name, wanted.start, wanted.stop):
                continue
            tile, *_ = next(self._state.overlaps(name, wanted.start, wanted.start + 1))
            if tile.is_one:
                value = tile.file.whole(tile.key)
                found.others[key] = number(value, kinds[key]) if key in kinds else value
            else:
                found.each[key] = self._in_order(wanted, name)
        return found

    def _of_the_whole(self, wanted: Tile) -> dict[str, Any]:
        """What is kept of a parameter as a whole. Raises `ConfigError` if that has tensors, and a part is wanted."""

        def tensor(place: str) -> torch.Tensor:
            numel = torch.Size(self.index["parameters"][wanted.name]["shape"]).numel()
            if (wanted.start, wanted.stop) != (0, numel):
                raise ConfigError(
                    f"{self.where} has {place!r} of {wanted.name} as a whole, and here that is cut: load it in stage "
                    "1 or 2, with an optimizer that needs whole tensors"
                )
            return self._state.whole(whole_key(wanted.name, place))

        packed = self.index.get("whole", {}).get(wanted.name, {})
        return {key: unpack(each, tensor) for key, each in packed.items()}


def _unpacked(state: SavedState) -> SavedState:
    """A checkpoint of ZeRO with what `pack` has written as it was. Raises `Damaged` if it is not in its form."""
    try:
        groups = [{**group, "settings": unpack(group["settings"])} for group in state.values["groups"]]
        return replace(state, values={**state.values, "extra": unpack(state.values["extra"]), "groups": groups})
    except (LookupError, TypeError) as error:
        raise Damaged(f"it is no checkpoint of shoal.zero: {error}") from error


def consolidate(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The checkpoint in `path` as plain torch has it; needs no process group.

    Args:
        path: the folder that `save` wrote.

    Returns:
        ``model`` and ``optimizer``, state dictionaries for `load_state_dict` of the model and its optimizer before
        sharding; and ``extra``. If moving averages were saved, ``ema``: a dictionary of ``model``, with the averages
        in place of weights, ``updates`` and ``decay``. Tensors are on the CPU, those of 16-bit parameters in float32.

    Raises:
        ConfigError: there is no whole checkpoint, or `path` is no path.
    """
    saved = Saved.at(location(path))
    index = saved.index
    listed = [name for group in index["groups"] for name in group["listed"]]  # plain torch counts frozen ones, too
    numbers = {name: place for place, name in enumerate(listed)}
    weights: dict[str, torch.Tensor] = {}
    averages: dict[str, torch.Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    with saved.opened():
        for name in index["parameters"]:
            shape = index["parameters"][name]["shape"]
            whole = Tile(name, 0, torch.Size(shape).numel())
            weights[name] = saved.values(whole).reshape(shape)
            if "ema" in index:
                averages[name] = saved.averages(whole).reshape(shape)
            statistics = saved.statistics(whole)
            if any(statistics):
                each = {key: value.reshape(shape) for key, value in statistics.each.items()}
                state[numbers[name]] = each | statistics.others
        weights.update({name: saved.other(name) for name in index["others"]})
    weights.update({alias: weights[name] for alias, name in index["aliases"].items()})
    common = {key: untyped(entry) for key, entry in index.get("common", {}).items()}
    groups = [{**entry["settings"], "params": [numbers[name] for name in entry["listed"]]} for entry in index["groups"]]
    averages.update({alias: averages[name] for alias, name in index["aliases"].items() if averages})
    return {
        "model": weights,
        "optimizer": {"state": {**state, **common}, "param_groups": groups},
        "extra": index["extra"],
        **({"ema": {**index["ema"], "model": {**weights, **averages}}} if averages else {}),
    }
