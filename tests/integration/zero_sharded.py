"""What programs do with a model that FSDP2 has sharded, and with checkpoints; each function runs on every rank."""

from __future__ import annotations

import os
import resource
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import shoal.zero
from shoal.errors import ConfigError, LocalError, RankLost
from shoal.zero.disk import checkpoint
from shoal.zero.disk.saved import consolidate
from shoal.zero.optimizer import ShardedOptimizer
from tests.integration.zero_cases import Odd, loss_of, make, train
from tests.integration.zero_programs import State, backward, moved, said, same


def _sharded_by_user(stage: int) -> tuple[Odd, ShardedOptimizer]:
    model = Odd()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return shoal.zero.shard(model, make("adamw", model), stage=stage)


def _evaluate(model: torch.nn.Module) -> None:
    with torch.no_grad():
        loss_of(model, 99, dist.get_rank())


def orders(stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """The same three steps, with gradients cleared here and there."""
    found = {}
    for how in ("after the step", "between forward and backward", "after an evaluation"):
        model, optimizer = _sharded_by_user(stage)
        for step in range(3):
            if how == "after an evaluation":
                _evaluate(model)
                optimizer.zero_grad()
            loss = loss_of(model, step, dist.get_rank())
            if how == "between forward and backward":
                optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            if how == "after the step":
                optimizer.zero_grad()
        found[how] = shoal.zero.full_state_dict(model)
    return found


def after_an_evaluation(stage: int, path: str) -> tuple[float, float, bool]:
    """Norms, the second one after an evaluation; and whether `load` after an evaluation brings the checkpoint back."""
    model, optimizer = _sharded_by_user(stage)
    shoal.zero.save(path, model, optimizer)
    wanted = shoal.zero.full_state_dict(model)
    torch.autograd.backward(loss_of(model, 0, dist.get_rank()))
    norm = float(optimizer.clip_grad_norm_(1e9))
    _evaluate(model)
    again = float(optimizer.clip_grad_norm_(1e9))
    optimizer.step()
    optimizer.zero_grad()
    _evaluate(model)
    shoal.zero.load(path, model, optimizer)
    _evaluate(model)
    found = shoal.zero.full_state_dict(model)
    return norm, again, all(torch.equal(found[name], value) for name, value in wanted.items())


def forgotten(stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """A step; the same after a pass without sync that is thrown away; what a step says if such a pass was the last."""
    weights = []
    for thrown_away in (False, True):
        model = Odd()
        _, optimizer = shoal.zero.shard(model, make("sgd", model), stage=stage)
        if thrown_away:
            with optimizer.no_sync():
                torch.autograd.backward(100 * loss_of(model, 7, dist.get_rank()))
            optimizer.zero_grad()
        train(optimizer, model, steps=1)
        weights.append(shoal.zero.full_state_dict(model))
    torch.autograd.backward(loss_of(model, 1, dist.get_rank()))
    with optimizer.no_sync():
        torch.autograd.backward(loss_of(model, 2, dist.get_rank()))
    try:
        optimizer.step()
        said = "nothing"
    except LocalError as error:
        said = str(error)
    return weights[0], weights[1], said


class Critic(torch.nn.Module):
    """Two halves that are trained in turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.maker = torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4)."""
        return self.judge(self.maker(inputs))

    def judge(self, made: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4)."""
        for layer in self.layers:
            made = layer(made).tanh()
        return made


def _in_turns(model: Critic, optimizer: torch.optim.Optimizer) -> None:
    """Each half is frozen while the other one is trained."""
    for step in range(4):
        model.layers.requires_grad_(step % 2 == 1)
        model.maker.requires_grad_(step % 2 == 0)
        model(torch.full((2, 4), 0.5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen_in_turns(stage: int, dtype: torch.dtype | None, path: str) -> tuple[float, bool]:
    """How far weights are from those of one process; whether a checkpoint brings back the half that is frozen then."""
    model, alone = Critic(), Critic()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage, dtype=dtype)
    _in_turns(model, optimizer)
    _in_turns(alone, plain)
    apart = moved(model, alone.state_dict())
    shoal.zero.save(path, model, optimizer)
    wanted = shoal.zero.full_state_dict(model)
    model.requires_grad_()
    _in_turns(model, optimizer)
    shoal.zero.load(path, model, optimizer)
    return apart, same(shoal.zero.full_state_dict(model), wanted)


def by_another_method() -> float:
    """How far weights are from those of one process, if the model runs by a method that FSDP2 was told of."""
    model, alone = Critic(), Critic()
    fully_shard(model)
    register_fsdp_forward_method(model, "judge")
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=3)
    for each, stepped in ((model, optimizer), (alone, torch.optim.SGD(alone.parameters(), lr=0.1))):
        torch.autograd.backward(each.judge(torch.ones(2, 4)).sum())
        stepped.step()
    return moved(model, alone.state_dict())


def _wrapped() -> Critic:
    model = Critic()
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    return model


def with_checkpoint_wrapper(stage: int, path: str) -> tuple[float, list[bool]]:
    """How far a wrapped model is from one process; whether its checkpoint fits models with and without wrappers."""
    model, alone = _wrapped(), Critic()
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    for each, stepped in ((model, optimizer), (alone, torch.optim.SGD(alone.parameters(), lr=0.1))):
        each(torch.ones(2, 4)).sum().backward()
        stepped.step()
    wanted = shoal.zero.full_state_dict(model)
    shoal.zero.save(path, model, optimizer)
    found = []
    for other in (_wrapped(), Critic()):
        _, fresh = shoal.zero.shard(other, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
        shoal.zero.load(path, other, fresh)
        found.append(same(shoal.zero.full_state_dict(other), wanted))
    return moved(model, alone.state_dict()), found


def changed_without_sync() -> str:
    """What is said when gradients are set to zero in place while others wait to be reduced."""
    model, optimizer = _plain(3)
    with optimizer.no_sync():
        backward(model)
    model.zero_grad(set_to_none=False)
    return said(lambda: backward(model, 1))


class Lists(torch.nn.Module):
    """A layer in two lists, one in a layer of another list, and a frozen parameter without values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        one, inner, *more = (torch.nn.Linear(4, 4) for _ in range(4))
        self.first = torch.nn.ModuleList([one, torch.nn.Sequential(inner, torch.nn.Tanh()), more[0]])
        self.second = torch.nn.ModuleList([more[1], inner, one])
        self.empty = torch.nn.Parameter(torch.empty(0, 3), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4)."""
        for layer in [*self.first, *self.second]:
            hidden = layer(hidden).tanh()
        return hidden + self.empty.sum()


def shared_layers(path: str) -> tuple[float, bool]:
    """How far weights are from those of one process; whether a checkpoint brings them back."""
    model, alone = Lists(), Lists()
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.AdamW(each, lr=0.1), stage=3)
    plain = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for _ in range(2):
        for each, stepped in ((model, optimizer), (alone, plain)):
            torch.autograd.backward(each(torch.ones(2, 4)).square().sum())
            stepped.step()
            stepped.zero_grad()
    apart = max(
        float((value - alone.state_dict()[name]).abs().max())
        for name, value in shoal.zero.full_state_dict(model).items()
        if value.numel()
    )
    shoal.zero.save(path, model, optimizer)
    wanted = shoal.zero.full_state_dict(model)
    torch.autograd.backward(model(torch.ones(2, 4)).sum())
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    shoal.zero.load(path, model, optimizer)
    return apart, same(shoal.zero.full_state_dict(model), wanted)


def gathered_in_stage_2(micro_batches: int) -> int:
    """Bytes of parameters that FSDP2 gathers in a step, each micro-batch reduced."""
    model, optimizer = _sharded_by_user(2)
    for micro in range(micro_batches):
        backward(model, 0, micro)
    optimizer.step()
    return optimizer.traffic().gathered


class Skipping(torch.nn.Module):
    """Leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(3))

    def forward(self, values: torch.Tensor, without: int) -> torch.Tensor:
        """Shapes (batch, 5)."""
        for number, layer in enumerate(self.layers):
            if number != without:
                values = layer(values)
        return values


def skipped_layer() -> None:
    """Each rank another one: the layers have equal sizes."""
    model, _ = shoal.zero.shard(Skipping(), lambda each: torch.optim.SGD(each, lr=0.1), stage=3)
    model(torch.ones(2, 5), dist.get_rank())


def mesh_of_others() -> None:
    """The model is sharded over pairs, and the group is all."""
    model = Odd()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "within"))["within"])
    shoal.zero.shard(model, make("sgd", model), stage=3)


def narrow_with_buffer() -> tuple[str, str]:
    """Dtypes of a buffer and of what is stepped, of a model in 16 bits in stage 3."""
    model = Odd().to(torch.bfloat16)
    _, optimizer = shoal.zero.shard(model, make("adamw", model), stage=3)
    train(optimizer, model, steps=1)
    return str(model.shift.dtype), str(optimizer.param_groups[0]["params"][0].dtype)


def replaced() -> None:
    """A parameter of the model is another one than before."""
    model = Odd()
    _, optimizer = shoal.zero.shard(model, make("sgd", model), stage=3)
    train(optimizer, model, steps=1)
    model.scale = torch.nn.Parameter(model.scale.detach().clone())
    optimizer.step()


def save_elsewhere(path: str) -> None:
    """Each rank under a name of its own."""
    model, optimizer = _plain(2)
    shoal.zero.save(f"{path}-{dist.get_rank()}", model, optimizer)


def _plain(stage: int) -> tuple[Odd, ShardedOptimizer]:
    model = Odd()
    return shoal.zero.shard(model, make("sgd", model), stage=stage)


def save_not_shared(path: str) -> None:
    """A path that each rank has a folder of its own at."""
    model, optimizer = _plain(2)
    here = Path(path) / str(dist.get_rank())
    here.mkdir()
    os.chdir(here)
    shoal.zero.save("/proc/self/cwd/checkpoint", model, optimizer)


def save_unwritable(path: str) -> None:
    """There is a file where a folder is to be."""
    model, optimizer = _plain(1)
    shoal.zero.save(f"{path}/file/checkpoint", model, optimizer)


def load_other_frozen(path: str, what: str) -> tuple[str, bool]:
    """Of a model that differs in what is not trained; what `load` says, and whether the model is as before."""
    model = Odd()
    if what == "a buffer":
        model.register_buffer("shift", torch.zeros(1))
    elif what == "one more":
        model.more = torch.nn.Linear(3, 3).requires_grad_(requires_grad=False)
    else:
        model.frozen = torch.nn.Linear(11, 11, bias=False).requires_grad_(requires_grad=False)
    _, optimizer = shoal.zero.shard(model, make("sgd", model), stage=2)
    train(optimizer, model, steps=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        shoal.zero.load(path, model, optimizer)
        said = "nothing"
    except ConfigError as error:
        said = str(error)
    return said, all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def save_plain(path: str, steps: int = 1) -> None:
    """After some steps of SGD."""
    model, optimizer = _plain(2)
    train(optimizer, model, steps=steps)
    shoal.zero.save(path, model, optimizer)


def load_of_each(path: str) -> tuple[str, bool]:
    """Each rank another checkpoint; what is said, and whether the model is as before."""
    model, optimizer = _plain(2)
    before = shoal.zero.full_state_dict(model)
    words = said(lambda: shoal.zero.load(f"{path}-{dist.get_rank()}", model, optimizer))
    return words, same(shoal.zero.full_state_dict(model), before)


class Scalar(torch.nn.Module):
    """A parameter without dimensions, and one that one rank holds alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layer = torch.nn.Linear(4, 4)
        self.gain = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4)."""
        scaled: torch.Tensor = self.layer(inputs).tanh() * self.gain
        return scaled


def scalar_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
    """Two of them, the same on all ranks."""
    for step in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.full((2, 4), 1.0 + step)).square().sum())
        optimizer.step()
    return model


def load_scalar(path: str) -> State:
    """Go on from a file of plain torch; the optimizer's own parameters are in another order if the path says so."""
    model, optimizer = shoal.zero.shard(Scalar(), torch.optim.NAdam, stage=2)
    shoal.zero.load(path, model, optimizer)
    return shoal.zero.full_state_dict(scalar_steps(model, optimizer))


def save_in_formats(path: str, stage: int) -> str:
    """Checkpoint of a model with buffers and frozen parameters in other memory formats; what another model reads."""
    model = _images(1.0)
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    shoal.zero.save(path, model, optimizer)
    other = _images(2.0)
    other, fresh = shoal.zero.shard(other, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    shoal.zero.load(path, other, fresh)
    return "" if same(shoal.zero.full_state_dict(model), shoal.zero.full_state_dict(other)) else "others"


def _images(value: float) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Conv2d(4, 4, 3))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[1].requires_grad_(requires_grad=False)
    model.register_buffer("mask", torch.full((2, 3, 4, 4), value).contiguous(memory_format=torch.channels_last))
    model.register_buffer("row", torch.full((1, 4), value).expand(3, 4))
    model.register_buffer("seen", torch.tensor(value > 1))
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(value)
    return model


def save_on_a_full_disk(path: str) -> str:
    """What is said where files cannot be as large as the whole checkpoint."""
    model, optimizer = _plain(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    vars(checkpoint)["consolidate"] = _consolidate_on_a_full_disk
    try:
        return said(lambda: shoal.zero.save(path, model, optimizer, consolidated=True))
    finally:
        vars(checkpoint)["consolidate"] = consolidate
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def _consolidate_on_a_full_disk(path: Path) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return consolidate(path)


def frozen_listed(path: str) -> State:
    """Steps of AdamW that lists frozen parameters, too, then a checkpoint for plain torch; loads it back."""
    model = Odd()
    model, optimizer = shoal.zero.shard(model, lambda _: torch.optim.AdamW(model.parameters()), stage=2)
    train(optimizer, model, steps=1)
    shoal.zero.save(path, model, optimizer, consolidated=True)
    wanted = shoal.zero.full_state_dict(model)
    train(optimizer, model, steps=1)
    shoal.zero.load(path, model, optimizer)
    assert same(shoal.zero.full_state_dict(model), wanted)
    return wanted


class Extra(Odd):
    """Keeps what is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        """Anything."""
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Ignored."""


def extra_state(path: str) -> tuple[Any, str]:
    """What `full_state_dict` has of it, and what `save` says."""
    model = Extra()
    _, optimizer = shoal.zero.shard(model, make("sgd", model), stage=1)
    found = shoal.zero.full_state_dict(model)["_extra_state"]
    try:
        shoal.zero.save(path, model, optimizer)
        return found, "nothing"
    except ConfigError as error:
        return found, str(error)


def in_a_smaller_group() -> dict[str, torch.Tensor] | None:
    """`full_state_dict` of ranks 1 and 2 of three, for the first of them."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    model = Odd()
    shoal.zero.shard(model, make("sgd", model), stage=2, group=group)
    return shoal.zero.full_state_dict(model, rank0_only=True, group=group)


def main(how: str) -> None:
    """A program of its own, of three ranks, with the store in rank 0: rank 1 is gone in its second step."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    model, optimizer = _plain(2)
    try:
        for step in range(3):
            if step == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
            train(optimizer, model, steps=1, first=step)
    except RankLost as error:
        print(error, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])


class _Routed(torch.nn.Module):
    """Runs its layers in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(3))
        self.log: list[str] = []

    def forward(self, values: torch.Tensor, order: list[int]) -> torch.Tensor:
        """Shapes (batch, 5)."""
        for number in order:
            values = self.layers[number](values)
            self.log.append(f"ran {number}")
        return values


def gathered_ahead(path: str) -> tuple[list[list[str]], bool]:
    """What each pass gathers and runs, and whether weights that were gathered in vain are not used later."""
    torch.manual_seed(3)
    model, plain = _Routed(), _Routed()
    plain.load_state_dict(model.state_dict())
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=3)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    collectives, gather, number_of = optimizer.collectives, optimizer.collectives.all_gather, dict[int | None, int]()

    def logged(owned: Any, first: Any = None, tag: int | None = None) -> Any:
        model.log.append(f"gathers {number_of.setdefault(tag, len(number_of))}")
        return gather(owned, first, tag)

    collectives.all_gather = logged  # type: ignore[method-assign]
    values, passes = torch.ones(2, 5), []
    for order in ([0, 1, 2], [0, 1, 2], [0, 2, 1], [1], [0, 1, 2]):
        model.log.clear()
        torch.autograd.backward(model(values, order).sum())
        passes.append([*model.log])
        torch.autograd.backward(plain(values, order).sum())
        optimizer.step()
        optimizer.zero_grad()
        other.step()
        other.zero_grad()
    equal = same(shoal.zero.full_state_dict(model), plain.state_dict())
    shoal.zero.save(path, model, optimizer)
    torch.autograd.backward(model(values, [0, 1, 2]).sum())
    optimizer.step()
    with torch.no_grad():
        model(values, [0])  # the next layer is gathered, and does not run
    shoal.zero.load(path, model, optimizer)
    with torch.no_grad():
        return passes, equal and torch.equal(model(values, [0, 1, 2]), plain(values, [0, 1, 2]))
