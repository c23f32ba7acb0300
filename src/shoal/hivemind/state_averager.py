"""`TrainingStateAverager`: keeps parameters, optimizer and schedule of peers together that take their own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from shoal.base.checks import flag, whole
from shoal.base.untraced import untraced
from shoal.errors import ConfigError, LocalError, RoundFailed
from shoal.events import Warned
from shoal.hivemind.arguments import StateAveragerOptions, check_state_averager_options
from shoal.hivemind.training_averager import TrainingAverager
from shoal.runtime.averager import DecentralizedAverager
from shoal.runtime.control import StepControl
from shoal.runtime.dht import DHT
from shoal.train.inner import make_inner, make_scheduler
from shoal.train.offload import Offload
from shoal.train.schedule import advance, tell_rates

__all__ = ["TrainingStateAverager"]


class _Pending(NamedTuple):
    """A round in the background, and the tensors as they were when it began, if they may change meanwhile."""

    control: StepControl
    before: list[torch.Tensor] | None


class TrainingStateAverager(TrainingAverager):
    """Holds what one peer trains, takes its steps, and averages its state with the other peers of a prefix.

    Call `step` after each batch, and say what it is to do. The names are those of hivemind 1.1.12.

    Args:
        dht: this peer.
        prefix: peers with the same prefix meet.
        start: connect now; else at `run_in_background`.
        optimizer: a torch optimizer, or a function `params -> optimizer`.
        params: parameters or parameter groups, if `optimizer` is a function of them.
        scheduler: a torch scheduler, or a function `optimizer -> scheduler`; it follows `local_epoch`.
        initialize_optimizer: as for `TrainingAverager`; None: True.
        delta_rule_averaging: keep what was changed while a round went on: it is added to the average.
        sync_epoch_when_averaging: go on to the latest epoch of the group after each average.
        parameter_names: as for `TrainingAverager`.
        average_opt_statistics: as for `TrainingAverager`.
        extra_tensors: as for `TrainingAverager`.
        offload_optimizer: keep the optimizer's statistics and what is averaged on the CPU, and step there; it needs
            `params` and a function as `optimizer`.
        options: of `DecentralizedAverager`, and those of hivemind that change nothing here.

    Attributes:
        local_epoch: counted by `step(increment_epoch=True)`.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    def __init__(  # noqa: PLR0913 (names that users of hivemind know)
        self,
        *,
        dht: DHT,
        prefix: str,
        start: bool,
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None = None,
        scheduler: Any = None,
        initialize_optimizer: bool | None = None,
        delta_rule_averaging: bool = False,
        sync_epoch_when_averaging: bool = False,
        parameter_names: Sequence[str | int] | None = None,
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[torch.Tensor] = (),
        offload_optimizer: bool = False,
        **options: Any,
    ) -> None:
        check_state_averager_options(_taken_out(options))
        self.optimizer, offload = make_inner(params, optimizer, offload_optimizer)
        self._offload = offload or Offload([])
        self.scheduler, self._epoch, self._scheduled = make_scheduler(self.optimizer, scheduler), 0, 0
        self.delta_rule_averaging = flag("delta_rule_averaging", delta_rule_averaging)
        self.sync_epoch_when_averaging = flag("sync_epoch_when_averaging", sync_epoch_when_averaging)
        self._pending: _Pending | None = None
        with self._offload.on_host():
            super().__init__(
                self.optimizer,
                dht=dht,
                prefix=prefix,
                start=start,
                average_parameters=True,
                average_gradients=False,
                average_opt_statistics=average_opt_statistics,
                extra_tensors=extra_tensors,
                parameter_names=parameter_names,
                initialize_optimizer=True if initialize_optimizer is None else initialize_optimizer,
                **options,
            )
        self.main_parameters = tuple(self._parameters)

    @property
    def local_epoch(self) -> int:
        """The epoch of this peer; setting it moves the schedule."""
        return self._epoch

    @local_epoch.setter
    def local_epoch(self, epoch: int) -> None:
        self._epoch = whole("local_epoch", epoch, least=0)
        self._move_schedule()

    @untraced
    def schedule_step(self, scheduled_time: float | None = None, **options: Any) -> StepControl:
        """Prepare a round for `step(averaging_control=...)`; as `GradientAverager.schedule_step`."""
        return self._begin(scheduled_time=scheduled_time, require_trigger=True, **options)

    def _begin(self, **options: Any) -> StepControl:
        if self.sync_epoch_when_averaging:
            options = {"gather": self.local_epoch, **options}
        control = DecentralizedAverager.step(self, wait=False, **options)
        assert isinstance(control, StepControl)
        return control

    @property
    def averaging_in_progress(self) -> bool:
        """Whether a round goes on in the background."""
        return self._pending is not None and not self._pending.control.done()

    @untraced
    def step(  # type: ignore[override]  # noqa: PLR0913 (names that users of hivemind know)
        self,
        *,
        wait_for_delayed_updates: bool | None = None,
        apply_delayed_updates: bool = True,
        increment_epoch: bool = False,
        optimizer_step: bool = False,
        zero_grad: bool = False,
        averaging_round: bool = False,
        delay_averaging: bool | None = None,
        averaging_control: StepControl | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        set_to_none: bool = True,
        averaging_opts: dict[str, Any] | None = None,
        wait_for_trigger: Callable[[], object] | None = None,
        **options: Any,
    ) -> Any:
        """Do what is asked for, in this order.

        Args:
            wait_for_delayed_updates: wait for a round in the background; None: before another round.
            apply_delayed_updates: set the tensors to the average of a round in the background that has ended. One that
                failed is a warning, and changes nothing.
            increment_epoch: count an epoch; the schedule follows after the optimizer's step.
            optimizer_step: take a step of the optimizer.
            zero_grad: clear the gradients.
            averaging_round: average with a group.
            delay_averaging: do so in the background; a later call applies the average.
            averaging_control: of a round that `schedule_step` has prepared.
            grad_scaler: takes the optimizer's step.
            set_to_none: `zero_grad` sets gradients to None, else to 0.
            wait_for_trigger: called before the optimizer's step, which so waits for what it waits for.
            averaging_opts: options of `DecentralizedAverager.step` for the round: `weight`, `timeout`, ...
            options: those of hivemind that change nothing here.

        Returns:
            `{peer id: its `gather` value}` of a round that was averaged or applied; else None.

        Raises:
            RoundFailed: no average of a round that was not delayed; steps that were asked for were taken.
            ConfigError: an argument is wrong.
            LocalError: `averaging_control` was used before.
        """
        check_state_averager_options(options)
        if (averaging_opts or averaging_control is not None) and not averaging_round:
            raise ConfigError("averaging_opts and averaging_control need averaging_round=True")
        control = averaging_control
        if control is not None and (control.triggered or control.done()):
            raise LocalError("averaging_control is of a round that was begun, or is over: call schedule_step() again")
        gathered = None
        waits = averaging_round if wait_for_delayed_updates is None else wait_for_delayed_updates
        if self._pending is not None and apply_delayed_updates and (waits or self._pending.control.done()):
            gathered = self._apply_pending()
        if self._pending is not None and averaging_round:
            raise ConfigError("averaging_round=True needs the end of the round before: wait for it")
        self._epoch += flag("increment_epoch", increment_epoch)
        if optimizer_step:
            if wait_for_trigger is not None:
                wait_for_trigger()
            with self.get_tensors(), self._offload.with_gradients():
                self.optimizer.step() if grad_scaler is None else grad_scaler.step(self.optimizer)
        if zero_grad:
            self.optimizer.zero_grad(set_to_none)
        self._move_schedule()
        if averaging_round:
            before = self._copy_in(keep=self.delta_rule_averaging)
            control = control or self._begin(**(averaging_opts or {}))
            control.allow_allreduce()
            self._pending = _Pending(control, before)
            if not delay_averaging:
                gathered = self._finish()
        return gathered

    def _finish(self) -> Any:
        assert self._pending is not None
        (control, before) = self._pending
        try:
            gathered = control.result()
        except BaseException:
            control.cancel()
            raise
        finally:
            self._pending = None
        self._copy_out(before)
        if self.sync_epoch_when_averaging:
            self.local_epoch = max([self.local_epoch, *(each for each in gathered.values() if type(each) is int)])
        return gathered

    def _apply_pending(self) -> Any:
        try:
            return self._finish()
        except RoundFailed as error:
            warning = Warned(where=f"averager {self.prefix}", message=f"a round in the background failed: {error}")
            self.dht.loop_thread.call_soon(partial(self.dht.events.emit, warning))
            return None

    def _move_schedule(self) -> None:
        while self.scheduler is not None and self._scheduled < self._epoch:
            self._scheduled += 1
            advance(self.scheduler)

    def get_current_state(self) -> tuple[Any, ...]:
        """The state that others download from here, with the epoch."""
        metadata, tensors = super().get_current_state()
        return {**metadata, "epoch": self.local_epoch}, tensors

    def _fits(self, metadata: Any) -> bool:
        return type(metadata["epoch"]) is int and metadata["epoch"] >= self.local_epoch

    def _took_over(self, metadata: Any) -> None:
        self._epoch = metadata["epoch"]
        rated = [group for group in self.optimizer.param_groups if group.get("lr") is not None]
        rates = [float(group["lr"]) for group in rated]
        self._move_schedule()
        for group, rate in zip(rated, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        tell_rates(self.scheduler, rated)


def _taken_out(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options.pop(name) for name in StateAveragerOptions.__annotations__.keys() & options.keys()}
