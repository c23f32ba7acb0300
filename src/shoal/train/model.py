"""The model itself, as far as a run knows it: names of the optimizer's tensors, and the tensors that are not trained.

A run shares the tensors of its optimizer. If the rest of the model differs (another base under LoRA), or two layers of
equal shapes stand in another order, nothing would tell. With the model at hand its names and its frozen tensors are
among the settings that all peers compare before they train together.

Several optimizers may train parts of one model, each in a run of its own. What another one trains is no base: it is in
no settings, and may move. So a parameter that requires a gradient is never compared; that nobody trains it is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from blake3 import blake3
from torch.nn import DataParallel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.hooks import RemovableHandle

from shoal.base.models import limited_embeddings
from shoal.base.names import learn
from shoal.compression import view_bytes
from shoal.errors import ConfigError

__all__ = ["TrainedModel", "learn_names"]


class TrainedModel:
    """The model around the tensors of a run.

    Args:
        model: of the user.
        parameters: those of the optimizer, in its order.
        extra_tensors: part of the state beside them.
        steps_alone: whether each peer steps on its own batches, so that weights differ until the next merge.
        elsewhere: tensors that other runs of this program share.

    Raises:
        ConfigError: the optimizer has nothing of it; a tensor has no values yet; or forward changes a trained weight.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[torch.Tensor],
        extra_tensors: Sequence[torch.Tensor],
        *,
        steps_alone: bool = False,
        elsewhere: Iterable[torch.Tensor] = (),
    ) -> None:
        self._model = model = learn_names(model)
        self._plain = _plain_names(model)
        shared = {id(each) for each in (*parameters, *extra_tensors)}
        places = list(_places(model))
        names = {id(each.tensor): self._plain(each.name) for each in places}
        if not any(id(each) in names for each in parameters):
            raise ConfigError("model has none of the parameters of the optimizer: give the model that it trains")
        self._names = [names.get(id(each), "-") for each in parameters]
        self._places = [each for each in places if id(each.tensor) in shared]
        moving = {id(tensor) for _, tensor in _statistics(model)}
        self._elsewhere = set[int]()
        self.shared_elsewhere(elsewhere)
        own = shared | moving | self._elsewhere
        self._still = {each.name: each for each in places if id(each.tensor) not in own}
        self._frozen = [name for name, each in self._still.items() if not each.tensor.requires_grad]
        self._digests = {name: _digest(each.tensor, name) for name, each in self._still.items()}
        self._marks = {name: _mark(each.tensor) for name, each in self._still.items()}
        self._tree = _tree_of(model)
        self._loaded, self._hooks = False, list[RemovableHandle]()
        if not steps_alone:
            self._check_forward()
        elif not isinstance(model, torch.jit.ScriptModule):
            loaded, modules = _AfterLoading(weakref.ref(self)), {id(each.module): each.module for each in self._places}
            for each in modules.values():
                self._hooks.append(each.register_load_state_dict_post_hook(loaded))  # type: ignore[no-untyped-call]
        self._shared, self._all = shared, {id(each.tensor) for each in places}

    def was_loaded(self) -> bool:
        """Whether weights were loaded into the model since this was asked last, where each peer steps alone."""
        loaded, self._loaded = self._loaded, False
        return loaded

    def note_load(self) -> None:
        """Weights were loaded into the model."""
        self._loaded = True

    def close(self) -> None:
        """Look at the model no more."""
        for hook in self._hooks:
            hook.remove()

    def shared_elsewhere(self, tensors: Iterable[torch.Tensor]) -> None:
        """Another run of this program shares these tensors: they may move here."""
        self._elsewhere.update(map(id, tensors))

    @property
    def unshared_statistics(self) -> list[str]:
        """Running statistics of normalization that no run shares: each peer has its own.

        Vectors of power iterations (spectral norm) are none: each peer finds them by itself, for the same weights.
        """
        shared = self._shared | self._elsewhere
        found = _running(self._model)
        return [name for name, tensor in found if tensor.dtype.is_floating_point and id(tensor) not in shared]

    @property
    def untrained(self) -> list[str]:
        """Parameters that require a gradient, and that no run trains: peers do not compare them."""
        names = (name for name in self._still if name not in self._frozen)
        return [name for name in names if id(self._still[name].tensor) not in self._elsewhere]

    def settings(self) -> dict[str, str]:
        """The settings that all peers compare: names of the trained tensors, and bytes of those that are not."""
        names = blake3("\n".join(self._names).encode()).hexdigest()[:8]
        both = blake3()
        for name in self._frozen:
            each = self._still[name]
            both.update(f"{self._plain(name)} {each.tensor.dtype} {_shape(each.tensor)}\n".encode())
            both.update(self._digests[name])
        frozen = list(map(self._plain, self._frozen))
        elements = sum(self._still[name].tensor.numel() for name in self._frozen)
        which = f"{len(frozen)} from {frozen[0]} to {frozen[-1]}" if frozen else ""
        return {
            "parameter names": f"{len(self._names)} from {self._names[0]} to {self._names[-1]}, {names}",
            "frozen tensors": f"{which}, {elements} elements, {both.hexdigest()[:16]}" if frozen else "none",
        }

    def to_save(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint has names for: those of the run, and buffers; no other frozen parameters."""
        ours = {id(each.tensor) for each in self._places}
        return {
            self._plain(name): tensor
            for name, tensor in self._model.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor) and (id(tensor) in ours or not isinstance(tensor, torch.nn.Parameter))
        }

    def restore_statistics(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over the statistics of normalization, which may be this peer's own."""
        with torch.no_grad():
            for name, tensor in _statistics(self._model):
                if (theirs := saved.get(self._plain(name))) is not None and theirs.shape == tensor.shape:
                    tensor.copy_(theirs)

    def _check_forward(self) -> None:
        """Raise `ConfigError` if a forward pass changes a trained weight: only this peer would have it so."""
        ours = {id(each.tensor) for each in self._places}
        for name, weight in limited_embeddings(self._model):
            if id(weight) in ours:
                raise ConfigError(
                    f"{name} of the model has max_norm, by which forward changes its weight on this peer alone: "
                    "set max_norm=None, and limit the norms of what the layer returns, or of its rows within the "
                    "optimizer's step"
                )

    def check(self) -> None:
        """Raise `ConfigError` if a tensor of the run is not the model's any more, or one came later."""
        if not all(map(_is_as_it_was, self._tree)):
            self._look_at_tree()
        for each in self._places:
            if getattr(each.module, each.key, None) is not each.tensor:
                if isinstance(each.tensor, torch.nn.Parameter):
                    raise ConfigError(
                        f"parameter {each.name} of the model was replaced, and the optimizer trains the one before: "
                        "load weights without assign=True, or make a new shoal.Optimizer"
                    )
                raise ConfigError(
                    f"buffer {each.name} of the model was replaced, and extra_tensors has the one before: write into "
                    "it (copy_), and move the model to its device before the shoal.Optimizer is made"
                )

    def _look_at_tree(self) -> None:
        """Layers, or names of tensors in them, are others than before."""
        here = {id(each.tensor): each for each in _places(self._model)}
        layers, known = set(self._model.modules()), {each.module: each for each in self._tree}
        for module, was in known.items():
            if module in layers:
                self._check_buffers(module, was)
        for each in self._places:
            if id(each.tensor) not in here and each.module not in layers:
                raise ConfigError(
                    f"the layer of {each.name} was replaced in the model, and the optimizer trains the one before: "
                    "make a new shoal.Optimizer of the model as it is now, or put the new weights into that layer"
                )
        for number, each in here.items():
            if number not in self._all | self._elsewhere and each.tensor.requires_grad:
                raise ConfigError(
                    f"{each.name} came into the model after the optimizer was made, so it is neither trained nor "
                    "shared: make a new shoal.Optimizer of the model as it is now"
                )
        self._places = [here.get(id(each.tensor), each) for each in self._places]  # some may have another name now
        self._tree = _tree_of(self._model)

    def _check_buffers(self, module: torch.nn.Module, was: _Layer) -> None:
        """Raise `ConfigError` if a layer has other buffers than before. Those that are not saved may come: caches."""
        for key in sorted(was.buffers ^ _saved_buffers(module)):
            name = f"{next(name for name, each in self._model.named_modules() if each is module)}.{key}".strip(".")
            came = "went out of" if key in was.buffers else "came into"
            raise ConfigError(
                f"buffer {name} {came} the model after the optimizer was made, and other peers may have another, or "
                "none: prune (a mask is a buffer) before, with equal masks on all peers, or make a new shoal.Optimizer "
                "of the model as it is now on all of them"
            )

    def changes(self) -> Iterator[str]:
        """The tensors that are not trained, and have other values than at first. Each is told once.

        Values are looked at only where torch has counted a change, or the memory is another: a change through `.data`
        goes unseen.
        """
        for name, before in list(self._marks.items()):
            place = self._still[name]
            tensor = getattr(place.module, place.key, None)  # a model that is moved gets new buffers
            if id(tensor) in self._elsewhere:
                continue
            if not isinstance(tensor, torch.Tensor) or (mark := _mark(tensor)) == before:
                continue
            self._marks[name] = mark
            if _digest(tensor, name) != self._digests[name]:
                del self._marks[name]
                yield name


def learn_names(model: torch.nn.Module) -> torch.nn.Module:
    """Let whatever is said of a tensor of the model name it as the model does.

    Returns:
        The model itself, if another one is around it.

    Raises:
        ConfigError: it is no model.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    while isinstance(model, DataParallel | DistributedDataParallel):
        model = model.module
    plain = _plain_names(model)
    learn(model, ((plain(each.name), each.tensor) for each in _places(model)))
    return model


class _AfterLoading:
    """A hook of the model. In a copy of the model, also one that was pickled, it does nothing."""

    def __init__(self, of: Callable[[], TrainedModel | None] = lambda: None) -> None:
        self._of = of

    def __call__(self, module: torch.nn.Module, keys: object) -> None:
        if (model := self._of()) is not None:
            model.note_load()

    def __reduce__(self) -> tuple[type[_AfterLoading], tuple[()]]:
        return type(self), ()


class _Place(NamedTuple):
    """Where a tensor is in a model."""

    module: torch.nn.Module
    key: str
    name: str
    tensor: torch.Tensor


def _places(model: torch.nn.Module) -> Iterator[_Place]:
    """All parameters, then all buffers; each once."""
    for kind in (torch.nn.Module.named_parameters, torch.nn.Module.named_buffers):
        seen = set[int]()
        for prefix, module in model.named_modules():
            for key, tensor in kind(module, recurse=False):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _Place(module, key, f"{prefix}.{key}".strip("."), tensor)


class _Layer(NamedTuple):
    """A module, with what it had."""

    module: torch.nn.Module
    children: dict[str, torch.nn.Module | None]
    parameters: frozenset[str]
    buffers: frozenset[str]


def _tree_of(model: torch.nn.Module) -> list[_Layer]:
    """Each module, with its children, and the names of its tensors."""
    return [
        _Layer(module, dict(module._modules), frozenset(module._parameters), _saved_buffers(module))  # noqa: SLF001
        for module in model.modules()
    ]


def _saved_buffers(module: torch.nn.Module) -> frozenset[str]:
    return frozenset(module._buffers.keys() - module._non_persistent_buffers_set)  # noqa: SLF001 (as `named_buffers`)


def _is_as_it_was(layer: _Layer) -> bool:
    module, children, parameters, buffers = layer
    return (
        module._modules == children  # noqa: SLF001 (as `named_children`; no copy of all names)
        and module._parameters.keys() == parameters  # noqa: SLF001
        and (not (buffers or module._buffers) or _saved_buffers(module) == buffers)  # noqa: SLF001
    )


_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
}
"""Modules around another one that other peers may do without (`torch.compile`, activation checkpoints), and their
attribute for it. By name: to import all of them takes a second."""


def _plain_names(model: torch.nn.Module) -> Callable[[str], str]:
    """A function that gives the name of a tensor without the wrappers that are around modules of this model."""
    within = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module).__module__.startswith("torch.") and (attribute := _WRAPPERS.get(type(module).__name__)):
            within.add(f"{name}.{attribute}".strip("."))

    def plain(name: str) -> str:
        parts = name.split(".")
        return ".".join(part for place, part in enumerate(parts) if ".".join(parts[: place + 1]) not in within)

    return plain


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    where = tensor.data_ptr() if _is_plain(tensor) else id(tensor)
    return (0 if tensor.is_inference() else tensor._version), where  # noqa: SLF001 (asks no device)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not hasattr(tensor, "__tensor_flatten__")


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | str:
    return "nested" if tensor.is_nested else tuple(tensor.shape)


def _digest(tensor: torch.Tensor, name: str) -> bytes:
    if tensor.is_meta:
        raise ConfigError(f"{name} of the model has no values yet (it is on the meta device): load its weights before")
    digest = blake3()
    for part in _dense_parts(tensor.detach()):
        digest.update(view_bytes(part.to("cpu").contiguous()))
    return bytes(digest.digest(16))


def _dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The ordinary tensors that a tensor of any sort consists of."""
    if hasattr(tensor, "__tensor_flatten__"):  # quantized ones of torchao, jagged ones
        for name in tensor.__tensor_flatten__()[0]:
            yield from _dense_parts(getattr(tensor, name))
    elif tensor.is_nested:
        yield from tensor.unbind()
    elif tensor.layout is torch.sparse_coo:
        coalesced = tensor.coalesce()
        yield from (coalesced.indices(), coalesced.values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout is not torch.strided:
        yield tensor.to_dense()
    else:
        yield tensor.dequantize() if tensor.is_quantized else tensor


def _statistics(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a forward pass in train mode moves: of normalization, and of power iterations."""
    yield from _running(model)
    for prefix, module in model.named_modules():
        hooks = [each for each in module._forward_pre_hooks.values() if isinstance(each, SpectralNorm)]  # noqa: SLF001
        iterated = {f"{hook.name}_{vector}" for hook in hooks for vector in "uv"}
        if type(module).__name__ == "_SpectralNorm":
            iterated = {"_u", "_v"}
        for key, tensor in module.named_buffers(recurse=False):
            if key in iterated:
                yield f"{prefix}.{key}".strip("."), tensor


def _running(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of layers that normalize by running statistics."""
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase):
            for key, tensor in module.named_buffers(recurse=False):
                yield f"{prefix}.{key}".strip("."), tensor
