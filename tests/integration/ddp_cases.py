"""What the ranks of a group do in the tests of `GroupOptimizer`, and the peer beside it (see `ranks`)."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.errors import ConfigError, LocalError, RankLost, StateUnavailable
from shoal.integrations.ddp import GroupOptimizer
from tests.integration.ranks import die_here
from tests.integration.scripts import digest

SHARES, EPOCHS = (4, 4, 12), 6
"""The samples of one batch, of ranks 0 and 1 (a group) and 2 (a peer of its own)."""


def make(seed: int = 0) -> tuple[torch.nn.Linear, torch.optim.AdamW, Any]:
    """A model in float64, its optimizer, and a schedule."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 1, dtype=torch.float64)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, inner, torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: 1 / (1 + epoch))


def batch(epoch: int, rank: int) -> torch.Tensor:
    """The samples of this rank in an epoch."""
    generator = torch.Generator().manual_seed(100 * epoch + rank)
    return torch.randn(SHARES[rank], 8, dtype=torch.float64, generator=generator)


def loss_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """A mean over the samples."""
    loss: torch.Tensor = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    return loss


def held(model: torch.nn.Module, inner: torch.optim.Optimizer) -> str:
    """A hash of the parameters and of all that the optimizer keeps."""
    state = inner.state_dict()["state"]
    kept = [value for key in sorted(state) for _, value in sorted(state[key].items())]
    return digest([*model.parameters(), *kept])


def said_by(source: int, value: Any) -> Any:
    """What one rank tells all."""
    said = [value]
    dist.broadcast_object_list(said, source)
    return said[0]


def train_with_another_peer() -> Any:
    """Ranks 0 and 1 are a group, rank 2 is a peer; returns the rates, the bits after each epoch, and the weights."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    model, inner, schedule = make(seed=rank)  # a newcomer takes over what rank 0 has
    dht = shoal.DHT(start=True) if rank == 0 else None
    invite = said_by(0, None if dht is None else str(dht.invite()))
    settings: dict[str, Any] = {"run_id": "run", "optimizer": inner, "scheduler": schedule}
    settings["target_batch_size"] = sum(SHARES)
    swarm: Any
    trained: Any
    if rank == 2:
        dht = shoal.DHT([invite], start=True)
        trained, swarm = model, None
    else:
        trained = DistributedDataParallel(model, process_group=pair)
        swarm = GroupOptimizer(dht=dht, process_group=pair, batch_size_per_step=SHARES[rank], model=trained, **settings)
    dist.barrier()
    if rank == 2:
        assert dht is not None
        swarm = shoal.Optimizer(dht=dht, batch_size_per_step=SHARES[rank], model=model, **settings)
        swarm.load_state_from_peers()
    dist.barrier()
    bits, rates = [], []
    for epoch in range(EPOCHS):
        torch.autograd.backward([loss_of(trained, batch(epoch, rank))])
        swarm.step()
        swarm.zero_grad()
        while swarm.local_epoch == epoch:
            swarm.step()  # nothing is added
        bits.append(held(model, inner))
        rates.append(schedule.get_last_lr()[0])
    dist.barrier()
    swarm.shutdown()
    if dht is not None:
        dht.shutdown()
    return rates, bits, [each.detach().numpy() for each in model.parameters()]


def statistics_alone() -> list[Any]:
    """Torch's helper asks a fresh group for the statistics of its optimizer; then it takes a step of the swarm."""
    model, inner, _ = make()
    trained, found = DistributedDataParallel(model), list[Any]()
    with Group(optimizer=inner, model=trained, target_batch_size=8) as group:
        state: Any = get_optimizer_state_dict(model, group.swarm)["state"]
        found += [group.swarm.local_epoch, sorted(state), sorted(state["weight"]), dict(inner.state)]
        torch.autograd.backward([loss_of(trained, batch(0, group.rank))])
        group.swarm.step()
        found.append([float(entry["step"]) for entry in inner.state.values()])
    return found


def count_the_batches() -> list[Any]:
    """Batches of 4 and of 2 samples on both ranks, then none, with no number given; returns the group's samples."""
    model, inner, _ = make()
    trained = DistributedDataParallel(model)
    counts = []
    options: dict[str, Any] = {"batch_size_per_step": None, "target_batch_size": 100, "reuse_grad_buffers": True}
    with Group(optimizer=inner, model=trained, **options) as group:
        for samples in (4, 2, 0):
            if samples:
                torch.autograd.backward([loss_of(trained, batch(0, group.rank)[:samples])])
            group.swarm.step()
            assert all(each.grad is None for each in model.parameters())
            counts.append(group.swarm.peer and group.swarm.peer.status().samples)
    return counts


class Group:
    """A group of all ranks, over a model that is no `DistributedDataParallel`: all ranks have the same batches.

    Args:
        options: of the `GroupOptimizer`. `with_model`: it knows the model.
    """

    def __init__(self, **options: Any) -> None:
        self.model, self.inner, self.schedule = make()
        if options.pop("with_model", False):
            options["model"] = self.model
        self.rank = dist.get_rank()
        self.dht = shoal.DHT(start=True) if self.rank == 0 else None
        settings = {"dht": self.dht, "run_id": "run", "target_batch_size": 16, "batch_size_per_step": 4, **options}
        try:
            self.swarm = GroupOptimizer(**{"optimizer": self.inner, **settings})
        except BaseException:
            self.close()
            raise

    def backward(self, seed: int = 0) -> None:
        """Compute the gradient of a batch."""
        torch.autograd.backward([loss_of(self.model, batch(seed, 0))])

    def step(self, seed: int = 0) -> None:
        """Compute and step."""
        self.backward(seed)
        self.swarm.step()
        self.swarm.zero_grad()

    def train(self, epochs: int) -> None:
        """Some epochs more."""
        last = self.swarm.local_epoch + epochs
        for seed in range(100):
            if self.swarm.local_epoch < last:
                self.step(seed)

    def close(self) -> None:
        """Leave."""
        if hasattr(self, "swarm"):
            self.swarm.shutdown()
        if self.dht is not None:
            self.dht.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse(*_: object) -> None:
    """In place of what takes a state over."""
    raise StateUnavailable("the state does not fit here: it is too square")


def train_with_an_empty_group() -> Any:
    """A model without biases, in two groups of parameters: with weight decay, and without."""
    model = torch.nn.Linear(8, 1, bias=False, dtype=torch.float64)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [], "weight_decay": 0.0}]
    inner = torch.optim.AdamW(groups, lr=1e-2)
    with Group(optimizer=inner) as group:
        group.model = model
        group.train(3)
        return [group.swarm.local_epoch, held(model, inner)]


def wrong(case: str) -> None:
    """Things that a group refuses on all ranks."""
    rank = dist.get_rank()
    model, empty = make()[0], torch.zeros(0, dtype=torch.float64, requires_grad=True)
    beside_empty: list[torch.Tensor] = [*model.parameters(), empty]
    refused: dict[str, dict[str, Any]] = {
        "dht on rank 1": {"dht": object()} if rank else {},
        "no dht": {} if rank else {"dht": None},
        "local updates": {"use_local_updates": True},
        "auxiliary": {"auxiliary": True},
        "batch size of rank 1": {"batch_size_per_step": 0} if rank else {},
        "rank 0's argument": {} if rank else {"averaging_timeout": -1},
        "other model": {"optimizer": torch.optim.AdamW(torch.nn.Linear(8 + rank, 1).parameters())},
        "unknown": {"warm_up": 3},
        "gradients beside an empty parameter": {"optimizer": torch.optim.AdamW(beside_empty)},
    }
    options = refused.get(case, {})
    if case == "batch size missing":
        options = {"batch_size_per_step": None}
    with Group(**options) as group:
        if case == "batch size missing":
            group.backward()
            group.swarm.step(batch_size=4 if rank == 0 else None)
        elif case == "gradients":
            group.step(seed=rank)
        elif case == "calls":
            if rank:
                group.swarm.load_state_from_peers()
            else:
                group.step()
        elif case == "closed":
            group.step()
            if group.dht is not None:
                group.dht.shutdown()
            group.step()
        elif case == "gradients beside an empty parameter":
            empty.grad = torch.zeros(0, dtype=torch.float64)
            group.model = model
            group.step(seed=rank)
        elif case == "a state":
            if rank:
                group.swarm._training.load = refuse  # type: ignore[method-assign, assignment]
            group.train(1)
        elif case == "group of parameters":
            group.swarm.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        elif case == "copy":
            copy.deepcopy(group.swarm)


def change_on_one_rank(changed: int, *, with_model: bool) -> list[Any]:
    """A weight is changed on one rank alone: what a step says, and all behind it."""
    with Group(with_model=with_model) as group:
        group.train(1)
        if dist.get_rank() == changed:
            group.model.weight.data.mul_(2)
        try:
            group.step()
            words = ""
        except ConfigError as error:
            words = f"{error}"
        group.swarm.zero_grad()
        group.swarm.load_state_dict(group.swarm.state_dict())
        group.train(1)
        return [words, group.swarm.local_epoch, held(group.model, group.inner)]


def lose_a_rank(lost: int) -> str:
    """One of two ranks is killed between two steps; the other one says what it then raises."""
    with Group() as group:
        group.step()
        if dist.get_rank() == lost:
            die_here()
        try:
            group.step()
        except RankLost as error:
            return f"{error}"
    raise AssertionError


def interrupt_rank_0() -> list[Any]:
    """Ctrl+C comes on rank 0, within its step; then all go on."""
    with Group() as group:
        group.train(1)
        if group.swarm.peer is not None:
            peer, step = group.swarm.peer, group.swarm.peer.step

            def interrupted(**_: Any) -> None:
                peer.step = step  # type: ignore[method-assign]
                raise KeyboardInterrupt

            peer.step = interrupted  # type: ignore[method-assign,assignment]
        said = ""
        try:
            group.step()
        except (KeyboardInterrupt, LocalError) as error:
            said = f"{type(error).__name__}: {error}"
        group.swarm.zero_grad()
        group.train(1)
        return [said, group.swarm.local_epoch, held(group.model, group.inner)]


def interrupt_rank_1() -> str:
    """Ctrl+C comes on rank 1, while it waits for rank 0; it says what the next call raises."""
    with Group() as group:
        group.step()
        if group.rank == 0:
            return ""
        group.swarm._agreement.gather = lambda text: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
        with contextlib.suppress(KeyboardInterrupt):
            group.step()
        try:
            group.swarm.step()
        except LocalError as error:
            return f"{error}"
    raise AssertionError


def save_and_resume(folder: str) -> list[Any]:
    """Train, save in three ways, go on, and go back in a new group; returns epochs and whether the bits are those."""
    outcomes: list[Any] = []
    with Group() as group:
        group.train(2)
        before = held(group.model, group.inner)
        group.swarm.save(folder)
        saved = [said_by(0, copy.deepcopy(each.state_dict())) for each in (group.model, group.swarm)]
        if group.swarm.peer is not None:
            assert group.swarm.peer.collaboration.state.epoch == saved[1]["shoal"]["epoch"] == 2
        group.train(1)
        assert held(group.model, group.inner) != before
    for way in ("resume", "checkpoint", "load_state_dict"):
        with Group(**({"checkpoint": folder} if way == "checkpoint" else {})) as group:
            if way == "resume":
                found = group.swarm.resume(folder)
                assert found is not None
                assert found.name.startswith("epoch-00000002-")
            elif way == "load_state_dict":
                if group.rank == 0:  # the others get it all
                    group.model.load_state_dict(saved[0])
                group.swarm.load_state_dict(copy.deepcopy(saved[1]))
            outcomes.append([way, group.swarm.local_epoch, held(group.model, group.inner) == before])
            group.train(1)
            outcomes[-1].append(held(group.model, group.inner))
    return outcomes


def to_the_end() -> list[Any]:
    """A run with an end, a schedule over the group itself, a scaler, and a `GroupOptimizer` made by a function."""
    model, _, _ = make()
    options = {"params": model.parameters(), "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2)}
    with Group(**options, max_grad_norm=1.0) as group:
        schedule = torch.optim.lr_scheduler.LambdaLR(group.swarm, lambda epoch: 1 / (1 + epoch))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        group.swarm.announce_end(3)
        steps = 0
        while not group.swarm.finished:
            torch.autograd.backward([scaler.scale(loss_of(model, batch(steps, 0)))])
            scaler.step(group.swarm)
            scaler.update()
            schedule.step()
            group.swarm.zero_grad()
            steps += 1
            assert steps < 100
        inner = group.swarm._training.optimizer
        return [steps, group.swarm.local_epoch, schedule.get_last_lr(), held(model, inner)]


def join_late() -> list[Any]:
    """Rank 2 has trained alone; then a group of the other two joins, and takes over what it has."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    dht = shoal.DHT(start=True) if rank == 2 else None
    invite = said_by(2, None if dht is None else str(dht.invite()))
    model, inner, schedule = make(seed=rank)
    swarm: Any
    settings: dict[str, Any] = {"run_id": "run", "target_batch_size": 12, "optimizer": inner, "scheduler": schedule}
    if rank == 2:
        assert dht is not None
        swarm = shoal.Optimizer(dht=dht, batch_size_per_step=12, **settings)
        while swarm.local_epoch < 3:
            torch.autograd.backward([loss_of(model, batch(swarm.local_epoch, rank))])
            swarm.step()
            swarm.zero_grad()
    dist.barrier()
    if rank < 2:
        dht = shoal.DHT([invite], start=True) if rank == 0 else None
        swarm = GroupOptimizer(dht=dht, process_group=pair, batch_size_per_step=4, **settings)
        assert swarm.load_state_from_peers() is True
        assert swarm.load_state_from_peers() is False
    outcome = [swarm.local_epoch, schedule.last_epoch, inner.param_groups[0]["lr"], held(model, inner)]
    dist.barrier()
    swarm.shutdown()
    if dht is not None:
        dht.shutdown()
    return outcome
