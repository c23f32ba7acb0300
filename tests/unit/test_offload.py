"""`offload_optimizer`: the step is taken in memory of its own on the CPU, and gives the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import pytorch_optimizer
import torch

from shoal.errors import ConfigError
from shoal.run.decide.check import check_of
from shoal.train.inner import make_offloaded
from shoal.train.offload import Offload
from shoal.train.training_state import TrainingState

Factory = Callable[[Any], torch.optim.Optimizer]

FACTORIES: dict[str, Factory] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "ScheduleFreeAdamW": partial(pytorch_optimizer.ScheduleFreeAdamW, lr=0.1),
    "Lookahead": lambda params: pytorch_optimizer.Lookahead(torch.optim.AdamW(params, lr=0.1), k=2),
}


def weights(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Two of them, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((4, 3), (5,))]


def made(
    factory: Factory, dtype: torch.dtype = torch.float32, *, offload: bool, **options: Any
) -> tuple[TrainingState, list[torch.nn.Parameter]]:
    """The state of one peer, and its parameters."""
    parameters = weights(dtype)
    inner, lender = make_offloaded(parameters, factory) if offload else (factory(parameters), None)
    return TrainingState(inner, unit=4, offload=lender, **options), parameters


def train(training: TrainingState, parameters: Sequence[torch.Tensor], *, steps: int, first: int = 0) -> None:
    """Steps of two batches each."""
    for number in range(2 * first, 2 * (first + steps)):
        generator = torch.Generator().manual_seed(number)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        assert training.accumulate(2)
        if number % 2:
            training.use_own_mean()
            training.step()


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_an_offloaded_step_gives_the_same_bits(name: str, dtype: torch.dtype, max_grad_norm: float | None) -> None:
    """Parameters and statistics; also of a peer that takes the state over in the middle, and loads it afterwards."""
    plain, wanted = made(FACTORIES[name], dtype, offload=False, max_grad_norm=max_grad_norm)
    ours, parameters = made(FACTORIES[name], dtype, offload=True, max_grad_norm=max_grad_norm)
    train(plain, wanted, steps=3)
    train(ours, parameters, steps=3)
    newcomer, others = made(FACTORIES[name], dtype, offload=True, max_grad_norm=max_grad_norm)
    newcomer.load(*copy.deepcopy(plain.export()))
    for training, trained in ((plain, wanted), (ours, parameters), (newcomer, others)):
        train(training, trained, steps=3, first=3)
    assert not torch.equal(parameters[0], weights(dtype)[0])
    assert plain.fingerprint() == ours.fingerprint() == newcomer.fingerprint()
    if name != "Lookahead":  # whose state dict torch's Adam does not load
        saved = copy.deepcopy(ours.optimizer.state_dict())
        train(ours, parameters, steps=1, first=6)
        ours.kept.switch(ours.kept.prepare_loaded(saved))
        assert ours.export()[0]["optimizer"] == plain.export()[0]["optimizer"]


def test_the_step_is_taken_in_memory_of_its_own() -> None:
    """The optimizer sees it from when it is made; before and after, the parameters have the memory of their device."""
    seen, factory = list[list[int]](), partial(torch.optim.AdamW, lr=0.1)

    def make(params: Any) -> torch.optim.Optimizer:
        listed = list(params)
        seen.append([each.data_ptr() for each in listed])
        inner = factory(listed)
        inner.register_step_pre_hook(lambda *_: seen.append([each.data_ptr() for each in listed]))
        return inner

    training, parameters = made(make, offload=True)
    homes = [each.data_ptr() for each in parameters]
    train(training, parameters, steps=2)
    assert [each.data_ptr() for each in parameters] == homes
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]
    assert not set(seen[0]) & set(homes)
    with torch.no_grad():
        parameters[0].zero_()  # as a checkpoint of the model is loaded: there is no second copy that is older
    training.accumulators[0].zero_()
    training.use_accumulators()
    training.optimizer.param_groups[0]["lr"] = 0.0
    training.step()
    assert not parameters[0].count_nonzero()


def test_gradients_and_graphs_of_the_program_stay_as_they_are() -> None:
    """`.grad` is the user's again, its hooks are called, and a graph that is held over the step sees the change."""
    training, (weight, other) = made(FACTORIES["SGD"], offload=True)
    called = list[torch.Tensor]()
    weight.register_hook(called.append)  # type: ignore[no-untyped-call]
    torch.autograd.backward(weight.sum() + other.sum())
    held = weight.square().sum()
    training.accumulate(4)
    before = weight.grad
    training.use_own_mean()
    training.step()
    assert weight.grad is before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(held)
    torch.autograd.backward(weight.sum())
    assert len(called) == 2
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2.0] * 3] * 4


def test_an_error_of_the_step_leaves_the_parameters_at_home() -> None:
    """As without offload: the error is raised, and the next average is stepped from."""

    def fail(*_: object) -> None:
        raise ValueError("no")

    training, parameters = made(FACTORIES["SGD"], offload=True)
    homes = [each.data_ptr() for each in parameters]
    hook = training.optimizer.register_step_pre_hook(fail)
    with pytest.raises(ValueError, match="no"):
        train(training, parameters, steps=1)
    assert [each.data_ptr() for each in parameters] == homes
    assert torch.equal(parameters[0], weights()[0])
    hook.remove()
    train(training, parameters, steps=1)
    assert training.epoch == 1


def test_weights_to_evaluate_with() -> None:
    """ScheduleFree computes them from statistics on the CPU; the way back gives the bits before."""
    plain, wanted = made(FACTORIES["ScheduleFreeAdamW"], offload=False)
    ours, parameters = made(FACTORIES["ScheduleFreeAdamW"], offload=True)
    for training, trained in ((plain, wanted), (ours, parameters)):
        train(training, trained, steps=3)
    trained_with, home, seen = parameters[0].detach().clone(), parameters[0].data_ptr(), set[int]()
    inner: Any = ours.optimizer

    def look_and(own: Callable[[], None]) -> None:
        seen.add(parameters[0].data_ptr())
        own()

    for name in ("eval", "train"):
        own = getattr(inner, name)
        setattr(inner, name, partial(look_and, own))
    plain.weights.evaluate()
    ours.weights.evaluate()
    assert torch.equal(parameters[0], wanted[0])
    assert not torch.equal(parameters[0], trained_with)
    ours.weights.train()
    assert torch.equal(parameters[0], trained_with)
    assert len(seen) == 1
    assert home not in seen


def test_groups_and_frozen_parameters() -> None:
    """Only those that are trained get memory on the CPU; names and groups are as torch takes them."""
    first, second = weights()
    second.requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": [("first", first)]}, {"params": [("second", second)], "lr": 1.0}]
    inner, lender = make_offloaded(groups, torch.optim.SGD)
    assert [group["params"] for group in inner.param_groups] == [[first], [second]]
    with lender.on_host():
        assert first.data_ptr() != second.data_ptr()
        lent = first.data_ptr()
    assert lent != first.data_ptr()


def test_the_check_of_parameters_compares_with_peers_that_step_on_a_cpu() -> None:
    """Wherever the parameters are, the arithmetic is that of the CPU."""
    parameters = weights()
    inner = FACTORIES["AdamW"](parameters)
    elsewhere = [each.to("meta") for each in parameters]
    with pytest.raises(NotImplementedError):  # so the line below fails if it looks at the parameters' device
        check_of(inner, elsewhere, bytes(32), on_host=True)
    assert check_of(inner, parameters, bytes(32), on_host=True) == check_of(inner, parameters, bytes(32))


def test_a_ready_optimizer_is_refused() -> None:
    """It may hold statistics on the device already."""
    with pytest.raises(ConfigError, match="offload_optimizer=True needs params"):
        make_offloaded(weights(), torch.optim.SGD(weights()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_holds_parameters_and_gradients_only() -> None:
    """No statistics, no sums; the parameters are those of a CPU, to the bit, where the gradients are."""
    wanted, expected = made(FACTORIES["AdamW"], offload=False)
    train(wanted, expected, steps=3)
    parameters = [torch.nn.Parameter(each.detach().cuda()) for each in weights()]
    inner, lender = make_offloaded(parameters, FACTORIES["AdamW"])
    training = TrainingState(inner, unit=4, offload=lender)
    held = torch.cuda.memory_allocated()
    for number in range(6):
        generator = torch.Generator().manual_seed(number)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).cuda()
        assert training.accumulate(2)
        for parameter in parameters:
            parameter.grad = None
        if number % 2:
            training.use_own_mean()
            training.step()
    assert torch.cuda.memory_allocated() == held
    assert all(each.is_cuda for each in parameters)
    assert all(not value.is_cuda for entry in inner.state.values() for value in entry.values())
    assert all(not each.is_cuda for each in training.accumulators)
    for ours, theirs in zip(parameters, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    newcomer = TrainingState(*_offloaded_on_gpu())
    newcomer.load(*training.export())
    assert newcomer.fingerprint() == training.fingerprint()


def _offloaded_on_gpu() -> tuple[torch.optim.Optimizer]:
    return (FACTORIES["AdamW"]([torch.nn.Parameter(each.detach().cuda()) for each in weights()]),)


def test_memory_is_lent_within_the_block_only() -> None:
    """Values that were written there come home."""
    parameter = torch.nn.Parameter(torch.ones(3))
    lender = Offload([parameter])
    with lender.on_host(), torch.no_grad():
        parameter.add_(1.0)
    assert parameter.tolist() == [2.0] * 3
