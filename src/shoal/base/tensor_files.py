"""The parts that checkpoints have in common: data that survives a loss of power, and checksums that find broken disks.

The checksums are CRC-32 (3 GB/s on one core). They are no help against forgery.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES

__all__ = ["CHECKSUM", "checksum", "flush", "seal", "unseal", "write_tensors"]

CHECKSUM = "checksum"
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def checksum(tensor: torch.Tensor) -> int:
    """Of dtype, shape and values of a tensor on the CPU."""
    what = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, what)


def seal(index: Mapping[str, Any]) -> str:
    """The index as JSON, with its own checksum under `CHECKSUM`."""
    return json.dumps({**index, CHECKSUM: zlib.crc32(json.dumps(index).encode())})


def unseal(text: str) -> tuple[Any, bool]:
    """The index that `seal` was given, and whether the text had a checksum at all.

    Raises:
        ValueError: it is no JSON, or not what was written.
    """
    index = json.loads(text)
    if not isinstance(index, dict) or CHECKSUM not in index:
        return index, False
    if index.pop(CHECKSUM) != zlib.crc32(json.dumps(index).encode()):
        raise ValueError("its index is not what was written, by its checksum: it is damaged")
    return index, True


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], written: Callable[[str], None]
) -> None:
    """Write what `safetensors.torch.save_file` writes, one tensor after another, without a copy of all of them.

    Args:
        path: of the file.
        tensors: on the CPU, in any memory, also in common.
        metadata: texts by name.
        written: called with each name when its values are in the file.

    Raises:
        OSError: the file cannot be written.
        KeyError: safetensors has no name for a dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    order, end = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)), 0
    for name in order:
        each = tensors[name]
        start, end = end, end + each.nbytes
        header[name] = {"dtype": _NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        for data in (len(text).to_bytes(8, "little"), text):
            _write(file, data)
        for name in order:
            _write(file, tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            written(name)


def _write(file: Any, data: Any) -> None:
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
