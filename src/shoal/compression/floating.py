"""Codecs that send floating-point values as floating-point values, each element by itself.

======== ===================== =================== =========================================================
name     dtypes                bytes per element   error
======== ===================== =================== =========================================================
none     all                   as in memory        none, NaN payloads included; bfloat16 stays 2 bytes
float16  float64, float32,     2                   ``|x| · (2^-11 + 2^-23) + 2^-25``, and beyond ±65504 what
         float16, bfloat16                         was cut off
bfloat16 float64, float32,     2                   ``|x| · (2^-8 + 2^-23) + 2^-134``, and beyond the largest
         float16, bfloat16                         bfloat16 (3.39e38) what was cut off; float16: none
======== ===================== =================== =========================================================

Both casts round to nearest, ties to even, and cut *finite* values to the largest of the 16-bit format, so that finite
values stay finite. Infinities and NaN stay what they are, so that they can still be seen.

`bfloat16` keeps the range of float32, with three significant bits fewer than `float16`. It sends float16 tensors as
they are: there is nothing to save. `float16` loses most of the precision of float64. For bfloat16 it saves nothing (it
is exact for values of bfloat16 between 2^-17 and 65504): use `NoCompression` there.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod

import torch

from shoal.compression.base import CompressionBase, register_codec, wire_view
from shoal.compression.memory import DTYPES, as_tensor
from shoal.errors import ConfigError

__all__ = ["FLOATS", "BFloat16Compression", "Float16Compression", "NoCompression", "register_plain"]

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""The dtypes that a lossy codec takes."""


_FEW_BYTES = 1 << 16


class _Cast(CompressionBase):
    """A codec that is a conversion to `wire_dtype`."""

    has_scales = False

    @abstractmethod
    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of one element as it is sent."""

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * self.wire_dtype(dtype).itemsize

    def _encode(self, values: torch.Tensor, out: memoryview) -> None:
        wire, shared = wire_view(out, self.wire_dtype(values.dtype))
        self._convert(values, wire.view(values.shape))
        if not shared:
            as_tensor(out, torch.uint8).copy_(wire.view(torch.uint8))

    def _convert(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        wire.copy_(values)

    def _decode(self, data: memoryview, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return as_tensor(data, self.wire_dtype(dtype))


class NoCompression(_Cast):
    """The values as they are: exact for every dtype, one memory copy to encode, none to decode."""

    @property
    def name(self) -> str:
        return "none"

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPES.values()

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def idempotent(self, dtype: torch.dtype) -> bool:
        return True

    def _encode(self, values: torch.Tensor, out: memoryview) -> None:
        if not (values.is_cpu and values.is_contiguous()):
            super()._encode(values, out)
        elif out.nbytes <= _FEW_BYTES:
            # This takes a fifth of the time. With more bytes it would keep other threads out meanwhile.
            out[:] = ctypes.string_at(values.data_ptr(), out.nbytes)
        else:  # bytes need no alignment, and so no memory beside
            torch.frombuffer(out, dtype=torch.uint8).copy_(values.view(-1).view(torch.uint8))

    def _decode(self, data: memoryview, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if dtype is torch.bool:  # a byte from elsewhere need not be 0 or 1, and PyTorch takes it for granted
            return as_tensor(data, torch.uint8) != 0
        return super()._decode(data, numel, dtype)

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(values.shape, dtype=torch.float64, device="cpu")


class _Rounding(_Cast):
    """A cast to a 16-bit format: rounds to nearest, and cuts finite values to the format's range."""

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        size = values.detach().to(device="cpu", dtype=torch.float64).abs()
        wire = self.wire_dtype(values.dtype)
        if wire is values.dtype:
            return torch.zeros_like(size)
        # Half a unit in the last place: of a normal number, and of a subnormal one. 2^-23 covers float64, which is
        # rounded twice (PyTorch converts it by way of float32).
        info = torch.finfo(wire)
        return size * (info.eps / 2 + 2**-23) + info.smallest_normal * info.eps / 2 + (size - info.max).clamp(min=0.0)

    def _convert(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        wire.copy_(values)
        if _surely_within(values, torch.finfo(wire.dtype).max):
            return
        # Out of range became infinite. One pass over the result tells; to clamp before costs twenty times as much.
        low, high = torch.aminmax(wire)
        if not bool(torch.isfinite(low)) or not bool(torch.isfinite(high)):
            host = values.to(wire.device)
            cut = torch.isinf(wire) & torch.isfinite(host)
            largest = torch.full_like(wire, torch.finfo(wire.dtype).max)
            wire.copy_(torch.where(cut, largest.copysign(wire), wire))


def _surely_within(values: torch.Tensor, limit: float) -> bool:
    """True only if no absolute value is larger. It uses the sum of squares, which takes half as long as extremes."""
    if values.dtype is not torch.float32 or values.device.type != "cpu" or not values.is_contiguous():
        return False
    flat = values.view(-1)
    return float(torch.dot(flat, flat)) <= 0.99 * limit * limit  # false for NaN


class Float16Compression(_Rounding):
    """The values in half precision (IEEE 754 binary16), cut to its range: see the module's table for the error."""

    @property
    def name(self) -> str:
        return "float16"

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float16

    def idempotent(self, dtype: torch.dtype) -> bool:
        return True  # bfloat16 cannot hold all of float16, but the values that it holds come back


class BFloat16Compression(_Rounding):
    """The values in bfloat16: the range of float32, 8 significant bits; float16 as it is. The table has the error."""

    @property
    def name(self) -> str:
        return "bfloat16"

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float16 if dtype is torch.float16 else torch.bfloat16

    def idempotent(self, dtype: torch.dtype) -> bool:
        return True


def register_plain(codec: type[CompressionBase]) -> None:
    """Make a codec without parameters known by its name."""

    def make(parameters: str) -> CompressionBase:
        if parameters:
            raise ConfigError(f"codec {codec().name!r} takes no parameters, got {parameters[:32]!r}")
        return codec()

    register_codec(codec().name, make)


register_plain(NoCompression)
register_plain(Float16Compression)
register_plain(BFloat16Compression)
