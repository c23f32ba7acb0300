"""How tensor values become bytes: codecs, which are chosen for each tensor and named on the wire.

`base` defines a codec and its promises, `memory` sees tensors as bytes without copies. `floating` has the codecs that
convert each element by itself. Codecs whose elements share a scale or a codebook build on `packed`: `scaled`,
`uniform`, `quantile`, `blockwise`, `sparse`. `feedback` sends the losses of a codec later, `differences` codes only the
changes since the last average (both are `wrapped` around another codec). `adaptive` chooses among all of them. Other
codecs join by `register_codec`, or by `compress` and `extract` through `own`. `docs/how-to/codec.md` says when to
use each.
"""

from shoal.compression.adaptive import (
    AdaptiveCompression,
    PerTensorCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
    choose_codecs,
)
from shoal.compression.base import (
    CompressionBase,
    CompressionInfo,
    TensorDescriptor,
    TensorRole,
    codec_by_name,
    register_codec,
)
from shoal.compression.blockwise import BlockwiseQuantization
from shoal.compression.differences import Differences, for_parameters
from shoal.compression.feedback import ErrorFeedback
from shoal.compression.floating import BFloat16Compression, Float16Compression, NoCompression
from shoal.compression.memory import DTYPES, allocate, as_tensor, dtype_by_name, dtype_name, populate, view_bytes
from shoal.compression.own import SerializedTensor
from shoal.compression.quantile import Quantile8BitQuantization
from shoal.compression.scaled import ScaledFloat16Compression
from shoal.compression.sparse import TopKCompression
from shoal.compression.uniform import Uniform8BitQuantization

__all__ = [
    "DTYPES",
    "AdaptiveCompression",
    "BFloat16Compression",
    "BlockwiseQuantization",
    "CompressionBase",
    "CompressionInfo",
    "Differences",
    "ErrorFeedback",
    "Float16Compression",
    "NoCompression",
    "PerTensorCompression",
    "Quantile8BitQuantization",
    "RoleAdaptiveCompression",
    "ScaledFloat16Compression",
    "SerializedTensor",
    "SizeAdaptiveCompression",
    "TensorDescriptor",
    "TensorRole",
    "TopKCompression",
    "Uniform8BitQuantization",
    "allocate",
    "as_tensor",
    "choose_codecs",
    "codec_by_name",
    "dtype_by_name",
    "dtype_name",
    "for_parameters",
    "populate",
    "register_codec",
    "view_bytes",
]
