"""What ranks do in `test_zero_whole`: train with optimizers that need whole tensors, beside one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

import shoal.zero
from tests.integration.zero_cases import Odd, alone, groups, train
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
    import pytorch_optimizer
    from transformers import optimization

    hugging_face: Any = optimization.Adafactor
    load: Any = pytorch_optimizer.load_optimizer
    of: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
        "Adafactor": lambda each: torch.optim.Adafactor(each, lr=1e-2),
        "Hugging Face": lambda each: hugging_face(each, scale_parameter=True, relative_step=False, lr=1e-2, beta1=0.9),
        "clips each": lambda each: ClipsEach(each, lr=1.0),
    }
    if name == "Muon":
        return lambda each: torch.optim.Muon([value for value in each if value.ndim == 2], lr=1e-2)
    if name == "muon":
        return lambda each: load("muon")(
            [{**group, "use_muon": not place} for place, group in enumerate(groups(model, each))]
        )
    find = of.get(name) or (lambda each: load(name)(each, lr=1e-2))
    return lambda each: find(groups(model, each))


NAMES = (
    *("lamb", "lars", "Adafactor", "Hugging Face", "novograd", "adamp", "stableadamw", "Muon", "muon", "soap"),
    *("shampoo", "clips each"),
)


def apart(stage: int, names: Iterable[str]) -> dict[str, float]:
    """How far sharded weights are from those of one process, in units of their movement there."""
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        model = Odd()
        wanted, _, _ = alone(
            dist.get_world_size(),
            "",
            steps=STEPS,
            model=model,
            optimizer=made(name, model)([each for each in model.parameters() if each.requires_grad]),
        )
        sharded = Odd()
        sharded, optimizer = shoal.zero.shard(sharded, made(name, sharded), stage=stage)
        train(optimizer, sharded, steps=STEPS)
        found[name] = moved(sharded, wanted) / moved(Odd(), wanted)
    return found
