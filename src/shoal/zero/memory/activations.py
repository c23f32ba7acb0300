"""The tensors that autograd keeps for the backward pass: how many bytes they are, and how to keep them on disk.

Source: `torch.autograd.graph.saved_tensors_hooks`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from shoal.base.checks import path
from shoal.errors import ConfigError
from shoal.zero.memory.mapped import Extent, fetch, let_go

__all__ = ["save_on_disk", "saved_bytes"]


def saved_bytes(model: torch.nn.Module, sample: object) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward pass, each storage counted once.

    Parameters and buffers do not count. Nothing is computed: the pass runs on tensors without values.

    Args:
        model: not sharded; on any device, in training mode or not.
        sample: a tensor, a tuple or list of arguments, or a mapping of named ones; tensors on any device.

    Raises:
        ConfigError: the pass raises, or depends on values.
    """
    device = next(model.parameters()).device
    mode = FakeTensorMode()
    found: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no other storage gets its number

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage  # noqa: SLF001 (there is no other identity of a storage without memory)
        return tensor

    own: dict[str, torch.Tensor] = {}
    args: tuple[Any, ...] = tuple(sample) if isinstance(sample, tuple | list) else (sample,)
    args, kwargs = ((), dict(sample)) if isinstance(sample, Mapping) else (args, {})
    try:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            own[name] = mode.from_tensor(tensor)
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: mode.from_tensor(tensor).to(device), (args, kwargs))
        with mode, torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(model, own, args, kwargs)
    except Exception as error:
        raise ConfigError(
            f"sample cannot be followed through the model without computing: {type(error).__name__}: {error}"
        ) from error
    for tensor in own.values():
        found.pop(tensor.untyped_storage()._cdata, None)  # noqa: SLF001 (as above)
    return sum(storage.nbytes() for storage in found.values())


def save_on_disk(folder: str | os.PathLike[str]) -> saved_tensors_hooks:
    """A context in which tensors that are saved for the backward pass are kept in files, as `save_on_cpu` keeps them.

    Files are mapped into memory, and have no name: they vanish with the tensors. Around layers with activation
    checkpoints these are the inputs of layers; otherwise views of weights are among them.

    Args:
        folder: where, on a disk rather than in a file system that is memory.

    Raises:
        ConfigError: this is no folder. An `OSError` in the forward pass says that the disk is full.
    """
    place = path("folder", folder)
    if not place.is_dir():
        raise ConfigError(f"folder must be a folder that exists, got {os.fspath(folder)!r}")

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        if tensor.layout != torch.strided or not tensor.numel():
            return tensor.device, tensor
        mapped = Extent(place, tensor.nbytes).take(tensor)
        assert mapped is not None
        # The same strides: other ones may be computed with in another order, and rounded otherwise.
        strides = torch.empty_like(tensor, device="meta").stride()
        kept = mapped.as_strided(tensor.shape, strides).copy_(tensor)
        let_go([kept])
        return tensor.device, kept

    def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, kept = packed
        if kept.layout == torch.strided:
            fetch([kept], written=False)
        return kept.to(device)

    return saved_tensors_hooks(pack, unpack)
