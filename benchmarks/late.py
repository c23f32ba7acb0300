"""What batches that come late cost, and what keeping them costs: ``python -m benchmarks.late``, on virtual time.

Simulated peers learn a small network of a teacher's. Printed are, for ``late="drop"`` and ``late="next"``, the epochs
and the held-out loss at each quarter of the time, and what was dropped: with epochs of one batch for each peer, whose
batches take 0.25 to 0.45 s. Then for peers of unequal speed that wait for merges (``LocalSGD``): the batches a second
that went into merges, beside those that peers compute which never wait, and what was lost; what was trained after the
last merge counts for nothing here, an eighth of the time at most. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal import sim
from shoal.strategies import LocalSGD, Strategy
from tests.sim.optimizer_kit import FEATURES, Run, Trainer

ROWS, WIDTH, TEACHER = 16, 32, 16
BATCHES_S = {3: (0.27, 0.3, 0.34), 8: (0.25, 0.27, 0.29, 0.3, 0.31, 0.33, 0.36, 0.45)}
SECONDS = {3: 24.0, 8: 16.0}
SPEEDS = ((1.0, 2.0), (1.0, 1.0, 1.5), (1.0, 1.1, 4.0))
EVERY = (1, 5, 20)

Make = Callable[[list[Tensor], float], tuple[torch.optim.Optimizer, Any]]


def _sgd(rate: float, momentum: float) -> Make:
    return lambda parameters, _: (torch.optim.SGD(parameters, lr=rate, momentum=momentum), None)


def _adamw(rate: float) -> Make:
    return lambda parameters, _: (torch.optim.AdamW(parameters, lr=rate), None)


OPTIMIZERS = {"SGD, 0.28": _sgd(0.28, 0.0), "SGD, 0.03, momentum 0.9": _sgd(0.03, 0.9), "AdamW, 0.03": _adamw(0.03)}


class _Task:
    """What is learned."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(7)
        self._first = torch.randn(FEATURES, TEACHER, generator=chance, dtype=torch.float64)
        self._second = torch.randn(TEACHER, 1, generator=chance, dtype=torch.float64) / 4
        self._held_out = self.draw(2000, 99)

    def draw(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Samples."""
        inputs = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return inputs, (inputs @ self._first).tanh() @ self._second

    def loss(self, parameters: Sequence[Tensor]) -> float:
        """The held-out one."""
        inputs, targets = self._held_out
        first, second = (each.detach() for each in parameters)
        return float(((inputs @ first).tanh() @ second - targets).square().mean())


TASK = _Task()


class Learner(Trainer):
    """A peer."""

    def compute(self, number: int, size: int) -> None:
        """See `Trainer`."""
        inputs, targets = TASK.draw(size, 100_000 * self.index + number)
        first, second = (each.detach() for each in self.parameters)
        hidden = (inputs @ first).tanh()
        slopes = (hidden @ second - targets) * (2 / size)
        self.parameters[0].grad = inputs.T @ (slopes @ second.T * (1 - hidden * hidden))
        self.parameters[1].grad = hidden.T @ slopes


def play(
    batches_s: Sequence[float], seconds: float, make: Make, *, strategy: Strategy | None = None, late: bool = False
) -> tuple[list[tuple[int, float]], int, int]:
    """Epoch and loss at each quarter of the time, and the batches that counted and were dropped."""

    async def main() -> tuple[list[tuple[int, float]], int, int]:
        run = Run(target=len(batches_s) * ROWS, width=WIDTH, make=make, trainer=Learner)
        names = [f"p{number}" for number in range(len(batches_s))]
        for name in names:
            await run.add(name, strategy=strategy, late=late)
        await sim.sleep(3.0)
        for name, batch_s in zip(names, batches_s, strict=True):
            run.swarm.spawn(name, run.trainers[name].train(ROWS, duration_s=batch_s, until=lambda: False))
        found, first = list[tuple[int, float]](), run.trainers["p0"]
        for _ in range(4):
            await sim.sleep(seconds / 4)
            found.append((first.participant.epoch, TASK.loss(first.participant.training.trained)))
        counts = [trainer.participant.contribution for trainer in run.trainers.values()]
        await run.close()
        return found, sum(c.contributed for c in counts) // ROWS, sum(c.dropped for c in counts) // ROWS

    return sim.run(main, seed=1, max_turns=10**8)


def main() -> None:
    print("| peers | optimizer | late | epochs: loss | dropped |\n| --- | --- | --- | --- | --- |")
    for peers, batches_s in BATCHES_S.items():
        for name, make in OPTIMIZERS.items():
            for late in (False, True):
                found, counted, dropped = play(batches_s, SECONDS[peers], make, late=late)
                losses = ", ".join(f"{epoch}: {loss:.3f}" for epoch, loss in found)
                share = dropped / (counted + dropped)
                print(f"| {peers} | {name} | {'next' if late else 'drop'} | {losses} | {share:.1%} |", flush=True)
    print("\n| batches take, s | every | merged / s | never waiting | lost |\n| --- | --- | --- | --- | --- |")
    for batches_s in SPEEDS:
        for every in EVERY:
            seconds = 8.0 * every * len(batches_s) / sum(1 / each for each in batches_s)
            _, counted, dropped = play(
                batches_s, seconds, OPTIMIZERS["SGD, 0.03, momentum 0.9"], strategy=LocalSGD(every)
            )
            most, share = sum(1 / each for each in batches_s), dropped / (counted + dropped)
            speeds = ", ".join(f"{each:g}" for each in batches_s)
            print(f"| {speeds} | {every} | {counted / seconds:.2f} | {most:.2f} | {share:.1%} |", flush=True)


if __name__ == "__main__":
    main()
