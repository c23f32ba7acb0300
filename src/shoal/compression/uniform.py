"""One byte for each element, in equal steps around 0.

============ ================== ================================================================================
name         bytes              error, where `top` is the largest absolute value of all that is encoded at once
============ ================== ================================================================================
uniform8bit  5 + 1 per element  ``top / 254``, and ``top / 510`` where no two values have opposite signs (both
                                times ``1 + 2^-13``, plus 2^-101)
============ ================== ================================================================================

An element is sent as the nearest multiple of a step. Values of both signs take codes from -127 to 127; where all values
that do not round to 0 have one sign (second moments of Adam, what comes out of a ReLU), codes from 0 to 255 of half the
step, which is negative if they are. So 0 stays exactly 0, and nothing is ever clipped: hivemind clips beyond three
standard deviations, and its error there has no bound.

The step has 16 significant bits, so that step times code is exact in float32, and the largest value always takes the
last code. From both follows that what was decoded encodes to the same bytes again. It does in 16-bit dtypes too: where
such a dtype is coarser than the step, it rounds what was decoded back to the very value that was encoded.

The header is the step (float32) and a byte, not 0 for codes from 0 to 255. A step of NaN makes all values NaN.
"""

from __future__ import annotations

import math
import struct

import torch

from shoal.compression.floating import register_plain
from shoal.compression.memory import as_tensor
from shoal.compression.packed import MIN_STEP, PackedCompression

__all__ = ["Uniform8BitQuantization"]

_HEADER = struct.Struct("<fB")
_MAGIC = 1.5 * 2**23
"""Added to a small float32 it rounds that to an integer, ties to even, and leaves it in the low bits of the sum."""

_MAGIC_TENSOR = torch.tensor(_MAGIC)

_ROUNDS_TO_ZERO = 0.5 + 2.0**-20
"""In steps. A little more than a half, so that what is larger surely does not round to 0, however it is computed."""


class Uniform8BitQuantization(PackedCompression):
    """The nearest multiple of one step for all values, as one byte: see the module."""

    @property
    def name(self) -> str:
        return "uniform8bit"

    def idempotent(self, dtype: torch.dtype) -> bool:
        return True

    def packed_bytes(self, numel: int) -> int:
        return _HEADER.size + numel

    def _pack(self, values: torch.Tensor, out: memoryview) -> None:
        low, high = (extreme.item() for extreme in torch.aminmax(values))
        codes = as_tensor(out[_HEADER.size :], torch.int8)
        if not (math.isfinite(low) and math.isfinite(high)):
            _HEADER.pack_into(out, 0, math.nan, 0)
            codes.zero_()
            return
        step, one_sided = _fit(low, high)
        _HEADER.pack_into(out, 0, step, one_sided)
        magic = torch.add(_MAGIC_TENSOR, values, alpha=1 / step)
        if one_sided and low < 0.0 < high:
            magic.clamp_(min=_MAGIC)  # what would round to 0 with codes of both signs
        codes.copy_(magic.view(torch.int32))

    def _unpack(self, data: memoryview, numel: int) -> torch.Tensor:
        step, one_sided = _HEADER.unpack_from(data)
        codes = as_tensor(data[_HEADER.size :], torch.uint8 if one_sided else torch.int8)
        return codes.float().mul_(step)

    def _packed_bound(self, values: torch.Tensor) -> torch.Tensor:
        low, high = (extreme.item() for extreme in values.float().aminmax())
        steps = 510 if low >= 0 or high <= 0 else 254
        return torch.full_like(values, max(-low, high) / steps * (1 + 2**-13) + MIN_STEP / 2)


def _fit(low: float, high: float) -> tuple[float, bool]:
    """The step for finite values between `low` and `high`, and whether codes go from 0 to 255."""
    top = max(-low, high)
    step = _step(top, 127)
    if min(-low, high) > _ROUNDS_TO_ZERO * step:
        return step, False
    return math.copysign(_step(top, 255), high if high == top else low), True


def _step(top: float, codes: int) -> float:
    """`top / codes` with 16 significant bits. Of the largest float32 it is rounded down: `codes` steps are finite."""
    mantissa, exponent = math.frexp(max(top / codes, MIN_STEP))
    return math.ldexp(round(mantissa * 2**16), exponent - 16)


register_plain(Uniform8BitQuantization)
