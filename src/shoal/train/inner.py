"""The torch optimizer and the schedule that a run is about: given ones, or made here; what cannot work is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from shoal.base.checks import flag
from shoal.base.names import known_as, learn_from
from shoal.errors import ConfigError
from shoal.train.offload import Offload
from shoal.train.optimizer_state import OptimizerState

__all__ = ["Scheduler", "make_inner", "make_offloaded", "make_optimizer", "make_scheduler"]

Scheduler = Any
"""A torch learning-rate scheduler: any object with `step()`."""
_SHARDED = (
    ("shoal.zero.optimizer", "ShardedOptimizer"),
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"),
    ("torch.distributed.tensor", "DTensor"),
)
"""Classes that hold one rank's part of a model. A program that uses one has imported its module; importing all of them
takes a second."""


def make_optimizer(
    params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """The torch optimizer that is meant: a given one, or one made from `params`.

    Raises:
        ConfigError: neither, or both; one that cannot step from an average of gradients; or one whose state no
            newcomer could take over.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        if params is not None:
            raise ConfigError(
                "give params with an optimizer class or function, or an optimizer that has them; not both"
            )
        return _checked(optimizer)
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer must be a torch optimizer, or a function of params, got {type(optimizer).__name__}"
        )
    if params is None:
        raise ConfigError("params is missing: optimizer is a function that makes the optimizer from them")
    made = optimizer(list(params))
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"optimizer(params) gave a {type(made).__name__}, not a torch optimizer")
    return _checked(made)


def make_inner(
    params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
    offload_optimizer: bool | None,
) -> tuple[torch.optim.Optimizer, Offload | None]:
    """The optimizer, and what lends its parameters host memory, if `offload_optimizer`; None for it is False.

    Raises:
        ConfigError: as `make_optimizer` and `make_offloaded`; `params` is one tensor; `offload_optimizer` is no flag.
    """
    if isinstance(params, torch.Tensor):  # which is an iterable of its rows
        raise ConfigError(
            "params must be a list of tensors or dictionaries, as of model.parameters(): put one tensor in a list"
        )
    if offload_optimizer is not None and flag("offload_optimizer", offload_optimizer):
        return make_offloaded(params, optimizer)
    return make_optimizer(params, optimizer), None


def make_offloaded(
    params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
) -> tuple[torch.optim.Optimizer, Offload]:
    """The optimizer made from `params` while they are on the CPU, and what lends them that memory.

    Raises:
        ConfigError: as `make_optimizer`; or the optimizer is made already, wherever it keeps its statistics.
    """
    if params is None or isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "offload_optimizer=True needs params, and a class or function as optimizer, as a strategy's offload=True "
            "does: the optimizer has to be made over copies on the CPU. Give params=model.parameters(), "
            "optimizer=lambda params: torch.optim.AdamW(params)"
        )
    listed = [_listed(each) for each in params]
    trained = [(name, each) for name, each in _tensors_of(listed) if each.requires_grad]
    for index, (name, each) in enumerate(trained):
        on_host = torch.empty(0, dtype=torch.float32, device="cpu")
        if is_lazy(each) or not torch._has_compatible_shallow_copy_type(each, on_host):  # noqa: SLF001 (as `to` of a module)
            called = name or known_as(each, f"{index}")
            raise ConfigError(
                f"offload_optimizer=True cannot move trained parameter {called}: it has no values yet (it is lazy, or "
                "on the meta device), or is on a device that torch cannot exchange for the CPU"
            )
    offload = Offload([each for _, each in trained])
    with offload.on_host():
        return make_optimizer(listed, optimizer), offload


def _listed(given: Any) -> Any:
    """What torch takes, with the parameters of a group as a list: they are looked at twice."""
    if isinstance(given, dict) and not isinstance(held := given.get("params", []), torch.Tensor):
        return {**given, "params": list(held)}
    return given


def _tensors_of(params: Iterable[Any]) -> Iterator[tuple[str | None, torch.Tensor]]:
    """The tensors among what torch takes (tensors, pairs of a name and a tensor, groups of either), and their names."""
    for each in params:
        if isinstance(each, torch.Tensor):
            yield None, each
        elif isinstance(each, dict):
            inner = each.get("params", ())
            yield from _tensors_of([inner] if isinstance(inner, torch.Tensor) else inner)
        elif isinstance(each, tuple):
            yield each[0], each[-1]


def _checked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    learn_from(optimizer)
    listed = [each for group in optimizer.param_groups for each in group["params"]]
    for index, parameter in enumerate(listed):
        if is_lazy(parameter) or parameter.is_meta:
            raise ConfigError(
                f"parameter {known_as(parameter, index)} of the optimizer has no values yet (it is lazy, or on the "
                "meta device): give the model one batch, or load its weights, and make the optimizer then"
            )
    kept = OptimizerState(optimizer)
    needs = kept.needs
    if needs == "backward":
        raise ConfigError(
            f"optimizer is of type {type(optimizer).__name__}, which has no step(). If it steps within backward, from "
            "this peer's own gradients, the swarm would never see them. Use another optimizer"
        )
    if needs == "gradients of gradients":
        raise ConfigError(
            f"optimizer is of type {type(optimizer).__name__}, which differentiates the gradients within its step, but "
            "the swarm gives it one average of gradients, which has no graph. Use another optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS) or needs == "a closure":
        raise ConfigError(
            f"optimizer is of type {type(optimizer).__name__}, which computes the loss within its step (it needs a "
            "closure), but the swarm gives it one average of gradients. Use another optimizer; in place of SAM and "
            "its like use their base optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "optimizer is a SparseAdam, which takes sparse gradients only, but the swarm's average is dense: use Adam, "
            "with or without sparse=True in the embedding"
        )
    for module, name in _SHARDED:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and any(isinstance(each, kind) for each in (optimizer, *listed)):
            raise ConfigError(
                f"optimizer is sharded ({name}): this rank steps only a part of the model, but a peer must share the "
                "whole model with the swarm. Give the swarm an optimizer of the whole model"
            )
    kept.check_travels()
    return optimizer


def make_scheduler(
    optimizer: torch.optim.Optimizer, scheduler: Scheduler | Callable[[torch.optim.Optimizer], Scheduler] | None
) -> Scheduler | None:
    """The scheduler that is meant: a given one, or one made for `optimizer`.

    Raises:
        ConfigError: it has no `step`, needs more than that, or is over another optimizer.
    """
    if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
        scheduler = scheduler(optimizer)
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise ConfigError("scheduler must be a torch scheduler, or a function of the optimizer that makes one")
    moved = getattr(scheduler, "optimizer", None)
    if isinstance(moved, torch.optim.Optimizer) and moved.param_groups[0] is not optimizer.param_groups[0]:
        raise ConfigError("scheduler moves another optimizer than the given one: make it over that one")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "scheduler is a ReduceLROnPlateau, which needs a measurement at each step, but each peer has its own: use "
            "a schedule of epochs"
        )
    return scheduler
