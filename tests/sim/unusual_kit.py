"""Models that are no plain list of matrices, and trainers of them: see `test_unusual_models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.sim.optimizer_kit import Trainer


class Unusual(NamedTuple):
    """A model: the groups of its parameters, and which of these have a gradient in a batch."""

    groups: list[list[torch.Tensor]]
    has_gradient: Callable[[int, int], bool] = lambda batch, index: True


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _parameter(values: torch.Tensor, *, frozen: bool = False) -> torch.Tensor:
    return torch.nn.Parameter(values, requires_grad=not frozen)


def _interleaved() -> Unusual:
    matrix, flat = _numbers(4, 6), _numbers(9)
    views = [matrix[:, :2], matrix[:, 2::2], matrix[1:, 3::2].t(), flat[::2], flat[1::2]]
    return Unusual([[_parameter(view) for view in views]])


def _small(count: int) -> Unusual:
    shapes = ((2, 3), (3,), (1,), ())
    return Unusual([[_parameter(_numbers(*shapes[index % 4])) for index in range(count)]])


MODELS: dict[str, Callable[[], Unusual]] = {
    "empty group": lambda: Unusual([[_parameter(_numbers(6, 8))], []]),
    "empty first group": lambda: Unusual([[], [_parameter(_numbers(6, 8))]]),
    "empty tensor": lambda: Unusual([[_parameter(_numbers(6, 8)), _parameter(_numbers(0, 3))]]),
    "empty tensor alone": lambda: Unusual([[_parameter(_numbers(0))], [_parameter(_numbers(3))]]),
    "no dimensions": lambda: Unusual([[_parameter(_numbers()), _parameter(_numbers(3))]]),
    "one element": lambda: Unusual([[_parameter(_numbers(1, 1)), _parameter(_numbers(1))]]),
    "channels_last": lambda: Unusual(
        [[_parameter(_numbers(2, 3, 2, 2).to(memory_format=torch.channels_last)), _parameter(_numbers(6, 8).t())]]
    ),
    "interleaved": _interleaved,
    "small": lambda: _small(60),
    "frozen": lambda: Unusual([[_parameter(_numbers(6, 8)), _parameter(_numbers(3), frozen=True)]]),
    "frozen, then unfrozen": lambda: Unusual(
        [[_parameter(_numbers(6, 8)), _parameter(_numbers(3))]], lambda batch, index: not index or not 3 <= batch < 9
    ),
    "partial statistics": lambda: Unusual(
        [[_parameter(_numbers(6, 8)), _parameter(_numbers(3)), _parameter(_numbers(2))]],
        lambda batch, index: index != 1,
    ),
}


def made(name: str, seed: int) -> Unusual:
    """The model of this name, or with so many small tensors; its values are those of the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _small(int(name.split(maxsplit=1)[0])) if name[0].isdigit() else MODELS[name]()


def optimizer_of(unusual: Unusual, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    """An optimizer of the groups."""
    groups = [{"params": group, "weight_decay": 0.01 * number} for number, group in enumerate(unusual.groups)]
    optimizer: torch.optim.Optimizer = kind(groups, lr=0.05)
    return optimizer


def set_gradients(unusual: Unusual, batch: int, peer: int) -> None:
    """Those of a batch: made up, and smaller the nearer the parameters are to 1."""
    for index, parameter in enumerate(each for group in unusual.groups for each in group):
        with_one = parameter.requires_grad and unusual.has_gradient(batch, index)
        noise = torch.Generator().manual_seed(1000 * peer + batch)
        pulls = parameter.detach() - 1 + 0.1 * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
        parameter.grad = pulls if with_one else None


class UnusualTrainer(Trainer):
    """Trains such a model."""

    model: Unusual
    name: str

    def compute(self, number: int, size: int) -> None:
        """Set the gradients of the batch of this number."""
        set_gradients(self.model, number, self.index)
