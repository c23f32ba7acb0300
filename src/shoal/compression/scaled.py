"""Half precision with a scale: float16 for values of any size.

============== =================== ==============================================================================
name           bytes               error
============== =================== ==============================================================================
scaled_float16 5 + 2 per element   ``|x - center| · (2^-11 + 2^-22) + span · 2^-38 + |x| · 2^-23 + 2^-125``
============== =================== ==============================================================================

An element is sent as float16 of ``(x - center) / scale``. The scale is the power of two that takes the largest
difference, `span`, to between 2^14 and 2^15: nothing is cut, a value that is 2^29 times smaller keeps its 11
significant bits, and scaling costs no accuracy. The center is 0 unless 0 is farther from the values than they are from
each other; then it is the middle between the smallest and the largest, and their common part costs no bits. So a zero
among other values stays exactly 0. Behind the values are the centers (float32) of all tensors, then their
scales, which are powers of two, as the exponents of float32 (bytes); 255 is NaN.

16-bit tensors are sent as they are. (hivemind has one mean and deviation for each row of the last axis; here there is
one center and scale for each tensor, because a tile knows no rows.)
"""

from __future__ import annotations

import math
import struct

import torch

from shoal.compression.base import wire_view
from shoal.compression.floating import register_plain
from shoal.compression.joint import tensors_of
from shoal.compression.memory import as_tensor
from shoal.compression.packed import MIN_STEP, PackedCompression

__all__ = ["FIT_BYTES", "ScaledFloat16Compression", "fit", "read_fits", "write_fits"]

FIT_BYTES = 5
"""The bytes of the center (float32) and the scale of one tensor."""

_NEAR_OVERFLOW = 2.0**126
_LARGEST = 32752.0
"""The largest float16 below 2^15."""


class ScaledFloat16Compression(PackedCompression):
    """Float16 of ``(x - center) / scale``, with one center and one scale for all values of a tensor."""

    @property
    def name(self) -> str:
        return "scaled_float16"

    def idempotent(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize == 2

    def packed_bytes(self, sizes: tuple[int, ...]) -> int:
        return 2 * sum(sizes) + FIT_BYTES * len(sizes)

    def _pack(self, values: torch.Tensor, out: memoryview, sizes: tuple[int, ...]) -> None:
        tensors, split = tensors_of(sizes), 2 * sum(sizes)
        extremes = tensors.extremes(values)
        fits = [fit(*each) for each in extremes]
        write_fits(fits, out[split:])
        wire, shared = wire_view(out[:split], torch.float16)
        # Both products are exact, so this rounds once, with or without a fused multiply-add.
        scaled = tensors.affine([-center / scale for scale, center in fits], [1 / scale for scale, _ in fits], values)
        if not all(max(-low, high) < _NEAR_OVERFLOW for low, high in extremes):
            scaled.nan_to_num_(0.0).clamp_(-_LARGEST, _LARGEST)  # the largest, rounded up, would decode to infinity
        wire.copy_(scaled)
        if not shared:
            as_tensor(out[:split], torch.uint8).copy_(wire.view(torch.uint8))

    def _unpack(self, data: memoryview, sizes: tuple[int, ...], out: torch.Tensor) -> None:
        tensors, split = tensors_of(sizes), 2 * sum(sizes)
        scales, centers = read_fits(data[split:])
        tensors.scale(out.copy_(as_tensor(data[:split], torch.float16)), scales)
        tensors.shift(out, centers)

    def _packed_bound(self, values: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        tensors = tensors_of(sizes)
        away = (values - tensors.spread([fit(*each)[1] for each in tensors.extremes(values.float())])).abs()
        span = tensors.spread([high for _, high in tensors.extremes(away)])
        return away * (2**-11 + 2**-22) + span * 2**-38 + values.abs() * 2**-23 + MIN_STEP * 2**-25


def fit(low: float, high: float) -> tuple[float, float]:
    """The scale and the center for values between `low` and `high`. The scale is NaN if these are not finite."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return math.nan, 0.0
    center = 0.0
    if abs(low + high) / 2 > high - low:
        center = float(torch.tensor((low + high) / 2, dtype=torch.float32, device="cpu"))
    span = max(high - center, center - low)
    if not span:
        return 1.0, center
    _, exponent = math.frexp(span)
    return max(math.ldexp(1.0, exponent - 15), MIN_STEP), center


def write_fits(fits: list[tuple[float, float]], out: memoryview) -> None:
    """Write all centers, then a byte for each scale: its exponent in float32, 255 for NaN."""
    struct.pack_into(f"<{len(fits)}f", out, 0, *(center for _, center in fits))
    out[4 * len(fits) :] = bytes([255 if math.isnan(scale) else math.frexp(scale)[1] + 126 for scale, _ in fits])


def read_fits(data: memoryview) -> tuple[list[float], tuple[float, ...]]:
    """Read scales and centers."""
    count = len(data) // FIT_BYTES
    return [_SCALES[exponent] for exponent in data[4 * count :]], struct.unpack_from(f"<{count}f", data)


_SCALES = [0.0, *(2.0 ** (exponent - 127) for exponent in range(1, 255)), math.nan]


register_plain(ScaledFloat16Compression)
