"""Weights alone, without the state of an optimizer: a state dictionary, as plain torch and safetensors keep it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from shoal.errors import ConfigError
from shoal.zero.names import named_parameters

__all__ = ["BareWeights", "bare_weights"]


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

    Attributes:
        where: see above.

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
