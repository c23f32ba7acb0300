"""The memory of one run of a vector, and how this round codes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from shoal.allreduce.partition import Part, Run
from shoal.allreduce.reference import Reference
from shoal.allreduce.residual import Residual
from shoal.compression import (
    CompressionBase,
    Differences,
    ErrorFeedback,
    NoCompression,
    codec_by_name,
    dtype_by_name,
)

__all__ = ["LARGEST", "RoundMemory", "RunBuffers", "sum_dtype"]

LARGEST = {torch.float32: 1e36, torch.float64: 1e305}
"""No value times its weight may be larger: the sum of 256 members, the most in a group, then stays finite."""

_LOSSLESS = NoCompression()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of tensors of `dtype` are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_ALIGNED = 64


class RoundMemory:
    """Flat memory that several vectors share, because only one of them is in a round at a time.

    It is as large as the largest of them needs. The content of one vector is lost when the next one copies in.

    Args:
        lists: the tensors of each vector.
    """

    def __init__(self, *lists: Sequence[torch.Tensor]) -> None:
        # Each tensor may be a run of its own.
        sizes = [sum(each.numel() * each.itemsize + _ALIGNED for each in tensors) for tensors in lists]
        # Not zeros: the system gives memory when it is first written.
        self._local, self._result = (torch.empty(max(sizes, default=0), dtype=torch.uint8) for _ in range(2))

    def take(self, start: int, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Two tensors of so many elements from this byte on, and where the next ones begin."""
        stop = start + numel * dtype.itemsize
        local, result = (whole[start:stop].view(dtype) for whole in (self._local, self._result))
        return local, result, -(-stop // _ALIGNED) * _ALIGNED


class RunBuffers(NamedTuple):
    """Memory of one run. `sums` is `result` itself where sums are kept in the tensors' own dtype."""

    start: int
    dtype: torch.dtype
    named: CompressionBase
    local: torch.Tensor
    result: torch.Tensor
    residual: Residual | None
    reference: Reference | None

    @classmethod
    def of(cls, run: Run, local: torch.Tensor, result: torch.Tensor) -> RunBuffers:
        """In this memory; new memory for what a codec keeps."""
        dtype, codec = local.dtype, codec_by_name(run.codec)
        residual = reference = None
        if isinstance(codec, Differences):
            reference = Reference(run.start, torch.zeros_like(local))
        if isinstance(codec.codec if isinstance(codec, Differences) else codec, ErrorFeedback):
            kept = torch.zeros(local.numel(), dtype=sum_dtype(dtype))
            # Half: decoded values may be a little larger than the encoded ones, and others would refuse them.
            residual = Residual(dtype, run.start, kept, limit=LARGEST[kept.dtype] / 2)
        return cls(run.start, dtype, codec, local, result, residual, reference)

    @classmethod
    def of_all(cls, runs: Iterable[Run], memory: RoundMemory) -> list[RunBuffers]:
        """The buffers of these runs, one after another."""
        found, start = [], 0
        for run in runs:
            local, result, start = memory.take(start, run.stop - run.start, dtype_by_name(run.dtype))
            found.append(cls.of(run, local, result))
        return found

    @property
    def codec(self) -> CompressionBase:
        """The codec of this round; a lossless one if the reference that it needs is missing."""
        return self.named if self.reference is None or self.reference.agreed else _LOSSLESS

    @property
    def against(self) -> Reference | None:
        """The reference that this round codes against."""
        return self.reference if self.reference is not None and self.reference.agreed else None

    def piece(self, values: torch.Tensor, part: Part) -> torch.Tensor:
        """A part of `local` or `result`."""
        return values[part.start - self.start : part.stop - self.start]

    def mine(self, part: Part) -> torch.Tensor:
        """My values of a part, as they are encoded and summed."""
        values = self.piece(self.local, part)
        return values if self.against is None else self.against.difference(part, values)
