"""The state that one peer trains: parameters, optimizer, schedule, and the gradients since the last step.

No network here. Gradients are summed, weighted by samples / `unit`, into `accumulators` (in float32 at least: in 16
bits a sum of hundreds takes nothing more); what is averaged with the swarm is their mean. A batch whose gradients are
not finite, or too large to be summed, is left out. The step is taken from the swarm's average by the ordinary torch
optimizer. Making this object changes no parameter and no optimizer state.

The shared state is everything that another peer needs to go on from here: parameters, extra tensors, the tensors of the
optimizer, and plain values for the rest.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from blake3 import blake3

from shoal.averaging.allreduce.vector import Vector, check_tensors
from shoal.base.names import known_as
from shoal.base.thread_state import forget_casts
from shoal.compression import dtype_name, view_bytes
from shoal.errors import ConfigError, StateUnavailable
from shoal.protocol.wire import LAST_EPOCH_TAKEN, MAX_SAMPLES_TAKEN, MAX_TRAINED, encode
from shoal.train.finite import norm_of, not_finite
from shoal.train.gradient_sum import GradientSum, values_of
from shoal.train.inner import Scheduler
from shoal.train.offload import Offload
from shoal.train.optimizer_state import AnyTensor, OptimizerState, Prepared, is_number
from shoal.train.options import Options, apply, options_of
from shoal.train.pending import Pending
from shoal.train.run_schedule import RunSchedule
from shoal.train.trained_weights import TrainedWeights
from shoal.train.trial import blank_statistics, mixes_values
from shoal.train.workplace import Workplace

__all__ = ["PreparedState", "TrainingState", "digest_of", "fingerprint_of"]

_MOST_TENSORS, _MOST_STATISTICS = 1024, 32
"""A state from the network may have so many tensors, and so many more for each parameter and extra tensor here."""

_FROZEN_FOR = 3
"""Steps in a row in which others move what is frozen here. Peers may freeze it with some batches between them."""


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


def digest_of(tensors: Iterable[torch.Tensor], before: bytes = b"") -> bytes:
    """BLAKE3 over the bytes of all values, behind those that are given."""
    digest = blake3(before)
    for tensor in tensors:
        digest.update(view_bytes(tensor.detach().to("cpu").contiguous()))
    return bytes(digest.digest())


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
        raised: the error that the step of the last batch raised, if each batch is stepped from (or an interrupt); None
            if it did not.
            What it has moved counts: whoever gave the batch counts it first, and raises this then.
        broken: says which trained parameter was not finite then, since when, and what to do; None if all were finite.
        epoch: swarm steps that went into the parameters.
        pending: what was trained and is in no step.
        schedule: of the run, and the rates that are in force.
        workplace: where and how the optimizer steps.
        whole: whether the last one that was begun here was taken to its end.
        step_error: the error that the optimizer's step raised, if the last one did; else None.
        kept_back: says what the optimizer keeps and newcomers cannot be given; None if nothing was seen.
        frozen_here: says which trained parameter is frozen here only, so that the steps move it; None if none is.
        weights: that are trained, wherever they are, and what else has changed them.
        steps_alone: whether each batch moves the parameters of this peer alone, until the next average of them.
        averages_parameters: whether peers average the parameters themselves, and no gradients.
        averaged_statistics: names of statistics of the optimizer that are averaged with them.
        keeps_anchor: whether the state is kept beside the parameters, which each peer moves alone (see `outer`).
        steps_here: that the optimizer has begun here.
        stepping: whether the optimizer takes a step of the swarm now.
        own_options: names of options that stay this peer's own, whatever the others have.
        trained: the parameters that require a gradient.
        state_tensors: what state averaging averages: parameters and extra tensors of floating point, but for those
            extra tensors that are not finite from the beginning (masks).
        accumulators: one for each parameter, on the CPU or its device: sum of gradient x samples / unit.
        averaged: the tensors that a round of gradients averages: the accumulators, or what stands for them.
        averaged_for: for each of these, the number of the trained parameter that it is about.
        dtypes: of the trained parameters, as the model has them.
        averaged_as: says in words what is averaged: the same on all peers.
        no_feedback: says why a codec with feedback does not go with that, and what to do; empty if it does.
    """

    steps_alone = averages_parameters = keeps_anchor = False
    averaged_statistics: Sequence[str] = ()
    no_feedback = ""
    raised: BaseException | None = None

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
        self.workplace = Workplace(offload, mixes=mixes_values(optimizer))
        self.max_grad_norm = max_grad_norm
        self.optimizer, self._kept = optimizer, OptimizerState(optimizer)
        self.schedule = RunSchedule(optimizer, scheduler, self.workplace)
        self.extra_tensors = tuple(extra_tensors)
        self.parameters: tuple[torch.Tensor, ...] = tuple(
            parameter for group in optimizer.param_groups for parameter in group["params"]
        )
        trained = _trained(self.parameters)
        named = [
            (f"parameter {known_as(each, index)} of the optimizer", each) for index, each in enumerate(self.parameters)
        ]
        for index, each in enumerate(self.extra_tensors):
            name = known_as(each, "")
            named.append((f"extra_tensors[{index}]" + (f" ({name})" if name else ""), each))
        check_tensors([(name, each) for name, each in named if each.requires_grad or each.is_floating_point()])
        for name, each in named:
            try:
                dtype_name(each.dtype)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
        self.trained = trained
        self._frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        self.weights = TrainedWeights(optimizer, self.parameters, self.workplace)
        self._dtypes = [(parameter.dtype, parameter.shape) for parameter in self.parameters]
        if pending is None:
            device = torch.device("cpu") if self.workplace.on_host else None
            sums = [GradientSum(trained, unit, device) for _ in range(2 if late else 1)]
            pending = Pending(*sums)
        self.pending, self.accumulators = pending, pending.total.tensors
        self.averaged: Sequence[torch.Tensor] = self.accumulators
        self.averaged_for: Sequence[int] = range(len(trained))
        self.dtypes = [each.dtype for each in trained]
        self.averaged_as = "whole"
        # Tensors that are infinite when the run begins (a mask) stay as they are: they have no mean.
        fixed = [index for index, extra in enumerate(self.extra_tensors) if not bool(torch.isfinite(extra).all())]
        self.state_tensors = tuple(
            tensor
            for index, tensor in enumerate(self.describe(), -len(self.parameters))
            if tensor.dtype.is_floating_point and index not in fixed
        )
        self.steps_here = 0
        self.own_options: set[str] = set()
        self.broken: str | None = None
        self.step_error: str | None = None
        self.kept_back: str | None = None
        self.frozen_here: str | None = None
        self._frozen_steps = 0
        self.epoch, self.whole, self.stepping = 0, True, False
        self._ended: tuple[bytes, list[torch.Tensor]] | None = None  # see `end`

    def change_begins(self) -> None:
        """A step, or an average, begins to change the parameters."""
        self.whole = False

    def change_ended(self) -> None:
        """It was taken to its end."""
        self.whole = True

    def set_epoch(self, epoch: int) -> None:
        """The state is of this epoch, whatever was loaded."""
        self.epoch = epoch

    @property
    def model_epoch(self) -> int:
        """The swarm steps that went into all parameters of the model."""
        return self.epoch

    @property
    def last_epoch_taken(self) -> int:
        """No state of a later epoch is taken over from others: the schedule is moved up to it, step by step."""
        return LAST_EPOCH_TAKEN

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
        """The tensors of the model that those of `describe` belong to."""
        return self.describe()

    @property
    def holds_average(self) -> bool:
        """Whether the swarm's average is here, and not stepped from yet: gradients that come now count for nothing."""
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
        self._check_parameters()
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

    def _check_parameters(self) -> None:
        """Raise `ConfigError` if other parameters are to be trained than when the run began."""
        if self.weights.are_away:
            raise ConfigError("the optimizer is in eval mode: call train() of the shoal.Optimizer before step()")
        listed, known = [each for group in self.optimizer.param_groups for each in group["params"]], self.parameters
        if len(listed) != len(known):
            raise ConfigError(
                f"the optimizer has {len(listed)} parameters, and had {len(known)} when the run began: make a new "
                "shoal.Optimizer to train others"
            )
        for index, (parameter, before) in enumerate(zip(listed, known, strict=True)):
            if parameter is not before:
                raise ConfigError(
                    f"parameter {known_as(before, index)} of the optimizer was replaced since the run began: make a "
                    "new shoal.Optimizer to train others"
                )
        self.check_dtypes()
        self._kept.check_options()
        for parameter in self._frozen:
            if parameter.requires_grad:
                index = next(i for i, each in enumerate(known) if each is parameter)
                raise ConfigError(
                    f"parameter {known_as(parameter, index)} of the optimizer requires a gradient, and did not when "
                    "the run began: unfreeze it before, or make a new shoal.Optimizer"
                )

    def check_dtypes(self) -> None:
        """Raise `ConfigError` if a parameter has another dtype or shape than when the run began: no peer has such."""
        for index, (parameter, (dtype, shape)) in enumerate(zip(self.parameters, self._dtypes, strict=True)):
            if parameter.dtype is not dtype or parameter.shape != shape:
                was, now = f"{dtype} {tuple(shape)}", f"{parameter.dtype} {tuple(parameter.shape)}"
                raise ConfigError(
                    f"parameter {known_as(parameter, index)} of the optimizer is {now} now, and was {was} when the run "
                    "began: convert the model before, or make a new shoal.Optimizer"
                )

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
        self.workplace.offload.back()
        for parameter, gradient in zip(self.parameters, own, strict=True):
            parameter.grad = gradient
        if self.step_error is not None:
            self.discard()
        elif taken and self.pending.holds_average:
            self.pending.stepped()

    def step(self, options: Options | None = None, absent: Collection[int] | None = None, cores: int = 0) -> None:
        """Take the optimizer step from the average that is held, and move the schedule. `.grad` stays the user's.

        It may be interrupted: as long as the optimizer has not begun, nothing has changed, and it can be called again.
        From then on it is over: the average is forgotten, and the epoch counted. If the optimizer raises, the average
        is forgotten, too, but the epoch does not count.

        Args:
            options: of all who take this step; they stay in the parameter groups. None: what the groups hold.
            absent: the trained parameters that nobody had a gradient of: they stay as torch leaves those without one.
                None: those without one here.
            cores: that the optimizer uses, so that all round alike; 0: those of the trainer's thread.
        """
        assert self.pending.holds_average
        self.schedule.put_back()
        if absent is None:
            absent = self.pending.total.lacking
        own = [parameter.grad for parameter in self.parameters]
        before, self.step_error = self.epoch, None
        self.weights.forget()
        try:
            if options is not None:
                apply(self.optimizer.param_groups, options, self.own_options)
            self._step_from_average(absent, cores)
        except Exception as error:
            self.epoch, self.step_error = before, f"{type(error).__name__}: {error}"
            raise
        finally:
            self.stepping = False
            try:
                self._after_step(own, taken=self.epoch != before)
            finally:
                self._after_step(own, taken=self.epoch != before)  # an interrupt may have come in between
            self.weights.note()
        self.schedule.stepped()
        self.whole = True

    def _step_from_average(self, absent: Collection[int], cores: int) -> None:
        for parameter in self._frozen:
            parameter.grad = None
        self.workplace.offload.lend()
        for parameter, average in zip(self.trained, self.accumulators, strict=True):
            parameter.grad = _as_gradient(average, parameter.dtype).to(parameter.device)  # it may have been moved since
        for index in absent:
            # A gradient that came after its peer had joined the round is in the average.
            if index < len(self.trained) and not self.accumulators[index].count_nonzero():
                self.trained[index].grad = None
        self._look_for_frozen()
        clip = self._clip_factor()
        self.epoch += 1
        if clip < 1:
            torch._foreach_mul_([grad for each in self.trained if (grad := each.grad) is not None], clip)
        self._step_watched(cores)

    def _look_for_frozen(self) -> None:
        """Look whether the step is about to move what the user has frozen on this peer."""
        pairs = enumerate(zip(self.trained, self.pending.total.given, strict=True))
        moved = [i for i, (each, mine) in pairs if not (each.requires_grad or mine) and each.grad is not None]
        self._frozen_steps = self._frozen_steps + 1 if moved else 0
        if self._frozen_steps == _FROZEN_FOR:
            name = known_as(self.trained[moved[0]], moved[0])
            self.frozen_here = (
                f"trained parameter {name} is frozen here (requires_grad=False), and the swarm's steps go on to change "
                "it, because other peers train it: freeze it on all peers, or on none"
            )

    def _clip_factor(self) -> float:
        """The factor that brings the average down to `max_grad_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
        if self.max_grad_norm is None:
            return 1.0
        return self.max_grad_norm / (norm_of(self.accumulators) + 1e-6)

    def _step_watched(self, cores: int = 0) -> None:
        """Look now and then, ever more rarely, whether newcomers can have all that this step leaves behind."""
        self.steps_here, self.stepping = self.steps_here + 1, True
        state = self.workplace.thread
        state = state._replace(cores=cores or state.cores)
        if self.steps_here & (self.steps_here - 1):
            with state.in_force():
                self.optimizer.step()
            return
        before = self._kept.outside()
        with state.in_force():
            self.optimizer.step()
            more = self._kept.depends_on_more(before)
        try:
            self._kept.export([])
        except ConfigError as error:
            self.kept_back = str(error)
        else:
            self.kept_back = more or self.kept_back

    def options(self) -> Options:
        """The options that this peer proposes for the next step: what its parameter groups hold."""
        self.schedule.put_back()
        return options_of(self.optimizer.param_groups, self.own_options)

    # ---------------------------------------------------------------------------------------------------- the state

    def summary(self) -> str:
        """A text about parameters and extra tensors: shapes in order (as a hash), dtypes, and which are trained."""
        tensors = self.describe()
        specs = [(tuple(each.shape), str(each.dtype), each.requires_grad) for each in tensors]
        digest = hashlib.sha256(repr(specs).encode()).hexdigest()[:8]
        dtypes = " and ".join(sorted({str(each.dtype).removeprefix("torch.") for each in tensors}))
        elements, trained = sum(each.numel() for each in tensors), sum(each.requires_grad for each in tensors)
        return f"{len(tensors)} with {elements} elements of {dtypes}, {trained} trained, shapes in order {digest}"

    def fingerprint(self) -> bytes:
        """BLAKE3 over all parameters and extra tensors, and over what the optimizer keeps if it has taken steps."""
        values, tensors = self.export()
        if self.optimizer.state:
            return digest_of(tensors, encode([values["optimizer"], values["scheduled"]]))
        return digest_of(tensors[: values["fixed"]])  # rates that are tensors are settings

    def fingerprint_of_model(self) -> bytes:
        """A digest of all fragments of the model, if this is the state of one of several; else empty."""
        return b""

    def steps_before(self) -> int:
        """The number of steps that the optimizer has taken, by its statistics or its groups."""
        entries = [entry for entry in self.optimizer.state.values() if isinstance(entry, dict)]
        counts = [entry["step"] for entry in (*entries, *self.optimizer.param_groups) if "step" in entry]
        steps = max((float(each) for each in counts if is_number(each)), default=0.0)
        return int(steps) if 0 < steps < MAX_SAMPLES_TAKEN else int(bool(self.optimizer.state))

    def export(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """All that another peer needs: plain values, and tensors by reference (hold the lock while they are read)."""
        self.schedule.put_back()
        tensors = self.weights.now()
        tensors += [extra.detach() for extra in self.extra_tensors]
        values = self._kept.export(tensors)
        return {
            "epoch": self.epoch,
            "scheduled": self.schedule.count,
            "fixed": len(self.parameters) + len(self.extra_tensors),
            "optimizer": values,
        }, tensors

    @property
    def max_tensors(self) -> int:
        """The most tensors that a state of others may have, with the statistics of their optimizer."""
        return _MOST_TENSORS + _MOST_STATISTICS * len(self.describe())

    def called(self, position: int) -> str:
        """The tensor of this number in `export`, for people."""
        fixed = self.describe()
        if position < len(fixed):
            return f"tensor {known_as(fixed[position], position)} of the state"
        return f"{self._kept.called(position - len(fixed))} in the state"

    def describe(self) -> list[torch.Tensor]:
        """The tensors whose shapes and dtypes every peer of the run shares: the first of `export`."""
        return [*self.parameters, *self.extra_tensors]

    def check(self, values: Any, tensors: Sequence[AnyTensor]) -> str | None:
        """The reason why an offered state cannot be taken over; None if none is seen before its values are here.

        Args:
            values: what `export` of another peer gave.
            tensors: what its tensors look like.
        """
        try:
            self._check_counts(values, tensors)
            self._kept.check(values["optimizer"], tensors, len(self.describe()))
        except Exception as error:  # noqa: BLE001 (any error is the peer's fault)
            return str(error) or type(error).__name__
        return None

    def why_not(self, options: Options) -> str | None:
        """The reason why the optimizer cannot step with options of others that are no `misfit`; None if none is seen.

        Some are of the right kind, and no step can be taken with them: AdamW raises an error with betas of 5.
        """
        own = self.optimizer.param_groups
        groups = [{name: copy.deepcopy(group[name]) for name in group.keys() - {"params"}} for group in own]
        try:
            apply(groups, options, self.own_options)
            with self.workplace.thread.in_force():
                self._kept.check_step(groups)
        except Exception as error:  # noqa: BLE001 (a rate that is a tensor cannot hold every number, for example)
            return f"such that no step can be taken here ({str(error) or type(error).__name__})"
        return None

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
            fixed = len(self.describe())
            with self.workplace.at_work():
                optimizer = self._kept.prepare(values["optimizer"], tensors, fixed)
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
                for mine, theirs in zip(self.describe(), prepared.tensors, strict=True):
                    mine.copy_(theirs)
            self._kept.switch(prepared.optimizer)
            forget_casts()
            self.weights.note()
        self.resume(prepared.epoch, prepared.scheduled)

    def load(self, values: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Take over a state that another peer exported: all of it, or nothing. See `prepare`.

        Raises:
            StateUnavailable: it does not fit here; nothing was changed.
        """
        self.take_over(self.prepare(values, tensors))

    def state_dict(self, shown: Mapping[torch.Tensor, Any]) -> dict[str, Any]:
        """That of the optimizer; before its first step with statistics to show, such as `blank_statistics`."""
        saved = self.optimizer.state_dict()
        if not saved["state"]:
            numbered = enumerate(self.parameters)
            saved["state"] = {number: shown[each] for number, each in numbered if each in shown}
        return saved

    def is_asked_for_statistics(self, *, began: bool) -> bool:
        """Whether a step is called to make statistics only, as `torch.distributed.checkpoint` does to read them.

        There are none yet, each gradient is zero, and so is each rate, or no batch was counted yet.

        Args:
            began: whether one was.
        """
        if self.optimizer.state or (began and any(self.schedule.rates())):
            return False
        gradients = [parameter.grad for parameter in self.trained]
        return not any(gradient is None or bool(values_of(gradient).count_nonzero()) for gradient in gradients)

    @property
    def took_blank_step(self) -> bool:
        """Whether the optimizer has taken one step, and its statistics are zero: there were no gradients."""
        entries = [entry for entry in self.optimizer.state.values() if isinstance(entry, dict)]
        counts: list[Any] = [entry.get("step") for entry in entries]
        if not entries or not all(is_number(count) and float(count) == 1 for count in counts):
            return False
        values = [each for entry in entries for name, each in entry.items() if name != "step"]
        tensors = [each for each in values if isinstance(each, torch.Tensor) and each.numel()]
        return bool(tensors) and not any(bool(each.count_nonzero()) for each in tensors)

    def _check_counts(self, values: Any, tensors: Sequence[AnyTensor]) -> tuple[int, int]:
        own = self.describe()
        epoch, scheduled, fixed = values["epoch"], values["scheduled"], values["fixed"]
        for what, count in (("an epoch", epoch), ("a schedule after a number of steps", scheduled)):
            if type(count) is not int or not 0 <= count <= LAST_EPOCH_TAKEN:
                raise ValueError(f"{what} of {count!r:.80}")
        if type(fixed) is not int or fixed != len(own) or len(tensors) < fixed:
            raise ValueError(f"{fixed!r:.20} parameters and extra tensors where there are {len(own)} here")
        for index, (mine, theirs) in enumerate(zip(own, tensors, strict=False)):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise ValueError(f"tensor {known_as(mine, index)} is {tuple(theirs.shape)} {theirs.dtype}")
        return epoch, scheduled

    def resume(self, epoch: int, scheduled: int) -> None:
        """Go on from this epoch, with the schedule at this count, and the learning rates that the optimizer has now.

        A schedule that fails on the way says so (`RunSchedule.error`); it raises nothing.
        """
        self.epoch = epoch
        self.weights.changes.forget()
        self.schedule.resume(scheduled)
        self.discard()

    def prepare_optimizer(self, state_dict: dict[str, Any]) -> Prepared:
        """Look at a state dict of the optimizer; nothing is changed.

        Raises:
            ValueError: it does not fit, or no step can be taken from it.
        """
        with self.workplace.at_work():
            return self._kept.prepare_loaded(state_dict)

    def blank_statistics(self) -> dict[torch.Tensor, dict[Any, Any]]:
        """The statistics of the optimizer as they are before its first step (see `blank_statistics` of `trial`)."""
        with self.workplace.at_work():
            return blank_statistics(self.optimizer)

    def load_optimizer(self, prepared: Prepared) -> None:
        """Load what `prepare_optimizer` gave into the groups and statistics that there are.

        Torch replaces them. But objects that hold them (`swarm.param_groups`, a schedule of the user's own) would go on
        reading and setting the ones before, without effect.
        """
        with self.workplace.at_work():
            self._kept.switch(prepared)


def _trained(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that require a gradient. Raises `ConfigError` if there are none, or too many."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not any(parameter.numel() for parameter in trained):
        raise ConfigError("params holds no parameter with elements that requires a gradient")
    if len(trained) > MAX_TRAINED:
        raise ConfigError(
            f"params holds {len(trained)} parameters that require a gradient, and a run trains {MAX_TRAINED} at "
            "most: put small ones together into larger tensors"
        )
    return trained


def _as_gradient(average: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if average.dtype is dtype:
        return average
    largest = torch.finfo(dtype).max
    return average.clamp(-largest, largest).to(dtype)
