"""Local updates: a peer steps on its own gradients at once, and the swarm averages parameters instead of gradients.

A swarm epoch is a round of parameters here, each weighted by its peer's samples since the last one. So with plain SGD
and one batch of each peer in an epoch it equals averaging gradients. Between two rounds the peers' parameters differ.
A state's name says which average they began from. Statistics of the optimizer are each peer's own, but for those that
are averaged, too; so is what its steps change in the parameter groups (a count of steps, Prodigy's `d`).

Source: local SGD, https://arxiv.org/abs/1805.09767; `use_local_updates` of hivemind 1.1.12.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from shoal.averaging.allreduce.vector import Vector
from shoal.base.checks import flag, whole
from shoal.base.thread_state import forget_casts
from shoal.errors import ConfigError, is_out_of_memory
from shoal.protocol.wire import MAX_SAMPLES_OF_STEP
from shoal.strategies.pace import Pace, SamplesPace
from shoal.strategies.strategy import Inner, Terms
from shoal.train.gradient_sum import SampleCount
from shoal.train.inner import Scheduler
from shoal.train.optimizer_state import is_number
from shoal.train.pending import Pending
from shoal.train.training_state import TrainingState
from shoal.train.trial import first_statistics

__all__ = ["LocalTrainingState", "LocalUpdates"]


@dataclass(frozen=True)
class LocalUpdates:
    """A peer steps on its own gradients at once, and the parameters are averaged, once in an epoch.

    It sends the parameters once for `target_batch_size` samples of the swarm. Each peer weighs by its samples. Clip the
    gradients of each batch before `step()`. The codec of the parameters is `state_averaging_compression` of
    `shoal.Optimizer`.

    Args:
        target_batch_size: samples of the whole swarm between two averages.
        statistics: names of statistics of the optimizer, of the shape of their parameters, that are averaged with them,
            such as `"exp_avg_sq"`, in any order. The others stay each peer's own.
        waits: the trainer waits for each average, and goes on from it: a batch that was under way is dropped. Else it
            goes on while parameters are averaged, and keeps what it has changed meanwhile.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    target_batch_size: int | None = None
    statistics: Sequence[str] = field(default=(), kw_only=True)
    waits: bool = field(default=False, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        target, names = self.target_batch_size, self.statistics
        if target is not None:
            object.__setattr__(self, "target_batch_size", whole("target_batch_size", target, most=MAX_SAMPLES_OF_STEP))
        if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(e, str) for e in names):
            raise ConfigError(f"statistics must be a list of names such as 'exp_avg_sq', got {names!r:.80}")
        object.__setattr__(self, "statistics", tuple(sorted(names)))
        object.__setattr__(self, "waits", flag("waits", self.waits))

    @property
    def terms(self) -> Terms:
        return Terms(steps_alone=True, goes_on=not self.waits, counted_in=f"epochs of {self.target_batch_size} samples")

    def compared(self, training: TrainingState) -> Mapping[str, str]:
        return {"target_batch_size": f"{self.target_batch_size}"}

    def training(self, inner: Inner) -> TrainingState:
        """The peer steps from each of its batches, and what the round averages is parameters.

        Raises:
            ConfigError: the optimizer keeps no statistics of these names.
        """
        about = inner.optimizer, inner.scheduler, inner.extra_tensors
        return LocalTrainingState(*about, average_opt_statistics=self.statistics, waits=self.waits)

    def pace(self, fragment: int = 0, first: Pace | None = None) -> Pace:
        """Peers meet when they have this many samples together.

        Raises:
            ConfigError: `target_batch_size` is missing.
        """
        return SamplesPace(self.target_batch_size)


class _LocalSteps(SampleCount):
    """Counts samples whose gradients are stepped from at once."""

    def __init__(self, step: Callable[[], bool]) -> None:
        super().__init__([])
        self._step = step

    def add(self, numbers: Sequence[int], samples: int, norm: float = 0.0) -> None:
        if self._step():
            self.count(samples)


class _Statistic(NamedTuple):
    """A statistic of the optimizer that is averaged: its copy is what a round has, as the optimizer may replace it."""

    parameter: torch.Tensor
    name: str
    copy: torch.Tensor

    def kept(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """The statistic itself; None before this peer's first step."""
        value = optimizer.state[self.parameter].get(self.name) if self.parameter in optimizer.state else None
        return value if isinstance(value, torch.Tensor) else None


class LocalTrainingState(TrainingState):
    """Parameters, optimizer and schedule of one peer that takes its own steps.

    Args:
        optimizer: over the parameters that are trained.
        scheduler: stepped once for each swarm epoch; None for none.
        extra_tensors: part of the state and of each average.
        average_opt_statistics: names of statistics of the optimizer, of the shape of their parameters, that are
            averaged with them. A peer that has taken no step yet has none, and no weight.
        waits: the trainer waits for each round, and goes on from the average: a batch that was under way when this peer
            gave to the round is not stepped from, and does not count.
        options: for `TrainingState`.

    If it does not wait, what it trains while a round goes on is not lost: the difference between the parameters when
    the round began and the average is added to them.
    """

    steps_alone = averages_parameters = True
    _loses = False  # the last batch was computed at parameters that are no more, or soon will be
    _stepped = True  # the last batch has moved the parameters, where its step was tried
    _gave_others = False  # the last round was given other values than those that are trained

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        *,
        average_opt_statistics: Sequence[str] = (),
        waits: bool = False,
        **options: Any,
    ) -> None:
        self._waits, self.averaged_statistics = waits, tuple(average_opt_statistics)
        self._move_to_average: Callable[[], None] | None = None
        sums = [_LocalSteps(self._step_locally) for _ in range(2)]
        super().__init__(optimizer, scheduler, extra_tensors, **options, pending=Pending(*sums))
        self._statistics = list(_statistics(optimizer, self.trained, average_opt_statistics))
        self.state_tensors = (*self.state_tensors, *(each.copy for each in self._statistics))

    @property
    def _waits_for_round(self) -> bool:
        """Whether this peer has given to a round, and goes on from its average."""
        return self._waits and self.pending.in_round

    @property
    def comes_too_late(self) -> bool:
        """Whether the last batch came too late to count: this peer had given to a round that it waits for."""
        return self._loses

    def accumulate(self, batch_size: int) -> bool:
        """Step on the gradients in `.grad`.

        Returns:
            Whether they count: not if they are not finite, or came after this peer had given to a round that it waits
            for: they are not stepped from then; nor if the step raised (see `raised`) before it had moved anything.

        Raises:
            ConfigError: see `TrainingState.accumulate`.
        """
        self._loses, self._stepped, self.raised = False, True, None
        return super().accumulate(batch_size) and self._stepped and not self._loses

    def _step_locally(self) -> bool:
        if self._waits_for_round:
            self._loses = True
            return False
        own = [parameter.grad for parameter in self.parameters]
        before = [dict(group) for group in self.optimizer.param_groups]
        try:
            for parameter in self.tensors.frozen:
                parameter.grad = None
            for parameter in self.trained:
                if parameter.grad is not None:  # of sparse ones come sparse statistics, which newcomers cannot be given
                    parameter.grad = parameter.grad.to_dense()
            self.stepper.step()
            for group, was in zip(self.optimizer.param_groups, before, strict=True):
                self.kept.own_options(name for name in group if _changed(group[name], was.get(name)))
        except BaseException as error:  # whoever gave the batch counts it first, and raises this then
            # A hook before it may have raised, when nothing has moved, or one after it, when all has.
            self._stepped = self.weights.were_written_to
            if is_out_of_memory(error) and not self._stepped:
                raise
            self.raised = error
        finally:
            forget_casts()
            for parameter, gradient in zip(self.parameters, own, strict=True):
                parameter.grad = gradient
            self.weights.note()
        return self._stepped

    def contribute(self) -> tuple[float, float]:
        """The parameters go into a round now, as they are: see `TrainingState.contribute`.

        They have no weight while other values stand in their place, for an evaluation.
        """
        weight, _ = super().contribute()
        self._gave_others = self.weights.are_in_eval_mode or self.weights.are_changed_unusually
        for each in self._statistics:
            if (kept := each.kept(self.optimizer)) is not None:
                each.copy.copy_(kept)
        return (0.0 if self._gave_others else weight), 1.0

    def use_average(self, vector: Vector) -> None:
        """Let the next step be the one to the average. The trainer may be in the middle of a batch now."""
        # What was trained since is the difference to what was given: it is not known where that was something else.
        self._move_to_average = vector.overwrite if self._gave_others else partial(vector.apply, 1.0)
        self.use_accumulators()

    def _step_from_average(self, unused: Collection[int], cores: int) -> None:
        self.epoch += 1  # first: what is done to an average half way is not done again
        if self._move_to_average is not None:
            self._move_to_average()
        for each in self._statistics:
            if (kept := each.kept(self.optimizer)) is not None:
                kept.copy_(each.copy)

    def _after_step(self, own: Sequence[torch.Tensor | None], *, taken: bool) -> None:
        self._move_to_average = None
        super()._after_step(own, taken=taken)

    def discard(self) -> None:
        """Forget which samples were counted: they are of a state that is not ours any more."""
        self._move_to_average = None
        super().discard()


def _changed(now: object, was: object) -> bool:
    """Whether a step has set this option. Tensors are not compared: that would wait for the device."""
    return is_number(now) and now is not was and (isinstance(now, torch.Tensor) or now != was)


def _statistics(
    optimizer: torch.optim.Optimizer, trained: Sequence[torch.Tensor], names: Sequence[str]
) -> Iterator[_Statistic]:
    """The statistics of these names.

    Raises:
        ConfigError: the optimizer does not keep one of them for each trained parameter, in its shape.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shaped: dict[torch.dtype, dict[str, torch.dtype]] = {}  # by the dtype of their parameters
    for number, entry in first_statistics(optimizer) if names else ():
        tensors = {name: value for name, value in entry.items() if isinstance(value, torch.Tensor)}
        parameter = parameters[number]
        fits = {name: value.dtype for name, value in tensors.items() if value.dim() == parameter.dim()}
        known = shaped.setdefault(parameter.dtype, fits)
        shaped[parameter.dtype] = {name: dtype for name, dtype in known.items() if name in fits}
    for name in names:
        for parameter in trained:
            if name not in (there := shaped.get(parameter.dtype, {})):
                have = ", ".join(sorted(there)) or "none"
                raise ConfigError(
                    f"average_opt_statistics: {type(optimizer).__name__} keeps no statistic {name!r} of the shape of "
                    f"each parameter; such are: {have}"
                )
            yield _Statistic(parameter, name, torch.zeros_like(parameter, dtype=there[name], requires_grad=False))
