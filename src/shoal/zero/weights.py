"""Weights alone, without the state of an optimizer: gathered from their shards, or read as plain torch keeps them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from shoal.errors import ConfigError
from shoal.zero.parameters import named_parameters

__all__ = ["BareWeights", "bare_weights", "full_state_dict", "overwrite"]


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
    """
    keep = not rank0_only or not dist.is_initialized() or dist.get_rank(group) == 0
    found: dict[str, Any] = {}
    seen: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in but:
            continue
        if not isinstance(value, torch.Tensor):  # the result of a module's get_extra_state
            if keep:
                found[name] = value
            continue
        if id(value) not in seen:
            whole = value.detach()
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            seen[id(value)] = whole.to("cpu", copy=True) if keep else torch.empty(0)
        if keep:
            found[name] = seen[id(value)]
    return found


def overwrite(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write values of its shape into a tensor; memory that it repeats along a dimension (`expand`) once."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())
    target[once].copy_(values[once])


def bare_weights(source: str | os.PathLike[str] | Mapping[str, Any]) -> BareWeights | None:
    """The weights in a state dictionary, or in a file of one; None if it is something else.

    Raises:
        ConfigError: it is a damaged file of safetensors, or not all of it are whole tensors.
    """
    if isinstance(source, Mapping):
        return BareWeights(source, "the state dictionary")
    path = Path(source)
    if not path.is_file():
        return None
    if path.suffix == ".safetensors":
        try:
            return BareWeights(load_file(path), str(path))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception:  # noqa: BLE001 (whatever torch raises: a caller that takes it for a checkpoint says so)
        return None
    if isinstance(found, Mapping) and found and all(isinstance(each, torch.Tensor) for each in found.values()):
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
        names: dict[int, list[str]] = {}
        for name, each in named_parameters(model, remove_duplicate=False):
            names.setdefault(id(each), []).append(name)
        tied = {name: others for others in names.values() for name in others}
        found = {}
        for name, shape in wanted.items():
            there = next((each for each in [name, *tied.get(name, [])] if each in self._tensors), None)
            if there is None:
                raise ConfigError(f"{self.where} lacks {name}, which the model has")
            if list(self._tensors[there].shape) != list(shape):
                raise ConfigError(
                    f"{there} in {self.where} has the shape {list(self._tensors[there].shape)}, and in the model "
                    f"{list(shape)}"
                )
            found[name] = self._tensors[there]
        known = found.keys() | {other for name in found for other in tied.get(name, [])}
        if unknown := [name for name in self._tensors if name not in known]:
            raise ConfigError(f"{self.where} has {unknown[0]}, which the model has not")
        return found
