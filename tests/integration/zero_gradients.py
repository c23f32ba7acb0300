"""Gradients that programs ask for, watch or clear in ways of their own, on the ranks of the tests of `shoal.zero`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import shoal.zero
from shoal.zero.parameters import local
from tests.integration.zero_programs import said

WIDTH = 4


class Net(torch.nn.Module):
    """Layers in a list, a head beside them, and another one that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head, self.other = torch.nn.Linear(WIDTH, 1), torch.nn.Linear(WIDTH, 1)

    def forward(self, hidden: torch.Tensor, head: str = "head") -> torch.Tensor:
        """Shape (batch, 1)."""
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.get_submodule(head)(hidden)  # type: ignore[no-any-return]


def batch(step: int, rank: int) -> torch.Tensor:
    """The samples of a rank."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


Pass = Callable[[Net, torch.Tensor, float], object]
"""The passes of one rank, of a model and a batch; losses are scaled by the number."""


def _all_named(model: Net, samples: torch.Tensor, scale: float) -> None:
    (model(samples).square().mean() * scale).backward(inputs=list(model.parameters())[:-2])


def _one_named(model: Net, samples: torch.Tensor, scale: float) -> None:
    (model(samples).square().mean() * scale).backward(inputs=model.head.weight)


def _two_losses(model: Net, samples: torch.Tensor, scale: float) -> None:
    """Of one graph, each for its part of the model."""
    found = model(samples)
    (found.square().mean() * scale).backward(inputs=list(model.layers.parameters()), retain_graph=True)
    (found.abs().mean() * scale).backward(inputs=list(model.head.parameters()))


def _function(model: Net, samples: torch.Tensor, scale: float) -> None:
    torch.autograd.backward([model(samples).square().mean() * scale], inputs=dict(model.layers.named_parameters()))


def _without_gradients(model: Net, samples: torch.Tensor, scale: float) -> None:
    loss = model(samples).square().mean() * scale
    with torch.no_grad():
        loss.backward(inputs=list(model.layers.parameters()))


def _edges(model: Net, samples: torch.Tensor, scale: float) -> None:
    edges = [get_gradient_edge(each) for each in model.layers.parameters()]
    (model(samples).square().mean() * scale).backward(inputs=edges)


NAMED: dict[str, Pass] = {
    "all": _all_named,
    "one": _one_named,
    "two losses": _two_losses,
    "torch.autograd.backward": _function,
    "no_grad": _without_gradients,
    "edges": _edges,
}
"""Passes that name the parameters that they are for."""


def _apart(model: torch.nn.Module, plain: torch.nn.Module) -> float:
    after = shoal.zero.full_state_dict(model)
    return max(float((after[name] - value).abs().max()) for name, value in plain.state_dict().items())


def named(cases: Sequence[str], stage: int) -> dict[str, float]:
    """How far two steps of such passes are from those of one process."""
    ranks, found = dist.get_world_size(), {}
    for how in cases:
        plain, run = Net(), NAMED[how]
        stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
        model, optimizer = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
        for step in range(2):
            run(model, batch(step, dist.get_rank()), 1.0)
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            for rank in range(ranks):
                run(plain, batch(step, rank), 1 / ranks)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            stepper.step()
            stepper.zero_grad()
        found[how] = _apart(model, plain)
    return found


def watched(stage: int) -> list[list[bool]]:
    """For each call of a hook of all parameters, in two passes, which of them have a gradient."""
    model, _ = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    calls: list[list[bool]] = []

    def hook(gradients: Sequence[torch.Tensor | None]) -> None:
        pairs = zip(gradients, shapes, strict=True)
        calls.append([each is not None and each.shape == wanted for each, wanted in pairs])

    shapes = [each.shape for each in model.parameters()]
    handle = register_multi_grad_hook(list(model.parameters()), hook)
    for step in range(2):
        model(batch(step, dist.get_rank())).sum().backward()
    handle.remove()
    model(batch(2, dist.get_rank())).sum().backward()
    return calls


def _to_zeros(model: torch.nn.Module) -> None:
    for each in model.parameters():
        if each.grad is not None:
            each.grad.zero_()


CLEARS: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer], object]] = {
    "the optimizer": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "the model": lambda model, _: model.zero_grad(set_to_none=False),
    "a layer": lambda model, _: model.get_submodule("layers.1").zero_grad(set_to_none=False),
    "by hand": lambda model, _: _to_zeros(model),
}
"""Ways to set gradients to zeros."""


def cleared_to_zeros(stage: int) -> dict[str, float]:
    """How far a program that does so is from one process; it steps with zeros, and with gradients of a part."""
    found = {}
    for how, clear in CLEARS.items():
        models = [Net(), Net()]
        made: list[torch.optim.Optimizer] = []
        for number, model in enumerate(models):

            def factory(each: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
                return torch.optim.SGD(each, lr=0.1, momentum=0.9, weight_decay=0.1)

            made.append(factory([*model.parameters()]) if number else shoal.zero.shard(model, factory, stage=stage)[1])
        for model, optimizer in zip(models, made, strict=True):
            clear(model, optimizer)
            model(batch(0, 0)).sum().backward()
            optimizer.step()
            clear(model, optimizer)
            optimizer.step()
            model(batch(1, 0), "other").sum().backward()
            clear(model, optimizer)
            model(batch(2, 0)).sum().backward()
            optimizer.step()
        assert all((each.grad is None) == (other.grad is None) for each, other in _pairs(models))
        clear(models[0], made[0])
        if how != "a layer":
            assert not any(bool(local(each.grad).any()) for each in models[0].parameters() if each.grad is not None)
        found[how] = _apart(*models)
    return found


def _pairs(models: Sequence[torch.nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(models[0].parameters(), models[1].parameters(), strict=True))


def used(stage: int) -> dict[str, str]:
    """What is said where a program uses the gradients behind a pass as if they were its own."""
    model, _ = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    model(batch(0, dist.get_rank())).sum().backward()
    gradient = model.head.weight.grad
    assert gradient is not None
    assert gradient.shape == gradient.detach().shape == (1, WIDTH)
    assert "head.weight" in repr(gradient)
    parameters = [*model.layers.parameters(), *model.head.parameters()]
    uses: dict[str, Callable[[], object]] = {
        "clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
        "clip_grad_value_": lambda: torch.nn.utils.clip_grad_value_(parameters, 1.0),
        "isfinite": lambda: [each.grad.isfinite().all() for each in parameters if each.grad is not None],
        "a norm of data": lambda: torch.norm(gradient.data),
        "an ascent": lambda: model.head.weight.detach().add_(gradient * 0.1),
        "mul_": lambda: gradient.mul_(0.5),
    }
    return {how: said(use) for how, use in uses.items()}


def a_unit_before_the_model(stage: int) -> float:
    """How far a program that calls a layer by itself first, and then the model, is from one process."""
    plain = Net()
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    for step in range(2):
        for each, stepped in ((model, optimizer), (plain, stepper)):
            hidden = each.layers[1](each.layers[0](batch(step, 0)).tanh())
            (hidden.square().mean() + each(batch(step, 0)).mean()).backward()
            stepped.step()
            stepped.zero_grad()
    return _apart(model, plain)


def what_stage_3_cannot() -> dict[str, str]:
    """What is said of a forward-mode derivative, and of copies of a model."""
    model, _ = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=3)

    def derive() -> None:
        samples = batch(0, dist.get_rank())
        with forward_ad.dual_level():
            model(forward_ad.make_dual(samples, torch.ones_like(samples)))  # type: ignore[no-untyped-call]

    return {
        "torch.func.jvp": said(derive),
        "full_state_dict": said(lambda: copy.deepcopy(model)),
        "shoal.zero.EMA": said(lambda: torch.optim.swa_utils.AveragedModel(model)),
        "shoal.zero.save": said(lambda: pickle.dumps(model)),
    }


def hooks_of_states(stage: int) -> list[str]:
    """The hooks of an optimizer's state dictionaries that run."""
    _, optimizer = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    ran: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: ran.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda *_: ran.append("behind saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: ran.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda _: ran.append("behind loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    return ran
