"""Error feedback: what an encoding of a contribution lost is sent with the next one.

The codec itself has no memory: `ErrorFeedback` says that whoever averages with it keeps one, the *residual*
(`shoal.allreduce.residual`; Seide et al. 2014, "1-bit stochastic gradient descent"; Stich et al. 2018,
arXiv:1809.07599; Karimireddy et al. 2019, arXiv:1901.09847). The bytes are those of the codec within. Where nothing is
averaged, as in downloads of a state, it is that codec.

The name on the wire is `feedback:NAME`: the peers of a run agree on it as on any other codec, as the sum over rounds is
right only if all of them keep what they lose.
"""

from __future__ import annotations

import torch

from shoal.compression.base import CompressionBase, CompressionInfo, codec_by_name, register_codec
from shoal.errors import ConfigError

__all__ = ["ErrorFeedback"]


class ErrorFeedback(CompressionBase):
    """A codec whose errors in averaging are made good in later rounds: for gradients, and other values that add up.

    Args:
        codec: any other, also one that chooses. Tensors that it sends without loss get no feedback.

    Raises:
        ConfigError: it is no codec, or has feedback already.
    """

    def __init__(self, codec: CompressionBase) -> None:
        if not isinstance(codec, CompressionBase) or isinstance(codec, ErrorFeedback):
            raise ConfigError(f"codec is {codec!r}: give ErrorFeedback a codec such as TopKCompression()")
        self.codec = codec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.codec!r})"

    @property
    def name(self) -> str:
        return f"feedback:{self.codec.name}"

    def choose(self, info: CompressionInfo) -> CompressionBase:
        """The concrete codec for this tensor, with feedback unless it loses nothing."""
        chosen = self.codec.choose(info)
        return chosen if chosen.name == "none" or isinstance(chosen, ErrorFeedback) else ErrorFeedback(chosen)

    def supports(self, dtype: torch.dtype) -> bool:
        return self.codec.supports(dtype)

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.codec.encoded_bytes(numel, dtype)

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        return self.codec.error_bound(values)

    def idempotent(self, dtype: torch.dtype) -> bool:
        return self.codec.idempotent(dtype)

    def _encode(self, values: torch.Tensor, out: memoryview) -> None:
        self.codec.encode_into(values, out)

    def _decode(self, data: memoryview, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.codec.decode(data, numel, dtype)


register_codec("feedback", lambda parameters: ErrorFeedback(codec_by_name(parameters)))
