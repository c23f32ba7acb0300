"""Hugging Face's Trainer as a peer of a run: `SwarmCallback`, for an ordinary `Trainer`.

The Trainer goes on to draw batches, to compute gradients, to evaluate, log and save. Its optimizer is a
`shoal.Optimizer`, so its steps are those of the swarm. What the Trainer's arguments say of the optimizer's steps
therefore holds for the swarm's: `max_steps`, `warmup_steps` and the schedule count them, and `max_grad_norm` clips the
gradient that they are taken from. The Trainer's own loop must neither stop after so many batches nor clip each batch.
So these two arguments are taken over here, and others that cannot work in a swarm are refused.

The Trainer offers no place where the number of samples of a batch could be read. They are counted by the model
(`shoal.train.batch_rows`): the Trainer has one backward pass for each of its batches.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from shoal.base.checks import path, whole
from shoal.base.extras import install_command
from shoal.data import PeerSampler
from shoal.errors import ConfigError
from shoal.hivemind.arguments import strategy_of
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
    length_of,
    load_state,
    of_all,
    warn,
)
from shoal.optim import Optimizer
from shoal.optim.arguments import checked_tensors
from shoal.runtime.dht import DHT
from shoal.strategies import Strategy
from shoal.train.batch_rows import BatchRows
from shoal.train.inner import make_scheduler

try:
    from accelerate.state import GradientState  # type: ignore[import-untyped]
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
    from transformers.trainer_utils import has_length
except ImportError as error:
    raise ImportError(
        f"shoal.integrations.transformers needs transformers 5 and accelerate ({error}): "
        f"{install_command('transformers')}"
    ) from error

__all__ = ["SwarmCallback", "latest_checkpoint"]

_ENDLESS = 1 << 40
"""Batches after which the Trainer's own loop would stop."""

_ONLY_ONE = (
    "one process with one device and the whole model is a peer: start one process for each device (CUDA_VISIBLE_DEVICES"
    "=0, =1, ...), each with python and not with torchrun or accelerate launch"
)


class SwarmCallback(TrainerCallback):
    """Makes an ordinary `Trainer` a peer of a run.

    Give `optimizers` and the callback itself to the Trainer; nothing else of it changes:
    `Trainer(model, args, ..., optimizers=swarm.optimizers, callbacks=[swarm])`. Creating it joins the run.

    - `args.max_steps` is the number of steps of the swarm: the run ends there (`Optimizer.announce_end`).
      `warmup_steps` and the schedule count the swarm's steps, too. All peers give the same.
    - `args.max_grad_norm` clips the average of the gradients of all peers, as it clips those of a large batch; with
      a strategy that clips no average, or with which each peer steps alone, those of each batch. A strategy's own
      `max_grad_norm` counts in its place.
    - With a `strategy` that merges, `max_steps`, `warmup_steps` and the schedule count batches of a peer, as without a
      swarm, and `max_grad_norm` clips the gradients of each batch. The run ends with the merge at which the peers have
      trained `max_steps` batches in the mean. If the strategy's `every` is a time, they count merges.
    - `logging_steps`, `eval_steps` and `save_steps` count batches of this peer, as `num_train_epochs` would.
    - Each batch counts with the samples that it has.
    - The peers draw other samples (`shoal.data.PeerSampler` takes the place of the Trainer's shuffle), and other random
      numbers in training, by their ids. What is drawn before, the model's first weights, is by `args.seed` as always.
    - `Trainer.train` downloads the state of the others when it begins, also after it has loaded a checkpoint, and the
      peer leaves the run when it ends.
    - The logs have `swarm_epoch`, `swarm_peers`, `swarm_samples_per_s`, and `swarm_loss`: the mean of what the peers of
      the run had logged last, weighted by samples, as of this peer's log before. With `evaluate` they have the newest
      result of one elected peer, too: `evaluated_epoch`, and `evaluated_loss` or other names.

    It changes `max_steps`, `max_grad_norm` and `ignore_data_skip` of `args` until the training ends. So give each
    SwarmCallback arguments of its own.

    Args:
        model: that the Trainer trains.
        args: of the Trainer.
        dht: this peer, started.
        run_id: names the run; all its peers give the same.
        target_batch_size: samples of the whole swarm in one step; left out with a `strategy` that merges.
        optimizer: a torch optimizer of the model; None for the one that `args` names.
        scheduler: a torch schedule over `optimizer`, or a function `optimizer -> schedule`, that counts steps of the
            swarm; None for the one that `args` names.
        batch_size: says how many samples a batch has, by what the model is given of it (input_ids and so on, by name);
            None: the rows that these tensors have in common.
        evaluate: evaluates the model, and returns a loss or numbers by name: `lambda: trainer.evaluate()`, for example.
            One peer of the run calls it, and all get the result: see `shoal.integrations.evaluation.Evaluation`. The
            model is in its mode to evaluate, without gradients. None: nothing is evaluated besides what `args` says.
        evaluate_every: epochs between two such evaluations, the same on all peers.
        options: more arguments of `shoal.Optimizer`, by name.

    Attributes:
        optimizer: the `shoal.Optimizer`: `local_epoch`, `finished`.
        optimizers: for the argument of the Trainer: the optimizer and its schedule.

    Raises:
        ConfigError: an argument, or one of `args`, cannot work in a swarm, or the run is trained with other settings;
            it is named.
    """

    def __init__(  # noqa: PLR0913 (all but two by name)
        self,
        model: torch.nn.Module,
        args: TrainingArguments,
        *,
        dht: DHT,
        run_id: str,
        target_batch_size: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        batch_size: Callable[[Mapping[str, Any]], int] | None = None,
        evaluate: Evaluate | None = None,
        evaluate_every: int = 10,
        **options: Any,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model must be the model that the Trainer trains, got {type(model).__name__}")
        if not isinstance(args, TrainingArguments):
            raise ConfigError(f"args must be the TrainingArguments of the Trainer, got {type(args).__name__}")
        for name in options.keys() & {"batch_size_per_step", "max_grad_norm", "params"}:
            of = "TrainingArguments.max_grad_norm" if name == "max_grad_norm" else "the Trainer and its arguments"
            raise ConfigError(f"{name} is not given here: the SwarmCallback takes it from {of}")
        check_batch_size(batch_size)
        check_evaluate(evaluate, evaluate_every)
        if target_batch_size is not None:
            options["target_batch_size"] = target_batch_size
        strategy = strategy_of(options.get("strategy"), options)
        _check(args, strategy, own_optimizer=optimizer is not None, own_schedule=scheduler is not None)
        self._model, self._args = model, args
        self._taken: dict[str, Any] = {}
        given = checked_tensors("extra_tensors", options.pop("extra_tensors", ()))
        buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        _place(model, args)
        moved = dict(model.named_buffers())  # a model that is moved gets new buffers
        extra = [moved.get(buffers.get(id(each), ""), each) for each in given]
        makes = _maker(model, args)
        inner = optimizer if optimizer is not None else makes.create_optimizer()
        schedule = make_scheduler(inner, scheduler)
        if schedule is None:
            schedule = makes.create_scheduler(length_of(strategy, args.max_steps), optimizer=inner)
        clips_batches, own_norm = clips_each_batch(strategy), getattr(strategy, "max_grad_norm", None)
        if not clips_batches and own_norm is None and 0 < (args.max_grad_norm or 0) < math.inf:
            options["max_grad_norm"] = args.max_grad_norm
        if not options.get("auxiliary"):
            options["batch_size_per_step"] = (
                args.train_batch_size * args.gradient_accumulation_steps
            )  # see _before_step
        self.optimizer = Optimizer(
            dht=dht,
            run_id=run_id,
            optimizer=inner,
            scheduler=schedule,
            model=model,
            extra_tensors=extra,
            **options,
        )
        self.optimizer.samples_are_given()  # see _before_step
        self.optimizers: tuple[Optimizer, Any] = (self.optimizer, schedule)
        peers_own = dht.peer_id.to_bytes() + repr(args.seed).encode()
        self._seed = int.from_bytes(hashlib.sha256(peers_own).digest()[:4], "big")
        self._since_log = 0
        self._trains = self._reseed = self._streams = False
        self._mean = SharedMean(dht, f"{run_id}_loss")
        self._evaluation = evaluation_of(self.optimizer, model, evaluate, evaluate_every)
        self._evaluated: dict[str, float] = {}
        self._loader: Any = None
        self.optimizer.register_step_pre_hook(self._before_step)
        trained = [each for group in inner.param_groups for each in group["params"] if each.requires_grad]
        self._rows = BatchRows(model, trained, one_batch=True, rows=batch_size and _rows_by(batch_size))
        self.epochs = epochs_of(strategy, args.max_steps)
        # Of this peer, as far as the progress bar is concerned; with 0 that counts without an end.
        rarely = strategy.terms.meets_rarely and strategy.terms.epoch_batches is None
        self._batches = 0 if rarely else length_of(strategy, args.max_steps)
        if (target := self.optimizer.target_batch_size) is not None:
            batch = args.train_batch_size * args.gradient_accumulation_steps
            self._batches = math.ceil(self.epochs * target / batch)
        self._take(max_steps=_ENDLESS, **({} if clips_batches else {"max_grad_norm": 0.0}))

    def _take(self, **values: Any) -> None:
        """Let these hold for the Trainer's own loop."""
        for name, value in values.items():
            self._taken.setdefault(name, getattr(self._args, name))
            setattr(self._args, name, value)

    # --------------------------------------------------------------------------------------------------------- batches

    def _before_step(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not self._trains:
            raise ConfigError("callbacks=[swarm] is missing: give the SwarmCallback to the Trainer, too")
        samples = self._rows.take(
            "Give the SwarmCallback batch_size=lambda inputs: len(inputs['input_ids']), or what else says how many "
            "samples a batch has: of sequences packed into one row, their number"
        )
        self._since_log += samples
        return args, {**kwargs, "batch_size": samples}

    # ---------------------------------------------------------------------------------------------------------- events

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """The Trainer was made: with what belongs to this peer?"""
        self._check_trainer(args, **given)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Get the state of the others, and draw other data than they do."""
        self._check_trainer(args, **given)
        self._trains = self._reseed = True
        if args.load_best_model_at_end:
            warn(
                self.optimizer,
                "load_best_model_at_end=True gives each peer the best checkpoint of its own evaluations, so peers end "
                "with other weights than the run's: take the weights of one peer",
            )
        set_seed((self._seed + state.global_step) % (1 << 32))
        announce_end(self.optimizer, self._taken["max_steps"])
        load_state(self.optimizer)
        if state.global_step and not self.optimizer.local_epoch and not self.optimizer.state:
            warn(
                self.optimizer,
                "the checkpoint has no state of the optimizer (save_only_model): the run begins at epoch 0, with the "
                "checkpoint's weights",
            )
        self._loader = given["train_dataloader"]
        self._streams = not has_length(self._loader)
        self._deal(state)
        # For the progress bar, which reads it once: as many batches as this peer alone would need, if that is known.
        state.max_steps = self._batches
        if not self._streams:
            passes = self._batches * args.gradient_accumulation_steps / max(1, len(self._loader))
            state.num_train_epochs = max(1, math.ceil(passes))

    def _deal(self, state: TrainerState) -> None:
        """Let the steps of the swarm deal the samples, where the Trainer would shuffle them by its seed."""
        batches: Any = getattr(self._loader, "batch_sampler", None)
        sampler = getattr(batches, "sampler", None)
        if isinstance(sampler, RandomSampler):
            batches.sampler = PeerSampler(self._loader.dataset, self.optimizer, seed=self._seed)
            self._take(ignore_data_skip=True)  # what is skipped would have been dealt in vain
        elif self._streams and (state.epoch or 0) >= 1:
            # To skip more batches than the stream has, the Trainer would look for them without end.
            self._take(ignore_data_skip=True)
        elif isinstance(sampler, SequentialSampler):
            warn(
                self.optimizer,
                "train_sampling_strategy='sequential' draws the data in one order on all peers: give each peer a part "
                "of its own, or use 'random'",
            )
        elif hasattr(batches, "seed"):
            batches.seed = self._seed  # batch_rebalance has one seed for all

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The Trainer draws random numbers as its checkpoint says by now; that may be another peer's."""
        state.max_steps = _ENDLESS
        if (active := GradientState().active_dataloader) is not None:
            self._loader = active  # after a checkpoint it is another one at first
        # Of a batch that was interrupted, or that came last in its pass and was too few to be accumulated.
        self._rows.forget()
        self._model.zero_grad()
        if self._reseed and state.global_step:
            set_seed((self._seed + state.global_step) % (1 << 32))
        self._reseed = False

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """One of several batches that the Trainer accumulates."""
        self._end_pass(control)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """At the end of the run this batch is the last one: the Trainer evaluates, saves and stops as at its end."""
        if self.optimizer.finished:
            state.max_steps = state.global_step + 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Evaluate in turn; end a pass over a stream where the stream ends."""
        self._count_to(state, control)
        self._evaluated |= evaluated(self._evaluation)
        self._end_pass(control)
        if self._streams:
            state.epoch = float(int(state.epoch or 0))  # the Trainer makes it a share of max_steps

    def _count_to(self, state: TrainerState, control: TrainerControl) -> None:
        """Let the batches have no end; in a checkpoint, have the end that the progress bar has."""
        end = state.global_step if self.optimizer.finished else max(state.global_step, self._batches)
        state.max_steps = end if control.should_save else _ENDLESS

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The checkpoint is written; the Trainer divides by this number at the end."""
        state.max_steps = _ENDLESS

    def _end_pass(self, control: TrainerControl) -> None:
        if self._streams and getattr(self._loader, "end_of_dataloader", False):
            control.should_epoch_stop = True  # the Trainer would look for max_steps batches in each pass

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the run at the end of the training."""
        if control.should_training_stop:
            self._leave(state)
        self._count_to(state, control)

    def _leave(self, state: TrainerState) -> None:
        """Leave the run: the Trainer may load the best checkpoint now, and its weights are not the state of the run."""
        leave(self.optimizer, self.epochs if self._trains and state.max_steps == _ENDLESS else None)
        self._trains = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add what the swarm knows."""
        if logs is None:
            return
        more: dict[str, Any] = {"swarm_epoch": self.optimizer.local_epoch, **of_all(self.optimizer), **self._evaluated}
        if "loss" in logs:
            samples, self._since_log = self._since_log, 0
            if (loss := self._mean.exchange(logs["loss"], samples)) is not None:
                more["swarm_loss"] = loss
        logs.update(more)
        if state.log_history:
            state.log_history[-1].update(more)
        # The summary, where an evaluation at the end of a pass ended the training. Only it counts operations: with
        # `include_num_input_tokens_seen` each log has a speed, and users log a `train_loss` of their own.
        if "total_flos" in logs:
            self._leave(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Give back what was taken of the Trainer's arguments."""
        self._leave(state)
        self._rows.close()
        for name, value in self._taken.items():
            setattr(args, name, value)

    def _check_trainer(self, args: TrainingArguments, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        if getattr(optimizer, "optimizer", optimizer) is not self.optimizer:
            raise ConfigError("optimizers=swarm.optimizers is missing: give it to the Trainer, with callbacks=[swarm]")
        if args is not self._args or model is not self._model:
            what = "model" if args is self._args else "args"
            raise ConfigError(f"{what} of the Trainer must be the one that was given to the SwarmCallback")
        if args.max_steps != _ENDLESS:
            raise ConfigError("this SwarmCallback's training is over: make another one, with another Trainer")


def latest_checkpoint(output_dir: str) -> str | None:
    """The latest whole checkpoint of a Trainer; None if there is none.

    `Trainer.train(resume_from_checkpoint=latest_checkpoint(args.output_dir))` goes on from there, or begins. With
    `True` in its place the Trainer fails where there is none yet, or where it was killed while it saved.

    Args:
        output_dir: of the Trainer.
    """
    found = []
    for folder in path("output_dir", output_dir).glob("checkpoint-*"):
        try:
            step = int(folder.name.removeprefix("checkpoint-"))
            json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))  # is written last
        except (OSError, ValueError, RecursionError):
            continue
        found.append((step, folder))
    return str(max(found)[1]) if found else None


# ---------------------------------------------------------------------------------------------------------- arguments


def _check(args: TrainingArguments, strategy: Strategy, *, own_optimizer: bool, own_schedule: bool) -> None:
    """Raise `ConfigError` for arguments of a Trainer that cannot work in a swarm."""
    if args.max_steps == _ENDLESS:
        raise ConfigError("args belongs to another SwarmCallback, or is of its checkpoint: make new TrainingArguments")
    if args.max_steps <= 0:
        raise ConfigError(f"max_steps of the TrainingArguments is missing: {_meaning_of_max_steps(strategy)}")
    schedule, optim = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)), str(args.optim)
    optim = str(getattr(args.optim, "value", optim))
    refused = {
        "fp16": (args.fp16, "its scaler skips steps on one peer alone: use bf16=True"),
        "deepspeed": (bool(args.deepspeed), _ONLY_ONE),
        "fsdp": (bool(args.fsdp), _ONLY_ONE),
        f"world_size={args.world_size}": (args.world_size > 1, _ONLY_ONE),
        f"n_gpu={args.n_gpu}": (args.n_gpu > 1, _ONLY_ONE),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "it begins the training anew, but the run goes on: give a per_device_train_batch_size that fits",
        ),
        f"lr_scheduler_type={schedule!r}": (
            schedule in ("reduce_lr_on_plateau", "greedy") and not own_schedule,
            "it follows a measurement, and each peer has its own: use a schedule of steps, such as 'linear'",
        ),
        f"optim={optim!r}": (
            ("layerwise" in optim or "lomo" in optim) and not own_optimizer,
            "it takes its steps within the backward pass, where no swarm sees them: use another one",
        ),
    }
    for kind in ("logging", "eval", "save"):
        steps = getattr(args, f"{kind}_steps")
        refused[f"{kind}_steps={steps}"] = (
            str(getattr(getattr(args, f"{kind}_strategy"), "value", "")) == "steps" and 0 < (steps or 0) < 1,
            "how many batches will be needed is not known before: give a number of batches of this peer",
        )
    for name, (applies, advice) in refused.items():
        if applies:
            raise ConfigError(f"{name} of the TrainingArguments does not work in a swarm: {advice}")


def _rows_by(batch_size: Callable[[Mapping[str, Any]], int]) -> Callable[[Sequence[Any], Mapping[str, Any]], int]:
    return lambda args, kwargs: whole("batch_size(inputs)", batch_size(kwargs))


def _meaning_of_max_steps(strategy: Strategy) -> str:
    passes = "num_train_epochs does not count in a swarm; P passes over N samples by all peers together are"
    if strategy.terms.epoch_batches is not None:
        return (
            "it is the number of batches of each peer, in the mean, at which the run ends. "
            f"{passes} P * N // (peers * samples of a batch) batches"
        )
    if strategy.terms.meets_rarely:
        return f"it is the number of {strategy.terms.counted_in}, at which the run ends"
    return f"it is the number of steps of the swarm, at which the run ends. {passes} P * N // target_batch_size steps"


def _place(model: torch.nn.Module, args: TrainingArguments) -> None:
    """Move the model where the Trainer is about to move it, so that what is made now lies there, too."""
    placed = getattr(model, "hf_device_map", None) or getattr(model, "quantization_method", None)
    if not placed and getattr(args, "place_model_on_device", None) is not False:
        model.to(args.device)


def _maker(model: torch.nn.Module, args: TrainingArguments) -> Trainer:
    """As much of a Trainer as it takes to make the optimizer and the schedule that the Trainer itself would make."""
    maker: Trainer = object.__new__(Trainer)
    maker.model, maker.args = model, args
    maker.optimizer = maker.lr_scheduler = maker.optimizer_cls_and_kwargs = None
    return maker
