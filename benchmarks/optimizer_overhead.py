"""What `shoal.Optimizer` costs a peer that is alone: ``python -m benchmarks.optimizer_overhead``.

Three copies of one model are trained in one process on the same batches: by plain torch with gradient accumulation, by
`shoal.Optimizer` as the only peer of its run, and by what this one trains (`TrainingState`) without a network: the
gradients are checked and summed beside `.grad`, and the step is taken from the sum. That is the floor: no peer can do
with less. They take turns, a few optimizer steps each, and every round of turns gives ratios: plain torch's time /
shoal's, and plain torch's / the floor's; and the same of the processor's time in all threads, which other work on the
machine hardly touches, but which counts what shoal's own thread does beside the training. Printed are the medians, with
the quartiles in brackets, and the pages that each step had to get from the system. At the end all must hold the same
weights, to the rounding of the accumulation.

Two models: the demo's (its step is a fraction of a second), and a wide one with few samples, whose time goes into
gradients and statistics: the worst case for who copies them.

glibc gives large blocks back to the system as they are freed, and each page of the next ones costs a fault and zeros:
how many depends on what lies where, and changes from run to run. With ``--keep-memory`` it keeps what is freed, as
GLIBC_TUNABLES can tell any program.

With ``--tensors 20000,200000`` models of so many small tensors are stepped instead, by plain torch, by a peer alone,
and by two peers in this process: printed is the processor's time of one peer for an epoch, in microseconds per tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

import shoal
from shoal.demo.model import Batch
from shoal.demo.settings import Training
from shoal.demo.training import make_model
from shoal.events import EpochAdvanced, Event

KEEP_MEMORY = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824"
"""For GLIBC_TUNABLES: blocks of 32 MiB or less come from the heap, and 1 GiB of it is not given back."""

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


class Floor:
    """What `Swarm` trains, without a network."""

    def __init__(self, case: Case, accumulate: int) -> None:
        from shoal.train.training_state import TrainingState  # older code, which `turns` runs, has it elsewhere

        self.case, self.accumulate = case, accumulate
        self.model = case.make()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.training = TrainingState(optimizer, unit=accumulate * case.micro_batch)
        self.batch = 0

    def turn(self) -> float:
        """A few steps; returns seconds."""
        begin = time.perf_counter()
        for _ in range(self.case.steps):
            for _ in range(self.accumulate):
                self.case.loss(self.model, self.batch).backward()
                self.batch += 1
                self.training.accumulate(self.case.micro_batch)
                self.training.optimizer.zero_grad()
            self.training.use_own_mean()
            self.training.step()
        return time.perf_counter() - begin


@contextmanager
def contenders(case: Case, accumulate: int) -> Iterator[tuple[Plain, Swarm, Floor]]:
    """All, ready to begin."""
    with shoal.DHT(start=True) as dht:
        swarm = Swarm(case, accumulate, dht)
        with swarm.optimizer:
            yield Plain(case, accumulate), swarm, Floor(case, accumulate)


class Spent(NamedTuple):
    """What one turn has taken: seconds, seconds of the processor, and pages that came from the system."""

    seconds: float
    cpu_s: float
    faults: int


def spent(contender: Plain | Swarm | Floor) -> Spent:
    """Let it have a turn."""
    cpu_s, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds = contender.turn()
    now = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return Spent(seconds, time.process_time() - cpu_s, now - faults)


def compare(case: Case, accumulate: int, pairs: int) -> dict[str, float]:
    """Run the pairs, and the floor beside them; raises if they did not train the same."""
    with contenders(case, accumulate) as (plain, swarm, floor):
        named: list[tuple[str, Plain | Swarm | Floor]] = [("plain", plain), ("shoal", swarm), ("floor", floor)]
        turns: dict[str, list[Spent]] = {name: [] for name, _ in named}
        for pair in range(pairs + 1):
            for name, each in named if pair % 2 else named[::-1]:
                turn = spent(each)
                if pair:  # the first pair warms up
                    turns[name].append(turn)
        steps = swarm.optimizer.local_epoch
        if steps != case.steps * (pairs + 1):
            raise RuntimeError(f"shoal took {steps} steps where plain torch took {case.steps * (pairs + 1)}")
        for other in (swarm, floor):
            for mine, its in zip(other.model.parameters(), plain.model.parameters(), strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-2, atol=1e-4)
    found: dict[str, float] = {"pairs": pairs, "keeps_memory": os.environ.get("GLIBC_TUNABLES") == KEEP_MEMORY}
    for name, taken in turns.items():
        found[f"{name}_step_s"] = statistics.median(each.seconds for each in taken) / case.steps
        found[f"{name}_cpu_s"] = statistics.median(each.cpu_s for each in taken) / case.steps
        found[f"{name}_faults"] = statistics.median(each.faults for each in taken) / case.steps
        for what, index in (("ratio", 0), ("cpu_ratio", 1)):
            ratios = [its[index] / mine[index] for its, mine in zip(turns["plain"], taken, strict=True)]
            key = what if name == "shoal" else f"{name}_{what}"
            found[f"{key}_low"], found[key], found[f"{key}_high"] = statistics.quantiles(ratios, n=4)
    return found


SHAPES = ((2, 3), (3,), ())
EPOCHS = 2
"""That are measured, after the first one."""


def small_tensors(count: int) -> list[torch.nn.Parameter]:
    """So many of them, with gradients."""
    found = [torch.nn.Parameter(torch.ones(SHAPES[number % 3])) for number in range(count)]
    for each in found:
        each.grad = torch.ones_like(each)
    return found


def plain_us(count: int) -> float:
    """Microseconds of the processor per tensor for a step of plain torch."""
    optimizer = torch.optim.AdamW(small_tensors(count))
    optimizer.step()
    began = time.process_time()
    for _ in range(EPOCHS):
        optimizer.step()
    return (time.process_time() - began) / EPOCHS / count * 1e6


def epoch_us(count: int, peers: int) -> tuple[float, float]:
    """The same for an epoch of each peer, of one batch, by `shoal.Optimizer`; and its seconds.

    Raises:
        RuntimeError: not all peers took part in each step that was measured.
    """
    first = shoal.DHT(start=True)
    dhts = [first, *(shoal.DHT([first.invite()], start=True) for _ in range(peers - 1))]
    steps: list[tuple[int, int, float, float]] = []

    def note(event: Event) -> None:
        if isinstance(event, EpochAdvanced):
            steps.append((event.epoch, event.peers, time.process_time(), time.monotonic()))

    def train(dht: shoal.DHT) -> None:
        optimizer = torch.optim.AdamW(small_tensors(count))
        swarm = shoal.Optimizer(
            dht=dht,
            run_id="tensors",
            target_batch_size=4 * peers,
            batch_size_per_step=4,
            optimizer=optimizer,
            averaging_timeout=900.0,
        )
        with swarm:
            swarm.announce_end(1 + EPOCHS)
            while len(swarm.status().peers) < peers:
                time.sleep(0.1)
            while not swarm.finished:
                swarm.step()

    first.events.subscribe(note)
    try:
        with ThreadPoolExecutor(peers) as pool:
            list(pool.map(train, dhts))
    finally:
        for dht in dhts[::-1]:
            dht.shutdown()
    measured = [each for each in steps if each[0] >= 1]
    if [each[:2] for each in measured] != [(epoch, peers) for epoch in range(1, 2 + EPOCHS)]:
        raise RuntimeError(f"{peers} peers took these steps, each with so many peers: {[each[:2] for each in steps]}")
    (_, _, cpu_began, began), (_, _, cpu_ended, ended) = measured[0], measured[-1]
    return (cpu_ended - cpu_began) / EPOCHS / peers / count * 1e6, (ended - began) / EPOCHS


def many_tensors(counts: list[int]) -> dict[str, dict[str, float]]:
    """Print and return what each tensor costs."""
    results = {}
    for count in counts:
        results[f"{count}"] = found = {"plain_us": plain_us(count)}
        print(f"{count:,} tensors: plain torch {found['plain_us']:.1f} us per tensor and step", flush=True)
        for name, peers in (("alone", 1), ("two peers", 2)):
            key = "alone" if peers == 1 else "two"
            found[f"{key}_us"], found[f"{key}_s"] = epoch_us(count, peers)
            more = found[f"{key}_us"] - found["plain_us"]
            print(
                f"  {name}: {found[f'{key}_us']:.1f} us per tensor and epoch, {more:.1f} more than plain torch; "
                f"{found[f'{key}_s']:.1f} s an epoch",
                flush=True,
            )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=31, help="at least 15")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches in one optimizer step")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--cases", default=",".join(CASES), help=f"with commas, any of {', '.join(CASES)}")
    parser.add_argument("--keep-memory", action="store_true", help="freed memory is not given back to the system")
    parser.add_argument("--tensors", metavar="N,...", help="so many small tensors, in place of the cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    names = args.cases.split(",")
    if args.pairs < 15 or args.accumulate < 1 or not set(names) <= set(CASES):
        parser.error("at least 15 pairs, 1 micro-batch, and cases that there are")
    if args.keep_memory and os.environ.get("GLIBC_TUNABLES") != KEEP_MEMORY:  # malloc reads it at its start
        again = [sys.executable, "-m", "benchmarks.optimizer_overhead", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "GLIBC_TUNABLES": KEEP_MEMORY})
    torch.set_num_threads(args.threads)
    if args.tensors:
        counted = many_tensors([int(each) for each in args.tensors.split(",")])
        if args.json:
            args.json.write_text(json.dumps(counted, indent=1) + "\n")
        return 0
    print(f"{args.pairs} pairs, {args.accumulate} micro-batches a step, {args.threads} torch threads")
    results = {}
    for name in names:
        results[name] = found = compare(CASES[name](), args.accumulate, args.pairs)
        print(name)
        for each, prefix in (("plain", "plain_"), ("shoal", ""), ("floor", "floor_")):
            step_ms, cpu_ms = (found[f"{each}_{key}"] * 1e3 for key in ("step_s", "cpu_s"))
            speeds = [
                f"{found[key]:.3f} {how} [{found[f'{key}_low']:.3f}-{found[f'{key}_high']:.3f}]"
                for key, how in ((f"{prefix}ratio", "of plain's speed"), (f"{prefix}cpu_ratio", "by processor time"))
            ]
            told = f"  {each}: {step_ms:.1f} ms a step, {cpu_ms:.1f} of the processor"
            told += f", {found[f'{each}_faults']:,.0f} page faults"
            print(told + ("" if each == "plain" else f": {', '.join(speeds)}"), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
