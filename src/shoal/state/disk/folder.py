"""The format of a state on disk, and how values are found in it.

A state is tensors, each under a name, and plain values. It is a folder of files in the safetensors format and an
index::

    FOLDER/
        checkpoint.json      the plain values, and what the files have to be
        *.safetensors        tensors, or tiles of them

A tile is a range of a tensor's values in their flat order: the entry ``NAME|START:STOP`` of a file. A tensor that is
whole in one file is the entry ``NAME``. A tile may also be one value, which counts for the whole range: a step counter.
What belongs to a parameter has a name that begins with the parameter's (``layer.weight|state|exp_avg``), and its values
are counted as those of the parameter. So any number of writers may each write a file of what they have, and a reader
finds all tiles that overlap with the range that it wants.

====================  ==============================================================================================
``checkpoint.json``   meaning
====================  ==============================================================================================
``format``            the number of the format
``shoal``             the version of shoal that wrote it
``files``             of each file: ``bytes``, and the ``digest`` of its header, which has the digests of its tensors
``tensors``           of each tensor that is in tiles: its ``shape``, and ``order`` if its values are counted in another
                      order than that of the shape
``values``            what else its owner knows
``digest``            of the rest of this file
====================  ==============================================================================================

Invariants:

- A folder is written under another name (`part_of`), and gets its own when all of it is on the disk. So under the name
  there is a whole state or none, whenever a writer is killed.
- Nothing is believed that has not been compared with its digest, and nothing is unpickled. BLAKE3 finds broken disks;
  who may write to the folder may write what they like.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from shoal.errors import ConfigError
from shoal.state.digest import digest_of
from shoal.state.disk.old import RUN_FORMATS, ZERO_INDEX, Index, index_of_run, index_of_zero
from shoal.state.disk.tensor_file import Damaged, Kind, Missing, TensorFile, flush
from shoal.version import __version__

__all__ = [
    "FORMAT",
    "INDEX",
    "MODEL",
    "Later",
    "SavedState",
    "SavedTile",
    "Tensors",
    "finish",
    "index_of",
    "is_state",
    "part_of",
    "read_index",
    "read_state",
    "seal",
    "write_index",
]

FORMAT = 4
"""Older ones are read by `old`."""

INDEX = "checkpoint.json"
MODEL = "model.safetensors"
"""A file of whole tensors under the names of the model, as other programs read it."""

_DIGEST = "digest"
_RANGE = re.compile(r"(.*)\|(\d+):(\d+)", re.DOTALL)


# ------------------------------------------------------------------------------------------------------------- writing


def seal(index: Mapping[str, Any]) -> str:
    """The index as JSON, with its own digest."""
    return json.dumps({**index, _DIGEST: digest_of([json.dumps(index).encode()]).hex()})


def index_of(
    files: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
) -> str:
    """The content of the index.

    Args:
        files: of each file its `Draft.entry`.
        values: plain, as JSON has them.
        tensors: of each tensor that is in tiles `shape`, and perhaps `order`.
    """
    return seal({"format": FORMAT, "shoal": __version__, "files": files, "tensors": tensors, "values": values})


def part_of(target: Path, mark: str = "") -> Path:
    """The name of a folder while it is written: hidden, and another one for each writer, or each `mark`."""
    return target.with_name(f".{target.name}.{mark or secrets.token_hex(4)}.part")


def write_index(part: Path, index: str) -> None:
    """Write the index behind all files. Raises `OSError` if it cannot be written."""
    (part / INDEX).write_text(index, encoding="utf-8")
    flush(part / INDEX)


def finish(part: Path, target: Path, index: str) -> None:
    """All files are on the disk: write the index, and give the folder its name.

    Raises:
        OSError: it cannot be written, or something has that name.
    """
    write_index(part, index)
    flush(part)
    part.rename(target)
    flush(target.parent)


# ------------------------------------------------------------------------------------------------------------- reading


class Later(ConfigError):
    """A later version of shoal has written this state, in a format that this version does not read."""


class Tensors(Protocol):
    """Tensors by name, such as those of a `TensorFile`."""

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """What they look like."""

    def opened(self) -> AbstractContextManager[None]:
        """In this block values can be read."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Values of a tensor in the order of its shape, one-dimensional, from `start` up to `stop`."""

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, in its shape."""


class SavedTile(NamedTuple):
    """Some values of one tensor, as they lie in a file.

    Attributes:
        start: the first of them, in the tensor's flat order.
        stop: behind the last one.
        file: where they are.
        key: the name of the entry.
        is_one: whether it is one value, which counts for the whole range.
    """

    start: int
    stop: int
    file: Tensors
    key: str
    is_one: bool = False

    @property
    def kind(self) -> Kind:
        """What it looks like: of one dimension, or of the tensor's shape."""
        return self.file.kinds[self.key]


@dataclass(frozen=True)
class SavedState:
    """A state on disk.

    Attributes:
        values: the plain values.
        tensors: of each tensor in tiles: `shape`, and perhaps `order`.
        tiles: of each tensor, in order.
        files: by name.
        identity: a text without spaces: the same for copies, another one for every other state.
        is_checked: whether damage can be told: not in some folders of earlier versions.
    """

    values: dict[str, Any]
    tensors: Mapping[str, Mapping[str, Any]]
    tiles: Mapping[str, Sequence[SavedTile]]
    files: Mapping[str, Tensors]
    identity: str
    is_checked: bool = True

    @contextmanager
    def opened(self) -> Iterator[None]:
        """In this block values can be read. Raises `Missing` if a file is gone."""
        with ExitStack() as stack:
            try:
                for file in self.files.values():
                    stack.enter_context(file.opened())
            except OSError as error:
                raise Missing(f"{error}") from error
            yield

    def has(self, name: str, start: int, stop: int) -> bool:
        """Whether any value of a range of a tensor is there."""
        return any(tile.start < stop and start < tile.stop for tile in self._from(name, start)[:2])

    def overlaps(self, name: str, start: int, stop: int) -> Iterator[tuple[SavedTile, int, int]]:
        """The tiles that a range of a tensor needs, and the range within each.

        Raises:
            Damaged: some values are nowhere.
        """
        at = start
        for tile in self._from(name, start):
            if at >= stop:
                break
            if tile.start <= at < tile.stop:
                end = min(tile.stop, stop)
                yield tile, at - tile.start, end - tile.start
                at = end
        if at != stop:
            raise Damaged(f"it lacks the values {at} to {stop} of {name}")

    def _from(self, name: str, start: int) -> Sequence[SavedTile]:
        """The tiles of a tensor from the one on in which a value is."""
        tiles = self.tiles.get(name, ())
        return tiles[max(bisect_right(tiles, start, key=lambda tile: tile.start) - 1, 0) :]

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """A range of a tensor's values, one-dimensional, in memory of its own.

        Raises:
            Damaged: some are nowhere, or are not what was written.
        """
        parts = [tile.file.read(tile.key, first, last) for tile, first, last in self.overlaps(name, start, stop)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")

    def whole(self, name: str) -> torch.Tensor:
        """A tensor that is whole in one file, in its shape. Raises `Damaged` if it is not what was written."""
        if not (tiles := self.tiles.get(name)):
            raise Damaged(f"it lacks {name}")
        return tiles[0].file.whole(tiles[0].key)


def is_state(path: Path) -> bool:
    """Whether there is the index of a state in a folder."""
    return (path / INDEX).exists() or (path / ZERO_INDEX).exists()


def read_index(path: Path) -> Index:
    """What the index in a folder says; folders of earlier versions have one, too.

    Raises:
        Missing: there is none.
        Damaged: it is not what was written; says why, without the path.
        Later: it is of a later version.
    """
    try:
        if not (path / INDEX).exists() and (path / ZERO_INDEX).exists():
            return index_of_zero(path)
        written = json.loads((path / INDEX).read_text(encoding="utf-8"))
        if written["format"] in RUN_FORMATS:
            return index_of_run(written)
        digest = written.pop(_DIGEST)
        if digest_of([json.dumps(written).encode()]).hex() != digest:
            raise Damaged("its index is not what was written, by its digest")
        if (number := written["format"]) != FORMAT:
            raise Later(
                f"{path} has format {number}, of a later version of shoal ({written['shoal']!s:.40}), and this one "
                f"({__version__}) reads format {FORMAT}: install that version, or give another checkpoint"
            )
        files = {name: partial(TensorFile, entry=entry) for name, entry in written["files"].items()}
        return Index(written["values"], written["tensors"], digest, True, files, lambda file, key: key)
    except ConfigError:
        raise
    except OSError as error:
        raise Missing(f"{error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"its index is not what was written: {error}") from error


def read_state(path: Path, index: Index | None = None) -> SavedState:
    """The state in a folder; its values are read later.

    Args:
        path: of the folder.
        index: what `read_index` gave, if it was read already.

    Raises:
        Missing: a file is not there.
        Damaged: one is not what was written, by its size or its header; says which one.
        Later: the folder is of a later version.
    """
    values, tensors, identity, is_checked, opens, named = read_index(path) if index is None else index
    try:
        files = {name: open_file(path / name) for name, open_file in opens.items()}
    except OSError as error:
        raise Missing(f"{error}") from error
    tiles = dict[str, list[SavedTile]]()
    for file_name, file in files.items():
        for key, kind in file.kinds.items():
            name, start, stop = named(file_name, key), 0, kind.numel
            if tiled := _RANGE.fullmatch(name):
                name, start, stop = tiled[1], int(tiled[2]), int(tiled[3])
            tiles.setdefault(name, []).append(SavedTile(start, stop, file, key, tiled is not None and not kind.shape))
    for each in tiles.values():
        each.sort(key=lambda tile: tile[:2])
    return SavedState(values, tensors, tiles, files, identity, is_checked)
