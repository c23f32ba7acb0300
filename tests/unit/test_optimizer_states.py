"""Any optimizer's state travels: a newcomer that takes it over steps as the donor does, bit by bit."""

from __future__ import annotations

import copy
import math
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from shoal.errors import ConfigError, StateUnavailable
from shoal.protocol.wire import MAX_TRAINED, encode
from shoal.run.decide.agreement import Said
from shoal.run.join.shared_state import why_not_ours
from shoal.train.inner import make_optimizer
from shoal.train.options import Options
from shoal.train.training_state import TrainingState
from shoal.train.trial import blank_statistics, draws_random_numbers, first_statistics
from tests.unit.optimizer_cases import (
    assert_equal,
    everything,
    installed,
    offered,
    optimizer_by_name,
    parameters,
    shapes_for,
    step,
    take_over,
    training_of,
)

TORCH = [
    f"torch.optim.{name}"
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    )
]
OTHERS = [
    *(
        f"pytorch_optimizer.{name}"
        for name in ("Lamb", "Lion", "ADOPT", "SOAP", "ScheduleFreeAdamW", "ScheduleFreeSGD", "ScheduleFreeRAdam")
    ),
    *(f"pytorch_optimizer.{name}" for name in ("Shampoo", "AdaFactor", "Prodigy", "AggMo", "AdaShift", "MADGRAD")),
    "transformers.Adafactor",
    "bitsandbytes.optim.AdamW8bit",
]
FAST = [*TORCH, *OTHERS]

CASES = {
    "fresh": {"steps": 3},
    "after steps of its own": {"own_steps": 2, "steps": 5},
    "groups": {"own_steps": 1, "steps": 1, "groups": True},
    "bfloat16": {"steps": 3, "dtype": torch.bfloat16},
    "two without statistics": {"own_steps": 2, "steps": 3, "without": (1, 2)},
}

SAMPLE_OF_CASES = ("after steps of its own", "bfloat16")

OUTSIDE = {
    "Conda": "keeps a GaLoreProjector",
    "Kron": "torch's random numbers",
    "Magma": "attribute '_state' of Magma",
    "SaRA": "attribute '_mask_indices' of SaRA",
    "ScalableShampoo": "keeps a SGDGraft",
}
"""Optimizers of `pytorch_optimizer` that step from more than what travels."""

COUNTS = {"Ranger21": "lookahead_step", "StableSPAM": "total_step"}
"""They count their steps in attributes, which their own state dicts have."""


def bit_equal_after(
    name: str,
    *,
    steps: int,
    own_steps: int = 0,
    groups: bool = False,
    dtype: torch.dtype = torch.float32,
    without: tuple[int, ...] = (),
) -> None:
    """A donor takes `steps`, a newcomer takes its state over, and both three more."""
    make, shapes = optimizer_by_name(name), shapes_for(name)
    donor, newcomer = (training_of(make, parameters(dtype, shapes), groups=groups) for _ in range(2))
    for number in range(steps):
        step(donor, number, without)
    for number in range(own_steps):
        step(newcomer, 100 + number)
    if any(not bool(torch.isfinite(tensor).all()) for tensor in everything(donor)[1]):
        pytest.skip("it does not step well on these numbers")
    take_over(newcomer, donor)
    assert_equal(newcomer, donor)
    for number in range(200, 203):
        step(donor, number)
        step(newcomer, number)
    assert_equal(newcomer, donor)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", [*CASES])
@pytest.mark.parametrize("name", FAST)
def test_newcomers_refused_by_strict_keys(name: str, case: str) -> None:
    """Lamb, SOAP and others put keys into their groups at the first step: a newcomer downloaded again and again."""
    bit_equal_after(name, **CASES[case])  # type: ignore[arg-type]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", FAST)
def test_an_empty_parameter_group_makes_every_state_untakeable(name: str, first: bool) -> None:
    """Such as "no weight decay for biases" of a model without biases: a newcomer raised "list index out of range"."""
    make, shapes = optimizer_by_name(name), shapes_for(name)
    trainings = []
    for _ in range(2):
        groups: list[Any] = [{"params": parameters(shapes=shapes)}, {"params": [], "lr": 0.003}]
        trainings.append(TrainingState(make(groups[::-1] if first else groups)))
    donor, newcomer = trainings
    step(donor, 0)
    take_over(newcomer, donor)
    for training in trainings:
        step(training, 1)
    assert_equal(newcomer, donor)
    loaded = donor.kept.prepare_loaded(donor.optimizer.state_dict())
    donor.kept.switch(loaded)
    assert_equal(newcomer, donor)


def many(count: int, seed: int = 0) -> TrainingState:
    """So many small parameters, by turns of three shapes, with statistics of half of them missing after a step."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3), (3,), ()]
    parameters = [torch.nn.Parameter(torch.randn(shapes[i % 3], generator=generator)) for i in range(count)]
    return TrainingState(torch.optim.AdamW(parameters))


@pytest.mark.parametrize("count", [10_000, pytest.param(200_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_more_than_8500_parameters_made_a_state_that_cannot_be_given(count: int) -> None:
    """The description took a mebibyte at 8,500: each statistic was named by its own. One in two has none here."""
    donor, newcomer = many(count), many(count, 1)
    for index, parameter in enumerate(donor.trained):
        parameter.grad = torch.ones_like(parameter) if index % 2 else None
    assert donor.accumulate(1)
    assert len(donor.pending.total.unused()) == count // 8
    donor.use_own_mean()
    donor.step()
    assert len(donor.optimizer.state) == count // 2
    manifest, tensors = offered(donor)
    assert len(encode(manifest.to_message())) < 2 * count
    assert why_not_ours(newcomer, manifest, None) is None
    newcomer.load(manifest.metadata["training"], tensors)
    assert_equal(newcomer, donor)


def test_more_parameters_than_a_round_can_speak_of_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them had no gradient would be no word that counts, and each round would fail."""
    said = Said(Options(1, {}), unused=bytes(MAX_TRAINED // 8))
    assert msgspec.convert(msgspec.to_builtins(said, builtin_types=(bytes,)), Said) == said
    monkeypatch.setattr("shoal.train.shared_tensors.MAX_TRAINED", 5)
    assert many(5).pending.total.unused() == b"\x1f"
    with pytest.raises(ConfigError, match="put small ones together"):
        many(6)


def test_a_state_of_a_checkpoint_that_names_each_statistic_is_taken_over() -> None:
    """Checkpoints of before 2026-11-28 stay good: they name each tensor by its place, and each parameter's values."""
    make = optimizer_by_name("torch.optim.AdamW")
    donor, newcomer = training_of(make, groups=True), training_of(make, groups=True)
    step(donor, 0, without=(1,))
    values, tensors = everything(donor)
    place = len(donor.tensors.all)

    def named(value: Any) -> Any:
        nonlocal place
        ((kind, item),) = value.items()
        if kind == "n":
            place += 1
            return {"t": [place - 1, *item]}
        return {kind: [[key, named(each)] for key, each in item]} if kind == "d" else value

    ((forms, of_each, others),) = values["optimizer"]["states"]
    kept = [[number, named(forms[form - 1])] for number, form in enumerate(of_each) if form]
    values["optimizer"]["states"] = [[kept, others]]
    newcomer.load(values, tensors)
    assert_equal(newcomer, donor)


@pytest.mark.parametrize("of_each", [[1, 1, 1, 2], [1, 1, 1, -1], [1, 1, 1, 1, 1], [1, 1, "1"], [True], 1, None, {}])
def test_forms_of_statistics_that_cannot_be_are_refused(of_each: Any) -> None:
    """Each parameter has one of the forms that are there, or none."""
    donor, newcomer = (training_of(optimizer_by_name("torch.optim.AdamW")) for _ in range(2))
    step(donor, 0)
    values, tensors = everything(donor)
    values["optimizer"]["states"][0][1] = of_each
    with pytest.raises(StateUnavailable, match="does not fit here"):
        newcomer.load(values, tensors)
    assert not newcomer.optimizer.state


def test_a_form_with_many_values_for_many_parameters_is_not_read_to_its_end() -> None:
    """A mebibyte of metadata would become gigabytes."""
    training = many(3000)
    values, tensors = everything(training)
    form = {"d": [[f"{number}", {"v": 0}] for number in range(1000)]}
    values["optimizer"]["states"] = [[[form], [1] * 3000, []]]
    with pytest.raises(StateUnavailable, match="values are too many"):
        training.load(values, tensors)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long(full=case not in SAMPLE_OF_CASES)) for case in CASES]
)
@pytest.mark.parametrize("name", [name for name in installed("pytorch_optimizer") if name not in FAST])
def test_every_optimizer_of_a_library_travels_or_says_why_not(name: str, case: str) -> None:
    """All that can be made from parameters alone and step without a closure."""
    make = optimizer_by_name(name)
    try:
        probe = training_of(make)
        step(probe, 0)
    except Exception as error:  # noqa: BLE001 (whatever it wants)
        pytest.skip(f"{type(error).__name__}: {error}"[:80])
    step(probe, 1)
    if "attribute" in (probe.stepper.kept_back or "") or "cannot be given" in (probe.stepper.kept_back or ""):
        assert name.rpartition(".")[2] in OUTSIDE
        return
    bit_equal_after(name, **CASES[case])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Lookahead", "OrthoGrad", "ScheduleFreeWrapper"])
def test_the_statistics_of_a_wrapped_optimizer_travel(name: str) -> None:
    """A wrapper has its own beside them, and the newcomer's inner optimizer began anew, without a word."""

    def wrapped(params: list[Any]) -> torch.optim.Optimizer:
        made = optimizer_by_name(f"pytorch_optimizer.{name}")(torch.optim.AdamW(params))  # type: ignore[arg-type]
        if hasattr(made, "train"):
            made.train()
        return made

    donor, newcomer = training_of(wrapped), training_of(wrapped)
    for number in range(4):
        step(donor, number)
    assert donor.stepper.kept_back is None
    take_over(newcomer, donor)
    assert_equal(newcomer, donor)
    for number in range(200, 203):
        step(donor, number)
        step(newcomer, number)
    assert_equal(newcomer, donor)
    inner = [TrainingState(vars(each.optimizer)["optimizer"]) for each in (newcomer, donor)]
    assert_equal(*inner)


def schedule_free(params: list[Any], *, wraps: bool) -> torch.optim.Optimizer:
    """By itself, or around another optimizer; ready to train."""
    if wraps:
        made = optimizer_by_name("pytorch_optimizer.ScheduleFreeWrapper")(torch.optim.SGD(params))  # type: ignore[arg-type]
    else:
        made = optimizer_by_name("pytorch_optimizer.ScheduleFreeAdamW")(params)
    made.train()  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("wraps", [False, True])
def test_schedule_free_evaluates_and_trains_on_with_the_same_bits(wraps: bool) -> None:
    """Its own way back rounds: who evaluates ended with other weights. Newcomers get the weights of training."""
    donor, other, newcomer = (training_of(partial(schedule_free, wraps=wraps)) for _ in range(3))
    for number in range(6):
        step(donor, number)
        step(other, number)
        before = [parameter.detach().clone() for parameter in donor.parameters]
        donor.weights.evaluate()
        assert number < 2 or not all(torch.equal(*each) for each in zip(donor.parameters, before, strict=True))
        assert_equal(donor, other)
        if number == 3:
            take_over(newcomer, donor)
            assert_equal(newcomer, donor)
        donor.weights.train()
        assert all(torch.equal(*each) for each in zip(donor.parameters, before, strict=True))
    assert_equal(donor, other)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_state_that_comes_while_schedule_free_evaluates_stays(wraps: bool) -> None:
    """`train` had put back the weights before it, under the name of the newer state."""
    donor, newcomer = (training_of(partial(schedule_free, wraps=wraps)) for _ in range(2))
    for number in range(6):
        step(donor, number)
    step(newcomer, 0)
    newcomer.weights.evaluate()
    take_over(newcomer, donor)
    assert newcomer.weights.are_in_eval_mode
    assert_equal(newcomer, donor)
    newcomer.weights.train()
    assert all(torch.equal(*each) for each in zip(newcomer.parameters, donor.parameters, strict=True))
    for number in range(6, 8):
        step(donor, number)
        step(newcomer, number)
    assert_equal(newcomer, donor)


@pytest.mark.parametrize("wraps", [False, True])
def test_schedule_free_in_its_own_eval_gives_no_state(wraps: bool) -> None:
    """Its weights are others then: they are not taken for those of training."""
    donor = training_of(partial(schedule_free, wraps=wraps))
    step(donor, 0)
    vars(donor)["optimizer"].eval()
    with pytest.raises(ConfigError, match=r"call eval\(\) of the shoal\.Optimizer"):
        offered(donor)


def test_statistics_that_are_kept_by_parameter_in_a_table_are_told() -> None:
    """TRAC keeps tables of all parameters: they have no name that others know."""
    training = training_of(lambda params: optimizer_by_name("pytorch_optimizer.TRAC")(torch.optim.AdamW(params)))  # type: ignore[arg-type]
    step(training, 0)
    assert "keeps a dict (statistic 'trac'" in (training.stepper.kept_back or "")


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_no_state_dict_holds_is_told(name: str) -> None:
    """A newcomer would have stepped otherwise, without a word."""
    training = training_of(optimizer_by_name(f"pytorch_optimizer.{name}"))
    for number in range(4):
        step(training, number)
    assert OUTSIDE[name] in (training.stepper.kept_back or "")


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", COUNTS)
def test_numbers_that_an_optimizer_keeps_in_attributes_do_not_travel(name: str, wrapped: bool) -> None:
    """Ranger21 looks ahead at every fifth step: a newcomer looked ahead at others, with a warning."""

    def make(params: list[Any]) -> torch.optim.Optimizer:
        made = optimizer_by_name(f"pytorch_optimizer.{name}")(params)
        return optimizer_by_name("pytorch_optimizer.Lookahead")(made) if wrapped else made  # type: ignore[arg-type]

    donor, newcomer = training_of(make), training_of(make)
    for number in range(3):
        step(donor, number)
    take_over(newcomer, donor)
    for number in range(200, 206):
        step(donor, number)
        step(newcomer, number)
    assert_equal(newcomer, donor)
    assert donor.stepper.kept_back is None


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [math.nan, True, "7", None, 1 << 60, [1]])
def test_what_counts_steps_in_an_attribute_is_a_number(name: str, value: Any) -> None:
    """Anything else from a donor is refused, and nothing is changed."""
    make = optimizer_by_name(f"pytorch_optimizer.{name}")
    donor, newcomer = training_of(make), training_of(make)
    step(donor, 0)
    wrong: list[Any] = [[], [{"d": []}], [{"d": [[COUNTS[name], {"v": value}]]}], [{"d": [["lr", {"v": 1}]]}], value]
    for bad in wrong:
        values, tensors = donor.export()
        values["optimizer"]["numbers"] = bad
        unchanged_by(newcomer, values, tensors)
    values, tensors = donor.export()
    (numbers,) = values["optimizer"]["numbers"]
    numbers["d"] = [[key, {"v": value} if key == COUNTS[name] else item] for key, item in numbers["d"]]
    unchanged_by(newcomer, values, tensors)


def test_a_number_in_an_attribute_from_which_no_step_can_be_taken_is_taken() -> None:
    """StableSPAM divides by 1 - 0.999 ** total_step, which is 0 in its step number 0."""
    make = optimizer_by_name("pytorch_optimizer.StableSPAM")
    donor, newcomer = training_of(make), training_of(make)
    step(donor, 0)
    values, tensors = donor.export()
    values["optimizer"]["numbers"] = [{"d": [["total_step", {"v": -1}]]}]
    assert "cannot be stepped from it" in unchanged_by(newcomer, values, tensors)


def test_an_object_of_the_optimizer_that_counts_steps_is_told() -> None:
    """StableSPAM's object for its cosine decay, of which newcomers know nothing, changed without a word."""
    module = pytest.importorskip("pytorch_optimizer")
    training = training_of(lambda params: module.StableSPAM(params, t_max=8))
    for number in range(2):
        step(training, number)
    assert "attribute 'warmup' of StableSPAM" in (training.stepper.kept_back or "")


@pytest.mark.parametrize("name", [name for name, what in OUTSIDE.items() if what.startswith("keeps")])
@pytest.mark.parametrize("steps", [0, 1])
def test_an_optimizer_that_cannot_be_shared_is_refused_when_it_is_given(name: str, steps: int) -> None:
    """A newcomer with ScalableShampoo found out by a download that failed, again and again."""
    training = training_of(optimizer_by_name(f"pytorch_optimizer.{name}"))
    for number in range(steps):
        step(training, number)
    before = [parameter.detach().clone() for parameter in training.parameters]
    with pytest.raises(ConfigError, match=f"{OUTSIDE[name]}.*use another optimizer"):
        make_optimizer(None, training.optimizer)
    assert all(torch.equal(*pair) for pair in zip(training.parameters, before, strict=True))


@pytest.mark.parametrize("name", FAST)
def test_an_optimizer_whose_state_travels_is_taken_as_it_is(name: str) -> None:
    """The trial of its first step leaves nothing behind, and refuses nobody."""
    training = training_of(optimizer_by_name(name), parameters(shapes=shapes_for(name)))
    before = copy.deepcopy(training.optimizer.state_dict()["state"]), everything(training)[1]
    assert make_optimizer(None, training.optimizer) is training.optimizer
    assert repr(training.optimizer.state_dict()["state"]) == repr(before[0])
    assert all(torch.equal(*pair) for pair in zip(everything(training)[1], before[1], strict=True))


@pytest.mark.parametrize("name", FAST)
def test_nothing_is_told_of_optimizers_whose_state_travels(name: str) -> None:
    """Neither for the flags that some keep in attributes."""
    training = training_of(optimizer_by_name(name), parameters(shapes=shapes_for(name)))
    for number in range(4):
        step(training, number)
    assert training.stepper.kept_back is None


class Drawing(torch.optim.SGD):
    """Adds noise to each step."""

    def step(self, closure: Any = None) -> Any:
        """As SGD, and noise."""
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter += 1e-3 * torch.randn_like(parameter)
        return loss


@pytest.mark.parametrize(("kind", "told"), [(torch.optim.SGD, False), (Drawing, True)])
def test_random_numbers_that_another_thread_draws_are_not_the_optimizers(kind: Any, told: bool) -> None:
    """A thread that loads data draws at any moment; the warning to use another optimizer was false."""
    training = training_of(lambda params: kind(params, lr=0.1))
    training.optimizer.register_step_post_hook(lambda *_: spawn_and_wait(lambda: torch.rand(1)))
    step(training, 0)
    assert ("torch's random numbers" in (training.stepper.kept_back or "")) is told


class Wrapped(torch.optim.SGD):
    """Holds what no copy can be made of."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.guard = threading.Lock()


@pytest.mark.parametrize(
    ("kind", "lr", "says"),
    [
        (Wrapped, 0.1, "a step on a copy, which would tell, failed (TypeError: cannot pickle '_thread.lock' object)"),
        (torch.optim.SGD, 3e38, None),  # the step of the copy is not finite
    ],
)
def test_a_trial_that_failed_for_another_reason_was_taken_for_random_numbers(kind: Any, lr: float, says: Any) -> None:
    """The warning said that the steps depend on them. What is not known is told as such."""
    training = training_of(lambda params: kind(params, lr=lr))
    training.optimizer.register_step_post_hook(lambda *_: spawn_and_wait(lambda: torch.rand(1)))
    with torch.no_grad():
        for each in training.parameters:
            each.fill_(-3.402e38)
            each.grad = torch.zeros_like(each)
    assert training.accumulate(1)
    training.use_own_mean()
    training.step()
    assert "depend on more" not in (training.stepper.kept_back or "")
    assert training.stepper.kept_back is None if says is None else says in (training.stepper.kept_back or "")


def spawn_and_wait(work: Callable[[], object]) -> None:
    """Do this in another thread."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def adamw(*, initial_lr: bool = False, **options: Any) -> TrainingState:
    """A peer with AdamW."""
    training = training_of(lambda params: torch.optim.AdamW(params, **options))
    if initial_lr:
        training.optimizer.param_groups[0]["initial_lr"] = 0.5
    return training


@pytest.mark.parametrize("donor_has", [False, True])
def test_adamw_with_initial_lr_when_loaded_before_its_schedule_is_made(donor_has: bool) -> None:
    """The HF Trainer makes its schedule when training begins: who loads before has no such option yet."""
    donor, newcomer = adamw(initial_lr=donor_has), adamw(initial_lr=not donor_has)
    step(donor, 0)
    take_over(newcomer, donor)
    assert ("initial_lr" in newcomer.optimizer.param_groups[0]) != donor_has


def test_how_a_step_is_computed_stays_the_newcomers() -> None:
    """`capturable=True` was copied from a peer with a GPU to one without, whose steps then failed."""
    donor, newcomer = adamw(foreach=True), adamw(foreach=False)
    step(donor, 0)
    donor.optimizer.param_groups[0]["capturable"] = True
    take_over(newcomer, donor)
    assert newcomer.optimizer.param_groups[0]["capturable"] is False
    assert newcomer.optimizer.param_groups[0]["foreach"] is False
    step(newcomer, 1)


def test_statistics_of_bfloat16_parameters_are_not_rounded() -> None:
    """Torch's `load_state_dict` casts them to the parameters' dtype."""
    make = optimizer_by_name("transformers.Adafactor")
    donor, newcomer = (training_of(make, parameters(torch.bfloat16)) for _ in range(2))
    step(donor, 0)
    take_over(newcomer, donor)
    kept = newcomer.optimizer.state[newcomer.parameters[1]]["exp_avg_sq"]
    assert kept.dtype is torch.float32
    assert torch.equal(kept, donor.optimizer.state[donor.parameters[1]]["exp_avg_sq"])


def test_matrices_that_lie_by_columns_lie_so_at_the_newcomer() -> None:
    """They are multiplied in another order than others, and rounded otherwise: SOAP's bases."""
    donor, newcomer = adamw(), adamw()
    step(donor, 0)
    entry = donor.optimizer.state[donor.parameters[0]]
    entry["basis"] = torch.randn(4, 6).t()
    entry["kernel"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    take_over(newcomer, donor)
    for name in ("basis", "kernel"):
        assert newcomer.optimizer.state[newcomer.parameters[0]][name].stride() == entry[name].stride()
    assert_equal(newcomer, donor)


# --------------------------------------------------------------------------------------------- all of it, or nothing


def unchanged_by(newcomer: TrainingState, values: Any, tensors: list[torch.Tensor]) -> str:
    """Loading this fails and changes nothing; returns why."""
    schedule = (
        copy.deepcopy(newcomer.schedule.scheduler.state_dict()) if newcomer.schedule.scheduler is not None else None
    )
    before, groups = everything(newcomer), copy.deepcopy([*newcomer.optimizer.param_groups])
    with pytest.raises(StateUnavailable) as caught:
        newcomer.load(values, tensors)
    after = everything(newcomer)
    assert before[0] == after[0]
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    for group, old in zip(newcomer.optimizer.param_groups, groups, strict=True):
        assert group.keys() == old.keys()
    if newcomer.schedule.scheduler is not None:
        assert newcomer.schedule.scheduler.state_dict() == schedule
    return str(caught.value)


def with_schedule() -> TrainingState:
    """A peer with AdamW and a schedule, after two steps."""
    optimizer = torch.optim.AdamW(parameters(), lr=0.1)
    training = TrainingState(optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50))
    for number in range(2):
        step(training, number)
    return training


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("lr", "boom", "option 'lr' is a text there and a number here"),
        ("lr", math.nan, "option 'lr' is nan there"),
        ("lr", math.inf, "option 'lr' is inf there"),
        ("lr", -0.1, "option 'lr' is -0.1 there, and not negative here"),
        ("lr", 1e30, "option 'lr' is 1e\\+30 there"),
        ("lr", [0.1], "option 'lr' is a list there and a number here"),
        ("lr", None, "option 'lr' is nothing there"),
        ("lr", True, "option 'lr' is a switch there"),
        ("lr", torch.zeros(3), "option 'lr' is a tensor of shape \\(3,\\) there"),
        ("betas", 0.9, "option 'betas' is a number there"),
        ("betas", (0.9,), "option 'betas' has 1 values there and 2 here"),
        ("betas", (0.9, "x"), "option 'betas' is a text there"),
        ("betas", (0.9, 1.5), "option 'betas' is 1.5 there"),
        ("eps", -1e-8, "option 'eps' is -1e-08 there"),
        ("amsgrad", True, "option 'amsgrad' is True there and False here"),
        ("maximize", 1, "option 'maximize' is a number there and a switch here"),
    ],
)
def test_a_downloaded_state_is_not_all_or_nothing(option: str, value: object, why: str) -> None:
    """With `lr="boom"` the parameters were overwritten, and then every trainer crashed."""
    donor, newcomer = with_schedule(), with_schedule()
    step(donor, 5)
    donor.optimizer.param_groups[0][option] = value
    manifest, tensors = offered(donor)
    failure = unchanged_by(newcomer, manifest.metadata["training"], tensors)
    assert re.search(why, failure), failure
    if not isinstance(value, torch.Tensor):
        assert re.search(why, why_not_ours(newcomer, manifest, None) or ""), "it is seen before anything is downloaded"


@pytest.mark.parametrize("fresh", [False, True])
def test_statistics_that_no_step_can_be_taken_from_are_refused_by_name(fresh: bool) -> None:
    """Whether the newcomer has any of its own or not: its optimizer is asked, on copies."""
    donor, newcomer = adamw(), adamw()
    step(donor, 0)
    if not fresh:
        step(newcomer, 1)
    entry = donor.optimizer.state[donor.parameters[0]]
    right = dict(entry)
    del entry["exp_avg"]
    assert "parameter 0 cannot be stepped from it: statistic 'exp_avg' is missing" in unchanged_by(
        newcomer, *_values(donor)
    )
    entry.update(right, exp_avg_sq=torch.zeros(7, 7))
    assert "statistic 'exp_avg_sq' has shape (7, 7), and (6, 4) here" in unchanged_by(newcomer, *_values(donor))
    entry.update(right, step=torch.zeros(()) - 1)
    assert "ZeroDivisionError" in unchanged_by(newcomer, *_values(donor))
    entry.update(right, exp_avg_sq=torch.full((6, 4), -1.0))
    assert "it is not finite afterwards" in unchanged_by(newcomer, *_values(donor))
    entry.update(right)
    newcomer.load(*_values(donor))


def _values(donor: TrainingState) -> tuple[Any, list[torch.Tensor]]:
    manifest, tensors = offered(donor)
    return manifest.metadata["training"], tensors


def test_a_trial_leaves_no_trace() -> None:
    """Neither in the optimizer, nor in the random numbers of the user's program."""
    donor, newcomer = (training_of(optimizer_by_name("pytorch_optimizer.SCION")) for _ in range(2))
    step(donor, 0)
    values = _values(donor)
    before, chance = everything(newcomer), torch.get_rng_state()
    newcomer.prepare(*values)
    assert torch.equal(torch.get_rng_state(), chance)
    assert before[0] == everything(newcomer)[0]
    assert not newcomer.optimizer.state


class Wrapping(torch.optim.Optimizer):
    """Has another one step, which has the same parameter groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        """That of the other one."""
        return self.inner.step(closure)


@pytest.mark.parametrize("tries", [draws_random_numbers, lambda each: list(first_statistics(each)), blank_statistics])
def test_a_trial_of_an_optimizer_that_wraps_another_one_stepped_the_model(tries: Callable[[Any], object]) -> None:
    """The one that it wraps had the real parameters, and their gradients."""
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    for each in parameters:
        each.grad = torch.ones_like(each)
    tries(Wrapping(torch.optim.SGD(parameters, lr=0.1)))
    assert all(bool((each == 1.0).all()) for each in parameters)


def test_an_optimizer_that_cannot_be_tried_alone_takes_states_over() -> None:
    """One that steps parameters in pairs, say: its twin with a single one fails with any state."""

    class Pairs(torch.optim.SGD):
        """Raises unless it has all its parameters."""

        def step(self, closure: Any = None) -> Any:
            """As SGD."""
            if len(self.param_groups[0]["params"]) != 4:
                raise RuntimeError("where are the others?")
            return super().step(closure)

    donor, newcomer = (training_of(lambda params: Pairs(params, lr=0.1, momentum=0.9)) for _ in range(2))
    step(donor, 0)
    take_over(newcomer, donor)
    assert_equal(newcomer, donor)


# ------------------------------------------------------------------------------------------ a state dict that is loaded


def damaged(state_dict: dict[str, Any], how: str) -> dict[str, Any]:
    """A copy of the state dict of AdamW that cannot be loaded."""
    made = copy.deepcopy(state_dict)
    group, entry = made["param_groups"][0], made["state"][0]
    changes: dict[str, Callable[[], object]] = {
        "of SGD": lambda: made.update(sgd_state()),
        "shape": lambda: entry.update(exp_avg=torch.zeros(7)),
        "missing": lambda: entry.pop("exp_avg"),
        "not a number": lambda: entry["exp_avg"].fill_(math.nan),
        "lr": lambda: group.update(lr="boom"),
        "betas": lambda: group.update(betas=None),
        "amsgrad": lambda: group.update(amsgrad=True),
        "no state": lambda: made.update(state=None),
        "no entry": lambda: made["state"].update({0: None}),
        "too large": lambda: group.update(eps=1 << 60),
        "an object": lambda: entry.update(more={(0, 1): 2}),
        "no parameter": lambda: made["state"].update({7: entry}),
    }
    changes[how]()
    return made


def sgd_state() -> dict[str, Any]:
    """After a step with momentum."""
    training = training_of(optimizer_by_name("torch.optim.SGD"))
    step(training, 0)
    return training.optimizer.state_dict()


LOADED = {
    "of SGD": "it has no 'step'",
    "shape": "statistic 'exp_avg' has shape (7,), and (6, 4) here",
    "missing": "statistic 'exp_avg' is missing",
    "not a number": "statistic 'exp_avg' of parameter 0 is not finite",
    "lr": "option 'lr' is a text there and a number here",
    "betas": "option 'betas' is nothing there",
    "amsgrad": "option 'amsgrad' is True there and False here",
    "no state": "'items'",
    "no entry": "'NoneType'",
    "too large": "whole numbers up to 2^53",
    "an object": "the optimizer keeps a dict",
    "no parameter": "it has statistics of parameter 7, and the optimizer has 4 parameters",
}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("how", LOADED)
def test_a_refused_load_state_dict_has_changed_the_optimizer(how: str, fresh: bool) -> None:
    """That of another optimizer left its groups, and one without `exp_avg` was taken: then every step raised."""
    saved, training = adamw(lr=0.5), adamw()
    step(saved, 0)
    if not fresh:
        step(training, 1)
    optimizer = training.optimizer
    before, groups, state = everything(training), optimizer.param_groups, optimizer.state
    with pytest.raises(ValueError, match=re.escape(LOADED[how])):
        training.kept.switch(training.kept.prepare_loaded(damaged(saved.optimizer.state_dict(), how)))
    after = everything(training)
    assert before[0] == after[0]
    assert all(map(torch.equal, before[1], after[1]))
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    step(training, 2)
    training.kept.switch(training.kept.prepare_loaded(saved.optimizer.state_dict()))
    assert optimizer.param_groups is groups
    assert groups[0]["lr"] == 0.5
    step(training, 3)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_statistics_of_a_larger_matrix_that_are_not_finite_were_loaded(broken: float) -> None:
    """A step was tried with the smallest parameter of each sort alone: the first real one broke the larger ones."""

    def made() -> TrainingState:
        params = [torch.nn.Parameter(torch.ones(size, size)) for size in (3, 2)]
        training = TrainingState(torch.optim.AdamW(params))
        step(training, 0)
        return training

    saved, training = made().optimizer.state_dict(), made()
    saved["state"][0]["exp_avg_sq"][0, 0] = broken
    with pytest.raises(ValueError, match="statistic 'exp_avg_sq' of parameter 0 is not finite"):
        training.kept.switch(training.kept.prepare_loaded(copy.deepcopy(saved)))
    training.optimizer.state[training.parameters[0]]["exp_avg_sq"].fill_(broken)
    training.kept.switch(training.kept.prepare_loaded(saved))  # it is no worse than before


def test_steps_change_the_state_dict_that_was_loaded() -> None:
    """As in plain torch: its tensors are the optimizer's from then on, and nothing is held twice."""
    saved, training = adamw(), adamw()
    step(saved, 0)
    plain = torch.optim.AdamW(parameters())
    loaded = [copy.deepcopy(saved.optimizer.state_dict()) for _ in range(2)]
    plain.load_state_dict(loaded[0])
    training.kept.switch(training.kept.prepare_loaded(loaded[1]))
    for optimizer, given in zip((plain, training.optimizer), loaded, strict=True):
        kept = optimizer.state[optimizer.param_groups[0]["params"][0]]
        assert all(kept[name] is given["state"][0][name] for name in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("name", ["Lookahead", "ScheduleFreeWrapper"])
def test_a_loaded_state_dict_leaves_the_wrapped_optimizer_with_other_groups(name: str) -> None:
    """Learning rates that were set afterwards had no effect: the wrapped one stepped the groups that it had loaded."""
    module = pytest.importorskip("pytorch_optimizer")
    wrap = getattr(module, name)
    saved, training = (training_of(lambda params: wrap(torch.optim.AdamW(params, lr=0.5))) for _ in range(2))
    for each in (training, saved):
        each.weights.train()
    step(saved, 0)
    optimizer: Any = training.optimizer
    groups, inner_state = optimizer.param_groups, optimizer.optimizer.state
    training.kept.switch(training.kept.prepare_loaded(copy.deepcopy(saved.optimizer.state_dict())))
    assert optimizer.param_groups is groups
    assert optimizer.optimizer.param_groups is groups
    assert optimizer.optimizer.state is inner_state
    assert len(inner_state) == len(training.parameters)
    with torch.no_grad():
        for mine, theirs in zip(training.parameters, saved.parameters, strict=True):
            mine.copy_(theirs)
    for each in (training, saved):
        step(each, 1)
    assert everything(training)[0]["optimizer"] == everything(saved)[0]["optimizer"]
    assert all(map(torch.equal, everything(training)[1], everything(saved)[1]))


@pytest.mark.parametrize(
    ("value", "what"), [(1 << 60, "whole numbers up to 2\\^53"), ([[[[[[[[1]]]]]]]], "nested too deeply")]
)
def test_an_optimizer_state_that_no_reader_takes_is_not_made(value: Any, what: str) -> None:
    """It was made, offered, and refused by each newcomer: the bounds held for readers only."""
    training = training_of(lambda params: torch.optim.SGD(params, lr=0.1))
    training.optimizer.state[training.parameters[0]]["kept"] = value
    with pytest.raises(ConfigError, match=what):
        training.export()
