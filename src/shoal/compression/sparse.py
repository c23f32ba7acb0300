"""The few largest elements, and their places.

=============  ==================================================  ====================================================
name           bytes, for k = fraction · elements, rounded up      error
=============  ==================================================  ====================================================
topk:FRACTION  from 1/256: 3 k + 1 per 255 elements;               what `bfloat16` loses of the k largest absolute
               below: 4 k + 2 per 65,535 elements                  values; all of every other
=============  ==================================================  ====================================================

So 0.01 takes 0.034 bytes for each element of float32. The elements are all that are encoded at once: a part of a round.

It is made for use with `ErrorFeedback`, which sends the left-out values later: otherwise small elements are never sent.

*On the wire*: the k values (bfloat16), in the order of their places; the offset of each in its block; for each block
the number of its elements that are sent. Blocks have 255 elements, with offsets and counts of one byte, or 65,535, with
two bytes: so the count of a full block fits. Gaps between places would take as much in the worst case, and could not be
decoded at once. Bytes that do not name k places decode to NaN.

It is not defined which of several equal elements is sent, and encoding decoded values again may choose other zeros.
"""

from __future__ import annotations

import math

import torch

from shoal.compression.base import CompressionBase, register_codec
from shoal.compression.floating import BFloat16Compression
from shoal.compression.memory import as_tensor
from shoal.compression.packed import PackedCompression
from shoal.errors import ConfigError

__all__ = ["TopKCompression"]

_MIN_FRACTION, _MAX_FRACTION = 1e-6, 0.5
_SAMPLE = 1 << 14
_VALUES = BFloat16Compression()


class TopKCompression(PackedCompression):
    """The `fraction` of elements that are largest in absolute value, as bfloat16; 0 for all others: see the module.

    Args:
        fraction: 1e-6 to 0.5.

    Raises:
        ConfigError: `fraction` is not within these limits.
    """

    has_scales = False  # but for raw parts, each value is sent by itself, and the largest of all tensors are wanted

    def __init__(self, fraction: float = 0.01) -> None:
        if not isinstance(fraction, float) or not _MIN_FRACTION <= fraction <= _MAX_FRACTION:
            raise ConfigError(f"fraction={fraction!r} is no number from {_MIN_FRACTION:g} to {_MAX_FRACTION:g}")
        self.fraction = float(fraction)  # of numpy too, whose own would have another name on the wire
        self._place_bytes = 1 if fraction >= 2**-8 else 2
        self._block = (1 << 8 * self._place_bytes) - 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.fraction!r})"

    @property
    def name(self) -> str:
        return f"topk:{self.fraction!r}"

    def idempotent(self, dtype: torch.dtype) -> bool:
        return False

    def packed_bytes(self, sizes: tuple[int, ...]) -> int:
        numel = sum(sizes)
        return (2 + self._place_bytes) * self._count(numel) + self._place_bytes * self._blocks(numel)

    def _pack(self, values: torch.Tensor, out: memoryview, sizes: tuple[int, ...]) -> None:
        count = self._count(values.numel())
        places, data = as_tensor(out[2 * count :], torch.uint8), out[: 2 * count]
        low, high = (extreme.item() for extreme in torch.aminmax(values))
        if not (math.isfinite(low) and math.isfinite(high)):
            _VALUES.encode_into(torch.full((count,), math.nan), data)
            places.zero_()
            return
        chosen = _largest(values, count)
        _VALUES.encode_into(values.index_select(0, chosen), data)
        blocks = torch.div(chosen, self._block, rounding_mode="floor")
        counts = torch.bincount(blocks, minlength=self._blocks(values.numel()))
        numbers = torch.cat([chosen - blocks * self._block, counts])
        places.copy_(numbers.to(self._place_dtype).view(torch.uint8))

    def _unpack(self, data: memoryview, sizes: tuple[int, ...], out: torch.Tensor) -> None:
        numel = sum(sizes)
        count = self._count(numel)
        sent = _VALUES.decode(data[: 2 * count], count, torch.float32).to(torch.float32)
        numbers = as_tensor(data[2 * count :], self._place_dtype).to(torch.int64)
        counts = numbers[count:]
        if bool(torch.isfinite(sent).all()) and counts.sum().item() == count:
            starts = torch.arange(0, numel, self._block)
            places = numbers[:count] + torch.repeat_interleave(starts, counts, output_size=count)
            if places[-1].item() < numel and bool((places.diff() > 0).all()):
                out.zero_().index_copy_(0, places, sent)
                return
        out.fill_(math.nan)

    def _packed_bound(self, values: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        flat = values.float()
        size = flat.abs()
        smallest = size.topk(self._count(size.numel()), sorted=False).values.min()
        return torch.where(size > smallest, _VALUES.error_bound(flat), values.abs())

    @property
    def _place_dtype(self) -> torch.dtype:
        return torch.uint8 if self._place_bytes == 1 else torch.uint16

    def _count(self, numel: int) -> int:
        return math.ceil(self.fraction * numel)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self._block)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` largest absolute values, ascending.

    It looks only among values above a threshold. In a sample about a third more values than needed reach it. This takes
    half of the time.
    """
    size = values.abs()
    sample = size[:: (size.numel() // _SAMPLE) | 1]
    wanted = math.ceil(1.3 * count / size.numel() * sample.numel()) + 8
    if wanted < sample.numel() // 2:
        high = (size >= sample.topk(wanted, sorted=False).values.min()).nonzero().view(-1)
        if count <= high.numel():
            return high.index_select(0, size.index_select(0, high).topk(count, sorted=False).indices).sort().values
    return size.topk(count, sorted=False).indices.sort().values


def _make(parameters: str) -> CompressionBase:
    try:
        return TopKCompression(float(parameters))
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"no codec 'topk:{parameters[:32]}': {error}") from error


register_codec("topk", _make)
