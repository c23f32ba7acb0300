"""Streaming DiLoCo: fragments are merged while peers train on. Source: https://arxiv.org/abs/2501.18512."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.base.checks import whole
from shoal.compression import CompressionBase
from shoal.strategies.merges import Merges
from shoal.strategies.merging import MOST_STEPS, Merging, Outer, nesterov

__all__ = ["StreamingDiLoCo"]


@dataclass(frozen=True)
class StreamingDiLoCo(Merges):
    """The model is merged in fragments, one after another, and peers go on while a merge is under way.

    Args:
        every: the mean number of batches of the peers between two merges of one fragment; or a time.
        fragments: the number of fragments: the line is used evenly.
        overlap: the batches that a peer goes on with while a fragment is merged. Then it takes the merge, or waits for
            it.
        mixing: the share of its own parameters that a peer keeps at a merge; the authors take 0.5. None: it keeps all
            that it has trained meanwhile, which measured better (docs/why/merges.md).
        outer: makes the outer optimizer of each fragment.
        compression: the codec of the outer gradients, such as `Float16Compression()`; None for none.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    every: int | str
    fragments: int = 4
    overlap: int = 5
    mixing: float | None = None
    outer: Outer = field(default=nesterov, compare=False)
    compression: CompressionBase | None = field(default=None, compare=False, kw_only=True)
    merging: Merging = field(init=False, repr=False)

    def __post_init__(self) -> None:
        whole("overlap", self.overlap, most=MOST_STEPS)
        self._merge_by(
            every=self.every,
            outer=self.outer,
            fragments=self.fragments,
            overlap=self.overlap,
            mixing=self.mixing,
        )
