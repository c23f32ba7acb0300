"""The memory of one segment of a vector, what it keeps from round to round, and how this round codes it.

**Reference** (decision 0011): the last committed average, against which a later round may code. One buffer for each
segment whose codec is `Differences`. When a round is committed, the buffer is set tile by tile to the committed
average, which has the same bits at all members that succeeded. The reference gets the name of that round. Every member
says the name when it joins a group. If all members that contribute say the same name, values are sent as differences
from the reference, in the segment's codec, and received averages are added to it. Otherwise this segment is sent
without loss in this round, and all members that succeed have the same reference afterwards.

A round that fails leaves reference and name as they were.

**Residual** (error feedback): the losses of this member's encodings, kept until a later round can count them. One flat
*residual* R for each segment whose codec is `ErrorFeedback`, in units of value times weight, as sums are. With x for
this member's values and w for its weight, W for the total weight, ^ for encoded and decoded:

=============================  ================================  ======================================================
in a round, for each tile      what is encoded                   the residual after it, if the round was committed
=============================  ================================  ======================================================
another member averages it     x + R / w                         R + w x - w (x + R / w)^, if these values were counted
this member averages it        (sum of contributions + R) / W    (sum + R) - W ((sum + R) / W)^
else                                                             R
=============================  ================================  ======================================================

So over all committed rounds the sum of W times the average, plus the residuals of all members, is exactly (to rounding)
the sum of all contributions: every sample counts once, whatever weight its peer has in each round. A member's own
values need no encoding if it averages them itself. The member that encodes an *average* keeps the loss of that
encoding. It keeps it in the same vector. So the loss counts whichever member averages these elements next time, even if
this member has no weight then, or never has any (an auxiliary one). A residual is never more than the codec's error
bound for the last encoded values, times their weight. The sums never differ by more than that, however many rounds
there were.

A round that failed leaves the residual as it was, and so does one that this member took no part in. If a member cannot
learn whether its values were counted, they may count twice.

`begin` comes before a round, then the encodings, and after the commit `settle` for each tile, before the values that
the round was begun with are changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from shoal.compression import CompressionBase, Differences, ErrorFeedback, NoCompression, codec_by_name, dtype_by_name
from shoal.layout import Segment, Tile
from shoal.protocol.wire import Member

__all__ = ["LARGEST", "Reference", "Residual", "RoundMemory", "SegmentBuffers", "common_reference", "sum_dtype"]

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
        # Each tensor may be a segment of its own.
        sizes = [sum(each.numel() * each.itemsize + _ALIGNED for each in tensors) for tensors in lists]
        # Not zeros: the system gives memory when it is first written.
        self._local, self._result = (
            torch.empty(max(sizes, default=0), dtype=torch.uint8, device="cpu") for _ in range(2)
        )

    def take(self, start: int, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Two tensors of so many elements from this byte on, and where the next ones begin."""
        stop = start + numel * dtype.itemsize
        local, result = (whole[start:stop].view(dtype) for whole in (self._local, self._result))
        return local, result, -(-stop // _ALIGNED) * _ALIGNED


def common_reference(members: Iterable[Member]) -> bytes:
    """The name of the reference that all contributing members have; empty if there is none."""
    names = {member.reference for member in members if member.contributes}
    return names.pop() if len(names) == 1 else b""


class Reference:
    """The reference of one segment.

    Args:
        values: as long as the segment, in its dtype.

    Attributes:
        agreed: whether this round codes against it.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.agreed = False

    def difference(self, tile: Tile, values: torch.Tensor) -> torch.Tensor:
        """These values less the reference, in their dtype. 16-bit values that are out of range are cut."""
        return _within(values - tile.of(self.values))

    def restore(self, tile: Tile, differences: torch.Tensor) -> None:
        """Make values of differences, in place: the same bits from the same bits, as each is rounded once."""
        _within(differences.add_(tile.of(self.values)))

    def keep(self, tile: Tile, average: torch.Tensor) -> None:
        """This average was committed."""
        tile.of(self.values).copy_(average)


def _within(values: torch.Tensor) -> torch.Tensor:
    if values.dtype.itemsize == 2:
        largest = torch.finfo(values.dtype).max
        values.clamp_(-largest, largest)  # NaN stays NaN
    return values


class Residual:
    """The losses of one segment's encodings.

    Args:
        segment: of which they are.
        dtype: the dtype of its tensors.
        kept: the residual itself, in the dtype of sums; as long as the segment.
        limit: a value times a weight of more than this cannot be summed.
    """

    def __init__(self, segment: Segment, dtype: torch.dtype, kept: torch.Tensor, *, limit: float) -> None:
        self.kept = kept
        self._segment, self._dtype, self._limit = segment, dtype, limit
        self._weight = 0.0
        self._sent: dict[Tile, memoryview] = {}
        self._lost: dict[Tile, torch.Tensor] = {}

    def begin(self, weight: float) -> None:
        """A round begins in which this member's values have this weight; forget the encodings of the last one."""
        self._weight = weight
        self._sent.clear()
        self._lost.clear()

    def contribution(self, tile: Tile, values: torch.Tensor, codec: CompressionBase) -> memoryview:
        """My values of a tile plus the residual of earlier rounds, encoded; always the same bytes in one round."""
        if (data := self._sent.get(tile)) is None:
            due = tile.of(self.kept).div(self._weight).add_(values)
            data = self._sent[tile] = codec.encode(self._within(due, max(self._weight, 1.0)), self._segment.sizes(tile))
        return data

    def average(
        self, tile: Tile, sums: torch.Tensor, total_weight: float, codec: CompressionBase, out: torch.Tensor
    ) -> memoryview:
        """The average, encoded; `out` gets its decoded values, and may be the memory of `sums`."""
        due = sums + tile.of(self.kept)
        data = codec.encode(self._within(due / total_weight, 1.0), self._segment.sizes(tile))
        codec.decode_into(data, self._dtype, out, self._segment.sizes(tile))
        self._lost[tile] = due.sub_(out, alpha=total_weight)
        return data

    def settle(self, tile: Tile, values: torch.Tensor, codec: CompressionBase, *, averaged_here: bool) -> None:
        """The round was committed with the average that was made here, or else with the values that were sent."""
        kept = tile.of(self.kept)
        if averaged_here:
            kept.copy_(self._lost[tile])
        elif (data := self._sent.get(tile)) is not None:
            # The difference first: it is small where the codec is good.
            decoded = codec.decode(data, tile.numel, self._dtype, self._segment.sizes(tile))
            kept.add_(values.to(kept.dtype).sub(decoded), alpha=self._weight)

    def _within(self, values: torch.Tensor, weight: float) -> torch.Tensor:
        """The values cut to the range that others accept, in the tensors' dtype; the rest stays in the residual."""
        limit = min(self._limit / weight, torch.finfo(self._dtype).max)
        return values.clamp_(-limit, limit).to(self._dtype)


class SegmentBuffers(NamedTuple):
    """Memory of one segment. `sums` is `result` itself where sums are kept in the tensors' own dtype."""

    segment: Segment
    dtype: torch.dtype
    named: CompressionBase
    local: torch.Tensor
    result: torch.Tensor
    residual: Residual | None
    reference: Reference | None

    @classmethod
    def of(cls, segment: Segment, local: torch.Tensor, result: torch.Tensor) -> SegmentBuffers:
        """In this memory; new memory for what a codec keeps."""
        dtype, codec = local.dtype, codec_by_name(segment.codec)
        residual = reference = None
        if isinstance(codec, Differences):
            reference = Reference(torch.zeros_like(local))
        if isinstance(codec.codec if isinstance(codec, Differences) else codec, ErrorFeedback):
            kept = torch.zeros(local.numel(), dtype=sum_dtype(dtype), device=local.device)
            # Half: decoded values may be a little larger than the encoded ones, and others would refuse them.
            residual = Residual(segment, dtype, kept, limit=LARGEST[kept.dtype] / 2)
        return cls(segment, dtype, codec, local, result, residual, reference)

    @classmethod
    def of_all(cls, segments: Iterable[Segment], memory: RoundMemory) -> dict[str, SegmentBuffers]:
        """The buffers of these segments by name, one after another."""
        found, start = {}, 0
        for segment in segments:
            local, result, start = memory.take(start, segment.numel, dtype_by_name(segment.dtype))
            found[segment.name] = cls.of(segment, local, result)
        return found

    def sizes(self, tile: Tile) -> tuple[int, ...]:
        """The number of elements that a tile has of each tensor, of those that are in it."""
        return self.segment.sizes(tile)

    @property
    def codec(self) -> CompressionBase:
        """The codec of this round; a lossless one if the reference that it needs is missing."""
        return self.named if self.reference is None or self.reference.agreed else _LOSSLESS

    @property
    def against(self) -> Reference | None:
        """The reference that this round codes against."""
        return self.reference if self.reference is not None and self.reference.agreed else None

    def own_values(self, tile: Tile) -> torch.Tensor:
        """My values of a tile, as they are encoded and summed."""
        values = tile.of(self.local)
        return values if self.against is None else self.against.difference(tile, values)
