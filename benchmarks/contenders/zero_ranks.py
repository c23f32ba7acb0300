"""The ranks of one engine of `benchmarks.zero`: trains a small GPT, prints what each rank measured as JSON.

Bytes are counted twice: what each rank gave its TCP sockets, which the kernel tells of each; and what the loopback
device has sent, with headers and what TCP thought lost and sent again. Nothing else may use that device: run it in a
network namespace of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import shoal.zero
from shoal.zero import shard  # imported before memory is looked at, as the code of other engines

BATCH, TOKENS = 2, 64
LEARNING_RATE = 1e-3


class Shape(NamedTuple):
    """Of a model.

    Attributes:
        vocabulary: tokens.
        width: of the hidden states.
        layers: blocks.
    """

    vocabulary: int
    width: int
    layers: int

    @classmethod
    def of(cls, parameters: float) -> Shape:
        """About as large as asked for."""
        vocabulary, width = (8192, 512) if parameters < 60e6 else (30522, 768)
        if parameters < 8e6:
            vocabulary, width = 1024, 128
        return cls(vocabulary, width, max(1, round((parameters - vocabulary * width) / (12 * width * width))))


class Block(torch.nn.Module):
    """Attention and a feed-forward layer, each behind its norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (batch, tokens, width)."""
        batch, tokens, width = hidden.shape
        query, key, value = self.qkv(self.norm1(hidden)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        result: torch.Tensor = hidden + self.down(torch.nn.functional.gelu(self.up(self.norm2(hidden))))
        return result


class Gpt(torch.nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(shape.vocabulary, shape.width)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = torch.nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.norm = torch.nn.LayerNorm(shape.width)
        self.head = torch.nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch, tokens, vocabulary)."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class Made(NamedTuple):
    """A model in the hands of an engine.

    Attributes:
        model: to be called.
        optimizer: steps it.
        backward: of a loss; None for torch's.
    """

    model: torch.nn.Module
    optimizer: Any
    backward: Callable[[torch.Tensor], object] | None = None


def adam(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all engines."""
    return torch.optim.Adam(parameters, lr=LEARNING_RATE)


def ddp(model: Gpt) -> Made:
    """Everything on every rank."""
    return Made(DistributedDataParallel(model, gradient_as_bucket_view=True), adam(model.parameters()))


def zero_redundancy(model: Gpt) -> Made:
    """Stage 1 of PyTorch."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Made(wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=LEARNING_RATE))


def fsdp2(stage: int) -> Callable[[Gpt], Made]:
    """Stage 2 or 3 of PyTorch."""

    def make(model: Gpt) -> Made:
        for block in [*model.blocks, model]:
            fully_shard(block, reshard_after_forward=stage == 3)
        return Made(model, adam(model.parameters()))

    return make


def ours(stage: int) -> Callable[[Gpt], Made]:
    """shoal.zero."""
    return lambda model: Made(*shard(model, adam, stage=stage))


def deepspeed(stage: int) -> Callable[[Gpt], Made]:
    """DeepSpeed's stages, in its environment; it clips gradients unless it is told not to."""

    def make(model: Gpt) -> Made:
        import deepspeed as library  # type: ignore[import-not-found]

        engine, *_ = library.initialize(
            model=model,
            optimizer=adam(model.parameters()),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": BATCH,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                # Without the last two, a model of this size would stay gathered all through stage 3.
                "zero_optimization": {"stage": stage, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
            },
        )
        return Made(engine, engine, engine.backward)

    return make


ENGINES: Mapping[str, Callable[[Gpt], Made]] = {
    "DDP": ddp,
    "ZeroRedundancyOptimizer": zero_redundancy,
    "FSDP2-2": fsdp2(2),
    "FSDP2-3": fsdp2(3),
    "shoal-1": ours(1),
    "shoal-2": ours(2),
    "shoal-3": ours(3),
    "DeepSpeed-1": deepspeed(1),
    "DeepSpeed-2": deepspeed(2),
    "DeepSpeed-3": deepspeed(3),
}


def status(field: str) -> int:
    """A figure of /proc/self/status, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def tcp_sockets() -> Iterator[socket.socket]:
    """Copies of all TCP sockets of this process, also of those that are not Python's."""
    for each in list(Path("/proc/self/fd").iterdir()):
        try:
            if each.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(each.name))) as sock:
                    if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                        yield sock
        except OSError:
            continue  # closed meanwhile: the folder itself, for one


def given() -> int:
    """What this process has given its sockets to send, bytes, each counted once."""
    total = 0
    for sock in tcp_sockets():
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        sent_ever, sent_again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
        total += sent_ever - sent_again
    return total


def on_device(device: str) -> int:
    """What a network device has sent, bytes."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == device:
            return int(figures.split()[8])
    return 0


def held(model: torch.nn.Module, optimizer: Any) -> dict[str, int]:
    """Bytes of unique storages between backward pass and step; empty for DeepSpeed, which keeps them to itself."""
    from shoal.zero.parameters import unique_bytes  # here, so that `benchmarks.turns` runs older code, which lacks it

    if isinstance(optimizer, shoal.zero.ShardedOptimizer):
        found = optimizer.memory()
        return {"parameters": found.parameters, "gradients": found.gradients, "state": found.state}
    if optimizer is model:
        return {}
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    parameters = list(model.parameters())
    state = [value for entry in inner.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return {
        "parameters": unique_bytes(parameters),
        "gradients": unique_bytes(each.grad for each in parameters if each.grad is not None),
        "state": unique_bytes(state),
    }


def whole(engine: str, model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """All parameters, in the order of their names."""
    if engine == "DeepSpeed-3":
        import deepspeed as library

        for _, parameter in sorted(model.named_parameters()):
            with library.zero.GatheredParameters(parameter):
                yield parameter.detach().clone()
    else:
        weights = shoal.zero.full_state_dict(model)
        names = {id(each): name for name, each in model.named_parameters()}  # tied ones once
        yield from (weights[name] for name in sorted(names.values()))


def train(rank: int, args: argparse.Namespace, results: Any) -> None:
    """One rank."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=args.master, MASTER_PORT=str(args.port))
    device = "lo" if args.rank is None else next(name for _, name in socket.if_nameindex() if name != "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = device
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.ranks))  # DeepSpeed reads them
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    torch.manual_seed(1)
    base = status("VmRSS")
    shape = Shape.of(args.params)
    model = Gpt(shape)
    count = sum(each.numel() for each in model.parameters())
    wrapped, optimizer, backward = ENGINES[args.engine](model)
    made = torch.Generator().manual_seed(rank)
    memory: dict[str, int] = {}

    def step() -> None:
        tokens = torch.randint(0, shape.vocabulary, (BATCH, TOKENS + 1), generator=made)
        logits = wrapped(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (backward or torch.autograd.backward)(loss)
        memory.update(held(wrapped, optimizer))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(args.warm_up):
        step()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before, given_before, seconds = on_device(device), given(), []
    dist.barrier()
    busy = time.process_time()
    for _ in range(args.steps):
        dist.barrier()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    busy = time.process_time() - busy
    dist.barrier()
    total, mine, peak = on_device(device) - before, given() - given_before, status("VmHWM")
    digest = hashlib.sha256(b"".join(weights.numpy().tobytes() for weights in whole(args.engine, model))).hexdigest()
    results[rank] = json.dumps(
        {
            "parameters": count,
            "seconds": seconds,
            "cpu": busy / args.steps,
            "sent": mine / args.steps,
            "on_device": total / (args.ranks if args.rank is None else 1) / args.steps,
            "peak": peak - base,
            "held": memory,
            "weights": digest,
        }
    )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--params", type=float, required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--rank", type=int, help="only this one, which has a namespace of its own (default: all)")
    parser.add_argument("--master", default="127.0.0.1", help="the address of rank 0")
    parser.add_argument("--port", type=int, help="of rank 0 (default: a free one)")
    args = parser.parse_args()
    if args.rank is not None:
        found: dict[int, str] = {}
        train(args.rank, args, found)
        print(json.dumps([json.loads(found[args.rank])]))
        return
    if args.port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            args.port = probe.getsockname()[1]
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        spawn(train, (args, results), nprocs=args.ranks)
        print(json.dumps([json.loads(results[rank]) for rank in range(args.ranks)]))


if __name__ == "__main__":
    main()
