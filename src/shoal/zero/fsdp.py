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


class _OwnReduceScatter(ReduceScatter):
    """Each rank's part goes to that rank only."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

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
        runs = [Run(rank, part) for rank, part in enumerate(input_tensor.chunk(group.size()))]
        mine = group.rank()
        self._collectives.reduce_scatter(
            runs, lambda _, pieces: _fill(output_tensor, sum_in_order(pieces, mine))
        ).wait()


class _OwnAllGather(AllGather):
    """Each rank sends its part to every other one; received in place."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT002 (FSDP2's interface)
    ) -> None:
        runs = [Run(rank, part) for rank, part in enumerate(output_tensor.chunk(group.size()))]
        mine = runs[group.rank()].data
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        self._collectives.all_gather(runs).wait()


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
    narrow = next((each.dtype for each in model.parameters() if each.itemsize < torch.float32.itemsize), None)
    dtype = dtype or narrow
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for module in [*units(model), model]:
        if narrow is not None:
            module.float()  # the shards are the optimizer's float32 copy
        fully_shard(module, mesh=mesh, mp_policy=policy)


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
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._unreduced = False
        for name, parameter in model.named_parameters():
            if (
                not isinstance(parameter, DTensor)
                or parameter.device_mesh.ndim != 1
                or not parameter.placements[0].is_shard(0)
            ):
                raise ConfigError(
                    f"{name} is not sharded by rows over one dimension of ranks: apply fully_shard to the whole model, "
                    "on a mesh of one dimension"
                )
        self._starts = self._find_starts()
        own = dist.get_backend(collectives.group) == "gloo"
        for module in self._modules:
            module.set_reshard_after_forward(stage == 3, recurse=False)
            if own:
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_reduce_scatter(_OwnReduceScatter(collectives))
                module.set_custom_all_gather(_OwnAllGather(collectives))

    def _find_starts(self) -> dict[str, int]:
        """Where our rows of each parameter begin: behind those of the ranks before us. Values, not rows."""
        mine = {name: local(parameter).numel() for name, parameter in self._model.named_parameters()}
        sizes: list[dict[str, int]] = [{}] * self._collectives.ranks
        watch = self._collectives.watch
        with watch.named(watch.turn("to tell sizes")):
            dist.all_gather_object(sizes, mine, group=self._collectives.group)
        return {name: sum(each[name] for each in sizes[: self._collectives.rank]) for name in mine}

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block keep their gradients, unsharded, to this rank."""
        self._sync(False)
        try:
            yield
        finally:
            self._sync(True)
            self._unreduced = True

    def _sync(self, wanted: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(wanted, recurse=False)

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for parameter in self._model.parameters():
            parameter.grad = None
        self._unreduced = False

    def gradients(self) -> list[torch.Tensor]:
        """The shards' gradients, averaged over the ranks.

        Raises:
            LocalError: all backward passes were within `no_sync`.
        """
        found = [each.grad.to_local() for each in self._model.parameters() if isinstance(each.grad, DTensor)]
        if self._unreduced and not found:
            raise LocalError(
                "the last backward pass was within no_sync(): run the last one before clipping or stepping outside it"
            )
        return found

    def finite(self) -> bool:
        """Whether all of them are."""
        return all(bool(gradient.sum().isfinite()) for gradient in self.gradients())

    def absent(self) -> list[bool]:
        """FSDP2 leaves the gradient of what was not used alone."""
        return []

    def hand_over(self, absent: Sequence[bool]) -> None:
        """They are the parameters' own."""

    def publish(self) -> None:
        """Others gather the new values when they need them."""

    def adopt(self) -> None:
        """The shards are all there is."""

    def check(self) -> None:
        """FSDP2 does."""

    def pieces(self) -> Iterator[Piece]:
        """The rows of this rank, of all parameters that are trained."""
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad or not isinstance(parameter, DTensor):
                continue
            values, start = local(parameter).reshape(-1), self._starts[name]
            if values.numel():
                yield Piece(name, start, start + values.numel(), parameter, values)

    def kept(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Nothing: the shards are the float32 copy, and their gradients are in `grad`."""
        return [], []
