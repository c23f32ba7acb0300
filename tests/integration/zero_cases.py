"""What ranks do in the tests of `shoal.zero`, and the same on one process, to compare with."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shoal.zero
from shoal.errors import ConfigError, LocalError
from shoal.layout import Tile, Tiling
from shoal.state.disk import folder as state_folder
from shoal.state.disk import tensor_file
from shoal.zero.flat import engine as flat
from shoal.zero.optimizer import ShardedOptimizer
from shoal.zero.parameters import local
from shoal.zero.ranks.collectives import Collectives, Owned, Traffic
from shoal.zero.ranks.watch import Watch
from tests.integration.ranks import die_here, freeze_here, wake_the_frozen

STEPS, SAVED = 3, 2
BATCH = 3


class Odd(torch.nn.Module):
    """Odd shapes; the embedding is tied to the head; a layer is frozen; a buffer; a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(37, 11)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(11), torch.nn.Linear(11, 23), torch.nn.GELU(), torch.nn.Linear(23, 11)
            )
            for _ in range(2)
        )
        self.frozen = torch.nn.Linear(11, 11).requires_grad_(requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.head = torch.nn.Linear(11, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.full((11,), 0.1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch, 37)."""
        hidden = self.embedding(tokens)
        hidden = hidden + self.shift.to(hidden.dtype)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits: torch.Tensor = self.head(self.frozen(hidden) * self.scale)
        return logits


def loss_of(model: torch.nn.Module, step: int, rank: int, micro: int = 0) -> torch.Tensor:
    """Of a micro-batch that depends on these numbers alone."""
    made = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    tokens, targets = torch.randint(0, 37, (2, BATCH), generator=made)
    return torch.nn.functional.cross_entropy(model(tokens).float(), targets)


def groups(model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups: no decay for vectors."""
    flat = {id(each) for each in model.parameters() if each.ndim < 2}
    listed = list(parameters)
    return [
        {"params": [each for each in listed if id(each) not in flat], "weight_decay": 0.1},
        {"params": [each for each in listed if id(each) in flat], "weight_decay": 0.0, "lr": 2e-2},
    ]


def make(kind: str, model: torch.nn.Module) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """A factory for `shard`."""
    if kind == "sgd":
        return lambda parameters: torch.optim.SGD(groups(model, parameters), lr=1e-1, momentum=0.9)
    if kind in ("madgrad", "laprop", "schedulefreeadamw"):
        import pytorch_optimizer

        other: Any = pytorch_optimizer.load_optimizer(kind)
        return lambda parameters: other(groups(model, parameters), lr=1e-2)
    if kind == "adagrad":
        return lambda parameters: torch.optim.Adagrad(groups(model, parameters), lr=1e-1)
    return lambda parameters: torch.optim.AdamW(groups(model, parameters), lr=1e-2)


def alone(
    ranks: int,
    kind: str,
    *,
    micro: int = 1,
    clip: float | None = None,
    steps: int = STEPS,
    first: int = 0,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[dict[str, torch.Tensor], list[float], torch.optim.Optimizer]:
    """One process, the micro-batches of all ranks, in the order of the ranks.

    Each rank's own are added up before they are added to those of others, as ranks must; then averaged.
    """
    model = model or Odd()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = optimizer or make(kind, model)(trained)
    norms = []
    for step in range(first, first + steps):
        totals: list[torch.Tensor] | None = None
        for rank in range(ranks):
            for number in range(micro):
                torch.autograd.backward(loss_of(model, step, rank, number))
            mine = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
            totals = mine if totals is None else [total + grad for total, grad in zip(totals, mine, strict=True)]
            for each in trained:
                each.grad = None
        assert totals is not None
        for each, total in zip(trained, totals, strict=True):
            each.grad = total / ranks
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}, norms, optimizer


def train(
    optimizer: ShardedOptimizer,
    model: torch.nn.Module,
    *,
    micro: int = 1,
    clip: float | None = None,
    steps: int = STEPS,
    first: int = 0,
    sync: bool = False,
) -> list[float]:
    """The same on this rank; returns the norms. With `sync` every micro-batch is reduced."""
    rank, norms = dist.get_rank(), []
    for step in range(first, first + steps):
        for number in range(micro):
            if number < micro - 1 and not sync:
                with optimizer.no_sync():
                    torch.autograd.backward(loss_of(model, step, rank, number))
            else:
                torch.autograd.backward(loss_of(model, step, rank, number))
        if clip is not None:
            norms.append(float(optimizer.clip_grad_norm_(clip)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def sharded(
    stage: int, kind: str, micro: int = 1, clip: float | None = None, sync: bool = False
) -> tuple[dict[str, torch.Tensor], list[float], tuple[int, ...], Traffic]:
    """Train sharded; returns the weights, the norms, memory after the last backward pass, and traffic."""
    model, optimizer = _shard(stage, kind)
    norms = train(optimizer, model, micro=micro, clip=clip, sync=sync)
    traffic = optimizer.traffic()
    state = {name: value.clone() for name, value in shoal.zero.full_state_dict(model).items()}
    torch.autograd.backward(loss_of(model, 0, dist.get_rank()))
    return state, norms, tuple(optimizer.memory()[:3]), traffic


def _shard(stage: int, kind: str) -> tuple[Odd, ShardedOptimizer]:
    model = Odd()
    if dist.get_rank():  # rank 0's values count
        with torch.no_grad():
            for each in model.parameters():
                each.add_(1.0)
    return shoal.zero.shard(model, make(kind, model), stage=stage)


def without_sync(stage: int) -> tuple[int, str]:
    """Bytes that were reduced, and what a step says."""
    model, optimizer = _shard(stage, "sgd")
    with optimizer.no_sync():
        torch.autograd.backward(loss_of(model, 0, dist.get_rank()))
    sent = optimizer.traffic().reduced
    try:
        optimizer.step()
    except LocalError as error:
        return sent, str(error)
    return sent, ""


def bad_gradient(stage: int, bad: float) -> tuple[bool, int, bool]:
    """Whether a step changed anything in which rank 1's loss is so bad; steps left out; whether the next one did."""
    model, optimizer = _shard(stage, "adamw")

    def changed(factor: float) -> bool:
        before = shoal.zero.full_state_dict(model)
        torch.autograd.backward(loss_of(model, 0, dist.get_rank()) * factor)
        optimizer.step()
        optimizer.zero_grad()
        return any(not torch.equal(value, before[name]) for name, value in shoal.zero.full_state_dict(model).items())

    first = changed(bad if dist.get_rank() == 1 else 1.0)
    return first, optimizer.skipped, changed(1.0)


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Another rate in each step, and another one for each group."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1.0 + 0.1 * step])


def scheduled_alone(ranks: int) -> dict[str, torch.Tensor]:
    """The weights of one process with a schedule."""
    model = Odd()
    optimizer = make("adamw", model)([each for each in model.parameters() if each.requires_grad])
    schedule, state = _schedule(optimizer), dict[str, torch.Tensor]()
    for step in range(STEPS):
        state, _, _ = alone(ranks, "adamw", steps=1, first=step, model=model, optimizer=optimizer)
        schedule.step()
    return state


def scheduled(stage: int) -> dict[str, torch.Tensor]:
    """The same, sharded."""
    model, optimizer = _shard(stage, "adamw")
    schedule = _schedule(optimizer)
    for step in range(STEPS):
        train(optimizer, model, steps=1, first=step)
        schedule.step()
    return {name: value.clone() for name, value in shoal.zero.full_state_dict(model).items()}


def narrow(stage: int) -> tuple[str, set[str], list[float], list[float], int]:
    """Train in bfloat16 and in float32: dtype of the logits, of what is stepped, losses of both, bytes."""
    losses: dict[torch.dtype | None, list[float]] = {}
    for dtype in (None, torch.bfloat16):
        model = Odd()
        model, optimizer = shoal.zero.shard(model, make("adamw", model), stage=stage, dtype=dtype)
        losses[dtype] = []
        for step in range(8):
            loss = loss_of(model, step % 2, dist.get_rank())
            losses[dtype].append(float(loss.detach()))
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    logits = model(torch.zeros(1, dtype=torch.long))
    torch.autograd.backward(loss_of(model, 0, dist.get_rank()))
    stepped = {str(each.dtype) for group in optimizer.param_groups for each in group["params"]}
    return str(logits.dtype), stepped, losses[torch.bfloat16], losses[None], sum(optimizer.memory()[:3])


def ordinary(stage: int) -> tuple[list[float], bool, str, bool]:
    """What schedulers and trainers do with an optimizer."""
    model, optimizer = _shard(stage, "adamw")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    for step in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        train(optimizer, model, steps=1, first=step)
        scheduler.step()
    torch.autograd.backward(loss_of(model, 0, dist.get_rank()))
    held = optimizer.reduction.gradients()
    model.zero_grad()
    cleared = (
        bool(held) and not optimizer.reduction.gradients() and all(each.grad is None for each in model.parameters())
    )
    refused = ""
    try:
        optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    except LocalError as error:
        refused = str(error)
    before = optimizer.state_dict()
    optimizer.load_state_dict(before)
    same = optimizer.state_dict()["param_groups"] == before["param_groups"]
    train(optimizer, model, steps=1)
    return rates, cleared, refused, same


class Parts(torch.nn.Module):
    """A layer for everybody, one for rank 0, and one for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.once, self.never = (torch.nn.Linear(5, 5) for _ in range(3))

    def forward(self, inputs: torch.Tensor, *, first: bool) -> torch.Tensor:
        """Shape (batch, 5)."""
        hidden: torch.Tensor = self.all(inputs)
        return self.once(hidden) if first else hidden


def unused(stage: int) -> tuple[float, float]:
    """How far the layer moved that nobody used, and the one that rank 0 used."""
    model = Parts()
    model, optimizer = shoal.zero.shard(
        model, lambda each: torch.optim.AdamW(each, lr=0.1, weight_decay=0.5), stage=stage
    )
    before = shoal.zero.full_state_dict(model)
    torch.autograd.backward(model(torch.ones(2, 5), first=dist.get_rank() == 0).sum())
    optimizer.step()
    after = shoal.zero.full_state_dict(model)
    never, once = (float((after[name] - before[name]).abs().max()) for name in ("never.weight", "once.weight"))
    return never, once


def sharded_by_user(stage: int) -> dict[str, torch.Tensor]:
    """Apply `fully_shard` first."""
    model = Odd()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    _, optimizer = shoal.zero.shard(model, make("adamw", model), stage=stage)
    train(optimizer, model)
    return shoal.zero.full_state_dict(model)


def full_on_rank_0(stage: int) -> dict[str, torch.Tensor]:
    """What the ranks get."""
    model, _ = _shard(stage, "sgd")
    return shoal.zero.full_state_dict(model, rank0_only=True)


def killed(stage: int) -> None:
    """Rank 1 dies between two layers of a backward pass."""
    model, optimizer = _shard(stage, "adamw")
    train(optimizer, model, steps=2)
    if dist.get_rank() == 1:
        model.layers[1].register_full_backward_hook(lambda *_: die_here())
    train(optimizer, model, steps=2)


class _Notice(logging.Handler):
    """Keeps what is logged, and has the frozen rank woken."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take one."""
        self.found.append(record.getMessage())
        wake_the_frozen()


def frozen(stage: int) -> tuple[list[str], bool]:
    """Rank 1 freezes in the middle of training, until the others have named it; what they say, and if all went on."""
    model, optimizer = _shard(stage, "adamw")
    train(optimizer, model, steps=2)
    logger, notice = logging.getLogger("shoal.zero"), _Notice()
    logger.addHandler(notice)
    if dist.get_rank() == 1:
        freeze_here()
    train(optimizer, model, first=2, steps=STEPS - 2)
    logger.removeHandler(notice)
    wanted, found = alone(dist.get_world_size(), "adamw")[0], shoal.zero.full_state_dict(model)
    return notice.found, all(torch.equal(value, wanted[name]) for name, value in found.items())


def _sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def bad_stage() -> None:
    """There is no stage 4."""
    shoal.zero.shard(Odd(), _sgd, stage=4)


def bad_built_before() -> None:
    """An optimizer in place of a function."""
    model = Odd()
    shoal.zero.shard(model, _sgd(list(model.parameters())), stage=1)  # type: ignore[arg-type]


def bad_other_tensors() -> None:
    """A factory that knows the parameters from before."""
    model = Odd()
    before = [each for each in model.parameters() if each.requires_grad]
    shoal.zero.shard(model, lambda _: _sgd(before), stage=3)


def bad_no_optimizer() -> None:
    """A factory of something else."""
    shoal.zero.shard(Odd(), lambda _: None, stage=2)  # type: ignore[arg-type,return-value]


def bad_models_differ() -> None:
    """A layer more on rank 1."""
    model = Odd()
    if dist.get_rank() == 1:
        model.extra = torch.nn.Linear(2, 2)
    shoal.zero.shard(model, _sgd, stage=1)


def bad_groups_differ() -> None:
    """Another learning rate on rank 1."""
    shoal.zero.shard(Odd(), lambda each: torch.optim.SGD(each, lr=0.1 + dist.get_rank()), stage=1)


def bad_tied_on_one_rank() -> None:
    """Only on rank 0 the head is the embedding."""
    model = Odd()
    if dist.get_rank() == 1:
        model.head.weight = torch.nn.Parameter(model.embedding.weight.detach().clone())
    shoal.zero.shard(model, _sgd, stage=1)


def bad_sharded_on_one_rank() -> None:
    """Only on rank 0 `fully_shard` was applied."""
    model = Odd()
    mesh = DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), "cpu")
    if dist.get_rank() == 0:
        fully_shard(model, mesh=mesh)
    shoal.zero.shard(model, _sgd, stage=3)


def bad_skips_on_one_rank() -> None:
    """Rank 1 would step with infinite gradients."""
    shoal.zero.shard(Odd(), _sgd, stage=1, skip_nonfinite=dist.get_rank() == 0)


def bad_on_one_rank() -> None:
    """Only rank 1 is wrong."""
    shoal.zero.shard(Odd(), _sgd, stage=7 if dist.get_rank() == 1 else 2)


def bad_shared_memory() -> None:
    """Two parameters over the same values."""
    model = Odd()
    model.twin = torch.nn.Parameter(model.frozen.weight.data[:3])
    shoal.zero.shard(model, _sgd, stage=2)


def bad_view() -> None:
    """A parameter that is the other's rows."""
    model = Odd()
    model.twin = torch.nn.Parameter(model.frozen.weight.data[:3])
    shoal.zero.shard(model, _sgd, stage=3)


def bad_empty() -> None:
    """A parameter without values."""
    model = Odd()
    model.empty = torch.nn.Parameter(torch.empty(0, 3))
    shoal.zero.shard(model, _sgd, stage=3)


def bad_sparse_buffer() -> None:
    """Which cannot be sent."""
    model = Odd()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    shoal.zero.shard(model, _sgd, stage=2)


def bad_scalar() -> None:
    """FSDP2 shards rows, and a scalar has none."""
    model = Odd()
    model.scalar = torch.nn.Parameter(torch.ones(()))
    shoal.zero.shard(model, _sgd, stage=3)


def bad_mixed_dtypes() -> None:
    """Some of it in bfloat16."""
    model = Odd()
    model.layers.bfloat16()
    shoal.zero.shard(model, _sgd, stage=3)


def bad_dtype_of_sharded() -> None:
    """It has a policy of its own."""
    model = Odd()
    fully_shard(model)
    shoal.zero.shard(model, _sgd, stage=3, dtype=torch.bfloat16)


def bad_sparse() -> None:
    """FSDP2 copies dense gradients."""
    shoal.zero.shard(torch.nn.Sequential(torch.nn.Embedding(5, 4, sparse=True)), _sgd, stage=3)


def bad_together() -> None:
    """One that makes a number of all gradients."""
    import pytorch_optimizer

    shoal.zero.shard(Odd(), pytorch_optimizer.load_optimizer("prodigy"), stage=2)


def bad_kept() -> None:
    """One that keeps an object for each tensor."""
    import pytorch_optimizer

    shoal.zero.shard(Odd(), pytorch_optimizer.load_optimizer("scalableshampoo"), stage=1)


def bad_nothing() -> None:
    """All frozen."""
    shoal.zero.shard(Odd().requires_grad_(requires_grad=False), _sgd, stage=1)


def bad_meta() -> None:
    """Without values."""
    shoal.zero.shard(Odd().to("meta"), _sgd, stage=1)


def bad_twice() -> None:
    """Sharded two times."""
    model, _ = shoal.zero.shard(Odd(), _sgd, stage=2)
    shoal.zero.shard(model, _sgd, stage=2)


def said_of_arguments() -> dict[str, str]:
    """The `ConfigError` of each call, on this rank."""
    model, optimizer = shoal.zero.shard(torch.nn.Linear(3, 2), _sgd, stage=3)
    other = torch.nn.Linear(3, 2)
    bad: Any = 5
    unsharded: Any = _sgd(list(other.parameters()))
    calls: dict[str, Callable[[], object]] = {
        "units": lambda: shoal.zero.shard(other, _sgd, stage=3, units=bad),
        "weights": lambda: shoal.zero.shard(other, _sgd, stage=3, weights=bad),
        "twice": lambda: shoal.zero.shard(model, _sgd, stage=2),
        "max_norm": lambda: optimizer.clip_grad_norm_(None),  # type: ignore[arg-type]
        "norm_type": lambda: optimizer.clip_grad_norm_(1.0, "two"),  # type: ignore[arg-type]
        "save another": lambda: shoal.zero.save("never-written", other, optimizer),
        "load another": lambda: shoal.zero.load({}, other, optimizer),
        "save unsharded": lambda: shoal.zero.save("never-written", model, unsharded),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except ConfigError as error:
            said[name] = str(error)
    return said


def bad_moved() -> None:
    """Converted after sharding."""
    model, optimizer = shoal.zero.shard(Odd(), _sgd, stage=1)
    model.double()
    torch.autograd.backward(loss_of(model, 0, dist.get_rank()))
    optimizer.step()


EXTRA = {"epoch": 4, "note": ["any", "JSON"], "milestones": {30: (0.1, None)}}


def train_and_save(stage: int, path: str, consolidated: bool = False) -> None:
    """Four steps."""
    model, optimizer = _shard(stage, "adamw")
    train(optimizer, model, steps=4)
    shoal.zero.save(path, model, optimizer, consolidated=consolidated, extra=EXTRA)


def load_and_train(stage: int, path: str, base: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Begin with something else (`base`: but for frozen weights), load, and train three steps on rank 0's data."""
    torch.manual_seed(dist.get_rank())
    model = Odd()
    with torch.no_grad():
        for each in [*model.parameters(), *model.buffers()]:
            each.normal_()
    if base:
        model.frozen.load_state_dict(Odd().frozen.state_dict())
    _, optimizer = shoal.zero.shard(model, make("adamw", model), stage=stage)
    train(optimizer, model, steps=1)
    for group in optimizer.param_groups:
        group["lr"] = 123.0
    extra = shoal.zero.load(path, model, optimizer)
    for step in range(4, 7):
        torch.autograd.backward(loss_of(model, step, 0))
        optimizer.step()
        optimizer.zero_grad()
    return shoal.zero.full_state_dict(model), extra


def saved_and_loaded(kind: str, stage: int, folder: str, consolidated: bool) -> dict[str, torch.Tensor]:
    """Steps, a checkpoint, and more steps in another model, on the micro-batches of rank 0."""
    model, optimizer = _shard(stage, kind)
    steps_of_rank_0(model, optimizer, range(SAVED))
    shoal.zero.save(f"{folder}/saved", model, optimizer, consolidated=consolidated)
    model, optimizer = _shard(stage % 3 + 1 if kind == "laprop" else stage, kind)
    shoal.zero.load(f"{folder}/saved", model, optimizer)
    steps_of_rank_0(model, optimizer, range(SAVED, STEPS))
    return {name: value.clone() for name, value in shoal.zero.full_state_dict(model).items()}


def save_in_each_stage(folder: str) -> None:
    """Steps on the micro-batches of rank 0, so that the number of ranks does not matter; in every stage."""
    for stage in (1, 2, 3):
        model, optimizer = _shard(stage, "adamw")
        steps_of_rank_0(model, optimizer, range(SAVED))
        shoal.zero.save(f"{folder}/stage-{stage}-ranks-{dist.get_world_size()}", model, optimizer)


def load_each(stage: int, paths: Sequence[str]) -> dict[str, tuple[dict[str, torch.Tensor], list[int], int]]:
    """Of each checkpoint: the weights after more steps, the step counters, and how many share their memory."""
    model, optimizer = _shard(stage, "adamw")
    found = {}
    for path in paths:
        shoal.zero.load(path, model, optimizer)
        steps_of_rank_0(model, optimizer, range(SAVED, STEPS))
        state = [optimizer.state[own.parameter] for own in optimizer.carrier.own_tiles()]
        counters = sorted({int(entry["step"]) for entry in state})
        places = [here.data_ptr() for entry in state for each in entry.values() if (here := local(each)).numel()]
        weights = {name: value.clone() for name, value in shoal.zero.full_state_dict(model).items()}
        found[path] = weights, counters, len(places) - len(set(places))
    return found


def steps_of_rank_0(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Train on the micro-batches of rank 0, on all of them."""
    for step in steps:
        torch.autograd.backward(loss_of(model, step, 0))
        optimizer.step()
        optimizer.zero_grad()


def _conv(*, last: bool) -> torch.nn.Module:
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 8, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 2),
    )
    model[2].requires_grad_(requires_grad=False)
    return model.to(memory_format=torch.channels_last) if last else model  # type: ignore[call-overload]


def _look_at(model: torch.nn.Module, step: int) -> torch.Tensor:
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(images.contiguous(memory_format=torch.channels_last)).float().square().sum()
    return loss


def _see(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        torch.autograd.backward(_look_at(model, step))
        optimizer.step()
        optimizer.zero_grad()


def channels_last(stage: int, folder: str, dtype: torch.dtype | None) -> dict[str, Any]:
    """Train in that memory format, and go on from it in others: values and statistics must be the same."""

    def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    def held(optimizer: ShardedOptimizer, name: str) -> dict[str, Any]:
        shoal.zero.save(f"{folder}/{name}", model, optimizer)
        found = shoal.zero.consolidate(f"{folder}/{name}")
        return {
            **found["model"],
            **{f"{n} {k}": v for n, s in found["optimizer"]["state"].items() for k, v in s.items()},
        }

    plain = _conv(last=True)
    _see(plain, adam([each for each in plain.parameters() if each.requires_grad]), range(3))
    model, optimizer = shoal.zero.shard(_conv(last=True), adam, stage=stage, dtype=dtype)
    _see(model, optimizer, range(3))
    kept = all(
        each.is_contiguous(memory_format=torch.channels_last) and not each.is_contiguous()
        for each in model.parameters()
        if each.ndim == 4
    )
    full, wanted = shoal.zero.full_state_dict(model), held(optimizer, "first")
    apart = max(float((full[name].float() - value).abs().max()) for name, value in plain.state_dict().items())
    weights = {name: value for name, value in wanted.items() if name in full}
    if dist.get_rank() == 0:
        torch.save(shoal.zero.consolidate(f"{folder}/first"), f"{folder}/whole.pt")
    dist.barrier()
    loaded = {}
    for name, last, other, source in (
        ("the same", True, stage, f"{folder}/first"),
        ("contiguous", False, 1, f"{folder}/first"),
        ("stage 3", False, 3, f"{folder}/first"),
        ("whole", True, 2, f"{folder}/whole.pt"),
        ("weights", True, 1, weights),
    ):
        model, optimizer = shoal.zero.shard(_conv(last=last), adam, stage=other, dtype=dtype)
        _see(model, optimizer, range(1))
        shoal.zero.load(source, model, optimizer)
        found = held(optimizer, name)
        loaded[name] = all(
            torch.equal(value, wanted[key]) for key, value in found.items() if name != "weights" or key in weights
        )
    return {"kept": kept, "apart": apart, "loaded": loaded}


def load_weights(stage: int, how: str, path: str, dtype: torch.dtype | None = None) -> tuple[float, bool, int]:
    """Weights alone: how far the model is from them, if the optimizer is as before, and its steps after one more."""
    source = Odd()
    with torch.no_grad():
        for number, each in enumerate([*source.parameters(), *source.buffers()]):
            each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(number)))
    weights = source.state_dict()
    model = Odd()
    _, optimizer = shoal.zero.shard(model, make("adamw", model), stage=stage, dtype=dtype)
    train(optimizer, model, steps=2)
    before = [local(each).clone() for entry in optimizer.state.values() for each in entry.values()]
    if how != "a mapping" and dist.get_rank() == 0:
        one_name = {name: each for name, each in weights.items() if name != "head.weight"}  # as safetensors has it
        save_file(one_name, path) if how == "safetensors" else torch.save(weights, path)
    dist.barrier()
    assert shoal.zero.load(weights if how == "a mapping" else path, model, optimizer) == {}
    now = [local(each) for entry in optimizer.state.values() for each in entry.values()]
    apart = max(
        float((value.float() - weights[name]).abs().max())
        for name, value in (*shoal.zero.full_state_dict(model).items(), ("frozen.weight", model.frozen.weight))
        if not isinstance(value, DTensor)
    )
    kept = all(map(torch.equal, before, now))
    train(optimizer, model, steps=1)
    return apart, kept, max(int(entry["step"]) for entry in optimizer.state.values())


def load_bad_weights(how: str) -> str:
    """What is said of weights that do not fit; the model must be as before."""
    model, optimizer = _shard(3, "sgd")
    before = shoal.zero.full_state_dict(model)
    weights: dict[str, Any] = {name: each + 1 for name, each in before.items()}
    if how == "lacks one":
        del weights["scale"]
    elif how == "one more":
        weights["other"] = torch.ones(1)
    elif how == "a shape":
        weights["scale"] = torch.ones(2)
    elif how == "not the same":
        weights["scale"] += dist.get_rank()
    else:
        weights["scale"] = 3.0
    try:
        shoal.zero.load(weights, model, optimizer)
    except ConfigError as error:
        same = all(torch.equal(value, before[name]) for name, value in shoal.zero.full_state_dict(model).items())
        return str(error) if same else "changed"
    return ""


def save_narrow(stage: int, path: str) -> None:
    """Train in bfloat16."""
    model = Odd()
    _, optimizer = shoal.zero.shard(model, make("adamw", model), stage=stage, dtype=torch.bfloat16)
    train(optimizer, model, steps=3)
    shoal.zero.save(path, model, optimizer)


def one_rank_gives_no_path(folder: str) -> list[tuple[str, str, str]]:
    """What `save` and `load` raise if only rank 1 gives each of these; a save and a load in between go well."""
    model, optimizer = _shard(1, "adamw")
    said = []
    for count, bad in enumerate((None, "", "\0", b"bytes", 5)):
        good = f"{folder}/{count}"
        path: Any = bad if dist.get_rank() == 1 else good
        for call in (shoal.zero.save, shoal.zero.load):
            try:
                call(path, model, optimizer)
            except Exception as error:  # noqa: BLE001 (any is an answer)
                said.append((repr(bad), type(error).__name__, str(error)))
            shoal.zero.save(good, model, optimizer) if call is shoal.zero.save else shoal.zero.load(
                good, model, optimizer
            )
    return said


def load_narrow(stage: int, path: str) -> torch.Tensor:
    """The float32 values of a layer, after loading."""
    model = Odd()
    _, optimizer = shoal.zero.shard(model, make("adamw", model), stage=stage, dtype=torch.bfloat16)
    shoal.zero.load(path, model, optimizer)
    train(optimizer, model, steps=1)
    shoal.zero.load(path, model, optimizer)
    mine = {
        (each.tile.start, each.tile.stop): each.values.clone()
        for each in optimizer.carrier.own_tiles()
        if each.tile.name == "layers.0.1.weight"
    }
    everything: list[dict[tuple[int, int], torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everything, mine)
    tiles = sorted((place, values) for each in everything for place, values in each.items())
    return torch.cat([values for _, values in tiles]).reshape(23, 11)


def load_and_save_narrow(stage: int, path: str, other: str) -> None:
    """Load into a model whose frozen parameters were others."""
    model = Odd()
    torch.nn.init.zeros_(model.frozen.weight)
    _, optimizer = shoal.zero.shard(model, make("adamw", model), stage=stage, dtype=torch.bfloat16)
    shoal.zero.load(path, model, optimizer)
    train(optimizer, model, steps=1)
    shoal.zero.save(other, model, optimizer)


def load_damaged(path: str) -> tuple[str, bool]:
    """What `load` says, and whether the model and the optimizer are as before."""
    model, optimizer = _shard(2, "adamw")
    train(optimizer, model, steps=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = [value.clone() for entry in optimizer.state.values() for value in entry.values()]
    said = ""
    try:
        shoal.zero.load(path, model, optimizer)
    except ConfigError as error:
        said = str(error)
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    now = [value for entry in optimizer.state.values() for value in entry.values()]
    return said, same and all(torch.equal(one, other) for one, other in zip(state, now, strict=True))


def load_into_other_model(path: str) -> None:
    """One with a frozen parameter that was trained."""
    model = Odd()
    model.layers[1][1].bias.requires_grad_(requires_grad=False)  # type: ignore[index]
    _, optimizer = shoal.zero.shard(model, make("adamw", model), stage=1)
    shoal.zero.load(path, model, optimizer)


def load_into_other_groups(path: str) -> None:
    """One group instead of two."""
    model, optimizer = shoal.zero.shard(Odd(), lambda each: torch.optim.AdamW(each, lr=0.1), stage=1)
    shoal.zero.load(path, model, optimizer)


def load_into_other_optimizer(path: str) -> None:
    """Another class."""
    model, optimizer = _shard(1, "sgd")
    shoal.zero.load(path, model, optimizer)


def save_twice_and_die(folder: str, where: str) -> None:
    """Save, then die in the middle of saving again.

    It is rank 1 when its file of the second is there; or rank 0 when the index is there, or before the folder has its
    name.
    """
    model, optimizer = _shard(2, "adamw")
    train(optimizer, model, steps=1)
    shoal.zero.save(f"{folder}/first", model, optimizer, extra={"epoch": 1})
    if dist.get_rank() == 1 and where == "file":
        vars(tensor_file)["flush"] = lambda path: die_here()
    if dist.get_rank() == 0 and where != "file":
        vars(state_folder)["flush"] = lambda path: die_here() if path.is_dir() == (where == "name") else None
    shoal.zero.save(f"{folder}/second", model, optimizer)


def any_owners(stage: int) -> tuple[dict[str, torch.Tensor], int]:
    """Train with a table of owners that follows no order; returns how many messages there were, too."""

    def scattered(buckets: Iterable[Sequence[Tile]], ranks: int) -> Tiling:
        tiles = [tile for bucket in buckets for tile in bucket]
        made = random.Random(5)
        return Tiling(tuple(tiles), tuple(made.randrange(ranks) for _ in tiles))

    original, flat.assign = flat.assign, scattered  # type: ignore[attr-defined]
    try:
        model, optimizer = _shard(stage, "adamw")
    finally:
        flat.assign = original  # type: ignore[attr-defined]
    train(optimizer, model, micro=2, sync=True, clip=10.0)
    assert isinstance(optimizer.carrier, flat.FlatEngine)
    messages = sum(len(bucket.messages) for bucket in optimizer.carrier._buckets)
    return shoal.zero.full_state_dict(model), messages


def out_of_step() -> None:
    """Rank 1 waits for what rank 0 does not send, and rank 0 the other way round: each is in another collective."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    collectives = Collectives(group, Watch(group), torch.device("cpu"))
    if dist.get_rank() == 0:
        collectives.all_gather([Owned(1, torch.zeros(5))]).wait()
    else:
        collectives.reduce_scatter([Owned(1, torch.zeros(3))], lambda *_: None).wait()
