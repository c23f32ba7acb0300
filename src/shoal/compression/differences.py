"""Differences to the last average: so that small updates of parameters survive a coarse codec.

8 bits of a parameter are steps of about a hundredth of its size, and an update is smaller: sent by itself it would be
rounded away, or drowned. `Differences` says that what is encoded in a round of averaging is the difference to the last
average that was committed, which all members of the group hold bit by bit (`shoal.allreduce.reference`; decision 0011).
If they do not, the round is lossless. Where nothing is averaged, as in downloads of a state, it is the codec within.

The name on the wire is `difference:NAME`.
"""

from __future__ import annotations

import torch

from shoal.compression.base import CompressionBase, CompressionInfo, codec_by_name, register_codec
from shoal.compression.feedback import ErrorFeedback
from shoal.compression.wrapped import WrappedCompression

__all__ = ["Differences", "for_parameters"]

_ELEMENTS = 1 << 20
_FINE_BYTES = 2
"""For an element of float32: with 16 bits a parameter loses little. What has fewer is coarse, or leaves some out."""


class Differences(WrappedCompression):
    """A codec of what changed since the last average: for parameters, and whatever else stays nearly what it was.

    Tensors that the codec sends as they are have no use for it. For error feedback write
    ``Differences(ErrorFeedback(codec))``.

    Args:
        codec: any other, also one that chooses.

    Raises:
        ConfigError: it is no codec, or codes differences already.
    """

    family = "difference"
    may_hold = (ErrorFeedback,)

    def choose(self, info: CompressionInfo) -> CompressionBase:
        """The concrete codec for this tensor, of differences unless it loses nothing."""
        chosen = self.codec.choose(info)
        return chosen if chosen.name == "none" or isinstance(chosen, Differences) else Differences(chosen)


def for_parameters(codec: CompressionBase) -> CompressionBase:
    """What parameters are averaged with where this codec was chosen: differences, if it has less than 16 bits."""
    coarse = codec.supports(torch.float32) and codec.encoded_bytes(_ELEMENTS, torch.float32) < _FINE_BYTES * _ELEMENTS
    return Differences(codec) if coarse and not isinstance(codec, Differences) else codec


register_codec("difference", lambda parameters: Differences(codec_by_name(parameters)))
