"""Models of `shoal.zero.shard` in the loops of Accelerate, and in the Trainer of `transformers`, which is one of them.

Both would wrap the model into a DistributedDataParallel, clip with torch's function, and save one rank's part of the
optimizer. Written for accelerate 1.15 and transformers 5.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.errors import ConfigError, LocalError
from shoal.zero.flat import FlatEngine
from shoal.zero.optimizer import ShardedOptimizer, check_sharded

__all__ = ["attach"]


def attach(loop: Any, model: torch.nn.Module, optimizer: ShardedOptimizer, schedule: Any = None) -> None:
    """Have a loop train a sharded model. Call it before the loop trains, or prepares anything.

    Afterwards `prepare` leaves the model as it is, `clip_grad_norm_` and ``max_grad_norm`` clip by the norm over all
    ranks, and micro-batches that are accumulated are reduced once, with the last one.

    Args:
        loop: an `Accelerator`, or a `Trainer`, which was made of the model before that was sharded: it moves models.
        model: as `shoal.zero.shard` returned it.
        optimizer: as `shoal.zero.shard` returned it.
        schedule: of learning rates, for a Trainer; None for the one that its arguments name.

    Raises:
        ConfigError: the loop computes in mixed precision, shards the model itself, or saves what cannot be saved so.
    """
    check_sharded(optimizer)
    accelerator = getattr(loop, "accelerator", loop)
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
        loop.optimizer, loop.lr_scheduler = optimizer, schedule
    elif schedule is not None:
        raise ConfigError("schedule is for a Trainer: in a loop of your own step it after the optimizer")
    model._is_accelerate_prepared = True  # type: ignore[assignment]  # noqa: SLF001 (their name)
    model.no_sync = optimizer.no_sync  # type: ignore[assignment]
    accelerator.clip_grad_norm_ = lambda _, max_norm, norm_type=2: optimizer.clip_grad_norm_(max_norm, norm_type)


def _check_trainer(trainer: Any, model: torch.nn.Module, optimizer: ShardedOptimizer) -> None:
    if trainer.model is not model:
        raise ConfigError("the Trainer has another model: make it first, and give shard() its trainer.model")
    try:
        optimizer.carrier.check()
    except LocalError as error:
        raise ConfigError(f"make the Trainer before shard(), since it moves the model: {error}") from error
    args = trainer.args
    models = args.save_only_model and isinstance(optimizer.carrier, FlatEngine)
    if args.save_strategy != "no" and not models:
        raise ConfigError(
            "save_strategy would save one rank's part of the optimizer: set save_strategy='no', and call "
            "shoal.zero.save(path, model, optimizer) on all ranks, in on_step_end of a callback or after train(). In "
            "stages 1 and 2 save_only_model=True saves whole models"
        )
    if args.load_best_model_at_end:
        raise ConfigError("load_best_model_at_end would load a model into its shards: set it to False")
