"""Weights of a sharded model that programs use in ways of their own, on the ranks of the tests of `shoal.zero`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.dlpack
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, get_state_dict
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

import shoal.zero
from shoal.zero.optimizer import ShardedOptimizer
from tests.integration.zero_programs import said

WIDTH = 4


class Layer(torch.nn.Module):
    """One layer; it also does what a program asks for."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.scale = torch.nn.Parameter(torch.full((WIDTH,), 0.5))
        self.how, self.kept = how, list[Any]()

    def forward(self, hidden: torch.Tensor) -> Any:
        """Shape (batch, WIDTH)."""
        self.kept.clear()
        how, weight = self.how, self.linear.weight
        if how == "changes its weight":
            with torch.no_grad():
                self.scale.clamp_(max=0.4)
        if how == "changes its data":
            self.scale.data[0] = 0.25
        found = torch.tanh(self.linear(hidden)) * self.scale
        kept: dict[str, Callable[[], Any]] = {
            "keeps its weight": lambda: weight,
            "keeps a view": lambda: weight.T,
            "keeps .data": lambda: weight.data,
            "keeps a detached one": self.scale.detach,
            "keeps a part": lambda: self.scale[1:],
            "keeps a deep copy": lambda: copy.deepcopy(weight),
            "keeps a pickle": lambda: pickle.loads(pickle.dumps([weight, weight.t()]))[1],
            "keeps an array": lambda: torch.from_numpy(self.scale.detach().numpy()),
            "keeps a loss": lambda: (self.scale * hidden.sum()).square().sum(),
            "keeps a loss through a view": lambda: (self.scale[1:] * hidden.sum()).square().sum(),
            "keeps a clone": self.scale.clone,
        }
        if how in kept:
            self.kept.append(kept[how]())
        given: dict[str, Callable[[], Any]] = {
            "returns its bias": lambda: (found, self.linear.bias),
            "returns a view": lambda: {"found": found, "more": [weight.t()[0]]},
            "returns .data": lambda: (found, self.scale.data),
            "returns only its weight": lambda: self.scale,
        }
        return given[how]() if how in given else found


class Function(torch.autograd.Function):
    """A function of a program's own that saves a weight."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product."""
        ctx.save_for_backward(hidden, weight)
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of both."""
        hidden, weight = ctx.saved_tensors
        return gradient * weight, (gradient * hidden).sum(0)


class Own(torch.nn.Module):
    """A layer with a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (batch, WIDTH)."""
        found: torch.Tensor = Function.apply(hidden, self.scale)  # type: ignore[no-untyped-call]
        return found


class Net(torch.nn.Module):
    """A model that uses its layers' weights otherwise than torch's own do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.how = how
        self.layers = torch.nn.ModuleList([Layer(how), Layer(how)])
        if how == "an own function":
            self.layers.append(Own())
        if how == "a parametrized weight":
            torch.nn.utils.parametrizations.weight_norm(self.get_submodule("layers.0.linear"))
        self.attention = torch.nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.earlier = list(self.layers[0].parameters())[1:2]
        self.head = torch.nn.Linear(WIDTH, 3)
        self.heads = torch.nn.ModuleList([Head()])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """A loss for each sample."""
        how, total = self.how, torch.zeros(())
        for layer in self.layers:
            found = checkpoint(layer, hidden, use_reentrant=False) if "checkpointed" in how else layer(hidden)
            if isinstance(found, dict):
                found = found["found"], found["more"][0]
            hidden, more = found if isinstance(found, tuple) else (found, None)
            if how == "returns only its weight":
                hidden = hidden.expand(5, -1)
            if more is not None:
                hidden = hidden + more
            for kept in layer.kept if isinstance(layer, Layer) else []:
                total = total + (kept if kept.ndim == 0 else kept.square().sum())
        first: Any = self.layers[0]
        if how == "another unit's weight":
            hidden = torch.nn.functional.linear(hidden, first.linear.weight)
        if how == "another unit's scale":
            hidden = hidden * first.scale
        if how == "an earlier weight":
            hidden = torch.nn.functional.linear(hidden, self.earlier[0])
        if how == "chunks":
            return self.heads[0].chunked(hidden) + total  # type: ignore[operator,no-any-return]
        hidden = self.attention(hidden[:, None])[:, 0]
        return self.head(hidden).square().sum(1) + total + self.heads[0](hidden)  # type: ignore[no-any-return]

    def encode(self, hidden: torch.Tensor) -> torch.Tensor:
        """Another method than forward."""
        return self.head(self.layers[0](hidden)).square().sum(1)  # type: ignore[no-any-return]

    def scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        """One that uses a weight of the model's own."""
        return torch.nn.functional.linear(hidden, self.head.weight).square().sum(1)


class Head(torch.nn.Module):
    """A head that is given a part of its inputs at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, 1, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """A loss for each sample."""
        found: torch.Tensor = self.linear(hidden).square().sum(1)
        return found

    def chunked(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same, in chunks."""
        parts = torch.split(hidden, 2)
        return torch.cat([torch.nn.functional.linear(each, self.linear.weight).square().sum(1) for each in parts])


def losses(model: Net, how: str, batch: torch.Tensor) -> torch.Tensor:
    """A number."""
    if how == "another method":
        return model.encode(batch).mean() + model.scaled(batch).mean()
    found = model(batch).mean()
    if how == "a penalty":
        found = found + 0.1 * sum(each.square().sum() for each in model.parameters())
    return found  # type: ignore[no-any-return]


def batches(step: int) -> Iterator[torch.Tensor]:
    """Of each rank."""
    for rank in range(dist.get_world_size()):
        yield torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


RIGHT = (
    "as usual",
    "keeps an array",
    "keeps a clone",
    "keeps a deep copy",
    "keeps a pickle",
    "keeps a loss",
    "keeps a loss through a view",
    "returns its bias",
    "returns a view",
    "returns .data",
    "returns only its weight",
    "returns its bias, checkpointed",
    "checkpointed",
    "an own function",
    "a parametrized weight",
)
"""What is as in one process in each stage."""
REGISTERED = ("chunks", "another method")
"""What is in stage 3, if a program says which methods use weights."""
REFUSED = {
    "keeps its weight": "layers.0.linear.weight of unit layers.0 is used (square) while that unit does not run",
    "keeps a view": "layers.0.linear.weight of unit layers.0 is used (square) while that unit does not run",
    "keeps .data": "layers.0.linear.weight of unit layers.0 is used (square) while that unit does not run",
    "keeps a detached one": "layers.0.scale of unit layers.0 is used (square) while that unit does not run",
    "keeps a part": "layers.0.scale of unit layers.0 is used (square) while that unit does not run",
    "changes its weight": "layers.0.scale of unit layers.0 is changed (clamp_)",
    "changes its data": "layers.0.scale of unit layers.0 is changed (__setitem__)",
    "another unit's weight": "layers.0.linear.weight of unit layers.0 is used (linear) beside",
    "another unit's scale": "layers.0.scale of unit layers.0 is used (mul) beside",
    "an earlier weight": "layers.0.linear.weight is used (linear) as it was before shard()",
    "chunks": "heads.0.linear.weight of unit heads.0 is used (linear) beside",
    "another method": "head.weight of the model is used (linear) beside",
    "a penalty": "For a penalty on weights use weight_decay",
}
"""What is not, by what is said of it."""


def used_so(cases: Sequence[str], stage: int, registers: bool = False) -> dict[str, tuple[str, float]]:
    """`used`, of several cases."""
    return {how: used(how, stage, registers) for how in cases}


def used(how: str, stage: int, registers: bool = False) -> tuple[str, float]:
    """What is said where a program trains so; and how far weights and losses are from those of one process then.

    Args:
        how: a case of `Layer`, of `Net`, or of `losses`.
        stage: 1, 2 or 3.
        registers: methods other than forward, as the documentation says.
    """
    model, plain = Net(how), Net(how)
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.05), stage=stage)
    stepper = torch.optim.SGD(plain.parameters(), lr=0.05)
    if registers:
        for module, name in ((model, "encode"), (model, "scaled"), (model.heads[0], "chunked")):
            register_fsdp_forward_method(module, name)
    apart = 0.0
    rank = dist.get_rank()

    def train(step: int) -> None:
        nonlocal apart
        own = losses(model, how, [*batches(step)][rank])
        own.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        trained = [*plain.parameters()]
        sums: list[torch.Tensor] | None = None
        for number, batch in enumerate(batches(step)):
            loss = losses(plain, how, batch)
            if number == rank:
                apart = max(apart, float((loss - own).detach().abs()))
            loss.backward()  # type: ignore[no-untyped-call]
            mine = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
            sums = mine if sums is None else [one + other for one, other in zip(sums, mine, strict=True)]
            plain.zero_grad()
        assert sums is not None
        for each, total in zip(trained, sums, strict=True):
            each.grad = total / dist.get_world_size()
        stepper.step()
        plain.zero_grad()

    for step in range(2):
        if words := said(lambda: train(step)):  # noqa: B023 (called at once)
            return words, apart
    after = shoal.zero.full_state_dict(model)
    return "", max(apart, *(float((after[name] - value).abs().max()) for name, value in plain.state_dict().items()))


def evaluated(stage: int, mode: str) -> tuple[str, float]:
    """How far a loop as in generation, without gradients, is from one process, behind and before training."""
    model, plain = Net("returns its bias"), Net("returns its bias")
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.05), stage=stage)
    stepper = torch.optim.SGD(plain.parameters(), lr=0.05)
    context = torch.no_grad if mode == "no_grad" else torch.inference_mode
    start = next(batches(0))
    apart: list[float] = []

    def generate(of: Net) -> list[torch.Tensor]:
        of.eval()
        hidden, found = start, []
        with context():
            for _ in range(3):
                hidden = hidden + of(hidden)[:, None]
                found.append(hidden.clone())
        of.train()
        return found

    def run() -> None:
        for one, other in zip(generate(model), generate(plain), strict=True):
            apart.append(float((one - other).abs().max()))
        model(start).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain(start).mean().backward()
        stepper.step()
        for one, other in zip(generate(model), generate(plain), strict=True):
            apart.append(float((one - other).abs().max()))

    return said(run), max(apart, default=-1.0)


def _written_by_set_data(value: torch.Tensor) -> torch.Tensor:
    found = torch.empty(0)
    found.data = value
    return found + 1


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "an operator": lambda each: each + 1,
    "beside another": lambda each: torch.ones(()) + each,
    "torch.ops": lambda each: torch.ops.aten.mul.Tensor(each, 2),
    "a list": lambda each: torch._foreach_mul([each], 2)[0],
    "copy_": lambda each: torch.zeros(each.shape).copy_(each),
    "numpy": lambda each: each.detach().numpy(),
    "dlpack": lambda each: torch.utils.dlpack.from_dlpack(each.detach()),
    "item": lambda each: each.reshape(-1)[0].item(),
    "repr": repr,
    "pickle": pickle.dumps,
    "deepcopy": lambda each: copy.deepcopy(each.detach()),
    "another dtype": lambda each: each.type(torch.float64),
    "a collective": dist.all_reduce,
    # Those that torch does not let anybody see:
    "torch.tensor": lambda each: torch.tensor(each.detach()),
    "torch.Tensor": lambda each: torch.Tensor(each) + 1,
    "vmap": torch.func.vmap(lambda row: row * 2),
    "grad": torch.func.grad(lambda value: (value * value).sum()),
    "as_subclass": lambda each: each.as_subclass(torch.Tensor) + 1,
    "data of another": _written_by_set_data,
}


def read_when_freed() -> dict[str, list[str]]:
    """What becomes of each way to read a weight, and views of it, whose unit does not run: the error, or the values."""
    model, _ = shoal.zero.shard(Net("as usual"), lambda each: torch.optim.SGD(each, lr=0.05), stage=3)
    kept: list[torch.Tensor] = []

    def keep(module: torch.nn.Linear, *_: object) -> None:
        kept.extend([module.weight, module.weight.t(), module.weight.data, module.weight.detach()[1:]])

    model.get_submodule("layers.0.linear").register_forward_hook(keep)
    model(next(batches(0)))
    found: dict[str, list[str]] = {}
    for name, read in READS.items():
        found[name] = []
        for each in kept:
            try:
                value = read(each)
            except (RuntimeError, ValueError) as error:
                found[name].append(f"{type(error).__name__}: {error}")
            else:
                found[name].append("nan" if torch.is_tensor(value) and value.isnan().all() else f"values: {value!r}")
    return found


def _phases(path: str, model: Net, optimizer: ShardedOptimizer) -> dict[str, Callable[[], object]]:
    averages = shoal.zero.EMA(optimizer, decay=0.5)
    batch = next(batches(0))
    return {
        "full_state_dict": lambda: shoal.zero.full_state_dict(model),
        "full_state_dict of a part": lambda: shoal.zero.full_state_dict(model.layers[0], rank0_only=True),
        "save": lambda: shoal.zero.save(f"{path}/more", model, optimizer),
        "consolidated": lambda: shoal.zero.save(f"{path}/more", model, optimizer, consolidated=True),
        "load": lambda: shoal.zero.load(f"{path}/saved", model, optimizer),
        "clip": lambda: optimizer.clip_grad_norm_(1.0),
        "step": optimizer.step,
        "forward": lambda: model(batch),
        "backward": lambda: losses(model, "as usual", batch).backward(),  # type: ignore[no-untyped-call]
        "averages": lambda: averages.average_parameters().__enter__(),
        "update": lambda: (averages.update(), optimizer.step()),
        "shard": lambda: shoal.zero.shard(Net("as usual"), lambda each: torch.optim.SGD(each, lr=0.05), stage=1),
    }


def killed_before(phase: str, path: str, stage: int, dies: Callable[[], None]) -> None:
    """Rank 1 is gone when the others do something together."""
    model, optimizer = shoal.zero.shard(Net("as usual"), lambda each: torch.optim.SGD(each, lr=0.05), stage=stage)
    shoal.zero.save(f"{path}/saved", model, optimizer)
    losses(model, "as usual", next(batches(0))).backward()  # type: ignore[no-untyped-call]
    do = _phases(path, model, optimizer)[phase]
    if dist.get_rank() == 1:
        dies()
    do()


class _Asks(torch.optim.SGD):
    """An optimizer whose step is given something."""

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        """Scale the rate for this step."""
        for group in self.param_groups:
            group["lr"] *= scale
        found = super().step(closure)
        for group in self.param_groups:
            group["lr"] /= scale
        return found


def _state_of(stage: int) -> tuple[torch.nn.Module, ShardedOptimizer]:
    model, optimizer = shoal.zero.shard(torch.nn.Linear(3, 2), torch.optim.AdamW, stage=stage)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def with_torchs_helpers(stage: int) -> dict[str, str]:
    """What is said of torch's own ways to save an optimizer, and to go on when a rank has no more data."""
    model, optimizer = _state_of(stage)
    return {
        "get": said(lambda: get_optimizer_state_dict(model, optimizer)),
        "both": said(lambda: get_state_dict(model, optimizer)),
        "weights": said(lambda: get_model_state_dict(model)),
        "join": said(optimizer.join),
        "Join": said(lambda: Join([optimizer])),  # type: ignore[list-item]
        "own": said(optimizer.state_dict),
        "unknown": said(lambda: optimizer.step(scale=2.0)),
    }


def stepped_with_options(stage: int) -> tuple[float, str]:
    """How far from one process a step is that is given something; and what is said if ranks give another one."""
    model, plain = Net("as usual"), Net("as usual")
    _, optimizer = shoal.zero.shard(model, lambda each: _Asks(each, lr=0.05), stage=stage)
    stepper = _Asks(plain.parameters(), lr=0.05)
    for each in (model, plain):
        losses(each, "as usual", next(batches(0))).backward()  # type: ignore[no-untyped-call]
    optimizer.step(scale=0.5)
    stepper.step(scale=0.5)
    found = shoal.zero.full_state_dict(model)
    apart = max(float((found[name] - value).abs().max()) for name, value in plain.state_dict().items())
    return apart, said(lambda: optimizer.step(scale=1.0 + dist.get_rank()))
