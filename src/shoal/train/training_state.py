"""The state that one peer trains: parameters, optimizer, schedule, and the gradients since the last step.

No network here. Gradients are summed, weighted by samples / `unit`, into `accumulators` (in float32 at least: in 16
bits a sum of hundreds takes nothing more); what is averaged with the swarm is their mean. A batch whose gradients are
not finite, or too large to be summed, is left out. The step is taken from the swarm's average by the ordinary torch
optimizer. Making this object changes no parameter and no optimizer state.

The shared state is everything that another peer needs to go on from here: parameters, extra tensors, the tensors of the
optimizer, and plain values for the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shoal.averaging.allreduce.vector import Vector
from shoal.base.names import known_as
from shoal.base.thread_state import forget_casts
from shoal.errors import ConfigError, StateUnavailable, is_out_of_memory
from shoal.protocol.wire import LAST_EPOCH_TAKEN, encode
from shoal.train.finite import norm_of, not_finite
from shoal.train.gradient_sum import GradientSum
from shoal.train.inner import Scheduler
from shoal.train.offload import Offload
from shoal.train.optimizer_state import AnyTensor, OptimizerState, Prepared, is_number
from shoal.train.options import Options
from shoal.train.pending import Pending
from shoal.train.run_schedule import RunSchedule
from shoal.train.shared_tensors import SharedTensors, digest_of_tensors
from shoal.train.stepper import Stepper
from shoal.train.trained_weights import TrainedWeights

__all__ = ["PreparedState", "TrainingState", "fingerprint_of"]


class PreparedState(NamedTuple):
    """A state that was looked at whole, and can be taken over.

    Attributes:
        epoch: swarm steps that went into it.
        scheduled: the count of its schedule.
        tensors: parameters and extra tensors.
        optimizer: options and statistics, where they belong.
    """

    epoch: int
    scheduled: int
    tensors: Sequence[torch.Tensor]
    optimizer: Prepared


def fingerprint_of(fragments: Sequence[TrainingState]) -> bytes:
    """A digest of what all these fragments hold; of one, its own."""
    digests = [fragment.fingerprint() for fragment in fragments]
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


class TrainingState:
    """Parameters, optimizer and schedule of one peer.

    Args:
        optimizer: over the parameters that are trained.
        scheduler: stepped once for each swarm epoch; None for none.
        extra_tensors: part of the state and of state averaging, beside the parameters (batch norm statistics).
        unit: samples whose gradients count as one: about as many as are accumulated, so that sums do not overflow.
        late: whether gradients that come while a round is under way, or while its average waits for the step, go into
            the next step. They were computed at the parameters before this one. Otherwise they are dropped. The next
            sum takes as much memory as the accumulators.
        max_grad_norm: the average is clipped to this norm before the step; None: it is not.
        offload: lends the trained parameters host memory for the step; the sums of gradients are on the CPU then, too.
            None: the step is taken where the parameters are.
        pending: for what is trained, if it is no sum of gradients as `unit` and `late` say.

    Attributes:
        optimizer: as given.
        parameters: of it.
        trained: those that require a gradient.
        extra_tensors: as given.
        epoch: swarm steps that went into the parameters.
        tensors: that all peers share: parameters and extra tensors.
        weights: to train with, wherever they are, and what else has changed them.
        pending: what was trained, and is in no step.
        schedule: of the run, and the rates that are in force.
        kept: what the optimizer keeps: options and statistics.
        stepper: takes its steps; says where and how.
        max_grad_norm: as given.
        steps_alone: whether each batch moves the parameters of this peer alone, until the next average of them.
        averages_parameters: whether peers average the parameters themselves, and no gradients.
        averaged_statistics: names of statistics of the optimizer that are averaged with them.
        keeps_anchor: whether the state is kept beside the parameters, which each peer moves alone (see `outer`).
        no_feedback: says why a codec with feedback does not go with that, and what to do; empty if it does.
        last_epoch_taken: no state of a later epoch is taken over from others: the schedule is moved up to it, step by
            step.
        accumulators: one for each trained parameter, on the CPU or its device: sum of gradient x samples / unit.
        averaged: the tensors that a round of gradients averages: the accumulators, or what stands for them.
        averaged_for: for each of these, the number of the trained parameter that it is about.
        averaged_as: says in words what is averaged: the same on all peers.
        dtypes: of the trained parameters, as the model has them.
        state_tensors: what state averaging averages.
        raised: the error (or interrupt) of the last batch's own step, where each batch is stepped from; None if there
            was none. The values that the step has moved count. So the caller counts the batch, and then raises this.
        broken: says which trained parameter was not finite then, since when, and what to do; None if all were finite.
        step_error: the error that the optimizer's step raised, if the last one did; else None.
        whole: whether the last change that was begun here was taken to its end.
    """

    steps_alone = averages_parameters = keeps_anchor = False
    averaged_statistics: Sequence[str] = ()
    no_feedback = ""
    raised: BaseException | None = None
    last_epoch_taken = LAST_EPOCH_TAKEN

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        *,
        unit: int = 1,
        late: bool = False,
        max_grad_norm: float | None = None,
        offload: Offload | None = None,
        pending: Pending | None = None,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.optimizer, self.kept = optimizer, OptimizerState(optimizer)
        self.stepper = Stepper(optimizer, self.kept, offload)
        self.schedule = RunSchedule(optimizer, scheduler, self.stepper)
        self.tensors = SharedTensors(optimizer, extra_tensors)
        self.parameters, self.trained = self.tensors.parameters, self.tensors.trained
        self.extra_tensors, self.state_tensors = self.tensors.extra, self.tensors.averaged
        self.weights = TrainedWeights(optimizer, self.parameters, self.stepper)
        if pending is None:
            device = torch.device("cpu") if self.stepper.on_host else None
            sums = [GradientSum(self.trained, unit, device) for _ in range(2 if late else 1)]
            pending = Pending(*sums)
        self.pending, self.accumulators = pending, pending.total.tensors
        self.averaged: Sequence[torch.Tensor] = self.accumulators
        self.averaged_for: Sequence[int] = range(len(self.trained))
        self.dtypes = [each.dtype for each in self.trained]
        self.averaged_as = "whole"
        self.broken: str | None = None
        self.step_error: str | None = None
        self.epoch, self.whole = 0, True
        self._ended: tuple[bytes, list[torch.Tensor]] | None = None  # see `end`

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A step, or an average, changes the parameters in this block. `whole`: it was taken to its end."""
        self.whole = False
        self.weights.forget()
        try:
            yield
            self.whole = True
        finally:
            self.weights.note()

    def set_epoch(self, epoch: int) -> None:
        """The state is of this epoch, whatever was loaded."""
        self.epoch = epoch

    @property
    def model_epoch(self) -> int:
        """The swarm steps that went into all parameters of the model."""
        return min([fragment.epoch for fragment in self.local.fragments])  # a list: each batch asks

    @property
    def local(self) -> TrainingState:
        """The parameters that this peer's batches are computed with: this object, unless peers merge (see `outer`)."""
        return self

    @property
    def fragments(self) -> Sequence[TrainingState]:
        """The states that are averaged each by itself, in a chain of its own: this one, unless the model is divided."""
        return [self]

    @property
    def strays(self) -> bool:
        """Whether the parameters may be others than the state. Any thread may ask."""
        return False

    def begin_anew(self) -> None:
        """Let the state be what the parameters are: other weights were loaded into the model (under the lock)."""

    def taken_over(self) -> None:
        """The states of all fragments were taken over, to go on from there (under the lock)."""

    def never_averaged(self, batches: int) -> str | None:
        """Says why nothing came of the batches of a peer that leaves before the first average; None: nothing to say."""
        return None

    def why_dropped(self) -> str:
        """Says why batches go into no step, and what to do."""
        if self.pending.late is not None:
            return "the states that it was for were over. Give this peer smaller batches, or raise target_batch_size"
        return (
            "a batch that is under way when a round begins is dropped. Raise target_batch_size, so that an epoch has "
            'more batches; or give late="next", with which it counts one step late (docs/how-to/late-batches.md)'
        )

    def ends_at(self, epoch: int | None) -> None:
        """The run ends at this epoch, as far as it is known; None: nobody knows yet. Any thread may say so."""

    @property
    def batches(self) -> int:
        """Batches that were trained since the last merge; 0 where batches only accumulate gradients."""
        return 0

    @property
    def waits(self) -> bool:
        """Whether the trainer waits for the round that is under way though others go on."""
        return False

    @property
    def holds_back(self) -> bool:
        """Whether the average that is here is to be taken at a later batch."""
        return False

    def places(self) -> list[torch.Tensor]:
        """The tensors of the model that `tensors` belong to."""
        return self.tensors.all

    @property
    def comes_too_late(self) -> bool:
        """Whether a batch comes too late now to count: the average of its step is here, and not stepped from yet."""
        return self.pending.holds_average

    @property
    def averages_extras(self) -> bool:
        """Whether there are extra tensors that state averaging averages."""
        return any(tensor is extra for tensor in self.state_tensors for extra in self.extra_tensors)

    # ---------------------------------------------------------------------------------------------------- gradients

    def accumulate(self, batch_size: int) -> bool:
        """Add the gradients in `.grad`, the mean over `batch_size` samples; parameters without one count as 0.

        Returns:
            Whether they count: not if there are none, if they cannot be summed, or if the swarm's average for this
            epoch is here already and they are not kept for the next.

        Raises:
            ConfigError: other parameters are to be trained than when the run began, or an option is of no use.
        """
        if self.weights.are_in_eval_mode:
            raise ConfigError("the optimizer is in eval mode: call train() of the shoal.Optimizer before step()")
        self.tensors.check()
        self.kept.check_options()
        self.weights.look(self.model_epoch, each_steps=self.steps_alone)
        left_out = self.pending.left_out
        counts = self.pending.add(self.trained, batch_size)
        if self.pending.left_out != left_out:
            self.broken = self._why_broken()
        return counts

    def _why_broken(self) -> str | None:
        values = [parameter.detach() for parameter in self.trained]
        if (index := not_finite(values)) is None:
            return None
        parameter, dtype = self.trained[index], str(values[index].dtype).removeprefix("torch.")
        what = (
            f"trained parameter {known_as(parameter, index)} ({dtype}) is not finite, so its gradients are not either, "
            "and no batch counts"
        )
        if self.epoch == 0:
            return f"{what}. No step was taken yet: look at how the model was made or loaded"
        made = "The optimizer's own step made it so (it is taken from finite gradients only)"
        do = "Lower the learning rate"
        groups = self.optimizer.param_groups
        eps: Any = next(group.get("eps") for group in groups if any(each is parameter for each in group["params"]))
        if is_number(eps) and float(eps) > 0 and not torch.tensor(float(eps), dtype=parameter.dtype, device="cpu"):
            made += f": its eps of {float(eps):g} is 0 in {dtype}, so {type(self.optimizer).__name__} divides by 0"
            do = "Give eps=1e-4"
        if parameter.itemsize < torch.float32.itemsize:
            do += ", or keep the parameters in float32 (torch.autocast computes in 16 bits)"
        return f"{what}. {made}. {do}, and begin from a finite state"

    def contribute(self) -> tuple[float, float]:
        """The accumulators go into a round now: weight of their mean, and the factor that makes it from the sum.

        From here until the round's end, gradients that come are late: see `late` of the constructor.
        """
        return self.pending.give()

    def counted(self) -> None:
        """What `contribute` has given is in the average of its round."""

    def given_is_in(self) -> None:
        """What `contribute` has given is in the state that is taken over next (under the lock)."""

    def unfit(self) -> int | None:
        """The trained parameter whose accumulator cannot be averaged; None if all can. Stricter than a round is."""
        return self.pending.total.unfit()

    @property
    def is_own_mean(self) -> bool:
        """Whether the accumulators hold this peer's own mean as they are, so that `use_own_mean` computes nothing."""
        return self.averaged is self.accumulators and self.pending.samples == self.pending.total.unit

    def use_own_mean(self) -> None:
        """Make the accumulators the gradient to step from: this peer's own mean."""
        _, factor = self.contribute()
        if factor not in (0.0, 1.0):
            with torch.no_grad():
                torch._foreach_mul_(list(self.averaged), factor)
        self.use_accumulators()

    def use_accumulators(self) -> None:
        """The accumulators hold the swarm's average now: it is what the next step is taken from."""
        self.pending.average_came()

    def use_average(self, vector: Vector) -> None:
        """Let the next step be taken from the average of a round of the `averaged` tensors."""
        vector.overwrite()
        self.use_accumulators()

    def discard(self) -> None:
        """Forget the accumulated gradients, the late ones too: they are of a state that is not ours any more."""
        self.pending.forget()

    def end(self, state: bytes) -> None:
        """The run is over: extra tensors stay as they are at this state (trainer, under the lock).

        A loop computes a batch for each `step()`, and each one moves batch norm statistics.
        """
        if self._ended is None or self._ended[0] != state:
            self._ended = state, [extra.detach().clone() for extra in self.extra_tensors]
            return
        with torch.no_grad():
            for extra, kept in zip(self.extra_tensors, self._ended[1], strict=True):
                extra.copy_(kept)

    def _after_step(self, own: Sequence[torch.Tensor | None], *, taken: bool) -> None:
        """Give the user's gradients back. If the step was taken, the late ones are the first of the next.

        It can be called again if it was interrupted.
        """
        self.stepper.offload.back()
        for parameter, gradient in zip(self.parameters, own, strict=True):
            parameter.grad = gradient
        if self.step_error is not None:
            self.discard()
        elif taken and self.pending.holds_average:
            self.pending.stepped()

    def step(self, options: Options | None = None, unused: Collection[int] | None = None, cores: int = 0) -> None:
        """Take the optimizer step from the average that is held, and move the schedule. `.grad` stays the user's.

        It may be interrupted: as long as the optimizer has not begun, nothing has changed, and it can be called again.
        From then on it is over: the average is forgotten, and the epoch counted. If the optimizer raises, the average
        is forgotten, too, but the epoch does not count. Want of memory before the optimizer has begun is raised like an
        interrupt.

        Args:
            options: of all who take this step; they stay in the parameter groups. None: what the groups hold.
            unused: the trained parameters that nobody had a gradient of: they stay as torch leaves those without one.
                None: those without one here.
            cores: that the optimizer uses, so that all round alike; 0: those of the trainer's thread.
        """
        assert self.pending.holds_average
        self.schedule.put_back()
        if unused is None:
            unused = self.pending.total.lacking
        own = [parameter.grad for parameter in self.parameters]
        before, self.step_error = self.epoch, None
        with self.changing():
            try:
                if options is not None:
                    self.kept.apply(options)
                self._step_from_average(unused, cores)
            except Exception as error:
                if self.epoch != before or not is_out_of_memory(error):
                    self.epoch, self.step_error = before, f"{type(error).__name__}: {error}"
                raise
            finally:
                try:
                    self._after_step(own, taken=self.epoch != before)
                finally:
                    self._after_step(own, taken=self.epoch != before)  # an interrupt may have come in between
            self.schedule.stepped()

    def _step_from_average(self, unused: Collection[int], cores: int) -> None:
        for parameter in self.tensors.frozen:
            parameter.grad = None
        self.stepper.offload.lend()
        for parameter, average in zip(self.trained, self.accumulators, strict=True):
            parameter.grad = _as_gradient(average, parameter.dtype).to(parameter.device)  # it may have been moved since
        for index in unused:
            # A gradient that came after its peer had joined the round is in the average.
            if index < len(self.trained) and not self.accumulators[index].count_nonzero():
                self.trained[index].grad = None
        self.tensors.look_for_frozen(self.pending.total.had_gradient)
        clip = 1.0  # as `torch.nn.utils.clip_grad_norm_` has it
        if self.max_grad_norm is not None:
            clip = self.max_grad_norm / (norm_of(self.accumulators) + 1e-6)
        self.epoch += 1
        if clip < 1:
            torch._foreach_mul_([grad for each in self.trained if (grad := each.grad) is not None], clip)
        self.stepper.step(cores)

    def options(self) -> Options:
        """The options that this peer proposes for the next step: what its parameter groups hold."""
        self.schedule.put_back()
        return self.kept.options()

    # ---------------------------------------------------------------------------------------------------- the state

    def fingerprint(self) -> bytes:
        """BLAKE3 over all parameters and extra tensors, and over what the optimizer keeps if it has taken steps."""
        values, tensors = self.export()
        if self.optimizer.state:
            return digest_of_tensors(tensors, encode([values["optimizer"], values["scheduled"]]))
        return digest_of_tensors(tensors[: values["fixed"]])  # rates that are tensors are settings

    def fingerprint_of_model(self) -> bytes:
        """A digest of what all fragments of the model hold; empty if there is only one."""
        return b""

    def export(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """All that another peer needs: plain values, and tensors by reference (hold the lock while they are read)."""
        self.schedule.put_back()
        tensors = self.weights.now()
        tensors += [extra.detach() for extra in self.extra_tensors]
        values = self.kept.export(tensors)
        return {
            "epoch": self.epoch,
            "scheduled": self.schedule.count,
            "fixed": len(self.tensors.all),
            "optimizer": values,
        }, tensors

    def called(self, position: int) -> str:
        """The tensor of this number in `export`, for people."""
        fixed = self.tensors.all
        if position < len(fixed):
            return f"tensor {known_as(fixed[position], position)} of the state"
        return f"{self.kept.called(position - len(fixed))} in the state"

    def check(self, values: Any, tensors: Sequence[AnyTensor]) -> str | None:
        """The reason why an offered state cannot be taken over; None if none is seen before its values are here.

        Args:
            values: what `export` of another peer gave.
            tensors: what its tensors look like.
        """
        try:
            self._check_counts(values, tensors)
            self.kept.check(values["optimizer"], tensors, len(self.tensors.all))
        except Exception as error:  # noqa: BLE001 (any error is the peer's fault)
            return str(error) or type(error).__name__
        return None

    def why_not(self, options: Options) -> str | None:
        """As `OptimizerState.why_not`, in any thread."""
        with self.stepper.thread.in_force():
            return self.kept.why_not(options)

    def prepare(self, values: Any, tensors: Sequence[torch.Tensor]) -> PreparedState:
        """Look at a whole state that another peer exported; nothing is changed.

        Args:
            values: as `export` gave them.
            tensors: new ones: they are kept, not copied, where that is possible.

        Raises:
            StateUnavailable: it does not fit this model or this optimizer, or no step can be taken from it.
        """
        try:
            epoch, scheduled = self._check_counts(values, tensors)
            fixed = len(self.tensors.all)
            with self.stepper.at_work():
                optimizer = self.kept.prepare(values["optimizer"], tensors, fixed)
        except Exception as error:
            raise StateUnavailable(f"the state does not fit here: {error}") from error
        return PreparedState(epoch, scheduled, tensors[:fixed], optimizer)

    def take_over(self, prepared: PreparedState, *, follows: bool = False) -> None:
        """Take over the prepared state. Only the schedule can fail; then it says so and stays.

        Between `evaluate` and `train`, the parameters are those to evaluate with of the new state afterwards.

        Args:
            prepared: as `prepare` gave it.
            follows: whether one step led to it from the state here: then a peer that merges keeps what it has trained.
        """
        with self.weights.in_place():
            self.weights.forget()
            with torch.no_grad():
                for mine, theirs in zip(self.tensors.all, prepared.tensors, strict=True):
                    mine.copy_(theirs)
            self.kept.switch(prepared.optimizer)
            forget_casts()
            self.weights.note()
        self.resume(prepared.epoch, prepared.scheduled)

    def load(self, values: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Take over a state that another peer exported: all of it, or nothing. See `prepare`.

        Raises:
            StateUnavailable: it does not fit here; nothing was changed.
        """
        self.take_over(self.prepare(values, tensors))

    def _check_counts(self, values: Any, tensors: Sequence[AnyTensor]) -> tuple[int, int]:
        epoch, scheduled = values["epoch"], values["scheduled"]
        for what, count in (("an epoch", epoch), ("a schedule after a number of steps", scheduled)):
            if type(count) is not int or not 0 <= count <= LAST_EPOCH_TAKEN:
                raise ValueError(f"{what} of {count!r:.80}")
        self.tensors.check_offered(values["fixed"], tensors)
        return epoch, scheduled

    def resume(self, epoch: int, scheduled: int) -> None:
        """Go on from this epoch, with the schedule at this count, and the learning rates that the optimizer has now.

        A schedule that fails on the way says so (`RunSchedule.error`); it raises nothing.
        """
        self.epoch = epoch
        self.weights.changes.forget()
        self.schedule.resume(scheduled)
        self.discard()


def _as_gradient(average: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if average.dtype is dtype:
        return average
    largest = torch.finfo(dtype).max
    return average.clamp(-largest, largest).to(dtype)
