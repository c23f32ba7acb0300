"""Codecs that send floating-point values as floating-point values.

======== ===================== =================== =========================================================
name     dtypes                bytes per element   error
======== ===================== =================== =========================================================
none     all                   as in memory        none, NaN payloads included; bfloat16 stays 2 bytes
float16  float64, float32,     2                   ``|x| · (2^-11 + 2^-23) + 2^-25``, and beyond ±65504 what
         float16, bfloat16                         was cut off
======== ===================== =================== =========================================================

`float16` cuts *finite* values to ±65504, so that what was finite stays finite; an infinity stays one and NaN stays NaN,
so that what was not finite is still seen as such. For float64 it loses most of the precision, and for bfloat16 it saves
nothing (it sends what bfloat16 holds exactly between 2^-17 and 65504): use `NoCompression` there.
"""

from __future__ import annotations

import torch

from shoal.compression.base import CompressionBase, register_codec, wire_view
from shoal.compression.memory import DTYPES, as_tensor
from shoal.errors import ConfigError

__all__ = ["Float16Compression", "NoCompression"]

FLOAT16_MAX = 65504.0
_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class _Cast(CompressionBase):
    """A codec that is a conversion to `wire_dtype`."""

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * self.wire_dtype(dtype).itemsize

    def _encode(self, values: torch.Tensor, out: memoryview) -> None:
        wire, shared = wire_view(out, self.wire_dtype(values.dtype))
        self._convert(values, wire.view(values.shape))
        if not shared:
            as_tensor(out, torch.uint8).copy_(wire.view(torch.uint8))

    def _convert(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        wire.copy_(values)

    def _decode(self, data: memoryview, dtype: torch.dtype) -> torch.Tensor:
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

    def _decode(self, data: memoryview, dtype: torch.dtype) -> torch.Tensor:
        if dtype is torch.bool:  # a byte from elsewhere need not be 0 or 1, and PyTorch takes it for granted
            return as_tensor(data, torch.uint8) != 0
        return super()._decode(data, dtype)

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(values.shape, dtype=torch.float64)


class Float16Compression(_Cast):
    """The values in half precision (IEEE 754 binary16), cut to its range: see the module's table for the error."""

    @property
    def name(self) -> str:
        return "float16"

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in _FLOATS

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float16

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        # 2^-11 is half a unit in the last place of a normal number, 2^-25 of a subnormal one. 2^-23 covers float64,
        # which is rounded twice (PyTorch converts it by way of float32).
        size = values.detach().to(device="cpu", dtype=torch.float64).abs()
        return size * (2**-11 + 2**-23) + 2**-25 + (size - FLOAT16_MAX).clamp(min=0.0)

    def _convert(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        wire.copy_(values)
        # Out of range became infinite. One pass over the result tells; to clamp before costs twenty times as much.
        low, high = torch.aminmax(wire)
        if not bool(torch.isfinite(low)) or not bool(torch.isfinite(high)):
            host = values.to(wire.device)
            cut = torch.isinf(wire) & torch.isfinite(host)
            wire.copy_(torch.where(cut, torch.full_like(wire, FLOAT16_MAX).copysign(wire), wire))


def _plain(codec: type[CompressionBase]) -> None:
    def make(parameters: str) -> CompressionBase:
        if parameters:
            raise ConfigError(f"codec {codec().name!r} takes no parameters, got {parameters[:32]!r}")
        return codec()

    register_codec(codec().name, make)


_plain(NoCompression)
_plain(Float16Compression)
