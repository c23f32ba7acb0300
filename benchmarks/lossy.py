"""What lossy averaging does to the loss: ``python -m benchmarks.lossy``.

The demo's model learns the demo's text, with four peers in one process: they take turns to compute, and average with
the code of a round (`shoal.averaging.allreduce.vector`), but for the network. Three ways:

- *gradients*: every step the peers' mean gradients, of 8 to 24 sequences each, are averaged with the sequences as
  weights; all take the same optimizer step.
- *parameters*: every peer takes five optimizer steps of its own, of 16 sequences, then the parameters are averaged.
- *outer*: every peer takes five such steps, then outer gradients are averaged: the parameters after the last average
  less those now. All peers go on with the former less the average (SGD with a learning rate of 1, as in SparseLoCo,
  Sarfi et al. 2025, arXiv:2508.15706).

Who averages which quarter of the elements is drawn anew in each round. With the same seed all codecs see the same
sequences. Printed are the held-out loss (mean of the last five of every fourth step), over all seeds as mean and range,
and its ratio to that of float32 of the same seed. Nothing is timed: two runs go on at once, however busy the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.by_hand import average_tile
from shoal.averaging.allreduce.vector import TileDigests, Vector, describe
from shoal.compression import (
    BlockwiseQuantization,
    CompressionBase,
    Differences,
    ErrorFeedback,
    NoCompression,
    Quantile8BitQuantization,
    TopKCompression,
    Uniform8BitQuantization,
    choose_codecs,
    codec_by_name,
)
from shoal.demo.model import MaskedLM
from shoal.demo.settings import Training
from shoal.demo.text import load_corpus
from shoal.demo.training import (
    MaskedBatches,
    draw_batches,
    held_out,
    held_out_loss,
    make_model,
    make_optimizer,
    make_schedule,
)

PEERS = 4
ROWS = 16
"""Sequences of a peer in one step (on average, for gradients)."""

LOCAL_STEPS = 5
"""Steps of each peer between two averages of parameters."""

TILE_BYTES = 1 << 16
DIGESTS = TileDigests(b"benchmarks.lossy")

EIGHT_BITS: list[CompressionBase] = [Uniform8BitQuantization(), Quantile8BitQuantization(), BlockwiseQuantization()]
FOUR_BITS, TWO_BITS = BlockwiseQuantization(bits=4), BlockwiseQuantization(bits=2)
CASES: dict[str, list[CompressionBase]] = {
    "gradients": [
        NoCompression(),
        *EIGHT_BITS,
        FOUR_BITS,
        ErrorFeedback(FOUR_BITS),
        TopKCompression(0.01),
        ErrorFeedback(TopKCompression(0.01)),
        ErrorFeedback(TopKCompression(0.1)),
    ],
    "parameters": [
        NoCompression(),
        *EIGHT_BITS,
        FOUR_BITS,
        *map(Differences, EIGHT_BITS),
        Differences(FOUR_BITS),
        Differences(ErrorFeedback(FOUR_BITS)),
        Differences(ErrorFeedback(TopKCompression(0.1))),
    ],
    "outer": [
        NoCompression(),
        ErrorFeedback(FOUR_BITS),
        TWO_BITS,
        ErrorFeedback(TWO_BITS),
        ErrorFeedback(TopKCompression(0.03, bits=2)),
        ErrorFeedback(TopKCompression(0.1, bits=2)),
    ],
}


class Run(NamedTuple):
    """What is averaged with which codec."""

    what: str
    codec: str
    seed: int
    steps: int


def average(vectors: Sequence[Vector], weights: Sequence[float], rng: random.Random) -> None:
    """A round without its network: every tile from all peers, all of them end with the reducer's bytes."""
    for vector, weight in zip(vectors, weights, strict=True):
        assert vector.copy_in(weight=weight) is None
    names = {vector.reference_name for vector in vectors}
    for vector in vectors:
        vector.agree(on_reference=names != {b""})
    numel = vectors[0].layout.numel
    shares = [numel // len(vectors)] * len(vectors)
    shares[-1] += numel - sum(shares)
    reducers = rng.sample(range(len(vectors)), len(vectors))
    tiling = vectors[0].tiling(shares, TILE_BYTES)
    for tile, owner in zip(tiling.tiles, tiling.owners, strict=True):
        reducer = reducers[owner]
        average_tile(vectors, weights, tile, reducer, DIGESTS)
        for peer, vector in enumerate(vectors):
            vector.settle(tile, averaged_here=peer == reducer)
    for vector in vectors:
        vector.name_reference(b"one after the other")
        vector.overwrite()


def average_gradients(run: Run, training: Training) -> Iterator[MaskedLM]:
    """The model after each step. One model is enough: all peers have the same."""
    model = make_model(training)
    optimizer = make_optimizer(training, model.parameters())
    schedule = make_schedule(training, optimizer)
    parameters = list(model.parameters())
    means = [[torch.zeros_like(parameter) for parameter in parameters] for _ in range(PEERS)]
    layout = describe(means[0], choose_codecs(codec_by_name(run.codec), means[0]))
    vectors = [Vector(tensors, layout) for tensors in means]
    batches = streams(run, training)
    rng = random.Random(run.seed)
    for _ in range(run.steps):
        rows = [rng.randrange(ROWS // 2, 3 * ROWS // 2 + 1) for _ in range(PEERS)]
        for peer in range(PEERS):
            model.zero_grad()
            model.loss(batches[peer].draw(rows[peer])).backward()
            for mean, parameter in zip(means[peer], parameters, strict=True):
                assert parameter.grad is not None
                mean.copy_(parameter.grad)
        average(vectors, [float(count) for count in rows], rng)
        for parameter, mean in zip(parameters, means[0], strict=True):
            parameter.grad = mean.clone()
        optimizer.step()
        schedule.step()
        yield model


def average_parameters(run: Run, training: Training) -> Iterator[MaskedLM]:
    """The first peer's model after each step."""
    models = [make_model(training) for _ in range(PEERS)]
    optimizers = [make_optimizer(training, model.parameters()) for model in models]
    schedules = [make_schedule(training, optimizer) for optimizer in optimizers]
    tensors = [[parameter.detach() for parameter in model.parameters()] for model in models]
    layout = describe(tensors[0], choose_codecs(codec_by_name(run.codec), tensors[0]))
    vectors = [Vector(each, layout) for each in tensors]
    batches = streams(run, training)
    rng = random.Random(run.seed)
    for step in range(1, run.steps + 1):
        for model, optimizer, schedule, batch in zip(models, optimizers, schedules, batches, strict=True):
            model.zero_grad()
            model.loss(batch.draw(ROWS)).backward()
            optimizer.step()
            schedule.step()
        if step % LOCAL_STEPS == 0:
            average(vectors, [1.0] * PEERS, rng)
        yield models[0]


def average_outer_gradients(run: Run, training: Training) -> Iterator[MaskedLM]:
    """The first peer's model after each step."""
    models = [make_model(training) for _ in range(PEERS)]
    optimizers = [make_optimizer(training, model.parameters()) for model in models]
    schedules = [make_schedule(training, optimizer) for optimizer in optimizers]
    tensors = [[parameter.detach() for parameter in model.parameters()] for model in models]
    anchor = [each.clone() for each in tensors[0]]
    gradients = [[torch.zeros_like(each) for each in anchor] for _ in range(PEERS)]
    layout = describe(gradients[0], choose_codecs(codec_by_name(run.codec), gradients[0]))
    vectors = [Vector(each, layout) for each in gradients]
    batches = streams(run, training)
    rng = random.Random(run.seed)
    for step in range(1, run.steps + 1):
        for model, optimizer, schedule, batch in zip(models, optimizers, schedules, batches, strict=True):
            model.zero_grad()
            model.loss(batch.draw(ROWS)).backward()
            optimizer.step()
            schedule.step()
        if step % LOCAL_STEPS == 0:
            for each, mine in zip(tensors, gradients, strict=True):
                for gradient, start, now in zip(mine, anchor, each, strict=True):
                    torch.sub(start, now, out=gradient)
            average(vectors, [1.0] * PEERS, rng)
            for start, gradient, *each in zip(anchor, gradients[0], *tensors, strict=True):
                start.sub_(gradient)
                for now in each:
                    now.copy_(start)
        yield models[0]


WAYS = {
    "gradients": average_gradients,
    "parameters": average_parameters,
    "outer": average_outer_gradients,
}


def streams(run: Run, training: Training) -> list[MaskedBatches]:
    """What each peer learns from."""
    corpus = load_corpus(vocabulary_size=training.vocabulary)
    return [draw_batches(training, corpus, 1000 * run.seed + peer) for peer in range(PEERS)]


def train(run: Run) -> float:
    """The loss at the end."""
    torch.set_num_threads(1)
    training = Training(seed=run.seed)
    judged = held_out(training, load_corpus(vocabulary_size=training.vocabulary))
    models = WAYS[run.what](run, training)
    # Parameters are the same everywhere after an average only.
    every = 4 if run.what == "gradients" else LOCAL_STEPS
    losses = [held_out_loss(model, judged) for step, model in enumerate(models, 1) if judge(run.steps - step, every)]
    return statistics.fmean(losses)


def judge(left: int, every: int) -> bool:
    """Whether the loss counts when so many steps are left."""
    return left % every == 0 and left < 5 * every


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of each run; a multiple of 5")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--what", choices=CASES, nargs="*", default=list(CASES))
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    runs = [
        Run(what, codec.name, seed, options.steps)
        for seed in range(1, options.seeds + 1)
        for what in options.what
        for codec in CASES[what]
    ]
    losses: dict[Run, float] = {}
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for run, loss in zip(runs, pool.map(train, runs), strict=True):
            losses[run] = loss
            print(run, f"{loss:.4f}", file=sys.stderr, flush=True)
    print(f"{PEERS} peers, {options.steps} steps, {options.seeds} seeds: mean (least to most)\n")
    print("| what | codec | loss | times float32's |\n| --- | --- | --- | --- |")
    rows = []
    for what in options.what:
        for codec in CASES[what]:
            mine = [run for run in runs if run.what == what and run.codec == codec.name]
            found = [losses[run] for run in mine]
            ratios = [losses[run] / losses[run._replace(codec="none")] for run in mine]
            rows.append({"what": what, "codec": codec.name, "losses": found, "ratios": ratios})
            print(f"| {what} | `{codec.name}` | {spread(found, 3)} | {spread(ratios, 4)} |")
    if options.json is not None:
        options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, "results": rows}, indent=1))


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and range."""
    return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
