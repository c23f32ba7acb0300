"""Arguments that are True or False: a text is neither, though Python would take it for True."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import shoal


def _optimizer(dht: shoal.DHT, **options: object) -> object:
    model = torch.nn.Linear(2, 2)
    return shoal.Optimizer(
        dht=dht,
        run_id="flags",
        target_batch_size=4,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        **options,  # type: ignore[arg-type]
    )


def _averager(dht: shoal.DHT, **options: object) -> object:
    given = {"start": False, **options}
    return shoal.DecentralizedAverager([torch.zeros(2)], dht, prefix="flags", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["client_mode", "encrypt", "start"])
def test_a_text_is_no_flag_of_a_peer(name: str) -> None:
    """`client_mode="no"` made a peer that only dials."""
    with pytest.raises(shoal.ConfigError, match=rf"^{name} must be True or False, got 'no'"):
        shoal.DHT(**{name: "no"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((_averager, name) for name in ("client_mode", "auxiliary", "allow_state_sharing", "start")),
        *((_optimizer, name) for name in ("client_mode", "require_state", "verbose")),
    ],
)
def test_a_text_is_no_flag_of_what_averages(make: Callable[..., object], name: str) -> None:
    """The argument is named, and nothing was started."""
    with (
        shoal.DHT(start=True) as dht,
        pytest.raises(shoal.ConfigError, match=rf"^{name} must be True or False, got 'no'"),
    ):
        make(dht, **{name: "no"})


@pytest.mark.parametrize("name", ["wait", "allow_retries", "require_trigger"])
def test_a_text_is_no_flag_of_a_step(name: str) -> None:
    """`wait="no"` waited."""
    with shoal.DHT(start=True) as dht:
        averager = shoal.DecentralizedAverager([torch.zeros(2)], dht, prefix="flags", start=True)
        with pytest.raises(shoal.ConfigError, match=rf"^{name} must be True or False, got 'no'"):
            averager.step(**{"timeout": 1.0, name: "no"})  # type: ignore[call-overload]


def test_numbers_of_numpy_and_of_a_command_line_are_flags() -> None:
    """`np.True_`, 1 and 0 are what programs have at hand."""
    assert shoal.DHT(client_mode=np.True_).client_mode is True  # type: ignore[arg-type]
    assert shoal.DHT(client_mode=1).client_mode is True  # type: ignore[arg-type]
    assert shoal.DHT(client_mode=0).client_mode is False  # type: ignore[arg-type]
