"""Synchronous training: gradients are averaged, and every peer takes the same step from the average.

Peers meet when all of them together have the samples of a step (`SamplesPace`). Each gives the mean of its gradients,
or factors of low rank that stand for it (`low_rank`), and steps from the average of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.base.checks import flag, positive, share, whole
from shoal.compression import CompressionBase
from shoal.errors import ConfigError
from shoal.protocol.wire import MAX_SAMPLES_OF_STEP
from shoal.runtime.arguments import codec_argument
from shoal.strategies.low_rank_training import LowRankTrainingState
from shoal.strategies.pace import Pace, SamplesPace
from shoal.strategies.strategy import Inner, Terms
from shoal.train.training_state import TrainingState

__all__ = ["LATE", "MOST_RANK", "Synchronous"]

LATE = "drop", "next", "overlap"
MOST_RANK = 1024


@dataclass(frozen=True)
class Synchronous:
    """Gradients are averaged, and all peers take the same steps. The default.

    Args:
        target_batch_size: samples of the whole swarm in one step.
        late: what becomes of a batch that is under way when a round begins. `"drop"`: it is lost, so that each step is
            made of gradients of the state before it. `"next"`: it goes into the next step, one step late, unless the
            swarm has taken several steps meanwhile. `"overlap"`: also `step` returns while gradients are averaged, and
            training goes on one step late; the next call after the round takes the swarm's step. The last two take as
            much memory as the gradients. Each peer may choose for itself.
        max_grad_norm: clip the averaged gradient to this norm, over all parameters, before the step; None: do not. The
            same on all peers. Each peer's own gradients stay as they are.
        low_rank: send the gradients of matrices as factors of this rank, the same on all peers: see
            docs/how-to/fewer-bytes.md. None sends them whole.
        min_compression_ratio: the least part of a parameter's numbers that factors must save; others are sent whole.
        offload: keep the optimizer's statistics and the sums of gradients on the CPU, and take the step there: the
            device holds the parameters and the gradients of one batch. It needs `params` and a function as `optimizer`.
            Each step copies the parameters to the CPU and back. Parameters keep their dtype. Each peer may choose for
            itself.
        compression: the codec of gradients; None sends them as wide as the parameters (they are summed in float32).

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    target_batch_size: int | None = None
    late: str = field(default="drop", kw_only=True, compare=False)
    max_grad_norm: float | None = field(default=None, kw_only=True)
    low_rank: int | None = field(default=None, kw_only=True)
    min_compression_ratio: float = field(default=0.5, kw_only=True)
    offload: bool = field(default=False, kw_only=True, compare=False)
    compression: CompressionBase | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        target, norm, rank = self.target_batch_size, self.max_grad_norm, self.low_rank
        if target is not None:
            object.__setattr__(self, "target_batch_size", whole("target_batch_size", target, most=MAX_SAMPLES_OF_STEP))
        if self.late not in LATE:
            raise ConfigError(f"late must be 'drop', 'next' or 'overlap', got {self.late!r:.80}")
        if norm is not None:
            object.__setattr__(self, "max_grad_norm", positive("max_grad_norm", norm))
        if rank is not None:
            object.__setattr__(self, "low_rank", whole("low_rank", rank, most=MOST_RANK))
        object.__setattr__(self, "min_compression_ratio", share("min_compression_ratio", self.min_compression_ratio))
        object.__setattr__(self, "offload", flag("offload", self.offload))
        codec_argument("compression", self.compression)

    @property
    def terms(self) -> Terms:
        return Terms(
            compression=self.compression,
            offload=self.offload,
            goes_on=self.late == "overlap",
            counted_in=f"epochs of {self.target_batch_size} samples",
        )

    def compared(self, training: TrainingState) -> Mapping[str, str]:
        return {"target_batch_size": f"{self.target_batch_size}"}

    def training(self, inner: Inner) -> TrainingState:
        options: dict[str, Any] = {
            "unit": self.target_batch_size or 1,
            "late": self.late != "drop",
            "max_grad_norm": self.max_grad_norm,
            "offload": inner.offload,
        }
        about = inner.optimizer, inner.scheduler, inner.extra_tensors
        if self.low_rank is None:
            return TrainingState(*about, **options)
        return LowRankTrainingState(
            *about, rank=self.low_rank, min_compression_ratio=self.min_compression_ratio, **options
        )

    def pace(self, fragment: int = 0, first: Pace | None = None) -> Pace:
        """Peers meet when they have this many samples together.

        Raises:
            ConfigError: `target_batch_size` is missing.
        """
        return SamplesPace(self.target_batch_size)
