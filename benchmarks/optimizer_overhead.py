"""What `shoal.Optimizer` costs a peer that is alone: ``python -m benchmarks.optimizer_overhead``.

Two copies of one model are trained in one process on the same batches, one by plain torch with gradient accumulation,
one by `shoal.Optimizer` as the only peer of its run. They take turns, a few optimizer steps each, and every pair of
turns gives one ratio: plain torch's time / shoal's. Whatever else the machine does hits both. Printed are the medians,
with the quartiles in brackets. At the end both must hold the same weights, to the rounding of the accumulation.

Two models: the demo's (its step is a fraction of a second), and a wide one with few samples, whose time goes into
gradients and statistics: the worst case for who copies them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

import shoal
from shoal.demo.model import Batch
from shoal.demo.settings import Training
from shoal.demo.training import make_model

Loss = Callable[[torch.nn.Module, int], torch.Tensor]


class Case(NamedTuple):
    """A model, and what it is trained on.

    Attributes:
        make: the model, always with the same first weights.
        loss: of the model on the micro-batch with this number.
        micro_batch: samples in it.
        steps: optimizer steps in one turn.
    """

    make: Callable[[], torch.nn.Module]
    loss: Loss
    micro_batch: int
    steps: int


def demo_case() -> Case:
    """The demo's language model, on random tokens."""
    training = Training()
    shape = (training.micro_batch, training.sequence)
    batches: list[Batch] = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(training.vocabulary, shape, generator=generator)
        positions = torch.randperm(tokens.numel(), generator=generator)[: tokens.numel() // 7]
        batches.append(Batch(tokens, positions, tokens.flatten()[positions]))

    def loss(model: torch.nn.Module, number: int) -> torch.Tensor:
        result: torch.Tensor = model.loss(batches[number % len(batches)])  # type: ignore[operator]
        return result

    return Case(lambda: make_model(training), loss, training.micro_batch, steps=4)


def wide_case() -> Case:
    """Eight million parameters, and 32 samples at a time."""

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 2048))

    torch.manual_seed(1)
    inputs = torch.randn(8, 32, 2048)
    return Case(make, lambda model, number: model(inputs[number % 8]).square().mean(), 32, steps=2)


CASES = {"demo": demo_case, "wide": wide_case}


class Plain:
    """Plain torch: gradients are accumulated in `.grad`."""

    def __init__(self, case: Case, accumulate: int) -> None:
        self.case, self.accumulate = case, accumulate
        self.model = case.make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = 0

    def turn(self) -> float:
        """A few steps; returns seconds."""
        begin = time.perf_counter()
        for _ in range(self.case.steps):
            for _ in range(self.accumulate):
                (self.case.loss(self.model, self.batch) / self.accumulate).backward()
                self.batch += 1
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - begin


class Swarm:
    """The same by `shoal.Optimizer`."""

    def __init__(self, case: Case, accumulate: int, dht: shoal.DHT) -> None:
        self.case, self.accumulate = case, accumulate
        self.model = case.make()
        self.optimizer = shoal.Optimizer(
            dht=dht,
            run_id="overhead",
            target_batch_size=accumulate * case.micro_batch,
            batch_size_per_step=case.micro_batch,
            optimizer=torch.optim.AdamW(self.model.parameters(), lr=1e-4),
        )
        self.batch = 0

    def turn(self) -> float:
        """A few steps; returns seconds."""
        begin = time.perf_counter()
        for _ in range(self.case.steps * self.accumulate):
            self.case.loss(self.model, self.batch).backward()
            self.batch += 1
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - begin


@contextmanager
def contenders(case: Case, accumulate: int) -> Iterator[tuple[Plain, Swarm]]:
    """Both, ready to begin."""
    with shoal.DHT(start=True) as dht:
        swarm = Swarm(case, accumulate, dht)
        with swarm.optimizer:
            yield Plain(case, accumulate), swarm


def compare(case: Case, accumulate: int, pairs: int) -> dict[str, float]:
    """Run the pairs; raises if the two did not train the same."""
    plain_s, swarm_s = [], []
    with contenders(case, accumulate) as (plain, swarm):
        for pair in range(pairs + 1):
            first, second = (plain, swarm) if pair % 2 else (swarm, plain)
            times = {first: first.turn(), second: second.turn()}
            if pair:  # the first pair warms up
                plain_s.append(times[plain])
                swarm_s.append(times[swarm])
        steps = swarm.optimizer.local_epoch
        if steps != case.steps * (pairs + 1):
            raise RuntimeError(f"shoal took {steps} steps where plain torch took {case.steps * (pairs + 1)}")
        for mine, its in zip(swarm.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-2, atol=1e-4)
    ratios = [its / mine for its, mine in zip(plain_s, swarm_s, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "pairs": pairs,
        "plain_step_s": statistics.median(plain_s) / case.steps,
        "shoal_step_s": statistics.median(swarm_s) / case.steps,
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=31, help="at least 15")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches in one optimizer step")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--cases", default=",".join(CASES), help=f"with commas, any of {', '.join(CASES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    names = args.cases.split(",")
    if args.pairs < 15 or args.accumulate < 1 or not set(names) <= set(CASES):
        parser.error("at least 15 pairs, 1 micro-batch, and cases that there are")
    torch.set_num_threads(args.threads)
    print(f"{args.pairs} pairs, {args.accumulate} micro-batches a step, {args.threads} torch threads")
    results = {}
    for name in names:
        results[name] = found = compare(CASES[name](), args.accumulate, args.pairs)
        print(
            f"{name:5} plain torch {found['plain_step_s'] * 1e3:7.1f} ms a step, shoal alone "
            f"{found['shoal_step_s'] * 1e3:7.1f} ms: {found['ratio']:.3f} of plain torch's speed "
            f"[{found['ratio_low']:.3f}-{found['ratio_high']:.3f}]",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
