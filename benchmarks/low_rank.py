"""What factors of low rank cost in quality: ``python -m benchmarks.low_rank``.

A small network learns a function of four tokens (128 kinds) from a teacher: 400 steps of 256 samples, with AdamW and
with SGD. Its gradients are taken whole; as factors of rank r by shoal, whose factors travel in one round; and by
PowerSGD as it is published, whose two factors need two rounds, one after the other. Printed is the mean loss of the
last 50 steps, over several seeds, and how many numbers a step sends. All is computed in one process: the factors of a
mean are the mean of the factors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch

from shoal.strategies.low_rank import LowRank

STEPS, LAST, BATCH, KINDS = 400, 50, 256, 128
RATIO = 0.5

Send = Callable[[list[torch.Tensor]], int]
"""Makes the gradients what all members get of them; returns how many numbers were sent."""


def whole(gradients: list[torch.Tensor]) -> int:
    """As they are."""
    return sum(each.numel() for each in gradients)


class OneRound:
    """shoal's factors."""

    def __init__(self, parameters: Sequence[torch.Tensor], rank: int) -> None:
        self._low, self._steps = LowRank(parameters, rank=rank, min_compression_ratio=RATIO), 0

    def __call__(self, gradients: list[torch.Tensor]) -> int:
        self._low.shrink(gradients)
        self._low.expand(gradients, self._steps)
        self._low.counted()
        self._low.advance()
        self._steps += 1
        return sum(each.numel() for each in self._low.tensors(gradients))


class TwoRounds:
    """PowerSGD, algorithm 1 of https://arxiv.org/abs/1905.13727, with the same choice of parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor], rank: int) -> None:
        low = LowRank(parameters, rank=rank, min_compression_ratio=RATIO)
        self._right = {index: base.clone() for index, base in zip(low.owners, low.bases, strict=False)}
        self._lost = {index: torch.zeros_like(parameters[index]) for index in self._right}

    def __call__(self, gradients: list[torch.Tensor]) -> int:
        sent = 0
        for index, gradient in enumerate(gradients):
            if (right := self._right.get(index)) is None:
                sent += gradient.numel()
                continue
            total = gradient + self._lost[index]
            left = torch.linalg.qr(total @ right)[0]
            self._right[index] = total.T @ left
            gradient.copy_(left @ self._right[index].T)
            self._lost[index] = total - gradient
            sent += left.numel() + right.numel()
        return sent


def network(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = [torch.nn.Embedding(KINDS, 64), torch.nn.Flatten(), torch.nn.Linear(256, 256), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, KINDS))


def teacher() -> torch.nn.Sequential:
    layers = [torch.nn.Embedding(KINDS, 16), torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    made, draw = torch.nn.Sequential(*layers, torch.nn.Linear(64, KINDS)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * (1.0 if parameter.dim() > 1 else 0.1))
    return made


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=2e-3),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def train(
    make_sender: Callable[[list[torch.nn.Parameter]], Send], optimizer: str, seed: int, rate: float
) -> tuple[float, int]:
    """The mean loss of the last steps, and the numbers that a step sends."""
    model, told, draw = network(seed), teacher(), torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    inner, send, loss_sum, sent = OPTIMIZERS[optimizer](parameters), make_sender(parameters), 0.0, 0
    inner.param_groups[0]["lr"] *= rate
    for step in range(STEPS):
        inputs = torch.randint(0, KINDS, (BATCH, 4), generator=draw)
        with torch.no_grad():
            targets = told(inputs).argmax(1)
        inner.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        with torch.no_grad():
            sent = send([gradient for each in parameters if (gradient := each.grad) is not None])
        inner.step()
        loss_sum += loss.item() * (step >= STEPS - LAST)
    return loss_sum / LAST, sent


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1.0, help="times the learning rates (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    ways: dict[str, Callable[[list[torch.nn.Parameter]], Send]] = {"whole": lambda _: whole}
    for rank in (1, 4):
        ways[f"rank {rank}, one round"] = partial(OneRound, rank=rank)
        ways[f"rank {rank}, two rounds"] = partial(TwoRounds, rank=rank)
    for optimizer in OPTIMIZERS:
        for name, make in ways.items():
            runs = [train(make, optimizer, seed, options.rate) for seed in range(options.seeds)]
            losses = sorted(loss for loss, _ in runs)
            spread = f"{losses[0]:.3f} to {losses[-1]:.3f}"
            print(
                f"{optimizer:6} {name:22} {runs[0][1]:8} numbers  loss {sum(losses) / len(losses):.3f} ({spread})",
                flush=True,
            )


if __name__ == "__main__":
    main()
