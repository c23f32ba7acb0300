"""What ranks do in `test_zero_whole`: train with optimizers that need whole tensors, beside one process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import shoal.zero
from shoal.zero.parameters import unique_bytes
from tests.integration.zero_cases import Odd, alone, groups, steps_of_rank_0, train
from tests.integration.zero_programs import moved, small_buckets

STEPS = 12
"""SOAP and Shampoo change their bases after ten of them."""


class ClipsEach(torch.optim.SGD):
    """SGD behind a clipping of each gradient by its own norm."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """A step."""
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    torch.nn.utils.clip_grad_norm_([each], 0.01)
        super().step()
        return None


def made(name: str, model: torch.nn.Module) -> Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]:
    """A factory for `shard`; most have two groups."""
    if name == "Muon":
        return lambda each: torch.optim.Muon([value for value in each if value.ndim == 2], lr=1e-2)
    if name == "muon":
        return lambda each: loaded(name)(
            [{**group, "use_muon": not place} for place, group in enumerate(groups(model, each))]
        )
    of: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "Adafactor": lambda each: torch.optim.Adafactor(each, lr=1e-2),
        "Hugging Face": hugging_face,
        "clips each": lambda each: ClipsEach(each, lr=1.0),
    }
    make = of.get(name) or (lambda each: loaded(name)(each, lr=1e-2))
    return lambda each: make(groups(model, each))


def loaded(name: str) -> Any:
    """A class of pytorch_optimizer, which takes seconds to import."""
    import pytorch_optimizer

    return pytorch_optimizer.load_optimizer(name)


def hugging_face(parameters: Any) -> torch.optim.Optimizer:
    """Their Adafactor."""
    from transformers import optimization

    kind: Any = optimization.Adafactor
    found: torch.optim.Optimizer = kind(parameters, relative_step=False, lr=1e-2, beta1=0.9)
    return found


NAMES = (
    *("lamb", "lars", "Adafactor", "Hugging Face", "novograd", "adamp", "stableadamw", "Muon", "muon", "soap"),
    *("shampoo", "clips each"),
)


def apart(stage: int, names: Iterable[str]) -> dict[str, float]:
    """How far sharded weights are from those of one process, in units of their movement there."""
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        model, plain = _alone(name)
        wanted, _, _ = alone(dist.get_world_size(), "", steps=STEPS, model=model, optimizer=plain)
        model = Odd()
        model, optimizer = shoal.zero.shard(model, made(name, model), stage=stage)
        train(optimizer, model, steps=STEPS)
        found[name] = moved(model, wanted) / moved(Odd(), wanted)
    return found


def _alone(name: str) -> tuple[Odd, torch.optim.Optimizer]:
    model = Odd()
    return model, made(name, model)([each for each in model.parameters() if each.requires_grad])


def saved_halfway(stage: int, folder: str, names: Iterable[str]) -> None:
    """Save each after the first half of its steps, as a folder and for plain torch."""
    warnings.simplefilter("ignore")
    for name in names:
        model = Odd()
        model, optimizer = shoal.zero.shard(model, made(name, model), stage=stage)
        steps_of_rank_0(model, optimizer, range(STEPS // 2))
        shoal.zero.save(f"{folder}/{name}", model, optimizer)
        shoal.zero.save(f"{folder}/{name}.pt", model, optimizer, consolidated=True)


def gone_on(stage: int, folder: str, names: Iterable[str]) -> dict[str, list[float]]:
    """Go on from either, and from the latter in plain torch too; how far weights are from those of one process."""
    warnings.simplefilter("ignore")
    found: dict[str, list[float]] = {}
    for name in names:
        model, optimizer = _alone(name)
        wanted, _, _ = alone(1, "", steps=STEPS, model=model, optimizer=optimizer)
        ends = []
        for suffix in ("", ".pt"):
            model = Odd()
            model, sharded = shoal.zero.shard(model, made(name, model), stage=stage)
            steps_of_rank_0(model, sharded, range(1))
            shoal.zero.load(f"{folder}/{name}{suffix}", model, sharded)
            steps_of_rank_0(model, sharded, range(STEPS // 2, STEPS))
            ends.append(moved(model, wanted))
        model, optimizer = _alone(name)
        plain = torch.load(f"{folder}/{name}.pt", weights_only=True)
        model.load_state_dict(plain["model"])
        optimizer.load_state_dict(plain["optimizer"])
        steps_of_rank_0(model, optimizer, range(STEPS // 2, STEPS))
        found[name] = [each / moved(Odd(), wanted) for each in (*ends, moved(model, wanted))]
    return found


class Mixed(torch.nn.Module):
    """A convolution in another memory format; a scalar, a parameter without values, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.images, self.frozen = torch.nn.Conv2d(3, 16, 3), torch.nn.Conv2d(16, 8, 3)
        self.frozen.requires_grad_(requires_grad=False)
        self.last, self.unused = torch.nn.Linear(128, 5), torch.nn.Linear(3, 2)
        self.scale, self.empty = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.empty(0, 3))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """A loss."""
        hidden = self.frozen(torch.tanh(self.images(images.to(self.scale.dtype)))).flatten(1)
        loss: torch.Tensor = (self.last(hidden) * self.scale).float().square().mean() + self.empty.sum()
        return loss


def _see(model: torch.nn.Module, step: int, rank: int, micro: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    images = torch.randn(4, 3, 8, 8, generator=made).contiguous(memory_format=torch.channels_last)
    loss: torch.Tensor = model(images)
    return loss


def mixed(stage: int, name: str, dtype: torch.dtype | None, folder: str) -> tuple[float, int, int, bool, bool]:
    """Clipping, micro-batches, a step left out, small buckets: how far from one process, in units of its movement.

    And the state of this rank and of one process in bytes; whether the memory format is kept; and whether a rank that
    begins from the checkpoint has the same.
    """
    warnings.simplefilter("ignore")
    kind: Any = loaded(name)
    ranks, plain = dist.get_world_size(), Mixed()
    trained = [each for each in plain.parameters() if each.requires_grad]
    alone = kind(trained, lr=1e-2)
    with small_buckets(2000):
        model, optimizer = shoal.zero.shard(Mixed(), lambda each: kind(each, lr=1e-2), stage=stage, dtype=dtype)
    for step in range(6):
        for micro in range(2):
            with optimizer.no_sync() if micro == 0 else nullcontext():
                torch.autograd.backward(_see(model, step, dist.get_rank(), micro) * (math.inf if step == 3 else 1.0))
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(ranks if step != 3 else 0):
            for micro in range(2):
                torch.autograd.backward(_see(plain, step, rank, micro) / ranks)
        torch.nn.utils.clip_grad_norm_(trained, 0.1)
        if step != 3:
            alone.step()
        alone.zero_grad()
    wanted = plain.state_dict()
    weight = model.images.weight
    kept = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    shoal.zero.save(f"{folder}/{stage}", model, optimizer)
    other, loaded_into = shoal.zero.shard(Mixed(), lambda each: kind(each, lr=1e-2), stage=3 - stage, dtype=dtype)
    shoal.zero.load(f"{folder}/{stage}", other, loaded_into)
    shoal.zero.save(f"{folder}/{stage}-again", other, loaded_into)
    first, again = (shoal.zero.consolidate(f"{folder}/{stage}{more}") for more in ("", "-again"))
    same = str(first) == str(again)
    state = [each for each in tree_leaves(list(alone.state.values())) if isinstance(each, torch.Tensor)]
    wanted.pop("empty")
    moved_by = moved(Mixed(), wanted)
    return moved(model, wanted) / moved_by, optimizer.memory().state, unique_bytes(state), kept, same
