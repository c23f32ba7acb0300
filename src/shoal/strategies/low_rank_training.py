"""The state of a peer whose gradients are averaged as factors of low rank: see `low_rank`.

The bases are part of the state, beside the extra tensors: newcomers download them, and checkpoints have them. Members
of one state have the same ones, and only those meet.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from shoal.strategies.low_rank import NO_FEEDBACK, LowRank
from shoal.train.inner import Scheduler
from shoal.train.offload import Offload
from shoal.train.training_state import TrainingState

__all__ = ["LowRankTrainingState"]


class LowRankTrainingState(TrainingState):
    """Parameters, optimizer and schedule of one peer. Further arguments as for `TrainingState`.

    Args:
        optimizer: over the parameters that are trained.
        scheduler: stepped once for each swarm epoch; None for none.
        extra_tensors: part of the state.
        rank: of the factors.
        min_compression_ratio: see `LowRank`.
        offload: see `TrainingState`.
        options: for `TrainingState`.
    """

    no_feedback = NO_FEEDBACK

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        *,
        rank: int,
        min_compression_ratio: float = 0.5,
        offload: Offload | None = None,
        **options: Any,
    ) -> None:
        trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        device = None if offload is None else torch.device("cpu")
        self._low = LowRank(trained, rank=rank, min_compression_ratio=min_compression_ratio, device=device)
        super().__init__(optimizer, scheduler, (*extra_tensors, *self._low.bases), offload=offload, **options)
        bases = {id(each) for each in self._low.bases}
        self.state_tensors = tuple(each for each in self.state_tensors if id(each) not in bases)
        self.averaged, self.averaged_for = self._low.tensors(self.accumulators), self._low.owners
        self.averaged_as = f"factors of rank {rank} that save {min_compression_ratio:g}"

    def contribute(self) -> tuple[float, float]:
        """The factors go into a round now: see `TrainingState.contribute`."""
        weight_and_factor = super().contribute()
        self._low.shrink(self.accumulators)
        return weight_and_factor

    def counted(self) -> None:
        """The factors are in the average: what they have lost goes into the next ones."""
        self._low.counted()

    def use_accumulators(self) -> None:
        """The factors hold an average now, and the accumulators the gradients that follow from it."""
        self._low.expand(self.accumulators, self.epoch)
        super().use_accumulators()

    def _step_from_average(self, unused: Collection[int], cores: int) -> None:
        super()._step_from_average(unused, cores)
        self._low.advance()

    def discard(self) -> None:
        """Forget the gradients, and what the factors have lost of earlier ones: they are of another state."""
        self._low.forget()
        super().discard()
