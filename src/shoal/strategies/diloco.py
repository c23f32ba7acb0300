"""DiLoCo: the whole model is merged at once. Source: https://arxiv.org/abs/2311.08105."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.compression import CompressionBase
from shoal.strategies.merges import Merges
from shoal.strategies.merging import Merging, Outer, nesterov

__all__ = ["DiLoCo"]


@dataclass(frozen=True)
class DiLoCo(Merges):
    """The whole model is merged at once, and peers wait for the merge.

    Args:
        every: the mean number of batches of the peers between two merges; or a time such as `"5min"`.
        outer: makes the outer optimizer; default SGD with rate 0.7 and Nesterov momentum 0.9.
        compression: the codec of the outer gradients, such as `Float16Compression()`; None for none.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    every: int | str
    outer: Outer = field(default=nesterov, compare=False)
    compression: CompressionBase | None = field(default=None, compare=False, kw_only=True)
    merging: Merging = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._merge_by(every=self.every, outer=self.outer)
