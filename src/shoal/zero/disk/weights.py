"""Weights in files, of which each rank reads only the rows that it keeps.

They are in a safetensors file, in a folder as Hugging Face's `save_pretrained` writes it (one file or several, with
`model.safetensors.index.json`), or in a checkpoint of `shoal.zero.save` or of a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from shoal.errors import ConfigError
from shoal.layout import Tile
from shoal.state.disk.folder import MODEL, is_state
from shoal.state.disk.tensor_file import Damaged, Kind, TensorFile
from shoal.zero.disk.saved import Saved, location

__all__ = ["Weights", "weights_in"]

_PARTS = "model.safetensors.index.json"


class Weights(ABC):
    """Weights on disk.

    Attributes:
        where: they are, for people.
        kinds: the tensors, by name.
        identity: a text without spaces: the same for copies.
    """

    where: str
    kinds: Mapping[str, Kind]
    identity: str

    @abstractmethod
    def opened(self) -> contextlib.AbstractContextManager[None]:
        """In this block tensors can be read. Raises `ConfigError` if a file is damaged."""

    @abstractmethod
    def read(self, name: str, into: torch.Tensor, start: int = 0) -> None:
        """Fill a tensor with rows of another one, from row `start` on; one of another dtype gets rounded values.

        Args:
            name: the tensor on disk.
            into: so many rows; or all of it, also if it has no dimension.
            start: the first row.

        Raises:
            ConfigError: the file is damaged.
        """


def weights_in(path: str | os.PathLike[str]) -> Weights:
    """The weights in a file or folder. Raises `ConfigError` if there are none, or a file is damaged."""
    place = location(path, "weights")
    if place.is_file():
        return _Files(str(place), [place])
    if (place / _PARTS).is_file():
        try:
            files = sorted(set(json.loads((place / _PARTS).read_text())["weight_map"].values()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{place / _PARTS} is damaged: {error}") from error
        return _Files(str(place), [place / each for each in files])
    if (place / MODEL).is_file():
        return _Files(str(place), [place / MODEL])
    if is_state(place):
        return _Checkpoint(place)
    raise ConfigError(
        f"weights must be a safetensors file, a folder with {MODEL} or {_PARTS}, or a folder that shoal.zero.save() "
        f"wrote, and {place} is none of them"
    )


class _Files(Weights):
    """Safetensors files."""

    def __init__(self, where: str, paths: list[Path]) -> None:
        self.where, self.kinds = where, {}
        self._files = list[TensorFile]()
        self._places = dict[str, TensorFile]()
        for path in paths:
            with _damage(path):
                self._files.append(file := TensorFile(path))
            for name, kind in file.kinds.items():
                if name in self.kinds:
                    raise ConfigError(f"{where} has {name} in two files")
                self.kinds[name], self._places[name] = kind, file
        described = sorted((name, each.shape, str(each.dtype)) for name, each in self.kinds.items())
        self.identity = hashlib.sha256(repr(described).encode()).hexdigest()[:16]

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """See `Weights.opened`."""
        with contextlib.ExitStack() as stack:
            for file in self._files:
                with _damage(file.path):
                    stack.enter_context(file.opened())
            yield

    def read(self, name: str, into: torch.Tensor, start: int = 0) -> None:
        """See `Weights.read`."""
        file = self._places[name]
        if into.numel():
            with _damage(file.path):
                file.read_into(name, into, start * torch.Size(self.kinds[name].shape[1:]).numel())


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """In this block damage is an error that names the file."""
    try:
        yield
    except Damaged as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


class _Checkpoint(Weights):
    """The weights in a checkpoint of `shoal.zero.save`."""

    def __init__(self, folder: Path) -> None:
        self.where, self._saved = str(folder), Saved(folder)
        self.identity = self._saved.identity
        self.kinds = self._saved.kinds()

    def opened(self) -> contextlib.AbstractContextManager[None]:
        """See `Weights.opened`."""
        return self._saved.opened()

    def read(self, name: str, into: torch.Tensor, start: int = 0) -> None:
        """See `Weights.read`."""
        if name in self._saved.index["parameters"]:
            row = torch.Size(self.kinds[name].shape[1:]).numel()
            found = self._saved.values(Tile(name, start * row, start * row + into.numel())).reshape(into.shape)
        else:
            found = self._saved.other(name)
            found = found[start : start + len(into)] if found.ndim else found
        into.copy_(found)
