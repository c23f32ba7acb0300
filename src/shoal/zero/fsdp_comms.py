"""FSDP2's messages on processors: each rank's part goes to that rank only, and all first name their unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shoal.errors import LocalError
from shoal.zero.collectives import Collectives, Run, sum_in_order

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
else:
    AllGather = ReduceScatter = object  # older versions of torch have none; stages 1 and 2 do without

__all__ = ["NarrowReduceScatter", "OwnAllGather", "OwnReduceScatter", "UnitMeeting"]


class UnitMeeting:
    """The messages of one unit, and the check that all ranks are at it.

    A rank that has skipped a layer exchanges the next one's parameters: others would take them for those that they wait
    for. So before values are sent, each rank says which values they are.

    Args:
        collectives: among the ranks.
        unit: the how many-th it is of the model's.
        name: the name of the module.
    """

    def __init__(self, collectives: Collectives, unit: int, name: str) -> None:
        self.collectives, self._unit, self._name = collectives, unit, name or "the whole model"

    def check(self, numel: int, *, backward: bool) -> None:
        """Raise `LocalError` on all ranks unless all are about to exchange so many values of this unit."""
        mine = [self._unit, numel, int(backward)]
        for rank, row in enumerate(self.collectives.tell(*mine)()):
            if row != mine:
                raise LocalError(
                    f"this rank {_act(backward)} {numel:,} values of unit {self._unit} ({self._name}), and rank {rank} "
                    f"{_act(row[2])} {row[1]:,} of unit {row[0]}: with stage 3 all ranks must run the same layers, in "
                    "the same order; stages 1 and 2 need not. Start anew"
                )


def _act(backward: object) -> str:
    return "reduces" if backward else "gathers"


class _Allocating:
    """New memory for messages."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class OwnReduceScatter(_Allocating, ReduceScatter):
    """Each rank's part goes to that rank only, in `dtype`, and is added up in float32."""

    def __init__(self, meeting: UnitMeeting, dtype: torch.dtype | None) -> None:
        self._meeting, self._dtype = meeting, dtype

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
        sent = input_tensor.to(self._dtype or input_tensor.dtype)
        runs = [Run(rank, part) for rank, part in enumerate(sent.chunk(group.size()))]
        mine = group.rank()
        self._meeting.collectives.reduce_scatter(
            runs, lambda _, pieces: _fill(output_tensor, sum_in_order(pieces, mine))
        ).wait()


class NarrowReduceScatter(_Allocating, ReduceScatter):
    """The backend's own, in fewer bits than each rank adds up in."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT002 (FSDP2's interface)
    ) -> None:
        found = torch.empty_like(output_tensor, dtype=self._dtype)
        dist.reduce_scatter_tensor(found, input_tensor.to(self._dtype), op, group)
        output_tensor.copy_(found)


class OwnAllGather(_Allocating, AllGather):
    """Each rank sends its part to every other one; received in place."""

    def __init__(self, meeting: UnitMeeting) -> None:
        self._meeting = meeting

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
