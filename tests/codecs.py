"""Every codec, as users get it by default: what tests that hold for all of them go through."""

from __future__ import annotations

from shoal.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    Differences,
    ErrorFeedback,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    TopKCompression,
    Uniform8BitQuantization,
)

__all__ = ["CODECS"]

CODECS: list[CompressionBase] = [
    NoCompression(),
    Float16Compression(),
    BFloat16Compression(),
    ScaledFloat16Compression(),
    Uniform8BitQuantization(),
    Quantile8BitQuantization(),
    BlockwiseQuantization(),
    BlockwiseQuantization(bits=4),
    BlockwiseQuantization(bits=2),
    TopKCompression(0.1),
    TopKCompression(0.1, bits=4),
    ErrorFeedback(BlockwiseQuantization(bits=4)),
    ErrorFeedback(TopKCompression(0.01)),
    ErrorFeedback(TopKCompression(0.03, bits=2)),
    Differences(BlockwiseQuantization()),
    Differences(Quantile8BitQuantization()),
    Differences(ErrorFeedback(BlockwiseQuantization(bits=4))),
]
