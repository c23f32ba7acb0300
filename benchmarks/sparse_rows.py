"""What a round sends of an embedding's gradients: ``python -m benchmarks.sparse_rows``.

Two peers on this machine train an embedding of 20,000 rows of 64 numbers, with `sparse=True`, and a small head: Adam,
100 steps of 2 x 256 tokens that are drawn as words are (Zipf), each from a seed of its own. `shoal.GradientAverager`
averages. Printed for each way to send: the bytes that one peer sends in a round, the mean loss of the last 20 steps,
and how many rows a step of both touches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

import shoal
from shoal.compression import (
    BlockwiseQuantization,
    CompressionBase,
    ErrorFeedback,
    Float16Compression,
    NoCompression,
    SizeAdaptiveCompression,
    TopKCompression,
)
from shoal.events import Event, RoundFinished

ROWS, WIDTH, OUTPUTS, BATCH, STEPS, LAST = 20_000, 64, 16, 256, 100, 20


def only_the_table(codec: CompressionBase) -> CompressionBase:
    """The small tensors go as they are."""
    return SizeAdaptiveCompression(threshold=100_000, less=NoCompression(), greater_equal=codec)


Make = Callable[..., shoal.GradientAverager]
WAYS: dict[str, Make] = {
    "as it is": shoal.GradientAverager,
    "Float16Compression()": partial(shoal.GradientAverager, compression=Float16Compression()),
    "BlockwiseQuantization()": partial(shoal.GradientAverager, compression=BlockwiseQuantization()),
    "TopKCompression(0.02), with feedback": partial(
        shoal.GradientAverager, compression=only_the_table(ErrorFeedback(TopKCompression(0.02)))
    ),
    "PowerSGDGradientAverager, rank 4": partial(shoal.PowerSGDGradientAverager, averager_rank=4),
}


def words(number: int, draw: torch.Generator) -> torch.Tensor:
    """Row numbers: the first ones often, the last ones seldom."""
    return (ROWS ** torch.rand(number, generator=draw)).long() - 1


def train(dht: shoal.DHT, peer: int, name: str, make: Make) -> tuple[float, float]:
    """The mean loss of the last steps, and the bytes that are sent in a round."""
    torch.manual_seed(0)
    table, head = torch.nn.Embedding(ROWS, WIDTH, sparse=True), torch.nn.Linear(WIDTH, OUTPUTS)
    goal, draw = torch.randn(ROWS, OUTPUTS), torch.Generator().manual_seed(peer)
    parameters, sent, losses = [*table.parameters(), *head.parameters()], list[int](), list[float]()

    def note(event: Event) -> None:
        if isinstance(event, RoundFinished) and event.prefix == name:
            sent.append(event.bytes_sent)

    dht.events.subscribe(note)
    inner = torch.optim.Adam(parameters, lr=0.05)
    with make(parameters, dht=dht, prefix=name, start=True, target_group_size=2) as averager:
        for _ in range(STEPS):
            inner.zero_grad()
            inputs = words(BATCH, draw)
            loss = torch.nn.functional.mse_loss(head(table(inputs)), goal[inputs])
            torch.autograd.backward(loss)
            averager.accumulate_grads_(BATCH)
            averager.step(timeout=60)
            with averager.use_averaged_gradients():
                inner.step()
            losses.append(loss.item())
    return sum(losses[-LAST:]) / LAST, sum(sent) / len(sent)


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    torch.set_num_threads(1)
    drawn = [len(words(2 * BATCH, torch.Generator().manual_seed(seed)).unique()) for seed in range(20)]
    touched = sum(drawn) / len(drawn)
    print(f"{touched:.0f} of {ROWS} rows in a step, {touched * WIDTH * 4:.0f} bytes")
    for number, (name, make) in enumerate(WAYS.items()):
        with (
            shoal.DHT(start=True) as first,
            shoal.DHT([first.invite()], start=True) as second,
            ThreadPoolExecutor() as threads,
        ):
            pair: Any = [threads.submit(train, dht, i, f"way-{number}", make) for i, dht in enumerate((first, second))]
            (loss, sent), (other, _) = (each.result() for each in pair)
        print(f"{name:40} {sent:10.0f} bytes  loss {(loss + other) / 2:.4f}", flush=True)


if __name__ == "__main__":
    main()
