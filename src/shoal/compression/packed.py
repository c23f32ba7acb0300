"""Base of the codecs whose elements share something: a scale, a center or a codebook in a header.

It does the work that does not depend on how they round:

- **Small tensors are sent as they are**, exactly: tensors of fewer than `TINY` elements, and tensors for which header
  and codes would take no fewer bytes. So no encoding is larger than the tensor.
- **Each tensor has a scale of its own** where several tensors are encoded at once.
- **Values come as float32**, one after another, in host memory. Finite float64 values beyond its range are cut to it.
- **Decoded values fit the tensor's dtype**: a step of a 16-bit tensor's largest value may be rounded up, out of its
  range. Such values are cut to the range.

Values that are not finite: `_pack` writes a header that decodes all that has their scale to NaN. It notices them in the
extremes that it computes anyway.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from shoal.compression.base import CompressionBase, CompressionInfo
from shoal.compression.floating import FLOATS, NoCompression

__all__ = ["MIN_STEP", "TINY", "PackedCompression"]

_LARGEST = torch.finfo(torch.float32).max

MIN_STEP = 2.0**-100
"""The smallest scale, so that its inverse is finite. Values below half of it become 0."""

TINY = 16
"""Tensors of fewer elements, scalars for instance, are averaged and downloaded as they are."""

_RAW = NoCompression()


class PackedCompression(CompressionBase):
    """A codec with a header. The values that it packs are float32, 1-D, contiguous and not empty."""

    @abstractmethod
    def packed_bytes(self, sizes: tuple[int, ...]) -> int:
        """The size of header and codes of several tensors, bytes."""

    @abstractmethod
    def _pack(self, values: torch.Tensor, out: memoryview, sizes: tuple[int, ...]) -> None:
        """Encode to `out`; `values` must not be changed."""

    @abstractmethod
    def _unpack(self, data: memoryview, sizes: tuple[int, ...], out: torch.Tensor) -> None:
        """Write the values to `out`, which is float32, 1-D and contiguous, in host memory."""

    @abstractmethod
    def _packed_bound(self, values: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        """The error bound for values as they are packed (but in float64), without the rounding of float64 values."""

    def choose(self, info: CompressionInfo) -> CompressionBase:
        """The codec for this tensor: `NoCompression` for fewer than `TINY` elements."""
        return _RAW if info.descriptor.numel < TINY else super().choose(info)

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.tensors_bytes((numel,), dtype) if numel else 0

    def tensors_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        return min(self.packed_bytes(self._apart(sizes)), sum(sizes) * dtype.itemsize)

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        return self.tensors_bound(values, (values.numel(),))

    def tensors_bound(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        wide = values.detach().to(device="cpu", dtype=torch.float64)
        if not values.numel() or self._is_raw(sizes, values.dtype):
            return torch.zeros_like(wide)
        cut = wide.clamp(-_LARGEST, _LARGEST)
        bound = self._packed_bound(cut.reshape(-1), self._apart(sizes)).view(values.shape)
        if values.dtype is torch.float64:
            bound = bound + cut.abs() * 2**-24 + 2**-150 + (wide - cut).abs()
        return bound

    def _apart(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sizes) if self.has_scales else (sum(sizes),)

    def _is_raw(self, sizes: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether values of these sizes are sent as they are."""
        return self.packed_bytes(self._apart(sizes)) >= sum(sizes) * dtype.itemsize

    def _encode(self, values: torch.Tensor, out: memoryview) -> None:
        self._encode_tensors(values, out, (values.numel(),))

    def _encode_tensors(self, values: torch.Tensor, out: memoryview, sizes: tuple[int, ...]) -> None:
        if self._is_raw(sizes, values.dtype):
            _RAW.encode_into(values, out)
        else:
            self._pack(_as_float32(values), out, sizes)

    def decode_into(
        self, data: bytes | bytearray | memoryview, dtype: torch.dtype, out: torch.Tensor, sizes: Sequence[int] = ()
    ) -> None:
        """Decode as the base does; float32 values without a copy."""
        tensors, flat = self._apart(sizes or (out.numel(),)), out.detach()
        alike = out.dtype is dtype is torch.float32 and out.is_cpu and out.dim() == 1 and out.is_contiguous()
        if alike and out.numel() and not self._is_raw(tensors, dtype):
            self._unpack(self._checked(data, out.numel(), dtype, sizes), tensors, flat)
        else:
            super().decode_into(data, dtype, out, sizes)

    def _decode(self, data: memoryview, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._decode_tensors(data, dtype, (numel,))

    def _decode_tensors(self, data: memoryview, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        if self._is_raw(sizes, dtype):
            return _RAW.decode(data, sum(sizes), dtype)
        values = torch.empty(sum(sizes), dtype=torch.float32, device="cpu")
        self._unpack(data, sizes, values)
        if dtype.itemsize == 2:
            largest = torch.finfo(dtype).max
            values.clamp_(-largest, largest)  # NaN stays NaN
        return values


def _as_float32(values: torch.Tensor) -> torch.Tensor:
    """The values as float32 in row-major order; the tensor's own memory if it has that form already."""
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
