"""Habits of programs and odd models, met by trying `shoal.zero` from outside; each function runs on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import shoal.zero
from shoal.integrations.zero import attach
from shoal.zero.optimizer import ShardedOptimizer
from tests.integration.zero_cases import Odd, alone, make, train
from tests.integration.zero_programs import backward, moved, said
from tests.odd_torch import ODD


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


def trained_within(odds: Sequence[str], stage: int, folder: str) -> dict[str, str]:
    """A digest of the weights after a life that goes on within each of these contexts of torch; of none first.

    The passes of the model are the program's own: they are only within those that do not change its arithmetic.
    """

    def life(name: str, within: Callable[[], AbstractContextManager[object]], *, passes: bool) -> str:
        torch.manual_seed(0)
        table = torch.nn.Embedding(12, 8, sparse=stage < 3)
        model = torch.nn.Sequential(table, torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
        rows = torch.arange(4, dtype=torch.int64, device="cpu") + 4 * dist.get_rank()
        options: dict[str, Any] = {"stage": stage, "dtype": torch.bfloat16, **({} if stage == 3 else {"top_k": 0.5})}
        with within():
            model, optimizer = shoal.zero.shard(model, partial(torch.optim.AdamW, lr=0.05), **options)
        for step in range(3):
            with within() if passes else nullcontext():
                torch.autograd.backward(model(rows).square().mean())
            with within():
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    optimizer.load_state_dict(optimizer.state_dict())
                    shoal.zero.save(f"{folder}/{name}", model, optimizer)
                    shoal.zero.load(f"{folder}/{name}", model, optimizer)
        with within():
            weights = shoal.zero.full_state_dict(model)
        return hashlib.sha256(b"".join(each.float().numpy().tobytes() for each in weights.values())).hexdigest()

    found = {"": life("plain", nullcontext, passes=True)}
    for number, odd in enumerate(odds):
        found[odd] = life(str(number), ODD[odd], passes="default" in odd or odd == "deterministic algorithms")
    return found


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
    handle = model.layers[0].register_forward_hook(spoil)
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


def clipped_unlike(stage: int) -> dict[str, str]:
    """What is said where rank 1 clips otherwise, or with something wrong, or at another time."""
    model = Odd()
    _, optimizer = shoal.zero.shard(model, make("sgd", model), stage=stage)
    wrong = dist.get_rank() == 1
    given: dict[str, tuple[Any, Any]] = {
        "a text": ("one", 2.0),
        "two values": (torch.ones(2), 2.0),
        "a flag": (True, 2.0),
        "no norm": (1.0, None),
        "another limit": (0.5, 2.0),
        "another norm": (1.0, float("inf")),
    }
    found = {}
    for name, arguments in given.items():
        optimizer.zero_grad()
        backward(model)
        found[name] = said(partial(optimizer.clip_grad_norm_, *(arguments if wrong else (1.0, 2.0))))
    found["a step"] = said(optimizer.step if wrong else lambda: optimizer.clip_grad_norm_(1.0))
    if wrong:
        optimizer.zero_grad()
    found["cleared"] = said(lambda: optimizer.clip_grad_norm_(1.0))
    return found


def wrong_arguments(path: str, everywhere: bool) -> dict[str, str]:
    """What is said of arguments that are wrong on rank 1, or everywhere."""
    wrong = everywhere or dist.get_rank() == 1
    model = Odd()
    _, optimizer = shoal.zero.shard(model, make("sgd", model), stage=2)

    def of(bad: Any, good: Any) -> Any:
        return bad if wrong else good

    state = optimizer.state_dict()
    calls: dict[str, Callable[[], object]] = {
        "extra": lambda: shoal.zero.save(f"{path}/never", model, optimizer, extra=of([1], None)),
        "consolidated": lambda: shoal.zero.save(f"{path}/never", model, optimizer, consolidated=of("no", False)),
        "skip_nonfinite": lambda: shoal.zero.shard(Odd(), make("sgd", model), stage=2, skip_nonfinite=of("no", True)),
        "mesh": lambda: shoal.zero.shard(Odd(), make("sgd", model), stage=2, mesh=of("flat", None)),
        "offload": lambda: shoal.zero.partition_activations(
            model.layers, optimizer.collectives.group, offload=of("no", False)
        ),
        "loop": lambda: attach(of(None, SimpleNamespace(accelerator=None)), model, optimizer),
    }
    if everywhere:  # nobody waits for another in these
        nothing: Any = None
        calls |= {
            "full_state_dict": lambda: shoal.zero.full_state_dict(nothing),
            "rank0_only": lambda: shoal.zero.full_state_dict(model, rank0_only="no"),  # type: ignore[arg-type]
            "load_state_dict": lambda: optimizer.load_state_dict(nothing),
            "less of it": lambda: optimizer.load_state_dict({"share": state["share"]}),
            "another share": lambda: optimizer.load_state_dict({"share": 3}),
            "closure": lambda: optimizer.step(3),  # type: ignore[arg-type]
        }
    return {name: said(call) for name, call in calls.items()}


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
