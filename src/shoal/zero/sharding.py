"""`shard`: from a model, and a function that makes its optimizer, to ZeRO."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from shoal.base.checks import flag
from shoal.errors import ConfigError
from shoal.layout import Tile
from shoal.zero.arguments import problems, refuse_to_wrap
from shoal.zero.disk.plain import overwrite
from shoal.zero.disk.starting import Start, numbers_of_rank_0
from shoal.zero.disk.weights import weights_in
from shoal.zero.flat.engine import FlatEngine
from shoal.zero.flat.sparse import declared, tables_of
from shoal.zero.flat.topk import share
from shoal.zero.fsdp.engine import FsdpEngine, is_sharded, partition
from shoal.zero.fsdp.engine import units as find_units
from shoal.zero.memory.offload import Offload
from shoal.zero.optimizer import Carrier, ShardedOptimizer, described
from shoal.zero.parameters import named_parameters
from shoal.zero.probe import Finding, Unit, finding, why_not_by_rows, why_not_lazy, why_not_saved, why_not_sharded
from shoal.zero.ranks.collectives import Collectives
from shoal.zero.ranks.watch import Agreement, Watch
from shoal.zero.replicas import Replicas, groups_of, process_group
from shoal.zero.unsharded.lent import unwatched
from shoal.zero.unsharded.parametrized import keep_places

__all__ = ["shard"]

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
_sharded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_partitioned: weakref.WeakKeyDictionary[torch.nn.Module, tuple[torch.dtype | None, torch.dtype | None]] = (
    weakref.WeakKeyDictionary()
)
"""Models of stage 3: the dtype that was given, and that in which gradients are sent."""
_models = itertools.count(1)
OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def shard(  # noqa: PLR0913 (the choices of its users)
    model: ModuleT,
    optimizer_factory: OptimizerFactory,
    *,
    stage: int,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    skip_nonfinite: bool = True,
    units: Iterable[torch.nn.Module] | None = None,
    offload: str | os.PathLike[str] | None = None,
    top_k: float | None = None,
    weights: str | os.PathLike[str] | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[ModuleT, ShardedOptimizer]:
    """Partition a model's training over the ranks of a process group; all of them call it.

    All begin with the parameters of rank 0, or with `weights`. Then train as on one rank, each rank on micro-batches of
    its own::

        model, optimizer = shoal.zero.shard(model, lambda params: torch.optim.AdamW(params, lr=3e-4), stage=2)
        for batch in loader:
            model(batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Gradients are averaged over the ranks. In stages 1 and 2 the optimizer is tried on small tensors
    (`shoal.zero.probe`). If it treats each value by itself (SGD, Adam, AdamW, RMSprop, Adagrad, Lion and others), every
    parameter is cut into tiles; if it treats each tensor by itself (Adafactor, LAMB, LARS, Muon, Shampoo, SOAP), whole
    parameters are shared out. Others (LBFGS, Prodigy) are refused. Stage 3 needs an optimizer that steps DTensors.

    Of an embedding with ``sparse=True`` stages 1 and 2 reduce, step and send the rows that any rank has touched, and no
    others (`shoal.zero.flat.sparse`): an optimizer that treats each value by itself is a lazy one there.

    Args:
        model: on its device already, with parameters, frozen ones and buffers as they are on rank 0; or on the meta
            device (built in ``with torch.device("meta"):``), to get values here, on the default device: of `weights`,
            or of each module's own `reset_parameters` and Hugging Face's `_init_weights`. With stages 1 and 2 the
            parameters move into common memory: do not move, convert or replace them later. A model to which
            `fully_shard` was applied is taken as it is, for stage 2 or 3.
        optimizer_factory: called with the trained parameters (stage 3: sharded ones); returns the optimizer of these or
            of some of them, in any parameter groups. It may read the model instead of its argument.
        stage: 1 partitions optimizer state, 2 gradients as well, 3 parameters as well.
        group: the ranks; None for all.
        dtype: the dtype to compute, gather and reduce in: `torch.bfloat16`, with float32 copies for the optimizer; None
            for the parameters' own, and for a model to which `fully_shard` was applied. Buffers stay as they are. A
            model of bfloat16 parameters gets float32 copies in any case; stage 3 refuses one that mixes dtypes. In
            stages 1 and 2 the parameters themselves become narrow: load weights before, or by `shoal.zero.load`; values
            written into a parameter later are rounded there. Frozen ones keep their float32 values as well, each rank
            its share.
        skip_nonfinite: leave out a step, on all ranks, if a gradient of any rank is infinite or not a number.
        units: stage 3: which modules are gathered together, while they run, and freed behind that: such as
            ``model.layers``, or modules of any kind. Parameters outside of them stay gathered while the model runs.
            None for the members of the model's outermost `ModuleList`s and `Sequential`s.
        offload: where to keep what only the optimizer needs: its state, float32 copies, in stage 2 gradients, and in
            stage 3 shards and their gradients. "cpu" for host memory beside a device; or the path of a folder, for
            files on its disk that have no name and are gone when the process ends, read and written while it steps, a
            part at a time. Each rank may give a folder of its own. None for the memory of the parameters' device.
        top_k: stages 1 and 2: of each matrix only this share of the gradient is reduced, stepped and sent in a step,
            such as 0.01: on each rank the largest values of each tile. The rest is kept, and added to the next gradient
            (`shoal.zero.flat.topk`). Vectors are sent whole. ``optimizer.top_k`` may be changed between steps. None
            for all.
        weights: the model begins with these: a safetensors file, a folder as `save_pretrained` of Hugging Face writes
            it, or the folder of a checkpoint of `shoal.zero.save`, of which the weights alone are taken. In stage 3
            each rank reads its own rows only. Values are rounded to the dtypes of the model. None for those of rank 0.
        mesh: hybrid sharding: a DeviceMesh of two dimensions, such as ``init_device_mesh("cpu", (2, 4))`` for 2
            replicas of 4 ranks each. The ranks of the second dimension share out one copy; those of the first one keep
            the same share, and take the mean of its gradients before each step. It holds the ranks of `group`.

    Returns:
        The same model, and its optimizer.

    Raises:
        ConfigError: an argument is wrong on any rank, or ranks give different arguments: raised on all ranks. The model
            is as it was then, but for its first values; in stage 3 it may be partitioned already: call this again with
            the same stage and dtype. If the error says so, build it anew.
        RankLost: a rank is gone.
    """
    everyone = process_group(dist.group.WORLD if group is None else group)
    watch = Watch(everyone)
    agreement = Agreement(everyone, watch)
    with agreement.together():
        groups, skips = groups_of(everyone, mesh), flag("skip_nonfinite", skip_nonfinite)
        if isinstance(model, torch.nn.Module) and model in _sharded:
            raise ConfigError("model is sharded already, by an earlier shard(): call it once for a model")
        again = isinstance(model, torch.nn.Module) and model in _partitioned  # by a call that failed later
        if again and (stage, dtype) != (3, _partitioned[model][0]):
            raise ConfigError(
                "model is partitioned by an earlier shard() that failed: give the same stage and dtype as in that one"
            )
        given = (None, offload, None) if again else (dtype, offload, weights)
        for problem in problems(model, optimizer_factory, stage, *given):
            raise ConfigError(problem)
        parts = _units(model, units, stage)
        _check_sparse(model, stage, top_k, hybrid=mesh is not None)
        source = None if weights is None or again else weights_in(weights)
        start = Start(model, source, (groups.shards.rank(), groups.shards.size()) if stage == 3 else None)
    place = offload if offload in (None, "cpu") else "to a folder"
    what = f"stage {stage}, dtype {dtype}, skip_nonfinite {skips}"
    what += f"\noffload {place}\ntop_k {top_k and share(top_k)}\nweights {source and source.identity}"
    what += f"\nmesh {mesh and mesh.mesh.tolist()}"
    description = f"{what}\n{_description(model)}\nunits {_places(model, parts)}"
    agreement.alike(description, "model, stage, dtype, skip_nonfinite, units, offload, top_k, weights and mesh")
    number = int(agreement.gather(str(next(_models)))[0])
    collectives = Collectives(groups.shards, watch, start.device, number, groups.everyone)
    places = Offload(offload, collectives.device)
    if not is_sharded(model):
        _begin(model, start, parts if stage == 3 else None, dtype, collectives, elsewhere=places.elsewhere)
    carrier: Carrier | None = None
    with agreement.together():
        if stage == 3 or is_sharded(model):
            carrier = FsdpEngine(model, stage, collectives, places, _partitioned.get(model, (None, None))[1])
        parameters = dict(named_parameters(model))
        inner = _build(optimizer_factory, parameters)
        judged = _judged(inner, model, cuts=carrier is None)
        if carrier is None:
            _check_lazy(inner, model, parameters, places, whole=judged.whole, top_k=top_k)
        listed = _names(inner, parameters)
        places.prepare(inner, model, stage, dtype, 1 if carrier is not None else collectives.ranks)
    agreement.alike(_groups(inner, listed, judged), "optimizer")
    with agreement.together():
        if carrier is not None:
            _check_by_rows(inner, model)
        else:  # the model is as it was until here
            carrier = _cut(model, inner, stage, dtype, collectives, places, whole=judged.whole, top_k=top_k)
        places.settle(inner)
    replicas = None if groups.replicas is None else Replicas(groups.replicas, collectives, places.let_go)
    optimizer = ShardedOptimizer(
        model,
        inner,
        carrier,
        collectives,
        places,
        listed,
        skip_nonfinite=skips,
        irregular=judged.irregular,
        replicas=replicas,
    )
    keep_places(model)
    _seal(model)
    return model, optimizer


def _seal(model: torch.nn.Module) -> None:
    """It is sharded now."""
    refuse_to_wrap(model)
    _sharded.add(model)


def _check_sparse(model: torch.nn.Module, stage: int, top_k: float | None, *, hybrid: bool) -> None:
    """Raise `ConfigError` if sparse updates cannot be carried."""
    if top_k is not None and share(top_k) and (stage == 3 or is_sharded(model)):
        raise ConfigError("top_k is for stages 1 and 2 of a model to which fully_shard was not applied")
    if hybrid and (top_k is not None or declared(model)):
        raise ConfigError("mesh cannot carry sparse updates: leave top_k out, and give embeddings sparse=False")


def _units(model: torch.nn.Module, given: Iterable[torch.nn.Module] | None, stage: int) -> list[torch.nn.Module]:
    """The modules that stage 3 gathers together; none for other stages. Raises `ConfigError`."""
    if stage == 3 and not is_sharded(model):
        return find_units(model, given)
    if given is not None:
        raise ConfigError("units are for stage 3, of a model to which fully_shard was not applied")
    return []


def _places(model: torch.nn.Module, parts: Sequence[torch.nn.Module]) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    return " ".join(names[id(each)] for each in parts)


def _description(model: torch.nn.Module) -> str:
    """The description of a model that must be equal on all ranks."""
    lines = ["fully_shard was applied" if is_sharded(model) else "fully_shard was not applied"]
    sparse = declared(model)
    first: dict[int, str] = {}
    for name, parameter in named_parameters(model, remove_duplicate=False):
        trained = "trained" if parameter.requires_grad else "frozen"
        tied = f", is {first[id(parameter)]}" if id(parameter) in first else ""
        first.setdefault(id(parameter), name)
        kind = f"{tuple(parameter.shape)} {parameter.dtype} on {parameter.device.type}"
        lines.append(f"{name} {kind} {trained}{tied}{', sparse' if name in sparse else ''}")
    lines += [f"buffer {name} {tuple(each.shape)} {each.dtype}" for name, each in model.named_buffers()]
    return "\n".join(lines)


def _groups(inner: torch.optim.Optimizer, names: Sequence[Sequence[str]], found: Finding) -> str:
    """The description of an optimizer that must be equal on all ranks."""
    lines = [f"{type(inner).__name__}, of which a rank steps {found.unit.value if found.unit else 'row'}s"]
    lines += [f"group {number} has {len(listed)} parameters: {' '.join(listed)}" for number, listed in enumerate(names)]
    return "\n".join([*lines, described(inner.param_groups)])


# ------------------------------------------------------------------------------------------------------------- sharding


def _begin(
    model: torch.nn.Module,
    start: Start,
    parts: Sequence[torch.nn.Module] | None,
    dtype: torch.dtype | None,
    collectives: Collectives,
    *,
    elsewhere: bool,
) -> None:
    """Give the model its first values, the same on all ranks, and partition it into units if there are any."""
    _take_over(start.at_hand, collectives)
    agreement = Agreement(collectives.everyone, collectives.watch)
    with numbers_of_rank_0(agreement, start.device), agreement.together(), start.reading():
        if parts is not None:
            narrow = partition(model, parts, collectives.group, start.device, dtype, start.before, elsewhere=elsewhere)
            _partitioned[model] = dtype, narrow
        else:
            start.before(model)
    _take_over(start.computed, collectives)


def _take_over(tensors: Iterable[torch.Tensor], collectives: Collectives) -> None:
    """All ranks begin with the values of rank 0."""
    root = dist.get_global_rank(collectives.everyone, 0)
    turn = collectives.watch.turn("to take over rank 0's model")
    for tensor in tensors:
        if not tensor.numel():
            continue
        whole = tensor.detach().to(collectives.device).resolve_conj().resolve_neg().contiguous()
        values = whole.view(-1).view(torch.uint8)  # bytes, so that the backend need not know the dtype
        with collectives.watch.named(turn):
            dist.broadcast(values, root, group=collectives.everyone)
        if whole.data_ptr() != tensor.data_ptr():
            overwrite(tensor.detach(), whole)


def _cut(
    model: torch.nn.Module,
    inner: torch.optim.Optimizer,
    stage: int,
    dtype: torch.dtype | None,
    collectives: Collectives,
    offload: Offload,
    *,
    whole: bool,
    top_k: float | None,
) -> FlatEngine:
    """Stages 1 and 2: cut trained parameters into tiles, and give the optimizer those of this rank."""
    parameters = dict(named_parameters(model))
    names = _names(inner, parameters)
    listed = {id(each) for each in _listed(inner) if each.requires_grad and each.numel()}
    trained = {name: each for name, each in parameters.items() if id(each) in listed}
    wide = {} if dtype is None else _narrow(model, dtype)
    tables = tables_of(model, trained, top_k, wide, collectives)
    engine = FlatEngine(model, trained, stage, collectives, offload, whole=whole, wide=wide, tables=tables)
    _swap(inner, names, parameters, engine)
    return engine


def _narrow(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Let the model compute in `dtype`, as FSDP2's policy does; returns the parameters' float32 values."""
    wide = {name: each.detach() for name, each in named_parameters(model) if each.dtype == torch.float32}
    for each in model.parameters():
        if each.dtype == torch.float32:
            each.data = each.data.to(dtype)
    model.register_forward_pre_hook(_Cast(dtype), with_kwargs=True)
    return wide


class _Cast:
    """A hook that casts the arguments of a model. It has a name, so that the model can be pickled."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tree_map(self._narrowed, args), tree_map(self._narrowed, kwargs)

    def _narrowed(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


def _build(factory: OptimizerFactory, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Call the factory, and check its optimizer. Raises `ConfigError`."""
    with unwatched():
        inner = factory([each for each in parameters.values() if each.requires_grad])
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(f"optimizer_factory must return a torch optimizer, got {type(inner).__name__}")
    known = {id(each) for each in parameters.values()}
    if any(id(each) not in known for each in _listed(inner)):
        raise ConfigError(
            "optimizer_factory built an optimizer of other tensors than the model's parameters, or of those from "
            "before sharding: build it of the parameters that it is called with"
        )
    return inner


def _judged(inner: torch.optim.Optimizer, model: torch.nn.Module, *, cuts: bool) -> Finding:
    """What ranks may share out of it, for stages 1 and 2 or for stage 3. Raises `ConfigError` if nothing."""
    if cuts and isinstance(inner, torch.optim.SparseAdam):
        return Finding(Unit.VALUE, "")  # it takes no dense gradients to be tried with
    if reason := why_not_saved(inner) or (None if cuts else why_not_sharded(inner, model)):
        raise ConfigError(
            f"optimizer_factory built {type(inner).__name__}, which {reason}: use another optimizer, or train without "
            "sharding"
        )
    found = finding(inner, model) if cuts else Finding(None, "")
    if cuts and found.unit is None:
        raise ConfigError(
            f"optimizer_factory built {type(inner).__name__}, which {found.reason}: in stages 1 and 2 one rank alone "
            "steps a tensor, or a piece of it. Use an optimizer that treats each tensor by itself (those of "
            "torch.optim but LBFGS and SparseAdam; LAMB, LARS, Shampoo, SOAP and others), leave clipping by the norm "
            "of all gradients to optimizer.clip_grad_norm_(), or train without sharding"
        )
    return found


def _check_by_rows(inner: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Raise `ConfigError` unless it can step DTensors."""
    if reason := why_not_by_rows(inner, model):
        other = (
            "use stage 1 or 2, of a model to which fully_shard was not applied: it fits there"
            if finding(inner, model).unit is not None
            else "use another optimizer, or train without sharding"
        )
        raise ConfigError(f"optimizer_factory built {type(inner).__name__}, which {reason}: {other}")


def _check_lazy(
    inner: torch.optim.Optimizer,
    model: torch.nn.Module,
    parameters: Mapping[str, torch.nn.Parameter],
    offload: Offload,
    *,
    whole: bool,
    top_k: float | None,
) -> None:
    """Raise `ConfigError` unless it can step some rows of sparse embeddings, with `top_k` some values of matrices."""
    sparse, kind = declared(model), type(inner).__name__
    trained = [name for group in _names(inner, parameters) for name in group if parameters[name].requires_grad]
    lazy = [name for name in trained if name in sparse or (top_k is not None and parameters[name].ndim > 1)]
    own_sparse, reason = isinstance(inner, torch.optim.SparseAdam), None
    if own_sparse and (dense := [name for name in trained if name not in sparse]):
        reason = (
            f"steps sparse gradients alone, and {dense[0]} has dense ones: use AdamW for all, which is lazy for "
            "embeddings with sparse=True"
        )
    elif lazy and whole:
        reason = (
            f"needs whole tensors, and only some rows of {lazy[0]} would be stepped: give its module sparse=False, or "
            "leave top_k out, or use an optimizer such as AdamW"
        )
    elif not own_sparse and (found := why_not_lazy(inner, model, {id(parameters[name]) for name in lazy})):
        reason = (
            f"{found}: it cannot step a few rows of a tensor, and leave the others for later. Use another optimizer, "
            "or neither sparse=True nor top_k"
        )
    if reason is not None:
        raise ConfigError(f"optimizer_factory built {kind}, which {reason}")
    if lazy and offload.elsewhere:
        raise ConfigError(
            f"offload cannot be 'cpu' beside a device where only some rows of {lazy[0]} are stepped: leave it out"
        )


def _listed(inner: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [each for group in inner.param_groups for each in group["params"]]


def _names(inner: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> list[list[str]]:
    """The names of the parameters in each group, frozen ones too."""
    of = {id(each): name for name, each in parameters.items()}
    return [[of[id(each)] for each in group["params"]] for group in inner.param_groups]


def _swap(
    inner: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    parameters: Mapping[str, torch.nn.Parameter],
    engine: FlatEngine,
) -> None:
    """Put each parameter's own tiles into the optimizer's groups and state, in place of the parameter."""
    own: dict[str, list[Tile]] = {}
    for tile in engine.own:
        own.setdefault(tile.name, []).append(tile)
    for group, listed in zip(inner.param_groups, names, strict=True):
        group["params"] = [engine.own[tile] for name in listed for tile in own.get(name, ())]
        for name in listed:
            state = inner.state.pop(parameters[name], {})  # some keep statistics from the beginning (Adagrad)
            for tile in own.get(name, ()) if state else ():
                inner.state[engine.own[tile]] = {
                    key: engine.share(tile, value) if isinstance(value, torch.Tensor) else deepcopy(value)
                    for key, value in state.items()
                }
