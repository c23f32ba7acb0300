"""Local SGD: at each merge the parameters become their mean. Source: https://arxiv.org/abs/1805.09767."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.compression import CompressionBase
from shoal.strategies.merges import Merges
from shoal.strategies.merging import MEAN, Merging

__all__ = ["LocalSGD"]


@dataclass(frozen=True)
class LocalSGD(Merges):
    """At each merge the parameters become the mean of the peers', weighted by their samples.

    Args:
        every: the mean number of batches of the peers between two merges; or a time such as `"30s"`.
        compression: the codec of the outer gradients, such as `Float16Compression()`; None for none.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    every: int | str
    compression: CompressionBase | None = field(default=None, compare=False, kw_only=True)
    merging: Merging = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._merge_by(every=self.every, outer=MEAN)
