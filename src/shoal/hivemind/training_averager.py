"""`TrainingAverager`: averages what a torch optimizer trains, for training loops that take their own steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from shoal.averaging import TensorLock
from shoal.averaging.allreduce.vector import check_tensors
from shoal.base.checks import flag, seconds
from shoal.base.names import known_as, learn_from
from shoal.base.pool import DaemonPool
from shoal.base.untraced import untraced
from shoal.compression import CompressionInfo, TensorRole
from shoal.errors import ConfigError, LocalError, StateUnavailable
from shoal.runtime.averager import DecentralizedAverager
from shoal.runtime.dht import DHT
from shoal.runtime.sharing import DEFAULT_STATE_TIMEOUT_S
from shoal.train.optimizer_state import OptimizerState

__all__ = ["TrainingAverager"]

_CALLED = {
    TensorRole.PARAMETER: "parameter",
    TensorRole.GRADIENT: "gradient",
    TensorRole.OPTIMIZER: "statistic",
    TensorRole.UNSPECIFIED: "extra tensor",
}


class TrainingAverager(DecentralizedAverager):
    """Averages the parameters of a torch optimizer, their gradients or its statistics with the other peers of a prefix.

    `step` copies them, averages the copies, and sets them to the average. Afterwards all members of the group have the
    same bits. A step that fails changes nothing. The names are those of hivemind 1.1.12.

    Others download parameters, `extra_tensors` and the optimizer's whole state from here, unless `allow_state_sharing`
    is False. Call `opt.step()` within `with averager.get_tensors():`, else they may get a state from the middle of it.

    Args:
        opt: the optimizer; its parameters are in the same order on all peers.
        dht: this peer.
        prefix: peers with the same prefix meet.
        start: connect now; else at `run_in_background`.
        average_parameters: average the parameters.
        average_gradients: average `.grad` of those that require a gradient; one that is None counts as zeros.
        average_opt_statistics: names of statistics in the optimizer's state (`exp_avg_sq`) to average.
        extra_tensors: more tensors to average and to share.
        parameter_names: by which a codec may choose; None: those that `opt` was given, else their numbers.
        initialize_optimizer: where a statistic to average is missing, make it by a step with gradients of zero, which
            leaves the parameters as they are.
        options: of `DecentralizedAverager`.

    Attributes:
        local_step: successful steps, of this peer or of the one whose state it has downloaded.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    def __init__(  # noqa: PLR0913 (names that users of hivemind know)
        self,
        opt: torch.optim.Optimizer,
        *,
        dht: DHT,
        prefix: str,
        start: bool,
        average_parameters: bool,
        average_gradients: bool,
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[torch.Tensor] = (),
        parameter_names: Sequence[str | int] | None = None,
        initialize_optimizer: bool = True,
        **options: Any,
    ) -> None:
        if not isinstance(opt, torch.optim.Optimizer):
            raise ConfigError(f"opt must be a torch optimizer, got {type(opt).__name__}")
        if isinstance(average_opt_statistics, str):
            raise ConfigError(f"average_opt_statistics must be a list of names, got {average_opt_statistics!r:.40}")
        self.opt, self.extra_tensors, self.local_step = opt, tuple(extra_tensors), 0
        self.average_parameters = flag("average_parameters", average_parameters)
        self.average_gradients = flag("average_gradients", average_gradients)
        self.opt_statistics = tuple(average_opt_statistics)
        self._parameters = [each for group in opt.param_groups for each in group["params"]]
        learn_from(opt)
        known = [known_as(each, number) for number, each in enumerate(self._parameters)]
        self._names = known if parameter_names is None else list(parameter_names)
        if len(self._names) != len(self._parameters):
            raise ConfigError(f"parameter_names has {len(self._names)} names for {len(self._parameters)} parameters")
        if flag("initialize_optimizer", initialize_optimizer) and self._missing() is not None:
            _step_with_zeros(opt, self._parameters)
        if (missing := self._missing()) is not None:
            raise ConfigError(
                f"average_opt_statistics: the state of parameter {self._names[missing[0]]} has no tensor {missing[1]!r}"
            )
        self._kept = OptimizerState(opt)
        self._one_step = TensorLock()  # no thread keeps it, whatever interrupts it
        self._pool = DaemonPool(1, "shoal-training-averager")
        weakref.finalize(self, self._pool.shutdown, wait=False).atexit = False
        local = list(self._local())
        if not local:
            raise ConfigError("there is nothing to average: set average_parameters or average_gradients to True")
        check_tensors([(f"{_CALLED[role]} {key!r}", tensor) for tensor, key, role in local])
        infos = [CompressionInfo.from_tensor(tensor, key, role) for tensor, key, role in local]
        copies = [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each, *_ in local]
        super().__init__(copies, dht, start=start, prefix=prefix, **{"tensor_infos": infos, **options})

    def _missing(self) -> tuple[int, str] | None:
        """The first statistic to average that is not there: the number of its parameter, and its name."""
        for number, parameter in enumerate(self._parameters):
            for name in self.opt_statistics:
                kept = self.opt.state.get(parameter, {}).get(name)
                if parameter.requires_grad and not isinstance(kept, torch.Tensor):
                    return number, name
        return None

    def _local(self) -> Iterator[tuple[torch.Tensor, str | int, TensorRole]]:
        """The trainer's own tensors that are averaged, now."""
        named = list(zip(self._names, self._parameters, strict=True))
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        for name, parameter in named if self.average_parameters else ():
            yield parameter.detach(), name, TensorRole.PARAMETER
        for name, parameter in trained if self.average_gradients else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter.grad, name, TensorRole.GRADIENT
        for statistic in self.opt_statistics:
            for name, parameter in trained:
                yield self.opt.state[parameter][statistic], f"{name}.{statistic}", TensorRole.OPTIMIZER
        for number, extra in enumerate(self.extra_tensors):
            yield extra, number, TensorRole.UNSPECIFIED

    def local_tensors(self) -> Iterator[torch.Tensor]:
        """The trainer's own tensors that are averaged: parameters, gradients, statistics, extra tensors."""
        return (tensor for tensor, *_ in self._local())

    # ------------------------------------------------------------------------------------------------------ averaging

    @untraced
    def step(  # type: ignore[override]
        self,
        data_lock: AbstractContextManager[Any] | None = None,
        wait: bool = True,  # noqa: FBT002
        **options: Any,
    ) -> Any:
        """Average with the others, and set the trainer's tensors to the average.

        Args:
            data_lock: held while the trainer's tensors are read and set. With it they may change meanwhile: changes
                since the copy are added to the average. Without it nobody may change them.
            wait: False does all of it in another thread.
            options: of `DecentralizedAverager.step`: `weight`, `gather`, `timeout`, ...

        Returns:
            `{peer id: its `gather` value}` of the group; with `wait=False` a `concurrent.futures.Future` of it.

        Raises:
            RoundFailed: no average; nothing was changed.
            LocalError: another step is under way; or the caller holds `get_tensors()`.
        """
        if not flag("wait", wait):
            return self._pool.submit(partial(self.step, data_lock, **options))
        with self._one_step.acquire_in_thread(timeout_s=0.0) as alone:
            if not alone:
                raise LocalError("another step of this averager is under way: wait for its result")
            return self._average(data_lock, options)

    def _average(self, data_lock: AbstractContextManager[Any] | None, options: dict[str, Any]) -> Any:
        lock = nullcontext() if data_lock is None else data_lock
        with lock:
            before = self._copy_in(keep=data_lock is not None)
        gathered = super().step(**options)
        with lock:
            self._copy_out(before)
        return gathered

    def _copy_in(self, *, keep: bool) -> list[torch.Tensor] | None:
        """Set the averager's copies to the trainer's tensors; returns them once more to `keep`."""
        with torch.no_grad(), self.get_tensors() as copies:
            for copy, mine in zip(copies, self.local_tensors(), strict=True):
                copy.copy_(mine)
            return [copy.clone() for copy in copies] if keep else None

    def _copy_out(self, before: Sequence[torch.Tensor] | None) -> None:
        """Set the trainer's tensors to the average, with all changes since `before` if there is one."""
        with torch.no_grad(), self.get_tensors() as averaged:
            for index, (average, mine) in enumerate(zip(averaged, self.local_tensors(), strict=True)):
                if before is None or torch.equal(mine, before[index]):
                    mine.copy_(average)
                else:
                    mine.add_(average - before[index])
            self.local_step += 1

    # ---------------------------------------------------------------------------------------------------------- state

    def get_current_state(self) -> tuple[Any, ...]:
        """The state that others download from here: parameters, extra tensors and the optimizer's state."""
        tensors = [each.detach() for each in (*self._parameters, *self.extra_tensors)]
        values = self._kept.export(tensors)
        return {"step": self.local_step, "optimizer": values}, tensors

    @untraced
    def load_state_from_peers(self, timeout: float | None = None) -> bool:  # type: ignore[override]
        """Download the state of another peer and take it over: all of it, or nothing.

        Args:
            timeout: seconds; None: 600.

        Returns:
            Whether a state was taken over; False if nobody shares one.

        Raises:
            StateUnavailable: others share one, and none of them gave it, or it does not fit here; nothing was changed.
        """
        timeout_s = seconds("timeout", timeout, DEFAULT_STATE_TIMEOUT_S)
        if (loaded := self._run(self._load_state(timeout_s), timeout_s)) is None:
            return False
        metadata, tensors = loaded
        own = [each.detach() for each in (*self._parameters, *self.extra_tensors)]
        try:
            if [(each.shape, each.dtype) for each in tensors[: len(own)]] != [(each.shape, each.dtype) for each in own]:
                raise ValueError("its parameters or extra tensors have other shapes or dtypes")
            if not self._fits(metadata):
                return False
            step, optimizer = int(metadata["step"]), self._kept.prepare(metadata["optimizer"], tensors, len(own))
        except Exception as error:
            raise StateUnavailable(f"the state does not fit here: {error}") from error
        with self.get_tensors(), torch.no_grad():
            for mine, theirs in zip(own, tensors, strict=False):
                mine.copy_(theirs)
            self._kept.switch(optimizer)
            self.local_step = max(self.local_step, step)
            self._took_over(metadata)
        return True

    def _fits(self, metadata: Any) -> bool:
        """Whether a state of this metadata is to be taken over."""
        return isinstance(metadata, dict)

    def _took_over(self, metadata: Any) -> None:
        """The state of this metadata was taken over."""


def _step_with_zeros(opt: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Let the optimizer make its statistics; parameters and gradients stay as they are."""
    before = [(each, each.detach().clone(), each.grad) for each in parameters if each.requires_grad]
    try:
        for parameter, values, _ in before:
            parameter.grad = torch.zeros_like(values)
        opt.step()
    finally:
        with torch.no_grad():
            for parameter, values, gradient in before:
                parameter.copy_(values)
                parameter.grad = gradient
