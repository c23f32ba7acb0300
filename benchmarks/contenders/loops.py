"""Training loops that run beside rounds of averaging. Import nothing of shoal: see `worker`.

- `torch`: forward, backward and step of a network with large matrices: nearly all of its time goes into kernels, which
  torch runs without Python's lock.
- `python`: batches made by plain Python code, and a network so small that its time goes into calls: some thread of
  Python needs the lock nearly always.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable

import torch

__all__ = ["LOOPS", "run", "run_for"]

Iteration = Callable[[], None]


def torch_heavy() -> Iteration:
    """Some 15 ms on one core."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(768, 768), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs = torch.randn(64, 768)

    def iteration() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return iteration


def python_heavy() -> Iteration:
    """Some 3 ms on one core, most of it in the interpreter."""
    torch.manual_seed(0)
    rng = random.Random(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    words = [f"word {rng.randrange(1000)}" for _ in range(2000)]

    def iteration() -> None:
        counts: dict[str, int] = {}
        for word in words:
            counts[word] = counts.get(word, 0) + len(word)
        common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:64]
        batch = torch.tensor([[float((count * (k + 1)) % 7) for k in range(16)] for _, count in common])
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return iteration


LOOPS: dict[str, Callable[[], Iteration]] = {"torch": torch_heavy, "python": python_heavy}
"""Each makes its loop: a function that does one iteration."""


@functools.cache
def loop(name: str) -> Iteration:
    """The loop of this name; the same one each time."""
    return LOOPS[name]()


def run(name: str, enough: Callable[[], bool]) -> dict[str, float]:
    """Iterate until it is enough. Returns how many `iterations` there were, and in how many `seconds`."""
    iteration = loop(name)
    count, began = 0, time.perf_counter()
    while not enough():
        iteration()
        count += 1
    return {"iterations": count, "seconds": time.perf_counter() - began}


def run_for(name: str, seconds: float) -> dict[str, float]:
    """As `run`, for so long."""
    end = time.perf_counter() + seconds
    return run(name, lambda: time.perf_counter() >= end)
