"""What ranks do in the tests of models that begin on the meta device."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import shoal.zero
from shoal.errors import ConfigError
from shoal.layout import Tile
from shoal.zero.disk.saved import Saved
from shoal.zero.parameters import local
from tests.integration import zero_cases as cases


class Scale(torch.nn.Module):
    """One parameter of its own, and a buffer that no state dictionary has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(1))
        self.angles: torch.Tensor
        self.register_buffer("angles", torch.empty(11), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Values, as PyTorch's modules compute them."""
        torch.nn.init.ones_(self.scale)
        with torch.no_grad():
            self.angles.copy_(1.0 / (1 + torch.arange(11)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scaled and shifted."""
        return hidden * self.scale + self.angles.to(hidden.dtype)


class Large(torch.nn.Module):
    """Odd shapes, a tied head with a bias, attention, batch norm, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(37, 11)
        self.layers: Any = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "mix": torch.nn.MultiheadAttention(11, 1, batch_first=True),
                    "grow": torch.nn.Sequential(torch.nn.Linear(11, 23), torch.nn.GELU(), torch.nn.Linear(23, 11)),
                }
            )
            for _ in range(2)
        )
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.frozen = torch.nn.Linear(11, 11).requires_grad_(requires_grad=False)
        self.norm = torch.nn.BatchNorm1d(11)
        self.scale = Scale()
        self.head = torch.nn.Linear(11, 37)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch, 37)."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer["grow"](layer["mix"](hidden, hidden, hidden)[0])
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.scale(self.norm(self.frozen(hidden))))
        return logits


class Block(torch.nn.Module):
    """A unit of stage 3 that holds an attention, whose first values are its own function's."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.MultiheadAttention(11, 1, batch_first=True)
        self.out = torch.nn.Linear(11, 11)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        found: torch.Tensor = hidden + self.out(self.mix(hidden, hidden, hidden)[0])
        return found


def built(seed: int, *, meta: bool = False, kind: type[torch.nn.Module] = Large) -> torch.nn.Module:
    """The model, from a seed."""
    torch.manual_seed(seed)
    if meta:
        with torch.device("meta"):
            return kind()
    return kind()


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A factory for `shard`."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a model, also those that no state dictionary has."""
    return {**shoal.zero.full_state_dict(model), **{name: each.clone() for name, each in model.named_buffers()}}


def started(
    stage: int, meta: bool, source: str | None = None, given: Any = None, dtype: torch.dtype | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """The first values, those after three steps, and how many bytes of weights were read.

    Args:
        stage: for `shard`.
        meta: begin on the meta device; else as usual.
        source: weights in files.
        given: a state dictionary to load before `shard`.
        dtype: for `shard`; the model is `Odd` if it is given.
    """
    model = built(5 if dist.get_rank() == 0 else 6, meta=meta, kind=Large if dtype is None else cases.Odd)
    if given is not None:
        model.load_state_dict(given)
    counted = [0]
    Saved.values = _counting(counted)  # type: ignore[method-assign]
    model, optimizer = shoal.zero.shard(model, adamw, stage=stage, weights=source, dtype=dtype)
    assert not any(each.is_meta for each in [*model.parameters(), *model.buffers()])
    first = state_of(model)
    cases.train(optimizer, model, steps=3)
    return first, state_of(model), counted[0]


def _counting(counted: list[int]) -> Any:
    def count(self: Saved, wanted: Tile) -> torch.Tensor:
        counted[0] += wanted.numel * self.kinds[wanted.name].dtype.itemsize
        return _VALUES(self, wanted)

    return count


_VALUES = Saved.values


def saved(stage: int, path: str) -> dict[str, torch.Tensor]:
    """Write a checkpoint of a trained model; returns its weights, and its buffers on rank 0."""
    model, optimizer = shoal.zero.shard(built(7), adamw, stage=stage)
    cases.train(optimizer, model, steps=2)
    shoal.zero.save(path, model, optimizer)
    return shoal.zero.full_state_dict(model)


def refused(stage: int, path: str, second: str) -> str:
    """The message of `shard`, which leaves the model as it was; on rank 1 with the second path."""
    model = built(5, meta=True)
    before = dict(model.named_parameters())
    try:
        shoal.zero.shard(model, adamw, stage=stage, weights=second if dist.get_rank() == 1 else path)
    except ConfigError as error:
        assert all(each is before[name] and each.is_meta for name, each in model.named_parameters())
        return str(error)
    return "it was taken"


class Bare(torch.nn.Module):
    """Something of its own, without `reset_parameters`."""

    def __init__(self, *, buffer: bool = False) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        if buffer:
            self.register_buffer("inv_freq", torch.ones(3), persistent=False)
        else:
            self.scale = torch.nn.Parameter(torch.ones(3))


class Leaving(Bare):
    """Its function leaves something out."""

    def reset_parameters(self) -> None:
        """Nothing at all."""


class Spanning(torch.nn.Module):
    """Its function initializes all that is within it, as models of `transformers` may."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))

    def _init_weights(self, module: torch.nn.Module) -> None:
        if module is self:
            for each in module.parameters():
                each.zero_()


WITHOUT = {
    "buffer": r"inv_freq is on the meta device, and nothing gives it values: Bare has no method reset_parameters\(\)",
    "parameter": "scale is on the meta device, and nothing gives it values",
    "leaves": "scale was on the meta device, and its module did not compute its values",
    "hook": "inner.weight has a hook and is on the meta device",
    "spans": "Spanning computes first values of modules within it, which are sharded already",
    "fully_shard": "is on the meta device, and fully_shard was applied",
}


def without_values(how: str) -> str:
    """The message of `shard`."""
    with torch.device("meta"):
        model = Spanning() if how == "spans" else (Leaving if how == "leaves" else Bare)(buffer=how == "buffer")
    if how == "hook":
        hooked: Any = model.get_parameter("inner.weight")
        hooked.register_post_accumulate_grad_hook(print)
    if how == "fully_shard":
        fully_shard(model)
    try:
        shoal.zero.shard(model, adamw, stage=3 if how in ("spans", "fully_shard") else 1)
    except ConfigError as error:
        return str(error)
    return "it was taken"


WIDTH, DEPTH = 640, 80
LARGE = 4 * DEPTH * WIDTH * (WIDTH + 1)
"""Bytes of parameters."""


def tower() -> torch.nn.Module:
    """Many layers, of which a rank can hold a few."""
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def tower_loss(model: torch.nn.Module, rank: int) -> torch.Tensor:
    """Of a batch that depends on these numbers alone."""
    made = torch.Generator().manual_seed(rank)
    found: torch.Tensor = model(torch.randn(2, WIDTH, generator=made)).square().mean()
    return found


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A factory for `shard`."""
    return torch.optim.SGD(parameters, lr=10.0)


@contextlib.contextmanager
def limited(to: int) -> Iterator[None]:
    """In this block the process may take so many bytes more than it has now."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    taken = 1024 * int(status["VmData"].removesuffix("kB"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + to, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def descend(model: torch.nn.Module, source: str | None) -> None:
    """A step of stage 3."""
    model, optimizer = shoal.zero.shard(model, sgd, stage=3, weights=source)
    torch.autograd.backward(tower_loss(model, dist.get_rank()))
    optimizer.step()


def within(limit: int, meta: bool, source: str | None) -> dict[str, torch.Tensor] | str:
    """Start and train within a limit; returns this rank's rows of each parameter, or the error."""
    threading.stack_size(256 << 10)
    ctypes.CDLL(None).mallopt(
        -3, 64 << 10
    )  # M_MMAP_THRESHOLD: glibc gives freed memory back (docs/how-to/zero-start-large.md)
    descend(torch.nn.Sequential(torch.nn.Linear(WIDTH, 1)), None)  # modules and threads that come with the first call
    torch.autograd.backward(tower_loss(torch.nn.Linear(WIDTH, WIDTH), 0))  # what MKL keeps for matrices of this size
    try:
        with limited(limit):
            with torch.device("meta") if meta else contextlib.nullcontext():
                model = tower()
            descend(model, source)
    except RuntimeError as error:
        return str(error)
    return {name: local(each).clone() for name, each in model.named_parameters()}


def tiny(kind: str, *, meta: bool = False) -> Any:
    """A model of `transformers`: one with rotary embeddings, one whose head is tied to the embedding."""
    import transformers

    sizes: Any = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    if kind == "Llama":
        config: Any = transformers.LlamaConfig(**sizes, num_hidden_layers=2)
    else:
        config = transformers.BertConfig(**sizes, num_hidden_layers=2, max_position_embeddings=32)
    torch.manual_seed(1)
    made: Any = transformers.LlamaForCausalLM if kind == "Llama" else transformers.BertForMaskedLM
    with torch.device("meta") if meta else contextlib.nullcontext():
        return made(config)


def of_transformers(kind: str, stage: int, folder: str | None) -> tuple[dict[str, torch.Tensor], float]:
    """All first values of a model that was built on the meta device, and its loss after two steps."""
    model, optimizer = shoal.zero.shard(tiny(kind, meta=True), adamw, stage=stage, weights=folder)
    first, tokens = state_of(model), torch.arange(24).view(2, 12)
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return first, float(loss)
