"""Tensors in files: memory that the system reads from a disk when it is touched, and that can be let go.

The files have no name: nobody can remove or shorten one, and nothing is left of them when the process ends, however it
ends. Their room on the disk is allocated before they are used: a full disk is an `OSError` here, where touching memory
without room behind it would end the process (SIGBUS).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

__all__ = ["Extent", "fetch", "give_back", "let_go", "room_for", "write_back"]

_ALIGNED = 64
_WILLNEED, _DONTNEED, _POPULATE_READ, _POPULATE_WRITE = 3, 4, 22, 23  # of madvise, see its manual page
_MS_SYNC = 4
_libc = ctypes.CDLL(None, use_errno=True)
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = _libc.msync.argtypes = _ARGUMENTS


def room_for(nbytes: int) -> int:
    """The room that a tensor of a size takes in an extent; bytes."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


class Extent:
    """The memory of one file. It is freed, on the disk too, when neither this object nor a tensor in it is left.

    Args:
        folder: on whose disk the file is. It must not be in memory itself (tmpfs).
        nbytes: its size, above 0.

    Raises:
        OSError: the disk is full, the folder is gone or cannot be written, or the system cannot map files.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._taken = 0
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # without a name (O_TMPFILE, or removed at once)
            os.posix_fallocate(file.fileno(), 0, nbytes)
            try:
                self._storage = torch.UntypedStorage.from_file(f"/dev/fd/{file.fileno()}", shared=True, nbytes=nbytes)
            except RuntimeError as error:
                raise OSError(errno.ENOMEM, str(error).split("\n", 1)[0]) from error

    def take(self, like: torch.Tensor) -> torch.Tensor | None:
        """Room for a tensor of this dtype and shape, contiguous; anything may be in it. None if there is none left."""
        start = self._taken
        if start + like.nbytes > self._storage.nbytes():
            return None
        self._taken += room_for(like.nbytes)
        mine = self._storage[start : start + like.nbytes]  # a storage of its own: saving one tensor saves no other
        return torch.empty(0, dtype=like.dtype, device="cpu").set_(mine).view(like.shape)


def fetch(tensors: Iterable[torch.Tensor], *, written: bool = True) -> None:
    """Bring tensors in extents into memory, before they are touched.

    Args:
        tensors: contiguous ones.
        written: they will be written to, not only read.

    Raises:
        OSError: the disk cannot be read; touching them would end the process.
    """
    ranges = list(_ranges(tensors))
    for start, nbytes in ranges:  # all of it is asked for before the first page is waited for
        _libc.madvise(start, nbytes, _WILLNEED)
    for start, nbytes in ranges:
        if _libc.madvise(start, nbytes, _POPULATE_WRITE if written else _POPULATE_READ):
            number = ctypes.get_errno()
            if number == errno.EINVAL:  # before Linux 5.14
                return
            raise OSError(errno.EIO if number == errno.EFAULT else number, "memory cannot be read from its file")


def write_back(tensors: Iterable[torch.Tensor]) -> None:
    """Write what changed in tensors in extents to the disk, and let go of their memory.

    Raises:
        OSError: the disk cannot be written.
    """
    tensors = list(tensors)
    for start, nbytes in _ranges(tensors):
        if _libc.msync(start, nbytes, _MS_SYNC):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    let_go(tensors)


def give_back() -> None:
    """Have the allocator return to the system what was freed, where it can (glibc): else it keeps much of it."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def let_go(tensors: Iterable[torch.Tensor]) -> None:
    """Let go of the memory of tensors in extents: it is the system's to write and to use. Values stay as they are."""
    for start, nbytes in _ranges(tensors):
        _libc.madvise(start, nbytes, _DONTNEED)


def _ranges(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Address and size of the pages that hold tensors; those that follow each other are one range."""
    begun, end = 0, 0
    for address, nbytes in sorted((each.data_ptr(), each.nbytes) for each in tensors if each.nbytes):
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        if start > end:
            if end:
                yield begun, end - begun
            begun = start
        end = max(end, -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE)
    if end:
        yield begun, end - begun
