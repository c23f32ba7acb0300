"""`GradientAverager`: accumulates gradients and averages them, for training loops that take their own steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from shoal.averaging.allreduce.vector import check_tensors
from shoal.base.checks import flag, seconds, whole
from shoal.base.clock import seconds_text
from shoal.base.peer import PeerID
from shoal.base.untraced import untraced
from shoal.compression import CompressionInfo, TensorRole
from shoal.errors import ConfigError, LocalError, RoundFailed
from shoal.events import Warned
from shoal.runtime.averager import DecentralizedAverager
from shoal.runtime.control import StepControl
from shoal.runtime.dht import DHT
from shoal.runtime.thread import GRACE_S
from shoal.train.gradient_sum import GradientSum

__all__ = ["GradientAverager", "succeeded"]


class _Taken(NamedTuple):
    """Gradients that a step took out of the accumulators before it has ended."""

    sums: list[torch.Tensor | None]
    samples: int
    times: int


class GradientAverager(DecentralizedAverager):
    """Averages the gradients of some parameters with the other peers of the same `prefix`, weighted by their samples.

    `accumulate_grads_` adds the gradients in `.grad` to this peer's accumulators. `step` averages their mean with the
    others. Within `use_averaged_gradients` the parameters have that average as `.grad`, with the same bits on every
    member of the group. So peers that began with equal parameters, and step together, stay equal. If a step fails, the
    accumulators keep their gradients. One thread at a time may call these methods. The names are those of hivemind
    1.1.12.

    Args:
        parameters: in the same order on all peers.
        dht: this peer.
        prefix: peers with the same prefix meet.
        start: connect now; else at `run_in_background`.
        reuse_grad_buffers: accumulate in `.grad` itself: backward adds to it, and the loop must not call `zero_grad`.
            It saves one copy of the gradients. The mean is then that of the batches, whatever their sizes.
        accumulate_grads_on: the device of the accumulators; None: that of each parameter.
        client_mode: this peer only dials; None takes it from `dht`.
        warn: warn about an average that was not used, and about accumulators that were not reset.
        averaged_grads: tensors for the average, one for each parameter and of its shape; None: new ones, of the
            parameters' dtypes and devices.
        options: of `DecentralizedAverager`.

    Attributes:
        local_samples_accumulated: samples in the accumulators.
        local_times_accumulated: batches in the accumulators.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    _stays = False

    def __init__(  # noqa: PLR0913 (names that users of hivemind know)
        self,
        parameters: Iterable[torch.Tensor],
        *,
        dht: DHT,
        prefix: str,
        start: bool,
        reuse_grad_buffers: bool = False,
        accumulate_grads_on: torch.device | str | None = None,
        client_mode: bool | None = None,
        warn: bool = True,
        averaged_grads: Sequence[torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        self.parameters = _checked(parameters)
        self.reuse_grad_buffers, self.warn = flag("reuse_grad_buffers", reuse_grad_buffers), flag("warn", warn)
        averaged = [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in self.parameters]
        if averaged_grads:
            averaged = list(averaged_grads)
            if [each.shape for each in averaged] != [p.shape for p in self.parameters]:
                raise ConfigError("averaged_grads must be one tensor for each parameter, of its shape")
        self._averages = averaged
        self._sum = None
        if not self.reuse_grad_buffers:
            self._sum = GradientSum(self.parameters, unit=1, device=_device(accumulate_grads_on))
        self.local_samples_accumulated = self.local_times_accumulated = 0
        self._control: StepControl | None = None  # of the last step
        self._taken: _Taken | None = None
        self._loaded = self._used = self._to_reset = False
        travelling, owners = self._travelling()
        pairs = zip(travelling, owners, strict=True)
        infos = [CompressionInfo.from_tensor(each, i, TensorRole.GRADIENT) for each, i in pairs]
        options = {"tensor_infos": infos, **options}
        super().__init__(travelling, dht, start=start, prefix=prefix, client_mode=client_mode, **options)

    @classmethod
    def get_factory(cls, **options: Any) -> partial[Self]:
        """This class with some of its arguments given: for `shoal.Optimizer(grad_averager_factory=...)`."""
        return partial(cls, **options)

    def _travelling(self) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
        """The tensors that a round averages, and the number of the parameter that each is about."""
        return self._averages, range(len(self._averages))

    # --------------------------------------------------------------------------------------------------- accumulators

    @untraced
    def accumulate_grads_(self, batch_size: int) -> None:
        """Add the gradients in `.grad`, the mean over `batch_size` samples; parameters without one count as 0.

        Raises:
            ConfigError: `batch_size` is not a whole number of at least 1.
            LocalError: no parameter has a gradient.
        """
        batch_size = whole("batch_size", batch_size)
        self._settle()
        numbers = [index for index, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if not numbers:
            raise LocalError("accumulate_grads_() was called and no parameter has a gradient: call backward() before")
        if self._to_reset and self.warn:
            self._warn(
                "gradients are added to those that the last step has averaged already, and count again: call "
                "reset_accumulated_grads_(), or step(reset_accumulators=True)"
            )
        self._to_reset = False
        if self._sum is not None:
            self._sum.add(numbers, batch_size)
        self.local_samples_accumulated += batch_size
        self.local_times_accumulated += 1

    @untraced
    def reset_accumulated_grads_(self) -> None:
        """Forget the gradients in the accumulators."""
        self._settle()
        self._reset()

    @untraced
    def load_accumulators_into_averager_(self) -> None:
        """Set the averaged gradients to this peer's own mean, without the others; `step` does so before it averages.

        Raises:
            LocalError: a step is under way.
        """
        self._settle()
        self._check_no_step()
        count = self.local_times_accumulated if self._sum is None else self.local_samples_accumulated
        with torch.no_grad(), self.get_tensors():
            for tensor, accumulated in zip(self._averages, self._accumulators(), strict=True):
                if accumulated is None or not count:
                    tensor.zero_()
                else:
                    tensor.copy_(accumulated / count)
        self._loaded = True

    def _accumulators(self) -> Sequence[torch.Tensor | None]:
        return [parameter.grad for parameter in self.parameters] if self._sum is None else self._sum.tensors

    def _reset(self) -> None:
        self.local_samples_accumulated = self.local_times_accumulated = 0
        self._to_reset = False
        for accumulated in self._accumulators():
            if accumulated is not None:
                accumulated.zero_()

    def _settle(self) -> None:
        """Gradients that a step took in vain count again, once it has ended."""
        if self._taken is None or self._control is None or not self._control.done():
            return
        taken, self._taken = self._taken, None
        if succeeded(self._control):
            return
        with torch.no_grad():
            for parameter, accumulated, back in zip(self.parameters, self._accumulators(), taken.sums, strict=True):
                if accumulated is None:
                    parameter.grad = back
                elif back is not None:
                    accumulated.add_(back)
        self.local_samples_accumulated += taken.samples
        self.local_times_accumulated += taken.times

    # ------------------------------------------------------------------------------------------------------ averaging

    @untraced
    def schedule_step(self, scheduled_time: float | None = None, **options: Any) -> StepControl:
        """Prepare a step that `step(control=...)` takes.

        Args:
            scheduled_time: look for a group only from this time on, wall-clock seconds; None: at once.
            options: of `DecentralizedAverager.step`; not `weight`, which `step` gives.

        Returns:
            The handle of one step. It waits for `step` for `timeout` seconds; None: 300.
        """
        if options.pop("weight", None) is not None:
            raise ConfigError("weight cannot be given to schedule_step(): give it to step(), or set control.weight")
        control = super().step(scheduled_time=scheduled_time, wait=False, require_trigger=True, **options)
        assert isinstance(control, StepControl)
        return control

    @untraced
    def step(  # type: ignore[override]
        self,
        weight: float | None = None,
        reset_accumulators: bool = True,  # noqa: FBT002
        control: StepControl | None = None,
        timeout: float | None = None,
        wait: bool = True,  # noqa: FBT002
        **options: Any,
    ) -> Any:
        """Average the mean of the accumulated gradients with the others.

        If this fails, or is interrupted, the step is given up and the accumulators have their gradients. With
        `wait=False` they get them back with the next call of a method, once the step has ended.

        Args:
            weight: of this peer's gradients; None: the samples in the accumulators, so a peer that has none takes part
                without counting.
            reset_accumulators: empty the accumulators: after success, or at once with `wait=False`.
            control: a step that `schedule_step` prepared.
            timeout: seconds; None: 300, or what `control` has left.
            wait: False returns at once.
            options: of `DecentralizedAverager.step`, without `control`.

        Returns:
            `{peer id: its `gather` value}` of the group; with `wait=False` a `StepControl`, a future of it.

        Raises:
            RoundFailed: no average.
            ConfigError: an argument is wrong.
            LocalError: the step before is under way; `control` was used; the caller holds the averaged gradients.
        """
        reset, wait = flag("reset_accumulators", reset_accumulators), flag("wait", wait)
        limit_s = None if control is None or timeout is None else seconds("timeout", timeout, 0.0)
        if control is not None and options:
            raise ConfigError(f"{', '.join(options)} must be given to schedule_step(), not with control")
        if control is not None and (control is self._control or control.triggered or control.done()):
            raise LocalError("control is of a step that was taken, or is over: call schedule_step() for another one")
        self._settle()
        self._check_no_step()
        if self.warn and self._control is not None and succeeded(self._control) and not self._used:
            self._warn(
                "the average of the last step was not used: call use_averaged_gradients(), or "
                "notify_used_averaged_gradients() if it was used in another way"
            )
        control = control or self.schedule_step(timeout=timeout, **options)
        try:
            control.weight = self.local_samples_accumulated if weight is None else weight
            self.load_accumulators_into_averager_()
            self._control, self._loaded, self._used = control, False, False
            if reset and not wait:
                sums = [None if each is None else each.clone() for each in self._accumulators()]
                self._taken = _Taken(sums, self.local_samples_accumulated, self.local_times_accumulated)
                self._reset()
            self._to_reset = not reset
            control.allow_allreduce()
            if not wait:
                return control
            gathered = self._result(control, limit_s)
        except BaseException:
            control.cancel()
            raise
        if reset:
            self._reset()
        return gathered

    def _result(self, control: StepControl, limit_s: float | None) -> dict[PeerID, Any]:
        try:
            return control.result(limit_s)
        except TimeoutError:
            if control.cancel():
                raise RoundFailed(f"no average within timeout={seconds_text(limit_s or 0.0)}") from None
            return control.result()  # it ended at this moment

    def _check_no_step(self) -> None:
        if self._control is None:
            return
        # One that was cancelled may still be ending.
        if not self._control.done() or not self._control.ended.wait(GRACE_S):
            raise LocalError("the step before is under way: wait for the result of its control, or cancel it")

    # ---------------------------------------------------------------------------------------------------- the average

    @contextmanager
    def use_averaged_gradients(self) -> Iterator[list[torch.Tensor]]:
        """Within this block the parameters have the averaged gradients as `.grad`; afterwards their own ones again.

        The averaged gradients are locked within it, so keep it short. They are what the block gets.

        Raises:
            LocalError: there is no average: no step was taken, the last one is under way, or it failed.
        """
        self._settle()
        if not self._loaded:
            if self._control is None:
                raise LocalError("there are no averaged gradients yet: call step() before")
            self._check_no_step()
            if not succeeded(self._control):
                raise LocalError(
                    "the last step made no average: call step() again. To go on with the gradients of this peer alone, "
                    "call load_accumulators_into_averager_() before"
                )
        self._used = True
        with self.get_tensors():
            own = [parameter.grad for parameter in self.parameters]
            try:
                for parameter, gradient in zip(self.parameters, self._averages, strict=True):
                    parameter.grad = gradient.to(parameter)
                yield self._averages
            finally:
                for parameter, before in zip(self.parameters, own, strict=True):
                    parameter.grad = before

    def notify_used_averaged_gradients(self) -> None:
        """The average of the last step was used, in another way than by `use_averaged_gradients`: do not warn."""
        self._used = True

    def _warn(self, message: str) -> None:
        warning = Warned(where=f"gradient averager {self.prefix}", message=message)
        self.dht.loop_thread.call_soon(partial(self.dht.events.emit, warning))


def succeeded(control: StepControl) -> bool:
    """Whether its step has made an average."""
    return control.done() and not control.cancelled() and control.exception() is None


def _checked(parameters: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if isinstance(parameters, Iterable) and not isinstance(parameters, torch.Tensor):
        listed = tuple(parameters)
        if listed and all(isinstance(each, torch.Tensor) and each.requires_grad for each in listed):
            check_tensors([(f"parameters[{index}]", each) for index, each in enumerate(listed)])
            return listed
    raise ConfigError(
        f"parameters must be tensors that require a gradient, at least one, got {parameters!r:.80}: give a list, or "
        "model.parameters(), without those that are frozen"
    )


def _device(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"accumulate_grads_on must be a device, got {device!r:.80}") from error
