"""Hybrid sharding: groups of ranks share out one copy of everything, and the groups are replicas of each other.

Gradients are reduced within a group as without replicas. Before they are clipped or stepped, the ranks that own the
same values in the groups take the mean of these means, added up in the order of the groups: once in a step, however
many micro-batches it has. Then all replicas step alike.

Source: Zhao et al., "PyTorch FSDP" (2023), section 3.2.2 (hybrid sharding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal.errors import ConfigError, LocalError
from shoal.zero.parameters import local
from shoal.zero.ranks.buckets import BUCKET_BYTES
from shoal.zero.ranks.collectives import Collectives, Owned, sum_in_order

__all__ = ["Groups", "Replicas", "groups_of", "process_group"]


class Groups(NamedTuple):
    """The process groups of one rank.

    Attributes:
        everyone: all ranks that train the model.
        shards: those that share out one copy; the same as `everyone` without replicas.
        replicas: those that keep the same share, each in another group; None if there is one copy.
    """

    everyone: dist.ProcessGroup
    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None = None


def process_group(given: object) -> dist.ProcessGroup:
    """The process group that a user gave. Raises `ConfigError` if it is none, or there is none."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "there is no process group: start with torchrun, and call torch.distributed.init_process_group() first"
        )
    if not isinstance(given, dist.ProcessGroup):
        raise ConfigError(f"group must be a process group that this process belongs to, got {given!r}")
    return given


def groups_of(everyone: dist.ProcessGroup, mesh: object) -> Groups:
    """The groups of this rank in the mesh that `shard` was given. Raises `ConfigError`."""
    if mesh is None:
        return Groups(everyone, everyone)
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        raise ConfigError(
            "mesh must be a DeviceMesh of two dimensions, replicas and the ranks of each, such as init_device_mesh("
            f'"cpu", (2, 4), mesh_dim_names=("replicate", "shard")), got {mesh!r}: without replicas give a group'
        )
    members = dist.get_process_group_ranks(everyone)
    if sorted(mesh.mesh.flatten().tolist()) != sorted(members):
        raise ConfigError(f"mesh must hold the ranks of group, {members}, got {mesh.mesh.tolist()}")
    return Groups(everyone, mesh.get_group(1), mesh.get_group(0))


class Replicas:
    """The ranks that keep the same share as this one.

    Args:
        group: they.
        shards: the collectives of this rank's group.
        let_go: called with gradients that are not needed in memory for now.

    Attributes:
        collectives: those among them.
    """

    def __init__(
        self, group: dist.ProcessGroup, shards: Collectives, let_go: Callable[[Iterable[torch.Tensor]], None]
    ) -> None:
        self._let_go = let_go
        self.collectives = Collectives(group, shards.watch, shards.device, shards.model, shards.everyone)
        self._settled: object = None  # the gradients that are the mean over replicas already

    def settle(self, gradients: Iterable[torch.Tensor], passes: Mapping[str, int]) -> None:
        """Replace gradients by their mean over the replicas, unless that was done, and they are the same since.

        Args:
            gradients: the same on all replicas but for the values.
            passes: how often each parameter's was reduced since it was cleared.

        Raises:
            LocalError: another replica has others.
        """
        found = [local(each) for each in gradients]
        if self._settled == _state(found, passes):
            return
        self._meet(sum(each.numel() for each in found))
        batch: list[torch.Tensor] = []
        for each in found:
            if batch and (
                each.dtype != batch[0].dtype or sum(one.nbytes for one in batch) + each.nbytes > BUCKET_BYTES
            ):
                self._average(batch)
                batch = []
            batch.append(each)
        if batch:
            self._average(batch)
        self.seal(found, passes)

    def seal(self, gradients: Iterable[torch.Tensor], passes: Mapping[str, int]) -> None:
        """Gradients are as they are to be stepped: the same on all replicas."""
        self._settled = _state([local(each) for each in gradients], passes)

    def _meet(self, numel: int) -> None:
        for rank, (other,) in enumerate(self.collectives.tell(numel)()):
            if other != numel:
                raise LocalError(
                    f"this rank has gradients of {numel:,} values for replicas, and replica {rank} of {other:,}: all "
                    "ranks must run the same layers and clear the same gradients"
                )

    def _average(self, batch: Sequence[torch.Tensor]) -> None:
        ranks, rank = self.collectives.ranks, self.collectives.rank
        whole = torch.cat([each.reshape(-1) for each in batch])
        owned = [Owned(owner, values) for owner, values in enumerate(whole.tensor_split(ranks)) if values.numel()]

        def finish(index: int, contributions: Sequence[torch.Tensor]) -> None:
            owned[index].data.copy_(sum_in_order(contributions, rank).div_(ranks))

        self.collectives.reduce_scatter(owned, finish).wait()
        self.collectives.all_gather(owned).wait()
        parts = torch.split(whole, [each.numel() for each in batch])
        for each, part in zip(batch, parts, strict=True):
            each.copy_(part.view_as(each))
        self._let_go(batch)


def _state(gradients: Sequence[torch.Tensor], passes: Mapping[str, int]) -> object:
    """Another one whenever any gradient is replaced or written to."""
    held = [each for each in gradients if each.numel()]
    return dict(passes), [(each.data_ptr(), each._version) for each in held]  # noqa: SLF001 (counts changes)
