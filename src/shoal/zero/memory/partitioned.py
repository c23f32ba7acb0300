"""Activations that are alike on all ranks of a tensor-parallel group: each rank keeps 1/N; backward gathers them.

In tensor parallelism the inputs of each layer are the same on all ranks, and with activation checkpoints they are all
that is kept. So the user names the layers: what autograd saves of the memory of an input of one of them is partitioned,
whoever saves it (a checkpoint around the layer, or a linear layer in it). All else is kept as autograd does it:
parameters, sharded tensors, small ones.

Ranks tell each other at the end of each forward pass what they have partitioned, checksums of the values included, and
at each gather which tensor they are at. If that differs, all of them raise.

Source: Rajbhandari et al., "ZeRO" (2020), section 6.1 (P_a, P_a+cpu); `torch.autograd.graph.saved_tensors_hooks`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from shoal.base.checks import flag
from shoal.errors import ConfigError, LocalError, RankLost
from shoal.zero.parameters import local
from shoal.zero.ranks.collectives import Collectives, Owned
from shoal.zero.ranks.watch import Agreement, Watch
from shoal.zero.replicas import process_group

__all__ = ["PartitionedActivations", "partition_activations"]

LEAST_BYTES = 4096
"""Smaller tensors are kept whole: a gather takes longer than they are worth."""
_numbers = itertools.count(1_000_000)
"""Of these objects, apart from those of sharded models, which may use the same group."""


class Partitioned(NamedTuple):
    """What was partitioned in a forward pass.

    Attributes:
        tensors: how many; memory that several operations have saved counts once.
        whole: their bytes.
        kept: the bytes that this rank keeps of them.
    """

    tensors: int
    whole: int
    kept: int


def partition_activations(
    modules: Iterable[torch.nn.Module], group: dist.ProcessGroup, *, offload: bool = False
) -> PartitionedActivations:
    """Let each rank of a tensor-parallel group keep 1/N of the activations that are the same on all of them.

    All ranks call it, once; each forward pass of training runs within the result::

        partitioned = shoal.zero.partition_activations(model.layers, tensor_parallel_group)
        for batch in loader:
            with partitioned:
                loss = model(batch)
            loss.backward()

    It saves most together with activation checkpoints around the same layers.

    Args:
        modules: layers whose inputs (tensors among their arguments) are the same on all ranks, to the bit.
        group: the ranks of tensor parallelism; not those that have other samples.
        offload: keep the shares on the CPU.

    Raises:
        ConfigError: an argument is wrong on any rank, or ranks give different ones: on all ranks.
        RankLost: a rank is gone.
    """
    watch = Watch(process_group(group))
    agreement = Agreement(group, watch)
    with agreement.together():
        offloads = flag("offload", offload)
        listed = list(modules) if isinstance(modules, Iterable) else []
        if not listed or not all(isinstance(each, torch.nn.Module) for each in listed):
            raise ConfigError(f"modules must be a list of at least one torch.nn.Module, got {modules!r:.200}")
        device = next((each.device for module in listed for each in module.parameters()), None)
        if device is None:
            raise ConfigError("modules have no parameters: give layers that have")
    assert device is not None
    agreement.alike(f"{len(listed)} modules, offload {offloads}", "modules and offload")
    number = int(agreement.gather(str(next(_numbers)))[0])
    return PartitionedActivations(listed, Collectives(group, watch, device, number), agreement, offload=offloads)


class PartitionedActivations:
    """A context for forward passes; see `partition_activations`. It can be used again and again.

    Leaving it raises, on all ranks, `ConfigError` if the ranks have not saved the same tensors, or one of them has
    raised (Ctrl+C included); `RankLost` if others wait for that one in a collective of the program's own. The backward
    pass raises `LocalError` on all ranks if they are not at the same tensor.

    Attributes:
        last: what was partitioned in the last forward pass.
        collectives: among the ranks; its `traffic.gathered` counts the bytes that backward passes have sent.
    """

    def __init__(
        self, modules: list[torch.nn.Module], collectives: Collectives, agreement: Agreement, *, offload: bool
    ) -> None:
        self._modules, self.collectives, self._agreement, self._offload = modules, collectives, agreement, offload
        self.last = Partitioned(0, 0, 0)
        self._alike: dict[int, StorageWeakRef] = {}  # memory of inputs, which no other memory replaces meanwhile
        self._saved: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
        self._said: list[tuple[str, torch.Tensor]] = []  # of each share: its description, and a checksum
        self._passes, self._shares = itertools.count(1), itertools.count()
        self._handles: list[RemovableHandle] = []
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> Self:
        if self._hooks is not None:
            raise LocalError("partition_activations: this context is entered already: use it once around forward")
        self.last, self._said = Partitioned(0, 0, 0), []
        # Ranks that an error has ended at different places count alike again.
        self._shares = itertools.count(next(self._passes) << 32)
        self.collectives.watch.parting.begin_block()
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks = hooks
        # The compiler cannot look into references to memory.
        hook: Any = torch.compiler.disable(self._found_alike)  # type: ignore[no-untyped-call]
        self._handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in self._modules]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(kind, error, trace)
        self._hooks = None
        for handle in self._handles:
            handle.remove()
        self._alike.clear()
        self.collectives.watch.end_block(broken=error is not None)
        if isinstance(error, RankLost):
            return
        try:
            with self._agreement.together():
                if error is not None:
                    raise error
            sums = torch.stack([each for _, each in self._said]).tolist() if self._said else []
            lines = [f"{text} {number:x}" for (text, _), number in zip(self._said, sums, strict=True)]
            self._agreement.alike("\n".join(lines), "inputs of the modules, to the bit")
        except BaseException:
            self._saved = weakref.WeakValueDictionary()  # ranks have partitioned different tensors, and may go on
            raise

    def _found_alike(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a module runs: its inputs are alike on all ranks. Checkpoints have saved some of them before."""
        for tensor in tree_iter((args, kwargs)):
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                continue
            storage = local(tensor).untyped_storage()
            key = _key(storage)
            if local(tensor).nbytes == storage.nbytes() >= LEAST_BYTES:  # else a part of it need not be alike
                self._alike[key.cdata] = key
                if (memory := self._saved.get(key.cdata)) is not None:
                    self._partition(memory)

    def _pack(self, tensor: torch.Tensor) -> _Saved | torch.Tensor:
        here = local(tensor)
        if here.layout != torch.strided:
            return tensor
        key = _key(here.untyped_storage())
        memory = self._saved.get(key.cdata)
        if memory is None or memory.version != here._version:  # noqa: SLF001 (there is no other way to ask)
            memory = self._saved[key.cdata] = _Memory(here, key)
        if key.cdata in self._alike:
            self._partition(memory)
        spec = None
        if isinstance(tensor, DTensor):
            spec = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        return _Saved(memory, here.dtype, here.shape, here.stride(), here.storage_offset(), spec)

    def _partition(self, memory: _Memory) -> None:
        """Keep this rank's part of some memory only."""
        if memory.whole is None or memory.changed:
            return
        values, ranks = memory.bytes, self.collectives.ranks
        part = -(-len(values) // ranks)
        mine = values[self.collectives.rank * part :][:part].clone()
        memory.share, memory.whole = mine.cpu() if self._offload else mine, None
        memory.number = next(self._shares)
        self.last = Partitioned(self.last.tensors + 1, self.last.whole + len(values), self.last.kept + len(mine))
        self._said.append((f"tensor {self.last.tensors} of {len(values)} bytes with checksum", _checksum(values)))

    def _unpack(self, packed: _Saved | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        memory = packed.memory
        if memory.changed:
            raise LocalError("a tensor that backward needs was changed in place after forward: change a copy of it")
        storage = self._gather(memory) if memory.whole is None else memory.whole.untyped_storage()
        made = torch.empty(0, dtype=packed.dtype, device=memory.device)
        found = made.set_(storage, packed.offset, packed.shape, packed.stride)
        if packed.spec is None:
            return found
        mesh, placements, shape, stride = packed.spec
        return DTensor.from_local(found, mesh, placements, run_check=False, shape=shape, stride=stride)

    def _gather(self, memory: _Memory) -> torch.UntypedStorage:
        """All of some memory, of which each rank has a part."""
        assert memory.share is not None
        told = self.collectives.tell(memory.number, memory.nbytes)()
        if any(each != told[0] for each in told):
            numbers = ", ".join(f"rank {rank} at number {number}" for rank, (number, _) in enumerate(told))
            raise LocalError(
                f"ranks are at different activations in the backward pass, {numbers}: all ranks must "
                "run the same forward and backward passes, in the same order. Start anew"
            )
        whole = torch.empty(memory.nbytes, dtype=torch.uint8, device=memory.device)
        shares = torch.split(whole, -(-memory.nbytes // self.collectives.ranks))
        if self.collectives.rank < len(shares):
            shares[self.collectives.rank].copy_(memory.share)
        self.collectives.all_gather([Owned(rank, share) for rank, share in enumerate(shares)]).wait()
        return whole.untyped_storage()


class _Memory:
    """Memory that autograd has saved, whole, or a rank's share of it.

    Attributes:
        key: keeps its number from being used for other memory.
        version: how often it had been changed when it was saved.
        whole: a tensor in it; None once it is partitioned.
        share: this rank's part of its bytes.
        number: of the share; the same on all ranks.
    """

    def __init__(self, tensor: torch.Tensor, key: StorageWeakRef) -> None:
        self.key, self.version, self.number = key, tensor._version, 0  # noqa: SLF001 (there is no other way to ask)
        self.whole: torch.Tensor | None = tensor.detach()
        self.share: torch.Tensor | None = None
        self.nbytes, self.device = tensor.untyped_storage().nbytes(), tensor.device

    @property
    def changed(self) -> bool:
        """Whether values were changed in place since they were saved. A share is a copy."""
        return self.whole is not None and self.whole._version != self.version  # noqa: SLF001 (as above)

    @property
    def bytes(self) -> torch.Tensor:
        """All of it."""
        assert self.whole is not None
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.whole.untyped_storage())


class _Saved(NamedTuple):
    """A tensor that autograd has saved: its place in memory; of a DTensor also mesh, placements, shape, stride."""

    memory: _Memory
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any
    spec: tuple[Any, ...] | None


def _key(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Its `cdata` is a number that no other storage has as long as this object lives."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """The sum of some bytes' words of 64 bits."""
    rest = len(values) % 8
    return values[: len(values) - rest].view(torch.int64).sum() + values[len(values) - rest :].sum()
