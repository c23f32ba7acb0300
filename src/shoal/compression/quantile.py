"""One byte for each element, with a codebook that follows the values.

============ ===================== =================================================================================
name         bytes                 error, where `range` is the largest value less the smallest
============ ===================== =================================================================================
quantile8bit 1029 + 1 per element  ``range / 85``, and ``|x - center| · (2^-11 + 2^-20) + range · 2^-20 + |x| · 2^-22``
                                   for the way the nearest level is found, plus 2^-100
============ ===================== =================================================================================

The codebook is 256 levels in ascending order, including the smallest and the largest value; an element is sent as the
number of the nearest one. A quarter of the levels is spread evenly over the range. Three quarters lie as densely as the
cube root of the values' own density, which makes the squared error least (Panter and Dite 1951); levels at equal
quantiles, as hivemind has them, are too far apart where values are rare, and there is no bound on the error of an
outlier. The density is estimated from quantiles of a sample of about 1000 values, evenly spaced among all. If there are
values of both signs, the level nearest to 0 is 0, so that a zero stays one.

*The bound.* Because of the even quarter, two of 256 levels are at most ``4 · range / 255`` apart, half as much again
where one moved to 0; no value is farther from a level than half of that.

*Finding the nearest* of 256 levels by bisection takes 50 ns for each element. Here (x - center) is rounded to float16,
after scaling, and its 16 bits look up the code in a table, which is made anew each time from the levels. The rounding
can choose the second nearest where both are about equally near: the other terms of the bound. The center is the median
of the sample, so the table is finest where values are.

*Several tensors at once* share a codebook, which is most of the data beside the codes, and no scale: each tensor is
scaled by a power of two, to the same range, and centered as by `scaled_float16`. Half of the sample is as many values
of each tensor. The range in the bound is then that of all tensors after scaling, times the tensor's scale: at most four
times its own.

Encoding decoded values again makes other levels: the bytes differ. A scale of NaN makes its tensor NaN.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cache, lru_cache
from itertools import accumulate, pairwise

import torch

from shoal.compression.base import wire_view
from shoal.compression.floating import register_plain
from shoal.compression.joint import Tensors, tensors_of
from shoal.compression.memory import as_tensor
from shoal.compression.packed import MIN_STEP, PackedCompression
from shoal.compression.scaled import FIT_BYTES, fit, read_fits, write_fits

__all__ = ["Quantile8BitQuantization"]

_LEVELS = 256
_SAMPLE = 1024
_GAPS = 256
_EVEN = 0.25
"""The share of the levels that is spread evenly."""

_TINY = 1e-300
_HALVES = 0x7C00
"""The number of finite float16 numbers of one sign."""

_LARGEST = 2.0**15
"""The number to which the farthest value from the center is scaled."""

_BYTES = tuple(bytes([code]) for code in range(_LEVELS))


class Quantile8BitQuantization(PackedCompression):
    """The nearest of 256 levels that are made for the values, as one byte: see the module."""

    @property
    def name(self) -> str:
        return "quantile8bit"

    def idempotent(self, dtype: torch.dtype) -> bool:
        return False

    def packed_bytes(self, sizes: tuple[int, ...]) -> int:
        return 4 * _LEVELS + FIT_BYTES * len(sizes) + sum(sizes)

    def _pack(self, values: torch.Tensor, out: memoryview, sizes: tuple[int, ...]) -> None:
        tensors, book, split = tensors_of(sizes), 4 * _LEVELS, 4 * _LEVELS + FIT_BYTES * len(sizes)
        fits, low, high = _fits(tensors, values)
        write_fits(fits, out[book:split])
        sample = _sample(values, sizes, fits)
        center = _middle(sample, sizes)
        levels = _levels(sample, low, high)
        wire, shared = wire_view(out[:book], torch.float32)
        wire.copy_(levels)
        if not shared:
            as_tensor(out[:book], torch.uint8).copy_(wire.view(torch.uint8))
        scale = max(high - center, center - low, max(-low, high) * 2.0**-22, MIN_STEP) / _LARGEST
        addends = [-(middle / each + center) / scale for each, middle in fits]
        scaled = tensors.affine(addends, [1 / (scale * each) for each, _ in fits], values).to(torch.float16)
        wide = levels.double()
        borders = (wide[1:] + wide[:-1] - 2 * center) / (2 * scale)
        codes = as_tensor(out[split:], torch.uint8)
        torch.index_select(_table(borders), 0, scaled.view(torch.uint16).to(torch.int32), out=codes)

    def _unpack(self, data: memoryview, sizes: tuple[int, ...], out: torch.Tensor) -> None:
        tensors, book, split = tensors_of(sizes), 4 * _LEVELS, 4 * _LEVELS + FIT_BYTES * len(sizes)
        scales, centers = read_fits(data[book:split])
        levels = as_tensor(data[:book], torch.float32)
        torch.index_select(levels, 0, as_tensor(data[split:], torch.uint8).to(torch.int32), out=out)
        if any(scale != 1.0 for scale in scales):
            tensors.scale(out, scales)
        tensors.shift(out, centers)

    def _packed_bound(self, values: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        tensors, flat = tensors_of(sizes), values.float()
        fits, low, high = _fits(tensors, flat)
        center = _middle(_sample(flat, sizes, fits), sizes)
        scales = tensors.spread([scale for scale, _ in fits])
        middles = tensors.spread([middle for _, middle in fits])
        away = (values - middles - center * scales).abs()
        reach = (high - low) * scales
        return reach / 85 + away * (2**-11 + 2**-20) + reach * 2**-20 + values.abs() * 2**-22 + MIN_STEP


def _fits(tensors: Tensors, values: torch.Tensor) -> tuple[list[tuple[float, float]], float, float]:
    """The scale and the center of each tensor, and the limits of all values after scaling.

    One tensor stays as it is. A tensor with a value that is not finite has a scale of NaN.
    """
    extremes = tensors.extremes(values)
    fits = [fit(*each) for each in extremes]
    if len(fits) == 1 and not math.isnan(fits[0][0]):
        fits = [(1.0, 0.0)]
    found = [
        (value - center) / scale
        for (scale, center), pair in zip(fits, extremes, strict=True)
        for value in pair
        if not math.isnan(scale)
    ]
    return fits, min(found, default=0.0), max(found, default=0.0)


def _sample(values: torch.Tensor, sizes: tuple[int, ...], fits: list[tuple[float, float]]) -> torch.Tensor:
    """About `_SAMPLE` of the finite values, sorted; each is scaled and centered like its tensor."""
    if fits == [(1.0, 0.0)]:
        sample = values[:: (values.numel() // _SAMPLE) | 1]
    else:
        places, tensors = _sampled(sizes)
        scales, centers = torch.tensor(fits, dtype=torch.float32, device="cpu").unbind(1)
        sample = (values.index_select(0, places) - centers.index_select(0, tensors)) / scales.index_select(0, tensors)
    sample = sample[torch.isfinite(sample)].sort().values
    return sample if sample.numel() else torch.zeros(1, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=64)
def _sampled(sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of several tensors that are in the sample, and the tensor of each.

    One half has as many values of each tensor, so that the levels suit small tensors too. The other half is drawn from
    all values. An odd stride meets all columns of a matrix.
    """
    stops = list(accumulate(sizes))
    each = max(_SAMPLE // 2 // len(sizes), 1)
    places = list(range(0, stops[-1], (2 * stops[-1] // _SAMPLE) | 1))
    for size, stop in zip(sizes[: _SAMPLE // 2], stops, strict=False):
        places += range(stop - size, stop, (size // each) | 1)
    of_tensors = [bisect_right(stops, place) for place in places]
    return _whole(places), _whole(of_tensors)


def _whole(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _middle(sample: torch.Tensor, sizes: tuple[int, ...]) -> float:
    """The place where the table is finest: the median; 0 for several tensors, which are centered already."""
    return sample[sample.numel() // 2].item() if len(sizes) == 1 else 0.0


def _levels(sample: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """256 levels from `low` to `high`, ascending, as dense as the cube root of the sample's density."""
    ends = torch.tensor([low, high], dtype=torch.float64, device="cpu")
    knots = torch.cat([ends[:1], sample.index_select(0, _places(sample.numel())).double(), ends[1:]])
    gaps = knots.diff()
    shares = gaps.pow(2 / 3)
    shares[:: shares.numel() - 1] = 0.0  # before the smallest and after the largest of the sample: of unknown density
    shares.mul_((1 - _EVEN) / shares.sum().clamp_(min=_TINY)).add_(gaps, alpha=_EVEN / max(high - low, _TINY))
    ends_at = shares.cumsum(0)
    wanted = _fractions() * ends_at[-1]
    gap = torch.bucketize(wanted, ends_at[:-1], right=True)
    left = ((ends_at.index_select(0, gap) - wanted) / shares.index_select(0, gap)).clamp_(0.0, 1.0).nan_to_num_(0.0)
    levels = knots[1:].index_select(0, gap).sub_(gaps.index_select(0, gap).mul_(left))
    if low < 0.0 < high:
        levels[levels.abs().argmin()] = 0.0
    return levels.to(torch.float32)


@cache
def _fractions() -> torch.Tensor:
    return torch.linspace(0.0, 1.0, _LEVELS, dtype=torch.float64, device="cpu")


@lru_cache(maxsize=64)
def _places(count: int) -> torch.Tensor:
    """The places of the knots in a sorted sample of this size."""
    wanted = torch.linspace(0, count - 1, min(_GAPS, count - 1) + 1, dtype=torch.float64, device="cpu")
    return wanted.round_().to(torch.int64)


def _table(borders: torch.Tensor) -> torch.Tensor:
    """The code of each float16 bit pattern, for ascending `borders` between the codes."""
    cuts = torch.bucketize(borders, _ascending(), right=False).tolist()
    codes = b"".join(
        [_BYTES[code] * (stop - start) for code, (start, stop) in enumerate(pairwise([0, *cuts, 2 * _HALVES]))]
    )
    ascending = torch.frombuffer(bytearray(codes), dtype=torch.uint8)
    table = torch.zeros(1 << 16, dtype=torch.uint8, device="cpu")
    table[:_HALVES] = ascending[_HALVES:]
    table[1 << 15 : (1 << 15) + _HALVES] = ascending[:_HALVES].flip(0)
    return table


@cache
def _ascending() -> torch.Tensor:
    """All finite float16 numbers, from the smallest."""
    positive = torch.arange(_HALVES, dtype=torch.int16, device="cpu").view(torch.float16).double()
    return torch.cat([-positive.flip(0), positive])


register_plain(Quantile8BitQuantization)
