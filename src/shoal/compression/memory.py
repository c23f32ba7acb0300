"""Tensors as raw bytes, without copies and without numpy.

Values are always sent little-endian. Every machine for which PyTorch has wheels holds them so in memory, so nothing is
converted. Invariants: a view keeps its memory alive; the bytes of an empty tensor are an empty view; a view is writable
and of format `B`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from shoal.errors import ConfigError

__all__ = [
    "DTYPES",
    "allocate",
    "as_tensor",
    "dtype_by_name",
    "dtype_name",
    "overlaps",
    "populate",
    "repeats_itself",
    "view_bytes",
]

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
    tensor = torch.empty(numel, dtype=dtype, device="cpu")
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
        return torch.empty(0, dtype=dtype, device="cpu")
    tensor = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype)
    if tensor.data_ptr() % dtype.itemsize:
        return torch.frombuffer(view, dtype=torch.uint8).clone().view(dtype)
    return tensor


class _Extent(NamedTuple):
    """The addresses from a tensor's first element to its last one, which may have gaps between them."""

    device: str
    start: int
    stop: int
    position: int


def repeats_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor share memory, as those of an expanded one do."""
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 1
    for stride, size in dims:
        if stride < reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if not tensor.numel() or dims[0][0] == 0:
        return tensor.numel() > 0
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        places = (places.unsqueeze(1) + stride * torch.arange(size, dtype=torch.int64, device="cpu")).view(-1)
    in_order = places.sort().values
    return bool((in_order[1:] == in_order[:-1]).any())


def overlaps(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """The pairs of tensors that share memory, by their positions: the earlier one first.

    It is exact for any strides: the columns of a matrix lie between one another and share nothing, while a matrix and
    its transpose do. Tensors on the meta device share memory if they are of one storage.

    Args:
        tensors: strided ones of any dtype and device.
    """
    together: list[_Extent] = []
    stop = 0
    for extent in sorted(_extent(index, each) for index, each in enumerate(tensors) if each.numel()):
        if together and (extent.device != together[0].device or extent.start >= stop):
            yield from _meetings(tensors, together)
            together = []
        stop = max(stop, extent.stop) if together else extent.stop
        together.append(extent)
    yield from _meetings(tensors, together)


def _extent(index: int, tensor: torch.Tensor) -> _Extent:
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, device = tensor.data_ptr(), str(tensor.device)
    if tensor.is_meta:  # which has no addresses
        storage = tensor.untyped_storage()
        start, device = int(tensor.storage_offset()) * tensor.itemsize, f"meta {storage._cdata}"  # noqa: SLF001
    return _Extent(device, start, start + (steps + 1) * tensor.itemsize, index)


def _meetings(tensors: Sequence[torch.Tensor], extents: Sequence[_Extent]) -> Iterator[tuple[int, int]]:
    """The pairs that share memory, of tensors whose extents hang together."""
    if len(extents) < 2:
        return
    first, last = extents[0].start, max(each.stop for each in extents)
    unit = math.gcd(*(tensors[each.position].itemsize for each in extents), *(each.start - first for each in extents))
    taken = torch.zeros((last - first) // unit, dtype=torch.bool, device="cpu")
    for number, extent in enumerate(extents):
        place = _place(taken, tensors[extent.position], extent.start - first, unit)
        if bool(place.any()) and len(extents) == 2:
            one, other = sorted(each.position for each in extents)
            yield one, other
        elif bool(place.any()):
            for before in extents[:number]:
                yield from _meetings(tensors, (before, extent))
        place.fill_(True)


def _place(taken: torch.Tensor, tensor: torch.Tensor, start: int, unit: int) -> torch.Tensor:
    """The units of memory that belong to a tensor."""
    width = tensor.itemsize // unit
    dims = [(size, width * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return taken.as_strided([*(size for size, _ in dims), width], [*(stride for _, stride in dims), 1], start // unit)
