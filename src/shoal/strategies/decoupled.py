"""Decoupled DiLoCo: a quorum merges, and nobody waits. Source: https://arxiv.org/abs/2604.21428."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.base.checks import whole
from shoal.compression import CompressionBase
from shoal.strategies.merges import Merges
from shoal.strategies.merging import MOST_QUORUM, Merging, Outer, nesterov

__all__ = ["Decoupled"]


@dataclass(frozen=True)
class Decoupled(Merges):
    """The model is merged in fragments, by the peers that are there, and nobody waits for anybody.

    A fragment is merged when `quorum` peers have trained for long enough. The others give what they have by then. Those
    that come too late give it to the next merge.

    Args:
        every: the batches of a peer after which it is ready for the next merge of a fragment; or a time.
        fragments: the number of fragments.
        quorum: of peers that a merge takes.
        outer: makes the outer optimizer of each fragment.
        compression: the codec of the outer gradients, such as `Float16Compression()`; None for none.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    every: int | str
    fragments: int = 4
    quorum: int = 2
    outer: Outer = field(default=nesterov, compare=False)
    compression: CompressionBase | None = field(default=None, compare=False, kw_only=True)
    merging: Merging = field(init=False, repr=False)

    def __post_init__(self) -> None:
        whole("quorum", self.quorum, most=MOST_QUORUM)
        self._merge_by(every=self.every, outer=self.outer, fragments=self.fragments, overlap=None, quorum=self.quorum)
