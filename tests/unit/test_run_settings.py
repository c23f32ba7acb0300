"""Which differences between two peers of a run are found before they train together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.errors import ConfigError
from shoal.run.settings import checked_settings, run_settings
from shoal.run.view.progress import settings_difference
from shoal.strategies import Synchronous
from shoal.train.training_state import TrainingState

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def adamw(**options: Any) -> Make:
    """AdamW with these options."""
    return lambda parameters: torch.optim.AdamW(parameters, **{"lr": 0.01, **options})


def grouped(**options: Any) -> Make:
    """AdamW, whose second group has options of its own."""

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:], **options}]
        return torch.optim.AdamW(groups, lr=0.01)

    return make


def settings(make: Make, scheduler: Callable[[torch.optim.Optimizer], Any] | None = None) -> dict[str, str]:
    """Of a run that is trained so."""
    optimizer = make([torch.nn.Parameter(torch.zeros(3)) for _ in range(2)])
    return run_settings(
        TrainingState(optimizer, scheduler and scheduler(optimizer)), Synchronous(16), 10, grad_compression=None
    )


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (adamw(), adamw(lr=0.02), "learning rate is 0.01 here and 0.02"),
        (adamw(), adamw(weight_decay=0.1), "weight_decay is 0.01 here and 0.1"),
        (adamw(), adamw(betas=(0.9, 0.95)), "betas is (0.9, 0.999) here and (0.9, 0.95)"),
        (adamw(), adamw(eps=1e-6), "eps is 1e-08 here and 1e-06"),
        (adamw(), adamw(amsgrad=True), "amsgrad is False here and True"),
        (adamw(), lambda parameters: torch.optim.RAdam(parameters, lr=0.01), "optimizer is AdamW here and RAdam"),
        (grouped(), grouped(lr=0.1), "parameter group 1 is lr 0.01 here and lr 0.1"),
        (grouped(), grouped(weight_decay=0.0), "parameter group 1 is lr 0.01 here and lr 0.01, weight_decay 0 at"),
        (adamw(), grouped(), "parameter group 0 is not set here and lr 0.01"),
        (adamw(), adamw(foreach=True), None),
        (adamw(), adamw(lr=torch.tensor(0.01)), None),
    ],
)
def test_differences_are_named(one: Make, other: Make, difference: str | None) -> None:
    """Peers with other hyperparameters would step differently from the same average, and nobody would know."""
    found = settings_difference(settings(one), settings(other))
    assert found is None if difference is None else found is not None and found.startswith(difference)


def test_another_kind_of_schedule_is_found() -> None:
    """Or none."""
    one = settings(adamw(), lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5))
    assert (settings_difference(one, settings(adamw())) or "").startswith("scheduler is StepLR here and none")


def test_who_resumes_in_the_middle_of_a_schedule_is_not_refused() -> None:
    """Rates and momenta are those of its epoch, and what the run was begun with is the same."""

    def resumed(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = grouped(lr=0.1)(parameters)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 1.0], total_steps=20)
        for _ in range(10):
            optimizer.step()
            schedule.step()
        return optimizer

    def fresh(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = grouped(lr=0.1)(parameters)
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 1.0], total_steps=20)
        return optimizer

    assert settings(resumed) == settings(fresh)


def test_many_groups_are_one_setting() -> None:
    """One for each layer, say: settings travel with every word of progress."""

    def layers(rate: float) -> Make:
        def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            groups: list[dict[str, Any]] = [
                {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate * index} for index in range(1, 40)
            ]
            return torch.optim.SGD([*groups, {"params": parameters}], lr=0.01)

        return make

    one, other = settings(layers(0.1)), settings(layers(0.2))
    assert not any(name.startswith("parameter group ") for name in one)
    assert (settings_difference(one, other) or "").startswith("parameter groups is ")


def with_own(given: dict[str, str]) -> dict[str, str]:
    """The settings of a run whose program has added these."""
    training = TrainingState(adamw()([torch.nn.Parameter(torch.zeros(3))]))
    return run_settings(training, Synchronous(16), 10, given=checked_settings(given), grad_compression=None)


def test_a_programs_own_settings_are_compared() -> None:
    """Such as the tokens that the weights belong to, of which shoal knows nothing."""
    difference = settings_difference(with_own({"tokenizer": "ab"}), with_own({"tokenizer": "cd"}))
    assert difference == "tokenizer is ab here and cd at another peer of the run"
    assert settings_difference(with_own({"tokenizer": "ab"}), with_own({"tokenizer": "ab"})) is None
    assert (settings_difference(with_own({}), with_own({"tokenizer": "cd"})) or "").startswith("tokenizer is not set")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("tokenizer", "settings must be texts by name"),
        ({"tokenizer": 3}, r"settings: tokenizer must be a text of at most 120 characters, got 3: give str\(\)"),
        ({"tokenizer": "x" * 121}, "settings: tokenizer must be a text of at most 120"),
        ({3: "x"}, "settings: a name must be a text of 1 to 64 characters, got 3"),
        ({"": "x"}, "settings: a name must be a text of 1 to 64"),
        ({str(number): "" for number in range(17)}, "settings has 17 entries, the most is 16"),
        ({"max_grad_norm": "1"}, "settings: 'max_grad_norm' is a setting of shoal's own"),
    ],
)
def test_wrong_settings_are_named(given: Any, what: str) -> None:
    """Before the peer joins."""
    with pytest.raises(ConfigError, match=what):
        with_own(given)
