"""Habits of programs and odd models, met by trying `shoal.zero` from outside; each function runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import shoal.zero
from shoal.zero.optimizer import ShardedOptimizer
from tests.integration.zero_cases import Odd, alone, make, train
from tests.integration.zero_programs import backward, moved, said


def clipped_by_a_rank_without_gradients(default: torch.dtype) -> tuple[float, str]:
    """The norm of three values, of which one rank keeps all, and its dtype; under another default dtype."""
    torch.set_default_dtype(default)
    try:
        model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float32)
        model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=2)
        torch.autograd.backward(model(torch.tensor([[0.0, 3.0, 4.0]], dtype=torch.float32)).sum())
        norm = optimizer.clip_grad_norm_(1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    return float(norm), str(norm.dtype)


def clipped_in_64_bits(stage: int) -> float:
    """How far weights of 64 bits are from those of one process after clipping."""
    model, plain = Odd().double(), Odd().double()
    _, optimizer = shoal.zero.shard(model, make("sgd", model), stage=stage)
    train(optimizer, model, steps=2, clip=0.1)
    return moved(model, alone(dist.get_world_size(), "sgd", steps=2, clip=0.1, model=plain)[0])


def reduced_within_nested_blocks(stage: int) -> int:
    """Bytes that are reduced by passes in a `no_sync` block, behind the end of another one within it."""
    model = Odd()
    _, optimizer = shoal.zero.shard(model, make("sgd", model), stage=stage)
    with optimizer.no_sync():
        with optimizer.no_sync():
            backward(model)
        backward(model, 0, 1)
    return optimizer.traffic().reduced


def broken_off(stage: int, how: str) -> tuple[float, str]:
    """A backward pass raises on all ranks, and the program goes on: how far it is from one process; what is said."""
    model = Odd()
    _, optimizer = shoal.zero.shard(model, make("adamw", model), stage=stage)

    def refuse(_: torch.Tensor) -> None:
        raise ArithmeticError("a bad batch")

    def spoil(_: torch.nn.Module, __: object, output: torch.Tensor) -> None:
        output.register_hook(refuse)  # type: ignore[no-untyped-call]

    train(optimizer, model, steps=1)
    handle = model.layers[1].register_forward_hook(spoil)
    words = said(lambda: backward(model, 5))
    handle.remove()
    assert "a bad batch" in words, words
    clear: dict[str, Callable[[], object]] = {
        "the optimizer clears": optimizer.zero_grad,
        "the model clears": model.zero_grad,
        "nobody clears": lambda: None,
    }
    clear[how]()
    if words := said(lambda: train(optimizer, model, steps=2, first=1)) or said(optimizer.step):
        optimizer.zero_grad()
        train(optimizer, model, steps=2, first=1)
    return moved(model, alone(dist.get_world_size(), "adamw", steps=3)[0]), words


class Opaque(torch.nn.Module):
    """A layer whose result only a program knows to read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> SimpleNamespace:
        """Shape (batch, 4)."""
        return SimpleNamespace(hidden=self.layer(hidden))


def of_a_class_of_its_own(stage: int) -> str:
    """What is said of a layer that returns an object which stage 3 cannot look into."""
    model = torch.nn.ModuleDict({"one": Opaque()})
    shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    return said(lambda: torch.autograd.backward(model["one"](torch.ones(2, 4)).hidden.sum()))


def with_views_of_conjugates(stage: int, path: str) -> bool:
    """Whether a complex buffer that is a conjugate view is rank 0's on all ranks, and comes back from a checkpoint."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(3, 3)
    model.register_buffer("turn", torch.randn(3, dtype=torch.complex64).conj())
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    wanted = shoal.zero.full_state_dict(model)["turn"]
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, wanted.tolist())
    shoal.zero.save(path, model, optimizer)
    model.get_buffer("turn").zero_()
    shoal.zero.load(path, model, optimizer)
    return everything[0] == wanted.tolist() and torch.equal(model.get_buffer("turn"), wanted)


def _shard(model: torch.nn.Module, stage: int) -> ShardedOptimizer:
    return shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)[1]


def refused(what: str, stage: int) -> str:
    """What is said of models that would be trained wrongly, or that raised errors of torch's."""
    linear = torch.nn.Linear(4, 4)
    models: dict[str, Callable[[], torch.nn.Module]] = {
        "max_norm": lambda: torch.nn.Sequential(torch.nn.Embedding(5, 4, max_norm=1.0), linear),
        "lazy": lambda: torch.nn.Sequential(torch.nn.LazyLinear(4), linear),
        "DistributedDataParallel": lambda: torch.nn.parallel.DistributedDataParallel(linear),
    }
    if what == "share memory":
        linear.register_buffer("shared", linear.weight.detach())
    model = models[what]() if what in models else linear
    return said(lambda: _shard(model, stage))
