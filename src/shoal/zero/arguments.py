"""Checks of the arguments of `shard`, with messages that say what to do."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from shoal.base.models import limited_embeddings
from shoal.compression.memory import overlaps
from shoal.errors import ConfigError
from shoal.zero.fsdp.engine import is_sharded, roots
from shoal.zero.memory.offload import problem_of
from shoal.zero.parameters import hooks_of, local, named_parameters, wide_dtype

__all__ = ["problems", "refuse_to_wrap"]


def problems(
    model: object, factory: object, stage: object, dtype: object, offload: object, weights: object = None
) -> Iterator[str]:
    """The problems, each checked only on demand: after the first one, others may make no sense."""
    if not isinstance(model, torch.nn.Module):
        yield f"model must be a torch.nn.Module, got {type(model).__name__}"
        return
    if isinstance(factory, torch.optim.Optimizer):
        yield (
            "optimizer_factory is an optimizer that was built before sharding: give a function that builds it, such as "
            "lambda params: torch.optim.AdamW(params, lr=1e-3)"
        )
    elif not callable(factory):
        yield f"optimizer_factory must be a function of parameters, got {type(factory).__name__}"
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        yield f"stage must be 1, 2 or 3, got {stage!r}"
    if dtype not in (None, torch.bfloat16):
        yield f"dtype must be torch.bfloat16 or None, got {dtype!r}"
    if problem := problem_of(offload):
        yield problem
    yield from _of_modules(model)
    yield from _of_parameters(list(named_parameters(model)))
    yield from _of_buffers(model)
    if is_sharded(model):
        yield from _of_own_sharding(model, stage, dtype, weights, offload)
    else:
        yield from _overlaps(model)
    if stage == 3 or is_sharded(model):
        yield from _for_fsdp2(model, dtype)


def _of_own_sharding(
    model: torch.nn.Module, stage: object, dtype: object, weights: object, offload: object
) -> Iterator[str]:
    if offload is not None and any(not local(each).is_cpu for each in model.parameters()):
        yield (
            "offload cannot be given for a model on a device that fully_shard was applied to: let shard() apply it, "
            "or leave offload out"
        )
    if weights is not None:
        yield (
            "weights are for a model to which fully_shard was not applied: load them with "
            "shoal.zero.load(weights, model, optimizer)"
        )
    if meta := [name for name, each in [*named_parameters(model), *model.named_buffers()] if each.is_meta]:
        yield f"{meta[0]} is on the meta device, and fully_shard was applied: give the model its values first"
    if stage == 1:
        yield "a model that fully_shard was applied to can be carried in stage 2 or 3, not 1"
    if dtype is not None:
        yield (
            "dtype cannot be given for a model that fully_shard was applied to: give fully_shard a "
            "MixedPrecisionPolicy instead"
        )


def _for_fsdp2(model: torch.nn.Module, dtype: object) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            yield f"{name} has sparse gradients, which FSDP2 cannot reduce: give it sparse=False, or use stage 1 or 2"
    if not is_sharded(model):
        yield from _of_container(model)
        for name, parameter in named_parameters(model):
            if hooks_of(parameter):
                yield (
                    f"{name} has a hook (register_post_accumulate_grad_hook), and stage 3 puts a shard in its place: "
                    "register it after shard(), where it sees this rank's rows of the mean, or use stage 1 or 2"
                )
            if parameter.ndim == 0:
                yield f"{name} is a scalar, which FSDP2 cannot shard: make it a tensor of one value, or use stage 2"
            if parameter.requires_grad and not parameter.numel():
                yield f"{name} has no values, which FSDP2 cannot reduce: freeze it, or use stage 1 or 2"
        yield from _of_dtypes(model, dtype)


def _of_container(model: torch.nn.Module) -> Iterator[str]:
    """Problems of a root that cannot be called: each of its members is sharded by itself."""
    owner: dict[int, str] = {}
    members = {id(member): name for name, member in model.named_modules()}
    for root in roots(model):
        for parameter in root.parameters():
            if owner.setdefault(id(parameter), members[id(root)]) != members[id(root)]:
                yield (
                    f"{members[id(root)]} and {owner[id(parameter)]} share a parameter, and model is a "
                    f"{type(model).__name__}, which is never called itself: put them into a module that has a forward "
                    "method, or use stage 1 or 2"
                )
    for name, parameter in named_parameters(model):
        if id(parameter) not in owner:
            yield f"{name} is in a {type(model).__name__}, which is never called: put it into a module, or use stage 2"


def _of_modules(model: torch.nn.Module) -> Iterator[str]:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        yield (
            "model is in a DistributedDataParallel, which reduces gradients itself: give shard() the model within "
            "(its .module), and train that"
        )
    for name, _ in limited_embeddings(model):
        yield (
            f"{name} has max_norm, by which each rank would change other rows of its weight in forward: "
            "set max_norm=None, and limit the norms of rows after each step"
        )


def _of_parameters(parameters: list[tuple[str, torch.nn.Parameter]]) -> Iterator[str]:
    if not any(parameter.requires_grad for _, parameter in parameters):
        yield "model has no parameter that requires a gradient: there is nothing to train"
    for name, parameter in parameters:
        if is_lazy(parameter):
            yield f"{name} has no shape yet, since its module is lazy: run the model once before shard()"
        if parameter.requires_grad and (parameter.is_complex() or parameter.dtype == torch.float16):
            yield f"{name} is {parameter.dtype}: train in float32 or bfloat16"


def _of_buffers(model: torch.nn.Module) -> Iterator[str]:
    for name, buffer in model.named_buffers():
        if is_lazy(buffer):
            yield f"{name} has no shape yet, since its module is lazy: run the model once before shard()"
        if buffer.layout != torch.strided or buffer.is_quantized:
            yield f"{name} is a buffer with the layout {buffer.layout} and {buffer.dtype}: make it a dense tensor"


def _of_dtypes(model: torch.nn.Module, dtype: object) -> Iterator[str]:
    """FSDP2 computes all parameters of a unit in one dtype, and steps them in one."""
    first: dict[torch.dtype, str] = {}
    for name, each in named_parameters(model):
        if each.is_floating_point():
            first.setdefault(each.dtype if dtype is None else wide_dtype(each.dtype), name)
    if len(first) > 1:
        (one, name), (other, another) = list(first.items())[:2]
        yield (
            f"{name} is {one}, and {another} is {other}: stage 3 computes the whole model in one dtype. Convert it, "
            "give dtype=torch.bfloat16 to compute all of a float32 and bfloat16 model in bfloat16, or use stage 1 or 2"
        )


def _overlaps(model: torch.nn.Module) -> Iterator[str]:
    """Tensors that share memory with a parameter without being it: moving them apart would change the model."""
    named = [*named_parameters(model), *model.named_buffers()]
    for one, other in overlaps([tensor for _, tensor in named]):
        if isinstance(named[one][1], torch.nn.Parameter):  # they come before the buffers
            yield (
                f"{named[one][0]} and {named[other][0]} share memory but are different tensors, which no stage can "
                "carry: tie parameters by assigning the same one to both, and compute in forward what a buffer has of "
                "a parameter"
            )


class _NotToBeWrapped(list[str]):
    """The parameters that `DistributedDataParallel` is to leave alone: it asks for them before it does anything."""

    def __iter__(self) -> Iterator[str]:
        raise ConfigError(
            "a model of shoal.zero is given to DistributedDataParallel, which would reduce its gradients once more: "
            "call the model that shard() returned, without DistributedDataParallel"
        )

    def __reduce__(self) -> tuple[type[list[str]], tuple[()]]:
        return list, ()  # a copy of the model is no model of shoal.zero


def refuse_to_wrap(model: torch.nn.Module) -> None:
    """Let `DistributedDataParallel` raise `ConfigError` for this model."""
    model._ddp_params_and_buffers_to_ignore = _NotToBeWrapped()  # type: ignore[assignment]  # noqa: SLF001 (torch's name)
