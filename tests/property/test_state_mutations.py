"""A state that was changed anywhere on its way: all of it is taken over and can be stepped from, or nothing is."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import StateUnavailable
from shoal.train.optimizer_state import AnyTensor
from shoal.train.training_state import TrainingState
from tests.unit.optimizer_cases import everything, offered, optimizer_by_name, parameters, step

JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 1 << 62, -(1 << 63), 10**7 + 1, 0.0, -0.5, 1e-3, 1e30, math.inf, -math.inf),
    *(math.nan, "", "boom", "lr", b"bytes", [], [0], [[]], {}, {"v": "boom"}, {"v": math.nan}, {"v": -1}, {"t": [0]}),
    *({"t": [5]}, {"t": [99]}, {"t": "x"}, {"l": []}, {"d": []}, {"d": [["lr", {"v": 1.0}]]}, {"q": [None]}, {"z": 1}),
    *({"u": [{"v": 0.5}, {"v": 0.5}]}, {"t": [4, 1, 0]}, {"d": [[[], 1]]}),
    *({"n": []}, {"n": [1, 0]}, {"n": "x"}, {"n": None}),
]
for _ in range(30):
    JUNK[-1] = {"l": [JUNK[-1]]}  # a bomb


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within plain ones."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    """A copy with another value at this place."""
    if not path:
        return by
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], by)
    return changed


def removed(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy without what is at this place."""
    if not path:
        return None
    changed = copy.copy(value)
    if len(path) == 1:
        del changed[path[0]]
    else:
        changed[path[0]] = removed(value[path[0]], path[1:])
    return changed


def peer(name: str, steps: int) -> TrainingState:
    """One with a schedule, after some steps."""
    optimizer = optimizer_by_name(name)(parameters())
    training = TrainingState(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))
    for number in range(steps):
        step(training, number)
    return training


DONORS = {name: offered(peer(name, 3)) for name in ("torch.optim.AdamW", "torch.optim.SGD", "torch.optim.Adafactor")}


@given(data=st.data(), name=st.sampled_from(sorted(DONORS)), own_steps=st.sampled_from([0, 2]))
def test_a_changed_state_is_taken_over_whole_or_not_at_all(data: st.DataObject, name: str, own_steps: int) -> None:
    """Every byte of parameters and statistics, every option, and the schedule are as before; or the next step works."""
    manifest, tensors = DONORS[name]
    values, tensors = manifest.metadata["training"], [tensor.clone() for tensor in tensors]
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(places(values)))
        change = data.draw(st.sampled_from(["replace", "remove", "tensor", "number", "number"]))
        if change == "replace":
            values = replaced(values, path, data.draw(st.sampled_from(JUNK)))
        elif change == "number":
            leaves = [each for each in places(values) if each and each[-1] in ("v", "epoch", "scheduled")]
            number = data.draw(st.one_of(st.floats(), st.floats(0, 1), st.integers(-3, 30)))
            values = replaced(values, data.draw(st.sampled_from(leaves)), number) if leaves else values
        elif change == "remove":
            values = removed(values, path)
        else:
            place = data.draw(st.integers(0, len(tensors) - 1))
            shape = data.draw(st.sampled_from([(), (1,), (3,), (4, 6), (6, 4), (0,), (2, 2, 2, 2, 2)]))
            tensors[place] = torch.ones(
                shape, dtype=data.draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
            )
    newcomer = peer(name, own_steps)
    before, groups, schedule = everything(newcomer), _options(newcomer), _schedule(newcomer)
    offer: list[AnyTensor] = list(tensors)
    expected = newcomer.check(values, offer)
    try:
        newcomer.load(values, tensors)
    except StateUnavailable:
        after = everything(newcomer)
        assert before[0] == after[0]
        assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
        assert _options(newcomer) == groups
        assert _schedule(newcomer) == schedule
        assert newcomer.epoch == own_steps
    else:
        assert expected is None, "what the manifest shows is enough to refuse it"
        step(newcomer, 50)
        assert all(bool(torch.isfinite(each).all()) for each in newcomer.parameters)


def _schedule(training: TrainingState) -> dict[str, Any]:
    assert training.schedule.scheduler is not None
    return copy.deepcopy(training.schedule.scheduler.state_dict())


def _options(training: TrainingState) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"} for group in training.optimizer.param_groups
    ]
