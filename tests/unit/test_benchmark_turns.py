"""`benchmarks.turns` starts the processes that its lines name."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import turns
from benchmarks.allreduce import Peer


class Spawned:
    """A process that is never started: it answers with an invite."""

    async def ask(self, do: str, timeout_s: float, **more: Any) -> dict[str, Any]:
        return {"invite": "here"}


@pytest.mark.parametrize("name", [name for name, kind in turns.KINDS.items() if isinstance(kind, turns.Training)])
def test_epochs_of_two_peers_are_measured_with_two_peers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that says "2 peers" is of two processes, all others are of one."""

    async def spawn(*_: Any, **__: Any) -> Spawned:
        return Spawned()

    monkeypatch.setattr(Peer, "spawn", spawn)
    kind = turns.KINDS[name]
    named = re.search(r"(\d+) peers", kind.what)
    swarm = asyncio.run(kind.start(Path(), Path()))
    assert len(swarm.peers) == (int(named[1]) if named else 1)
