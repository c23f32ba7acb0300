"""What top-k costs in loss: ``python -m benchmarks.top_k``.

Two ranks on this machine train the demo's masked language model (`shoal.demo`) in stage 2 of `shoal.zero`, with AdamW
and the demo's schedule (a warm-up, then one learning rate): first with whole gradients, then with `top_k`. All ways
begin with the same weights and see the same batches; each seed has others. Printed for each way and seed: the held-out
loss at the end, how far it is from that of whole gradients, and the bytes that a rank sends in a step.

With top-k most values are stepped once in 1 / share steps, by the sum of their gradients since. AdamW's step is as long
for a sum as for one gradient: so matrices get the learning rate times `--factor`. And the sum is over many steps
already: so they get `--beta1` and `--beta2` in place of the demo's 0.9 and 0.95, which would be over ten and twenty of
them. In the first fifth of the steps the share goes down from 0.25, to a quarter each time (Lin et al., "Deep Gradient
Compression", 2018).
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import shoal.zero
from shoal.demo.settings import Training, warm_up
from shoal.demo.text import load_corpus
from shoal.demo.training import draw_batches, held_out, held_out_loss, make_model


class Way(NamedTuple):
    """How to train: the share of values that is sent, None for all; a factor of the learning rate; betas."""

    share: float | None
    factor: float
    beta1: float
    beta2: float

    def __str__(self) -> str:
        sent = "whole gradients" if self.share is None else f"top-k {self.share:.0%}"
        return f"{sent}, rate x {self.factor:g}"


def share_at(share: float, step: int, steps: int) -> float:
    """The share that is sent in a step."""
    part = max(steps // 5, 1)
    stages = [0.25 / 4**number for number in range(8) if 0.25 / 4**number > share]
    return share if step >= part or not stages else stages[step * len(stages) // part]


def train(way: Way, training: Training, args: argparse.Namespace) -> tuple[float, float]:
    """The held-out loss at the end, and the bytes that this rank sends in a step."""
    corpus, model = load_corpus(), make_model(training)

    def factory(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [each for each in parameters if each.ndim > 1]
        vectors = [each for each in parameters if each.ndim < 2]
        rate, betas = training.learning_rate, training.betas
        own: dict[str, Any] = {"lr": way.factor * rate, "betas": (way.beta1, way.beta2)}
        groups: list[dict[str, Any]] = [{"params": matrices, **own}, {"params": vectors}]
        return torch.optim.AdamW(groups, lr=rate, betas=betas)

    model, optimizer = shoal.zero.shard(model, factory, stage=2, top_k=way.share)
    end = (lambda step: 2 * (1 - step / args.steps)) if args.decay else (lambda _: 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(warm_up(training, step), end(step)))
    batches = draw_batches(training, corpus, 100 * training.seed + dist.get_rank())
    for step in range(args.steps):
        if way.share is not None:
            optimizer.top_k = share_at(way.share, step, args.steps)
        torch.autograd.backward(model.loss(next(batches)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return held_out_loss(model, held_out(training, corpus)), optimizer.traffic().sent / args.steps


def rank(number: int, path: str, args: argparse.Namespace, ways: list[Way]) -> None:
    """One rank of the group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=number, world_size=args.ranks)
    for seed in args.seeds:
        training = Training(seed=seed, micro_batch=args.batch, learning_rate=args.rate)
        whole = None
        for way in ways:
            loss, sent = train(way, training, args)
            whole = whole or loss
            if number == 0:
                apart = loss / whole - 1
                print(f"seed {seed}  {way!s:28} loss {loss:.4f}  {apart:+.2%}  {sent:10,.0f} bytes", flush=True)
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank in a step (default 4)")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate (default 0.002)")
    parser.add_argument("--whole", type=float, nargs="*", default=[1.0], help="factors of it with whole gradients")
    parser.add_argument("--share", type=float, nargs="*", default=[0.01], help="that is sent with top-k (default 0.01)")
    parser.add_argument("--factor", type=float, default=3.0, help="of matrices with top-k (default 3)")
    parser.add_argument("--beta1", type=float, default=0.5, help="of matrices with top-k (default 0.5)")
    parser.add_argument("--beta2", type=float, default=0.9, help="of matrices with top-k (default 0.9)")
    parser.add_argument("--decay", action="store_true", help="the rate goes down to 0 in the second half")
    args = parser.parse_args(argv)
    ways = [Way(None, factor, *Training().betas) for factor in args.whole]
    ways += [Way(share, args.factor, args.beta1, args.beta2) for share in args.share]
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank, (f"{folder}/store", args, ways), nprocs=args.ranks)


if __name__ == "__main__":
    main()
