"""Where and how an optimizer steps: on the host or where the parameters are, and as in the trainer's own thread.

Its own code, and that of its schedule, computes so in whatever thread it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.base.thread_state import ThreadState, numerics_of
from shoal.errors import ConfigError
from shoal.train.offload import Offload
from shoal.train.optimizer_state import OptimizerState
from shoal.train.trial import mixes_values

__all__ = ["Stepper"]


class Stepper:
    """Takes the steps of one optimizer.

    Args:
        optimizer: that steps.
        kept: what it keeps.
        offload: lends the parameters host memory while it works; None: it works where they are.

    Attributes:
        on_host: whether steps are taken on the CPU, wherever the parameters are.
        offload: lends that memory, or does nothing.
        steps: that were begun here.
        is_stepping: whether the optimizer takes one of them now.
        kept_back: says what it keeps and newcomers cannot be given; None if nothing was seen.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kept: OptimizerState, offload: Offload | None) -> None:
        self._optimizer, self._kept = optimizer, kept
        self.on_host, self.offload = offload is not None, offload or Offload([])
        self._mixes = mixes_values(optimizer)
        self._beside: Stepper | None = None
        self.steps, self.is_stepping = 0, False
        self.kept_back: str | None = None
        self.compute_as_here()

    def compute_as_here(self) -> None:
        """All that works here computes with the settings of this thread from now on (trainer), in whatever thread."""
        self._as_in = ThreadState.here()

    def compute_as(self, other: Stepper) -> None:
        """Compute with the settings that the other one has at the time, but record no gradients."""
        self._beside = other

    @property
    def thread(self) -> ThreadState:
        """The state of the thread in which the trainer has called last."""
        return self._as_in if self._beside is None else self._beside.thread._replace(gradients=False)

    @property
    def cores(self) -> int:
        """The cores that steps use here, if their rounding depends on that; else 0."""
        return self.thread.cores if self._mixes else 0

    @property
    def numerics(self) -> str:
        """The settings beside the optimizer's options that its steps depend on here, in words."""
        return numerics_of(self.thread, mixes=self._mixes)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the optimizer's own code work in the block."""
        with self.offload.on_host(), self.thread.in_force():
            yield

    def step(self, cores: int = 0) -> None:
        """Step from the gradients in `.grad`. Look now and then, ever more rarely, what that leaves behind.

        Args:
            cores: that the optimizer uses; 0: those of the trainer's thread.
        """
        self.steps += 1
        state = self.thread
        if cores:
            state = state._replace(cores=cores)
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
