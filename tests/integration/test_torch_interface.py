"""What torch's own tools do with an optimizer, and `shoal.Optimizer` has to stand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import shoal
from shoal.base.thread_state import ThreadState
from shoal.errors import ConfigError
from shoal.strategies import LocalSGD
from tests.odd_torch import ODD


@pytest.fixture(scope="module")
def dht() -> Iterator[shoal.DHT]:
    """A network of one."""
    with shoal.DHT(start=True) as started:
        yield started


@pytest.fixture
def swarm_of(dht: shoal.DHT, request: pytest.FixtureRequest) -> Iterator[Callable[..., shoal.Optimizer]]:
    """A function that makes the optimizer of a run of its own: a step of 4 samples, by Adam."""
    made: list[shoal.Optimizer] = []

    def make(model: torch.nn.Module, optimizer: Any = None, **options: Any) -> shoal.Optimizer:
        values = {"dht": dht, "run_id": f"{request.node.name}-{len(made)}", "target_batch_size": 4}
        inner = (optimizer or partial(torch.optim.Adam, lr=0.1))(model.parameters())
        made.append(shoal.Optimizer(optimizer=inner, **{**values, "batch_size_per_step": 4, **options}))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def model_of(seed: int = 0) -> torch.nn.Linear:
    """A layer."""
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """The same batch so often."""
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward([model(torch.ones(4, 3)).square().mean()])
        optimizer.step()
    optimizer.zero_grad()


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All of them."""
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("kind", [torch.optim.SGD, partial(torch.optim.Adam, lr=0.1), torch.optim.AdamW])
def test_get_optimizer_state_dict_takes_no_step_of_the_swarm(swarm_of: Any, kind: Any) -> None:
    """Torch's helper calls `step` with zero gradients: epoch 0 became 1, and Adam's first step 0.074."""
    model, plain = model_of(), model_of()
    swarm = swarm_of(model, kind)
    before = swarm.collaboration.state
    found: Any = get_optimizer_state_dict(model, swarm)
    get_state_dict(model, swarm)
    assert (swarm.local_epoch, swarm.collaboration.state) == (0, before)
    reference = kind(plain.parameters())
    template: Any = get_optimizer_state_dict(plain, reference)
    assert {name: sorted(each) for name, each in found["state"].items()} == {
        name: sorted(each) for name, each in template["state"].items()
    }
    plain = model_of()
    train(plain, kind(plain.parameters()))
    train(model, swarm)
    assert swarm.local_epoch == 1
    assert torch.equal(weights(model), weights(plain))
    get_optimizer_state_dict(model, swarm)  # SGD has no statistics: it calls `step` each time
    assert swarm.local_epoch == 1


@pytest.mark.parametrize(
    "options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}]
)
def test_set_optimizer_state_dict_goes_on_from_what_it_is_given(swarm_of: Any, options: dict[str, Any]) -> None:
    """Into a fresh optimizer of a run, as into a plain one."""
    chosen = StateDictOptions(**options)
    model, plain = model_of(), model_of()
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    train(plain, reference, 3)
    saved = get_optimizer_state_dict(plain, reference, options=chosen)
    model.load_state_dict(plain.state_dict())
    swarm = swarm_of(model)
    set_optimizer_state_dict(model, swarm, copy.deepcopy(saved), options=chosen)
    train(plain, reference, 2)
    train(model, swarm, 2)
    assert swarm.local_epoch == 2
    assert torch.equal(weights(model), weights(plain))


def test_a_step_with_zero_gradients_before_the_first_batch_makes_statistics_only(swarm_of: Any) -> None:
    """Other libraries leave the rate as it is. Once a batch was counted, zeros are a batch."""
    model = model_of()
    swarm = swarm_of(model, target_batch_size=8)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    swarm.step()
    assert swarm.status().samples == 0
    assert [float(each["step"]) for each in swarm.state.values()] == [0.0, 0.0]
    train(model, swarm)
    assert not swarm.state
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    swarm.step()
    assert swarm.local_epoch == 1


def test_the_hooks_of_state_dicts_are_called(swarm_of: Any) -> None:
    """All four could be registered, and none was called; what one returns takes the place of what it was given."""
    model, called = model_of(), list[str]()
    swarm = swarm_of(model)
    swarm.register_state_dict_pre_hook(lambda _: called.append("before"))
    swarm.register_state_dict_post_hook(lambda _, saved: {**saved, "more": 1})
    swarm.register_state_dict_post_hook(lambda _, saved: called.append(f"after {saved['more']}"))
    swarm.register_load_state_dict_pre_hook(
        lambda _, saved: {name: each for name, each in saved.items() if name != "more"}
    )
    swarm.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
    train(model, swarm)
    swarm.load_state_dict(swarm.state_dict())
    assert called == ["before", "after 1", "loaded"]
    assert swarm.local_epoch == 1


def test_the_hooks_of_steps_are_called_for_steps_alone(swarm_of: Any) -> None:
    """Those of all optimizers were called for the trial steps that shoal takes with copies, too."""
    seen: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer)),
    ]
    model, called = model_of(), list[str]()
    inner = torch.optim.Adam(model.parameters())
    swarm = swarm_of(model, lambda _: inner)
    swarm.register_step_pre_hook(lambda *_: called.append("before"))
    swarm.register_step_post_hook(lambda *_: called.append("after"))
    inner.register_step_post_hook(lambda *_: called.append("inner"))
    train(model, swarm)
    swarm.load_state_dict(swarm.state_dict())
    for handle in handles:
        handle.remove()
    assert called == ["before", "inner", "after"]
    assert [each is swarm for each in seen] == [True, False, False, True]
    assert all(each is inner for each in seen[1:3])


def test_a_parameter_of_another_shape_is_named(swarm_of: Any) -> None:
    """Through `.data`; another dtype was named before. Also what comes in by the inner optimizer."""
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    swarm = swarm_of(model, lambda _: inner)
    model.weight.data = torch.ones(2, 4)
    torch.autograd.backward([model(torch.ones(4, 4)).square().mean()])
    with pytest.raises(ConfigError, match=r"parameter 0 of the optimizer is torch.float32 \(2, 4\) now, and was"):
        swarm.step()
    model.weight.data = torch.ones(2, 3)
    model.weight.grad = None
    inner.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match="the optimizer has 3 parameters, and had 2"):
        train(model, swarm)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_step_without_gradients_before_the_run_does_not_count(
    swarm_of: Any, kind: type[torch.optim.Optimizer], *, loaded: bool
) -> None:
    """Its counter stayed, and a warning said so: Adam's first step was 0.074 instead of 0.1."""
    plain, model = model_of(), model_of()
    alone, inner = kind(plain.parameters(), lr=0.1), kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    get_optimizer_state_dict(plain if loaded else model, alone if loaded else inner)
    swarm = swarm_of(model, lambda _: inner)
    if loaded:
        swarm.load_state_dict(alone.state_dict())
        alone = kind(plain.parameters(), lr=0.1)  # type: ignore[call-arg]
    assert swarm._training.kept.steps_taken == 0
    train(model, swarm)
    train(plain, alone)
    assert torch.equal(plain.weight, model.weight)
    assert [float(entry["step"]) for entry in inner.state.values()] == [1, 1]


def test_steps_that_a_peer_catches_up_with_compute_as_where_step_was_called_last(swarm_of: Any) -> None:
    """A program may set autocast, cores or modes after the optimizer was made, and in another thread."""
    model = model_of()
    swarm = swarm_of(model)
    made = swarm._training.stepper.thread
    with ODD["two threads"](), ODD["autocast"]():
        train(model, swarm)
        assert swarm._training.stepper.thread == ThreadState.here() != made
    train(model, swarm)
    assert swarm._training.stepper.thread == ThreadState.here() == made


def test_a_merging_peers_fragments_compute_as_where_step_was_called(swarm_of: Any) -> None:
    """But for gradients, which no outer optimizer records."""
    model = model_of()
    swarm = swarm_of(model, target_batch_size=None, strategy=LocalSGD(every=1))
    with ODD["two threads"]():
        train(model, swarm)
        assert [each.stepper.thread for each in swarm._training.fragments] == [
            ThreadState.here()._replace(gradients=False)
        ]
