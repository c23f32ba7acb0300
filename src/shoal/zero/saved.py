"""The format of a checkpoint on disk, and how values are found in it.

A checkpoint is a folder that all ranks write together, on a file system that they share::

    step-1000/
        index.json                        what there is, and where
        rank-00000-of-00004.safetensors   what rank 0 kept: its pieces of the parameters, and their optimizer state

A piece is a range of a parameter's values in their flat order. A loading rank looks up which saved pieces overlap with
its own, so the number of ranks, the stage and the owners may all differ from before. A piece has its state and its step
counter with it: it can be moved or replaced on its own.

The folder gets its name when all of it is written: there is a whole checkpoint under that name, or none. `load` changes
nothing before every rank has read all it needs.

===================  ==============================================================================================
``index.json``       meaning
===================  ==============================================================================================
``format``           1; 2 if there is an ``order``
``id``               a random text, so that no two checkpoints are taken for one
``parameters``       of each trained parameter: ``shape``; and ``order`` if its values are counted in another order than
                     that of the shape (channels last): the dimensions, the slowest first
``aliases``          other names of tied parameters: the name that they are under
``others``           names of frozen parameters and buffers, whole, in the file of rank 0 as ``other|NAME``
``groups``           the optimizer's groups: ``parameters`` by name, ``listed`` with those that are frozen, ``settings``
``optimizer``        its class, for people to read
``common``           what the optimizer keeps of no parameter: its type, and the value (not in older checkpoints)
``numbers``          statistics that are no tensors: the names of their types (not in older checkpoints)
``files``            of each file: ``bytes``, and its ``pieces`` as ``[NAME, START, STOP]``
``extra``            what the user gave, as `extra.pack` writes it
===================  ==============================================================================================

In a file, ``NAME|START:STOP|value`` are a piece's values, and ``NAME|START:STOP|state|KEY`` is one of its statistics.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from shoal.errors import ConfigError
from shoal.zero.extra import unpack
from shoal.zero.layout import Order, flat, shaped
from shoal.zero.optimizer import Piece

__all__ = [
    "FORMATS",
    "INDEX",
    "Range",
    "Saved",
    "Whole",
    "consolidate",
    "exact",
    "number",
    "state_key",
    "typed",
    "untyped",
    "value_key",
]

_UNREADABLE = (
    OSError,
    RuntimeError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    KeyError,
    TypeError,
    AttributeError,
)
FORMATS = (1, 2)
INDEX = "index.json"


def _place(piece: Piece | Range) -> str:
    return f"{piece.name}|{piece.start}:{piece.stop}"


def value_key(piece: Piece | Range) -> str:
    """The key of a piece's values."""
    return f"{_place(piece)}|value"


def state_key(piece: Piece | Range, key: str) -> str:
    """The key of one of a piece's statistics."""
    return f"{_place(piece)}|state|{key}"


def exact(value: float) -> torch.Tensor:
    """A number of Python's, without rounding."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


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
    return torch.tensor(value, dtype=getattr(torch, kind[6:])) if kind.startswith("torch.") else value


class Range(NamedTuple):
    """Some values of one parameter, wherever they are saved."""

    name: str
    start: int
    stop: int


class Saved:
    """A checkpoint on disk.

    Args:
        folder: where.
        orders: in which order whoever asks counts the values of a parameter.

    Attributes:
        index: see above.
        identity: a text without spaces; the same for copies, another one for every other checkpoint.

    Raises:
        ConfigError: it is none, or not whole.
    """

    def __init__(self, folder: Path, orders: Mapping[str, Order] = MappingProxyType({})) -> None:
        self._folder, self._orders = folder, orders
        self._files: dict[str, Any] = {}
        self._keys: dict[str, list[str]] = {}
        try:
            self.index: dict[str, Any] = json.loads((folder / INDEX).read_text())
            self.index["extra"] = unpack(self.index["extra"])
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
            try:
                for file in self.index["files"]:
                    self._files[file] = opened = stack.enter_context(safe_open(self._folder / file, "pt"))
                    for name in opened.keys():  # noqa: SIM118 (no mapping)
                        place, _, key = name.rpartition("|state|")
                        self._keys.setdefault(place, []).append(key)
                yield
            except SafetensorError as error:
                raise ConfigError(f"{self._folder} is damaged: {error}") from error
            finally:
                self._files.clear()
                self._keys.clear()

    def other(self, name: str) -> torch.Tensor:
        """A frozen parameter or a buffer."""
        tensor: torch.Tensor = self._files[next(iter(self.index["files"]))].get_tensor(f"other|{name}")
        return tensor

    def values(self, wanted: Piece | Range) -> torch.Tensor:
        """The parameter's values of a range."""
        return self._in_order(wanted, self._values)

    def _in_order(self, wanted: Piece | Range, read: Callable[[Piece | Range], torch.Tensor]) -> torch.Tensor:
        """The saved values of a range; the range is converted if the values were saved in another order."""
        entry, here = self.index["parameters"][wanted.name], self._orders.get(wanted.name)
        shape, there = torch.Size(entry["shape"]), entry.get("order")
        if (there and tuple(there)) == (here and tuple(here)):
            return read(wanted)
        whole = shaped(read(Range(wanted.name, 0, shape.numel())), shape, there)
        return flat(whole, here)[wanted.start : wanted.stop].clone()

    def _values(self, wanted: Piece | Range) -> torch.Tensor:
        parts = []
        for piece, file, part in self._overlaps(wanted):
            parts.append(self._files[file].get_slice(value_key(piece))[part])
        return torch.cat(parts) if parts else torch.empty(0)

    def statistics(self, wanted: Piece | Range) -> dict[str, torch.Tensor]:
        """The optimizer's of a range; a single value, such as a step counter, is that of where the range begins.

        Each call gives memory of its own: tiles of one saved piece count their steps in place.
        """
        keys = {key for piece, _, _ in self._overlaps(wanted) for key in self._keys.get(_place(piece), ())}
        return {key: self._statistic(wanted, key) for key in sorted(keys)}

    def _statistic(self, wanted: Piece | Range, key: str) -> torch.Tensor:
        first = self._part(wanted, key, *next(self._overlaps(wanted)))
        if not first.ndim:
            return first.clone()
        return self._in_order(
            wanted, lambda each: torch.cat([self._part(each, key, *found) for found in self._overlaps(each)])
        )

    def _part(self, wanted: Piece | Range, key: str, piece: Range, file: str, part: slice) -> torch.Tensor:
        """The part of a statistic that a saved piece has."""
        if key not in self._keys.get(_place(piece), ()):
            raise ConfigError(f"{self._folder} lacks {key!r} of some values of {wanted.name}: it is damaged")
        there = self._files[file].get_slice(state_key(piece, key))
        found: torch.Tensor = there[part] if there.get_shape() else self._files[file].get_tensor(state_key(piece, key))
        return found

    def _overlaps(self, wanted: Piece | Range) -> Iterator[tuple[Range, str, slice]]:
        """The saved pieces that a range needs, the file of each, and the part of each."""
        at = wanted.start
        for start, stop, file in self._places.get(wanted.name, ()):
            if start <= at < min(stop, wanted.stop):
                end = min(stop, wanted.stop)
                yield Range(wanted.name, start, stop), file, slice(at - start, end - start)
                at = end
        if at != wanted.stop:
            raise ConfigError(f"{self._folder} lacks the values {at} to {wanted.stop} of {wanted.name}")


class Whole:
    """A checkpoint of plain torch in one file, as `Saved` gives those in pieces.

    Args:
        path: the path of the file: a dictionary of ``model`` and ``optimizer``, their state dictionaries.
        groups: names of the trained parameters in each of the optimizer's groups: plain torch numbers them.
        listed: the same with those that are frozen: as the optimizer was given them, there or here.
        orders: in which order whoever asks counts the values of a parameter.

    Raises:
        ConfigError: it is no checkpoint, or its optimizer has other groups.
    """

    def __init__(
        self,
        path: Path,
        groups: Sequence[Sequence[str]],
        listed: Sequence[Sequence[str]],
        orders: Mapping[str, Order],
    ) -> None:
        self._path, self._orders = path, orders
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            if not isinstance(found, dict):
                raise TypeError(f"it holds a {type(found).__name__}")
            self._weights: dict[str, Any] = found["model"]
            state, entries = found["optimizer"]["state"], found["optimizer"]["param_groups"]
            numbers = [group["params"] for group in entries]
            extra = found.get("extra", {})
            self.identity = _identity(path)
        except _UNREADABLE as error:
            raise ConfigError(f"{path} is no whole checkpoint, of a model and its optimizer: {error}") from error
        sizes = [len(each) for each in numbers]
        fitting = [each for each in (groups, listed) if [len(group) for group in each] == sizes]
        if not fitting:
            raise ConfigError(f"the optimizer in {path} has other groups: give shard() those that it was saved with")
        in_order = [name for group in fitting[0] for name in group]
        by_number = dict(zip((each for group in numbers for each in group), in_order, strict=True))
        self._state = {by_number[key]: entry for key, entry in state.items() if key in by_number}
        names = [name for group in groups for name in group]
        # A single value that is not a value of the parameter; of a scalar it cannot be told by its shape.
        self._counters = {"step"} | {
            key
            for name, entry in self._state.items()
            for key, value in entry.items()
            if name in self._weights and self._weights[name].ndim and not torch.as_tensor(value).ndim
        }
        # Tied parameters come under each of their names: one is trained, the others are its aliases.
        trained = {self._storage(name) for name in names if name in self._weights}
        self.index: dict[str, Any] = {
            "parameters": {name: {"shape": list(self._weights[name].shape)} for name in names if name in self._weights},
            "others": [
                name
                for name, value in self._weights.items()
                if name not in names and self._storage(name) not in trained and torch.is_tensor(value)
            ],
            "groups": [
                {"parameters": list(group), "settings": {key: each for key, each in entry.items() if key != "params"}}
                for group, entry in zip(groups, entries, strict=True)
            ],
            "optimizer": None,
            "common": {key: typed(value) for key, value in state.items() if isinstance(key, str)},
            "numbers": {
                key: type(value).__name__
                for entry in self._state.values()
                for key, value in entry.items()
                if isinstance(value, bool | int | float)
            },
            "extra": extra,
        }

    def _storage(self, name: str) -> object:
        value = self._weights[name]
        return (value.untyped_storage().data_ptr(), value.storage_offset()) if torch.is_tensor(value) else name

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Does nothing: all values are in memory already."""
        yield

    def other(self, name: str) -> torch.Tensor:
        """A frozen parameter or a buffer."""
        tensor: torch.Tensor = self._weights[name]
        return tensor

    def values(self, wanted: Piece | Range) -> torch.Tensor:
        """The parameter's values of a range."""
        tensor: torch.Tensor = self._weights[wanted.name]
        return flat(tensor, self._orders.get(wanted.name))[wanted.start : wanted.stop]

    def statistics(self, wanted: Piece | Range) -> dict[str, torch.Tensor]:
        """The optimizer's of a range."""
        found, shape = {}, self._weights[wanted.name].shape
        for key, value in self._state.get(wanted.name, {}).items():
            tensor = value if isinstance(value, torch.Tensor) else exact(value)
            if not tensor.ndim and (shape or key in self._counters):
                found[key] = tensor.clone()  # each piece counts its own steps, in place
            elif tensor.shape == shape:
                found[key] = flat(tensor, self._orders.get(wanted.name))[wanted.start : wanted.stop]
            else:
                raise ConfigError(
                    f"the optimizer in {self._path} keeps {key!r} of {wanted.name} with shape {tuple(tensor.shape)}, "
                    f"and the parameter has {tuple(shape)}: it was built of other parameters, or in another order"
                )
        return found


def _identity(path: Path) -> str:
    """The checksums of all entries in a file that `torch.save` wrote."""
    with zipfile.ZipFile(path) as archive:
        entries = [(each.file_size, each.CRC) for each in archive.infolist()]
    return hashlib.sha256(repr(entries).encode()).hexdigest()[:16]


def consolidate(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The checkpoint in `path` as plain torch has it; needs no process group.

    Args:
        path: the folder that `save` wrote.

    Returns:
        ``model`` and ``optimizer``, state dictionaries for `load_state_dict` of the model and its optimizer before
        sharding; and ``extra``. Tensors are on the CPU, those of 16-bit parameters in float32.

    Raises:
        ConfigError: there is no whole checkpoint.
    """
    saved = Saved(Path(path))
    index = saved.index
    listed = [name for group in index["groups"] for name in group["listed"]]  # plain torch counts frozen ones, too
    numbers, kinds = {name: place for place, name in enumerate(listed)}, index.get("numbers", {})
    weights: dict[str, torch.Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    with saved.opened():
        for name in index["parameters"]:
            shape = index["parameters"][name]["shape"]
            whole = Range(name, 0, torch.Size(shape).numel())
            weights[name] = saved.values(whole).reshape(shape)
            statistics = saved.statistics(whole)
            if statistics:
                state[numbers[name]] = {
                    key: number(each, kinds[key]) if key in kinds else each.reshape(shape) if each.ndim else each
                    for key, each in statistics.items()
                }
        weights.update({name: saved.other(name) for name in index["others"]})
    weights.update({alias: weights[name] for alias, name in index["aliases"].items()})
    common = {key: untyped(entry) for key, entry in index.get("common", {}).items()}
    groups = [{**entry["settings"], "params": [numbers[name] for name in entry["listed"]]} for entry in index["groups"]]
    return {
        "model": weights,
        "optimizer": {"state": {**state, **common}, "param_groups": groups},
        "extra": index["extra"],
    }
