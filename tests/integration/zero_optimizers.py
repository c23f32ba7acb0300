"""What ranks do in `test_zero_optimizers`: train with an optimizer in each stage, beside one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shoal.zero
from shoal.errors import ConfigError

ROUNDING = 1e-6
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Linears(torch.nn.Module):
    """Matrices and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(12, 16), torch.nn.Linear(16, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch, 5)."""
        found: torch.Tensor = self.last(torch.tanh(self.first(inputs)))
        return found


class Convolution(torch.nn.Module):
    """With a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.images, self.norm, self.last = torch.nn.Conv2d(1, 4, 3), torch.nn.GroupNorm(2, 4), torch.nn.Linear(32, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch, 5)."""
        images = inputs.reshape(-1, 1, 3, 4).repeat(1, 1, 2, 1)
        found: torch.Tensor = self.last(torch.tanh(self.norm(self.images(images))).flatten(1))
        return found


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"linears": Linears, "convolution": Convolution}


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of a batch that depends on these numbers alone."""
    made = torch.Generator().manual_seed(10 * step + rank)
    inputs, targets = torch.randn(6, 12, generator=made), torch.randint(0, 5, (6,), generator=made)
    return torch.nn.functional.cross_entropy(model(inputs), targets)


def ready(optimizer: torch.optim.Optimizer) -> None:
    """Some begin in another mode than that of training."""
    if callable(train := getattr(optimizer, "train", None)):
        train()


def alone(model: torch.nn.Module, make: Make, ranks: int, steps: int) -> dict[str, torch.Tensor]:
    """One process, the batches of all ranks."""
    trained = list(model.parameters())
    optimizer = make(trained)
    ready(optimizer)
    for step in range(steps):
        found = [torch.autograd.grad(loss_of(model, step, rank), trained) for rank in range(ranks)]
        for parameter, *gradients in zip(trained, *found, strict=True):
            total = gradients[0]
            for gradient in gradients[1:]:
                total = total + gradient
            parameter.grad = total / ranks
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def sharded(model: torch.nn.Module, make: Make, stage: int, steps: int) -> dict[str, Any]:
    """The same on all ranks."""
    model, optimizer = shoal.zero.shard(model, make, stage=stage)
    ready(optimizer.inner)
    for step in range(steps):
        loss_of(model, step, dist.get_rank()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return shoal.zero.full_state_dict(model)


def verdicts(found: Callable[[str], Make], name: str, kind: str, steps: int) -> list[str]:
    """For each stage: equal, rounded, differs, refused, or raises."""
    warnings.simplefilter("ignore")
    make, result = found(name), []
    for stage in (1, 2, 3):
        try:
            weights = sharded(MODELS[kind](), make, stage, steps)
        except ConfigError:
            result.append("refused")
        except Exception:  # noqa: BLE001 (of an optimizer that cannot step a DTensor, say)
            result.append("raises")
        else:
            expected = alone(MODELS[kind](), make, dist.get_world_size(), steps)
            apart = max(float((weights[each] - value).abs().max()) for each, value in expected.items())
            result.append("equal" if apart == 0 else "rounded" if apart <= ROUNDING else "differs")
    return result
