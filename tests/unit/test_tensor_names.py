"""Errors and warnings name a tensor by its name in the model, wherever the program has told it."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.base.names import known_as
from shoal.errors import ConfigError, StateUnavailable
from shoal.events import Event, EventBus, LocalValuesRejected, Warned
from shoal.run.decide.committed import Committed
from shoal.run.decide.state_name import StateName
from shoal.run.join.shared_state import share
from shoal.run.report.notices import Notices
from shoal.state.finite import infinite_tensors
from shoal.strategies import DiLoCo
from shoal.strategies.outer import LocalSteps
from shoal.train.gradient_watch import GradientWatch
from shoal.train.inner import make_offloaded, make_optimizer
from shoal.train.model import learn_names
from shoal.train.training_state import TrainingState


class Net(torch.nn.Module):
    """A layer of each peer's own name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)
        self.table = torch.nn.Embedding(1 << 18, 1, sparse=True)


def by_model(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Names are those of `model=`."""
    learn_names(model)
    return make_optimizer(None, torch.optim.Adam(model.parameters(), lr=0.1))


def by_pairs(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Names are those that the optimizer was given."""
    return make_optimizer(None, torch.optim.Adam(model.named_parameters(), lr=0.1))


@pytest.fixture(params=[by_model, by_pairs])
def made(request: pytest.FixtureRequest) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    """Makes an optimizer in one of the ways in which names are told."""
    return request.param  # type: ignore[no-any-return]


def with_gradients(model: torch.nn.Module, value: float = 1.0) -> None:
    """All trained parameters have one."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def refused(training: TrainingState, change: Callable[[], object]) -> str:
    """The error that the next batch raises after a change."""
    change()
    with pytest.raises(ConfigError) as raised:
        training.accumulate(1)
    return f"{raised.value}"


def test_batches_are_refused_by_names(made: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
    """They said that parameter 2 of the optimizer was replaced, is of another dtype, or is to be trained now."""
    model = Net()
    model.norm.weight.requires_grad_(False)
    training = TrainingState(made(model))
    with_gradients(model)
    said = refused(training, lambda: model.norm.weight.requires_grad_(True))
    assert said.startswith("parameter norm.weight of the optimizer requires a gradient")
    model.norm.weight.requires_grad_(False)
    said = refused(training, lambda: setattr(model.stem.bias, "data", torch.zeros(3).half()))
    assert said.startswith("parameter stem.bias of the optimizer is torch.float16 (3,) now")
    training.optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(torch.zeros(3))
    assert refused(training, lambda: None).startswith("parameter stem.bias of the optimizer was replaced")


def test_bad_values_are_told_by_names(made: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
    """A gradient that is not finite, a weight that is not, and one that is frozen on this peer alone."""
    model, told = Net(), list[Event]()
    training, events = TrainingState(made(model)), EventBus()
    events.subscribe(told.append)
    notices = Notices(events, "run")
    with_gradients(model)
    model.stem.bias.grad = torch.full((3,), math.nan)
    assert not training.accumulate(1)
    notices.accumulated(training)
    assert [each.reason for each in told if isinstance(each, LocalValuesRejected)] == [
        "gradients of stem.bias that are not finite, or too large to be summed: their batch is left out"
    ]
    (warned,) = (each.message for each in told if isinstance(each, Warned))
    assert "(of stem.bias, last)" in warned
    model.stem.weight.data[0] = math.inf
    assert not training.accumulate(1)
    assert training.broken is not None
    assert training.broken.startswith("trained parameter stem.weight (float32) is not finite")
    model.stem.weight.data.zero_()
    model.stem.bias.requires_grad_(False)
    model.stem.bias.grad = None
    for _ in range(4):
        training.accumulate(1)
        training.accumulators[1].fill_(1.0)
        training.use_accumulators()
        training.step(unused=set())
    assert training.tensors.frozen_here is not None
    assert training.tensors.frozen_here.startswith("trained parameter stem.bias is frozen here")


def test_tensors_that_cannot_be_trained_are_named(made: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
    """A dtype that cannot be averaged, no values, two parameters of one memory, an extra tensor of whole numbers."""
    model = Net()
    model.stem.bias = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"^parameter stem\.bias of the optimizer has dtype torch\.complex64"):
        TrainingState(made(model))
    model.stem.bias = torch.nn.Parameter(model.norm.bias.data)
    with pytest.raises(ConfigError, match=r"^parameter stem\.bias of the optimizer and parameter norm\.bias of the "):
        TrainingState(made(model))
    model.stem = torch.nn.Linear(2, 3, device="meta")
    with pytest.raises(ConfigError, match=r"^parameter stem\.weight of the optimizer has no values yet"):
        made(model)


@pytest.mark.parametrize("named", [True, False])
def test_what_cannot_be_offloaded_is_named(*, named: bool) -> None:
    """It said that trained parameter 0 cannot be moved."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.LazyLinear(2))
    if not named:
        learn_names(model)
    given: Any = model.named_parameters() if named else model.parameters()
    with pytest.raises(ConfigError, match=r"cannot move trained parameter 1\.weight: it has no values yet"):
        make_offloaded(given, torch.optim.Adam)


def stepped(made: Callable[[torch.nn.Module], torch.optim.Optimizer], model: Net) -> TrainingState:
    """After one step, so that the optimizer has statistics."""
    training = TrainingState(made(model), extra_tensors=[model.norm.running_mean])  # type: ignore[list-item]
    with_gradients(model)
    assert training.accumulate(1)
    training.use_own_mean()
    training.step()
    return training


def test_a_state_that_went_wrong_is_named(made: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
    """It said that tensor 1, or tensor 9, of the state holds NaN."""
    model = Net()
    training = stepped(made, model)
    state = share(training, StateName(1, b"n" * 16, 1), Committed())

    def wrong(tensor: torch.Tensor) -> str:
        before = tensor.detach().clone()
        tensor.data.fill_(math.nan)
        with pytest.raises(ConfigError) as raised:
            infinite_tensors(state.tensors, range(len(state.tensors)), state.may_be_infinite, state.called)
        tensor.data.copy_(before)
        return f"{raised.value}"

    assert wrong(model.stem.bias).startswith("tensor stem.bias of the state holds NaN")
    kept = training.optimizer.state[model.norm.weight]
    assert wrong(kept["exp_avg_sq"]).startswith(
        "statistic 'exp_avg_sq' of parameter norm.weight in the state holds NaN"
    )
    by_model(model)
    assert wrong(model.norm.running_mean).startswith("tensor norm.running_mean")  # type: ignore[arg-type]


def test_states_that_do_not_fit_are_named(made: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
    """Another shape, a statistic that is not finite, and one from which no step can be taken."""
    model = Net()
    training = stepped(made, model)
    values, tensors = training.export()
    with pytest.raises(StateUnavailable, match=r"tensor stem\.weight is \(1,\) torch\.float32"):
        training.load(values, [torch.zeros(1), *tensors[1:]])
    saved = copy.deepcopy(training.optimizer.state_dict())
    saved["state"][1]["exp_avg"].fill_(math.nan)
    with pytest.raises(ValueError, match=r"statistic 'exp_avg' of parameter stem\.bias is not finite"):
        training.kept.prepare_loaded(saved)
    saved = copy.deepcopy(training.optimizer.state_dict())
    del saved["state"][1]["exp_avg_sq"]
    with pytest.raises(ValueError, match=r"parameter stem\.bias cannot be stepped from it"):
        training.kept.prepare_loaded(saved)


def warning_of(watch: GradientWatch, steps: int) -> str:
    """What it says within so many steps."""
    return "".join(said for said in (watch.at_step() for _ in range(steps)) if said is not None)


def test_gradients_that_stay_away_or_are_sparse_are_named(
    made: Callable[[torch.nn.Module], torch.optim.Optimizer],
) -> None:
    """It said: trained parameter 1 had gradients; a trained parameter has sparse gradients."""
    model = Net()
    optimizer = made(model)
    watch = GradientWatch(list(model.parameters()), whole=True)
    model.table(torch.zeros(1, dtype=torch.int64)).sum().backward()
    assert warning_of(watch, 1).startswith("trained parameter table.weight has sparse gradients")
    model.stem.bias.grad = torch.ones(3)
    assert warning_of(watch, 1) == ""
    model.stem.bias.grad = None
    assert warning_of(watch, 50).startswith("trained parameter stem.bias had gradients, and none in the last")
    watch.close()
    del optimizer  # its names went with it


def test_the_anchor_of_a_merge_is_named_as_the_model(
    made: Callable[[torch.nn.Module], torch.optim.Optimizer],
) -> None:
    """The outer optimizer has copies, which no program has named."""
    model = Net()
    local = LocalSteps(made(model), None, (), DiLoCo(2).merging)
    fragment = local.fragments[0]
    assert [known_as(each, None) for each in fragment.parameters] == [name for name, _ in model.named_parameters()]


def test_a_name_goes_with_the_model_and_holds_no_tensor() -> None:
    """Torch exchanges no tensors with weak references (`swap_tensors`); and what is gone is no other tensor's name."""
    model = Net()
    learn_names(torch.nn.DataParallel(model))
    weight, other = model.stem.weight, torch.nn.Parameter(torch.ones(3, 2))
    torch.utils.swap_tensors(weight, other)  # type: ignore[no-untyped-call]
    assert known_as(weight, 0) == "stem.weight"
    assert known_as(other, 0) == 0
    del model
    gc.collect()
    assert known_as(weight, 0) == 0
