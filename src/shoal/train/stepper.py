"""The steps of an optimizer, and what they leave behind that nobody else can be given."""

from __future__ import annotations

import torch

from shoal.errors import ConfigError
from shoal.train.optimizer_state import OptimizerState
from shoal.train.workplace import Workplace

__all__ = ["Stepper"]


class Stepper:
    """Takes the steps of one optimizer.

    Args:
        optimizer: that steps.
        kept: what it keeps.
        workplace: it steps as in the thread that is heeded there.

    Attributes:
        steps: that were begun here.
        is_stepping: whether the optimizer takes one of them now.
        kept_back: says what it keeps and newcomers cannot be given; None if nothing was seen.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kept: OptimizerState, workplace: Workplace) -> None:
        self._optimizer, self._kept, self._workplace = optimizer, kept, workplace
        self.steps, self.is_stepping = 0, False
        self.kept_back: str | None = None

    def step(self, cores: int = 0) -> None:
        """Let it step from the gradients in `.grad`. Look now and then, ever more rarely, what that leaves behind.

        Args:
            cores: that it uses; 0: those of the trainer's thread.
        """
        self.steps += 1
        state = self._workplace.thread
        state = state._replace(cores=cores or state.cores)
        before = None if self.steps & (self.steps - 1) else self._kept.outside()
        try:
            self.is_stepping = True
            with state.in_force():
                self._optimizer.step()
                more = None if before is None else self._kept.depends_on_more(before)
        finally:
            self.is_stepping = False
        if before is not None:
            try:
                self._kept.export([])
            except ConfigError as error:
                self.kept_back = str(error)
            else:
                self.kept_back = more or self.kept_back
