"""One byte for each element, in equal steps around 0.

============ ================== ================================================================================
name         bytes              error, where `top` is the largest absolute value of the tensor
============ ================== ================================================================================
uniform8bit  3 + 1 per element  ``top / 254``, and ``top / 510`` where no two values have opposite signs (both
                                times ``1 + 2^-13``, plus 2^-101)
============ ================== ================================================================================

An element is sent as the nearest multiple of a step. Values of both signs take codes from -127 to 127; where all values
that do not round to 0 have one sign (second moments of Adam, the output of a ReLU), codes from 0 to 255 of half the
step, which is negative if the values are. So 0 stays exactly 0, and nothing is ever clipped: hivemind clips beyond
three standard deviations, and its error there has no bound.

The step has 15 significant bits, so that step times code is exact in float32, and the largest value always takes the
last code. From both it follows that decoded values encode to the same bytes again. This holds in 16-bit dtypes too: if
such a dtype is coarser than the step, it rounds a decoded value back to the very value that was encoded.

The header has three bytes for each tensor: the upper ones of the step (float32). Their lowest bit does not
belong to the step: it is set for codes from 0 to 255, which are written less 128. A step of NaN makes all values NaN.
The codes of all tensors follow.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from shoal.compression.floating import register_plain
from shoal.compression.joint import tensors_of
from shoal.compression.memory import as_tensor
from shoal.compression.packed import MIN_STEP, PackedCompression

__all__ = ["Uniform8BitQuantization"]

_HEADER_BYTES = 3
_MAGIC = 1.5 * 2**23
"""Adding this to a small float32 rounds that to an integer, ties to even, in the low bits of the sum."""

_LESS = 128
"""This is subtracted from codes from 0 to 255, which are written as signed bytes."""

_KEEPS_15_BITS = 2.0 ** (53 - 15) + 1

_ROUNDS_TO_ZERO = 0.5 + 2.0**-20
"""Larger values, in steps, surely do not round to 0, however they are computed: it is slightly more than a half."""


class Uniform8BitQuantization(PackedCompression):
    """The nearest multiple of one step for all values of a tensor, as one byte: see the module."""

    @property
    def name(self) -> str:
        return "uniform8bit"

    def idempotent(self, dtype: torch.dtype) -> bool:
        return True

    def packed_bytes(self, sizes: tuple[int, ...]) -> int:
        return _HEADER_BYTES * len(sizes) + sum(sizes)

    def _pack(self, values: torch.Tensor, out: memoryview, sizes: tuple[int, ...]) -> None:
        tensors, split = tensors_of(sizes), _HEADER_BYTES * len(sizes)
        extremes = tensors.extremes(values)
        fits = [_fit(*each) for each in extremes]
        _write_steps(out[:split], fits)
        zeros = [_MAGIC - _LESS if one_sided else _MAGIC for _, one_sided in fits]
        magic = tensors.affine(zeros, [1 / step for step, _ in fits], values)
        for number, (step, one_sided) in enumerate(fits):
            if math.isnan(step) or (one_sided and extremes[number][0] < 0.0 < extremes[number][1]):
                start = sum(sizes[:number])
                here = magic[start : start + sizes[number]]
                # Values that would round to 0 with codes of both signs; NaN.
                here.nan_to_num_(0.0).clamp_(min=zeros[number])
        as_tensor(out[split:], torch.int8).copy_(magic.view(torch.int32))

    def _unpack(self, data: memoryview, sizes: tuple[int, ...], out: torch.Tensor) -> None:
        tensors, split = tensors_of(sizes), _HEADER_BYTES * len(sizes)
        steps, less = _read_steps(data[:split])
        tensors.scale(tensors.shift(out.copy_(as_tensor(data[split:], torch.int8)), less), steps)

    def _packed_bound(self, values: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        tensors = tensors_of(sizes)
        extremes = tensors.extremes(values.float())
        bounds = [max(-low, high) / (510 if low >= 0 or high <= 0 else 254) for low, high in extremes]
        return tensors.spread(bounds) * (1 + 2**-13) + MIN_STEP / 2


def _write_steps(out: memoryview, fits: list[tuple[float, bool]]) -> None:
    """Write the upper three bytes of each step. Their lowest bit says whether codes go from 0 to 255."""
    steps = struct.pack(f"<{len(fits)}f", *(step for step, _ in fits))
    lowest = bytes([byte | one_sided for byte, (_, one_sided) in zip(steps[1::4], fits, strict=True)])
    for place, each in enumerate((lowest, steps[2::4], steps[3::4])):
        out[place::_HEADER_BYTES] = each


def _read_steps(data: memoryview) -> tuple[Sequence[float], list[int]]:
    """Read the steps, and the offsets that were subtracted from the codes."""
    lowest = bytes(data[::_HEADER_BYTES])
    words = bytearray(4 * len(lowest))
    words[1::4] = bytes([byte & 254 for byte in lowest])
    words[2::4], words[3::4] = bytes(data[1::_HEADER_BYTES]), bytes(data[2::_HEADER_BYTES])
    return struct.unpack(f"<{len(lowest)}f", words), [_LESS * (byte & 1) for byte in lowest]


def _fit(low: float, high: float) -> tuple[float, bool]:
    """The step for values between `low` and `high` (NaN unless they are finite), and whether codes go from 0 to 255."""
    top = max(-low, high)
    if not top < math.inf:
        return math.nan, False
    step = _step(top, 127)
    if min(-low, high) > _ROUNDS_TO_ZERO * step:
        return step, False
    return math.copysign(_step(top, 255), high if high == top else low), True


def _step(top: float, codes: int) -> float:
    """`top / codes` with 15 significant bits. For the largest float32 it is rounded down, to stay finite."""
    exact = max(top / codes, MIN_STEP)
    large = exact * _KEEPS_15_BITS  # Veltkamp's splitting
    return large - (large - exact)


register_plain(Uniform8BitQuantization)
