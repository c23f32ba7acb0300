"""Differences from the last average, so that small updates of parameters survive a coarse codec.

8 bits of a parameter are steps of about a hundredth of its size, 16 bits of about a thousandth. An update is smaller:
rounding would swallow it. With `Differences`, a round of averaging encodes the difference from the last committed
average, which all members of the group hold bit by bit (`shoal.averaging.allreduce.segments`; decisions 0011 and 0014).
If they do not, the round is lossless. Without averaging, as in downloads of a state, it acts as the inner codec.

The name on the wire is `difference:NAME`.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from shoal.compression.base import CompressionBase, CompressionInfo, codec_by_name, register_codec
from shoal.compression.feedback import ErrorFeedback
from shoal.compression.floating import Float16Compression
from shoal.compression.scaled import ScaledFloat16Compression
from shoal.compression.wrapped import WrappedCompression

__all__ = ["Differences", "for_parameters"]

_ELEMENTS = 1 << 12
"""So many elements that no codec sends them as they are because they are few."""


class Differences(WrappedCompression):
    """A codec of the changes since the last average: for parameters, and other tensors that change little.

    Tensors that the codec sends as they are gain nothing by it. For error feedback write
    ``Differences(ErrorFeedback(codec))``.

    Args:
        codec: any other codec, also one that chooses.

    Raises:
        ConfigError: the argument is no codec, or codes differences already.
    """

    family = "difference"
    may_hold = (ErrorFeedback,)

    def choose(self, info: CompressionInfo) -> CompressionBase:
        """The concrete codec for this tensor: of differences, unless it loses nothing."""
        chosen = self.codec.choose(info)
        return chosen if chosen.name == "none" or isinstance(chosen, Differences) else Differences(chosen)


@lru_cache(64)
def for_parameters(codec: CompressionBase, dtype: torch.dtype) -> CompressionBase:
    """The codec that averages parameters of this dtype when this codec was chosen: differences, unless it is exact.

    An update may be smaller than any float16, so that `Float16Compression` becomes `ScaledFloat16Compression`.
    """
    if (
        isinstance(codec, Differences)
        or not codec.supports(dtype)
        or not codec.max_error(torch.ones(_ELEMENTS, dtype=dtype, device="cpu"))
    ):
        return codec
    return Differences(ScaledFloat16Compression() if codec == Float16Compression() else codec)


register_codec("difference", lambda parameters: Differences(codec_by_name(parameters)))
