"""The bounds of names: they hold for what is made of a name as for what is read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.averaging import StepResult
from shoal.errors import LocalError, StateUnavailable
from shoal.protocol.wire import LAST_EPOCH_TAKEN, MAX_EPOCH, MAX_SAMPLES, MAX_SAMPLES_TAKEN, Progress, decode, encode
from shoal.run.decide.state_name import StateName
from shoal.run.join.shared_state import name_of
from shoal.train.training_state import TrainingState
from tests.unit.test_progress import ANN, said

DIGEST = b"d" * 32


def read_back(name: StateName) -> StateName:
    """As others read it."""
    plain: Any = msgspec.msgpack.decode(encode(list(name)))
    return msgspec.convert(plain, StateName)


class _Outcome(msgspec.Struct):
    weight: float
    commit: bytes = b""


class _Result(msgspec.Struct):
    outcome: _Outcome
    round_id: bytes = b"r" * 16


@given(
    epoch=st.integers(0, LAST_EPOCH_TAKEN),
    samples=st.integers(0, MAX_SAMPLES_TAKEN),
    weight=st.floats(0, 256e12),
    steps=st.integers(1, 8),
)
def test_a_poisoned_name_splits_the_run_for_good(epoch: int, samples: int, weight: float, steps: int) -> None:
    """2^62 samples were accepted, and the name after the next step was not: whoever had it was alone."""
    name = name_of({"state": [epoch, DIGEST, samples]})
    result: StepResult = _Result(_Outcome(weight))  # type: ignore[assignment]
    for _ in range(steps):
        for following in (
            name.after_round(result, b""),
            name.after_step_alone(b"c", b"p", 1 << 62),
            name.after_averaging(result),
            name.after_interruption(b"c", b"p", step=True),
            name.after_loading(b"f"),
        ):
            assert read_back(following) == following
            assert following.epoch >= name.epoch
            assert following.samples >= name.samples
        name = name.after_round(result, b"")


@pytest.mark.parametrize(
    "state",
    [[LAST_EPOCH_TAKEN + 1, DIGEST, 0], [0, DIGEST, MAX_SAMPLES_TAKEN + 1], [MAX_EPOCH, DIGEST, MAX_SAMPLES]],
)
def test_a_state_that_cannot_step_on_is_not_taken_over(state: list[object]) -> None:
    """It may be told of: a run that has come so far goes on. But nobody begins there."""
    assert read_back(msgspec.convert(state, StateName))
    with pytest.raises(StateUnavailable, match="is beyond any run"):
        name_of({"state": state})


def test_there_is_no_step_beyond_the_last_epoch() -> None:
    """Its name would be refused by everybody."""
    name = StateName(MAX_EPOCH, DIGEST, 0)
    with pytest.raises(LocalError, match="has taken 20000000 steps"):
        name.after_step_alone(b"c", b"p", 1)
    assert name.after_averaging(_Result(_Outcome(1.0))).samples == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": MAX_EPOCH + 1},
        {"epoch": -1},
        {"branch_samples": MAX_SAMPLES + 1},
        {"done": 1 << 63},
        {"end_epoch": MAX_EPOCH + 1},
        {"end_epoch": -1},
    ],
)
def test_progress_out_of_bounds_is_the_peers_error(wrong: dict[str, int]) -> None:
    """It is not read at all."""
    with pytest.raises(msgspec.ValidationError):
        decode(encode(msgspec.structs.replace(said(ANN), **wrong)), Progress)


@pytest.mark.parametrize("count", [1e30, float("inf"), float("nan"), -3.0])
def test_a_count_of_steps_that_cannot_be_makes_no_name(count: float) -> None:
    """A checkpoint may hold anything."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["step"] = torch.tensor(count)
    assert TrainingState(optimizer).local.kept.steps_taken == 1
