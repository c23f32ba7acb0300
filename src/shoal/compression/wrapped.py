"""Base of codecs whose bytes are those of another codec. They define the work around it in a round of averaging."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.compression.base import CompressionBase
from shoal.errors import ConfigError

__all__ = ["WrappedCompression"]


class WrappedCompression(CompressionBase):
    """A codec around another one.

    Args:
        codec: any codec, also one that chooses.

    Raises:
        ConfigError: the argument is no codec, or one that must not be within this one.
    """

    family = ""
    may_hold: tuple[type[WrappedCompression], ...] = ()

    def __init__(self, codec: CompressionBase) -> None:
        wrong = isinstance(codec, WrappedCompression) and not isinstance(codec, self.may_hold)
        if not isinstance(codec, CompressionBase) or wrong:
            raise ConfigError(f"codec is {codec!r}: give {type(self).__name__} a codec such as TopKCompression()")
        self.codec = codec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.codec!r})"

    @property
    def name(self) -> str:
        return f"{self.family}:{self.codec.name}"

    @property
    def has_scales(self) -> bool:  # type: ignore[override]
        return self.codec.has_scales

    def supports(self, dtype: torch.dtype) -> bool:
        return self.codec.supports(dtype)

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.codec.encoded_bytes(numel, dtype)

    def tensors_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        return self.codec.tensors_bytes(sizes, dtype)

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        return self.codec.error_bound(values)

    def tensors_bound(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self.codec.tensors_bound(values, sizes)

    def idempotent(self, dtype: torch.dtype) -> bool:
        return self.codec.idempotent(dtype)

    def _encode(self, values: torch.Tensor, out: memoryview) -> None:
        self.codec.encode_into(values, out)

    def _decode(self, data: memoryview, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.codec.decode(data, numel, dtype)

    def _encode_tensors(self, values: torch.Tensor, out: memoryview, sizes: tuple[int, ...]) -> None:
        self.codec.encode_into(values, out, sizes)

    def _decode_tensors(self, data: memoryview, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        return self.codec.decode(data, sum(sizes), dtype, sizes)
