"""Stage 3: PyTorch's FSDP2 shards parameters, gradients and optimizer state; this module adds the missing parts.

FSDP2 shards each parameter by rows, gathers a unit's parameters before its forward and its backward, and reduces its
gradients behind it. Gloo's reduce-scatter, with which it would do that on processors, is an all-reduce of which a part
is kept. Here each owner is sent only its own part, over FSDP2's public hooks, and contributions are added in the order
of the ranks.

A model that is sharded by `fully_shard` already is carried as it is, in stage 2 as well
(`reshard_after_forward=False`).

Source: Rajbhandari et al., "ZeRO" (2020), section 5.3; `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors

from shoal.base.nested import tensors_in
from shoal.errors import ConfigError, LocalError
from shoal.layout import Order, Tile
from shoal.zero.fsdp.comms import NarrowReduceScatter, OwnAllGather, OwnReduceScatter, UnitMeeting
from shoal.zero.memory.mapped import let_go
from shoal.zero.memory.offload import Offload
from shoal.zero.parameters import OwnTile, bottom_up, local, named_parameters, present_pass, weakly
from shoal.zero.ranks.collectives import Collectives, Traffic
from shoal.zero.unsharded.gathered import BROKE_OFF, Unsharded
from shoal.zero.unsharded.lent import is_lent, replace, writes_of

__all__ = ["FsdpEngine", "is_container", "is_sharded", "partition", "roots", "units"]

_REPLACED = (
    "{} was replaced, added or taken away after shard(), and would not be trained: write values into the parameters "
    "that are there (with copy_(), or load_state_dict without assign=True), or build and tie before that"
)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether `fully_shard` was applied to any part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def roots(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that are called as a whole: the model, or the members of a container that cannot be called itself."""
    if not is_container(model):
        return [model]
    return [root for child in model.children() for root in roots(child)]


def is_container(module: torch.nn.Module) -> bool:
    """Whether the module only holds others: FSDP2's work after its `forward` would never be done."""
    kinds = (torch.nn.ModuleList, torch.nn.ModuleDict)
    return isinstance(module, kinds) and type(module).forward is torch.nn.Module.forward


def units(model: torch.nn.Module, given: Iterable[torch.nn.Module] | None = None) -> list[torch.nn.Module]:
    """The modules that are gathered and freed together, apart from the rest, in the order in which they are made.

    By default the members of the model's outermost `ModuleList`s and `Sequential`s. One that shares a parameter, or a
    module, with something outside of it is left to the whole.

    Raises:
        ConfigError: a given object is no such module.
    """
    uses, places = _uses(model), Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    found: dict[int, torch.nn.Module] = {}  # a layer may be in several lists

    def visit(module: torch.nn.Module) -> None:
        for child in module.children():
            if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and _is_alone(
                child, uses, places[id(child)]
            ):
                found[id(child)] = child
            else:
                visit(child)

    if given is None:
        visit(model)
    else:
        names = {id(module): name for name, module in model.named_modules()}
        if not isinstance(given, Iterable):
            raise ConfigError(f"units must be a list of modules of the model, got {given!r}")
        for module in given:
            if id(module) not in names:
                raise ConfigError(f"units must be modules of the model, got {type(module).__name__}, which is none")
            if module is not model and not _is_alone(module, uses, places[id(module)]):
                raise ConfigError(
                    f"units lists {names[id(module)]}, which cannot be gathered by itself: it has no parameters, or "
                    "shares some with another module, or is a container that is never called (give its members)"
                )
            found[id(module)] = module
    return [module for module in bottom_up(model) if id(module) in found and module is not model]


def _uses(module: torch.nn.Module) -> Counter[int]:
    """Count the places of a module in which each of its parameters is."""
    parts = (part for _, part in module.named_modules(remove_duplicate=False))
    return Counter(id(parameter) for part in parts for parameter in part.parameters(recurse=False))


def _is_alone(module: torch.nn.Module, uses: Counter[int], places: int) -> bool:
    """Whether it has parameters, and nothing outside has one of them; it must be called as a module, too."""
    inside = _uses(module)
    return (
        bool(inside) and not is_container(module) and all(uses[key] == places * count for key, count in inside.items())
    )


def partition(
    model: torch.nn.Module,
    parts: Sequence[torch.nn.Module],
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype | None,
    before: Callable[[torch.nn.Module], None],
    *,
    elsewhere: bool = False,
) -> torch.dtype | None:
    """Apply `fully_shard` to each unit, and to the model. Hooks of parameters go on with the shards in their places.

    Args:
        model: not sharded yet. Its parameters become DTensors; 16-bit ones become float32 first.
        parts: its units.
        group: the ranks.
        device: where the parameters are.
        dtype: the dtype to compute, gather and reduce in; None for that of the parameters.
        before: called with each of these modules before it is sharded, in the order in which they are made.
        elsewhere: shards, their gradients and the optimizer are on the CPU, beside the device.

    Returns:
        The dtype, if it has 16 bits: to send gradients in, too. FSDP2 adds them up in float32.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    dtype = dtype or next((each.dtype for each in model.parameters() if _is_narrow(each)), None)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    changed = _changed_in_place(model)
    hooks = {name: each._backward_hooks for name, each in named_parameters(model)}  # noqa: SLF001
    originals = {name: weakref.ref(each) for name, each in named_parameters(model)}
    for module in [*parts, *(root for root in roots(model) if root not in parts)]:
        before(module)
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                # The shards are rows, and the optimizer's float32 copy.
                wide = parameter.data.float() if _is_narrow(parameter) else parameter.data
                parameter.data = wide.contiguous()
        if id(module) in changed:
            module.register_forward_hook(_own_memory)  # before FSDP2's own
        where = CPUOffloadPolicy() if elsewhere else OffloadPolicy()
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=where)
    for name, parameter in named_parameters(model):
        if hooks[name]:
            parameter._backward_hooks = hooks[name]  # noqa: SLF001 (its handles work on)
        if (original := originals[name]()) is not None and original is not parameter:  # a program keeps it
            replace(original, name)
    return dtype


def _changed_in_place(model: torch.nn.Module) -> set[int]:
    """The `id` of members of Sequentials whose result the next one writes over, such as `ReLU(inplace=True)`."""
    pairs = (pair for each in model.modules() if isinstance(each, torch.nn.Sequential) for pair in pairwise(each))
    return {id(one) for one, following in pairs if any(getattr(each, "inplace", False) for each in following.modules())}


def _own_memory(_: torch.nn.Module, __: object, output: object) -> torch.Tensor | None:
    """FSDP2 puts a hook on the result of a unit, and loses that hook if a view of it is written over."""
    return output.clone() if isinstance(output, torch.Tensor) and output._is_view() else None  # noqa: SLF001


def _hand_out(_: torch.nn.Module, __: object, output: object) -> object:
    """Weights among the results of a unit, and views of them, leave it as copies."""
    if not any(map(is_lent, tensors_in(output))):
        return None
    return _apply_to_tensors(lambda each: each.clone() if is_lent(each) else each, output)


def _once(unit: str, _: torch.nn.Module, __: object, output: object) -> None:
    """A graph of the gradients would read weights that are freed by then."""

    def check(_: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise LocalError(
                f"gradients of unit {unit} are to be differentiated themselves (create_graph=True, or torch.func): in "
                "stage 3 the unit is freed behind its backward pass. Differentiate twice within its forward method, or "
                "use stage 1 or 2"
            )

    for each in tensors_in(output):
        if each.requires_grad and torch.is_grad_enabled():
            each.register_hook(check)  # type: ignore[no-untyped-call]


def _broke_off(module: FSDPModule) -> bool:
    """Whether the last backward pass through a model began and did not end."""
    context = module._get_fsdp_state()._state_ctx  # noqa: SLF001 (there is no other way to ask)
    return context.post_backward_final_callback_queued and present_pass() == -1


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Whether it has a forward-mode derivative, which FSDP2 would hand through a function of its own."""
    if forward_ad._current_level < 0 or not torch.is_grad_enabled():  # noqa: SLF001 (there is no other way to ask)
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _refuse_to_copy(*_: object) -> NoReturn:
    """Each rank has some rows of a model."""
    raise ConfigError(
        "a model of stage 3 is copied or pickled (copy.deepcopy, torch.save, AveragedModel and others), and each rank "
        "has some rows of it: make a new model, and load shoal.zero.full_state_dict(model) into that one. For a moving "
        "average use shoal.zero.EMA, for a checkpoint shoal.zero.save; or use stage 1 or 2"
    )


def _refuse_to_assign(
    _: torch.nn.Module, state: Mapping[str, object], prefix: str, metadata: Mapping[str, object], *__: object
) -> None:
    """Whole tensors would be put in the places of shards."""
    if metadata.get("assign_to_params_buffers") and any(key.startswith(prefix) for key in state):
        raise LocalError(
            "load_state_dict(assign=True) would replace the parameters, which are in shards: leave assign out, or use "
            "shoal.zero.load(weights, model, optimizer)"
        )


def _seen(module: torch.nn.Module, _: object, output: object) -> None:
    """FSDP2 gathers a unit in the backward pass when a gradient comes to a result of it, which it must see for that.

    Raises:
        LocalError: it sees none.
    """
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in module.parameters()):
        return
    kinds: list[type] = []

    def contains_tensor(value: object) -> bool:
        """Whether there is a tensor in it."""
        if isinstance(value, torch.Tensor):
            return True
        if isinstance(value, Mapping):
            return contains_tensor(list(value.values()))
        if isinstance(value, list | tuple):
            return sum(map(contains_tensor, value)) > 0  # not any(): each is looked at
        if dataclasses.is_dataclass(value):
            return contains_tensor([getattr(value, field.name) for field in dataclasses.fields(value)])
        if not isinstance(value, str | bytes | int | float | type(None)):
            kinds.append(type(value))
        return False

    if not contains_tensor(output) and kinds:
        name = type(module).__name__.removeprefix("FSDP")
        raise LocalError(
            f"{name} returns an object of the class {kinds[0].__name__}, in which stage 3 sees no tensors: return "
            "tensors, or tuples, lists, dictionaries or dataclasses of them, or use stage 1 or 2"
        )


def _is_narrow(parameter: torch.nn.Parameter) -> bool:
    return parameter.is_floating_point() and parameter.itemsize < torch.float32.itemsize


class FsdpEngine:
    """A model that FSDP2 has sharded.

    Args:
        model: sharded, over one dimension of ranks.
        stage: 2 or 3.
        collectives: among the same ranks.
        places: where shards and their gradients are kept.
        dtype: the dtype to send gradients in; None for FSDP2's own.

    Raises:
        ConfigError: it is sharded in a way that cannot be carried, or the disk is full.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        stage: int,
        collectives: Collectives,
        places: Offload,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._model, self._collectives, self._syncing = model, collectives, True
        self._before: FSDPModule | None = None  # the unit that began last, in the present forward pass
        self._meetings: dict[str, UnitMeeting] = {}  # by the names of units
        self._units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        for module in self._units.values():
            module.reshard()  # between forward and backward, a model has whole parameters in the shards' places
        self._shards: dict[str, DTensor] = {}
        for name, parameter in named_parameters(model):
            if not isinstance(parameter, DTensor) or not _is_by_rows(parameter):
                raise ConfigError(
                    f"{name} is not sharded by rows over one dimension of ranks: apply fully_shard to the whole model, "
                    "on a mesh of one dimension"
                )
            ranks = dist.get_process_group_ranks(parameter.device_mesh.get_group())
            if ranks != dist.get_process_group_ranks(collectives.group):
                raise ConfigError(f"{name} is sharded over the ranks {ranks}: pass their process group as group")
            self._shards[name] = parameter
        # A program may freeze and unfreeze them in turns.
        self._trained = [name for name, shard in self._shards.items() if shard.requires_grad]
        self._starts = self._find_starts()
        for number, (name, module) in enumerate(self._units.items()):
            module.set_reshard_after_forward(stage == 3, recurse=False)
            # A parameter that one rank does not use counts as zero there: else ranks would send unlike sizes.
            module.set_reduce_scatter_unused_params(True, recurse=False)
            if collectives.tagged:
                meeting = self._meetings[name] = UnitMeeting(collectives, number, name)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_reduce_scatter(OwnReduceScatter(meeting, dtype))
                module.set_custom_all_gather(OwnAllGather(meeting))
            elif dtype is not None:
                module.set_custom_reduce_scatter(NarrowReduceScatter(collectives.watch, dtype))
            cast(torch.nn.Module, module).register_forward_pre_hook(weakly(self._begin), prepend=True, with_kwargs=True)
            cast(torch.nn.Module, module).register_forward_hook(_hand_out, prepend=True)  # before FSDP2's own
            cast(torch.nn.Module, module).register_forward_hook(_seen)
            cast(torch.nn.Module, module).register_forward_hook(partial(_once, name or "the whole model"), prepend=True)
        self._unsharded = Unsharded(self._shards, self._units, collectives.watch)
        names = {id(shard): name for name, shard in self._shards.items()}
        self._places = [
            (part, key, names[id(each)], each.dtype)
            for part in model.modules()
            for key, each in part._parameters.items()  # noqa: SLF001 (tied ones in each of their places)
            if each is not None
        ]
        for part in model.modules():
            part.register_load_state_dict_pre_hook(_refuse_to_assign)  # type: ignore[no-untyped-call]
        for module in self._units.values():
            module.__deepcopy__ = module.__reduce_ex__ = _refuse_to_copy  # type: ignore[method-assign, attr-defined]
        self._offload(places)
        for module in self._units.values():
            module._get_fsdp_state()._lazy_init()  # noqa: SLF001 (a program may call a unit by itself before the model)
        collectives.traffic = Traffic()  # that was no training

    def _offload(self, places: Offload) -> None:
        """Move shards into files, and their gradients as soon as they are reduced. Raises `ConfigError`.

        Not beside a device, where FSDP2 keeps them on the CPU.
        """
        if places.folder is None or places.elsewhere:
            return
        entries: list[tuple[str, Any]] = [
            (name, managed)
            for name, module in self._units.items()
            for group in module._get_fsdp_state()._fsdp_param_groups  # noqa: SLF001 (there is no other way)
            for managed in group.fsdp_params
        ]
        filled = [each._sharded_param_data.view(each.padded_sharded_param_size) for _, each in entries]  # noqa: SLF001
        trained = [each.sharded_param for _, each in entries if each.sharded_param.requires_grad]
        rooms = places.rooms([*filled, *map(local, trained)])
        for (name, managed), values, room in zip(entries, filled, rooms, strict=False):
            shard, rows = managed.sharded_param, len(local(managed.sharded_param))
            managed._sharded_param_data = room.copy_(values).view(-1)  # noqa: SLF001 (what is gathered)
            shard._local_tensor = room[:rows]  # noqa: SLF001 (torch takes over changed ones)
            places.attach(shard, room)
            if name in self._meetings:
                self._meetings[name].mapped.append(room)
        for shard, room in zip(trained, rooms[len(entries) :], strict=True):
            places.attach(shard, room)
            shard.register_post_accumulate_grad_hook(partial(_into, room))
        places.let_go(rooms)

    def _find_starts(self) -> dict[str, int]:
        """The value at which our rows of each parameter begin: behind those of the ranks before us."""
        mine = {name: local(shard).numel() for name, shard in self._shards.items()}
        sizes: list[dict[str, int]] = [{}] * self._collectives.ranks
        watch = self._collectives.watch
        with watch.named(watch.turn("to tell sizes")):
            dist.all_gather_object(sizes, mine, group=self._collectives.group)
        return {name: sum(each[name] for each in sizes[: self._collectives.rank]) for name in mine}

    def _begin(self, module: FSDPModule, args: object, kwargs: object) -> None:
        """Before a unit runs: if the last backward pass broke off, FSDP2 is in the middle of it still.

        Raises:
            LocalError: a part of its gradients is there; or a parameter is not the one that was sharded; or the
                arguments have forward-mode derivatives.
        """
        if any(map(_has_tangent, tensors_in([args, kwargs]))):
            raise LocalError(
                "a tensor with a forward-mode derivative (torch.autograd.forward_ad) goes into a unit of stage 3, which"
                " cannot carry it: compute it within torch.no_grad(), or with torch.func.jvp, or use stage 1 or 2"
            )
        if present_pass() != -1:
            return
        state = module._get_fsdp_state()  # noqa: SLF001 (there is no other way to ask)
        first = state._state_ctx.iter_forward_root in (None, state)  # noqa: SLF001 (it begins a pass)
        if first:
            self._check_places()  # FSDP2 is about to put others into these places
        if first and _broke_off(module):
            self._unsharded.forget()
            state._state_ctx.all_states[0]._reset_iter_state()  # noqa: SLF001 (that of the root)
        if self._collectives.tagged:
            # The next pass gathers it while the unit before it runs. FSDP2 does so by itself in the backward pass.
            if self._before is not None and not first:
                self._before.set_modules_to_forward_prefetch([module])
            self._before = module

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block keep their gradients, unsharded, to this rank."""
        before = self._syncing
        self._sync(False)
        try:
            yield
        finally:
            self._sync(before)

    def _sync(self, wanted: bool) -> None:
        self._syncing = wanted
        for module in self._units.values():
            module.set_requires_gradient_sync(wanted, recurse=False)

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Let go of all gradients, of passes within `no_sync` too; or set those that there are to zeros."""
        self._unsharded.clear(set_to_none=set_to_none)

    def gradients(self) -> list[torch.Tensor]:
        """The shards' gradients, averaged over the ranks.

        Raises:
            LocalError: the last backward pass was within `no_sync`, or others have changed gradients, or FSDP2 has not
                reduced all of them.
        """
        waiting, broke_off = self._unsharded.waiting(), any(map(_broke_off, self._units.values()))
        if broke_off and (waiting or self._unsharded.reduced()):
            raise LocalError(BROKE_OFF)
        if waiting:
            raise LocalError(
                "the last backward pass was within no_sync(): run the last one before clipping or stepping outside it"
                if self._unsharded.meant_to_wait
                else "gradients were not reduced: stage 3 does not carry reentrant activation checkpoints within each "
                "other: use use_reentrant=False"
            )
        return [each.to_local() for each in self._unsharded.reduced().values()]

    def finite(self) -> bool:
        """Whether all of them are."""
        return all(bool(gradient.sum().isfinite()) for gradient in self.gradients())

    def used(self) -> list[bool]:
        """Whether a backward pass here has used it, for each parameter."""
        return [self._unsharded.used(name) for name in self._shards]

    def reduced(self) -> Mapping[str, int]:
        """The number of backward passes whose gradients each shard has, since it was cleared."""
        return {name: self._unsharded.passes(name) for name in self._shards}

    def hand_over(self, used: Sequence[bool], _: torch.optim.Optimizer) -> None:
        """Gradients are the parameters' own; a parameter that no rank has used has none, though FSDP2 made zeros."""
        for shard, has in zip(self._shards.values(), used, strict=True):
            if not has:
                shard.grad = None

    def adopt(self, stepped: Iterable[torch.Tensor] | None = None) -> None:
        """Shards are the parameters themselves."""

    def write_out(self, stepped: Iterable[torch.Tensor] | None = None) -> None:
        """Shards are the parameters themselves."""

    def publish(self) -> None:
        """Others gather the new values when they need them. Where whole ones are kept, they are old."""
        for module in self._units.values():
            module.reshard()
            for group in module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001 (there is no other way)
                if group._all_gather_result is not None:  # noqa: SLF001 (gathered ahead, and not used since)
                    group.wait_for_unshard()
                    group.reshard()
        self._unsharded.change()

    @property
    def reduction(self) -> FsdpEngine:
        """The part that has the gradients."""
        return self

    @property
    def fraction(self) -> None:
        """All of a gradient is sent."""

    def trainable(self, listed: Collection[str]) -> Collection[str]:
        """Names of the parameters that may be trained: those that the optimizer lists, frozen ones too."""
        return {*self._trained, *listed}

    def written(self) -> int:
        """A number that is the same on all ranks while programs change weights alike."""
        return zlib.crc32(repr(self.writes()).encode())

    def writes(self) -> dict[str, tuple[bool, str]]:
        """Of each weight whether a program has changed it since the last step; and a digest, the same on all ranks."""
        return writes_of(self._shards)

    def check(self) -> None:
        """Raise `LocalError` if a parameter is not the one that was sharded."""
        self._check_places()
        for name, parameter in named_parameters(self._model):  # also of modules that are new
            self._check_place(name, parameter)

    def _check_places(self) -> None:
        for module, key, name, dtype in self._places:
            self._check_place(name, module._parameters.get(key))  # noqa: SLF001
            if self._shards[name].dtype != dtype:
                raise LocalError(
                    f"{name} was converted to {self._shards[name].dtype} after shard(): do that before, or give "
                    "shard() dtype="
                )

    def _check_place(self, name: str, now: torch.Tensor | None) -> None:
        known = self._shards.get(name), self._unsharded.parameters.get(name)  # the whole one if its unit runs
        if now is None or not any(now is each for each in known):
            raise LocalError(_REPLACED.format(name))

    def own_tiles(self) -> Iterator[OwnTile]:
        """The rows of this rank, of all parameters that were trained when the model was sharded."""
        for name in self._trained:
            shard = self._shards[name]
            values, start = local(shard).reshape(-1), self._starts[name]
            if values.numel():
                yield OwnTile(Tile(name, start, start + values.numel()), shard, values)

    def orders(self) -> Mapping[str, Order]:
        """Shards are rows, and contiguous."""
        return {}

    def residuals(self) -> Mapping[str, torch.Tensor]:
        """All of a gradient is sent."""
        return {}

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """None: the shards of frozen parameters are float32 themselves."""
        return iter(())

    def write(self, name: str, values: torch.Tensor) -> bool:
        """There is none."""
        return False

    def kept(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The shards are the float32 copy, and their gradients are in `grad`; those of `no_sync` are whole."""
        return self._unsharded.waiting(), []


def _into(room: torch.Tensor, shard: DTensor) -> None:
    """Move a shard's gradient."""
    gradient = shard.grad
    assert isinstance(gradient, DTensor)
    if local(gradient).data_ptr() != room.data_ptr():
        gradient._local_tensor = room.copy_(local(gradient))  # noqa: SLF001 (it stays the same gradient)
    let_go([room])


def _is_by_rows(parameter: DTensor) -> bool:
    return parameter.device_mesh.ndim == 1 and parameter.placements[0].is_shard(0)
