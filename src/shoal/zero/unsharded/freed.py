"""Memory that was freed, and can be read nevertheless: NaN everywhere, at addresses behind which is hardly any memory.

An operation that `lent` does not see (of TorchScript, of `torch.func`) would end the process where it reads a weight of
stage 3 whose memory is freed. So it reads NaN there, which shows in the loss, and no step is taken with it. All such
weights lie at the same addresses: one piece of memory, mapped again and again.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

__all__ = ["keep_readable"]

_PIECE = 1 << 21
_NO_ACCESS, _READ_WRITE = 0, 3  # of mmap, see its manual page
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS = 1, 2, 16, 32
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_FAILED = ctypes.c_void_p(-1).value


class _Addresses:
    """The addresses; never given back, as anything may still read there.

    Attributes:
        begin: the first one.
        nbytes: how many there are.
    """

    def __init__(self) -> None:
        self.begin, self.nbytes = 0, 0

    def reserve(self, nbytes: int) -> int:
        """The first of at least so many."""
        if nbytes > self.nbytes:
            file, pieces = os.memfd_create("freed"), -(-nbytes // _PIECE)
            try:
                os.write(file, b"\xff" * _PIECE)  # NaN in each dtype that has one
                begin = _map(None, pieces * _PIECE, _NO_ACCESS, _PRIVATE | _ANONYMOUS, -1)
                for piece in range(pieces):
                    _map(begin + piece * _PIECE, _PIECE, _READ_WRITE, _SHARED | _FIXED, file)
            finally:
                os.close(file)
            self.begin, self.nbytes = begin, pieces * _PIECE
        return self.begin


_addresses = _Addresses()


def _map(at: int | None, nbytes: int, access: int, kind: int, file: int) -> int:
    found: int = _libc.mmap(at, nbytes, access, kind, file, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def keep_readable(managed: Any) -> None:
    """Let the memory of a whole weight be read while it is freed.

    Args:
        managed: FSDP2's entry of it, which frees the memory, and fills it again; not freed now.
    """
    memory = managed.all_gather_outputs[0].untyped_storage()
    if memory.device.type != "cpu" or not memory.size() or not hasattr(os, "memfd_create"):
        return
    begin = _addresses.reserve(memory.size())
    # Of no size: so FSDP2 still sees that it is freed.
    spare = torch._C._construct_storage_from_data_pointer(begin, memory.device, 0)  # noqa: SLF001
    free, begin_to_fill = managed.free_unsharded_param, managed.init_all_gather_outputs
    freed = False

    def free_readable() -> None:
        nonlocal freed
        free()
        if not freed:
            memory._swap_data_ptr_(spare)
            freed = True

    def fill(*args: Any, **kwargs: Any) -> None:
        nonlocal freed
        if freed:
            memory._swap_data_ptr_(spare)
            freed = False
        begin_to_fill(*args, **kwargs)

    managed.free_unsharded_param, managed.init_all_gather_outputs = free_readable, fill
