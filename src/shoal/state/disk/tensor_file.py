"""One file of tensors in the safetensors format, with a digest of each.

The digests stand among the metadata in the header, and whoever knows the digest of the header knows what all of the
file has to be. So a reader checks the header first, and each tensor before it first takes a value of it.

The library `safetensors` reads and writes such files, too. It is not used for that here: it maps a file privately and
writable, so that all of it counts as data of the process (`RLIMIT_DATA`), it ends the process by SIGBUS if a file gets
shorter meanwhile, and it writes only what is in memory as a whole.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import _TYPES

from shoal.compression import allocate, view_bytes
from shoal.errors import ConfigError
from shoal.state.digest import digest_of, hasher

__all__ = ["Damaged", "Draft", "Hash", "Kind", "Missing", "TensorFile", "flush"]

_DIGESTS = "digests"
_DTYPES = {name: dtype for name, dtype in _TYPES.items() if isinstance(dtype, torch.dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_MOST_HEADER = 100_000_000
"""Bytes: the limit of the safetensors format."""

_AT_ONCE = 1 << 20
"""Bytes that are read at once of a tensor of which only the digest is wanted."""


class Damaged(ConfigError):
    """What lies on the disk is not what was written."""


class Missing(Damaged):
    """A file is not there, or cannot be read."""


class Kind(NamedTuple):
    """What a tensor looks like.

    Attributes:
        shape: its shape.
        dtype: its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of its values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of its values."""
        return self.numel * self.dtype.itemsize


class Hash(Protocol):
    """A hash of `hashlib`, or one like these."""

    def update(self, data: memoryview, /) -> object:
        """Take these bytes."""

    def hexdigest(self) -> str:
        """The digest of all bytes, as text."""


class Draft:
    """A file of tensors that is about to be written: its header is known before its values are.

    Args:
        tensors: on the CPU, by name, in any memory, also in common. They must not change until they are written.
        was_read: called with each name when its values were read: for its digest, and again when they are written.

    Attributes:
        nbytes: the size of the file.
        entry: `bytes` and `digest` (of the header), as the index of a folder has them.

    Raises:
        KeyError: safetensors has no name for a dtype.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], was_read: Callable[[str], None] = lambda name: None
    ) -> None:
        self._tensors, self._was_read = tensors, was_read
        self._order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
        digests, places, end = {}, dict[str, Any](), 0
        for name in self._order:
            each, start = tensors[name], end
            end += each.nbytes
            digests[name] = digest_of([_values(each)]).hex()
            places[name] = {"dtype": _NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [start, end]}
            was_read(name)
        text = json.dumps({"__metadata__": {"format": "pt", _DIGESTS: json.dumps(digests)}, **places}).encode()
        self._header = text + b" " * (-len(text) % _LENGTH_BYTES)
        self.nbytes = _LENGTH_BYTES + len(self._header) + end
        self.entry = {"bytes": self.nbytes, "digest": digest_of([self._header]).hex()}

    def write(self, path: Path) -> None:
        """Write the file, one tensor after another; it is on the disk afterwards.

        Raises:
            OSError: the file cannot be written.
        """
        with path.open("wb", buffering=0) as file:
            _write(file, len(self._header).to_bytes(_LENGTH_BYTES, "little"))
            _write(file, self._header)
            for name in self._order:
                _write(file, _values(self._tensors[name]))
                self._was_read(name)
        flush(path)


def _values(tensor: torch.Tensor) -> memoryview:
    """The bytes of the values in the order of the shape."""
    return view_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _write(file: FileIO, data: memoryview | bytes) -> None:
    view = memoryview(data)
    while view:  # a full disk may take a part of it, and raises at the next one
        view = view[file.write(view) :]


def flush(path: Path) -> None:
    """Make what was written to a file or a folder survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TensorFile:
    """A file of tensors, of which the header was read and checked.

    Args:
        path: of the file; any safetensors file will do.
        entry: what the index of its folder says of it, as `Draft.entry`; None if nothing is known.
        sums: the digests of its tensors, where they do not stand in the file; None: look there.
        hash_of: the hash that made them, for a tensor of this kind.

    Attributes:
        path: as given.
        kinds: the tensors in it, by name.
        metadata: the texts in its header.
        sums: the digests of the tensors; empty if nothing in the file can be checked.

    Raises:
        Damaged: it is not what was written; says the name of the file.
        OSError: it cannot be read.
    """

    def __init__(
        self,
        path: Path,
        entry: Mapping[str, Any] | None = None,
        *,
        sums: Mapping[str, str] | None = None,
        hash_of: Callable[[Kind], Hash] = lambda kind: hasher(),
    ) -> None:
        self.path, self._hash_of = path, hash_of
        self._file: FileIO | None = None
        self._checked = set[str]()
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if entry is not None and size != entry["bytes"]:
                raise Damaged(f"{path.name} has {size} bytes instead of {entry['bytes']}")
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(_MOST_HEADER, size):
                raise Damaged(f"{path.name} does not begin with the length of a header")
            text = file.read(length)
        if entry is not None and "digest" in entry and digest_of([text]).hex() != entry["digest"]:
            raise Damaged(f"the header of {path.name} is not what was written, by its digest")
        try:
            header = json.loads(text)
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.kinds, self._offsets = dict[str, Kind](), dict[str, int]()
            for name, each in header.items():
                self.kinds[name], offset = _place(name, each, size - _LENGTH_BYTES - length)
                self._offsets[name] = _LENGTH_BYTES + length + offset
            self.sums = json.loads(self.metadata.get(_DIGESTS, "{}")) if sums is None else sums
        except KeyError as error:
            raise Damaged(
                f"{path.name} has a header without {error}, or a dtype of this name, which is not known"
            ) from error
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise Damaged(f"{path.name} is no whole safetensors file: {error}") from error
        if self.sums and (odd := self.sums.keys() ^ self.kinds.keys()):
            raise Damaged(f"{path.name} has {min(odd)}, which is not a name that was written")

    @contextmanager
    def opened(self) -> Iterator[None]:
        """In this block values can be read."""
        with self.path.open("rb", buffering=0) as self._file:
            try:
                yield
            finally:
                self._file = None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Values of a tensor in the order of its shape; one-dimensional, in memory of their own.

        Args:
            name: of the tensor.
            start: the first one.
            stop: behind the last one; None: up to the end.

        Raises:
            Damaged: the tensor is not what was written.
        """
        kind = self.kinds[name]
        stop = kind.numel if stop is None else stop
        found, data = allocate(stop - start, kind.dtype)
        if is_part := stop - start != kind.numel:
            self._check(name, None)
        self._fill(data, self._offsets[name] + start * kind.dtype.itemsize, name)
        if not is_part:
            self._check(name, data)
        return found

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, in its shape. Raises `Damaged` if it is not what was written."""
        return self.read(name).view(self.kinds[name].shape)

    def _fill(self, data: memoryview, offset: int, name: str) -> None:
        assert self._file is not None, "read within `opened`"
        try:
            self._file.seek(offset)
            while data:
                if not (count := self._file.readinto(data)):
                    raise Damaged(f"{self.path.name} ends within {name}")
                data = data[count:]
        except OSError as error:
            raise Damaged(f"{name} in {self.path.name} cannot be read: {error}") from error

    def _check(self, name: str, data: memoryview | None) -> None:
        """Compare a tensor with its digest, once; `data` is all of it, if it was read already."""
        if name in self._checked or name not in self.sums:
            return
        kind = self.kinds[name]
        found, size = self._hash_of(kind), kind.nbytes
        if data is not None:
            found.update(data)
        else:
            buffer = memoryview(bytearray(min(_AT_ONCE, size)))
            for at in range(0, size, _AT_ONCE):
                part = buffer[: size - at]
                self._fill(part, self._offsets[name] + at, name)
                found.update(part)
        if found.hexdigest() != self.sums[name]:
            raise Damaged(f"{name} in {self.path.name} is not what was written, by its digest")
        self._checked.add(name)


def _place(name: str, entry: Mapping[str, Any], size: int) -> tuple[Kind, int]:
    """The kind of a tensor in a header, and its place behind that. Raises `ValueError` if it cannot be there."""
    kind = Kind(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    first, last = entry["data_offsets"]
    if last - first != kind.nbytes or first < 0:
        raise ValueError(f"{name} has another size than its shape")
    if last > size:
        raise ValueError(f"it ends before {name} does")
    return kind, first
