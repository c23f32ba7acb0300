"""A torchrun group as one peer of a run: `GroupOptimizer`.

The ranks compute one gradient together, as `DistributedDataParallel` has it. Rank 0 alone is in the swarm: it has the
`DHT` and the `shoal.Optimizer`, and decides. Each call that may change the state is made by all ranks alike:

1. Each rank says which call it is at, with how many samples and which weights, or why it cannot go on.
2. Rank 0 does what was called, with the samples of all.
3. It tells the others the outcome: its error, or where the run stands and what it has changed.
4. If the state has another name than before, rank 0 sends all of it, and the others take it over bit by bit.

So all ranks hold the same bits, whatever kind of machine they are: no rank repeats a step that another one took. An
error of one rank is raised on all. The connections of a process that dies are closed, which ends the others' calls
(`shoal.zero.ranks.watch` names it). The ranks wait for rank 0 in a group of their own on gloo, as a round may take
longer than the backend of the gradients waits.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from shoal.base.checks import whole
from shoal.base.names import known_as
from shoal.base.untraced import untraced
from shoal.compression import view_bytes
from shoal.errors import ConfigError, LocalError, ShoalError
from shoal.hivemind.arguments import strategy_of
from shoal.integrations.trainers import warn
from shoal.optim import Optimizer
from shoal.protocol.wire import MAX_EPOCH
from shoal.run.decide.state_name import StateName
from shoal.runtime.dht import DHT
from shoal.train.batch_rows import rows_of, samples_of
from shoal.train.blank_statistics import are_asked_for, shown_in
from shoal.train.gradient_sum import GradientSum
from shoal.train.inner import make_inner, make_scheduler
from shoal.train.model import learn_names
from shoal.train.pending import Pending
from shoal.train.schedule import ScheduleWatch, follow
from shoal.train.training_state import TrainingState
from shoal.train.trial import blank_statistics
from shoal.zero.ranks.watch import Agreement, Watch

__all__ = ["GroupOptimizer"]

_WAIT_S = 3600.0
"""For rank 0, beside the timeouts that it was given: it may download a state meanwhile."""

_CHECKS = 8
"""So many first steps compare the gradients of the ranks; after them each whose number is a power of two does."""


class _Call(NamedTuple):
    """What a rank says when it begins a call."""

    name: str
    samples: int = 0
    gradient: str = ""
    weights: str = ""
    problem: str = ""
    warning: str = ""


class _Change(NamedTuple):
    """A state that rank 0 sends: plain values, and what its tensors are like (shape, dtype, kind of device)."""

    values: Any
    tensors: list[tuple[torch.Size, torch.dtype, str]]


class _Outcome(NamedTuple):
    """What a call has come to on rank 0."""

    result: Any = None
    error: Exception | None = None
    epoch: int = 0
    finished: bool = False
    change: _Change | None = None


class GroupOptimizer(torch.optim.Optimizer):
    """Trains with the swarm as one peer that is a group of processes, such as those of one `torchrun`.

    Give each rank's model to `DistributedDataParallel`, and call everything on all ranks alike, in the same order. In
    the swarm the group counts with the samples of all its ranks. After each call all ranks have the same parameters and
    the same state of the optimizer, to the bit. An error of one rank is raised on all of them.

    Args:
        dht: this peer, started, on rank 0 of the group; None on the others.
        optimizer: as of `shoal.Optimizer`, over the parameters of this rank's model.
        process_group: the ranks; None for all of them.
        batch_size_per_step: samples of this rank that one call of `step` stands for; or give `batch_size` to each call.
            Without, with `model`, they are counted as `shoal.Optimizer` does.
        options: all other arguments of `shoal.Optimizer`, the same on all ranks. `model` may be the model or the
            `DistributedDataParallel` around it. `auxiliary` is refused, and so are
            strategies with which each peer steps alone.

    Attributes:
        peer: the `shoal.Optimizer` on rank 0, for `status()` and the like; None on the others.

    Raises:
        ConfigError: there is no process group; an argument is wrong on this rank or on another one; or the ranks have
            other parameters or optimizers.
        RankLost: a process of the group is gone.
    """

    def __init__(
        self,
        *,
        dht: DHT | None,
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        batch_size_per_step: int | None = None,
        **options: Any,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "there is no process group: start the program with torchrun and call "
                "torch.distributed.init_process_group(), or use shoal.Optimizer in a single process"
            )
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError("process_group must be a group of torch.distributed that this process belongs to")
        waits = [options.get(name) for name in ("averaging_timeout", "load_state_timeout")]
        self._group, self._control = group, _waiting_group(group, waits)
        self._watch = Watch(self._control)
        self._agreement = Agreement(self._control, self._watch)
        self._batch_size, self._steps, self._within = batch_size_per_step, 0, ""
        self._outcome, self._made, self._own_schedule = _Outcome(), False, options.get("scheduler") is not None
        self._known: StateName | None = None
        self.reuse_grad_buffers = bool(options.get("reuse_grad_buffers"))
        self.peer: Optimizer | None = None
        try:
            with self._agreement.together():
                self._training = self._join(dht, optimizer, options)
            inner = self._training.optimizer
            self._rows = rows_of(options.get("model"), batch_size_per_step, self._training.trained)
            self._agreement.alike(f"{self._training.tensors.summary()}\n{type(inner).__name__}", "model and optimizer")
            super().__init__(inner.param_groups, dict(inner.defaults))
            self.param_groups, self.state = inner.param_groups, inner.state
            self._schedules, self._made = ScheduleWatch(inner.param_groups), True
            self._do("the constructor", lambda peer: None)
        except BaseException:
            self.shutdown()
            raise

    def _join(self, dht: DHT | None, optimizer: Any, options: dict[str, Any]) -> TrainingState:
        strategy = strategy_of(options.get("strategy"), options)
        if strategy.terms.steps_alone:
            raise ConfigError(
                f"{type(strategy).__name__} does not work in a group: its ranks would have to get new parameters after "
                "each batch. Leave it out, or let each process be a peer of its own, without a process group"
            )
        if options.get("auxiliary"):
            raise ConfigError("auxiliary=True does not work in a group: let that peer be a single process")
        if self._batch_size is not None:
            self._batch_size = whole("batch_size_per_step", self._batch_size)
        if (model := options.get("model")) is not None:
            options["model"] = learn_names(model)
        if self._control.rank() == 0:
            if dht is None:
                raise ConfigError("dht is missing on rank 0: give it a started shoal.DHT, and None on the other ranks")
            self.peer = Optimizer(dht=dht, optimizer=optimizer, **options)
            self.peer.samples_are_given()
            return self.peer.collaboration.training
        if dht is not None:
            raise ConfigError("dht must be None on all ranks but rank 0: the group is one peer")
        inner, offload = make_inner(options.get("params"), optimizer, strategy.terms.offload)
        schedule = make_scheduler(inner, options.get("scheduler"))
        follow(schedule)
        nothing = Pending(GradientSum([], 1))  # no step is taken here
        return TrainingState(inner, schedule, options.get("extra_tensors", ()), offload=offload, pending=nothing)

    # ------------------------------------------------------------------------------------------------- all ranks alike

    def _do(self, name: str, work: Callable[[Optimizer], Any]) -> Any:
        """Have rank 0 do something; returns its result, on all ranks."""
        return self._finish(self._lead(_Call(name), lambda peer, samples: work(peer)))

    def _lead(self, call: _Call, work: Callable[[Optimizer, int], Any]) -> tuple[_Outcome, BaseException | None]:
        """Have rank 0 do something with the samples of all ranks; take over what it has changed.

        Returns:
            What it has come to; and the error of this rank, if it is another one than that of rank 0.
        """
        if self._within:
            raise LocalError(
                f"{self._within} of the GroupOptimizer was interrupted on this rank, so the ranks may not be at one "
                "call any more: end all processes of the group, and start them again"
            )
        self._within = call.name  # until its end: this stays if the call is interrupted or a rank is lost
        calls = [_Call(*json.loads(said)) for said in self._agreement.gather(json.dumps(call))]
        outcome, own = _Outcome(error=_why_not(calls, self._training)), None
        if outcome.error is None:
            if self.peer is not None:
                for warning in dict.fromkeys(each.warning for each in calls if each.warning):
                    warn(self.peer, warning, where="optimizer")
                outcome, own = self._try(self.peer, work, sum(each.samples for each in calls))
            outcome = self._tell(outcome)
            if outcome.change is not None:
                self._exchange(outcome.change)
        self._within = ""
        return outcome, own

    def _try(
        self, peer: Optimizer, work: Callable[[Optimizer, int], Any], samples: int
    ) -> tuple[_Outcome, BaseException | None]:
        try:
            result, change, state = work(peer, samples), None, peer.collaboration.state
            if state != self._known:
                values, tensors = self._training.export()
                change = _Change(values, [(each.shape, each.dtype, each.device.type) for each in tensors])
                self._known = state
            return _Outcome(result, None, peer.local_epoch, peer.finished, change), None
        except BaseException as error:  # noqa: BLE001 (also an interrupt: raised again, once the others know)
            return _Outcome(error=_for_others(error)), error

    def _finish(self, led: tuple[_Outcome, BaseException | None]) -> Any:
        outcome, own = led
        if (error := own or outcome.error) is not None:
            raise error
        self._outcome = outcome
        return outcome.result

    def _tell(self, outcome: _Outcome) -> _Outcome:
        said = [outcome]
        with self._watch.named(self._watch.turn(f"to hear what {self._within} has come to on rank 0")):
            dist.broadcast_object_list(said, dist.get_global_rank(self._control, 0), self._control)
        return said[0]

    def _exchange(self, change: _Change) -> None:
        """Send the state from rank 0; take it over on the others. A rank that cannot is named on all."""
        with self._agreement.together():
            tensors = self._to_exchange(change)
        works: list[Any] = []
        with self._watch.named(self._watch.turn("to get the state of rank 0")):
            for tensor in tensors:
                if tensor.numel():
                    group = self._control if tensor.device.type == "cpu" else self._group
                    octets = tensor.view(-1).view(torch.uint8)  # so each dtype travels with its bits
                    works.append(dist.broadcast(octets, dist.get_global_rank(group, 0), group, async_op=True))
            for work in works:
                work.wait()
        with self._agreement.together():
            if self.peer is None:
                self._training.load(change.values, tensors)

    def _to_exchange(self, change: _Change) -> list[torch.Tensor]:
        """The tensors of the state, and the memory for them on the ranks that get it."""
        if self.peer is not None:
            return [each.contiguous() for each in self._training.export()[1]]
        device = self._training.parameters[0].device
        return [
            torch.empty(shape, dtype=dtype, device="cpu" if kind == "cpu" else device)
            for shape, dtype, kind in change.tensors
        ]

    # ---------------------------------------------------------------------------------------------------------- step

    @untraced
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """As `shoal.Optimizer.step`, on all ranks, after the backward pass of the `DistributedDataParallel` model.

        Args:
            closure: forward and backward pass; its result is returned.
            batch_size: samples of this rank's batch; default `batch_size_per_step`. The gradient of the group is the
                mean of its ranks' means, so give the ranks batches of one size.
            grad_scaler: that the loss was scaled with.

        Raises:
            ConfigError: as of `shoal.Optimizer`; or the ranks have different gradients.
            LocalError: an earlier call was interrupted on this rank; or the ranks are not at the same call.
            RankLost: a process of the group is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if grad_scaler is not None:
            grad_scaler.step(self, batch_size=batch_size)
            if self.reuse_grad_buffers:
                self.zero_grad()  # the scaler may have left the step out
            return loss
        inner, trained = self._training.optimizer, self._training.trained
        if closure is None and batch_size is None and are_asked_for(inner, trained, began=self._steps > 0):
            with self._training.stepper.at_work():
                self.state = defaultdict(dict, blank_statistics(inner))
            if self.peer is not None:
                self.peer.step()
            return None
        self.state = inner.state
        if self.peer is None:
            self._follow_schedule()
        self._steps += 1
        problem: ConfigError | None = None
        call = _Call("step()")
        try:
            warnings: list[str] = []
            samples = samples_of(self._batch_size if batch_size is None else batch_size, self._rows, warnings.append)
            weights = json.dumps(self._training.weights.checksums())
            call = call._replace(samples=samples, gradient=self._mark(), weights=weights, warning="".join(warnings))
        except ConfigError as error:
            problem, call = error, call._replace(problem=f"{error}")
        outcome, own = self._lead(call, lambda peer, samples: peer.step(batch_size=samples))
        self._schedules.seen()
        if self.reuse_grad_buffers:
            self.zero_grad()  # rank 0 has done so already
        self._finish((outcome, problem or own))
        return loss

    def _follow_schedule(self) -> None:
        """As rank 0 does with a schedule that was made over this optimizer."""
        if (found := self._schedules.find()) is None:
            return
        if self._own_schedule:
            self._training.schedule.restore_rates()
        else:
            self._training.schedule.adopt(found)

    def _mark(self) -> str:
        """Some bits of the gradient, which are the same on all ranks: in the first steps, then ever more rarely."""
        if self._steps > _CHECKS and self._steps & (self._steps - 1):
            return ""
        gradients = [gradient for each in self._training.trained if (gradient := each.grad) is not None]
        if not gradients:
            return "none"
        gradients = [each for each in gradients if each.numel()] or gradients  # an empty one is equal on all
        smallest = min(gradients, key=torch.Tensor.numel).detach().to_dense().cpu().contiguous()
        return hashlib.sha256(view_bytes(smallest)).hexdigest()

    # -------------------------------------------------------------------------------------------- as of shoal.Optimizer

    @property
    def local_epoch(self) -> int:
        """Swarm steps that went into the parameters, as of the last call."""
        return self._outcome.epoch

    @property
    def finished(self) -> bool:
        """Whether the group is at the end of the run, as of the last call: the same on all ranks."""
        return self._outcome.finished

    @untraced
    def announce_end(self, epoch: int | None) -> None:
        """As `shoal.Optimizer.announce_end`, on all ranks alike."""
        last = None if epoch is None else whole("epoch", epoch, most=MAX_EPOCH)
        if self.peer is not None:
            self.peer.announce_end(last)

    @untraced
    def load_state_from_peers(self, timeout: float | None = None) -> bool:
        """As `shoal.Optimizer.load_state_from_peers`, on all ranks alike."""
        return bool(self._do("load_state_from_peers()", lambda peer: peer.load_state_from_peers(timeout)))

    @untraced
    def state_dict(self) -> dict[str, Any]:
        """On rank 0 that of the `shoal.Optimizer`. On the others that of the torch optimizer: save that of rank 0."""
        return shown_in(self._training.optimizer, self.state) if self.peer is None else self.peer.state_dict()

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `shoal.Optimizer.load_state_dict`, on all ranks alike; that of rank 0 counts, with its model."""

        def load(peer: Optimizer) -> None:
            self._known = None  # the model may have been loaded before, whatever the name of the state
            peer.load_state_dict(state_dict)

        self._do("load_state_dict()", load)

    @untraced
    def save(self, folder: str | os.PathLike[str], *, keep: int | None = None) -> Path | None:
        """As `shoal.Optimizer.save`, by rank 0; the others return None. It may be called on rank 0 alone."""
        return None if self.peer is None else self.peer.save(folder, keep=keep)

    def resume(self, folder: str | os.PathLike[str]) -> Path | None:
        """As `shoal.Optimizer.resume`, on all ranks alike; rank 0 reads."""
        found = self._do("resume()", lambda peer: peer.resume(folder))
        return found if found is None else Path(found)

    def eval(self) -> None:
        """As `shoal.Optimizer.eval`, on each rank that evaluates."""
        if self.peer is not None:
            self.peer.eval()
        else:
            self._training.weights.evaluate()

    def train(self) -> None:
        """As `shoal.Optimizer.train`, on each rank that has called `eval`."""
        if self.peer is not None:
            self.peer.train()
        else:
            self._training.weights.train()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: the tensors of a run are fixed.

        Raises:
            ConfigError: always, afterwards.
        """
        if self._made:
            raise ConfigError("parameters cannot be added to a run that has begun: make a new optimizer")
        super().add_param_group(param_group)

    def shutdown(self) -> None:
        """Leave the run. The DHT goes on, and so does the process group. Safe to call twice."""
        if self.peer is not None:
            self.peer.shutdown()
        if (rows := self.__dict__.get("_rows")) is not None:
            rows.close()
        self._watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        raise LocalError("a GroupOptimizer is part of a run, and cannot be copied or pickled: use its state_dict()")

    def __repr__(self) -> str:
        return (
            f"GroupOptimizer(rank={self._control.rank()}, epoch={self.local_epoch}, inner={self._training.optimizer!r})"
        )


def _waiting_group(group: dist.ProcessGroup, waits: list[Any]) -> dist.ProcessGroup:
    """The same ranks on gloo, where they may wait for rank 0 for long."""
    longest = _WAIT_S + sum(float(each) for each in waits if isinstance(each, int | float) and 0 < each < 1e7)
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        backend="gloo",
        timeout=timedelta(seconds=longest),
        use_local_synchronization=True,
    )
    return made


def _why_not(calls: list[_Call], training: TrainingState) -> Exception | None:
    """The reason why the ranks cannot go on with these calls."""
    if len({each.name for each in calls}) > 1:
        where = ", ".join(f"rank {rank} {each.name}" for rank, each in enumerate(calls))
        return LocalError(
            f"the ranks of the group have called different things ({where}): call the same on all of them"
        )
    if wrong := [f"rank {rank}: {each.problem}" for rank, each in enumerate(calls) if each.problem]:
        return ConfigError("another rank cannot go on: " + "; ".join(wrong))
    first, *others = (json.loads(each.weights or "{}") for each in calls)
    for rank, other in enumerate(others, 1):
        for number in first:
            if first[number] != other[number]:
                name = known_as(training.parameters[int(number)], number)
                return ConfigError(
                    f"parameter {name} of the optimizer has other values on rank {rank} than on rank 0: the program "
                    "has changed it on some ranks alone, or to other values. Make the same change on all ranks, with "
                    "the same values. To go on with the weights of rank 0, let all ranks call "
                    "load_state_dict(state_dict()) of the GroupOptimizer"
                )
    if len({each.gradient for each in calls}) > 1:
        return ConfigError(
            "the ranks of the group have different gradients: give each rank's model to DistributedDataParallel, call "
            "that in the loop, and call step() only after a backward pass outside its no_sync()"
        )
    return None


def _for_others(error: BaseException) -> Exception:
    """The error of rank 0 as the others raise it."""
    if isinstance(error, ShoalError):
        with suppress(Exception):  # its arguments may be such as cannot travel
            pickle.loads(pickle.dumps(error))  # noqa: S301 (our own)
            return error
    return LocalError(f"rank 0 of the group cannot go on: {type(error).__name__}: {error}")
