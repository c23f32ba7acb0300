"""The plan of a group: who reduces how much."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.averager import AveragerSettings
from shoal.averager.group_finder import GroupFinder
from shoal.peer import Address, PeerID
from shoal.wire import Contact, Member


def member(number: int, bandwidth: float | None) -> Member:
    """One that can be dialed."""
    peer = PeerID(number.to_bytes(32, "big"))
    return Member(Contact(peer, (Address("10.0.0.1", 4000, peer),)), True, bandwidth, b"")


@pytest.mark.parametrize(("members", "reducers"), [(256, 256), (257, 128), (1024, 128)])
def test_a_large_group_has_few_reducers(members: int, reducers: int) -> None:
    """Each member has a connection with each of them: the fastest ones."""
    finder: Any = GroupFinder.__new__(GroupFinder)
    finder._vector = SimpleNamespace(layout=SimpleNamespace(numel=1 << 20), check_part_bytes=lambda *_: None)
    finder._settings = AveragerSettings()
    fast = dict.fromkeys(range(0, members, 2), 2e6) if members > 256 else {}
    slices, _ = finder._plan([member(number, fast.get(number, 1e6)) for number in range(members)])
    assert sum(slices) == 1 << 20
    assert sum(map(bool, slices)) == reducers
    assert {place for place, elements in enumerate(slices) if elements} <= (fast.keys() or set(range(members)))
