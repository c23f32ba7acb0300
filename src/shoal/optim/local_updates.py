"""Local updates: a peer steps on its own gradients at once, and the swarm averages parameters instead of gradients.

A swarm epoch is a round of parameters here, each weighted by its peer's samples since the last one. So with plain SGD
and one batch of each peer in an epoch it equals averaging gradients. Between two rounds the peers' parameters differ.
A state's name says which average they began from. Statistics of the optimizer are each peer's own.

Source: local SGD, https://arxiv.org/abs/1805.09767; `use_local_updates` of hivemind 1.1.12.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from shoal.allreduce.vector import Vector
from shoal.optim.gradient_sum import GradientSum
from shoal.optim.inner import Scheduler
from shoal.optim.training_state import TrainingState

__all__ = ["LocalTrainingState"]


class _LocalSteps(GradientSum):
    """Counts samples where nothing is summed: the gradients of each batch are stepped from at once."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__([], 1)
        self._step = step

    def add(self, given: Sequence[int], samples: int) -> None:
        self._step()
        self.samples += samples

    def take_in(self, other: GradientSum) -> None:
        samples, other.samples = other.samples, 0
        self.samples += samples

    def clear(self) -> None:
        pass

    def forget(self) -> None:
        self.samples = 0


class LocalTrainingState(TrainingState):
    """Parameters, optimizer and schedule of one peer that takes its own steps. Arguments as for `TrainingState`.

    What it trains while a round goes on is not lost: the difference between the parameters when the round began and the
    average is added to them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        **options: Any,
    ) -> None:
        self._move_to_average: Callable[[], None] | None = None
        super().__init__(optimizer, scheduler, extra_tensors, **options, late=True)

    def _new_sum(self) -> GradientSum:
        return _LocalSteps(self._step_locally)

    def _step_locally(self) -> None:
        frozen = [parameter.grad for parameter in self._frozen]
        try:
            for parameter in self._frozen:
                parameter.grad = None
            self._step_watched()
        finally:
            self.stepping = False
            for parameter, gradient in zip(self._frozen, frozen, strict=True):
                parameter.grad = gradient

    def contribute(self) -> tuple[float, float]:
        """The parameters go into a round now, as they are: see `TrainingState.contribute`."""
        weight, _ = super().contribute()
        return weight, 1.0

    def unfit(self) -> int | None:
        """Nothing is summed that could be too large. A round leaves out parameters that are not finite."""
        return None

    def use_average(self, vector: Vector) -> None:
        """Let the next step be the one to the average. The trainer may be in the middle of a batch now."""
        self._move_to_average = partial(vector.apply, 1.0)
        self.use_accumulators()

    def _step_from_average(self, absent: Collection[int]) -> None:
        self.epoch += 1  # first: what is done to an average half way is not done again
        if self._move_to_average is not None:
            self._move_to_average()

    def _after_step(self, own: Sequence[torch.Tensor | None], *, taken: bool) -> None:
        self._move_to_average = None
        super()._after_step(own, taken=taken)

    def discard(self) -> None:
        """Forget which samples were counted: they are of a state that is not ours any more."""
        self._move_to_average = None
        super().discard()
