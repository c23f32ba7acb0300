"""The format of a checkpoint on disk, and how values are found in it.

A checkpoint is a folder that all ranks write together, on a file system that they share::

    step-1000/
        index.json                        what there is, and where
        rank-00000-of-00004.safetensors   what rank 0 kept: its tiles of the parameters, and their optimizer state

A tile is a range of a parameter's values in their flat order. A loading rank looks up which saved tiles overlap with
its own, so the number of ranks, the stage and the owners may all differ from before. A tile has its state and its step
counter with it: it can be moved or replaced on its own.

===================  ==============================================================================================
``index.json``       meaning
===================  ==============================================================================================
``format``           1; 2 if there is an ``order``; 3 if one is of rows, or anything is ``whole``
``id``               a random text, so that no two checkpoints are taken for one
``parameters``       of each trained parameter: ``shape``; and ``order`` if its values are counted in another order than
                     that of the shape: the dimensions, the slowest first (channels last), or ``["rows", FACTOR]``: row
                     `r` is at ``r * FACTOR % ROWS`` (`parameters.Scattered`)
``aliases``          other names of tied parameters: the name that they are under
``others``           names of frozen parameters and buffers, whole, in the file of rank 0 as ``other|NAME``
``groups``           the optimizer's groups: ``parameters`` by name, ``listed`` with those that are frozen, ``settings``
``optimizer``        its class, for people to read
``common``           what the optimizer keeps of no parameter: its type, and the value (not in older checkpoints)
``numbers``          statistics that are no tensors: the names of their types (not in older checkpoints)
``whole``            statistics of other shapes, by parameter and name: as `pack` writes them (not in older checkpoints)
``files``            of each file: ``bytes``, and its ``pieces`` as ``[NAME, START, STOP]``
``ema``              of moving averages: ``updates`` and ``decay`` (only if they were saved)
``extra``            what the user gave, as `pack` writes it
``checksum``         of the rest of this file, see `tensor_files.seal` (not in older checkpoints: read unchecked)
===================  ==============================================================================================

JSON allows only texts as keys, and has neither tuples nor sets. Such a value of `extra` becomes an object of one entry,
whose key names its type: ``{"(dict)": [[KEY, VALUE], …]}``, ``{"(tuple)": [VALUE, …]}``. A tensor in a statistic
becomes ``{"(tensor)": [PLACE, STRIDES]}``.

A file has the checksums of its tensors, by name, among its metadata. A rank checks the names in each file, and each
tensor before it first takes a value of it. So flipped bytes are found by whoever would take them over, and no rank
reads what it does not need.

In a file, ``NAME|START:STOP|value`` are a tile's values, and ``NAME|START:STOP|average`` their moving average, and
``NAME|START:STOP|state|KEY`` is one of its statistics:
one value for each of its values, or a single one. Statistics of other shapes (the rows' means of Adafactor, the
matrices of Shampoo) are of a whole parameter: their tensors are under ``NAME|0:STOP|whole|PLACE``. ``residual|NAME`` is
what the rank has not sent of a parameter's gradients (`top_k`), whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from shoal.base.checks import path as checked_path
from shoal.base.tensor_files import checksum, unseal
from shoal.errors import ConfigError
from shoal.layout import Order, Scattered, Tile, flat, shaped

__all__ = [
    "FORMATS",
    "INDEX",
    "Saved",
    "Statistics",
    "checksums",
    "consolidate",
    "exact",
    "location",
    "number",
    "pack",
    "residual_key",
    "state_key",
    "typed",
    "unpack",
    "untyped",
    "value_key",
    "warn_unchecked",
    "whole_key",
    "written",
]

FORMATS = (1, 2, 3)
_ROWS = "rows"
INDEX = "index.json"
_CHECKSUMS = "checksums"
_logger = logging.getLogger("shoal.zero")


def _place(tile: Tile) -> str:
    return f"{tile.name}|{tile.start}:{tile.stop}"


def value_key(tile: Tile) -> str:
    """The key of a tile's values."""
    return f"{_place(tile)}|value"


def state_key(tile: Tile, key: str) -> str:
    """The key of one of a tile's statistics."""
    return f"{_place(tile)}|state|{key}"


def whole_key(tile: Tile, place: str) -> str:
    """The key of a tensor in what is kept of a whole parameter."""
    return f"{_place(tile)}|whole|{place}"


def residual_key(name: str) -> str:
    """The key of what a rank has not sent of a parameter's gradients."""
    return f"residual|{name}"


def average_key(tile: Tile) -> str:
    """The key of the moving average of a tile's values."""
    return f"{_place(tile)}|average"


def exact(value: float) -> torch.Tensor:
    """A number of Python's, without rounding."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")


def number(value: torch.Tensor, kind: str) -> float:
    """Read the result of `exact` for a number of this type."""
    kinds: dict[str, type[float]] = {"bool": bool, "int": int, "float": float}
    return kinds[kind](value.item())


def typed(value: Any) -> list[Any]:
    """A number or a tensor, with its type, for JSON."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    return [type(value).__name__, value]


def untyped(entry: Sequence[Any]) -> Any:
    """The value that `typed` was given."""
    kind, value = entry
    return torch.tensor(value, dtype=getattr(torch, kind[6:]), device="cpu") if kind.startswith("torch.") else value


def checksums(tensors: Mapping[str, torch.Tensor], read: Callable[[str], None] = lambda _: None) -> dict[str, str]:
    """The metadata of a file that holds these tensors; `read` is called with each key when its values were read."""
    found = {}
    for key, each in tensors.items():
        found[key] = checksum(each)
        read(key)
    return {_CHECKSUMS: json.dumps(found)}


def warn_unchecked(path: Path) -> None:
    """Say that nothing in a checkpoint can be checked."""
    _logger.warning("%s was saved without checksums: damaged values in it would not be noticed", path)


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


class Saved:
    """A checkpoint on disk.

    Args:
        folder: where.
        orders: in which order whoever asks counts the values of a parameter.

    Attributes:
        index: the content of `index.json`.
        identity: a text without spaces; the same for copies, another one for every other checkpoint.

    Raises:
        ConfigError: it is none, or not whole.
    """

    def __init__(self, folder: Path, orders: Mapping[str, Order] = MappingProxyType({})) -> None:
        self._folder, self._orders = folder, orders
        self._files: dict[str, Any] = {}
        self._keys: dict[str, list[str]] = {}
        self._checksums: dict[str, dict[str, int]] = {}
        self._checked: set[tuple[str, str]] = set()
        try:
            self.index: dict[str, Any]
            self.index, self._sealed = unseal((folder / INDEX).read_text())
            self.index["extra"] = unpack(self.index["extra"])
            for group in self.index["groups"]:
                group["settings"] = unpack(group["settings"])
            if self.index["format"] not in FORMATS:
                raise ConfigError(
                    f"{folder} has format {self.index['format']}, of a later version: this one reads {FORMATS[-1]}"
                )
            self.identity: str = self.index["id"]
            for name, entry in self.index["files"].items():
                if (size := (folder / name).stat().st_size) != entry["bytes"]:
                    raise ConfigError(f"{folder / name} has {size} bytes instead of {entry['bytes']}: it is damaged")
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{folder} is no whole checkpoint: {error}") from error
        self._places: dict[str, list[tuple[int, int, str]]] = {}
        for file, entry in self.index["files"].items():
            for name, start, stop in entry["pieces"]:
                self._places.setdefault(name, []).append((start, stop, file))
        for places in self._places.values():
            places.sort()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """In this block values can be read. Raises `ConfigError` if a file is damaged."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.device("cpu"))  # safetensors makes tensors on the program's default device
            try:
                for file in self.index["files"]:
                    self._files[file] = opened = stack.enter_context(safe_open(self._folder / file, "pt"))
                    self._checksums[file] = self._read_checksums(file)
                    for name in opened.keys():  # noqa: SIM118 (no mapping)
                        place, _, key = name.rpartition("|state|")
                        self._keys.setdefault(place, []).append(key)
                if not self._sealed:
                    warn_unchecked(self._folder)
                yield
            except SafetensorError as error:
                raise ConfigError(f"{self._folder} is damaged: {error}") from error
            finally:
                self._files.clear()
                self._checked.clear()
                self._keys.clear()

    def other(self, name: str) -> torch.Tensor:
        """A frozen parameter or a buffer."""
        file, key = next(iter(self.index["files"])), f"other|{name}"
        self._verify(file, key)
        tensor: torch.Tensor = self._files[file].get_tensor(key)
        return tensor

    def kinds(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Name, shape and safetensors' name of the dtype, of each parameter and buffer."""
        for name, entry in self.index["parameters"].items():
            kept = [(value_key(Tile(name, start, stop)), file) for start, stop, file in self._places.get(name, ())]
            dtype = self._files[kept[0][1]].get_slice(kept[0][0]).get_dtype() if kept else "F32"
            yield name, tuple(entry["shape"]), dtype
        for name in self.index["others"]:
            found = self._files[next(iter(self.index["files"]))].get_slice(f"other|{name}")
            yield name, tuple(found.get_shape()), found.get_dtype()

    def _read_checksums(self, file: str) -> dict[str, int]:
        """The checksums in a file. Raises `ConfigError` unless they are of the tensors that it names."""
        opened = self._files[file]
        metadata = opened.metadata() or {}
        if not self._sealed:
            if _CHECKSUMS in metadata:
                raise ConfigError(f"{self._folder / INDEX} is damaged: it has no checksum, and {file} has some")
            return {}
        try:
            found: dict[str, int] = dict(json.loads(metadata[_CHECKSUMS]))
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{self._folder / file} is damaged: it has no checksums") from error
        if odd := found.keys() ^ set(opened.keys()):  # under another name, a statistic would not be missed
            raise ConfigError(f"{self._folder / file} is damaged: {min(odd)} in it is not a name that was written")
        return found

    def _verify(self, file: str, key: str) -> None:
        """Raise `ConfigError` if a tensor is not what was written. It is read whole for that, once."""
        if not self._sealed or (file, key) in self._checked:
            return
        if checksum(self._files[file].get_tensor(key)) != self._checksums[file].get(key):
            raise ConfigError(f"{self._folder / file} is damaged: {key} is not what was written, by its checksum")
        self._checked.add((file, key))

    def residual(self, name: str, rank: int, ranks: int) -> torch.Tensor | None:
        """What one of `ranks` ranks begins with of the gradients of a parameter that were not sent; None if all were.

        The mean over the ranks stays the same: a rank takes those of every `ranks`-th saved rank, and as much more of
        them as the mean is over more ranks.
        """
        files = list(self.index["files"])
        here = [file for file in files[rank::ranks] if residual_key(name) in list(self._files[file].keys())]
        if not here:
            return None
        total = torch.zeros((), dtype=torch.float32, device="cpu")
        for file in here:
            self._verify(file, residual_key(name))
            total = total + self._files[file].get_tensor(residual_key(name)) * (ranks / len(files))
        entry = self.index["parameters"][name]
        there = _read(entry.get("order"), 0)
        if there == (order := self._orders.get(name)):
            return total
        return flat(shaped(total, entry["shape"], there), order)

    def values(self, wanted: Tile) -> torch.Tensor:
        """The parameter's values of a range."""
        return self._in_order(wanted, partial(self._values, key=value_key))

    def averages(self, wanted: Tile) -> torch.Tensor:
        """The moving average of these values, if the index has ``ema``."""
        return self._in_order(wanted, partial(self._values, key=average_key))

    def _in_order(self, wanted: Tile, read: Callable[[Tile], torch.Tensor]) -> torch.Tensor:
        """The saved values of a range; the range is converted if the values were saved in another order."""
        entry, here = self.index["parameters"][wanted.name], self._orders.get(wanted.name)
        shape = torch.Size(entry["shape"])
        there = _read(entry.get("order"), shape[0] if shape else 1)
        if there == here:
            return read(wanted)
        whole = shaped(read(Tile(wanted.name, 0, shape.numel())), shape, there)
        return flat(whole, here)[wanted.start : wanted.stop].clone()

    def _values(self, wanted: Tile, key: Callable[[Tile], str]) -> torch.Tensor:
        parts = []
        for tile, file, part in self._overlaps(wanted):
            self._verify(file, key(tile))
            parts.append(self._files[file].get_slice(key(tile))[part])
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")

    def statistics(self, wanted: Tile) -> Statistics:
        """The optimizer's of a range; a single value, such as a step counter, is that of where the range begins.

        Each call gives memory of its own: tiles within one saved tile count their steps in place.
        """
        keys = {key for tile, _, _ in self._overlaps(wanted) for key in self._keys.get(_place(tile), ())}
        found, kinds = Statistics({}, self._of_the_whole(wanted)), self.index.get("numbers", {})
        for key in sorted(keys):
            value = self._statistic(wanted, key)
            if value.ndim:
                found.each[key] = value
            else:
                found.others[key] = number(value, kinds[key]) if key in kinds else value
        return found

    def _of_the_whole(self, wanted: Tile) -> dict[str, Any]:
        """What is kept of a parameter as a whole. Raises `ConfigError` if that has tensors, and a part is wanted."""
        packed = self.index.get("whole", {}).get(wanted.name, {})

        def tensor(place: str) -> torch.Tensor:
            ((tile, file, _), *others) = self._overlaps(wanted)
            if others or (tile.start, tile.stop) != (wanted.start, wanted.stop):
                raise ConfigError(
                    f"{self._folder} has {place!r} of {wanted.name} as a whole, and here that is cut: load it in stage "
                    "1 or 2, with an optimizer that needs whole tensors"
                )
            key = whole_key(tile, place)
            self._verify(file, key)
            found: torch.Tensor = self._files[file].get_tensor(key)
            return found

        return {key: unpack(each, tensor) for key, each in packed.items()}

    def _statistic(self, wanted: Tile, key: str) -> torch.Tensor:
        first = self._part(wanted, key, *next(self._overlaps(wanted)))
        if not first.ndim:
            return first.clone()
        return self._in_order(
            wanted, lambda each: torch.cat([self._part(each, key, *found) for found in self._overlaps(each)])
        )

    def _part(self, wanted: Tile, key: str, tile: Tile, file: str, part: slice) -> torch.Tensor:
        """The part of a statistic that a saved tile has."""
        if key not in self._keys.get(_place(tile), ()):
            raise ConfigError(f"{self._folder} lacks {key!r} of some values of {wanted.name}: it is damaged")
        self._verify(file, state_key(tile, key))
        there = self._files[file].get_slice(state_key(tile, key))
        found: torch.Tensor = there[part] if there.get_shape() else self._files[file].get_tensor(state_key(tile, key))
        return found

    def _overlaps(self, wanted: Tile) -> Iterator[tuple[Tile, str, slice]]:
        """The saved tiles that a range needs, the file of each, and the part of each."""
        at = wanted.start
        for start, stop, file in self._places.get(wanted.name, ()):
            if start <= at < min(stop, wanted.stop):
                end = min(stop, wanted.stop)
                yield Tile(wanted.name, start, stop), file, slice(at - start, end - start)
                at = end
        if at != wanted.stop:
            raise ConfigError(f"{self._folder} lacks the values {at} to {wanted.stop} of {wanted.name}")


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
    saved = Saved(location(path))
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


# ----------------------------------------------------------------------------------------------------- the user's extra

_PLAIN = (bool, int, float, str)  # in this order: a bool is an int
_MOST_BITS = 14_284  # of an integer that Python writes and reads: of 4300 digits, `sys.set_int_max_str_digits`
_PAIRS: dict[str, type[dict[Any, Any]]] = {"(dict)": dict, "(Counter)": Counter, "(OrderedDict)": OrderedDict}
_LISTED: dict[str, type] = {"(tuple)": tuple, "(set)": set}
_NAMES: dict[type, str] = {kind: name for name, kind in (_PAIRS | _LISTED).items()}
_TENSOR = "(tensor)"
_SPECIAL = {*_PAIRS, *_LISTED, _TENSOR}


def pack(value: Any, where: str = "extra", tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """The same in what JSON knows; a number of another library becomes Python's own.

    Args:
        value: numbers, texts and None, in lists, tuples, sets and dictionaries (also `Counter` and `OrderedDict`).
        where: it is, for people.
        tensors: where to put those in it, under their places; None if there must be none.

    Raises:
        ConfigError: it holds anything else.
    """
    if value is None:
        return None
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ConfigError(
            f"{where} is an integer of more than 4300 digits, which Python does not read: give it as text"
        )
    for plain in _PLAIN:
        if isinstance(value, plain):
            return plain(value)
    kind = type(value)
    if tensors is not None and isinstance(value, torch.Tensor):
        tensors[where] = value
        # Products of matrices are rounded otherwise if one lies otherwise in memory.
        return {_TENSOR: [where, list(torch.empty_like(value, device="meta").stride())]}
    if kind is list:
        return [pack(each, f"{where}[{index}]", tensors) for index, each in enumerate(value)]
    if kind is dict and all(type(key) is str and key not in _SPECIAL for key in value):
        return {key: pack(each, f"{where}[{key!r}]", tensors) for key, each in value.items()}
    if kind in _PAIRS.values():
        pairs = [
            [pack(key, f"a key of {where}"), pack(each, f"{where}[{key!r}]", tensors)] for key, each in value.items()
        ]
        return {_NAMES[kind]: pairs}
    if kind in _LISTED.values():
        return {_NAMES[kind]: [pack(each, f"{where}[{index}]", tensors) for index, each in enumerate(value)]}
    raise ConfigError(
        f"{where} is of type {kind.__name__}, which a checkpoint cannot bring back: give numbers, texts and None, in "
        "lists, tuples, sets and dictionaries"
    )


def unpack(value: Any, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
    """The value that was given to `pack`.

    Args:
        value: what that returned.
        tensor: finds the tensor of a place; None if there is none.
    """
    if isinstance(value, list):
        return [unpack(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    if tensor is not None and _TENSOR in value:
        place, steps = value[_TENSOR]
        found = tensor(place)
        return torch.empty_strided(found.shape, steps, dtype=found.dtype, device=found.device).copy_(found)
    for name, kind in _PAIRS.items():
        if name in value:
            return kind({unpack(key): unpack(each, tensor) for key, each in value[name]})
    for name, listed in _LISTED.items():
        if name in value:
            return listed(unpack(each, tensor) for each in value[name])
    return {key: unpack(each, tensor) for key, each in value.items()}
