"""Odd parameters through a whole life: steps, a checkpoint, other ranks; on the ranks of the tests of `shoal.zero`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import shoal.zero
from shoal.zero.optimizer import ShardedOptimizer
from tests.integration.zero_programs import said

KINDS = (
    "usual",
    "an empty group",
    "an empty tensor",
    "an empty matrix",
    "frozen empty tensors",
    "a scalar",
    "one value",
    "fewer values than ranks",
    "no gradients",
    "no gradients on a rank",
    "frozen at first",
    "tied",
    "many small",
)


class Shapes(torch.nn.Module):
    """A small model, and parameters of one kind."""

    def __init__(self, kind: str, many: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.kind = kind
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)])
        self.head = torch.nn.Linear(5, 3)
        shapes: dict[str, list[tuple[int, ...]]] = {
            "an empty tensor": [(0,)],
            "an empty matrix": [(3, 0), (0, 3)],
            "frozen empty tensors": [(0,), (3, 0)],
            "a scalar": [()],
            "one value": [(1,), (1, 1)],
            "fewer values than ranks": [(2,), (2, 1), (1, 2)],
            "no gradients": [(5,), (3, 2)],
            "no gradients on a rank": [(5,), (3, 2)],
            "many small": [(1 + number % 3,) for number in range(many)],
        }
        self.more = torch.nn.ParameterList([torch.full(shape, 0.5) for shape in shapes.get(kind, [])])
        if kind == "frozen empty tensors":
            self.more.requires_grad_(requires_grad=False)
        if kind == "tied":
            self.layers[1].weight = self.layers[0].weight
        if kind == "frozen at first":
            self.head.requires_grad_(requires_grad=False)

    def forward(self, hidden: torch.Tensor, rank: int) -> torch.Tensor:
        """A loss."""
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        used = self.kind != "no gradients" and (self.kind != "no gradients on a rank" or rank == 0)
        more = sum(each.square().sum() for each in self.more) if used else 0.0
        return self.head(hidden).square().mean() + more  # type: ignore[no-any-return]


def made(model: Shapes) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """A factory."""

    def build(_: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [*model.parameters()]}]
        if model.kind == "an empty group":
            groups.append({"params": []})
        return torch.optim.AdamW(groups, lr=0.01)

    return build


def batch(step: int, rank: int) -> torch.Tensor:
    """Of a rank."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def alone(kind: str, many: int, ranks: int, steps: int) -> dict[str, torch.Tensor]:
    """The weights of one process."""
    model = Shapes(kind, many)
    optimizer = made(model)([])
    for step in range(steps):
        if step == 1:
            model.head.requires_grad_()
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for rank in range(ranks):
            model(batch(step, rank), rank).backward()
            for each in model.parameters():
                if each.grad is not None:
                    sums[each] = sums[each] + each.grad if each in sums else each.grad
                    each.grad = None
        for each, total in sums.items():
            each.grad = total / ranks
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _train(model: Shapes, optimizer: ShardedOptimizer, steps: range) -> None:
    rank = dist.get_rank()
    for step in steps:
        if step == 1:
            model.head.requires_grad_()
        model(batch(step, rank), rank).backward()
        optimizer.clip_grad_norm_(1e6)
        optimizer.step()
        optimizer.zero_grad()


def lived(kinds: list[str], stage: int, path: str, many: int) -> dict[str, tuple[str, float]]:
    """Two steps and a checkpoint of each kind: what is said, and how far weights are from those of one process."""
    found = {}
    for kind in kinds:
        model = Shapes(kind, many)

        def run(model: Shapes = model, kind: str = kind) -> None:
            _, optimizer = shoal.zero.shard(model, made(model), stage=stage)
            _train(model, optimizer, range(2))
            shoal.zero.save(f"{path}/{kind}", model, optimizer)

        words = said(run)
        wanted = {} if words else alone(kind, many, dist.get_world_size(), 2)
        found[kind] = words, _apart(model, wanted)
    return found


def went_on(kinds: list[str], stage: int, path: str, many: int) -> dict[str, tuple[str, float, bool]]:
    """The same on other ranks, in another stage: what is said; how far weights are from those saved; if it works."""
    found = {}
    for kind in kinds:
        model = Shapes(kind, many)
        model.head.requires_grad_()
        after = [-1.0]

        def run(model: Shapes = model, kind: str = kind, after: list[float] = after) -> None:
            _, optimizer = shoal.zero.shard(model, made(model), stage=stage)
            shoal.zero.load(f"{path}/{kind}", model, optimizer)
            after[0] = _apart(model, alone(kind, many, 2, 2))
            before = shoal.zero.full_state_dict(model)
            _train(model, optimizer, range(2, 3))
            assert _apart(model, before) > 0.0

        words = said(run)
        found[kind] = words, after[0], not words
    return found


def _apart(model: torch.nn.Module, wanted: dict[str, torch.Tensor]) -> float:
    whole = shoal.zero.full_state_dict(model) if wanted else {}
    return max((float((whole[name] - each).abs().max()) for name, each in wanted.items() if each.numel()), default=0.0)
