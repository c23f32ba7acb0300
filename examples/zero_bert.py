"""A BERT of `transformers`, trained under any stage of ZeRO: the lines marked `shoal` are all that is new.

::

    torchrun --nproc-per-node 2 examples/zero_bert.py --stage 2      # two ranks share what training keeps
    torchrun --nproc-per-node 2 examples/zero_bert.py --stage all    # every stage in turn, and a table
    python examples/zero_bert.py --stage 1                           # one process, the same script

Stage 0 is PyTorch's DistributedDataParallel; `3+ckpt` is stage 3 with activation checkpoints, which keep only the input
of each layer for the backward pass; `2+disk` is stage 2 with the optimizer's state and gradients in files. The text is
Python's own documentation, the task BERT's: to guess words
that are hidden. All stages begin with the same weights and see the same batches, so they end with the same loss.
"""

import argparse
import os
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

import shoal.zero  # shoal
from shoal.demo.text import load_corpus
from shoal.demo.training import MaskedBatches
from shoal.zero.parameters import unique_bytes

# BERT's logits are a view; FSDP2 warns that changing them in place would go wrong, which nobody does here.
warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
warnings.filterwarnings(
    "ignore", "`gradient_checkpointing_enable` is deprecated", FutureWarning
)  # the name in all of 5

BATCH, SEQUENCE, MB = 8, 64, 1e6
STAGES = ["0", "1", "2", "3", "3+ckpt", "2+disk"]


def adamw(parameters):
    """The optimizer, of whatever parameters it is given."""
    return torch.optim.AdamW(parameters, lr=5e-4)


def train(name, corpus, args, device):
    """Train one stage; returns a line of the table."""
    stage = int(name[0])
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(corpus.tokenizer),
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        intermediate_size=4 * args.width,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        use_cache=False,
    )
    model = BertForMaskedLM(config).to(device)
    if "ckpt" in name:
        model.gradient_checkpointing_enable()
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    sample = {"input_ids": tokens, "labels": tokens}
    activations = shoal.zero.estimate(model, sample=sample)[0].activations
    wrapped: torch.nn.Module = model
    parameters = sum(each.numel() for each in model.parameters())
    if stage == 0:
        wrapped, optimizer = DistributedDataParallel(model), adamw(model.parameters())
    else:
        folder = tempfile.gettempdir() if "disk" in name else None
        model, optimizer = shoal.zero.shard(model, adamw, stage=stage, offload=folder)  # shoal
    batches = MaskedBatches(corpus, batch_size=BATCH, sequence=SEQUENCE, seed=dist.get_rank())
    losses, seconds, memory = [], [], (0, 0, 0)
    for _ in range(args.steps):
        began = time.perf_counter()
        batch = next(batches)
        labels = torch.full_like(batch.inputs, -100)
        labels.view(-1)[batch.chosen] = batch.targets
        loss = wrapped(input_ids=batch.inputs.to(device), labels=labels.to(device)).loss
        loss.backward()
        memory = held(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.detach())
    ranks = dist.get_world_size()
    last = torch.stack(losses[-10:]).mean()
    dist.all_reduce(last)
    if stage == 0:
        sent = shoal.zero.estimate(model, ranks, stage=0)[0].sent
    else:
        traffic = optimizer.traffic()
        sent = traffic.sent / traffic.steps
    return parameters, memory, activations, sent, sorted(seconds)[len(seconds) // 2], float(last) / ranks


def held(model, optimizer):
    """Bytes of parameters, gradients and optimizer state on this rank."""
    if isinstance(optimizer, shoal.zero.ShardedOptimizer):
        return optimizer.memory()[:3]
    parameters = list(model.parameters())
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    gradients = [each.grad for each in parameters if each.grad is not None]
    return unique_bytes(parameters), unique_bytes(gradients), unique_bytes(state)


def main():
    """Train the stages that were asked for, and print what each took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--stage", choices=[*STAGES, "all"], default="all", help="of ZeRO (default all)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="of the hidden states, a multiple of 64 (default 256)")
    args = parser.parse_args()
    device = torch.device("cpu")
    if "RANK" in os.environ:  # torchrun
        if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    else:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    chief, corpus, shown = dist.get_rank() == 0, load_corpus(), False
    for stage in STAGES if args.stage == "all" else [args.stage]:
        parameters, memory, activations, sent, seconds, loss = train(stage, corpus, args, device)
        if chief and not shown:
            print(f"BERT with {parameters / 1e6:.1f} M parameters, {dist.get_world_size()} ranks, {args.steps} steps")
            print("         MB per rank after a backward pass        |   MB kept of |  MB sent |   seconds |     loss,")
            print(
                "stage    parameters  gradients  optimizer    sum  |  activations | per step |  per step |  10 last",
                flush=True,
            )
            shown = True
        if chief:
            held_mb = [each / MB for each in memory]
            print(
                f"{stage + ' (DDP)' * (stage == '0'):7}  {held_mb[0]:10.1f} {held_mb[1]:10.1f} {held_mb[2]:10.1f} "
                f"{sum(held_mb):6.1f}  | {activations / MB:12.1f} | {sent / MB:8.1f} | {seconds:9.3f} | {loss:8.5f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
