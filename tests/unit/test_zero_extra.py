"""What a checkpoint carries for its user: back as it was, or refused."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.zero.packing import pack, unpack

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = PLAIN | st.tuples(PLAIN, PLAIN)
ANY = st.recursive(
    PLAIN,
    lambda each: (
        st.lists(each)
        | st.lists(each).map(tuple)
        | st.sets(KEYS)
        | st.dictionaries(KEYS, each)
        | st.dictionaries(KEYS, st.integers()).map(Counter)
        | st.dictionaries(KEYS, each).map(OrderedDict)
    ),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """The same with the types of everything in it, for `==` takes 1 and True for one."""
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(each)) for key, each in value.items()]
    if isinstance(value, set):
        return set, {typed(each) for each in value}
    if isinstance(value, list | tuple):
        return type(value), tuple(typed(each) for each in value)
    return type(value), value


@given(value=ANY | st.just({"(tuple)": 1}))
def test_all_comes_back_with_its_types(value: Any) -> None:
    """Through JSON; keys of any kind, tuples, sets."""
    assert typed(unpack(json.loads(json.dumps(pack(value))))) == typed(value)


def test_a_schedule_with_milestones() -> None:
    """Their keys are numbers: as texts they would never be reached."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    state = json.loads(json.dumps(pack(schedule.state_dict())))
    schedule.load_state_dict(unpack(state))
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.01])


def test_what_cannot_come_back_is_named() -> None:
    """With the place where it is."""
    with pytest.raises(ConfigError, match=r"extra\['a'\]\[1\] is of type Tensor"):
        pack({"a": [1, torch.zeros(1)]})


@pytest.mark.parametrize("value", [{"a": [10**5000]}, {"a": [-(10**4300)]}])
def test_a_number_with_too_many_digits_is_an_error_of_python(value: Any) -> None:
    """It was a ValueError, when all else was written. Python writes and reads integers of 4300 digits at most."""
    with pytest.raises(ConfigError, match=r"extra\['a'\]\[0\] is an integer of more than 4300 digits"):
        pack(value)
    largest = 10**4299
    assert unpack(json.loads(json.dumps(pack(largest)))) == largest
