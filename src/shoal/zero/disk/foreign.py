"""Checkpoints that ZeRO has not written, read as its own: those of a run (`shoal.Optimizer`), and of plain torch.

A run numbers the tensors of its state: parameters, extra tensors, then what its optimizer keeps. Plain torch numbers
parameters. Here all of them get the names that they have in a checkpoint of ZeRO (`shoal.zero.disk.saved`). What is a
run's alone is left out: epoch, schedule, extra tensors that are not the model's.
"""

from __future__ import annotations

import hashlib
import logging
import math
import pickle
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from shoal.base.warning_names import named
from shoal.compression import NoCompression, view_bytes
from shoal.errors import ConfigError
from shoal.state.digest import digest_of, hasher
from shoal.state.disk.folder import MODEL, SavedState, SavedTile
from shoal.state.disk.tensor_file import Damaged, Kind, TensorFile
from shoal.state.wire import StateTensorSpec
from shoal.train.optimizer_state import Exported, read_exported
from shoal.train.options import merges
from shoal.zero.packing import pack, typed

__all__ = ["Asker", "check_archive", "of_files", "of_run", "of_torch", "of_weights", "warn_unchecked"]

_UNREADABLE = (OSError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, KeyError, TypeError, AttributeError)
_TENSORS = (torch.Tensor, StateTensorSpec)
_logger = logging.getLogger("shoal.zero")


class Asker(NamedTuple):
    """The sharded optimizer that a checkpoint is read for.

    Attributes:
        names: of the parameters that each of its groups trains.
        listed: the same with those that are frozen.
        irregular: names of statistics that it keeps of a whole parameter, in another shape.
    """

    names: Sequence[Sequence[str]]
    listed: Sequence[Sequence[str]]
    irregular: Collection[str]


class _Foreign(NamedTuple):
    """What a checkpoint has of a model and its optimizer.

    Attributes:
        where: it is, for people.
        model: the tensors of the model, by name.
        listed: the names of the parameters in each group of the optimizer.
        options: of each group.
        statistics: of each parameter, by its name; tensors may be described only.
        common: statistics of no parameter.
        tile: where a tensor among the statistics is.
    """

    where: Path
    model: Mapping[str, SavedTile]
    listed: Sequence[Sequence[str]]
    options: Sequence[Mapping[str, Any]]
    statistics: Mapping[str, Mapping[str, Any]]
    common: Mapping[str, Any]
    tile: Callable[[Any], SavedTile]


def _described(
    found: _Foreign, asker: Asker | None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, list[SavedTile]]]:
    """ZeRO's values, shapes and tiles of it."""
    names = [name for group in found.listed for name in group if name in found.model]
    if asker is not None:
        trained = {name for group in asker.names for name in group}
        names = [name for name in names if name in trained]
    shapes = {name: found.model[name].kind.shape for name in names}
    tiles, whole = {name: [tile] for name, tile in found.model.items()}, dict[str, dict[str, Any]]()
    # A single value that is not a value of the parameter; of a scalar it cannot be told by its shape.
    counters = {"step"} | {
        key for name in names if shapes[name] for key, value in _of(found, name) if getattr(value, "shape", None) == ()
    }
    for name, shape in shapes.items():
        for key, value in _of(found, name):
            kind = tuple(value.shape) if isinstance(value, _TENSORS) else type(value).__name__
            if kind in {(), shape}:
                is_one = kind == () and (bool(shape) or key in counters)
                place = found.tile(value)._replace(stop=math.prod(shape), is_one=is_one)
                tiles[f"{name}|state|{key}"] = [place]
                continue
            packed, parts = _packed(value, key)
            if parts and asker is not None and key not in asker.irregular:
                raise ConfigError(
                    f"the optimizer in {found.where} keeps {key!r} of {name} with shape {kind}, and the parameter has "
                    f"{shape}: it was built of other parameters, or in another order"
                )
            whole.setdefault(name, {})[key] = packed
            tiles.update({f"{name}|whole|{place}": [found.tile(each)] for place, each in parts.items()})
    values = {
        "aliases": {},
        "groups": [
            {"parameters": [name for name in group if name in shapes], "listed": list(group), "settings": dict(options)}
            for group, options in zip(found.listed, found.options, strict=True)
        ],
        "common": {key: typed(value) for key, value in found.common.items()},
        "whole": whole,
        "extra": {},
    }
    return values, {name: {"shape": list(shape)} for name, shape in shapes.items()}, tiles


def _of(found: _Foreign, name: str) -> Collection[tuple[str, Any]]:
    return found.statistics.get(name, {}).items()


def _packed(value: Any, key: str) -> tuple[Any, dict[str, Any]]:
    """A statistic as `pack` writes it, and the tensors in it."""
    known, parts = dict[int, Any](), dict[str, torch.Tensor]()

    def stand_in(each: torch.Tensor | StateTensorSpec) -> torch.Tensor:
        tensor = torch.empty(each.shape, dtype=each.dtype, device="meta") if isinstance(each, StateTensorSpec) else each
        known[id(tensor)] = each
        return tensor

    stand_ins = tree_map_only(_TENSORS, stand_in, value)
    packed = pack(stand_ins, key, parts)
    return packed, {place: known[id(each)] for place, each in parts.items()}


# --------------------------------------------------------------------------------------------------------------- a run


def of_run(path: Path, saved: SavedState, asker: Asker | None) -> SavedState:
    """The checkpoint of a run under the names of ZeRO.

    Args:
        path: of its folder.
        saved: the state in it.
        asker: it is read for; None for all that it trains.

    Raises:
        ConfigError: the parameters have no names, or the optimizer keeps what ZeRO has no place for.
        Damaged: it is not in its form.
    """
    run, model = saved.values, saved.files.get(MODEL)
    try:
        state, places = run["values"], run["tensors"]
        if merges(run["settings"]):
            raise ConfigError(
                f"{path} has the anchors of merges, and not the state of the inner optimizer: load its weights alone, "
                f"from its file {MODEL}"
            )
        kinds = [saved.files[file].kinds[key] for file, key in places]
        # Each is an object of its own: it stands for the tensor of its position.
        specs = [StateTensorSpec(kind.shape, kind.dtype, NoCompression()) for kind in kinds]
        at = {id(spec): place for spec, place in zip(specs, places, strict=True)}
        count = sum(size for size, _ in state["optimizer"]["groups"])
        exported = read_exported(state["optimizer"], specs, state["fixed"], count)
        names = [key for file, key in places[:count] if file == MODEL]
        if model is None or len(names) != count:
            raise ConfigError(f"{path} was saved without model=, so its parameters have no names: load it in the run")
        _check(path, exported)

        def tile(spec: StateTensorSpec) -> SavedTile:
            file, key = at[id(spec)]
            return SavedTile(0, spec.numel, saved.files[file], key)

        def value(each: Any) -> Any:
            if not isinstance(each, StateTensorSpec):
                return each
            with saved.opened():
                return tile(each).file.whole(tile(each).key)

        statistics, common = exported.states[0]
        values, shapes, tiles = _described(
            _Foreign(
                path,
                {key: SavedTile(0, kind.numel, model, key) for key, kind in model.kinds.items()},
                [names[end - size : end] for size, end in zip(exported.sizes, accumulate(exported.sizes), strict=True)],
                [{key: _number(value(each)) for key, each in options.items()} for options in exported.options],
                {names[number]: entries for number, entries in statistics.items()},
                {key: value(each) for key, each in common.items()},
                tile,
            ),
            asker,
        )
        values["others"] = [key for key in model.kinds if key not in shapes]
        values["optimizer"] = run["settings"].get("optimizer")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise Damaged(f"its values are not those of a run: {error}") from error
    return SavedState(values, shapes, tiles, saved.files, saved.identity, saved.is_checked)


def _check(path: Path, exported: Exported) -> None:
    if len(exported.states) != 1 or any(exported.numbers):
        raise ConfigError(
            f"the optimizer in {path} wraps another one, or keeps numbers beside its statistics: ZeRO has no place for "
            "them"
        )


def _number(option: Any) -> Any:
    """An option; a rate may be a tensor."""
    return option.item() if isinstance(option, torch.Tensor) else option


# --------------------------------------------------------------------------------------------------------- plain torch


class _InMemory:
    """Tensors that are in memory, as `TensorFile` has those of a file."""

    def __init__(self) -> None:
        self.kinds = dict[str, Kind]()
        self._tensors = list[torch.Tensor]()

    def add(self, tensor: torch.Tensor) -> SavedTile:
        """One more; returns where it is."""
        key = str(len(self._tensors))
        self._tensors.append(tensor.detach().contiguous())
        self.kinds[key] = Kind(tuple(tensor.shape), tensor.dtype)
        return SavedTile(0, tensor.numel(), self, key)

    def opened(self) -> AbstractContextManager[None]:
        """Does nothing."""
        return nullcontext()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._tensors[int(name)].view(-1)[start:stop].clone()

    def whole(self, name: str) -> torch.Tensor:
        return self._tensors[int(name)].clone()

    def bytes_of(self, name: str) -> memoryview:
        """The memory of a tensor."""
        return view_bytes(self._tensors[int(name)])


def of_weights(tensors: Mapping[str, torch.Tensor]) -> SavedState:
    """Weights in memory, as a state of which nothing is trained."""
    memory, seen = _InMemory(), hasher()
    tiles = {name: [memory.add(each.cpu())] for name, each in tensors.items()}
    for name, (tile,) in sorted(tiles.items()):
        seen.update(f"{name} {tile.kind}".encode())
        seen.update(memory.bytes_of(tile.key))
    return SavedState({"others": list(tiles)}, {}, tiles, {"": memory}, f"weights-{seen.hexdigest()}")


def of_files(files: Sequence[TensorFile]) -> SavedState:
    """Weights in safetensors files; their identity is of what they look like."""
    tiles = dict[str, list[SavedTile]]()
    for file in files:
        for name, kind in file.kinds.items():
            if name in tiles:
                raise Damaged(f"it has {name} in two files")
            tiles[name] = [SavedTile(0, kind.numel, file, name)]
    described = repr(sorted((name, tile.kind.shape, str(tile.kind.dtype)) for name, (tile,) in tiles.items()))
    by_name = {str(file.path): file for file in files}
    return SavedState({"others": list(tiles)}, {}, tiles, by_name, digest_of([described.encode()]).hex())


def of_torch(path: Path, asker: Asker) -> SavedState:
    """A checkpoint of plain torch in one file: a dictionary of ``model`` and ``optimizer``, their state dictionaries.

    Raises:
        ConfigError: it is none, or damaged, or its optimizer has other groups.
    """
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}")
        weights: dict[str, Any] = found["model"]
        state, entries = found["optimizer"]["state"], found["optimizer"]["param_groups"]
        numbers = [group["params"] for group in entries]
        averaged, identity = found.get("ema"), _identity(path)
    except _UNREADABLE as error:
        raise ConfigError(f"{path} is no whole checkpoint, of a model and its optimizer: {error}") from error
    check_archive(path)
    sizes = [len(each) for each in numbers]
    fitting = [each for each in (asker.names, asker.listed) if [len(group) for group in each] == sizes]
    if not fitting:
        raise ConfigError(f"the optimizer in {path} has other groups: give shard() those that it was saved with")
    in_order = [name for group in fitting[0] for name in group]
    by_number = dict(zip((each for group in numbers for each in group), in_order, strict=True))
    if strays := [key for key in state if isinstance(key, int) and key not in by_number]:
        raise ConfigError(
            f"the optimizer in {path} has statistics of parameter {strays[0]}, which is in none of its groups"
        )
    memory = _InMemory()
    values, shapes, tiles = _described(
        _Foreign(
            path,
            {name: memory.add(value) for name, value in weights.items() if torch.is_tensor(value)},
            fitting[0],
            [{key: each for key, each in entry.items() if key != "params"} for entry in entries],
            {by_number[key]: entry for key, entry in state.items() if key in by_number},
            {key: value for key, value in state.items() if isinstance(key, str)},
            memory.add,
        ),
        asker,
    )
    # Tied parameters come under each of their names: one is trained, the others are its aliases.
    trained = {_storage(weights[name]) for name in shapes}
    names = {name for group in asker.names for name in group}
    values["others"] = [
        name
        for name, value in weights.items()
        if torch.is_tensor(value) and name not in names and _storage(value) not in trained
    ]
    values |= {"optimizer": None, "extra": found.get("extra", {})}
    if averaged is not None:
        values["ema"] = {key: value for key, value in averaged.items() if key != "model"}
        tiles.update({f"{name}|average": [memory.add(averaged["model"][name])] for name in shapes})
    return SavedState(values, shapes, tiles, {"": memory}, identity)


def _storage(value: torch.Tensor) -> object:
    return value.untyped_storage().data_ptr(), value.storage_offset()


def check_archive(path: Path) -> None:
    """Raise `ConfigError` if a file is not what `torch.save` wrote: `torch.load` never looks at its checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            if not any(each.CRC for each in archive.infolist()):  # after `set_crc32_options(False)`
                warn_unchecked(path)
                return
            bad = archive.testzip()
    except Exception as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if bad is not None:
        raise ConfigError(f"{path} is damaged: {bad} in it is not what was written, by its checksum")


def warn_unchecked(where: object) -> None:
    """Say that nothing in a checkpoint can be checked."""
    _logger.warning(named("%s was saved without checksums: damaged values in it would not be noticed"), where)


def _identity(path: Path) -> str:
    """The checksums of all entries in a file that `torch.save` wrote."""
    with zipfile.ZipFile(path) as archive:
        entries = [(each.file_size, each.CRC) for each in archive.infolist()]
    return hashlib.sha256(repr(entries).encode()).hexdigest()[:16]
