"""What ranks do with activations: checkpoints, offload, partitioning; each function runs on every rank."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shoal.zero
from shoal.zero.parameters import local

STEPS = 3
TOKENS, WORDS, WIDTH = 8, 32, 16
LAYERS, STATES, INNER = 3, 50, 96
"""Of models in tensor parallelism: how many layers, the width of hidden states, and that of the sharded ones within."""

# ----------------------------------------------------------------------------------- checkpoints and offload, by torch


def gpt2() -> torch.nn.Module:
    """Of transformers, with dropout; takes tokens."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=TOKENS,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config)
    return model


class Encoder(torch.nn.Module):
    """`torch.nn.TransformerEncoder` between an embedding and a head; dropout, and layers within layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch, tokens, words)."""
        logits: torch.Tensor = self.head(self.encoder(self.embedding(input_ids)))
        return logits


def with_checkpoints(model: torch.nn.Module, *, reentrant: bool) -> None:
    """Recompute each layer in the backward pass, as users write it."""
    if isinstance(model, Encoder):
        how = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=how),
            check_fn=lambda each: isinstance(each, torch.nn.TransformerEncoderLayer),
        )
        return
    # The older name, which early releases of transformers 5 have, warns in later ones.
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def trained(stage: int, which: str, how: str, folder: str) -> dict[str, torch.Tensor]:
    """The weights after some steps, with activations kept in some way."""
    torch.manual_seed(0)
    model = gpt2() if which == "gpt2" else Encoder()
    if "checkpoints" in how:
        with_checkpoints(model, reentrant="reentrant" in how)
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.AdamW(each, lr=1e-2), stage=stage)
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    if "CPU" in how:
        around = save_on_cpu
    elif "file" in how:
        around = partial(shoal.zero.save_on_disk, folder)
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank())  # of dropout, too
        tokens = torch.randint(0, WORDS, (2, TOKENS))
        with around():
            found = model(input_ids=tokens)
            logits = found if isinstance(found, torch.Tensor) else found.logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in shoal.zero.full_state_dict(model).items()}


WAYS = (
    "checkpoints",
    "reentrant checkpoints",
    "on the CPU",
    "in a file",
    "checkpoints, on the CPU",
    "checkpoints, in a file",
)


def apart(stage: int, which: str, folder: str) -> dict[str, float]:
    """How far each way's weights are from those without; and how far these went."""
    plain = trained(stage, which, "plain", folder)
    torch.manual_seed(0)
    first = (gpt2() if which == "gpt2" else Encoder()).state_dict()

    def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
        assert one.keys() == other.keys()
        return max(float((one[name] - value).abs().max()) for name, value in other.items())

    found = {how: distance(trained(stage, which, how, folder), plain) for how in WAYS}
    return found | {"moved": distance(plain, first)}


# --------------------------------------------------------------------------------------------------- tensor parallelism


class _Copied(torch.autograd.Function):
    """The same on all ranks; its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Added(torch.autograd.Function):
    """The sum over the ranks; its gradient is the same on all."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = value.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class ParallelBlock(torch.nn.Module):
    """A norm, a linear layer cut by columns, GELU, one cut by rows; dropout that all ranks draw alike."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, ranks, rank = group, group.size(), group.rank()
        wide, narrow = torch.nn.Linear(STATES, INNER), torch.nn.Linear(INNER, STATES)
        self.norm, self.columns = torch.nn.LayerNorm(STATES), torch.nn.Linear(STATES, INNER // ranks)
        self.rows, self.bias = torch.nn.Linear(INNER // ranks, STATES, bias=False), narrow.bias
        with torch.no_grad():
            self.columns.weight.copy_(wide.weight.chunk(ranks)[rank])
            self.columns.bias.copy_(wide.bias.chunk(ranks)[rank])
            self.rows.weight.copy_(narrow.weight.chunk(ranks, 1)[rank])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (batch, tokens, STATES)."""
        inner = _Copied.apply(self.norm(hidden), self.group)  # type: ignore[no-untyped-call]
        found = _Added.apply(self.rows(torch.nn.functional.gelu(self.columns(inner))), self.group)  # type: ignore[no-untyped-call]
        result: torch.Tensor = hidden + torch.nn.functional.dropout(found + self.bias, 0.1)
        return result


class Parallel(torch.nn.Module):
    """An embedding, some blocks in tensor parallelism, and a head."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, STATES)
        self.layers = torch.nn.ModuleList(ParallelBlock(group) for _ in range(LAYERS))
        self.head = torch.nn.Linear(STATES, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch, tokens, words)."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def grid(across: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The group of this rank for tensor parallelism, of so many ranks that follow each other, and that for data."""
    ranks = dist.get_world_size()
    rows = [list(range(first, first + across)) for first in range(0, ranks, across)]
    columns = [list(range(first, ranks, across)) for first in range(across)]
    inner, _ = dist.new_subgroups_by_enumeration(rows)  # type: ignore[no-untyped-call]
    outer, _ = dist.new_subgroups_by_enumeration(columns)  # type: ignore[no-untyped-call]
    return inner, outer


def loss_of(model: torch.nn.Module, seed: int) -> torch.Tensor:
    """Of samples, and of a dropout, that depend on the seed alone."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, WORDS, (4, TOKENS))
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def parallel(
    stage: int, across: int, how: str, partitioned: bool
) -> tuple[dict[str, torch.Tensor], tuple[int, ...], float]:
    """Train with tensor parallelism and a stage of ZeRO (0: none) across it; weights, counts, bytes sent in a step."""
    inner, outer = grid(across)
    torch.manual_seed(0)
    model = Parallel(inner)
    layers = list(model.layers)
    if "checkpoints" in how:
        kind = CheckpointImpl.REENTRANT if "reentrant" in how else CheckpointImpl.NO_REENTRANT
        wrap = partial(checkpoint_wrapper, checkpoint_impl=kind)
        apply_activation_checkpointing(model, wrap, check_fn=lambda each: isinstance(each, ParallelBlock))
    if "within" not in how:  # else checkpoints save the inputs of layers before these are called
        layers = list(model.layers)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage:
        model, optimizer = shoal.zero.shard(
            model, lambda each: torch.optim.AdamW(each, lr=1e-2), stage=stage, group=outer
        )
    context: Any = contextlib.nullcontext()
    if partitioned:
        context = shoal.zero.partition_activations(layers, inner, offload="CPU" in how)
    for step in range(STEPS):
        with context:
            loss = loss_of(model, 100 * step + outer.rank())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = shoal.zero.full_state_dict(model) if stage else model.state_dict()
    found = {name: value.clone() for name, value in weights.items()}
    if not partitioned:
        return found, (), 0.0
    return found, tuple(context.last), context.collectives.traffic.gathered / STEPS


def partitioned_apart(stage: int, across: int, how: str) -> tuple[float, tuple[int, ...], float]:
    """How far weights are from those without partitioning; what was partitioned; bytes sent in a step."""
    plain, _, _ = parallel(stage, across, how, partitioned=False)
    found, counts, sent = parallel(stage, across, how, partitioned=True)
    assert plain.keys() == found.keys()
    return max(float((found[name] - value).abs().max()) for name, value in plain.items()), counts, sent


class Block(torch.nn.Sequential):
    """A layer for `parallelize_module`."""

    def __init__(self) -> None:
        super().__init__(
            torch.nn.LayerNorm(STATES), torch.nn.Linear(STATES, INNER), torch.nn.GELU(), torch.nn.Linear(INNER, STATES)
        )


def by_dtensors(partitioned: bool) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Gradients of layers that torch cuts into DTensors; what was partitioned: inputs of layers, and within them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    layers = [Block() for _ in range(LAYERS)]
    for layer in layers:
        parallelize_module(layer, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    context: Any = contextlib.nullcontext()
    if partitioned:
        context = shoal.zero.partition_activations([*layers, *(layer[1] for layer in layers)], mesh.get_group())
    hidden = torch.randn(4, TOKENS, STATES)
    with context:
        for layer in layers:
            hidden = hidden + layer(hidden)
        loss = hidden.square().mean()
    torch.autograd.backward(loss)
    grads = [each.grad for layer in layers for each in layer.parameters()]
    return [local(each) for each in grads if each is not None], tuple(context.last) if partitioned else ()


def by_dtensors_apart() -> tuple[float, tuple[int, ...]]:
    """How far gradients are from those without partitioning."""
    plain, _ = by_dtensors(partitioned=False)
    found, counts = by_dtensors(partitioned=True)
    assert len(plain) == len(found) == 6 * LAYERS
    return max(float((one - other).abs().max()) for one, other in zip(plain, found, strict=True)), counts


# ------------------------------------------------------------------------------------------------------ what goes wrong


def everyone() -> dist.ProcessGroup:
    """The group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _lines(count: int, width: int = 600) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count)))


def other_values() -> None:
    """Rank 1 has other samples."""
    model = _lines(2)
    with shoal.zero.partition_activations(model, everyone()):
        model(torch.full((4, 600), float(dist.get_rank())))


def another_layer() -> None:
    """Rank 1 leaves one out."""
    model = _lines(3)
    with shoal.zero.partition_activations(model, everyone()):
        model[: 3 - dist.get_rank()](torch.ones(4, 600))


def raises_on_one_rank() -> None:
    """In the forward pass."""
    model = _lines(2)
    with shoal.zero.partition_activations(model, everyone()):
        model(torch.ones(4, 600))
        if dist.get_rank() == 1:
            raise ArithmeticError("a bad batch")


def left_by_one_rank(kind: str, communicates: bool) -> tuple[str, str]:
    """Rank 1 leaves the forward pass by an error between two layers; what is said of it, and of the next pass.

    If the model `communicates`, the others are in a collective of its own then.
    """
    model = _lines(3)
    context = shoal.zero.partition_activations(model, everyone())
    errors = [{"ArithmeticError": ArithmeticError, "KeyboardInterrupt": KeyboardInterrupt}[kind]("stop")]

    def between(_: torch.nn.Module, __: object, output: torch.Tensor) -> None:
        if errors and dist.get_rank() == 1:
            raise errors.pop()
        if communicates:
            dist.all_reduce(output.detach().clone())

    model[1].register_forward_hook(between)

    def train() -> None:
        inputs = torch.ones(4, 600, requires_grad=True)
        with context:
            loss = model(inputs).sum()
        torch.autograd.backward(loss)

    found = []
    for _ in range(2):
        try:
            train()
            found.append("")
        except BaseException as error:  # noqa: BLE001 (an interrupt, too)
            found.append(f"{type(error).__name__}: {error}")
    return found[0], found[1]


def another_order() -> None:
    """Two losses, and rank 1 begins with the other one."""
    model = _lines(2)
    with shoal.zero.partition_activations(model, everyone()):
        losses = [model(torch.full((4, 600), each)).sum() for each in (1.0, 2.0)]
    for loss in losses if dist.get_rank() == 0 else reversed(losses):
        torch.autograd.backward(loss)


def changed_in_place() -> None:
    """A tensor that is kept whole, behind the pass."""
    model = _lines(2)
    with shoal.zero.partition_activations([model[0]], everyone()):
        hidden = model[0](torch.ones(4, 600)).tanh()
        loss = model[1](hidden).sum()
    with torch.no_grad():
        hidden.zero_()
    torch.autograd.backward(loss)


def entered_twice() -> None:
    """Within itself."""
    context = shoal.zero.partition_activations(_lines(1), everyone())
    with context, context:
        pass


def bad_arguments(what: str) -> None:
    """On rank 1 alone, but for the group."""
    other: Any = None
    wrong: Any = dist.get_rank() == 1
    model: Any = _lines(2)
    if what == "no modules":
        shoal.zero.partition_activations([] if wrong else model, everyone())
    elif what == "no module":
        model = ["0"] if wrong else model
        shoal.zero.partition_activations(model, everyone())
    elif what == "no parameters":
        shoal.zero.partition_activations([torch.nn.GELU()] if wrong else model, everyone())
    elif what == "offload":
        shoal.zero.partition_activations(model, everyone(), offload=wrong)
    elif what == "other ranks":
        other = dist.new_group([1 - dist.get_rank()], use_local_synchronization=True)
        shoal.zero.partition_activations(model, other)
    else:
        shoal.zero.partition_activations(model, other)


def kept_whole() -> tuple[tuple[int, ...], bool]:
    """Of small inputs, parts of tensors and evaluation; and whether memory is partitioned once for three uses."""
    model = _lines(3)
    with (context := shoal.zero.partition_activations(model, everyone())):
        model(torch.ones(1, 600))  # small
        model[0](torch.ones(8, 1200)[:, :600])
        with torch.no_grad():
            model(torch.ones(4, 600))
    whole = tuple(context.last)
    with context:
        given = torch.ones(4, 600)
        loss = torch.stack([layer(given) for layer in model]).sum()
    once = context.last.tensors == 1
    torch.autograd.backward(loss)
    grads = [each.grad for each in model.parameters() if each.ndim == 2]
    return whole, once and all(each is not None and torch.equal(each, torch.full_like(each, 4.0)) for each in grads)


def compiled() -> tuple[float, int, list[str]]:
    """How far gradients of compiled layers are from those of plain ones, what was partitioned, what was not raised."""
    model, ignored, grads = _lines(2), list[str](), list[list[torch.Tensor]]()
    before, sys.unraisablehook = sys.unraisablehook, lambda each: ignored.append(str(each.exc_value))
    try:
        context = shoal.zero.partition_activations(model, everyone())
        runs: tuple[tuple[Any, Any], ...] = (
            (model, contextlib.nullcontext()),
            (torch.compile(model, backend="aot_eager"), context),
        )
        for run, around in runs:
            with around:
                loss = run(torch.ones(4, 600)).sum()
            torch.autograd.backward(loss)
            grads.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
            model.zero_grad()
        gc.collect()
    finally:
        sys.unraisablehook = before
    return (
        max(float((one - other).abs().max()) for one, other in zip(*grads, strict=True)),
        context.last.tensors,
        ignored,
    )


# --------------------------------------------------------------------------------------------------------- what is held


def held(stage: int, narrow: bool, folder: str | None) -> tuple[int, tuple[int, ...]]:
    """How many parameters; bytes of parameters, gradients, state, and of what is offloaded, after a backward pass."""
    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(4)))
    count = sum(each.numel() for each in model.parameters())
    model, optimizer = shoal.zero.shard(
        model, torch.optim.AdamW, stage=stage, dtype=torch.bfloat16 if narrow else None, offload=folder
    )
    for step in range(2):
        if step:
            optimizer.step()
            optimizer.zero_grad()
        torch.autograd.backward(model(torch.ones(2, 400)).float().square().mean())
    found = optimizer.memory()
    return count, (found.parameters, found.gradients, found.state, found.offloaded)
