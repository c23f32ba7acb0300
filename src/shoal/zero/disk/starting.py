"""The first values of a model: from files, or from its modules' own functions, for parameters on the meta device.

A model that is larger than the memory of one rank is built on the meta device, where it takes none. In stage 3 one unit
after another gets values and is sharded, before the next one takes memory. Of weights in files each rank reads its own
rows only. Without files all ranks compute the same values, from the random numbers of rank 0, in the order in which
modules are made, and each keeps its rows: these are the values of a model that was built as usual from the same seed,
if all its modules draw their values in `reset_parameters`, as those of PyTorch do.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shoal.errors import ConfigError
from shoal.layout import Tile
from shoal.zero.disk.plain import fitting
from shoal.zero.disk.saved import Saved
from shoal.zero.parameters import bottom_up, hooks_of, named_parameters
from shoal.zero.ranks.watch import Agreement

__all__ = ["Start", "numbers_of_rank_0"]

_ANEW = "The model has a part of its values now: build it anew"


class Start:
    """The values that a model begins with.

    Args:
        model: not sharded yet. Its tensors on the meta device get values; with `weights` all that these have do.
        weights: for all parameters and for the buffers of `model.state_dict`; None for the modules' own first values.
        rows: the number of this rank and how many there are, if each needs its own rows of parameters only, as FSDP2
            deals them out.

    Attributes:
        device: where the model is, or will be: on the default device, if it is nowhere yet.
        at_hand: tensors that have their values already.
        computed: those that were computed here, and are whole on all ranks.

    Raises:
        ConfigError: the weights are of another model, or a module cannot compute its values. Nothing was changed.
    """

    def __init__(self, model: torch.nn.Module, weights: Saved | None, rows: tuple[int, int] | None = None) -> None:
        self._weights, self._rows = weights, rows
        self._saved: dict[int, str] = {}  # the names in the files, of tensors by their `id`
        if weights is not None:
            self._fit(model, weights)
        tensors = [*model.parameters(), *model.buffers()]
        self._metas = [each for each in tensors if each.is_meta]  # kept, so that no other tensor gets their `id`
        self.device = next((each.device for each in tensors if not each.is_meta), torch.get_default_device())
        self.at_hand = [each for each in tensors if not each.is_meta and id(each) not in self._saved]
        self.computed: list[torch.Tensor] = []
        self._unseen: list[tuple[str, torch.Tensor]] = []  # computed, and not looked at yet
        self._places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        self._labels: dict[int, str] = {}
        for prefix, module in model.named_modules():
            for name, each in _own(module):
                self._places.setdefault(id(each), []).append((module, name))
                self._labels.setdefault(id(each), f"{prefix}.{name}".lstrip("."))
        self._owners = dict(_owners(model))
        self._check(model)
        self._walk = bottom_up(model)

    def _fit(self, model: torch.nn.Module, weights: Saved) -> None:
        """Find the name in the files of each tensor."""
        named = {name: each for name, each in model.state_dict(keep_vars=True).items() if torch.is_tensor(each)}
        for name, at in fitting(weights, model, {name: each.shape for name, each in named.items()}).items():
            here, saved = named[name].dtype, weights.kinds[at].dtype
            if here != saved and not (here.is_floating_point and saved.is_floating_point):
                raise ConfigError(f"{at} in {weights.where} is {saved}, and in the model {here}: convert one of them")
            self._saved[id(named[name])] = at

    def _check(self, model: torch.nn.Module) -> None:
        for name, each in named_parameters(model):
            if each.is_meta and (hooks_of(each) or each._backward_hooks):  # noqa: SLF001 (there is no other way to ask)
                raise ConfigError(f"{name} has a hook and is on the meta device: register hooks after shard()")
        for module in bottom_up(model):
            missing = [self._labels[id(each)] for _, each in _own(module) if self._is_computed(each)]
            if missing and not self._functions(module):
                raise ConfigError(
                    f"{missing[0]} is on the meta device, and nothing gives it values: {type(module).__name__} has no "
                    "method reset_parameters(). Write one that computes the module's own parameters and buffers, give "
                    "weights that have it, or put a tensor with values in its place before shard()"
                )

    def _is_computed(self, tensor: torch.Tensor) -> bool:
        """Whether its module must compute its values."""
        return tensor.is_meta and id(tensor) not in self._saved

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """In this block `before` can be called. Raises `ConfigError` if a file is damaged."""
        return contextlib.nullcontext() if self._weights is None else self._weights.opened()

    def before(self, unit: torch.nn.Module) -> None:
        """Give values to all modules up to this one, its members first, in the order in which modules are made.

        Raises:
            ConfigError: a file is damaged, or a module did not compute all of its values.
        """
        self.at_hand.clear()  # else whole parameters would live until the last one is sharded
        if not self._metas and not self._saved:
            return
        for module in self._walk:
            self._give(module)
            if module is unit:
                break
        mine = {id(each) for each in (*unit.parameters(), *unit.buffers())}
        seen = [each for each in self._unseen if id(each[1]) in mine]
        self._unseen = [each for each in self._unseen if id(each[1]) not in mine]
        for label, tensor in seen:
            if tensor.is_floating_point() and tensor.isnan().any():
                raise ConfigError(
                    f"{label} was on the meta device, and its module did not compute its values: reset_parameters() "
                    f"must give values to all parameters and buffers of the module. {_ANEW}"
                )
            if self._rows is None or not isinstance(tensor, torch.nn.Parameter):
                self.computed.append(tensor)

    def _give(self, module: torch.nn.Module) -> None:
        """Give values to a module's own tensors, unless they have some, such as tied parameters."""
        own = [(name, each) for name, each in _own(module) if each.is_meta or id(each) in self._saved]
        tied = [(name, each) for name, each in _own(module) if not each.is_meta]
        computes = any(self._is_computed(each) for _, each in own)
        if not own and not tied:  # such as an attention whose function initializes its members
            computes = self._weights is None
        for _, each in own:
            if each.is_meta:
                self._make(each)
        with torch.no_grad():
            if computes:
                with _aside(module, tied):
                    _call(self._functions(module), module)
            for name, before in own:
                if (at := self._saved.pop(id(before), None)) is not None:
                    self._read(at, getattr(module, name))

    def _functions(self, module: torch.nn.Module) -> list[Callable[[], object]]:
        """The functions that compute the first values of its own tensors: PyTorch's, then that of its owner."""
        names = [name for name in ("reset_parameters", "_reset_parameters") if callable(getattr(module, name, None))]
        found: list[Callable[[], object]] = [getattr(module, name) for name in names[:1] if _own(module)]
        owner = self._owners[id(module)]
        return found if owner is None else [*found, partial(owner._init_weights, module)]  # noqa: SLF001 (their name)

    def _make(self, meta: torch.Tensor) -> None:
        """Put a tensor with memory in each place of one that has none."""
        made: torch.Tensor = torch.empty_like(meta, device=self.device, requires_grad=False)
        if isinstance(meta, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=meta.requires_grad)
        if self._is_computed(meta):
            if made.is_floating_point():
                made.data.fill_(torch.nan)  # to see whether it gets values
            self._unseen.append((self._labels[id(meta)], made))
        for module, name in self._places.pop(id(meta)):
            setattr(module, name, made)

    def _read(self, name: str, tensor: torch.Tensor) -> None:
        assert self._weights is not None
        values, start = tensor.detach(), 0
        if self._rows is not None and isinstance(tensor, torch.nn.Parameter) and tensor.ndim:
            rank, ranks = self._rows
            count = -(-len(values) // ranks)
            start = min(rank * count, len(values))
            values = values[start : start + count]
        row = torch.Size(self._weights.kinds[name].shape[1:]).numel()
        first = start * row
        values.copy_(self._weights.values(Tile(name, first, first + values.numel())).view(values.shape))


def _own(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own parameters and buffers."""
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _owners(module: torch.nn.Module, owner: Any = None) -> Iterator[tuple[int, Any]]:
    """Of each module, by its `id`, the model of `transformers`, say, that initializes the modules within it."""
    owner = module if _takes_module(getattr(module, "_init_weights", None)) else owner
    yield id(module), owner
    for child in module.children():
        yield from _owners(child, owner)


def _takes_module(function: object) -> bool:
    return callable(function) and len(inspect.signature(function).parameters) == 1


def _call(functions: list[Callable[[], object]], module: torch.nn.Module) -> None:
    """Compute first values. Raises `ConfigError` if that changes a unit which is sharded already."""
    sharded = [(each, each._version) for each in module.parameters() if isinstance(each, DTensor)]  # noqa: SLF001
    for function in functions:
        function()
    if any(each._version != version for each, version in sharded):  # noqa: SLF001 (counts changes)
        raise ConfigError(
            f"{type(module).__name__} computes first values of modules within it, which are sharded already: give "
            f"weights, name larger units, or use stage 1 or 2. {_ANEW}"
        )


@contextlib.contextmanager
def _aside(module: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """In this block, others are in the places of some tensors, which keep their values."""
    for name, each in tensors:
        other = torch.empty_like(each, requires_grad=False)
        setattr(module, name, torch.nn.Parameter(other) if isinstance(each, torch.nn.Parameter) else other)
    try:
        yield
    finally:
        for name, each in tensors:
            setattr(module, name, each)


@contextlib.contextmanager
def numbers_of_rank_0(agreement: Agreement, device: torch.device) -> Iterator[None]:
    """In this block all ranks draw the random numbers of rank 0; afterwards those with other ones draw their own."""
    modules: list[Any] = [torch, *([torch.get_device_module(device)] if device.type != "cpu" else [])]
    mine = [module.get_rng_state() for module in modules]
    first = agreement.gather(" ".join(each.numpy().tobytes().hex() for each in mine))[0]
    theirs = [torch.frombuffer(bytearray.fromhex(each), dtype=torch.uint8) for each in first.split()]
    for module, state in zip(modules, theirs, strict=True):
        module.set_rng_state(state)
    try:
        yield
    finally:
        for module, state, other in zip(modules, mine, theirs, strict=True):
            if not torch.equal(state, other):
                module.set_rng_state(state)
