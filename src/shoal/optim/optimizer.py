"""`Optimizer`: an ordinary torch optimizer to the training loop, one swarm-wide large-batch step underneath."""

from __future__ import annotations

import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

import torch

from shoal.averaging import TensorLock
from shoal.base.checks import flag, path, seconds, whole
from shoal.base.peer import check_run_id
from shoal.base.untraced import untraced
from shoal.compression import CompressionBase, NoCompression
from shoal.errors import ClosedError, ConfigError, LocalError, is_out_of_memory
from shoal.events import Event, Warned, print_log
from shoal.hivemind.arguments import OptimizerOptions, check_optimizer_options, strategy_of
from shoal.hivemind.faces import HivemindNames
from shoal.optim.arguments import check_averages, check_closure, checked_tensors, is_auxiliary, tuning_of
from shoal.protocol.wire import MAX_EPOCH, MAX_SAMPLES_OF_STEP
from shoal.run.chains import Chains
from shoal.run.decide.agreement import Deal
from shoal.run.disk.checkpoint import Content, Files, Saved, copy_of
from shoal.run.disk.saving import Saver, saver_of
from shoal.run.participant import Participant
from shoal.run.report.status import Status
from shoal.run.settings import RunSettings, checked_settings, run_settings
from shoal.runtime.dht import DHT
from shoal.runtime.launch import launched
from shoal.runtime.thread import GRACE_S, LoopThread
from shoal.strategies import Inner, Merging, Strategy, TrainingState
from shoal.strategies.strategy import answer_of
from shoal.train.batch_rows import rows_of, samples_of
from shoal.train.blank_statistics import are_asked_for, shown_in, without_blank_step
from shoal.train.gradient_watch import GradientWatch, SpentGradients
from shoal.train.inner import make_inner, make_scheduler
from shoal.train.model import TrainedModel, learn_names
from shoal.train.offload import Offload
from shoal.train.schedule import ScheduleWatch, follow, is_moved
from shoal.train.trial import blank_statistics

__all__ = ["Optimizer"]

T = TypeVar("T")

_GOES_ON = 100
"""A program that calls `step` so often after the end is told. With two optimizers one run ends before the other."""

_run_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
"""The `Optimizer` that trains with each inner optimizer."""


class Optimizer(HivemindNames, torch.optim.Optimizer):
    """Trains one model together with all peers of the same `run_id`.

    Call `step` after each backward pass, as with any optimizer. With `strategy=Synchronous(target_batch_size=N)`
    gradients are accumulated; when the swarm has N samples together, all peers average them, and each takes the same
    step (an *epoch* of the swarm). The learning-rate schedule follows these epochs. A peer that comes late, or missed a
    step, downloads the state of the others inside `step`. No peer steps on its own gradients while others are at the
    same state, and each step is made of gradients of the state before it; `late` gives the latter up for speed.

    Creating it changes no parameter and no optimizer state, but for `checkpoint`. It works before or after the model is
    moved to a device (not with a parameter replaced later).

    Args:
        dht: this peer, started.
        run_id: names the run; all its peers give the same.
        strategy: how the batches of all peers become one model: one of `shoal.strategies`, or one of your own, the same
            on all peers. `Synchronous(target_batch_size=4096)`: when the swarm has as many samples together, all take
            the same step. With the others each peer steps on its own batches: see docs/how-to/strategies.md. None:
            `Synchronous` of the `target_batch_size` in `options`.
        optimizer: a torch optimizer, or a function `params -> optimizer`.
        params: parameters or parameter groups, if `optimizer` is a function of them.
        scheduler: a torch scheduler, or a function `optimizer -> scheduler`; stepped once for each swarm epoch. One
            that raises (beyond the end of a `OneCycleLR`) is a warning, and the learning rates stay as they are.
            Without one, a torch schedule that is made over this optimizer (as Hugging Face's Trainer makes one) is
            followed instead: it moves with the swarm's epochs, from 0, and its own `step` does nothing.
        model: that is trained. With it the names of its parameters and the bytes of the tensors that the optimizer does
            not have (frozen weights, buffers) are among the settings that all peers compare: another base is refused.
        batch_size_per_step: samples that one call of `step` stands for; or give `batch_size` to each call. Without,
            with `model`, the rows of what it is given are counted; where they are not clear, `step` asks for them.
        extra_tensors: more tensors of the state, such as batch norm statistics. Those of whole numbers (counts), and
            those that are not finite from the beginning (masks), are downloaded, and not averaged.
        settings: more texts, by name, that must be equal on all peers, such as `{"tokenizer": HASH}`: a peer with
            others is refused, and so is a checkpoint. At most 16, of 120 characters.
        checkpoint: path of a folder for checkpoints of the run; None for none. The peer goes on from the best one there
            (see `resume`), and saves there in the background: training stands still for a copy of the state only. A
            save that fails is a warning. Peers may share the folder.
        save_every: epochs between two automatic checkpoints; None: 10; 0: only go on from one. The last state of a
            run is saved, too.
        keep_checkpoints: of so many states the checkpoints stay; None: 3.
        auxiliary: a peer without data: it reduces for the others, takes their steps, and gives newcomers the state.
            Call `step()` in a loop, without a batch: it waits for the next step of the swarm. Others must be able to
            dial it.
        require_state: what a peer does that has waited for a state for `load_state_timeout`.
            None: `step` raises `StateUnavailable` if a run goes on without this peer, and its DHT was given peers. If
            nobody is further any more, it begins at epoch 0, with a warning.
            True: `step` raises also where no run is known. It is for peers that only ever join.
            False: it trains a run of its own beside the others, with a warning. While two peers name a better state,
            it waits longer.
        verbose: print what goes on (joined, epochs, who is gone and why) to stderr, as
            `logging.getLogger("shoal").setLevel("INFO")` does where a program logs.
        options: further ones, such as `averaging_timeout`, `bandwidth` or `client_mode`, and all arguments of hivemind
            1.1.12: see `shoal.hivemind.arguments.OptimizerOptions`.

    Attributes:
        strategy: the one that trains.

    Raises:
        ConfigError: an argument is wrong, or the run is trained with other settings; it is named. If no live peer has
            told its settings within 3 s, `step` raises that.
    """

    _spent: SpentGradients | None = None
    _closed = _left = _model_told = _asked = False

    _past_end = 0
    """Calls of `step` since the run has ended."""

    @launched("Optimizer")
    def __init__(  # noqa: PLR0913 (all by name)
        self,
        *,
        dht: DHT,
        run_id: str,
        strategy: Strategy | None = None,
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None = None,
        scheduler: Any = None,
        model: torch.nn.Module | None = None,
        batch_size_per_step: int | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        settings: Mapping[str, str] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
        keep_checkpoints: int | None = None,
        auxiliary: bool = False,
        require_state: bool | None = None,
        verbose: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        check_optimizer_options(options)
        if not isinstance(dht, DHT):
            raise ConfigError(f"dht must be a shoal.DHT, got {type(dht).__name__}{_of_a_group(dht)}")
        check_run_id(run_id)
        self.strategy = strategy_of(strategy, options)
        terms, tuning = self.strategy.terms, tuning_of(dht, options)
        if batch_size_per_step is not None:
            batch_size_per_step = whole("batch_size_per_step", batch_size_per_step, most=MAX_SAMPLES_OF_STEP)
        given, extra_tensors = checked_settings(settings), checked_tensors("extra_tensors", extra_tensors)
        is_helper = is_auxiliary(auxiliary, tuning.averager.client_mode, batch_size_per_step)
        if flag("verbose", verbose):
            print_log()
        self._saver = saver_of(
            partial(_emit, dht),
            run_id,
            checkpoint,
            save_every,
            keep_checkpoints,
            [*given],
            timeout_s=tuning.shutdown_timeout,
        )
        inner, offload = _inner(params, optimizer, model, offload=terms.offload)
        super().__init__(inner.param_groups, dict(inner.defaults))
        inner.state.update(without_blank_step(inner.state))
        # One set of groups and statistics for both: schedulers and trainers hold on to either optimizer.
        self.param_groups, self.state = inner.param_groups, inner.state
        self.dht, self.run_id, self._inner_groups = dht, run_id, inner.param_groups
        self.batch_size_per_step, self.reuse_grad_buffers = batch_size_per_step, tuning.reuse_grad_buffers
        self.averaging_timeout, self.load_state_timeout = tuning.averaging_timeout, tuning.load_state_timeout
        self._shutdown_timeout = tuning.shutdown_timeout
        chosen = make_scheduler(inner, scheduler)
        follow(chosen)  # a `scheduler.step()` that is left in the training loop does nothing
        self._own_schedule, self._schedules = chosen is not None, ScheduleWatch(self.param_groups)
        if self._own_schedule:
            self._schedules.seen()
        about = Inner(inner, chosen, extra_tensors, offload)
        training = self._training = answer_of(self.strategy, "training()", self.strategy.training(about), TrainingState)
        check_averages(training, tuning.average_state_every)
        self._model = (
            None
            if model is None
            else TrainedModel(
                model,
                training.parameters,
                extra_tensors,
                steps_alone=training.steps_alone,
                elsewhere=[tensor for other in self._others() for tensor in other.shared_tensors],
            )
        )
        travels_whole = training.averaged_as == "whole" and terms.compression in (None, NoCompression())
        self._watch = GradientWatch(
            training.trained,
            whole=travels_whole and not training.steps_alone,
            tell=partial(_warn, dht) if self.reuse_grad_buffers else None,
        )
        self._lock, self._rows = TensorLock(), rows_of(model, batch_size_per_step, training.trained)
        averages = training.averages_parameters  # each epoch does, and they differ between two of them
        every = 0 if averages else tuning.average_state_every
        ours = RunSettings(
            run_id=run_id,
            strategy=self.strategy,
            averager=tuning.averager,
            auxiliary=is_helper,
            average_state_every=every,
            state_patience_s=tuning.load_state_timeout,
            require_state=None if require_state is None else flag("require_state", require_state),
            catch_up_bytes=tuning.catch_up_bytes,
            check_every=tuning.check_parameters_every,
            fingerprint=run_settings(
                training,
                self.strategy,
                every,
                model=self._model,
                given=given,
                grad_compression=terms.compression,
                state_averaging_compression=tuning.state_compression,
            ),
        )
        self._one_step = TensorLock()  # no thread keeps it, whatever interrupts it
        folder = self._saver.folder
        found = None if folder is None else self._saver.find(folder, ours.fingerprint)
        self._chains = Chains(
            dht.loop_thread,
            dht.core(),
            training,
            ours,
            lock=self._lock,
            saved=found,
            folder=folder,
            keep=None if folder is None else partial(_keep_given_up, weakref.ref(self)),
            compression=terms.compression,
            state_compression=tuning.state_compression,
        )
        if folder is not None:
            self._has_resumed(folder, found)
        self._forget_closer = dht.at_shutdown(partial(_close, self._chains, self._saver))
        self._stop_guarding = _guard_step(inner, weakref.ref(self))
        self._dropped = _leave_when_dropped(self, dht.loop_thread, self._chains, self._forget_closer)
        for other in self._others():
            other.another_shares(self.shared_tensors)
        self._warn_of_arguments(options.get("load_state_compression"))

    def _warn_of_arguments(self, load_state_compression: CompressionBase | None) -> None:
        if load_state_compression not in (None, NoCompression()):
            what = f"load_state_compression={load_state_compression!r} has no effect"
            self._warn(f"{what}: a newcomer's weights would differ from the others'; leave it out")

    def _warn_of_model(self, model: TrainedModel) -> None:
        """Once, at the first step: another optimizer of the program may be made later."""
        self._model_told = True
        if names := model.unshared_statistics:
            self._warn(
                f"{len(names)} running statistics of normalization ({names[0]}, ...) are each peer's own: give them as "
                "extra_tensors to share them"
            )
        if names := model.untrained:
            self._warn(
                f"{len(names)} parameters of the model ({names[0]}, ...) require a gradient, and no shoal.Optimizer "
                "trains them, so peers do not compare them: freeze what is not to be trained (requires_grad_(False)), "
                "and a peer with another base is refused; give the rest to the optimizer"
            )

    # ---------------------------------------------------------------------------------------------------------- status

    @property
    def local_epoch(self) -> int:
        """Swarm steps that went into this peer's parameters; merges of each fragment of the model, if peers merge.

        It jumps when the state of others is taken over: up, as a rule; down, if theirs was trained with more samples.
        """
        return self._chains.epoch

    @property
    def finished(self) -> bool:
        """Whether this peer is at the end of the run (see `announce_end`), and may leave; then `step` does nothing.

        At the end a peer has the best state that it knows, and waits some seconds, in `step`, until the others that it
        knows have it too.
        """
        return self._chains.finished

    @property
    def dealt(self) -> tuple[Deal, ...]:
        """The samples that the last steps dealt to this peer, oldest first: `shoal.data.PeerSampler` draws them."""
        return self._chains.first.own.dealt

    @property
    def collaboration(self) -> Participant:
        """The async core: phase, progress and last round."""
        return self._chains.first

    @untraced
    def status(self) -> Status:
        """The run as this peer sees it now: epoch, samples, peers, the last round. Any thread may ask.

        After `shutdown` it is the last one before it, with the samples that were lost by that among those dropped.

        Raises:
            ClosedError: in a forked child.
        """
        return self._chains.status()

    def is_elected(self) -> bool:
        """Whether this peer is the one that is elected at the present epoch, to do what one of all peers should do.

        It is one of those that contributed to the last step; each epoch elects anew, and nothing is sent for it. If it
        dies before it has done its work, nobody does it at this epoch. After a state was loaded, or averaged, it is one
        of the live peers, and for a moment two may hold themselves elected. `shoal.integrations.evaluation` uses it.

        Raises:
            ClosedError: the optimizer or its DHT was shut down.
        """
        self._check_open()
        return self._chains.is_elected()

    @property
    def use_local_updates(self) -> bool:
        """Whether this peer steps on its own gradients."""
        return self._training.averages_parameters

    @property
    def target_batch_size(self) -> int | None:
        """Samples of the whole swarm in one step; None if the strategy does not go by them."""
        return getattr(self.strategy, "target_batch_size", None)

    @property
    def merging(self) -> Merging | None:
        """The way in which peers merge what each has trained; None if the strategy does not merge."""
        return getattr(self.strategy, "merging", None)

    @property
    def auxiliary(self) -> bool:
        """Whether this peer has no data."""
        return self._chains.first.settings.auxiliary

    def is_alive(self) -> bool:
        """Whether neither this optimizer nor its DHT was shut down."""
        return not self._closed and self.dht.is_alive()

    @property
    def is_training(self) -> bool:
        """Whether it has a part in its run: it has not left."""
        return not self._left and self.dht.is_alive()

    def is_synchronized_with_peers(self) -> bool:
        """Whether no better state is known than this peer's."""
        return self._chains.is_synchronized()

    @untraced
    def announce_end(self, epoch: int | None) -> None:
        """Say where the run ends as far as this peer is concerned: call it on every peer.

        The run ends at this epoch when peers that made more than half of the samples of the last rounds say that it
        ends there, or before. So no single peer ends it; a peer that is alone does. The others hear it with the next
        round: say it one epoch before at the latest. A peer that is at the end goes on if it says a later one.

        Args:
            epoch: the last one; None takes back an earlier announcement.

        Raises:
            ConfigError: `epoch` is not a number of epochs.
            ClosedError: the optimizer or its DHT was shut down.
        """
        self._check_open()
        self._chains.announce_end(None if epoch is None else whole("epoch", epoch, most=MAX_EPOCH))

    # ------------------------------------------------------------------------------------------------------------ step

    @untraced
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Accumulate the gradients in `.grad`; take the swarm's step when it is time.

        Waits only while a round goes on. Gradients computed while the swarm stepped, or on a state that is not the
        swarm's any more, are dropped; so is, with a warning, a batch whose gradients are not finite.

        If it is interrupted (Ctrl+C), the next call goes on from there; gradients that were counted already count once.
        If it was in the middle of the inner optimizer's step, that is not repeated, and another peer's state is
        downloaded if there is one. It is the same if the inner optimizer's step raises; that error is raised here, and
        the epoch does not count for this peer. Where each peer steps on its own batches, such a batch counts if
        something has moved, and is dropped if not.

        Args:
            closure: forward and backward pass; its result is returned.
            batch_size: samples that the gradients are the mean of; default `batch_size_per_step`, or what was counted.
            grad_scaler: that the loss was scaled with: as `grad_scaler.step(swarm)`, after which `update()` is called.

        Raises:
            ConfigError: no batch size; another kind of `grad_scaler`; the run is trained with other settings; or since
                the optimizer was made, a parameter was added or unfrozen, a state was loaded into the inner optimizer,
                or an option (a learning rate) was set to a number of no use.
            StateUnavailable: the run goes on without this peer, and gave it no state in time (`require_state`).
            LocalError: another thread is in `step` or `load_state_dict`.
            ClosedError: the optimizer or its DHT was shut down.
        """
        if grad_scaler is not None and not self.auxiliary:
            return self._unscaled_step(grad_scaler, closure, batch_size)
        if self.auxiliary and (closure, batch_size, grad_scaler) != (None, None, None):
            raise ConfigError(
                "step() of an auxiliary peer takes no closure, batch_size or grad_scaler: it has no batches"
            )
        with self._one_step.acquire_in_thread(timeout_s=0.0) as alone:
            if not alone:
                raise LocalError(
                    "step() is called while another step() is running, or load_state_dict(): call them from one thread "
                    "at a time"
                )
            gradients, self._counted = torch.is_grad_enabled(), False
            try:
                result = self._step(closure, batch_size)
                self._spent = None
                return result
            except BaseException:
                if self._counted:
                    self._spent = SpentGradients(self._training.trained)
                if not self._closed and self._chains.at_end:
                    self._chains.stay_at_end()  # the loop may compute another batch before the next call
                raise
            finally:
                # `torch.no_grad` is Python code, and left open by an interrupt at its end; this is one call of C.
                torch._C._set_grad_enabled(gradients)  # noqa: SLF001

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Torch's `GradScaler.step` asks for this, and that it was called is to be known: it may leave `step` out."""
        self._watch.scaler_steps()
        return False

    def _unscaled_step(
        self, scaler: torch.amp.GradScaler, closure: Callable[[], Any] | None, batch_size: int | None
    ) -> Any:
        if not isinstance(scaler, torch.amp.GradScaler):
            raise ConfigError(f"grad_scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        check_closure(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = scaler.step(self, batch_size=batch_size)
        if self.reuse_grad_buffers:
            self.zero_grad()  # the scaler may have left the step out
        return found if closure is None else loss

    def _step(self, closure: Callable[[], Any] | None, batch_size: int | None) -> Any:
        _check_mode("step() was called")
        self._training.stepper.compute_as_here()
        check_closure(closure)
        if self._inner_groups is not self._training.optimizer.param_groups:
            raise ConfigError(
                "load_state_dict of the inner optimizer was called, and other peers do not know of it: call that of "
                "the shoal.Optimizer, after the model's"
            )
        if self.param_groups is not self._inner_groups:
            raise ConfigError(
                "param_groups was assigned a new list, which the inner optimizer does not read: change the groups that "
                "are there, as in optimizer.param_groups[0]['lr'] = 0.1"
            )
        if closure is None and batch_size is None and not self.auxiliary and self._asked_for_statistics():
            with self._training.stepper.at_work():  # for whoever looks before a real step
                self.state = defaultdict(dict, blank_statistics(self._training.optimizer))
            return None
        self.state = self._training.optimizer.state
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        samples = self._samples_of(batch_size)
        self._check_open()
        self._chains.tell_loaded()  # if the loading of a state was interrupted
        self._follow_schedule()
        self._follow_loaded_weights()
        if self._model is not None:
            self._model.check()
            if not self._model_told:
                self._warn_of_model(self._model)
            if names := self._changed_tensors(self._model):
                what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"
                self._warn(
                    f"{what} of the model changed since the run began, but not by training: other peers do not have "
                    "the new values. Leave what is not trained as it is; what is meant to move, give in extra_tensors"
                )
        if not self.auxiliary and (message := self._watch.at_step()) is not None:
            self._warn(message)
        try:
            loss = self._count(samples, loss)
        finally:
            self._schedules.seen()
            if self.reuse_grad_buffers:
                self.zero_grad()
        self._saver.at_step(self._chains.state, self._copy, finished=self.finished)
        return loss

    def _changed_tensors(self, model: TrainedModel) -> list[str]:
        names = []
        try:
            for name in model.changes():
                names.append(name)  # noqa: PERF402 (those before an error are told)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._warn(f"a look at tensors that are not trained was left out, because of no memory ({error})")
        return names

    def _asked_for_statistics(self) -> bool:
        training = self._training
        began = bool(training.epoch or training.pending.samples or training.batches)
        return are_asked_for(training.optimizer, training.trained, began=began)

    def _samples_of(self, batch_size: int | None) -> int:
        if self.auxiliary:
            return 0
        given = self.batch_size_per_step if batch_size is None else batch_size
        return samples_of(
            given, self._rows, self._warn, may_be_pairs=any(each.dht is self.dht for each in self._others())
        )

    def samples_are_given(self) -> None:
        """Whoever calls `step` gives the samples each time, and knows them: they are not counted from the model."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    @property
    def shared_tensors(self) -> list[torch.Tensor]:
        """The parameters and extra tensors that its run shares."""
        return [*self._training.parameters, *self._training.extra_tensors]

    def another_shares(self, tensors: Sequence[torch.Tensor]) -> None:
        """Another run of this program shares these tensors: they may be in this one's model, and move."""
        if self._model is not None:
            self._model.shared_elsewhere(tensors)

    def _others(self) -> list[Optimizer]:
        """Those that train other parameters in this program now."""
        made = [each() for each in list(_run_of.values())]
        return [each for each in made if each is not None and each is not self and each.is_training]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the optimizer was shut down: make another one")
        self.dht.loop_thread.check_alive()

    def _follow_loaded_weights(self) -> None:
        """Before the first batch the model may be given other weights, as with any optimizer: name those.

        Later, where each peer steps alone, loaded weights are no training, and merging them as such would move all.
        They are a state of this peer's own, which gives way to that of the others; of a peer alone it is the state.
        """
        first, self._asked = not (self._asked or self.local_epoch), True
        loaded = self._model is not None and self._model.was_loaded()
        if not (first or loaded):
            return
        with self._lock.acquire_in_thread():
            if not self._chains.follow_weights(named=first):
                return
        self._chains.tell_loaded()
        if not first:
            self._warn(
                f"weights were loaded into the model at epoch {self.local_epoch}, and other peers do not have them: "
                "this peer takes over the state of the others, or trains on from these weights if it is alone. To load "
                "a state, call load_state_dict() of the shoal.Optimizer after the model's, before the first step"
            )

    def _follow_schedule(self) -> None:
        """A schedule that was made over this optimizer since the last step becomes the run's, which only it moves."""
        if is_moved(self._training.schedule.scheduler):
            with self._lock.acquire_in_thread():
                self._training.schedule.put_back()
        if (found := self._schedules.find()) is None:
            return
        what = f"the {type(found).__name__} that was made over this optimizer"
        with self._lock.acquire_in_thread():
            if self._own_schedule:
                self._training.schedule.restore_rates()
                message = f"{what} has no effect: the run's schedule is the one that was given as scheduler"
            else:
                self._training.schedule.adopt(found)
                message = (
                    f"{what} is moved by the run: its own step() does nothing, and its warm-up and its length count "
                    f"{self.strategy.terms.counted_in}"
                )
        self._warn(message)

    def _warn(self, message: str) -> None:
        _warn(self.dht, message)

    def _count(self, samples: int, loss: Any) -> Any:
        chains, over = self._chains, self._chains.at_end
        if samples:
            self._accumulate(samples, over=over)
        if self.finished:
            self._past_end += 1
            if self._past_end == _GOES_ON:
                self._warn(f"the run has ended at epoch {self.local_epoch}: step() does nothing; look at `finished`")
            chains.stay_at_end()
            return loss
        if over:
            chains.stay_at_end()  # before others are given a copy
        chains.take_turns(self.averaging_timeout, self.load_state_timeout, trained=samples > 0)
        if (ends := chains.missed_ends()) is not None:
            self._look_for_end(ends)
        if chains.at_end:
            chains.stay_at_end()
        return loss

    def _accumulate(self, samples: int, *, over: bool) -> None:
        training = self._training
        if self._spent is None or not self._spent.are_there():
            with self._lock.acquire_in_thread():
                held, begun, worth = training.pending.held, training.stepper.steps, None
                try:
                    worth = not over and (training.accumulate(samples) or training.comes_too_late)
                finally:
                    if worth is None:  # an error, or an interrupt: a batch that has taken effect is not to come again
                        worth = training.pending.held > held or training.stepper.steps != begun or None
                    if worth is not None:
                        self._counted = True
                        self._chains.count(samples, worth=worth)
            if not over and (error := training.raised) is not None:
                if isinstance(error, Exception):
                    becomes = "The parameters have moved, so the batch counts" if worth else "The batch is dropped"
                    self._warn(
                        f"the optimizer's own step raised {type(error).__name__}: {error}. {becomes}. If every step "
                        "raises, mend the optimizer or its options"
                    )
                raise error
        self._counted = True

    @untraced
    def load_state_from_peers(
        self,
        timeout: float | None = None,
        wait: bool = True,  # noqa: FBT002 (as hivemind has it)
    ) -> bool:
        """Download the swarm's state if it is better than this peer's.

        That is parameters, extra tensors, optimizer statistics, epoch and schedule: all of it, or nothing. Gradients
        that are there then, of the state before, do not count.

        Args:
            timeout: seconds; default `load_state_timeout`.
            wait: False to return at once: a better state is downloaded in the background, and a later `step` takes it
                over.

        Returns:
            Whether a state was taken over; False if there is none better than ours.

        Raises:
            ConfigError: `timeout` is no number of seconds above 0.
            StateUnavailable: there is one, and nobody gave it. Nothing was changed, but for other fragments if peers
                merge several.
            ClosedError: the optimizer or its DHT was shut down.
        """
        self._check_open()
        timeout_s = seconds("timeout", timeout, self.load_state_timeout)
        if not flag("wait", wait):
            return False  # all peers look for a better state all the time
        taken = self._chains.load_from_peers(timeout_s)
        if taken:
            self._spent = SpentGradients(self._training.trained)  # of the state before
        return taken

    # ------------------------------------------------------------------------------------------- torch's interface

    @untraced
    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, and under `"shoal"` where the run stands; plain torch does without that.

        If peers merge, the anchor and the outer optimizer are under `"shoal"`, too. If `step` was called with gradients
        of zero before the first batch, as `torch.distributed.checkpoint` does, it has the statistics of an optimizer
        that has taken no step, to load others into.

        Raises:
            LocalError: a hook of the inner optimizer calls it, within a step.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = self._save()
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = _unless_none(after(self, saved), saved)
        return saved

    def _save(self) -> dict[str, Any]:
        with self._between_steps("state_dict"):
            return {**shown_in(self._training.optimizer, self.state), "shoal": self._chains.place()}

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of the inner optimizer, to resume from a checkpoint.

        Load the model's before: the samples of the state are what has trained its weights. With a state dict of this
        class the epoch and the schedule go on from where it was saved; a schedule's own state may be loaded, too. The
        peers of a run take the best state: that which most samples went into, and before the first epoch that whose
        optimizer has taken most steps. If only one of the two runs merges, their epochs are not the same: then the
        optimizer's statistics are taken, epoch and schedule stay, and a warning says so. As in plain torch the
        optimizer takes the tensors of the dict, and its steps change them: give a `copy.deepcopy` if you need the dict
        afterwards.

        Raises:
            ConfigError: it is not of this optimizer, or was saved with other weights than the model has, or `eval` was
                called and `train` was not; nothing was loaded.
            LocalError: `step` is running; nothing was loaded.
            ClosedError: the optimizer or its DHT was shut down.
        """
        self._check_open()
        _check_mode("load_state_dict() was called")
        with self._one_step.acquire_in_thread(timeout_s=0.0) as alone:
            if not alone:  # the change that the step has made ready is of the state before
                raise LocalError("load_state_dict() is called while step() is running: call it between two steps")
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = _unless_none(before(self, state_dict), state_dict)
            self._load(state_dict)
            for after in self._optimizer_load_state_dict_post_hooks.values():
                after(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        if not isinstance(state_dict, Mapping):
            raise ConfigError(f"state_dict must be what state_dict() gave, got {type(state_dict).__name__}")
        saved = dict(state_dict)
        about = saved.pop("shoal", None)
        if about is None and isinstance(state := saved.get("state"), Mapping):
            saved["state"] = without_blank_step(state)
        with self._lock.acquire_in_thread():
            if self._training.weights.are_aside:
                raise ConfigError(
                    "load_state_dict() is called between eval() and train(), which puts back the weights before: call "
                    "train() of the shoal.Optimizer, then load the model's state and this one"
                )
            found = self._chains.prepare(about)
            try:
                with self._training.stepper.at_work():
                    optimizer = self._training.kept.prepare_loaded(saved)
            except ValueError as error:
                raise ConfigError(f"state_dict does not fit this optimizer: {error}") from error
            self._chains.load(found, optimizer)
            self.state = self._training.optimizer.state
        self._chains.tell_loaded()

    @untraced
    def save(self, folder: str | os.PathLike[str], *, keep: int | None = None) -> Path:
        """Save a checkpoint: what a newcomer downloads, and with `model` its buffers. Returns when it is on the disk.

        Call it between two steps; also after `shutdown`. `model.safetensors` in it has the weights under the names of
        the model. There is a whole checkpoint afterwards, or none.

        Args:
            folder: path of the folder of checkpoints; it is made if it is not there. Peers may share it.
            keep: so many states of this run stay in it, of those that are no better than this one, and the checkpoints
                of worse ones are removed. None: all stay.

        Returns:
            The path of the checkpoint, a folder in that folder.

        Raises:
            ConfigError: the folder cannot be written, or the state cannot be saved (it holds NaN, or the model was
                converted to another dtype).
            LocalError: `step` is running in another thread; or other values stand in the place of the parameters.
        """
        place = path("folder", folder)
        keep = None if keep is None else whole("keep", keep)
        with self._one_step.acquire_in_thread(timeout_s=0.0) as alone:
            if not alone:
                raise LocalError("save() is called while step() is running: call it between two steps")
            began = time.monotonic()
            content = self._copy()
        copy_s = time.monotonic() - began
        try:
            place.mkdir(parents=True, exist_ok=True)
            return self._saver.write(place, content, keep, copy_s)
        except OSError as error:
            raise ConfigError(f"folder cannot be written: {place}: {error}") from error

    def save_last(self) -> Path | None:
        """Save the state in the folder of `checkpoint`, unless it is there: for a program that ends early.

        Call it between two steps; also after `shutdown`. `keep_checkpoints` holds.

        Returns:
            The path of the checkpoint. None if `checkpoint` was not given, no step was taken, or the state is saved;
            or if a state was being loaded, and that was interrupted.

        Raises:
            ConfigError, LocalError: as `save`.
        """
        saver, state = self._saver, self._chains.state
        if saver.folder is None or not state.epoch or self._chains.untold or saver.has_saved(state):
            return None
        saved = self.save(saver.folder, keep=saver.keep)
        saver.was_saved(state)
        return saved

    def keep_given_up(self) -> Path | None:
        """Save the state that is about to be given up, beside the checkpoints (under the lock).

        Returns:
            The path where it will be; None if it is not saved.
        """
        return self._saver.keep_given_up(self._content)

    def _copy(self, memory: Files | None = None) -> Content:
        with self._lock.acquire_in_thread():
            return self._content(memory)

    def _content(self, memory: Files | None = None) -> Content:
        self._training.tensors.check_dtypes()
        chains = self._chains
        state, described = chains.export(), chains.places()
        model = {} if self._model is None else self._model.to_save()
        settings = chains.first.settings.fingerprint
        return copy_of(self.run_id, state, chains.state, settings, described, model, memory, chains.shared)

    def resume(self, folder: str | os.PathLike[str]) -> Path | None:
        """Go on from the whole checkpoint of the best state in a folder, unless the state here is better.

        Call it before the first step. Damaged checkpoints are passed over with a warning. If other peers are further,
        `step` downloads their state afterwards, as always. Where `checkpoint` was given, this was done already.

        Args:
            folder: path of the folder that was given to `save` or as `checkpoint`; or of one checkpoint in it.

        Returns:
            The path of the checkpoint that was taken over. None if there is none: training starts anew.

        Raises:
            ConfigError: the checkpoints are of another run, model or optimizer; what differs is named. Nothing was
                taken over.
            LocalError: `step` is running in another thread.
            ClosedError: the optimizer or its DHT was shut down.
        """
        self._check_open()
        _check_mode("resume() was called")
        with self._one_step.acquire_in_thread(timeout_s=0.0) as alone:
            if not alone:
                raise LocalError("resume() is called while step() is running: call it between two steps")
            place = path("folder", folder)
            saved = self._saver.find(place, self._chains.first.settings.fingerprint)
            with self._lock.acquire_in_thread():
                mine = self._chains.state
                if saved is not None and mine.epoch and mine.key >= saved.name.key:
                    saved = None
                if saved is not None:
                    self._chains.resume(saved)
                self._has_resumed(place, saved)
            self._chains.tell_loaded()
            return None if saved is None else saved.path

    def _look_for_end(self, ends: Collection[bytes]) -> None:
        """The others have ended the run without this peer: take over their last state from the folder, if it is there.

        Args:
            ends: the digests of the states at which they have ended; none if they have not said it: then any better
                state of the run's last epoch is one.
        """
        folder, mine, found = self._saver.folder, self._chains.state, False
        with suppress(ConfigError, OSError, MemoryError):  # there is nothing of use in it, or no room for it here
            saved = folder and self._saver.find(folder, self._chains.first.settings.fingerprint, ends or None)
            last = self._chains.last_epoch
            if folder and saved and (ends or (saved.name.epoch == last and saved.name.key > mine.key)):
                with self._lock.acquire_in_thread():
                    self._chains.resume(saved)
                    found = True
                    self._has_resumed(folder, saved)
        self._chains.looked_for_end(found=found)

    def _has_resumed(self, folder: Path, saved: Saved | None) -> None:
        """A checkpoint in this folder was taken over, if there is a better one than the state here."""
        if saved is not None and self._model is not None:
            self._model.restore_statistics(saved.model)
        self._saver.resumed(folder, saved, self.local_epoch)

    def eval(self) -> None:
        """Put the weights to evaluate with in place, where the inner optimizer has such (ScheduleFree); else nothing.

        Call this one instead of the inner optimizer's: its way back rounds, and this peer's weights would differ from
        the others'. Until `train` it keeps a copy of the parameters, which newcomers are given, and `step` raises.

        Where each peer steps on its own batches, such weights are its own. So at the end of such a run `eval` changes
        nothing: all peers keep the weights of the run.
        """
        with self._between_steps("eval"):
            if not (self._training.steps_alone and self._chains.at_end):
                self._training.weights.evaluate()

    def train(self) -> None:
        """Put the weights to train with in place again, with the bits that they had."""
        with self._between_steps("train"):
            self._training.weights.train()

    def _between_steps(self, caller: str) -> AbstractContextManager[bool]:
        """Hold the lock of the parameters. Hooks of the inner optimizer would wait for themselves."""
        if self._lock.held_by_this_thread:
            raise LocalError(f"{caller}() is called within the inner optimizer's step: call it between two steps")
        return self._lock.acquire_in_thread()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: the tensors of a run are fixed.

        Raises:
            ConfigError: always, afterwards.
        """
        if hasattr(self, "_chains"):
            raise ConfigError("parameters cannot be added to a run that has begun: make a new optimizer")
        super().add_param_group(param_group)

    def shutdown(self) -> None:
        """Leave the run. The DHT goes on. Safe to call twice. Also done once nothing refers to the optimizer."""
        if not self._closed and (message := self._chains.never_averaged()) is not None:
            self._warn(message)
        self._closed = True
        if not self._left and self.dht.is_alive():
            for closing in (self._chains.leave, self._saver.close):
                self.dht.loop_thread.run(closing(), self._shutdown_timeout + GRACE_S)
            self._forget_closer()
        self._dropped.detach()
        self._left = True
        self._watch.close()
        if self._rows is not None:
            self._rows.close()
        if self._model is not None:
            self._model.close()
        self._stop_guarding()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        raise LocalError(
            "a shoal.Optimizer is one peer's part in a run, and cannot be copied or pickled: use its state_dict()"
        )

    def __repr__(self) -> str:
        return f"Optimizer(run_id={self.run_id!r}, epoch={self.local_epoch}, inner={self._training.optimizer!r})"


def _unless_none(changed: T | None, given: T) -> T:
    """What a hook of torch's returned takes the place of what it was given, unless that is None."""
    return given if changed is None else changed


def _check_mode(what: str) -> None:
    if torch.is_inference_mode_enabled():
        raise ConfigError(f"{what} within torch.inference_mode(), where nothing can be trained: leave it")


async def _close(chains: Chains, saver: Saver) -> None:
    await chains.leave()
    await saver.close()


def _of_a_group(dht: object) -> str:
    """What to use where a rank of a group has no DHT."""
    if dht is not None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ""
    return ". Where rank 0 alone has one, shoal.integrations.ddp.GroupOptimizer makes one peer of the whole group"


def _warn(dht: DHT, message: str) -> None:
    _emit(dht, Warned(where="optimizer", message=message))


def _emit(dht: DHT, event: Event) -> None:
    """In the loop, as long as it goes on: a thread that is interrupted within `logging` may keep its lock for ever."""
    if dht.loop_thread.alive:
        dht.loop_thread.call_soon(partial(dht.events.emit, event))
    else:
        dht.events.emit(event)


def _keep_given_up(ours: weakref.ref[Optimizer]) -> Path | None:
    return None if (swarm := ours()) is None else swarm.keep_given_up()


def _leave_when_dropped(
    swarm: Optimizer, thread: LoopThread, chains: Chains, forget_closer: Callable[[], None]
) -> weakref.finalize[[], Optimizer]:
    """Once nobody holds the optimizer, other peers shall not wait for it, and its run's name is free."""

    async def leave() -> None:
        await chains.leave()
        forget_closer()  # until now the end of the DHT waits for it

    def begin() -> None:
        with suppress(ClosedError):
            thread.submit(leave())

    dropped = weakref.finalize(swarm, begin)
    dropped.atexit = False  # the DHT sees to that
    return dropped


def _guard_step(inner: torch.optim.Optimizer, ours: weakref.ref[Optimizer]) -> Callable[[], None]:
    """Refuse the inner optimizer's own step, which no other peer takes; returns a function that ends that."""

    def check(*_: object) -> None:
        swarm = ours()
        if swarm is not None and not swarm._training.stepper.is_stepping and swarm.dht.is_alive():  # noqa: SLF001
            raise LocalError(
                "step() of the inner optimizer was called, which would make this peer's parameters differ from the "
                "others': call step() of the shoal.Optimizer only"
            )

    _run_of[inner] = ours
    if not hasattr(inner, "_optimizer_step_pre_hooks"):
        return lambda: None  # it wraps another one, and is no whole torch optimizer
    return inner.register_step_pre_hook(check).remove


def _inner(
    params: Any, optimizer: Any, model: torch.nn.Module | None, *, offload: bool
) -> tuple[torch.optim.Optimizer, Offload | None]:
    """The torch optimizer, and what lends its parameters host memory, if it is to step there."""
    _check_mode("shoal.Optimizer() was made")
    if model is not None:
        learn_names(model)
    inner, lends = make_inner(params, optimizer, offload)
    return _free(inner), lends


def _free(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, if it takes no run's steps yet; else raises `ConfigError`: two runs would undo each other's."""
    if isinstance(inner, Optimizer):
        raise ConfigError(
            f"optimizer is a shoal.Optimizer itself, of run {inner.run_id!r}: call its shutdown(), and give the torch "
            "optimizer that it was made with"
        )
    trained = {id(each) for group in inner.param_groups for each in group["params"] if each.requires_grad}
    for made in list(_run_of.values()):
        other = made()
        if other is None or not other.is_training:
            continue
        if any(id(each) in trained for each in other._training.trained):  # noqa: SLF001
            raise ConfigError(
                f"optimizer has parameters that another shoal.Optimizer trains, of run {other.run_id!r}: make one, of "
                "other parameters, for each run; or call shutdown() of that shoal.Optimizer first"
            )
    return inner
