"""Hugging Face's Trainer over `shoal.Optimizer`, as its users write it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.integration.workers import Talk

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def train(paces: tuple[str, str], **variables: Any) -> list[list[Any]]:
    """What two Trainers say, the second one with these variables in its environment."""
    command = [sys.executable, "-m", "tests.integration.trainer"]
    with (
        Talk([*command, paces[0]], library="transformers") as first,
        Talk([*command, paces[1]], fresh=bool(variables), library="transformers", **variables) as second,
    ):
        first.write("")
        second.write(json.loads(first.line())[1])
        second.line()
        for talk in (first, second):
            talk.write("begin")
        said = [[json.loads(line) for line in talk.rest() if line.startswith("[")] for talk in (first, second)]
        assert [talk.wait() for talk in (first, second)] == [0, 0], [talk.errors() for talk in (first, second)]
    return said


@pytest.mark.long
def test_peers_of_another_build_pass_the_check() -> None:
    """Without vector instructions a step rounds otherwise: bits drift within the bound: told once, no download."""
    said = train(("0.005", "0.005"), ATEN_CPU_CAPABILITY="default")
    for each in said:
        told = [value for kind, value in each if kind == "warned" and "check of the parameters" in value]
        assert ["to rounding only" in value for value in told] == [True]
    checks = [dict(each)["check"] for each in said]
    assert checks[0][0] == checks[1][0] >= 85
    assert checks[0][1] != checks[1][1]
    assert checks[0][2] == checks[1][2]


@pytest.mark.long
@pytest.mark.parametrize(
    "paces", [("0.005", "0.005"), pytest.param(("0.005", "0.02"), marks=pytest.mark.long(full=True))]
)
def test_silent_divergence_with_any_schedule_outside_shoal(paces: tuple[str, str]) -> None:
    """Two Trainers with its default schedule, warm-up from 0: 100 epochs, and none of those of both differs."""
    said = train(paces)
    epochs = [{value[0]: value[1:] for kind, value in each if kind == "epoch"} for each in said]
    common = epochs[0].keys() & epochs[1].keys()
    together = [epoch for epoch in common if epochs[0][epoch][2] == 2]
    assert len(together) >= 90, sorted(together)
    assert [epoch for epoch in common if epochs[0][epoch] != epochs[1][epoch]] == []
    for each in said:
        values = dict(each)
        assert values["schedule"] == ["LambdaLR", 100]
        assert values["rates"][0] == values["rates"][1] == pytest.approx(1e-3 * (10000 - 100) / (10000 - 10))
        warned = [value for kind, value in each if kind == "warned"]
        assert any("the LambdaLR that was made over this optimizer is moved by the run" in value for value in warned)
