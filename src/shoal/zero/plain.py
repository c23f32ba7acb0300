"""The forms in which plain torch keeps a whole model: its weights alone, or a checkpoint in one file.

Weights are gathered from their shards (`full_state_dict`), or read from a state dictionary (`BareWeights`). A
checkpoint has the state dictionaries of a model before sharding, and of its optimizer (`Whole`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shoal.base.checks import flag
from shoal.errors import ConfigError
from shoal.layout import Order, Tile, flat
from shoal.zero.changes import check_alike, check_whole
from shoal.zero.lent import writes_of
from shoal.zero.parameters import named_parameters
from shoal.zero.replicas import process_group
from shoal.zero.saved import Statistics, location, typed, warn_unchecked
from shoal.zero.watch import Agreement, Watch

__all__ = ["BareWeights", "Whole", "bare_weights", "fitting", "full_state_dict", "overwrite"]

_SHOWN = 5
_UNREADABLE = (OSError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, KeyError, TypeError, AttributeError)


def full_state_dict(
    model: torch.nn.Module,
    *,
    rank0_only: bool = False,
    group: dist.ProcessGroup | None = None,
    but: Collection[int] = (),
) -> dict[str, Any]:
    """The unsharded weights and buffers, as `model.state_dict()` of the model before sharding would have them.

    All ranks call it. One parameter at a time is gathered; tied ones come under each of their names. Where the model
    computes in 16 bits, the weights of stages 1 and 2 are those; `save(consolidated=True)` has the float32 ones.

    Args:
        model: sharded or not.
        rank0_only: only rank 0 of the group keeps them.
        group: the group that the model was sharded over; None: all ranks.
        but: the `id` of parameters to leave out.

    Returns:
        Tensors on the CPU, copies, and modules' extra state as it is; empty on other ranks if `rank0_only`.

    Raises:
        ConfigError: an argument is wrong; or, on all ranks, a program has changed weights of stage 3 on some alone.
        LocalError: a step was interrupted while ranks exchanged the new weights.
        RankLost: a rank is gone.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_whole(model)
    keep = not flag("rank0_only", rank0_only) or not dist.is_initialized() or dist.get_rank(group) == 0
    found: dict[str, Any] = {}
    seen: dict[int, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        watch: Watch | None = None  # that of `shard` is with the optimizer
        state = model.state_dict(keep_vars=True)
        for name, value in state.items():
            if id(value) in but:
                continue
            if not isinstance(value, torch.Tensor):  # the result of a module's get_extra_state
                if keep:
                    found[name] = value
                continue
            if id(value) not in seen:
                whole = value.detach()
                if isinstance(whole, DTensor):
                    if watch is None:
                        ranks = _ranks_of(whole, group)
                        watch = stack.enter_context(contextlib.closing(Watch(ranks)))
                        check_alike(Agreement(ranks, watch), writes_of(state))
                    whole = _gathered(whole, watch, name)
                seen[id(value)] = (
                    whole.to("cpu", copy=True) if keep else torch.empty(0, dtype=value.dtype, device="cpu")
                )
            if keep:
                found[name] = seen[id(value)]
    return found


def _ranks_of(shard: DTensor, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if shard.device_mesh.ndim == 1:
        return shard.device_mesh.get_group()
    return process_group(dist.group.WORLD if group is None else group)


def _gathered(shard: DTensor, watch: Watch, name: str) -> torch.Tensor:
    """All of it. Raises `RankLost`."""
    if not shard.numel():  # which gloo cannot gather
        return torch.empty(shard.shape, dtype=shard.dtype, device="cpu")
    here = shard.to(shard.device_mesh.device_type)  # it may be on the CPU beside its device
    assert isinstance(here, DTensor)
    with watch.named(watch.turn(f"to gather {name}")):
        return DTensor.full_tensor(here)  # a weight that `shard` guards has a watch of its own


def overwrite(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write values of its shape into a tensor; memory that it repeats along a dimension (`expand`) once."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())
    target[once].copy_(values[once])


def bare_weights(source: str | os.PathLike[str] | Mapping[str, Any]) -> BareWeights | None:
    """The weights in a state dictionary, or in a file of one; None if it is something else.

    Raises:
        ConfigError: it is no path, or a damaged file, or not all of it are whole tensors.
    """
    if isinstance(source, Mapping):
        return BareWeights(source, "the state dictionary")
    path = location(source)
    if not path.is_file():
        return None
    if path.suffix == ".safetensors":
        try:
            with torch.device("cpu"):  # safetensors makes tensors on the program's default device
                return BareWeights(load_file(path), str(path))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception:  # noqa: BLE001 (whatever torch raises: a caller that takes it for a checkpoint says so)
        return None
    if isinstance(found, Mapping) and found and all(isinstance(each, torch.Tensor) for each in found.values()):
        _verify(path)
        return BareWeights(found, str(path))
    return None


class BareWeights:
    """A state dictionary.

    Args:
        tensors: by name; tied parameters under one of their names, or all.
        where: it comes from, for people.

    Raises:
        ConfigError: it holds anything other than whole tensors.
    """

    def __init__(self, tensors: Mapping[str, Any], where: str) -> None:
        self._tensors, self.where = dict(tensors), where
        for name, value in self._tensors.items():
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                raise ConfigError(
                    f"{name} in {where} is a {type(value).__name__}, and weights must be whole tensors: give those of "
                    "shoal.zero.full_state_dict(model), or the folder that shoal.zero.save() wrote"
                )

    @property
    def identity(self) -> str:
        """The same for equal weights."""
        found = 0
        for name, value in sorted(self._tensors.items()):
            found = zlib.crc32(f"{name} {tuple(value.shape)} {value.dtype}".encode(), found)
            if value.numel():
                found = zlib.crc32(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), found)
        return f"weights-{found:08x}"

    def fitting(self, model: torch.nn.Module, wanted: Mapping[str, Iterable[int]]) -> dict[str, torch.Tensor]:
        """The tensors that a model has, under its names.

        Args:
            model: whose tied parameters may come under one of their names.
            wanted: the shapes of the model's tensors, by name.

        Raises:
            ConfigError: one is missing, or there is another one, or it has another shape.
        """
        there = {name: each.shape for name, each in self._tensors.items()}
        return {name: self._tensors[at] for name, at in fitting(there, self.where, model, wanted).items()}


def fitting(
    there: Mapping[str, Sequence[int]], where: str, model: torch.nn.Module, wanted: Mapping[str, Iterable[int]]
) -> dict[str, str]:
    """The name, among others, of each tensor that a model has.

    Args:
        there: the shapes of tensors, by name.
        where: they are, for people.
        model: whose tied parameters may come under one of their names.
        wanted: the shapes of the model's tensors, by name.

    Raises:
        ConfigError: some are missing, or there are others, or one has another shape.
    """
    names: dict[int, list[str]] = {}
    for name, each in named_parameters(model, remove_duplicate=False):
        names.setdefault(id(each), []).append(name)
    tied = {name: others for others in names.values() for name in others}
    found = {name: next((at for at in [name, *tied.get(name, [])] if at in there), None) for name in wanted}
    known = {each for name in found for each in (name, *tied.get(name, []))}
    if missing := [name for name, at in found.items() if at is None]:
        raise ConfigError(f"{where} lacks {_several(missing)}, which the model has")
    if unknown := [name for name in there if name not in known]:
        raise ConfigError(f"{where} has {_several(unknown)}, which the model has not")
    for name, at in found.items():
        if at is not None and list(there[at]) != list(wanted[name]):
            raise ConfigError(f"{at} in {where} has the shape {list(there[at])}, and in the model {list(wanted[name])}")
    return {name: at for name, at in found.items() if at is not None}


def _several(names: Sequence[str]) -> str:
    """Some of them, for people."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


class Whole:
    """A checkpoint of plain torch in one file, as `Saved` gives those of several ranks.

    Args:
        path: the path of the file: a dictionary of ``model`` and ``optimizer``, their state dictionaries.
        groups: names of the trained parameters in each of the optimizer's groups: plain torch numbers them.
        listed: the same with those that are frozen: as the optimizer was given them, there or here.
        orders: in which order whoever asks counts the values of a parameter.
        irregular: statistics that the optimizer keeps of a whole parameter, in another shape.

    Raises:
        ConfigError: it is no checkpoint, or damaged, or its optimizer has other groups.
    """

    def __init__(
        self,
        path: Path,
        groups: Sequence[Sequence[str]],
        listed: Sequence[Sequence[str]],
        orders: Mapping[str, Order],
        irregular: Collection[str] = (),
    ) -> None:
        self._path, self._orders, self._irregular = path, orders, irregular
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            if not isinstance(found, dict):
                raise TypeError(f"it holds a {type(found).__name__}")
            self._weights: dict[str, Any] = found["model"]
            state, entries = found["optimizer"]["state"], found["optimizer"]["param_groups"]
            numbers = [group["params"] for group in entries]
            extra, self._averaged = found.get("extra", {}), found.get("ema")
            self.identity = _identity(path)
        except _UNREADABLE as error:
            raise ConfigError(f"{path} is no whole checkpoint, of a model and its optimizer: {error}") from error
        _verify(path)
        sizes = [len(each) for each in numbers]
        fitting = [each for each in (groups, listed) if [len(group) for group in each] == sizes]
        if not fitting:
            raise ConfigError(f"the optimizer in {path} has other groups: give shard() those that it was saved with")
        in_order = [name for group in fitting[0] for name in group]
        by_number = dict(zip((each for group in numbers for each in group), in_order, strict=True))
        if strays := [key for key in state if isinstance(key, int) and key not in by_number]:
            raise ConfigError(
                f"the optimizer in {path} has statistics of parameter {strays[0]}, which is in none of its groups"
            )
        self._state = {by_number[key]: entry for key, entry in state.items() if key in by_number}
        names = [name for group in groups for name in group]
        # A single value that is not a value of the parameter; of a scalar it cannot be told by its shape.
        self._counters = {"step"} | {
            key
            for name, entry in self._state.items()
            for key, value in entry.items()
            if name in self._weights and self._weights[name].ndim and _is_single(value)
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
            "extra": extra,
        }
        if self._averaged is not None:
            self.index["ema"] = {key: value for key, value in self._averaged.items() if key != "model"}

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

    def residual(self, name: str, rank: int, ranks: int) -> torch.Tensor | None:
        """There is none."""
        return None

    def values(self, wanted: Tile) -> torch.Tensor:
        """The parameter's values of a range."""
        tensor: torch.Tensor = self._weights[wanted.name]
        return flat(tensor, self._orders.get(wanted.name))[wanted.start : wanted.stop]

    def averages(self, wanted: Tile) -> torch.Tensor:
        """The moving average of these values, if the index has ``ema``."""
        assert self._averaged is not None
        tensor: torch.Tensor = self._averaged["model"][wanted.name]
        return flat(tensor, self._orders.get(wanted.name))[wanted.start : wanted.stop]

    def statistics(self, wanted: Tile) -> Statistics:
        """The optimizer's of a range."""
        found, shape = Statistics({}, {}), self._weights[wanted.name].shape
        for key, value in self._state.get(wanted.name, {}).items():
            kind = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            if _is_single(value) and (kind != () or shape or key in self._counters):
                found.others[key] = deepcopy(value)  # each tile counts its own steps, in place
            elif kind == shape:
                found.each[key] = flat(value, self._orders.get(wanted.name))[wanted.start : wanted.stop]
            elif (key in self._irregular and (wanted.start, wanted.stop) == (0, shape.numel())) or not any(
                isinstance(each, torch.Tensor) for each in tree_leaves(value)
            ):
                found.others[key] = deepcopy(value)
            else:
                raise ConfigError(
                    f"the optimizer in {self._path} keeps {key!r} of {wanted.name} with shape {kind}, and the "
                    f"parameter has {tuple(shape)}: it was built of other parameters, or in another order"
                )
        return found


def _is_single(value: Any) -> bool:
    """Whether it is one value, of whatever."""
    return not value.ndim if isinstance(value, torch.Tensor) else isinstance(value, bool | int | float)


def _verify(path: Path) -> None:
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


def _identity(path: Path) -> str:
    """The checksums of all entries in a file that `torch.save` wrote."""
    with zipfile.ZipFile(path) as archive:
        entries = [(each.file_size, each.CRC) for each in archive.infolist()]
    return hashlib.sha256(repr(entries).encode()).hexdigest()[:16]
