"""Gradients that programs ask for, watch or clear in ways of their own, on the ranks of the tests of `shoal.zero`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import shoal.zero
from shoal.zero import standins

WIDTH = 4


class Net(torch.nn.Module):
    """Layers in a list, a head beside them, and another one that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head, self.other = torch.nn.Linear(WIDTH, 1), torch.nn.Linear(WIDTH, 1)

    def forward(self, hidden: torch.Tensor, head: str = "head") -> torch.Tensor:
        """Shape (batch, 1)."""
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.get_submodule(head)(hidden)  # type: ignore[no-any-return]


def batch(step: int, rank: int) -> torch.Tensor:
    """The samples of a rank."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


Pass = Callable[[Net, torch.Tensor, float], object]
"""The passes of one rank, of a model and a batch; losses are scaled by the number."""


def _all_named(model: Net, samples: torch.Tensor, scale: float) -> None:
    (model(samples).square().mean() * scale).backward(inputs=list(model.parameters())[:-2])


def _one_named(model: Net, samples: torch.Tensor, scale: float) -> None:
    (model(samples).square().mean() * scale).backward(inputs=model.head.weight)


def _two_losses(model: Net, samples: torch.Tensor, scale: float) -> None:
    """Of one graph, each for its part of the model."""
    found = model(samples)
    (found.square().mean() * scale).backward(inputs=list(model.layers.parameters()), retain_graph=True)
    (found.abs().mean() * scale).backward(inputs=list(model.head.parameters()))


def _function(model: Net, samples: torch.Tensor, scale: float) -> None:
    torch.autograd.backward([model(samples).square().mean() * scale], inputs=dict(model.layers.named_parameters()))


def _without_gradients(model: Net, samples: torch.Tensor, scale: float) -> None:
    loss = model(samples).square().mean() * scale
    with torch.no_grad():
        loss.backward(inputs=list(model.layers.parameters()))


def _edges(model: Net, samples: torch.Tensor, scale: float) -> None:
    edges = [get_gradient_edge(each) for each in model.layers.parameters()]
    (model(samples).square().mean() * scale).backward(inputs=edges)


NAMED: dict[str, Pass] = {
    "all": _all_named,
    "one": _one_named,
    "two losses": _two_losses,
    "torch.autograd.backward": _function,
    "no_grad": _without_gradients,
    "edges": _edges,
}
"""Passes that name the parameters that they are for."""


def _apart(model: torch.nn.Module, plain: torch.nn.Module) -> float:
    after = shoal.zero.full_state_dict(model)
    return max(float((after[name] - value).abs().max()) for name, value in plain.state_dict().items())


def named(cases: Sequence[str], stage: int) -> dict[str, float]:
    """How far two steps of such passes are from those of one process."""
    ranks, found = dist.get_world_size(), {}
    for how in cases:
        plain, run = Net(), NAMED[how]
        stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
        model, optimizer = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
        for step in range(2):
            run(model, batch(step, dist.get_rank()), 1.0)
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            for rank in range(ranks):
                run(plain, batch(step, rank), 1 / ranks)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            stepper.step()
            stepper.zero_grad()
        found[how] = _apart(model, plain)
    return found


def watched(stage: int) -> list[list[bool]]:
    """For each call of a hook of all parameters, in two passes, which of them have a gradient."""
    model, _ = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    calls: list[list[bool]] = []

    def hook(gradients: Sequence[torch.Tensor | None]) -> None:
        pairs = zip(gradients, shapes, strict=True)
        calls.append([each is not None and each.shape == wanted for each, wanted in pairs])

    shapes = [each.shape for each in model.parameters()]
    handle = register_multi_grad_hook(list(model.parameters()), hook)
    for step in range(2):
        model(batch(step, dist.get_rank())).sum().backward()
    handle.remove()
    model(batch(2, dist.get_rank())).sum().backward()
    return calls


def cleared_to_zeros(how: str, stage: int) -> list[str]:
    """The warnings of a program that clears gradients to zeros, twice."""
    standins.warn_of_zeros.cache_clear()
    model, optimizer = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9), stage=stage)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shoal.zero")
    logger.addHandler(handler)
    try:
        for step in range(3):
            model(batch(step, dist.get_rank())).sum().backward()
            optimizer.step()
            (optimizer if how == "optimizer" else model).zero_grad(set_to_none=False)
    finally:
        logger.removeHandler(handler)
    return records
