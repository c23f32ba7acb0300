"""FSDP2's messages on processors: each rank's part goes to that rank only, and the name of its unit goes beside it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shoal.errors import LocalError
from shoal.zero.memory.mapped import let_go
from shoal.zero.ranks.collectives import Collectives, Owned, Pending, sum_in_order
from shoal.zero.ranks.watch import Watch

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
else:
    AllGather = ReduceScatter = object  # older versions of torch have none; stages 1 and 2 do without

__all__ = ["NarrowReduceScatter", "OwnAllGather", "OwnReduceScatter", "UnitMeeting"]


class UnitMeeting:
    """The messages of one unit, and the check that all ranks are at it.

    A rank that has skipped a layer exchanges the next one's parameters: others would take them for those that they wait
    for. So each rank says beside its values which values they are. The values have a tag of their own for each unit, so
    that they meet no others on their way; gloo ends the process where a message is larger or smaller than expected.

    Args:
        collectives: among the ranks.
        unit: the how many-th it is of the model's.
        name: the name of the module.

    Attributes:
        mapped: the unit's shards that are in files.
    """

    def __init__(self, collectives: Collectives, unit: int, name: str) -> None:
        self.collectives, self._unit, self._name = collectives, unit, name or "the whole model"
        self.mapped: list[torch.Tensor] = []

    def tell(self, numel: int, *, backward: bool) -> tuple[int, Callable[[], None]]:
        """Tell all ranks that this one exchanges so many values of this unit now.

        Returns:
            The tag of the values; and a function that waits for the word of all ranks. It raises `LocalError`, on all
            of them, unless all have said the same.
        """
        mine = [self._unit, numel, int(backward)]
        hear = self.collectives.tell(*mine)

        def check() -> None:
            for rank, row in enumerate(hear()):
                if row != mine:
                    raise LocalError(
                        f"this rank {_act(backward)} {numel:,} values of unit {self._unit} ({self._name}), and rank "
                        f"{rank} {_act(row[2])} {row[1]:,} of unit {row[0]}: with stage 3 all ranks must run the same "
                        "layers, in the same order; stages 1 and 2 need not. Start anew"
                    )

        return _UNIT_TAG | zlib.crc32(repr((self.collectives.model, *mine)).encode()) >> 2, check


_UNIT_TAG = 1 << 30
"""Tags of units are above those of models."""


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
        tag, check = self._meeting.tell(input_tensor.numel(), backward=True)
        sent = input_tensor.to(self._dtype or input_tensor.dtype)
        owned = [Owned(rank, values) for rank, values in enumerate(sent.chunk(group.size()))]
        mine = group.rank()
        self._meeting.collectives.reduce_scatter(
            owned, lambda _, found: _fill(output_tensor, sum_in_order(found, mine)), check, tag
        ).wait()


class NarrowReduceScatter(_Allocating, ReduceScatter):
    """The backend's own, in fewer bits than each rank adds up in."""

    def __init__(self, watch: Watch, dtype: torch.dtype) -> None:
        self._watch, self._dtype = watch, dtype

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT002 (FSDP2's interface)
    ) -> None:
        found = torch.empty_like(output_tensor, dtype=self._dtype)
        with self._watch.named(self._watch.turn(f"a reduce-scatter of {input_tensor.numel():,} values")):
            dist.reduce_scatter_tensor(found, input_tensor.to(self._dtype), op, group)
        output_tensor.copy_(found)


class OwnAllGather(_Allocating, AllGather):
    """Each rank sends its part to every other one; received in place, while the caller goes on."""

    def __init__(self, meeting: UnitMeeting) -> None:
        self._meeting = meeting

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT002 (FSDP2's interface)
    ) -> dist.Work:
        tag, check = self._meeting.tell(output_tensor.numel(), backward=False)
        owned = [Owned(rank, values) for rank, values in enumerate(output_tensor.chunk(group.size()))]
        mine = owned[group.rank()].data
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        let_go(self._meeting.mapped)  # they were read into `input_tensor`
        return _Gathering(self._meeting.collectives.all_gather(owned, check, tag))


class _Gathering(dist.Work):
    """A gather on its way: FSDP2 waits for it when the unit is about to run."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all parts are here. The group's own timeout counts."""
        self._pending.wait()
        return True


def _fill(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values)
