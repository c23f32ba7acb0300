"""Trainers of other libraries in settings that their users take, two peers each: equal weights at the end."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.foreign.trainers import STEPS
from tests.integration.workers import Talk


def said(peer: Talk, kind: str) -> Any:
    """The value of the next line of this kind."""
    while True:
        try:
            found, value = json.loads(peer.line())
        except ValueError:
            continue  # the trainer's own words
        if found == kind:
            return value


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["lora", "bf16"])
def test_a_trainer_of_another_library_trains_with_a_second_peer(name: str) -> None:
    """The Trainer with LoRA, whose second parameter group is empty; Lightning in bf16-true, with 8-bit gradients."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.foreign.trainers", name]
    library = {"lora": "transformers", "bf16": "lightning"}[name]
    with Talk(command, library=library) as first:
        invite = said(first, "invite")
        with Talk([*command, invite], library=library) as second:
            said(second, "invite")
            for peer in (first, second):
                peer.write("")
            if name == "lora":
                assert [said(peer, "groups")[1] for peer in (first, second)] == [0, 0]
            ended = [said(peer, "ended") for peer in (first, second)]
            assert [peer.wait() for peer in (first, second)] == [0, 0]
    assert ended[0][:2] == ended[1][:2]
    assert ended[0][0] == STEPS
    assert [warned for each in ended for warned in each[2] if "training alone" not in warned] == []
