"""Weights in files, of which each rank reads only the rows that it keeps.

They are in a safetensors file, in a folder as Hugging Face's `save_pretrained` writes it (one file or several, with
`model.safetensors.index.json`), or in a checkpoint of `shoal.zero.save`.

Files are read, not mapped: `safetensors.safe_open` maps a file privately and writable, so that all of it counts as
data of the process, and a rank with a limit (`RLIMIT_DATA`) could not open a file that is larger than that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.errors import ConfigError
from shoal.layout import Tile
from shoal.zero.saved import INDEX, Saved, location

__all__ = ["Kind", "Weights", "weights_in"]

_WHOLE, _PARTS = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names of dtypes in the safetensors format."""
_MOST_HEADER = 100_000_000
"""Bytes: the limit of the safetensors format."""


class Kind(NamedTuple):
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


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

    def opened(self) -> AbstractContextManager[None]:
        """In this block tensors can be read."""
        return contextlib.nullcontext()

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
    if (place / INDEX).is_file():
        return _Checkpoint(place)
    if (place / _PARTS).is_file():
        try:
            files = sorted(set(json.loads((place / _PARTS).read_text())["weight_map"].values()))
            return _Files(str(place), [place / each for each in files])
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{place / _PARTS} is damaged: {error}") from error
    if (place / _WHOLE).is_file():
        return _Files(str(place), [place / _WHOLE])
    raise ConfigError(
        f"weights must be a safetensors file, a folder with {_WHOLE} or {_PARTS}, or a folder that shoal.zero.save() "
        f"wrote, and {place} is none of them"
    )


class _Place(NamedTuple):
    file: Path
    offset: int


class _Files(Weights):
    """Safetensors files."""

    def __init__(self, where: str, files: list[Path]) -> None:
        self.where, self.kinds = where, {}
        self._places: dict[str, _Place] = {}
        for file in files:
            for name, kind, offset in _tensors(file):
                if name in self.kinds:
                    raise ConfigError(f"{where} has {name} in two files")
                self.kinds[name], self._places[name] = kind, _Place(file, offset)
        described = sorted((name, each.shape, str(each.dtype)) for name, each in self.kinds.items())
        self.identity = hashlib.sha256(repr(described).encode()).hexdigest()[:16]

    def read(self, name: str, into: torch.Tensor, start: int = 0) -> None:
        """See `Weights.read`."""
        kind, (file, offset) = self.kinds[name], self._places[name]
        if not into.numel():
            return
        direct = into.dtype == kind.dtype and into.device.type == "cpu" and into.is_contiguous()
        found = into if direct else torch.empty(into.shape, dtype=kind.dtype, device="cpu")
        row = torch.Size(kind.shape[1:]).numel() * kind.dtype.itemsize
        values: Any = found.detach().reshape(-1).view(torch.uint8).numpy()
        memory = memoryview(values)
        try:
            with file.open("rb", buffering=0) as opened:
                opened.seek(offset + start * row)
                while memory:
                    if not (count := opened.readinto(memory)):
                        raise ConfigError(f"{file} is damaged: it ends within {name}")
                    memory = memory[count:]
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        if not direct:
            into.copy_(found)


def _tensors(file: Path) -> Iterator[tuple[str, Kind, int]]:
    """Name, kind and place in the file of each tensor. Raises `ConfigError` if it is no whole safetensors file."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > _MOST_HEADER:
                raise ValueError("it does not begin with the length of a header")
            header = json.loads(opened.read(size))
        total = file.stat().st_size
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            kind = Kind(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
            begin, end = entry["data_offsets"]
            if end - begin != torch.Size(kind.shape).numel() * kind.dtype.itemsize or begin < 0:
                raise ValueError(f"{name} has another size than its shape")
            if 8 + size + end > total:
                raise ValueError(f"it ends before {name} does")
            yield name, kind, 8 + size + begin
    except KeyError as error:
        raise ConfigError(
            f"{file} has a header without {error}, or a dtype of this name, which is not known"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{file} is no whole safetensors file: {error}") from error


class _Checkpoint(Weights):
    """The weights in a checkpoint of `shoal.zero.save`."""

    def __init__(self, folder: Path) -> None:
        self.where, self._saved = str(folder), Saved(folder)
        self.identity = self._saved.identity
        with self._saved.opened():
            self.kinds = {name: Kind(shape, _DTYPES[dtype]) for name, shape, dtype in self._saved.kinds()}

    def opened(self) -> AbstractContextManager[None]:
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
