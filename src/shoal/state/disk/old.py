"""Folders of earlier versions, read as those of today: only their index is another one.

========  ==========================  =======================================================================
format    written by                  what is different
========  ==========================  =======================================================================
1, 2      a run, ``checkpoint.json``  checksums (CRC-32) of tensors in the index; entries are named by numbers
1, 2, 3   ZeRO, ``index.json``        checksums in the header of each file, or none; other names of entries
========  ==========================  =======================================================================
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shoal.state.disk.tensor_file import Damaged, Kind, TensorFile

__all__ = ["RUN_FORMATS", "ZERO_INDEX", "Index", "index_of_run", "index_of_zero"]

RUN_FORMATS = (1, 2)
ZERO_INDEX = "index.json"
_CHECKSUM, _CHECKSUMS = "checksum", "checksums"
_NAME = re.compile(r"(.*)\|(\d+:\d+)\|(value|average|state\|.*|whole\|.*)", re.DOTALL)


class Index(NamedTuple):
    """What an index says.

    Attributes:
        values: see `SavedState`, as the two that follow.
        tensors: ...
        identity: ...
        is_checked: whether it has digests.
        files: opens each file, given its path.
        named: today's name of an entry, from the names of its file and of itself.
    """

    values: dict[str, Any]
    tensors: Mapping[str, Mapping[str, Any]]
    identity: str
    is_checked: bool
    files: Mapping[str, Callable[[Path], TensorFile]]
    named: Callable[[str, str], str]


class _Crc:
    """CRC-32 of dtype, shape and values, as `hashlib` has its hashes."""

    def __init__(self, kind: Kind) -> None:
        self._sum = zlib.crc32(f"{kind.dtype} {list(kind.shape)}".encode())

    def update(self, data: memoryview, /) -> None:
        """Take these bytes."""
        self._sum = zlib.crc32(data, self._sum)

    def hexdigest(self) -> str:
        """The sum, as text."""
        return str(self._sum)


def _unsealed(index: Any) -> dict[str, Any] | None:
    """An index without its checksum; None if it has none. Raises `Damaged` if it is not what was written."""
    if not isinstance(index, dict) or _CHECKSUM not in index:
        return None
    found: dict[str, Any] = index
    if found.pop(_CHECKSUM) != zlib.crc32(json.dumps(found).encode()):
        raise Damaged("its index is not what was written, by its checksum")
    return found


def _texts(sums: Mapping[str, int]) -> dict[str, str]:
    return {name: str(each) for name, each in sums.items()}


def index_of_run(written: Any) -> Index:
    """The index of a run's checkpoint of format 1 or 2, from what its JSON says. Raises `Damaged`."""
    if (index := _unsealed(written)) is None:
        raise Damaged("its index has no checksum")
    sums = {name: _texts(each) for name, each in index.pop(_CHECKSUMS).items()}
    files = {name: partial(TensorFile, sums=each, hash_of=_Crc) for name, each in sums.items()}
    state = index["state"]
    return Index(index, {}, f"{state}".replace(" ", ""), True, files, _name_of_run)


def _name_of_run(file: str, key: str) -> str:
    return f"|{key}" if file == "state.safetensors" else key


def index_of_zero(path: Path) -> Index:
    """The index of a checkpoint of ZeRO of format 1, 2 or 3. Raises `Damaged`, and Python's errors."""
    written = json.loads((path / ZERO_INDEX).read_text())
    index = _unsealed(written)
    is_checked = index is not None
    index = dict(written) if index is None else index
    tensors, entries = index.pop("parameters"), index.pop("files")
    files = {name: partial(_zero_file, entry=entry, is_checked=is_checked) for name, entry in entries.items()}
    return Index(index, tensors, index["id"], is_checked, files, partial(_name_of_zero, list(entries)))


def _zero_file(path: Path, *, entry: Mapping[str, Any], is_checked: bool) -> TensorFile:
    file = TensorFile(path, {"bytes": entry["bytes"]}, sums={}, hash_of=_Crc)
    if is_checked != (_CHECKSUMS in file.metadata):
        missing = path.name if is_checked else f"{ZERO_INDEX}, unlike {path.name},"
        raise Damaged(f"{missing} has no checksums")
    if not is_checked:
        return file
    try:
        sums = _texts(dict(json.loads(file.metadata[_CHECKSUMS])))
    except (ValueError, TypeError, AttributeError) as error:
        raise Damaged(f"{path.name} has no checksums: {error}") from error
    return TensorFile(path, sums=sums, hash_of=_Crc)


def _name_of_zero(files: list[str], file: str, key: str) -> str:
    kind, _, name = key.partition("|")
    if kind == "other":
        return name
    if kind == "residual":
        return f"{name}|residual|{files.index(file)}"
    if (found := _NAME.fullmatch(key)) is None:
        raise Damaged(f"{file} has {key}, which is not a name that was written")
    name, part, what = found.groups()
    if what == "value":
        return f"{name}|{part}"
    return f"{name}|{what}" if what.startswith("whole|") else f"{name}|{what}|{part}"
