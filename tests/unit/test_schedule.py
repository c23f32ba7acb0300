"""Schedules that a trainer makes over the swarm's optimizer: found, and followed by epochs."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from shoal.errors import ConfigError
from shoal.train.schedule import ScheduleWatch, advance, follow
from shoal.train.training_state import TrainingState

Make = Callable[[torch.optim.Optimizer], Any]


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_to_look_through() -> None:
    """A search goes through all objects that the garbage collector knows: not through those of the tests before."""
    gc.freeze()


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    """From 0 to the whole rate within 4 steps."""
    return LambdaLR(optimizer, lambda step: min(1.0, step / 4))


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    """Two schedules, one after the other."""
    return SequentialLR(optimizer, [ConstantLR(optimizer, 0.5, 2), ExponentialLR(optimizer, 0.5)], milestones=[3])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    """Two schedules, both at once."""
    return ChainedScheduler([ExponentialLR(optimizer, 0.5), StepLR(optimizer, 2)])


def begin(scheduler: Any = None) -> tuple[TrainingState, torch.optim.Optimizer, ScheduleWatch]:
    """A training state, its optimizer with a rate of 8, and the watch over it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=8.0)
    return TrainingState(optimizer, scheduler), optimizer, ScheduleWatch(optimizer.param_groups)


def step(training: TrainingState) -> None:
    """One epoch."""
    training.parameters[0].grad = torch.ones(1)
    training.accumulate(1)
    training.use_own_mean()
    training.step()


@pytest.mark.parametrize("make", [warm_up, sequential, chained])
@pytest.mark.parametrize("late", [0, 3])
def test_a_schedule_made_over_us_follows_epochs(make: Make, late: int) -> None:
    """Whatever the loop steps: the rates are those of the epochs, also if it is made in the middle of the run."""
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=8.0)
    expected, rates = make(plain), []
    for _ in range(8):
        rates.append(plain.param_groups[0]["lr"])
        plain.step()
        expected.step()
    training, optimizer, watch = begin()
    watch.seen()
    for _ in range(late):
        assert watch.find() is None
        step(training)
    schedule: Any = make(optimizer)
    kind = type(schedule)
    found = watch.find()
    training.schedule.adopt(found)
    assert found is not None
    assert found is schedule
    got = []
    for _ in range(late, 8):
        got.append(optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr() == got[-1:]
        step(training)
        watch.seen()
        for _ in range(3):
            schedule.step()
        assert watch.find() is None
    assert got == pytest.approx(rates[late:])
    assert isinstance(schedule, kind)
    assert type(schedule).__name__ == kind.__name__
    assert schedule.state_dict().keys() == expected.state_dict().keys()
    schedule.load_state_dict(copy.deepcopy(schedule.state_dict()))


def test_a_schedule_through_a_wrapper_is_found() -> None:
    """Accelerate's optimizer is none of ours, and its groups are."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
            return self.optimizer.param_groups

    _, optimizer, watch = begin()
    watch.seen()
    schedule = warm_up(Wrapper(optimizer))
    assert watch.find() is schedule


def test_one_that_was_resumed_goes_on() -> None:
    """Its own count is further than the swarm's: a checkpoint of plain torch was loaded."""
    training, optimizer, watch = begin()
    schedule = warm_up(optimizer)
    schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 2})
    optimizer.param_groups[0]["lr"] = 4.0
    found = watch.find()
    training.schedule.adopt(found)
    assert optimizer.param_groups[0]["lr"] == 4.0
    step(training)
    assert optimizer.param_groups[0]["lr"] == 6.0


def test_a_newcomer_brings_it_to_the_epoch_of_the_others() -> None:
    """And keeps the rate that came with the state, which its schedule says, too."""
    training, optimizer, watch = begin()
    schedule = warm_up(optimizer)
    training.schedule.adopt(watch.find())
    optimizer.param_groups[0]["lr"] = 5.0
    training.resume(3, 3)
    assert optimizer.param_groups[0]["lr"] == 5.0
    assert schedule.get_last_lr() == [5.0]
    step(training)
    assert optimizer.param_groups[0]["lr"] == 8.0


def test_a_schedule_is_looked_for_while_other_threads_build_tuples() -> None:
    """All objects were listed, with the tuple that another thread was building: SystemError in that thread."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    watch = ScheduleWatch(optimizer.param_groups)
    schedule = ExponentialLR(optimizer, 0.5)
    other_optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    begun, go_on, built = (threading.Event() for _ in range(3))

    class Waits(LRScheduler):
        """Looked at in the middle of the search."""

        def __init__(self) -> None:
            pass

        @property
        def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
            go_on.set()
            assert built.wait(60)
            return other_optimizer

    def numbers() -> Iterator[int]:
        for number in range(100):
            if number == 50:
                begun.set()
                assert go_on.wait(60)
            yield number

    def build() -> tuple[int, ...]:
        try:
            return tuple(numbers())
        finally:
            built.set()

    waits = Waits()
    with ThreadPoolExecutor(1) as other:
        whole = other.submit(build)
        assert begun.wait(60)
        assert watch.find() is schedule
        assert whole.result(60) == tuple(range(100))
    assert waits.optimizer is other_optimizer


def test_two_schedules_are_refused_by_name() -> None:
    """Which of them is meant is not for us to say."""
    _, optimizer, watch = begin()
    both = [warm_up(optimizer), StepLR(optimizer, 2)]
    with pytest.raises(ConfigError, match=r"2 schedules were made over this optimizer \((LambdaLR|StepLR), "):
        watch.find()
    joined = ChainedScheduler(both)
    assert watch.find() is joined


def test_rates_set_by_hand_are_looked_after_ever_less() -> None:
    """Looking goes through all objects of the program."""
    _, optimizer, watch = begin()
    follow(warm_up(optimizer))
    looked = 0
    for count in range(64):
        optimizer.param_groups[0]["lr"] = 1.0 + count
        before = watch._in_vain
        assert watch.find() is None
        looked += watch._in_vain - before
        watch.seen()
    assert looked <= 8


def test_a_step_left_in_the_loop_does_nothing() -> None:
    """Of a schedule that was given to the optimizer."""
    _, optimizer, _ = begin()
    schedule = warm_up(optimizer)
    follow(schedule)
    schedule.step()
    assert schedule.last_epoch == 0
    optimizer.step()
    advance(schedule)
    assert schedule.last_epoch == 1
    again = copy.deepcopy(schedule)
    again.step()
    assert again.last_epoch == 1


EPOCHS_BEFORE, RATE = 8, 0.5
EVERY_SCHEDULE: dict[str, Make] = {
    "ChainedScheduler": chained,
    "ConstantLR": lambda optimizer: ConstantLR(optimizer, 0.5, 10),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "CosineAnnealingWarmRestarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 7),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, 0.1, 1.0, step_size_up=3),
    "ExponentialLR": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda count: min(1.0, (count + 1) / 12)),
    "LinearLR": lambda optimizer: LinearLR(optimizer, total_iters=12),
    "MultiStepLR": lambda optimizer: MultiStepLR(optimizer, [2, 5, 9]),
    "MultiplicativeLR": lambda optimizer: MultiplicativeLR(optimizer, lambda _: 0.95),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 1.0, 20),
    "PolynomialLR": lambda optimizer: PolynomialLR(optimizer, 12),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=3), StepLR(optimizer, 2, 0.5)], milestones=[3]
    ),
    "StepLR": lambda optimizer: StepLR(optimizer, 2, 0.5),
}


def sgd() -> torch.optim.Optimizer:
    """Of one parameter, with momentum, which some schedules move."""
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE, momentum=0.9)


def plain_rates(make: Make, epochs: int) -> list[float]:
    """The rates of the epochs after EPOCHS_BEFORE, by torch alone."""
    plain, rates = sgd(), []
    schedule = make(plain)
    for _ in range(EPOCHS_BEFORE + epochs):
        rates.append(float(plain.param_groups[0]["lr"]))
        plain.step()
        schedule.step()
    return rates[EPOCHS_BEFORE:]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["loaded after it is made", "loaded before it is made", "downloaded"])
@pytest.mark.parametrize("name", [*EVERY_SCHEDULE])
def test_a_schedule_made_over_the_swarm_has_wrong_rates_after_a_resume(name: str, how: str) -> None:
    """The rates that came with the state were taken for those of a beginning: they decayed, or rose, a second time."""
    make = EVERY_SCHEDULE[name]
    expected = plain_rates(make, 5)
    first = TrainingState(sgd())
    first.schedule.adopt(make(first.optimizer))
    for _ in range(EPOCHS_BEFORE):
        step(first)
    saved = copy.deepcopy(first.optimizer.state_dict())

    again = TrainingState(sgd())
    watch = ScheduleWatch(again.optimizer.param_groups)
    schedule: Any = None
    if how != "loaded before it is made":
        schedule = make(again.optimizer)
    if how == "downloaded":
        values, tensors = first.export()
        again.load(values, [tensor.clone() for tensor in tensors])
    else:
        again.kept.switch(again.kept.prepare_loaded(saved))
        again.resume(first.epoch, first.schedule.count)
    if how == "loaded before it is made":
        schedule = make(again.optimizer)
    found: Any = watch.find()
    assert found is schedule
    again.schedule.adopt(found)
    got = []
    for _ in range(5):
        got.append(float(again.optimizer.param_groups[0]["lr"]))
        assert found.get_last_lr() == pytest.approx(got[-1:])
        step(again)
    assert got == pytest.approx(expected)


def test_every_schedule_of_torch_is_tried_after_a_resume() -> None:
    """A schedule that torch gets later is tried too."""
    kinds = {name for name, kind in vars(torch.optim.lr_scheduler).items() if isinstance(kind, type)}
    made = {name for name in kinds if issubclass(getattr(torch.optim.lr_scheduler, name), LRScheduler)}
    assert made - {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"} == EVERY_SCHEDULE.keys()


def test_rates_set_by_hand_after_a_load_stay() -> None:
    """They were set after the schedule was made: it goes on from them, as a given one does."""
    training, optimizer, _ = begin()
    schedule = ExponentialLR(optimizer, 0.5)
    training.resume(3, 3)
    optimizer.param_groups[0]["lr"] = 2.0
    training.schedule.adopt(schedule)
    assert optimizer.param_groups[0]["lr"] == 2.0
    step(training)
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_schedule_after_a_state_of_the_beginning_has_its_own_first_rate() -> None:
    """No step of a schedule is in the rates of such a state."""
    training, optimizer, _ = begin()
    training.resume(0, 0)
    training.schedule.adopt(ConstantLR(optimizer, 0.5, 2))
    assert optimizer.param_groups[0]["lr"] == 4.0


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
def test_a_bound_step_that_was_taken_before_moves_no_schedule(name: str) -> None:
    """Lists of callbacks hold it: it moved the schedule at each batch, and the rate ended 30 times too small."""
    make = EVERY_SCHEDULE[name]
    plain, optimizer = sgd(), sgd()
    expected, schedule = make(plain), make(optimizer)
    taken = schedule.step
    follow(schedule)
    training = TrainingState(optimizer, schedule)
    for epoch in range(1, EPOCHS_BEFORE + 5):
        plain.step()
        expected.step()
        step(training)
        assert options_of(optimizer) == options_of(plain)
        for _ in range(3):
            taken()
        assert training.schedule.count == epoch
    assert training.schedule.was_moved
    training.schedule.put_back()
    assert options_of(optimizer) == options_of(plain)
    assert schedule.get_last_lr() == expected.get_last_lr()
    assert repr(schedule.state_dict()) == repr(expected.state_dict())


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of its parameter group: the rate, the momentum and the rest."""
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}


def test_a_schedule_whose_count_or_state_is_set_by_hand_is_not_put_back() -> None:
    """`scheduler.last_epoch = n` and `load_state_dict` are how people resume."""
    training, optimizer, _ = begin()
    schedule = ExponentialLR(optimizer, 0.5)
    follow(schedule)
    training.schedule.adopt(schedule)
    schedule.last_epoch = 3
    training.schedule.put_back()
    assert training.schedule.count == 3
    other = ExponentialLR(sgd(), 0.5)
    other.optimizer.step()
    other.step()
    schedule.load_state_dict(other.state_dict())
    training.schedule.put_back()
    assert training.schedule.count == 1
    optimizer.param_groups[0]["lr"] = 2.0
    training.schedule.put_back()
    assert optimizer.param_groups[0]["lr"] == 2.0
    assert not training.schedule.was_moved


def test_a_state_that_others_download_has_no_step_of_a_bound_method() -> None:
    """Neither its count nor its rates."""
    training, optimizer, _ = begin()
    schedule = ExponentialLR(optimizer, 0.5)
    taken = schedule.step
    follow(schedule)
    training.schedule.adopt(schedule)
    step(training)
    before = training.fingerprint()
    taken()
    values, tensors = training.export()
    assert values["scheduled"] == 1
    taken()
    assert list(training.options().column("lr")) == [4.0]
    assert training.fingerprint() == before
    step(training)
    taken()
    training.load(values, [each.clone() for each in tensors])
    assert training.schedule.count == 1
    assert optimizer.param_groups[0]["lr"] == 4.0
    step(training)
    assert optimizer.param_groups[0]["lr"] == 2.0


def test_a_step_does_not_make_python_show_warnings_again() -> None:
    """Each step forgot which ones it had shown: a trainer's user saw that of the DataLoader once in each pass."""
    training, optimizer, watch = begin()
    schedule = warm_up(optimizer)
    training.schedule.adopt(watch.find())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        training.resume(3, 3)  # moves it before the first step
        step(training)
        for _ in range(3):
            warnings.warn("of somebody else", stacklevel=1)
            step(training)
    assert schedule.last_epoch == 7
    assert [str(each.message) for each in said] == ["of somebody else"]
