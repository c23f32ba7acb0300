"""Lightning's Trainer as a peer of a run: `SwarmCallback`, or `SwarmStrategy`, for an ordinary `Trainer` and module.

The Trainer goes on to draw batches, to compute gradients, to validate, log and save. When `fit` begins, the optimizer
that the module has configured is put into a `shoal.Optimizer`, and so are its schedule and `max_steps`: both count the
steps of the swarm. What cannot work in a swarm is refused then, with what to write instead.

The callback does all of it. The strategy only brings the callback along: users of the former `HivemindStrategy` look
for one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shoal.base.checks import whole
from shoal.base.extras import install_command
from shoal.base.peer import check_run_id
from shoal.errors import ConfigError
from shoal.hivemind.arguments import strategy_of
from shoal.integrations.evaluation import Evaluation
from shoal.integrations.metrics import SharedMean
from shoal.integrations.trainers import (
    Evaluate,
    announce_end,
    check_batch_size,
    check_evaluate,
    clips_each_batch,
    epochs_of,
    evaluated,
    evaluation_of,
    leave,
    load_state,
    of_all,
)
from shoal.optim import Optimizer
from shoal.runtime.dht import DHT
from shoal.train.batch_rows import BatchRows

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(
        f"shoal.integrations.lightning needs lightning 2 ({error}): {install_command('lightning')}"
    ) from error

__all__ = ["SwarmCallback", "SwarmStrategy"]

_TAKEN = {
    "optimizer": "the optimizer is the one that configure_optimizers returns",
    "params": "the parameters are those of the optimizer that configure_optimizers returns",
    "scheduler": "return it from configure_optimizers, with 'interval': 'step'",
    "model": "it is the module that is given to Trainer.fit",
    "scheduler_fn": "return the schedule from configure_optimizers, with 'interval': 'step'",
    "initial_peers": "give it to the DHT: dht=shoal.DHT(initial_peers=[...], start=True)",
    "host_maddrs": "give it to the DHT: dht=shoal.DHT(host_maddrs=[...], start=True)",
    "batch_size_per_step": "each batch counts with its samples; batch_size=lambda batch: ... says how many it has",
}

_TRIES = {"LearningRateFinder", "BatchSizeFinder", "_LRCallback"}
"""Callbacks that train on trial; the last one is that of `Tuner.lr_find`."""


class SwarmCallback(Callback):  # type: ignore[misc]
    """Makes an ordinary Lightning `Trainer` a peer of a run: `Trainer(callbacks=[SwarmCallback(...)])`.

    - `Trainer(max_steps=...)` is the number of steps of the swarm: the run ends there (`Optimizer.announce_end`). All
      peers give the same. Without it the run goes on, and this peer leaves it after `max_epochs` passes of its own.
    - A schedule that `configure_optimizers` returns must have `"interval": "step"`: it counts steps of the swarm.
    - Each batch counts with the samples that it has, those that are accumulated too. One whose gradients are cleared
      before a step does not count.
    - `trainer.global_step`, and all that counts it (`val_check_interval`, `every_n_train_steps`, loggers), counts steps
      of this peer.
    - `fit` downloads the state of the others before the first batch, also after a checkpoint was loaded (`ckpt_path`).
      The peer leaves the run when `fit` ends, also by an error or an interrupt.
    - The random numbers of the training are others on each peer, whatever `seed_everything` says: else all would draw
      the same samples.
    - It logs `swarm_epoch`, `swarm_peers`, `swarm_samples_per_s`, and `swarm_loss`: the mean of the losses that the
      peers had in their last epochs, weighted by samples; Lightning's progress bar shows them. With `evaluate` it logs
      the newest result of one elected peer, too: `evaluated_epoch`, and `evaluated_loss` or other names.

    Args:
        dht: this peer, started.
        run_id: names the run; all its peers give the same.
        target_batch_size: samples of the whole swarm in one step; left out with a `strategy` that merges.
        batch_size: says how many samples a batch has; where the module takes several steps from one batch, which needs
            this, how many each step has. None: the rows that its tensors have in common, along the dimension in which
            the layers have the batch.
        evaluate: evaluates the module, and returns a loss or numbers by name. One peer of the run calls it, and all get
            the result: see `shoal.integrations.evaluation.Evaluation`. The module is in its mode to evaluate, without
            gradients. None: nothing is evaluated besides what the Trainer does.
        evaluate_every: epochs between two such evaluations, the same on all peers.
        options: more arguments of `shoal.Optimizer`, by name, such as `max_grad_norm` or `checkpoint`. `extra_tensors`
            may be a function of the module, called when `fit` has moved it: `lambda module: list(module.buffers())`.

    Attributes:
        optimizer: the `shoal.Optimizer`, from the beginning of `fit` on; before it None.

    Raises:
        ConfigError: an argument is wrong; and from `fit`: something of the Trainer or the module cannot work in a
            swarm, or the run is trained with other settings. It is named.
    """

    def __init__(
        self,
        *,
        dht: DHT,
        run_id: str,
        target_batch_size: int | None = None,
        batch_size: Callable[[Any], int] | None = None,
        evaluate: Evaluate | None = None,
        evaluate_every: int = 10,
        **options: Any,
    ) -> None:
        if not isinstance(dht, DHT):
            raise ConfigError(f"dht must be a shoal.DHT, got {type(dht).__name__}")
        check_run_id(run_id)
        check_batch_size(batch_size)
        check_evaluate(evaluate, evaluate_every)
        for name in options.keys() & _TAKEN.keys():
            raise ConfigError(f"{name} is not given here: {_TAKEN[name]}")
        if options.get("auxiliary"):
            raise ConfigError("auxiliary=True is not for a Trainer, which has data: make a shoal.Optimizer without one")
        if target_batch_size is not None:
            options["target_batch_size"] = target_batch_size
        self._dht, self._run_id, self._options = dht, run_id, options
        strategy = strategy_of(options.get("strategy"), options)
        if strategy.terms.offload:
            raise ConfigError(
                "offload_optimizer=True is not for a Trainer, nor is a strategy's offload=True: the module makes its "
                "optimizer itself. Leave it out"
            )
        self._clips_batches = clips_each_batch(strategy)
        self._batch_size, self._evaluate, self._evaluate_every = batch_size, evaluate, evaluate_every
        self._evaluation: Evaluation | None = None
        self.optimizer: Optimizer | None = None
        self._rows: BatchRows | None = None
        self._module: Any = None
        self._max_steps: int | None = None
        self._mean = SharedMean(dht, f"{run_id}_loss")
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._loss: Any = 0.0
        self._losses = 0
        self._logged: dict[str, float] = {}

    # ---------------------------------------------------------------------------------------------------- begin and end

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot work, before anything is made."""
        if stage == "fit":
            _check_trainer(trainer, pl_module, clips_batches=self._clips_batches)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the module's optimizer into one of the swarm. Lightning loads a checkpoint into it afterwards."""
        inner, schedule = _configured(trainer, pl_module)
        before, self.optimizer = self.optimizer, None
        self._begin_anew()
        extra = self._options.get("extra_tensors", ())
        options = {**self._options, "extra_tensors": extra(pl_module) if callable(extra) else extra}
        self.optimizer = Optimizer(
            dht=self._dht,
            run_id=self._run_id,
            optimizer=inner,
            scheduler=schedule,
            model=pl_module,
            **options,
        )
        if before is not None and pl_module is self._module and not self.optimizer.local_epoch:
            self.optimizer.load_state_dict(before.state_dict())  # this fit goes on where the last one ended
        self._module = pl_module
        self._evaluation = evaluation_of(self.optimizer, pl_module, self._evaluate, self._evaluate_every)
        self.optimizer.samples_are_given()
        trained = [each for each in self._trained() if each.requires_grad]
        self._rows = BatchRows(pl_module, trained, rows=self._batch_size and _rows_by(self._batch_size), by_batch=True)
        self.optimizer.register_step_pre_hook(self._before_step)
        trainer.strategy.optimizers = [self.optimizer]
        if trainer.max_steps > 0:
            self._max_steps = trainer.max_steps
            trainer.fit_loop.epoch_loop.max_steps = -1  # Lightning's own loop counts steps of this peer
        _draw_own_numbers(self._dht, trainer.global_step)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Get the state of the others."""
        swarm = self._swarm()
        if self._max_steps is not None:
            announce_end(swarm, self._max_steps)
        load_state(swarm)
        if swarm.finished:
            trainer.should_stop = True  # the run was over before: not a batch more

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the run: Lightning is about to move the model."""
        self._leave(trainer, ends=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the run, after an interrupt too."""
        self._leave(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the run, if nothing was trained."""
        if stage == "fit":
            self._leave(trainer)

    def _leave(self, trainer: Any, *, ends: bool = False) -> None:
        end = None
        if self._max_steps is not None:
            if ends and self.optimizer is not None:
                end = epochs_of(self.optimizer.strategy, self._max_steps)
            trainer.fit_loop.epoch_loop.max_steps, self._max_steps = self._max_steps, None
        if self._rows is not None:
            self._rows.close()
        if self.optimizer is not None:
            leave(self.optimizer, end)

    def _swarm(self) -> Optimizer:
        assert self.optimizer is not None
        return self.optimizer

    def _counted(self) -> BatchRows:
        assert self._rows is not None
        return self._rows

    # --------------------------------------------------------------------------------------------------------- batches

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Look at the layers, which say where the batch is once they have it: then the samples are counted."""
        collate = getattr(trainer.train_dataloader, "collate_fn", None)
        self._counted().begin_batch(batch, collated=collate is default_collate)

    def _trained(self) -> list[torch.Tensor]:
        return [each for group in self._swarm().param_groups for each in group["params"]]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The last batches of a pass may be fewer than are accumulated, and Lightning divides by that number."""
        parts, wanted = self._counted().batches, trainer.accumulate_grad_batches
        if pl_module.automatic_optimization and 0 < parts < wanted:
            for parameter in self._trained():
                if parameter.grad is not None:
                    parameter.grad.mul_(wanted / parts)

    def _before_step(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ours, *given = args
        closure = given[0] if given else kwargs.get("closure")
        if closure is not None:  # it has the forward pass, by which the samples are counted
            with torch.enable_grad():
                loss = closure()
            kwargs = {**kwargs, "closure": lambda: loss}
        samples = self._counted().take(
            "Give the SwarmCallback batch_size=lambda batch: ..., which says how many samples a batch has; where the "
            "module takes several steps from it, how many each step has"
        )
        return (ours,), {"batch_size": samples, **kwargs}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Evaluate in turn, log, and stop with the run."""
        swarm, samples = self._swarm(), self._counted().samples_of_batch
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            scale = (
                trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            )  # Lightning divides by it
            self._loss = self._loss + loss.detach().float().mean() * (samples * scale)
            self._losses += samples
        if swarm.local_epoch != self._logged.get("swarm_epoch"):
            self._logged = {**self._logged, "swarm_epoch": swarm.local_epoch, **of_all(swarm)}
            mean = self._mean.exchange(float(self._loss) / self._losses if self._losses else None, self._losses)
            self._loss, self._losses = 0.0, 0
            if mean is not None:
                self._logged["swarm_loss"] = mean
        self._logged |= evaluated(self._evaluation)
        for name, value in self._logged.items():
            self.log(name, float(value), batch_size=samples or 1, prog_bar=name.startswith("swarm_"))
        if swarm.finished:
            trainer.should_stop = True


class SwarmStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """A strategy that makes a `Trainer` a peer of a run: `Trainer(strategy=SwarmStrategy(...))`.

    It is one device, and a `SwarmCallback`, which does everything: see there.

    Args:
        device: that the model is trained on; None: the first one of the Trainer's accelerator.
        options: those of `SwarmCallback`.

    Attributes:
        swarm: the callback. `swarm.optimizer` is the `shoal.Optimizer`.

    Raises:
        ConfigError: as of `SwarmCallback`.
    """

    strategy_name = "swarm"

    def __init__(self, *, device: torch.device | str | None = None, **options: Any) -> None:
        own = {name: options.pop(name, None) for name in ("accelerator", "checkpoint_io", "precision_plugin")}
        for name in ("dht", "run_id"):
            if name not in options:
                raise ConfigError(f"{name} is missing: SwarmStrategy(dht=..., run_id=..., target_batch_size=...)")
        super().__init__(device="cpu" if device is None else device, **own)
        self._device_given = device is not None
        self.swarm = SwarmCallback(**options)

    @property
    def root_device(self) -> torch.device:
        """The device of the model."""
        if not self._device_given and self.accelerator is not None:
            kind = {"CUDAAccelerator": "cuda", "MPSAccelerator": "mps"}.get(type(self.accelerator).__name__, "cpu")
            return torch.device(kind, 0) if kind != "cpu" else torch.device(kind)
        device: torch.device = self._root_device
        return device

    def connect(self, model: Any) -> None:
        """Bring the callback along: first, so that the others find the optimizer of the swarm."""
        super().connect(model)
        callbacks = model.trainer.callbacks
        if self.swarm not in callbacks:
            callbacks.insert(0, self.swarm)


# ------------------------------------------------------------------------------------------------- trainer and module


def _check_trainer(trainer: Any, module: Any, *, clips_batches: bool) -> None:
    """Raise `ConfigError` for what of a Trainer, or of its module, cannot work in a swarm."""
    clips = module.automatic_optimization and is_overridden("configure_gradient_clipping", module)
    if clips and not clips_batches:
        raise ConfigError(
            "configure_gradient_clipping of the module does not work in a swarm: it would clip each batch, and not the "
            "average of all peers. Leave it out, and give the SwarmCallback max_grad_norm=..., as on all peers; move "
            "what is meant for the gradients of each batch into on_before_optimizer_step"
        )
    swarms = [each for each in trainer.callbacks if isinstance(each, SwarmCallback)]
    several = not isinstance(trainer.strategy, SingleDeviceStrategy)
    steps = trainer.max_steps > 0
    tries = [type(each).__name__ for each in trainer.callbacks if type(each).__name__ in _TRIES]
    swaps = (StochasticWeightAveraging, WeightAveraging)
    others = [type(each).__name__ for each in trainer.callbacks if isinstance(each, swaps)]
    thaws = [type(each).__name__ for each in trainer.callbacks if isinstance(each, BaseFinetuning)]
    refused = {
        f"gradient_clip_val={trainer.gradient_clip_val}": (
            bool(trainer.gradient_clip_val) and not clips_batches,
            "it would clip each batch: leave it out, and give the SwarmCallback max_grad_norm=..., as on all peers",
        ),
        f"strategy={type(trainer.strategy).__name__}": (
            several,
            "a peer has one device: give devices=1, and start a process for each (CUDA_VISIBLE_DEVICES=0, =1, ...)",
        ),
        f"fast_dev_run={trainer.fast_dev_run}": (
            bool(trainer.fast_dev_run),
            "it would end the run for all peers after its few steps: try the module without the swarm",
        ),
        f"min_steps={trainer.min_steps}": (
            steps and bool(trainer.min_steps),
            "the run ends by max_steps, for all peers at once, and then none goes on: leave it out",
        ),
        f"min_epochs={trainer.min_epochs}": (
            steps and bool(trainer.min_epochs),
            "the run ends by max_steps, for all peers at once, and then none goes on: leave it out",
        ),
        f"callbacks with {' and '.join(tries)}": (
            bool(tries),
            "its trials would be steps of the run: use it without the swarm before, and leave it out here",
        ),
        f"callbacks with {' and '.join(others)}": (
            bool(others),
            "it puts averages of this peer into the module, which others do not have: average and evaluate a copy",
        ),
        f"callbacks with {' and '.join(thaws)}": (
            bool(thaws),
            "it unfreezes layers in mid-run: freeze them in the module, and train what follows as another run",
        ),
        f"callbacks with {len(swarms)} SwarmCallbacks": (
            len(swarms) > 1,
            "a Trainer is one peer of one run: give it one, and none with a SwarmStrategy, which has its own",
        ),
    }
    for name, (applies, advice) in refused.items():
        if applies:
            raise ConfigError(f"{name} of the Trainer does not work in a swarm: {advice}")


def _configured(trainer: Any, module: Any) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer and the schedule that `configure_optimizers` has returned; or raises `ConfigError`."""
    optimizers, schedules = trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs
    where = "configure_optimizers of the module returned"
    if len(optimizers) != 1:
        raise ConfigError(
            f"{where} {len(optimizers)} optimizers, and a run trains with one: return one optimizer, with a parameter "
            "group for each part. Or leave the SwarmCallback out, and return a shoal.Optimizer for each part, with a "
            "run_id of its own"
        )
    (inner,) = optimizers
    if isinstance(inner, Optimizer):
        raise ConfigError(
            f"{where} a shoal.Optimizer, which the SwarmCallback is about to make: return the torch optimizer that it "
            "was made with, or leave the SwarmCallback out"
        )
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(f"{where} no torch optimizer (a {type(inner).__name__}): there is nothing to train")
    if len(schedules) > 1:
        raise ConfigError(
            f"{where} {len(schedules)} schedules for one optimizer: join them in a ChainedScheduler of torch"
        )
    if not schedules:
        return inner, None
    (config,) = schedules
    kind = type(config.scheduler).__name__
    if module.automatic_optimization and not config.reduce_on_plateau:
        if config.interval != "step":
            raise ConfigError(
                f"{where} a {kind} with 'interval': {config.interval!r} (Lightning's default is 'epoch'), which counts "
                "passes over the data of this peer: return {'scheduler': ..., 'interval': 'step'}. In a swarm it then "
                "counts the steps of the swarm, of target_batch_size samples"
            )
        if config.frequency != 1:
            raise ConfigError(
                f"{where} a {kind} with 'frequency': {config.frequency}: let the schedule itself change every "
                f"{config.frequency} steps of the swarm, and leave 'frequency' out"
            )
    return inner, config.scheduler


def _rows_by(batch_size: Callable[[Any], int]) -> Callable[[Sequence[Any], Mapping[str, Any]], int]:
    return lambda args, _: whole("batch_size(batch)", batch_size(*args))


def _draw_own_numbers(dht: DHT, step: int) -> None:
    seed = hashlib.sha256(dht.peer_id.to_bytes() + f"{torch.initial_seed()} {step}".encode()).digest()
    number = int.from_bytes(seed[:4], "big")
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 (the generator that the user's code draws from)
    torch.manual_seed(number)
