"""What ranks do in the tests of hybrid sharding, and the same on one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shoal.zero
from shoal.errors import ConfigError, RankLost
from shoal.zero.optimizer import ShardedOptimizer
from tests.integration import zero_cases as cases
from tests.integration.ranks import die_here

STEPS = 3


def alone(replicas: int, ranks: int, *, micro: int = 1, clip: float | None = None) -> dict[str, torch.Tensor]:
    """One process: sums over the ranks of a replica, in their order; then over replicas."""
    model = cases.Odd()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = cases.make("adamw", model)(trained)
    for step in range(STEPS):
        totals: list[torch.Tensor] = []
        for replica in range(replicas):
            sums: list[torch.Tensor] = []
            for rank in range(replica * ranks, (replica + 1) * ranks):
                for number in range(micro):
                    torch.autograd.backward(cases.loss_of(model, step, rank, number))
                mine = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
                sums = [one + other for one, other in zip(sums, mine, strict=True)] if sums else mine
                optimizer.zero_grad()
            means = [each / ranks for each in sums]
            totals = [one + other for one, other in zip(totals, means, strict=True)] if totals else means
        for each, total in zip(trained, totals, strict=True):
            each.grad = total / replicas
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def made(stage: int, replicas: int) -> tuple[torch.nn.Module, ShardedOptimizer]:
    """The model, sharded, over a mesh of all ranks."""
    model = cases.Odd()
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))
    return shoal.zero.shard(model, cases.make("adamw", model), stage=stage, mesh=mesh)


def trained(stage: int, replicas: int, micro: int = 1, clip: float | None = None) -> tuple[Any, ...]:
    """Weights, memory between backward pass and step, and traffic."""
    model, optimizer = made(stage, replicas)
    cases.train(optimizer, model, steps=STEPS, micro=micro, clip=clip)
    traffic = optimizer.traffic()
    torch.autograd.backward(cases.loss_of(model, 0, dist.get_rank()))
    return shoal.zero.full_state_dict(model), optimizer.memory(), traffic


def bad(stage: int) -> tuple[bool, int]:
    """One rank's gradient is infinite: whether anything has changed, and how many steps were left out."""
    model, optimizer = made(stage, 2)
    before = shoal.zero.full_state_dict(model)
    loss = cases.loss_of(model, 0, dist.get_rank())
    torch.autograd.backward(loss * float("inf") if dist.get_rank() == 3 else loss)
    optimizer.step()
    after = shoal.zero.full_state_dict(model)
    return any(not torch.equal(before[name], each) for name, each in after.items()), optimizer.skipped


def saved_and_loaded(stage: int, path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A run that goes on, and one that goes on from its checkpoint in the other stage without replicas, and back."""
    model, optimizer = made(stage, 2)
    cases.train(optimizer, model, steps=2)
    shoal.zero.save(f"{path}/one", model, optimizer)
    between = cases.Odd()
    other, plain = shoal.zero.shard(between, cases.make("adamw", between), stage=4 - stage)
    shoal.zero.load(f"{path}/one", other, plain)
    shoal.zero.save(f"{path}/two", other, plain)
    again, second = made(stage, 2)
    shoal.zero.load(f"{path}/two", again, second)
    for each, its in ((optimizer, model), (second, again)):
        cases.train(each, its, steps=2, first=2)
    return shoal.zero.full_state_dict(model), shoal.zero.full_state_dict(again)


def lost(stage: int) -> list[int]:
    """A rank is killed before a backward pass: the ranks that the others name."""
    model, optimizer = made(stage, 2)
    cases.train(optimizer, model, steps=1)
    if dist.get_rank() == 3:
        die_here()
    try:
        cases.train(optimizer, model, steps=1)
    except RankLost as error:
        return list(error.ranks)
    return []


def refused(how: str) -> str:
    """The message of `shard`."""
    model: torch.nn.Module = cases.Odd()
    mesh: Any = init_device_mesh("cpu", (2, 2))
    options: dict[str, Any] = {"stage": 2}
    if how == "one dimension":
        mesh = init_device_mesh("cpu", (4,))
    if how == "no mesh":
        mesh = (2, 2)
    if how == "other ranks":
        options["group"] = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    if how == "top_k":
        options["top_k"] = 0.1
    try:
        shoal.zero.shard(model, cases.make("adamw", model), mesh=mesh, **options)
    except ConfigError as error:
        return str(error)
    return "it was taken"
