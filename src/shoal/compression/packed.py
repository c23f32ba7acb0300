"""Base of the codecs whose elements share something: a scale, a center or a codebook in a header.

It does for all of them what has nothing to do with how they round:

- **Small tensors are sent as they are**, exactly, where header and codes would take no fewer bytes. So a bias of ten
  elements does not pay for a codebook, and no encoding is larger than the tensor.
- **Values come as float32**, one after another, in host memory. Finite float64 values beyond its range are cut to it.
- **What is decoded fits the tensor's dtype**: a step of a 16-bit tensor's largest value may be rounded up, out of its
  range. It is cut there.

Non-finite values: `_pack` writes a header that decodes the unit that they are in to NaN. It sees them for free, in the
extremes that it computes anyway.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from shoal.compression.base import CompressionBase
from shoal.compression.floating import FLOATS, NoCompression

__all__ = ["MIN_STEP", "PackedCompression"]

_LARGEST = torch.finfo(torch.float32).max

MIN_STEP = 2.0**-100
"""No scale is smaller, so that its inverse is finite: what is below half of it becomes 0."""

_RAW = NoCompression()


class PackedCompression(CompressionBase):
    """A codec with a header. What it packs is not empty, float32, 1-D and contiguous."""

    @abstractmethod
    def packed_bytes(self, numel: int) -> int:
        """Size of header and codes."""

    @abstractmethod
    def _pack(self, values: torch.Tensor, out: memoryview) -> None:
        """Fill `out`; `values` must not be changed."""

    @abstractmethod
    def _unpack(self, data: memoryview, numel: int) -> torch.Tensor:
        """The values as float32, in memory of their own."""

    @abstractmethod
    def _packed_bound(self, values: torch.Tensor) -> torch.Tensor:
        """Error bound for values as they are packed (but in float64), without what `float64` itself loses."""

    def is_raw(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether so many elements are sent as they are."""
        return self.packed_bytes(numel) >= numel * dtype.itemsize

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return min(self.packed_bytes(numel), numel * dtype.itemsize)

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        wide = values.detach().to(device="cpu", dtype=torch.float64)
        if not values.numel() or self.is_raw(values.numel(), values.dtype):
            return torch.zeros_like(wide)
        cut = wide.clamp(-_LARGEST, _LARGEST)
        bound = self._packed_bound(cut.reshape(-1)).view(values.shape)
        if values.dtype is torch.float64:
            bound = bound + cut.abs() * 2**-24 + 2**-150 + (wide - cut).abs()
        return bound

    def _encode(self, values: torch.Tensor, out: memoryview) -> None:
        if self.is_raw(values.numel(), values.dtype):
            _RAW.encode_into(values, out)
        else:
            self._pack(_as_float32(values), out)

    def _decode(self, data: memoryview, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self.is_raw(numel, dtype):
            return _RAW.decode(data, numel, dtype)
        values = self._unpack(data, numel)
        if dtype.itemsize == 2:
            largest = torch.finfo(dtype).max
            values.clamp_(-largest, largest)  # NaN stays NaN
        return values


def _as_float32(values: torch.Tensor) -> torch.Tensor:
    """The values in row-major order; the tensor's own memory where it has that form already."""
    if values.dtype is torch.float32 and values.dim() == 1 and values.is_cpu and values.is_contiguous():
        return values
    flat = values.to(device="cpu", dtype=torch.float32).contiguous().view(-1)
    if values.dtype is torch.float64:
        low, high = torch.aminmax(flat)
        if not bool(torch.isfinite(low)) or not bool(torch.isfinite(high)):
            host = values.to(device="cpu").reshape(-1)
            cut = torch.isinf(flat) & torch.isfinite(host)
            flat = torch.where(cut, torch.full_like(flat, _LARGEST).copysign(flat), flat)
    return flat
