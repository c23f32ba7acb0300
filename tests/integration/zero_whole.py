"""What ranks do in `test_zero_whole`: train with optimizers that need whole tensors, beside one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

import shoal.zero
from tests.integration.zero_cases import Odd, alone, groups, steps_of_rank_0, train
from tests.integration.zero_programs import moved

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
