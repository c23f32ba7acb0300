"""Checkpoints of sharded training: written by all ranks, to go on from with any number of them.

All ranks write one folder together, on a file system that they share (`shoal.zero.disk.saved` says what is in it). It
gets its name when all of it is written: there is a whole checkpoint under that name, or none. `load` changes nothing
before every rank has read all it needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from shoal.base.checks import flag
from shoal.errors import ConfigError
from shoal.layout import flat, order_of
from shoal.state.disk.folder import finish, index_of, part_of, write_index
from shoal.state.disk.tensor_file import Draft, flush
from shoal.zero.disk.foreign import Asker
from shoal.zero.disk.plain import bare_weights, fitting, full_state_dict, overwrite
from shoal.zero.disk.saved import (
    Saved,
    Statistics,
    average_key,
    consolidate,
    location,
    residual_key,
    state_key,
    value_key,
    whole_key,
    written,
)
from shoal.zero.ema import EMA
from shoal.zero.optimizer import ShardedOptimizer, check_sharded
from shoal.zero.packing import exact, pack, typed, untyped
from shoal.zero.parameters import OwnTile, local, named_parameters
from shoal.zero.ranks.watch import Agreement
from shoal.zero.unsharded.lent import unwatched

__all__ = ["load", "save"]


def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: ShardedOptimizer,
    *,
    consolidated: bool = False,
    extra: Mapping[str, Any] | None = None,
    ema: EMA | None = None,
) -> None:
    """Write a checkpoint of the model and its optimizer. All ranks call it, between steps.

    Args:
        path: the path of the folder, which must not exist yet; the same on all ranks, on a file system that they share.
        model: as `shoal.zero.shard` returned it.
        optimizer: as `shoal.zero.shard` returned it.
        consolidated: one file in place of a folder, for plain torch: `torch.load(path)` is a dictionary of two state
            dictionaries, ``model`` and ``optimizer``, and ``extra``.
        extra: such as a scheduler's state: numbers, texts and None, in lists, tuples, sets and dictionaries of any
            keys; that of rank 0 is kept.
        ema: moving averages of the weights, to be saved with them.

    Raises:
        ConfigError: the path exists, or cannot be written, or is not the same on all ranks, or the optimizer, a module
            or `extra` keeps values that cannot be saved, or a program has changed weights on some ranks alone: on all
            ranks; there is no checkpoint then.
        LocalError: a change of the weights was interrupted.
        RankLost: a rank is gone; there is no checkpoint then.
    """
    check_sharded(optimizer)
    collectives, agreement = optimizer.collectives, optimizer.agreement
    leads = collectives.everyone.rank() == 0
    with agreement.together():
        optimizer.check_model(model)
        optimizer.check_whole()
        _check_ema(ema, optimizer)
        target, in_one = location(path), flag("consolidated", consolidated)
        if target.exists():
            raise ConfigError(f"path exists already: choose another one, or remove {target}")
        if not isinstance(extra, Mapping | None):
            raise ConfigError(f"extra must be a dictionary, or None for none, got {extra!r:.80}")
        _check_unfrozen(model, optimizer)
        kept = pack(dict(extra or {})) if leads else {}
        weights = optimizer.carrier.written()
    agreement.alike(
        f"{target}\n{None if ema is None else ema.described}\nconsolidated {in_one}", "path, ema and consolidated"
    )
    optimizer.check_written(weights)
    identity = agreement.gather(secrets.token_hex(8))[0]
    folder = part_of(target, identity)
    others = _others(model, optimizer)
    try:
        with agreement.together(), _unwritable(target):
            folder.mkdir(parents=True, exist_ok=True)
            first = optimizer.replicas is None or optimizer.replicas.collectives.rank == 0
            averages = [] if ema is None else [(average_key(own.tile), each) for own, each in ema.own_tiles()]
            told = _write(folder, optimizer, others if collectives.rank == 0 else {}, averages) if first else None
        shares = [each for each in map(json.loads, agreement.gather(json.dumps(told))) if each is not None]
        with agreement.together():
            if leads:
                values = {**_values(model, optimizer, others, shares), "extra": kept}
                if ema is not None:
                    values["ema"] = {"updates": ema.updates, "decay": ema.decay}
                files = dict(sorted((each["file"], each["entry"]) for each in shares))
                with _unwritable(target):
                    _finish(folder, target, files, index_of(files, values, _shapes(model, optimizer)), in_one=in_one)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # by all: where the path is not shared, each has one


@contextlib.contextmanager
def _unwritable(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"path cannot be written: {target}: {error}") from error


def _others(model: torch.nn.Module, optimizer: ShardedOptimizer) -> dict[str, torch.Tensor]:
    """All tensors that are not trained, whole: the same on all ranks."""
    found = full_state_dict(model, but=_trained(model, optimizer))
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"the model's extra state {name} is no tensor: keep it elsewhere, and save that by extra")
    names: dict[int, list[str]] = {id(each): [] for each in model.parameters()}
    for name, each in named_parameters(model, remove_duplicate=False):
        names[id(each)].append(name)
    parameters = dict(named_parameters(model))
    for name, values in optimizer.carrier.frozen():
        found.update(dict.fromkeys(names[id(parameters[name])], values.cpu()))
    return found


def _check_unfrozen(model: torch.nn.Module, optimizer: ShardedOptimizer) -> None:
    """Raise `ConfigError` if statistics would be left out: in stage 3 a program may train what was frozen before."""
    known = {name for group in optimizer.names for name in group}
    for name, parameter in named_parameters(model):
        if name not in known and optimizer.state.get(parameter):
            raise ConfigError(
                f"{name} was frozen when shard() was called, and is trained since: what the optimizer keeps of it "
                "would be missing in the checkpoint. Call shard() while all that will be trained requires a gradient, "
                "and freeze it after that"
            )


def _trained(model: torch.nn.Module, optimizer: ShardedOptimizer) -> set[int]:
    """The `id`s of trained tensors in `model.state_dict`: FSDP2 puts its shards in place for that."""
    state = model.state_dict(keep_vars=True)
    return {id(state[name]) for group in optimizer.names for name in group}


def _write(
    folder: Path,
    optimizer: ShardedOptimizer,
    others: Mapping[str, torch.Tensor],
    averages: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, Any]:
    """Write this rank's file; returns what rank 0 has to know of it."""
    tensors, numbers, whole = dict(others), dict[str, str](), dict[str, dict[str, Any]]()
    tensors.update({key: value.cpu() for key, value in averages})
    for own in optimizer.carrier.own_tiles():
        tile = own.tile
        tensors[value_key(tile)] = own.values.cpu()
        for key, value in optimizer.state.get(own.parameter, {}).items():
            if isinstance(value, bool | int | float):
                numbers[key], value = type(value).__name__, exact(value)
            if (regular := _regular(own, value)) is not None:
                tensors[state_key(tile, key)] = regular.cpu()
            else:
                packed, parts = _packed(own, key, value)
                whole.setdefault(tile.name, {})[key] = packed
                tensors.update({whole_key(tile.name, place): each.cpu() for place, each in parts.items()})
    rank, ranks = optimizer.collectives.rank, optimizer.collectives.ranks
    tensors.update({residual_key(name, rank): kept.cpu() for name, kept in optimizer.carrier.residuals().items()})
    name, offload = f"rank-{rank:05d}-of-{ranks:05d}.safetensors", optimizer.offload
    try:
        draft = Draft(tensors, lambda key: offload.let_go([tensors[key]]))
    except (KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the model has a buffer that cannot be saved: {error}") from error
    draft.write(folder / name)
    return {"file": name, "entry": draft.entry, "numbers": numbers, "whole": whole}


def _regular(own: OwnTile, value: Any) -> torch.Tensor | None:
    """A statistic that has one value for each of a tile's, one-dimensional, or is a single value; None of others."""
    if not isinstance(value, torch.Tensor):
        return None
    found, tensor = local(value), local(own.parameter)
    if not found.ndim:
        return found
    fits = found.shape == tensor.shape if own.whole else found.numel() == own.tile.numel
    return flat(found, order_of(tensor)) if fits else None


def _packed(own: OwnTile, key: str, value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Any other statistic, for JSON, and the tensors in it. Raises `ConfigError` if it cannot be saved."""
    parts: dict[str, torch.Tensor] = {}
    try:
        packed = pack(value, key, parts)
    except ConfigError as error:
        raise ConfigError(f"the optimizer's state of {own.tile.name} cannot be saved: {error}") from error
    if parts and not own.whole:
        kind = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ConfigError(
            f"the optimizer keeps {key!r} of {own.tile.name}, {kind}, which is not one value for each of its values: "
            "that can be saved of whole tensors only, in stage 1 or 2"
        )
    return packed, parts


def _shapes(model: torch.nn.Module, optimizer: ShardedOptimizer) -> dict[str, dict[str, Any]]:
    """Of each trained parameter its shape, and the order of its values if that is another one than the shape's."""
    parameters = dict(named_parameters(model))
    orders = {name: {"order": written(each)} for name, each in optimizer.carrier.orders().items() if each is not None}
    names = [name for group in optimizer.names for name in group]
    return {name: {"shape": list(parameters[name].shape), **orders.get(name, {})} for name in names}


def _values(
    model: torch.nn.Module,
    optimizer: ShardedOptimizer,
    others: Mapping[str, torch.Tensor],
    shares: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What `shoal.zero.disk.saved` lists, without what is not always there."""
    trained = {name for group in optimizer.names for name in group}
    of = {id(each): name for name, each in named_parameters(model)}
    everything = [(name, of[id(each)]) for name, each in named_parameters(model, remove_duplicate=False)]
    return {
        "optimizer": type(optimizer.inner).__name__,
        "aliases": {name: first for name, first in everything if name != first and first in trained},
        "others": list(others),
        "groups": [
            {
                "parameters": names,
                "listed": listed,
                "settings": {key: _plain(value) for key, value in group.items() if key != "params"},
            }
            for names, listed, group in zip(optimizer.names, optimizer.listed, optimizer.param_groups, strict=True)
        ],
        "common": _common(optimizer),
        "numbers": dict(each for share in shares for each in share["numbers"].items()),
        "whole": dict(each for share in shares for each in share["whole"].items()),
    }


def _common(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """The optimizer's values that belong to no parameter (some count their steps so), and their types."""
    found: dict[str, Any] = {}
    for key, value in optimizer.state.items():
        if isinstance(key, torch.Tensor):
            continue
        if not isinstance(key, str) or not isinstance(value, torch.Tensor | bool | int | float):
            raise ConfigError(
                f"the optimizer keeps {key!r}, a {type(value).__name__}, of no parameter: it cannot be saved"
            )
        found[key] = typed(value)
    return found


def _plain(value: Any) -> Any:
    """The setting as JSON has it: a learning rate may be a tensor, and tuples may be in lists (Muon's coefficients)."""
    if isinstance(value, list | tuple) and any(isinstance(each, list | tuple) for each in value):
        return pack(value, "a setting of the optimizer")
    return value.item() if isinstance(value, torch.Tensor) else value


def _finish(folder: Path, target: Path, files: Mapping[str, Mapping[str, Any]], index: str, *, in_one: bool) -> None:
    """Everything is written but the index: give the checkpoint its name."""
    for name, entry in files.items():
        if not (folder / name).exists() or (folder / name).stat().st_size != entry["bytes"]:
            raise ConfigError(f"path must be on a file system that all ranks share: rank 0 does not see {name} there")
    if not in_one:
        finish(folder, target, index)
        return
    write_index(folder, index)
    whole = target.with_name(f"{folder.name}.pt")
    try:
        found = consolidate(folder)
        try:
            torch.save(found, whole)
        except RuntimeError as error:  # of a full disk, too
            raise OSError(str(error).split("\n", 1)[0]) from error
        flush(whole)
        whole.rename(target)
    finally:
        whole.unlink(missing_ok=True)
    flush(target.parent)


def load(
    path: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    model: torch.nn.Module,
    optimizer: ShardedOptimizer,
    *,
    ema: EMA | None = None,
) -> dict[str, Any]:
    """Take over a checkpoint, of any number of ranks and any stage, or weights alone. All ranks call it.

    Args:
        path: the folder that `save` wrote, or a copy of it. Or one of a run's checkpoints, if the run averages
            gradients, or parameters by `LocalUpdates`, was given its `model`, and has the same optimizer: weights,
            buffers and statistics are taken (a run that merges has the outer optimizer's in their place, and is
            refused). Or a file for plain torch, with the state dictionaries ``model`` and ``optimizer`` (and ``extra``)
            of a model before sharding and its optimizer: to begin with sharding later. Or weights alone, for which the
            optimizer stays as it is: a state dictionary of the whole model, or a file of one, by `torch.save` or of
            safetensors. The same on all ranks.
        model: as `shoal.zero.shard` returned it: its parameters and buffers are overwritten.
        optimizer: as `shoal.zero.shard` returned it, of the same class: its state and the settings of its groups,
            learning rates among them, are overwritten.
        ema: moving averages, which become the saved ones; its `decay` stays.

    Returns:
        `extra`, as it was given to `save`; empty for weights alone.

    Raises:
        ConfigError: there is no whole checkpoint, or it is of another model or other groups: on all ranks; nothing was
            changed then.
        RankLost: a rank is gone.
    """
    check_sharded(optimizer)
    agreement = optimizer.agreement
    with agreement.together():
        optimizer.check_model(model, to_change=True)
        _check_ema(ema, optimizer)
        bare = bare_weights(path)
        if ema is not None and bare is not None:
            raise ConfigError(f"ema cannot be loaded: {bare.where} has weights alone")
    agreement.alike(f"ema {ema is not None}\nweights alone {bare is not None}", "ema, and path")
    if bare is not None:
        _load_weights(agreement, bare, model, optimizer)
        return {}
    assert not isinstance(path, Mapping)
    with agreement.together():
        asker = Asker(optimizer.names, optimizer.listed, optimizer.irregular)
        saved = Saved.at(Path(path), optimizer.carrier.orders(), asker)
        _check(saved.index, model, optimizer)
        with saved.opened():
            tiles = list(optimizer.carrier.own_tiles())
            found = [(own, *_aside(optimizer, saved.values(own.tile), saved.statistics(own.tile))) for own in tiles]
            averages = None if ema is None else _averages(saved, tiles)
            others = {name: saved.other(name) for name in saved.index["others"]}
            residuals = optimizer.carrier.residuals()
            rank, ranks = optimizer.collectives.rank, optimizer.collectives.ranks
            unsent = {name: saved.residual(name, rank, ranks) for name in residuals}
        _check_others(others, model, optimizer, or_less=saved.is_of_run)
    _check_same(agreement, saved.identity, path)
    with torch.no_grad(), optimizer.changing():
        for own, values, statistics in found:
            own.values.copy_(values)
            _restore(optimizer, own, statistics)
            optimizer.offload.settle(optimizer.inner, [own.parameter])
        if ema is not None and averages is not None:
            ema.replace(averages, saved.index["ema"]["updates"])
        _overwrite(model, optimizer, others)
        for name, kept in residuals.items():
            there = unsent[name]
            kept.zero_() if there is None else kept.copy_(there)
        for group, entry in zip(optimizer.param_groups, saved.index["groups"], strict=True):
            for key, value in entry["settings"].items():
                group[key] = _like(group.get(key), value)
        optimizer.state.update({key: untyped(entry) for key, entry in saved.index.get("common", {}).items()})
    extra: dict[str, Any] = saved.index["extra"]
    return extra


def _check_ema(ema: object, optimizer: ShardedOptimizer) -> None:
    """Raise `ConfigError` unless it is None, or averages of what this optimizer trains."""
    if ema is not None and not isinstance(ema, EMA):
        raise ConfigError(f"ema must be a shoal.zero.EMA, or None for none, got a {type(ema).__name__}")
    if ema is not None and ema.optimizer is not optimizer:
        raise ConfigError("ema must be of the same optimizer, and this one is of another: make it by EMA(optimizer)")


def _averages(saved: Saved, tiles: Iterable[OwnTile]) -> list[torch.Tensor]:
    """The saved averages of this rank's tiles."""
    if "ema" not in saved.index:
        raise ConfigError("ema cannot be loaded: the checkpoint has no moving averages, since save() was given none")
    return [saved.averages(own.tile) for own in tiles]


def _load_weights(agreement: Agreement, bare: Saved, model: torch.nn.Module, optimizer: ShardedOptimizer) -> None:
    with agreement.together():
        state, trained = model.state_dict(keep_vars=True), _trained(model, optimizer)
        names = fitting(bare, model, {name: each.shape for name, each in state.items() if torch.is_tensor(each)})
    _check_same(agreement, bare.identity, bare.where)
    ordered = bare.counted({names[name]: order for name, order in optimizer.carrier.orders().items()})
    with torch.no_grad(), optimizer.changing():
        for own in optimizer.carrier.own_tiles():
            own.values.copy_(ordered.values(own.tile._replace(name=names[own.tile.name])))
        others = {name: at for name, at in names.items() if id(state[name]) not in trained}
        _overwrite(model, optimizer, {name: bare.other(at) for name, at in others.items()})


def _check_same(agreement: Agreement, identity: str, path: str | os.PathLike[str]) -> None:
    """Raise `ConfigError` unless all ranks load the same checkpoint; the paths may differ."""
    first, *others = agreement.gather(f"{identity} {os.fspath(path)}")
    for rank, other in enumerate(others, 1):
        if other.split(" ")[0] != first.split(" ")[0]:
            raise ConfigError(
                f"path must be of the same checkpoint on all ranks: rank 0 gave {first.partition(' ')[2]}, and rank "
                f"{rank} gave {other.partition(' ')[2]}, which is another one"
            )


def _check(index: Mapping[str, Any], model: torch.nn.Module, optimizer: ShardedOptimizer) -> None:
    """Raise `ConfigError` unless a checkpoint is of this model and these groups."""
    parameters = dict(named_parameters(model))
    here = {name: parameters[name].shape for group in optimizer.names for name in group}
    _check_shapes({name: entry["shape"] for name, entry in index["parameters"].items()}, here, trained=True)
    if [entry["parameters"] for entry in index["groups"]] != optimizer.names:
        raise ConfigError("the checkpoint has other parameter groups: give shard() those that it was saved with")
    if index["optimizer"] not in (None, kind := type(optimizer.inner).__name__):
        raise ConfigError(f"the checkpoint is of the optimizer {index['optimizer']}, and this is {kind}")


def _check_others(
    others: Mapping[str, torch.Tensor], model: torch.nn.Module, optimizer: ShardedOptimizer, *, or_less: bool
) -> None:
    """The same of frozen parameters and buffers; a checkpoint of a run may have less."""
    trained, state = _trained(model, optimizer), model.state_dict(keep_vars=True)
    here = {name: each.shape for name, each in state.items() if id(each) not in trained and torch.is_tensor(each)}
    if or_less:
        here = {name: shape for name, shape in here.items() if name in others}
    _check_shapes({name: each.shape for name, each in others.items()}, here, trained=False)


def _check_shapes(there: Mapping[str, Iterable[int]], here: Mapping[str, Iterable[int]], *, trained: bool) -> None:
    which, none = ("", "it is not trained there") if trained else (", which is not trained,", "not there, or trained")
    for name in [*here, *there]:
        saved, ours = (list(each[name]) if name in each else None for each in (there, here))
        if saved != ours:
            raise ConfigError(
                f"the checkpoint is of another model: it has {name}{which} with shape {saved}, and the model has "
                f"{ours} (None: {none})"
            )


def _aside(
    optimizer: ShardedOptimizer, values: torch.Tensor, statistics: Statistics
) -> tuple[torch.Tensor, Statistics]:
    """What was read of a tile, until all ranks have read theirs: in files, if state belongs there."""
    aside = optimizer.offload.aside
    return aside({"": values})[""], statistics._replace(each=aside(statistics.each))


def _restore(optimizer: ShardedOptimizer, own: OwnTile, statistics: Statistics) -> None:
    """Give the optimizer its statistics of a tile."""
    state = optimizer.state[own.parameter] = {}
    for key, value in statistics.each.items():
        # Of a sparse table the parameter has the touched rows alone.
        like = own.parameter if local(own.parameter).numel() == value.numel() else own.values
        with unwatched():
            state[key] = torch.zeros_like(like, dtype=value.dtype, requires_grad=False)
        flat(local(state[key]), order_of(local(like))).copy_(value)
    for key, value in statistics.others.items():
        state[key] = tree_map(partial(_moved, device=own.parameter.device), value)


def _moved(value: Any, device: torch.device) -> Any:
    """A part of a statistic on the device of its parameter; single values, such as step counters, stay."""
    return value.to(device) if isinstance(value, torch.Tensor) and value.ndim else value


def _overwrite(model: torch.nn.Module, optimizer: ShardedOptimizer, others: Mapping[str, torch.Tensor]) -> None:
    """Frozen parameters and buffers."""
    for name, target in model.state_dict(keep_vars=True).items():
        if name not in others or optimizer.carrier.write(name, others[name]):
            continue
        overwrite(local(target), _own_rows(others[name], target) if isinstance(target, DTensor) else others[name])


def _own_rows(whole: torch.Tensor, target: DTensor) -> torch.Tensor:
    """This rank's rows, as FSDP2 deals them out.

    It does not use `distribute_tensor`: torch remembers the owners of rows beyond the end of a process group, and a
    process may have had another rank in an earlier group.
    """
    mesh = target.device_mesh
    start = mesh.get_local_rank() * -(-len(whole) // mesh.size())
    return whole[start : start + len(local(target))]


def _like(old: Any, new: Any) -> Any:
    """A setting from JSON, of the kind that it replaces."""
    if isinstance(old, tuple):
        return tuple(new)
    return torch.as_tensor(new, dtype=old.dtype, device=old.device) if isinstance(old, torch.Tensor) else new
