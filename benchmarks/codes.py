"""Which codes 8, 4 and 2 bits and top-k were chosen from, and how exact they are: ``python -m benchmarks.codes``.

Prints the rms error, relative to that of the values, on 262,144 values of several kinds, and on outer gradients of the
demo's model: its parameters after 60 steps of AdamW less those after 65 and after 90. Candidates, all with one bfloat16
scale for each block: shoal's own (`BlockwiseQuantization`).

- 8 bits: the code whose steps grow with the value, of Dettmers et al. 2022, which bitsandbytes has (decades from 1e-6
  to 1, the larger ones divided more finely).
- 4 bits: NF4, quantiles of the normal distribution (Dettmers et al. 2023), and 15 equal steps.
- 2 bits: four levels in equal steps from minus to plus the largest absolute value; levels like shoal's with a scale
  that has no sign; three levels of which one is 0, and four of which none is, with a *fitted* scale, which has the
  least squared error (two steps of Lloyd's method) and is not rounded.
- Top-k: shoal's own, with values in bfloat16, 4 and 2 bits; 2 bits in equal steps; signs with the mean of each block of
  64; and as many of each chunk of 4,096 elements, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from shoal.compression import BlockwiseQuantization, TopKCompression
from shoal.demo.settings import Training
from shoal.demo.text import load_corpus
from shoal.demo.training import draw_batches, make_model, make_optimizer, make_schedule

COUNT = 1 << 18
NF4 = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)


def growing() -> torch.Tensor:
    """256 numbers: in decade i of 7 the 2^i middles of equal intervals between a tenth of it and all, both signs."""
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2**decade + 1)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
        levels += [*middles, *(-middle for middle in middles)]
    return torch.tensor(sorted(levels))


def kinds() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(COUNT, generator=generator)
    uniform = torch.rand(COUNT, generator=generator) - 0.5
    chi = torch.randn(3, COUNT, generator=generator).square().sum(dim=0)
    outliers = torch.where(torch.arange(COUNT) % 1000 == 500, normal * 1000, normal)
    return {
        "normal": normal,
        "Laplace": -uniform.sign() * (1 - 2 * uniform.abs()).log(),
        "Student t, 3": torch.randn(COUNT, generator=generator) / (chi / 3).sqrt(),
        "squares of normal": normal.square(),
        "signs": normal.sign(),
        "one in 1000 is 1000 times as large": outliers,
        **outer_gradients(),
    }


def outer_gradients() -> dict[str, torch.Tensor]:
    """What 5 and 30 steps have changed."""
    training = Training()
    corpus = load_corpus(vocabulary_size=training.vocabulary)
    model = make_model(training)
    optimizer = make_optimizer(training, model.parameters())
    schedule = make_schedule(training, optimizer)
    batches = draw_batches(training, corpus, training.seed)
    found = []
    for step in range(1, 91):
        model.zero_grad()
        torch.autograd.backward(model.loss(batches.draw(training.micro_batch)))
        optimizer.step()
        schedule.step()
        if step in (60, 65, 90):
            found.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    anchor, few, many = (each[: each.numel() // 4096 * 4096] for each in found)
    return {"outer gradients, 5 steps": anchor - few, "outer gradients, 30 steps": anchor - many}


def nearest(values: torch.Tensor, levels: torch.Tensor, block: int) -> torch.Tensor:
    """The nearest level in each block, scaled to its largest absolute value."""
    blocks = values.view(-1, block)
    largest = levels.abs().max()
    scales = (blocks.abs().amax(dim=1, keepdim=True) / largest).to(torch.bfloat16).to(torch.float32)
    return (levels[torch.bucketize(blocks / scales, (levels[1:] + levels[:-1]) / 2)] * scales).view(-1)


def fitted(values: torch.Tensor, levels: torch.Tensor, block: int) -> torch.Tensor:
    """The nearest level in each block, with the scale that fits best."""
    blocks = values.view(-1, block)
    scales = blocks.square().mean(dim=1, keepdim=True).sqrt()
    for _ in range(3):
        codes = levels[torch.bucketize(blocks / scales.clamp(min=1e-30), (levels[1:] + levels[:-1]) / 2)]
        made = codes * scales
        scales = (blocks * codes).sum(dim=1, keepdim=True) / codes.square().sum(dim=1, keepdim=True).clamp(min=1e-30)
    return made.view(-1)


def own(values: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    codec = BlockwiseQuantization(bits, block)
    return codec.decode(codec.encode(values), values.numel(), values.dtype)


def largest(values: torch.Tensor, fraction: float, bits: int | None) -> torch.Tensor:
    codec = TopKCompression(fraction, bits=bits)
    return codec.decode(codec.encode(values), values.numel(), values.dtype)


def largest_of_chunks(values: torch.Tensor, fraction: float) -> torch.Tensor:
    chunks = values.view(-1, 4096)
    chosen = chunks.abs().topk(math.ceil(fraction * 4096), dim=1).indices
    return torch.zeros_like(chunks).scatter_(1, chosen, chunks.gather(1, chosen)).view(-1)


def in_blocks(values: torch.Tensor, fraction: float, coded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The largest, with absolute values that are coded in blocks of 64, and the last few as they are."""
    found = largest(values, fraction, None).nonzero().view(-1)
    sizes = values[found].abs()
    whole = sizes.numel() // 64 * 64
    sizes[:whole] = coded(sizes[:whole].view(-1, 64)).reshape(-1)
    return torch.zeros_like(values).index_copy_(0, found, sizes * values[found].sign())


def in_equal_steps(blocks: torch.Tensor) -> torch.Tensor:
    low, high = blocks.amin(dim=1, keepdim=True), blocks.amax(dim=1, keepdim=True)
    return torch.where(2 * blocks < low + high, 3 * low + high, low + 3 * high) / 4


def in_the_mean(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.mean(dim=1, keepdim=True).expand_as(blocks)


def rms(error: torch.Tensor) -> float:
    return math.sqrt(float(error.double().square().mean()))


def main() -> None:
    torch.set_num_threads(1)
    steps, dynamic = torch.arange(-7.0, 8.0), growing()
    tables: dict[str, dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "8 bits": {
            **{f"equal, {block}": partial(own, bits=8, block=block) for block in (64, 256, 4096)},
            **{f"growing, {block}": partial(nearest, levels=dynamic, block=block) for block in (64, 256, 4096)},
        },
        "4 bits, blocks of 64": {
            "shoal": lambda x: own(x, 4, 64),
            "NF4": lambda x: nearest(x, torch.tensor(NF4), 64),
            "15 equal": lambda x: nearest(x, steps, 64),
        },
        "2 bits, blocks of 64": {
            "shoal": lambda x: own(x, 2, 64),
            "-1, -1/3, 1/3, 1": lambda x: nearest(x, torch.tensor([-3.0, -1.0, 1.0, 3.0]), 64),
            "-1/2, 0, 1/2, 1": lambda x: nearest(x, torch.tensor([-1.0, 0.0, 1.0, 2.0]), 64),
            "-1, 0, 1, fitted": lambda x: fitted(x, torch.tensor([-1.0, 0.0, 1.0]), 64),
            "-1, -0.3, 0.3, 1, fitted": lambda x: fitted(x, torch.tensor([-1.0, -0.3, 0.3, 1.0]), 64),
        },
    }
    for fraction in (0.01, 0.03):
        tables[f"top-k, {fraction}"] = {
            "bfloat16": partial(largest, fraction=fraction, bits=None),
            "4 bits": partial(largest, fraction=fraction, bits=4),
            "2 bits": partial(largest, fraction=fraction, bits=2),
            "2 bits, equal": partial(in_blocks, fraction=fraction, coded=in_equal_steps),
            "signs": partial(in_blocks, fraction=fraction, coded=in_the_mean),
            "of chunks": partial(largest_of_chunks, fraction=fraction),
        }
    for title, candidates in tables.items():
        print(f"\n| {title} | {' | '.join(candidates)} |\n| --- |{' --- |' * len(candidates)}")
        for kind, values in kinds().items():
            errors = [f"{rms(code(values) - values) / rms(values):.4f}" for code in candidates.values()]
            print(f"| {kind} | {' | '.join(errors)} |")


if __name__ == "__main__":
    main()
