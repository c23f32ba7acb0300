"""Training loops that run beside rounds of averaging. Import nothing of shoal: see `worker`.

- `torch`: forward, backward and step of a network with large matrices: nearly all of its time goes into kernels, which
  torch runs without Python's lock.
- `python`: batches made by plain Python code, and a network so small that its time goes into calls: it holds the lock
  nearly always, but lets it go for a moment in each call of torch.
- `interpreter`: the plain Python code alone, as in tokenizing or shuffling. It lets the lock go only when another
  thread has waited for it for 5 ms (`sys.getswitchinterval`): the worst case.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence

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
    """Some 2 ms on one core, most of it in the interpreter."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    words = some_words()

    def iteration() -> None:
        optimizer.zero_grad()
        model(torch.tensor(batch(words))).square().mean().backward()
        optimizer.step()

    return iteration


def interpreter() -> Iteration:
    """Some 1 ms on one core."""
    words = some_words()

    def iteration() -> None:
        batch(words)

    return iteration


def some_words() -> list[str]:
    rng = random.Random(0)
    return [f"word {rng.randrange(1000)}" for _ in range(2000)]


def batch(words: Sequence[str]) -> list[list[float]]:
    """Count words, and make numbers of the most frequent ones."""
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + len(word)
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:64]
    return [[float((count * (k + 1)) % 7) for k in range(16)] for _, count in common]


LOOPS: dict[str, Callable[[], Iteration]] = {"torch": torch_heavy, "python": python_heavy, "interpreter": interpreter}
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
    loop(name)  # made before the clock runs
    end = time.perf_counter() + seconds
    return run(name, lambda: time.perf_counter() >= end)
