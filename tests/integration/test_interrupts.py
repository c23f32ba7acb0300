"""One Ctrl+C at the wrong microsecond disabled a peer for good: real signals, at random moments of everything."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.workers import Talk


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(each, marks=pytest.mark.long(full=True)) for each in (2, 3))])
def test_one_ctrl_c_can_disable_a_peer_for_good(seed: int, soak: Callable[[int, int], int]) -> None:
    """Interrupted at any microsecond of any call, the same objects go on; no lock is kept, states agree."""
    count = soak(50, 1250)
    with Talk([sys.executable, "-m", "tests.integration.interrupts", str(count), str(seed)]) as talk:
        found: dict[str, Any] = json.loads(talk.line(3000.0))
        assert talk.wait() == 0, talk.errors()
    assert found["sent"] >= count
    assert sum(found["interrupted"].values()) > count / 4, found
    assert found["common"] > count / 25, found
    assert found["unequal"] == 0, found
    assert found["errors"] == found["threads"] == [], found
    assert found["interrupted"]["network"] > 0, found  # the shutdown of the DHT
