"""Half precision with a scale: float16 for values of any size.

============== =================== ==============================================================================
name           bytes               error
============== =================== ==============================================================================
scaled_float16 8 + 2 per element   ``|x - center| · (2^-11 + 2^-22) + span · 2^-38 + |x| · 2^-23 + 2^-125``
============== =================== ==============================================================================

An element is sent as float16 of ``(x - center) / scale``. The scale is the power of two that takes the largest
difference, `span`, to between 2^14 and 2^15: nothing is cut, what is 2^29 times smaller keeps its 11 significant bits,
and to scale costs no accuracy. The center is 0 unless 0 is farther from the values than they are from each other; then
it is the middle between the smallest and the largest, and what they have in common costs no bits. So a zero among other
values stays exactly 0. The header is scale and center, float32 each; a scale of NaN makes all values NaN.

16-bit tensors are sent as they are. (hivemind has one mean and deviation for each row of the last axis; here there is
one center and scale for all that is encoded at once, because a part of a round knows no rows.)
"""

from __future__ import annotations

import math
import struct

import torch

from shoal.compression.base import wire_view
from shoal.compression.floating import register_plain
from shoal.compression.memory import as_tensor
from shoal.compression.packed import MIN_STEP, PackedCompression

__all__ = ["ScaledFloat16Compression"]

_HEADER = struct.Struct("<ff")
_NEAR_OVERFLOW = 2.0**126
_LARGEST = 32752.0
"""The largest float16 below 2^15."""


class ScaledFloat16Compression(PackedCompression):
    """Float16 of ``(x - center) / scale``, with one center and one scale for all values."""

    @property
    def name(self) -> str:
        return "scaled_float16"

    def idempotent(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize == 2

    def packed_bytes(self, numel: int) -> int:
        return _HEADER.size + 2 * numel

    def _pack(self, values: torch.Tensor, out: memoryview) -> None:
        low, high = (extreme.item() for extreme in torch.aminmax(values))
        wire, shared = wire_view(out[_HEADER.size :], torch.float16)
        if math.isfinite(low) and math.isfinite(high):
            center, scale = _fit(low, high)
            _HEADER.pack_into(out, 0, scale, center)
            # Both products are exact, so this rounds once, with or without a fused multiply-add.
            scaled = torch.add(torch.tensor(-center / scale), values, alpha=1 / scale)
            if max(-low, high) >= _NEAR_OVERFLOW:
                scaled.clamp_(-_LARGEST, _LARGEST)  # rounded up, the largest values would decode to infinity
            wire.copy_(scaled)
        else:
            _HEADER.pack_into(out, 0, math.nan, 0.0)
            wire.zero_()
        if not shared:
            as_tensor(out[_HEADER.size :], torch.uint8).copy_(wire.view(torch.uint8))

    def _unpack(self, data: memoryview, numel: int) -> torch.Tensor:
        scale, center = _HEADER.unpack_from(data)
        values = as_tensor(data[_HEADER.size :], torch.float16).to(torch.float32).mul_(scale)
        return values.add_(center) if center else values

    def _packed_bound(self, values: torch.Tensor) -> torch.Tensor:
        low, high = values.float().aminmax()
        center, _ = _fit(low.item(), high.item())
        away = (values - center).abs()
        return away * (2**-11 + 2**-22) + away.max() * 2**-38 + values.abs() * 2**-23 + MIN_STEP * 2**-25


def _fit(low: float, high: float) -> tuple[float, float]:
    """The center and the scale for finite values between `low` and `high`."""
    center = 0.0
    if abs(low + high) / 2 > high - low:
        center = float(torch.tensor((low + high) / 2, dtype=torch.float32))
    span = max(high - center, center - low)
    if not span:
        return center, 1.0
    _, exponent = math.frexp(span)
    return center, max(math.ldexp(1.0, exponent - 15), MIN_STEP)


register_plain(ScaledFloat16Compression)
