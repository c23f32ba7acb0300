"""`Merges`: a strategy of a way to merge. Those of shoal's own only say which way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.compression import CompressionBase
from shoal.runtime.arguments import codec_argument
from shoal.strategies.merge_pace import merge_pace
from shoal.strategies.merging import Merging
from shoal.strategies.outer import LocalSteps
from shoal.strategies.pace import Pace
from shoal.strategies.strategy import Inner, Terms
from shoal.train.options import OUTER, described
from shoal.train.training_state import TrainingState

__all__ = ["Merges"]


class Merges:
    """What all strategies that merge have in common. One of your own gives `merging`, as a field or a property.

    Attributes:
        merging: the way in which peers merge.
        compression: the codec of the outer gradients; None for none.
    """

    merging: Merging
    compression: CompressionBase | None = None

    def _merge_by(self, **merging: Any) -> None:
        """Set `merging`, of a frozen value that is being made, to a `Merging` of these arguments."""
        codec_argument("compression", self.compression)
        object.__setattr__(self, "merging", Merging(**merging))

    @property
    def terms(self) -> Terms:
        merging = self.merging
        return Terms(
            compression=self.compression,
            steps_alone=True,
            goes_on=not merging.waits,
            waits_for_nobody=merging.overlap is None,
            meets_rarely=True,
            quorum=merging.quorum or 0,
            epoch_batches=merging.steps,
            counted_in=f"merges, one every {merging.every}" if merging.steps is None else "this peer's batches",
        )

    def compared(self, training: TrainingState) -> Mapping[str, str]:
        """All but the outer optimizer in words, and that one with its options."""
        outer = training.fragments[0].optimizer
        return {"strategy": self.merging.text, OUTER: described(outer)}

    def training(self, inner: Inner) -> TrainingState:
        return LocalSteps(inner.optimizer, inner.scheduler, inner.extra_tensors, self.merging)

    def pace(self, fragment: int = 0, first: Pace | None = None) -> Pace:
        return merge_pace(self.merging, fragment, first)
