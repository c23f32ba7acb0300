"""Tensors as raw bytes, without copies and without numpy.

Values are always sent little-endian. Every machine for which PyTorch has wheels holds them so in memory, so nothing is
converted. Invariants: a view keeps its memory alive; the bytes of an empty tensor are an empty view; a view is writable
and of format `B`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch

from shoal.errors import ConfigError

__all__ = ["DTYPES", "allocate", "as_tensor", "dtype_by_name", "dtype_name", "populate", "view_bytes"]

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
"""Every dtype that can be sent, by its name on the wire."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# One type for all lengths: a ctypes array type costs 50 µs to make, so each view is a slice of a nominally huge array.
# Nothing beyond the slice is touched.
_Memory = ctypes.c_ubyte * (1 << 46)


_MADV_POPULATE_WRITE = 23  # which Python has a name for from 3.14 on, if at all
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype on the wire, such as `bfloat16`. Raises `ConfigError` if it cannot be sent."""
    if dtype not in _NAMES:
        raise ConfigError(f"tensors of {dtype} cannot be sent; convert to one of {', '.join(DTYPES)}")
    return _NAMES[dtype]


def dtype_by_name(name: str) -> torch.dtype:
    """The dtype of this name. Raises `ConfigError` if there is none."""
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name[:32]!r}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor as writable bytes, without a copy; the view keeps the memory alive.

    Args:
        tensor: a contiguous tensor in host memory, of any shape (also empty or 0-dim).

    Raises:
        ConfigError: the tensor is not contiguous or not in host memory, or this machine is big-endian.
    """
    if sys.byteorder != "little":
        raise ConfigError("shoal sends tensors little-endian; this machine is big-endian, which is not supported")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ConfigError(
            f"only contiguous host tensors can be seen as bytes, got {tensor.layout} on {tensor.device}: copy it first"
        )
    if tensor.numel() == 0:
        return memoryview(bytearray())
    memory = _Memory.from_address(tensor.data_ptr())
    memory.owner = tensor.untyped_storage()  # type: ignore[attr-defined]  # the view keeps `memory`, and that the bytes
    return memoryview(memory).cast("B")[: tensor.numel() * tensor.element_size()]


def allocate(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, memoryview]:
    """A new 1-D tensor, not initialised, and its bytes, into which to receive."""
    tensor = torch.empty(numel, dtype=dtype)
    return tensor, view_bytes(tensor)


def populate(views: Iterable[memoryview]) -> None:
    """Make the system provide the memory behind these views now, in this thread, and keep its content.

    Touching new memory takes longer than filling it. The thread that fills it later finds it there, and other threads
    run meanwhile. This needs Linux 5.14; elsewhere nothing is done.
    """
    if _madvise is None:
        return
    for view in views:
        if view.nbytes:
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            start = address - address % mmap.PAGESIZE
            _madvise(start, address + view.nbytes - start, _MADV_POPULATE_WRITE)


def as_tensor(data: bytes | bytearray | memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as a 1-D tensor. It shares their memory if that is writable and aligned; otherwise it is a copy.

    Raises:
        ConfigError: the length is not a multiple of the element size.
    """
    view = memoryview(data).cast("B")
    if view.nbytes % dtype.itemsize:
        raise ConfigError(f"{view.nbytes} bytes are no whole number of {dtype} elements")
    if view.nbytes == 0:
        return torch.empty(0, dtype=dtype)
    tensor = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype)
    if tensor.data_ptr() % dtype.itemsize:
        return torch.frombuffer(view, dtype=torch.uint8).clone().view(dtype)
    return tensor
