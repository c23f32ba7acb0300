"""Stage 3: parameters, gradients and optimizer state are sharded by PyTorch's FSDP2; what it lacks is added.

FSDP2 shards each parameter by rows, gathers a unit's parameters before its forward and its backward, and reduces its
gradients behind it. Gloo's reduce-scatter, with which it would do that on processors, is an all-reduce of which a part
is kept: here it sends to each owner what is its own, over FSDP2's public hooks, and adds up in the order of the ranks.

A model that is sharded by `fully_shard` already is carried as it is, in stage 2 as well
(`reshard_after_forward=False`).

Source: Rajbhandari et al., "ZeRO" (2020), section 5.3; `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from shoal.errors import ConfigError, LocalError
from shoal.zero.collectives import Collectives, Run, sum_in_order
from shoal.zero.optimizer import Piece, local

__all__ = ["FsdpEngine", "is_sharded", "partition", "units"]


class _Meeting:
    """What one unit exchanges, and the check that all ranks are at it.

    A rank that has skipped a layer exchanges the next one's parameters: others would take them for those that they wait
    for. So before values are sent, each rank says what they are.

    Args:
        collectives: among the ranks.
        unit: the how many-th it is of the model's.
        name: of the module.
    """

    def __init__(self, collectives: Collectives, unit: int, name: str) -> None:
        self.collectives, self._unit, self._name = collectives, unit, name or "the whole model"

    def check(self, numel: int, *, backward: bool) -> None:
        """Raise `LocalError` on all ranks unless all are about to exchange so many values of this unit."""
        group = self.collectives.group
        mine = torch.tensor([self._unit, numel, backward], device=self.collectives.device)
        table = torch.empty(group.size(), 3, dtype=mine.dtype, device=mine.device)
        table[group.rank()] = mine
        self.collectives.all_gather([Run(rank, row) for rank, row in enumerate(table)], counted=False).wait()
        for rank, row in enumerate(table.tolist()):
            if row != mine.tolist():
                raise LocalError(
                    f"this rank {_act(backward)} {numel:,} values of unit {self._unit} ({self._name}), and rank {rank} "
                    f"{_act(row[2])} {row[1]:,} of unit {row[0]}: with stage 3 all ranks must run the same layers, in "
                    "the same order; stages 1 and 2 need not. Start anew"
                )


def _act(backward: object) -> str:
    return "reduces" if backward else "gathers"


class _OwnReduceScatter(ReduceScatter):
    """Each rank's part goes to that rank only."""

    def __init__(self, meeting: _Meeting) -> None:
        self._meeting = meeting

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,  # noqa: FBT002 (FSDP2's interface)
    ) -> None:
        assert op == dist.ReduceOp.SUM  # as was asked for, by set_force_sum_reduction_for_comms
        self._meeting.check(input_tensor.numel(), backward=True)
        runs = [Run(rank, part) for rank, part in enumerate(input_tensor.chunk(group.size()))]
        mine = group.rank()
        self._meeting.collectives.reduce_scatter(
            runs, lambda _, pieces: _fill(output_tensor, sum_in_order(pieces, mine))
        ).wait()


class _OwnAllGather(AllGather):
    """Each rank sends its part to every other one; received in place."""

    def __init__(self, meeting: _Meeting) -> None:
        self._meeting = meeting

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT002 (FSDP2's interface)
    ) -> None:
        self._meeting.check(output_tensor.numel(), backward=False)
        runs = [Run(rank, part) for rank, part in enumerate(output_tensor.chunk(group.size()))]
        mine = runs[group.rank()].data
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        self._meeting.collectives.all_gather(runs).wait()


def _fill(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether `fully_shard` was applied to any part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What is gathered and freed together, beside the model as a whole: the layers of its outermost `ModuleList`s.

    A layer that shares a parameter with something outside of it is left to the whole.
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found: list[torch.nn.Module] = []

    def visit(module: torch.nn.Module) -> None:
        for child in module.children():
            if isinstance(module, torch.nn.ModuleList) and _is_alone(child, uses):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return found


def _is_alone(module: torch.nn.Module, uses: dict[int, int]) -> bool:
    """Whether it has parameters, and nothing outside has one of them; it must be called as a module, too."""
    inside: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            inside[id(parameter)] = inside.get(id(parameter), 0) + 1
    return (
        bool(inside)
        and not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
        and all(uses[key] == count for key, count in inside.items())
    )


def partition(
    model: torch.nn.Module, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype | None
) -> None:
    """Apply `fully_shard` to each unit, and to the model.

    Args:
        model: not sharded yet. Its parameters become DTensors; 16-bit ones become float32 first.
        group: the ranks.
        device: where the parameters are.
        dtype: to compute, gather and reduce in; None for that of the parameters.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    narrow = next((each.dtype for each in model.parameters() if _is_narrow(each)), None)
    dtype = dtype or narrow
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for module in [*units(model), model]:
        for parameter in module.parameters():
            if _is_narrow(parameter):
                parameter.data = parameter.data.float()  # the shards are the optimizer's float32 copy
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _is_narrow(parameter: torch.nn.Parameter) -> bool:
    return parameter.is_floating_point() and parameter.itemsize < torch.float32.itemsize


class FsdpEngine:
    """A model that FSDP2 has sharded.

    Args:
        model: sharded, over one dimension of ranks.
        stage: 2 or 3.
        collectives: among the same ranks.

    Raises:
        ConfigError: it is sharded in a way that cannot be carried.
    """

    def __init__(self, model: torch.nn.Module, stage: int, collectives: Collectives) -> None:
        self._model, self._collectives = model, collectives
        self._units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        for module in self._units.values():
            module.reshard()  # between forward and backward, a model has whole parameters in the shards' places
        # By name: those shards, wherever the model has them now; and the whole ones, since they were seen.
        self._shards: dict[str, DTensor] = {}
        self._whole: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor) or not _is_by_rows(parameter):
                raise ConfigError(
                    f"{name} is not sharded by rows over one dimension of ranks: apply fully_shard to the whole model, "
                    "on a mesh of one dimension"
                )
            ranks = dist.get_process_group_ranks(parameter.device_mesh.get_group())
            if ranks != dist.get_process_group_ranks(collectives.group):
                raise ConfigError(f"{name} is sharded over the ranks {ranks}: pass their process group as group")
            self._shards[name] = parameter
        self._starts = self._find_starts()
        self._used: set[str] = set()
        for number, (name, module) in enumerate(self._units.items()):
            module.set_reshard_after_forward(stage == 3, recurse=False)
            # A parameter that one rank does not use counts as zero there: else ranks would send unlike sizes.
            module.set_reduce_scatter_unused_params(True, recurse=False)
            model.get_submodule(name).register_forward_pre_hook(partial(self._find_whole, name))
            if _is_gloo(collectives):
                meeting = _Meeting(collectives, number, name)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_reduce_scatter(_OwnReduceScatter(meeting))
                module.set_custom_all_gather(_OwnAllGather(meeting))

    def _find_starts(self) -> dict[str, int]:
        """Where our rows of each parameter begin: behind those of the ranks before us. Values, not rows."""
        mine = {name: local(shard).numel() for name, shard in self._shards.items()}
        sizes: list[dict[str, int]] = [{}] * self._collectives.ranks
        watch = self._collectives.watch
        with watch.named(watch.turn("to tell sizes")):
            dist.all_gather_object(sizes, mine, group=self._collectives.group)
        return {name: sum(each[name] for each in sizes[: self._collectives.rank]) for name in mine}

    def _find_whole(self, unit: str, module: torch.nn.Module, _: object) -> None:
        """A unit is about to run, with whole parameters: see from now on which of them get gradients."""
        for inner, parameter in module.named_parameters():
            name = f"{unit}.{inner}" if unit else inner
            if isinstance(parameter, DTensor) or name not in self._shards or name in self._whole:
                continue
            self._whole[name] = parameter
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._used.add(name))  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block keep their gradients, unsharded, to this rank."""
        self._sync(False)
        try:
            yield
        finally:
            self._sync(True)

    def _sync(self, wanted: bool) -> None:
        for module in self._units.values():
            module.set_requires_gradient_sync(wanted, recurse=False)

    def zero_grad(self) -> None:
        """Let go of all gradients, of passes within `no_sync` too."""
        for shard in self._shards.values():
            shard.grad = None
        for whole in self._whole.values():
            whole.grad = None
        for each in self._fsdp_parameters():
            each.unsharded_accumulated_grad = None
        self._used.clear()

    def _fsdp_parameters(self) -> Iterator[Any]:
        """What FSDP2 knows of the parameters. Not public: no other place has gradients in another dtype."""
        for module in self._units.values():
            for group in module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
                yield from group.fsdp_params

    def gradients(self) -> list[torch.Tensor]:
        """The shards' gradients, averaged over the ranks.

        Raises:
            LocalError: the last backward pass was within `no_sync`.
        """
        if any(each.grad is not None for each in self._whole.values()) or any(
            each.unsharded_accumulated_grad is not None for each in self._fsdp_parameters()
        ):
            raise LocalError(
                "the last backward pass was within no_sync(): run the last one before clipping or stepping outside it"
            )
        return [each.grad.to_local() for each in self._shards.values() if isinstance(each.grad, DTensor)]

    def finite(self) -> bool:
        """Whether all of them are."""
        return all(bool(gradient.sum().isfinite()) for gradient in self.gradients())

    def absent(self) -> list[bool]:
        """For each parameter whether no backward pass here has used it."""
        return [name not in self._used for name in self._shards]

    def hand_over(self, absent: Sequence[bool]) -> None:
        """They are the parameters' own; what no rank has used has none, though FSDP2 made zeros."""
        for shard, unused in zip(self._shards.values(), absent, strict=True):
            if unused:
                shard.grad = None

    def publish(self) -> None:
        """Others gather the new values when they need them. Where whole ones are kept, they are old."""
        for module in self._units.values():
            module.reshard()

    def adopt(self) -> None:
        """The shards are all there is."""
        self.publish()

    def check(self) -> None:
        """Raise `LocalError` if a parameter is not the one that was sharded."""
        for name, parameter in self._model.named_parameters():
            known = self._shards.get(name) if isinstance(parameter, DTensor) else self._whole.get(name)
            if parameter is not known:
                raise LocalError(f"{name} was replaced after shard(): build and load the model first, then shard it")

    def pieces(self) -> Iterator[Piece]:
        """The rows of this rank, of all parameters that are trained."""
        for name, shard in self._shards.items():
            values, start = local(shard).reshape(-1), self._starts[name]
            if shard.requires_grad and values.numel():
                yield Piece(name, start, start + values.numel(), shard, values)

    def kept(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The shards are the float32 copy, and their gradients are in `grad`; those of `no_sync` are whole."""
        whole = [each.grad for each in self._whole.values() if each.grad is not None]
        more = [each.unsharded_accumulated_grad for each in self._fsdp_parameters()]
        return [*whole, *(each for each in more if each is not None)], []


def _is_by_rows(parameter: DTensor) -> bool:
    return parameter.device_mesh.ndim == 1 and parameter.placements[0].is_shard(0)


def _is_gloo(collectives: Collectives) -> bool:
    """Whether tensors of the model's device go by gloo; a group may have a backend for each kind of device."""
    config = str(dist.get_backend_config(collectives.group))
    return dict(each.split(":") for each in config.split(",")).get(collectives.device.type) == "gloo"
