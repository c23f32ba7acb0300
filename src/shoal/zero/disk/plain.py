"""The weights of a whole model, as plain torch keeps them.

Weights are gathered from their shards (`full_state_dict`), or read from a state dictionary (`bare_weights`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from shoal.base.checks import flag
from shoal.errors import ConfigError
from shoal.zero.disk.foreign import check_archive, of_weights
from shoal.zero.disk.saved import Saved, location
from shoal.zero.parameters import named_parameters
from shoal.zero.ranks.watch import Agreement, Watch
from shoal.zero.replicas import process_group
from shoal.zero.unsharded.changes import check_alike, check_whole
from shoal.zero.unsharded.lent import writes_of

__all__ = ["bare_weights", "fitting", "full_state_dict", "overwrite"]

_SHOWN = 5


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


def bare_weights(source: str | os.PathLike[str] | Mapping[str, Any]) -> Saved | None:
    """The weights in a state dictionary, or in a file of one; None if it is something else.

    Raises:
        ConfigError: it is no path, or a damaged file, or not all of it are whole tensors.
    """
    if isinstance(source, Mapping):
        return _weights(source, "the state dictionary")
    path = location(source)
    if not path.is_file():
        return None
    if path.suffix == ".safetensors":
        try:
            with torch.device("cpu"):  # safetensors makes tensors on the program's default device
                return _weights(load_file(path), str(path))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception:  # noqa: BLE001 (whatever torch raises: a caller that takes it for a checkpoint says so)
        return None
    if isinstance(found, Mapping) and found and all(isinstance(each, torch.Tensor) for each in found.values()):
        check_archive(path)
        return _weights(found, str(path))
    return None


def _weights(tensors: Mapping[str, Any], where: str) -> Saved:
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            raise ConfigError(
                f"{name} in {where} is a {type(value).__name__}, and weights must be whole tensors: give those of "
                "shoal.zero.full_state_dict(model), or the folder that shoal.zero.save() wrote"
            )
    return Saved(where, of_weights(tensors))


def fitting(saved: Saved, model: torch.nn.Module, wanted: Mapping[str, Iterable[int]]) -> dict[str, str]:
    """The name, among weights, of each tensor that a model has.

    Args:
        saved: the weights.
        model: whose tied parameters may come under one of their names.
        wanted: the shapes of the model's tensors, by name.

    Raises:
        ConfigError: some are missing, or there are others, or one has another shape.
    """
    there, where = saved.kinds, saved.where
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
        if at is not None and list(there[at].shape) != list(wanted[name]):
            raise ConfigError(
                f"{at} in {where} has the shape {list(there[at].shape)}, and in the model {list(wanted[name])}"
            )
    return {name: at for name, at in found.items() if at is not None}


def _several(names: Sequence[str]) -> str:
    """Some of them, for people."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
