"""Operations of torch that programs use with weights, on the ranks of the tests of `shoal.zero`."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import shoal.zero
from tests.integration.zero_programs import said

WIDTH = 4
Use = Callable[[torch.Tensor, Any], Any]


def _nested(hidden: torch.Tensor, layer: torch.nn.Linear) -> Any:
    return checkpoint(lambda each: checkpoint(layer, each, use_reentrant=False), hidden, use_reentrant=False)


def _gradient_within(hidden: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
    found = layer(hidden)
    (gradient,) = torch.autograd.grad(found.square().sum(), layer.weight, create_graph=True)
    return found + gradient.sum()  # type: ignore[no-any-return]


WITHIN: dict[str, Use] = {
    "view": lambda hidden, each: linear(hidden, each.weight.view(WIDTH, WIDTH), each.bias),
    "expand": lambda hidden, each: torch.bmm(hidden[None], each.weight.t().expand(1, WIDTH, WIDTH))[0],
    "chunk": lambda hidden, each: torch.cat([linear(hidden, part) for part in each.weight.chunk(2)], 1),
    "unbind": lambda hidden, each: torch.stack([hidden @ row for row in each.weight.unbind()], 1),
    "einsum": lambda hidden, each: torch.einsum("bi,oi->bo", hidden, each.weight),
    "stacked": lambda hidden, each: torch.einsum("bi,koi->bo", hidden, torch.stack([each.weight, each.weight.t()])),
    "vmap": lambda hidden, each: torch.func.vmap(lambda row: linear(row, each.weight, each.bias))(hidden),
    "functional_call": lambda hidden, each: torch.func.functional_call(each, dict(each.named_parameters()), (hidden,)),
    "jvp": lambda hidden, each: torch.func.jvp(lambda x: linear(x, each.weight), (hidden,), (hidden,))[1],
    "grad": lambda hidden, each: torch.func.grad(lambda x: linear(x, each.weight).square().sum())(hidden),
    "autograd.grad within": _gradient_within,
    "as_strided": lambda hidden, each: linear(hidden, torch.as_strided(each.weight, (WIDTH, WIDTH), (1, WIDTH))),
    "straight-through": lambda hidden, each: linear(hidden, each.weight + (each.weight.sign() - each.weight).detach()),
    "deepcopy": lambda hidden, each: each(hidden) + copy.deepcopy(each)(hidden),
    "item": lambda hidden, each: each(hidden) * each.weight.mean().item(),
    "nested checkpoints": _nested,
    "reentrant checkpoint": lambda hidden, each: checkpoint(each, hidden, use_reentrant=True),
}
"""Of its unit's weights, in `forward`: right in each stage."""
OUTSIDE: dict[str, Use] = {
    "stack": lambda hidden, each: hidden @ torch.stack([each.weight, each.weight])[0],
    "matmul": lambda hidden, each: hidden @ each.weight,
    "embedding": lambda hidden, each: hidden + torch.nn.functional.embedding(torch.zeros(3).long(), each.weight),
    "index": lambda hidden, each: hidden + each.weight[0],
    "norm": lambda hidden, each: hidden * each.weight.norm(),
    "item": lambda hidden, each: hidden * each.weight.norm().item(),
    "float": lambda hidden, each: hidden * float(each.weight.sum()),
    "tolist": lambda hidden, each: hidden * each.bias.tolist()[0],
    "clone": lambda hidden, each: linear(hidden, each.weight.clone()),
    "vmap": lambda hidden, each: torch.func.vmap(lambda row: linear(row, each.weight))(hidden),
    "functional_call": lambda hidden, each: torch.func.functional_call(each, dict(each.named_parameters()), (hidden,)),
    "the layer": lambda hidden, each: each(hidden),
    "checkpoint": lambda hidden, each: checkpoint(lambda x: linear(x, each.weight), hidden, use_reentrant=False),
    "full_tensor": lambda hidden, each: linear(hidden, getattr(each.weight, "full_tensor", lambda: each.weight)()),
}
"""Of another unit's: an error in stage 3."""


def _saved(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    torch.load(file, weights_only=True)
    return loss


def _both(_: object, loss: torch.Tensor) -> torch.Tensor:
    return loss


def _twice(model: torch.nn.Module, _: torch.Tensor) -> torch.Tensor:
    inputs = _batch(0).requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).square().mean(), inputs, create_graph=True)
    return gradient.square().sum()


def _asked(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    return torch.stack([each.sum() for each in torch.autograd.grad(loss, [*model.parameters()])]).sum()


def _penalty(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    return loss + torch.stack([each.norm() for each in model.parameters()]).sum()


def _vector(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    return loss + torch.nn.utils.parameters_to_vector(model.parameters()).square().sum()


def _first(model: Any) -> Any:
    return model.layers[0].linear.weight


BESIDE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "deepcopy": lambda model, loss: (copy.deepcopy(_first(model)), loss)[1],
    "pickle": lambda model, loss: (pickle.loads(pickle.dumps(_first(model))), loss)[1],
    "torch.save": _saved,
    "functional_call": lambda model, _: torch.func.functional_call(
        model, dict(model.named_parameters()), (_batch(0),)
    ).mean(),
    "vmap": lambda model, _: torch.func.vmap(model)(_batch(0)).mean(),
    "compile": lambda model, _: torch.compile(model, backend="eager")(_batch(0)).mean(),  # type: ignore[no-untyped-call]
    "repr": lambda model, loss: (repr(_first(model)), loss)[1],
    "averages": lambda model, loss: (_first(model).detach().clone().lerp_(_first(model).detach(), 0.1), loss)[1],
}
"""Beside the model, where a step begins: right in each stage."""
REFUSED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "autograd.grad": _asked,
    "twice": _twice,
    "jacrev": lambda model, _: torch.func.jacrev(model)(_batch(0)).mean(),
    "a penalty by norms": _penalty,
    "parameters_to_vector": _vector,
    "numpy": lambda model, loss: loss * _first(model).detach().numpy().sum(),
    "bool": lambda model, loss: loss * bool((_first(model) < 10).all()),
    "iterated": lambda model, loss: loss * len([*_first(model)]),
}
"""An error in stage 3."""


class Layer(torch.nn.Module):
    """One."""

    def __init__(self, use: Use | None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.use = use

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (3, WIDTH)."""
        found: torch.Tensor = self.linear(hidden) if self.use is None else self.use(hidden, self.linear)
        return found


class Net(torch.nn.Module):
    """Two layers, and what is done with the weights of the first behind them."""

    def __init__(self, within: Use | None = None, outside: Use | None = None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.ModuleList([Layer(within), Layer(within)])
        self.head, self.outside = torch.nn.Linear(WIDTH, WIDTH), outside

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (3, WIDTH)."""
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        if self.outside is not None:
            hidden = self.outside(hidden, self.layers[0].linear)
        found: torch.Tensor = self.head(hidden)
        return found


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


def used(kind: str, cases: Sequence[str], stage: int) -> dict[str, tuple[str, float]]:
    """What is said where a program does so; and how far a step of it is from one process."""
    found = {}
    for how in cases:
        within, outside = None, None
        beside: Callable[[Any, torch.Tensor], Any] = _both
        if kind == "within":
            within = WITHIN[how]
        elif kind == "outside":
            outside = OUTSIDE[how]
        else:
            beside = (BESIDE | REFUSED)[how]
        found[how] = _used(lambda a=within, b=outside: Net(a, b), beside, stage)  # type: ignore[misc]
    return found


def compiled() -> tuple[str, float]:
    """What is said where a unit is compiled before `shard`; and how far a step is from one process."""

    def make() -> Net:
        model = Net()
        model.layers[0].compile(backend="aot_eager")
        return model

    try:
        return _used(make, _both, 3)
    finally:
        torch._dynamo.reset()


def _used(make: Callable[[], Net], beside: Callable[[Any, torch.Tensor], Any], stage: int) -> tuple[str, float]:
    model, plain = make(), make()
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)

    def run() -> None:
        beside(model, model(_batch(dist.get_rank())).square().mean()).backward()
        optimizer.step()

    if words := said(run):
        return words, -1.0
    for rank in range(dist.get_world_size()):
        (beside(plain, plain(_batch(rank)).square().mean()) / dist.get_world_size()).backward()
    stepper.step()
    after = shoal.zero.full_state_dict(model)
    return "", max(float((after[name] - value).abs().max()) for name, value in plain.state_dict().items())
