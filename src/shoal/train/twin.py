"""Twins of an optimizer, to try out what it does: it is not changed itself, and neither is the model, nor chance."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch

__all__ = ["same_chance", "twin_of"]


def twin_of(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """The optimizer again, as are those that it wraps, with copies of all attributes and without hooks.

    Torch lets `deepcopy` have three attributes.

    Args:
        optimizer: that is copied.
        memo: as of `deepcopy`: what stands in the twin for parts of the optimizer, by their `id`.
    """
    twin = memo[id(optimizer)] = object.__new__(type(optimizer))
    for each in vars(optimizer).values():
        if isinstance(each, torch.optim.Optimizer) and id(each) not in memo:
            twin_of(each, memo)
    for name, value in vars(optimizer).items():
        if name != "step":  # schedules put a step of theirs before the class's, which would step the real one
            vars(twin)[name] = OrderedDict() if name.startswith("_optimizer_") else deepcopy(value, memo)
    return twin


@contextmanager
def same_chance(devices: Iterable[torch.device]) -> Iterator[Callable[[], object]]:
    """After this block, random generators are as they were; yields a check whether they were used in it."""
    # Of mps there is one device only, which is not named.
    modules = [(torch.get_device_module(each), [each] * (each.type != "mps")) for each in devices if each.type != "cpu"]
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    of_devices = [module.get_rng_state(*device) for module, device in modules]

    def tell() -> object:
        numbers: Any = np.random.get_state()  # noqa: NPY002 (programs draw from it)
        states = [torch.get_rng_state(), *(module.get_rng_state(*device) for module, device in modules)]
        return random.getstate(), numbers[1].tobytes(), numbers[2:], [each.numpy().tobytes() for each in states]

    try:
        yield tell
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_rng_state(of_torch)
        for (module, device), found in zip(modules, of_devices, strict=True):
            module.set_rng_state(found, *device)
