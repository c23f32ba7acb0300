"""Error feedback: what the encoding of one contribution loses is sent with the next contribution.

The codec itself has no memory: `ErrorFeedback` tells the averaging code to keep one, the *residual*
(`shoal.averaging.allreduce.segments`; Seide et al. 2014, "1-bit stochastic gradient descent"; Stich et al. 2018,
arXiv:1809.07599; Karimireddy et al. 2019, arXiv:1901.09847). The bytes are those of the inner codec. Without averaging,
as in downloads of a state, it acts as that codec.

The name on the wire is `feedback:NAME`. The peers of a run agree on it as on any other codec, because the sum over
rounds is right only if all of them keep their losses.
"""

from __future__ import annotations

from shoal.compression.base import CompressionBase, CompressionInfo, codec_by_name, register_codec
from shoal.compression.wrapped import WrappedCompression

__all__ = ["ErrorFeedback"]


class ErrorFeedback(WrappedCompression):
    """A codec whose errors in averaging are made good in later rounds: for gradients, and other values that add up.

    Args:
        codec: any other codec, also one that chooses. Tensors that it sends without loss get no feedback.

    Raises:
        ConfigError: the argument is no codec, or has feedback already.
    """

    family = "feedback"

    def choose(self, info: CompressionInfo) -> CompressionBase:
        """The concrete codec for this tensor: with feedback, unless it loses nothing."""
        chosen = self.codec.choose(info)
        return chosen if chosen.name == "none" or isinstance(chosen, WrappedCompression) else ErrorFeedback(chosen)


register_codec("feedback", lambda parameters: ErrorFeedback(codec_by_name(parameters)))
