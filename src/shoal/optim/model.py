"""The model itself, as far as a run knows it: names of the optimizer's tensors, and the tensors that are not trained.

A run shares the tensors of its optimizer. If the rest of the model differs (another base under LoRA), or two layers of
equal shapes stand in another order, nothing would tell. With the model at hand its names and its frozen tensors are
among the settings that all peers compare before they train together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from blake3 import blake3
from torch.nn import DataParallel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from shoal.compression import view_bytes
from shoal.errors import ConfigError

__all__ = ["TrainedModel"]


class TrainedModel:
    """The model around the tensors of a run.

    Args:
        model: of the user.
        parameters: those of the optimizer, in its order.
        extra_tensors: part of the state beside them.

    Raises:
        ConfigError: the optimizer has nothing of it.
    """

    def __init__(
        self, model: torch.nn.Module, parameters: Sequence[torch.Tensor], extra_tensors: Sequence[torch.Tensor]
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        while isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        self._model = model
        shared = {id(each) for each in (*parameters, *extra_tensors)}
        names = {id(parameter): _plain(name) for name, parameter in model.named_parameters()}
        if not any(id(each) in names for each in parameters):
            raise ConfigError("model has none of the parameters of the optimizer: give the model that it trains")
        self._names = [names.get(id(each), "-") for each in parameters]
        self._frozen = {name: tensor for name, tensor in _fixed_tensors(model) if id(tensor) not in shared}
        self._digests = {name: _digest(tensor) for name, tensor in self._frozen.items()}
        self._marks = {name: _mark(tensor) for name, tensor in self._frozen.items()}
        self._places = [
            (module, key, f"{prefix}.{key}".strip("."), parameter)
            for prefix, module in model.named_modules()
            for key, parameter in module.named_parameters(recurse=False)
            if id(parameter) in shared
        ]
        self.unshared_statistics = [
            name for name, tensor in _statistics(model) if tensor.dtype.is_floating_point and id(tensor) not in shared
        ]
        """Running statistics of normalization that are no extra tensors: each peer has its own."""

    def settings(self) -> dict[str, str]:
        """The settings that all peers compare: names of the trained tensors, and bytes of those that are not."""
        names = blake3("\n".join(self._names).encode()).hexdigest()[:8]
        both = blake3()
        for name, tensor in self._frozen.items():
            both.update(f"{_plain(name)} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            both.update(self._digests[name])
        frozen, elements = list(map(_plain, self._frozen)), sum(tensor.numel() for tensor in self._frozen.values())
        which = f"{len(frozen)} from {frozen[0]} to {frozen[-1]}" if frozen else ""
        return {
            "parameter names": f"{len(self._names)} from {self._names[0]} to {self._names[-1]}, {names}",
            "frozen tensors": f"{which}, {elements} elements, {both.hexdigest()[:16]}" if frozen else "none",
        }

    def to_save(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint has names for: those of the run, and buffers; no other frozen parameters."""
        ours = {id(parameter) for *_, parameter in self._places}
        return {
            _plain(name): tensor
            for name, tensor in self._model.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor) and (id(tensor) in ours or not isinstance(tensor, torch.nn.Parameter))
        }

    def restore_statistics(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over the statistics of normalization, which may be this peer's own."""
        with torch.no_grad():
            for name, tensor in _statistics(self._model):
                if (theirs := saved.get(_plain(name))) is not None and theirs.shape == tensor.shape:
                    tensor.copy_(theirs)

    def check(self) -> None:
        """Raise `ConfigError` if a tensor that is trained is not the model's any more."""
        for module, key, name, held in self._places:
            if getattr(module, key, None) is not held:
                raise ConfigError(
                    f"parameter {name} of the model was replaced, and the optimizer trains the one before: load "
                    "weights without assign=True, or make a new shoal.Optimizer"
                )

    def find_change(self) -> str | None:
        """A tensor that is not trained, and has other values than at first; None if there is none. Each is told once.

        Values are looked at only where torch has counted a change, or the memory is another: a change through `.data`
        goes unseen.
        """
        for name, before in self._marks.items():
            if (mark := _mark(self._frozen[name])) == before:
                continue
            self._marks[name] = mark
            if _digest(self._frozen[name]) != self._digests[name]:
                del self._marks[name]
                return name
        return None


def _plain(name: str) -> str:
    """The name without what `torch.compile` puts before it: other peers may do without."""
    return name.replace("_orig_mod.", "")


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    return (0 if tensor.is_inference() else tensor._version), tensor.data_ptr()  # noqa: SLF001 (asks no device)


def _digest(tensor: torch.Tensor) -> bytes:
    return blake3(view_bytes(tensor.detach().to("cpu").contiguous())).digest(16)


def _statistics(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase):
            for key, tensor in module.named_buffers(recurse=False):
                yield f"{prefix}.{key}".strip("."), tensor


def _fixed_tensors(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters and buffers, but for the statistics of normalization, which move."""
    moving = {id(tensor) for _, tensor in _statistics(model)}
    yield from model.named_parameters()
    yield from ((name, tensor) for name, tensor in model.named_buffers() if id(tensor) not in moving)
