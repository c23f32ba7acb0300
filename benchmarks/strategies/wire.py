"""What a merge sends, over the law: ``python -m benchmarks.strategies.wire``, on virtual time.

Four averagers of shoal on a simulated network average tensors of the shapes of the study's model, and of a model of a
million parameters. Printed are the bytes of the law, as `bytes_per_token` counts them; the bytes of values that a peer
sends over it; and all bytes that a peer sends from its search for a group to the verdict over it, without TLS. Of a
small model most of these are messages about the round.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

import msgspec
import torch

from benchmarks.strategies.task import PEERS, NextToken
from benchmarks.wire_count import Sent, counted
from shoal.averaging import AveragerSettings
from shoal.compression import codec_by_name
from shoal.sim import run
from tests.sim.averaging_kit import SETTINGS, Trial

ROUNDS = 3
PART_BYTES = AveragerSettings().part_size_bytes
CODECS = (
    "none",
    "feedback:blockwise:4:64",
    "feedback:blockwise:2:64",
    "feedback:topk:0.03:2",
    "feedback:topk:0.2:2",
)


async def play(codec: str, shapes: Sequence[torch.Size], sent: Sent) -> None:
    """Some rounds of all peers; what they send is counted."""
    settings = msgspec.structs.replace(SETTINGS, part_size_bytes=PART_BYTES)
    trial = Trial(settings=settings, compression=codec_by_name(codec))
    chance = torch.Generator().manual_seed(1)
    for number in range(PEERS):
        await trial.add(f"p{number}", [torch.randn(shape, generator=chance) for shape in shapes])
    sent.clear()
    for _ in range(ROUNDS):
        await asyncio.gather(*(trial.step(f"p{number}") for number in range(PEERS)))
    await trial.close()


def line(codec: str, name: str, shapes: Sequence[torch.Size]) -> str:
    """Of the table."""
    with counted() as sent:
        run(play(codec, shapes, sent), seed=1, max_turns=10**8)
    sizes = [shape.numel() for shape in shapes]
    law = 2 * (PEERS - 1) / PEERS * codec_by_name(codec).tensors_bytes(sizes, torch.float32)
    each = ROUNDS * PEERS * law
    values, everything = sent.bytes["values"] / each, sum(sent.bytes.values()) / each
    return f"| {codec} | {name} | {law:,.0f} | {values:.3f} | {everything:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", default=CODECS, help="(default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = [parameter.shape for parameter in NextToken().parameters()]
    models = {"the study's": model, "10^6 parameters": [torch.Size((1000, 100))] * 10}
    print("| codec | model | law, bytes | values / law | all / law |\n| --- | --- | --- | --- | --- |")
    for codec in options.codecs:
        for name, shapes in models.items():
            print(line(codec, name, shapes), flush=True)


if __name__ == "__main__":
    main()
