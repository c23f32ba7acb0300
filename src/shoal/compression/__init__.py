"""How tensor values become bytes: codecs, chosen per tensor and named on the wire.

`base` says what a codec is and what it promises, `floating` holds the codecs that exist, `memory` sees tensors as bytes
without copies. Other codecs join by `register_codec`.
"""

from shoal.compression.base import (
    CompressionBase,
    CompressionInfo,
    TensorDescriptor,
    TensorRole,
    codec_by_name,
    register_codec,
)
from shoal.compression.floating import Float16Compression, NoCompression
from shoal.compression.memory import DTYPES, allocate, as_tensor, dtype_by_name, dtype_name, view_bytes

__all__ = [
    "DTYPES",
    "CompressionBase",
    "CompressionInfo",
    "Float16Compression",
    "NoCompression",
    "TensorDescriptor",
    "TensorRole",
    "allocate",
    "as_tensor",
    "codec_by_name",
    "dtype_by_name",
    "dtype_name",
    "register_codec",
    "view_bytes",
]
