"""Models of `shoal.zero.shard` in the loops of Accelerate, and in the Trainer of `transformers`, which is one of them.

Both would wrap the model into a DistributedDataParallel, clip with torch's function, and save one rank's part of the
optimizer. Written for accelerate 1.15 and transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.errors import ConfigError, LocalError
from shoal.zero.disk.plain import full_state_dict
from shoal.zero.optimizer import ShardedOptimizer, check_sharded

__all__ = ["attach"]


def attach(loop: Any, model: torch.nn.Module, optimizer: ShardedOptimizer, schedule: Any = None) -> None:
    """Have a loop train a sharded model. All ranks call it, before the loop trains, or prepares anything.

    Afterwards `prepare` leaves the model as it is, `clip_grad_norm_` and ``max_grad_norm`` clip by the norm over all
    ranks, and micro-batches that are accumulated are reduced once, with the last one. Whole models are saved by the
    Trainer's `save_model`, and by the Accelerator's `save_model` and `get_state_dict`; all ranks call these.

    Args:
        loop: an `Accelerator`, or a `Trainer`, which was made of the model before that was sharded: it moves models.
        model: as `shoal.zero.shard` returned it.
        optimizer: as `shoal.zero.shard` returned it.
        schedule: of learning rates, for a Trainer; None for the one that its arguments name.

    Raises:
        ConfigError: the loop computes in mixed precision, shards the model itself, or saves what cannot be saved so: on
            all ranks.
    """
    check_sharded(optimizer)
    with optimizer.agreement.together():
        optimizer.check_model(model)
        accelerator = getattr(loop, "accelerator", loop)
        _check(loop, accelerator, model, optimizer, schedule)
    if loop is not accelerator:
        loop.optimizer, loop.lr_scheduler, loop._save = optimizer, schedule, _saving(loop, model, optimizer)  # noqa: SLF001 (their name)
    model._is_accelerate_prepared = True  # type: ignore[assignment]  # noqa: SLF001 (as above)
    model.no_sync = optimizer.no_sync  # type: ignore[assignment]
    accelerator.clip_grad_norm_ = lambda _, max_norm, norm_type=2: optimizer.clip_grad_norm_(max_norm, norm_type)
    accelerator.get_state_dict = lambda given, unwrap=True: full_state_dict(given, group=optimizer.collectives.everyone)
    accelerator.save_state = accelerator.load_state = _refuse


def _saving(trainer: Any, model: torch.nn.Module, optimizer: ShardedOptimizer) -> Callable[..., None]:
    """The part of `save_model` that all ranks call: without a state dictionary it would save shards."""
    save, group = trainer._save, optimizer.collectives.everyone  # noqa: SLF001 (their name)

    def save_whole(output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        whole = full_state_dict(model, rank0_only=True, group=group) if state_dict is None else state_dict
        save(output_dir, state_dict=whole)

    return save_whole


def _refuse(*_: object, **__: object) -> None:
    raise ConfigError(
        "save_state and load_state would carry one rank's part of the optimizer: call shoal.zero.save(path, model, "
        "optimizer) and load() on all ranks"
    )


def _check(loop: Any, accelerator: Any, model: torch.nn.Module, optimizer: ShardedOptimizer, schedule: object) -> None:
    """Raise `ConfigError` unless the loop can train the model."""
    if not all(hasattr(accelerator, name) for name in ("mixed_precision", "distributed_type", "clip_grad_norm_")):
        raise ConfigError(f"loop must be an Accelerator, or a Trainer of transformers, got a {type(loop).__name__}")
    if accelerator.mixed_precision != "no":
        raise ConfigError(
            f"loop computes in mixed precision ({accelerator.mixed_precision}), and would leave it out of a sharded "
            "model: set it to no (bf16=False), and give shard() dtype=torch.bfloat16"
        )
    if accelerator.distributed_type.value in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise ConfigError(
            f"loop shards models itself, by {accelerator.distributed_type.value}: start it without that, with torchrun "
            "alone"
        )
    if loop is not accelerator:
        _check_trainer(loop, model, optimizer)
    elif schedule is not None:
        raise ConfigError("schedule is for a Trainer: in a loop of your own step it after the optimizer")


def _check_trainer(trainer: Any, model: torch.nn.Module, optimizer: ShardedOptimizer) -> None:
    if trainer.model is not model:
        raise ConfigError("the Trainer has another model: make it first, and give shard() its trainer.model")
    try:
        optimizer.carrier.check()
    except LocalError as error:
        raise ConfigError(f"make the Trainer before shard(), since it moves the model: {error}") from error
    args = trainer.args
    if args.save_strategy != "no" and not args.save_only_model:
        raise ConfigError(
            "save_strategy would save one rank's part of the optimizer: set save_strategy='no', and call "
            "shoal.zero.save(path, model, optimizer) on all ranks, in on_step_end of a callback or after train(). "
            "With save_only_model=True it saves whole models"
        )
    if args.load_best_model_at_end:
        raise ConfigError("load_best_model_at_end would load a model into its shards: set it to False")
