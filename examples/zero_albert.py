"""An ALBERT of `transformers` with LAMB, whose state is shared out among the ranks: `shoal` marks the lines for that.

::

    torchrun --nproc-per-node 2 examples/zero_albert.py                # stage 2, beside DistributedDataParallel
    torchrun --nproc-per-node 3 examples/zero_albert.py --stage 1      # as many ranks as you like
    torchrun --nproc-per-node 2 examples/zero_albert.py --optimizer soap

LAMB scales the step of each tensor by the norms of that tensor and of its step, so it needs whole tensors. `shard`
finds this out, and gives each parameter to one rank, the largest first. A machine must have memory for the state of the
fullest rank: it is printed in units of an equal share. The text is Python's own documentation, the task ALBERT's: to
guess words that are hidden.
"""

import argparse
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pytorch_optimizer import load_optimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from transformers import AlbertConfig, AlbertForMaskedLM

import shoal.zero  # shoal
from shoal.demo.text import load_corpus
from shoal.demo.training import MaskedBatches
from shoal.zero.parameters import unique_bytes

BATCH, SEQUENCE, MB = 8, 64, 1e6


def make_optimizer(model, name, parameters):
    """The optimizer, with weight decay for matrices and without for biases and norms."""
    vectors = {id(each) for each in model.parameters() if each.dim() <= 1}
    listed = list(parameters)
    groups = [
        {"params": [each for each in listed if id(each) not in vectors], "weight_decay": 0.01},
        {"params": [each for each in listed if id(each) in vectors], "weight_decay": 0.0},
    ]
    kind: Any = load_optimizer(name)
    return kind(groups, lr=5e-3)


def train(stage, corpus, args):
    """Train with shoal in a stage, or with DistributedDataParallel (0); returns a line of the table."""
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=len(corpus.tokenizer),
        embedding_size=args.width // 4,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        intermediate_size=4 * args.width,
        max_position_embeddings=SEQUENCE,
    )
    model = AlbertForMaskedLM(config)
    make = partial(make_optimizer, model, args.optimizer)
    wrapped: torch.nn.Module = model
    if stage:
        model, optimizer = shoal.zero.shard(model, make, stage=stage)  # shoal
    else:
        wrapped, optimizer = DistributedDataParallel(model), make(model.parameters())
    batches = MaskedBatches(corpus, batch_size=BATCH, sequence=SEQUENCE, seed=dist.get_rank())
    losses = []
    for _ in range(args.steps):
        batch = next(batches)
        labels = torch.full_like(batch.inputs, -100)
        labels.view(-1)[batch.chosen] = batch.targets
        loss = wrapped(input_ids=batch.inputs, labels=labels).loss
        loss.backward()
        if stage:
            optimizer.clip_grad_norm_(1.0)  # shoal
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    last = torch.stack(losses[-10:]).mean()
    dist.all_reduce(last)
    state = [each for each in tree_leaves(list(optimizer.state.values())) if isinstance(each, torch.Tensor)]
    kept = torch.tensor([optimizer.memory().state if stage else unique_bytes(state)])
    every = [torch.zeros_like(kept) for _ in range(dist.get_world_size())]
    dist.all_gather(every, kept)
    return [int(each) for each in every], float(last) / dist.get_world_size(), model


def main():
    """Train without and with shoal, and print what the ranks keep, and how well it went."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--stage", type=int, choices=[1, 2], default=2, help="of ZeRO (default 2)")
    parser.add_argument("--optimizer", default="lamb", help="of pytorch_optimizer (default lamb)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="of the hidden states, a multiple of 64 (default 256)")
    args = parser.parse_args()
    alone = {} if "RANK" in os.environ else {"init_method": "tcp://127.0.0.1:0", "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)  # type: ignore[arg-type]
    chief, corpus, ranks = dist.get_rank() == 0, load_corpus(), dist.get_world_size()
    for stage in (0, args.stage):
        kept, loss, model = train(stage, corpus, args)
        if chief and not stage:
            numels = [each.numel() for each in model.parameters()]
            print(
                f"ALBERT with {sum(numels):,} parameters, the largest of {max(numels):,}; {args.optimizer}; {ranks} "
                f"ranks, {args.steps} steps"
            )
            print("            MB of optimizer state, by rank  | fullest / share | loss, 10 last", flush=True)
        if chief:
            listed = " ".join(f"{each / MB:.2f}" for each in kept)
            fullest = f"{max(kept) * ranks / sum(kept):.3f}" if stage else ""
            name = f"stage {stage}" if stage else "DDP"
            print(f"{name:8} {listed:>34}  | {fullest:>15} | {loss:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
