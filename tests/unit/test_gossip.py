"""What peers tell each other of their progress, and in whose name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.core import PeerCore
from shoal.events import EventBus, PeerDropped
from shoal.optim.gossip import ProgressGossip
from shoal.peer import Address, PeerID
from shoal.progress import SwarmProgress
from shoal.wire import Contact, Progress

ME, OTHER, VICTIM = (PeerID(bytes([number]) * 32) for number in range(3))


def progress(peer: PeerID, time: float) -> Progress:
    """Where this peer stands at this time."""
    return Progress(Contact(peer, (Address("10.0.0.9", 1, peer),)), 5, b"d" * 32, 0, 7, 1.0, time, {})


@pytest.mark.parametrize("speaker", [OTHER, VICTIM])
def test_nobody_answers_in_anothers_name(speaker: PeerID) -> None:
    """Else a peer could move another one elsewhere, and by a time in the future silence what it says itself."""
    known, learned, events = SwarmProgress(ME, {}, ttl_s=20.0), list[PeerID](), list[object]()
    bus = EventBus()
    bus.subscribe(events.append)

    async def call(peer: PeerID, request: object, timeout_s: float) -> Progress:
        return progress(speaker, 1e9)

    endpoint = SimpleNamespace(learn=lambda contact: learned.append(contact.peer), call=call)
    clock = SimpleNamespace(time=lambda: 1e9)
    core: Any = SimpleNamespace(endpoint=endpoint, peer_id=ME, env=SimpleNamespace(events=bus, clock=clock))
    gossip = ProgressGossip(
        cast(PeerCore, core),
        "run",
        known,
        mine=lambda: progress(ME, 1.0),
        on_news=lambda: None,
        publish_period_s=2.0,
        tell_period_s=0.05,
        ttl_s=20.0,
    )
    asyncio.run(gossip._tell_one(OTHER))
    honest = speaker == OTHER
    assert (known.progress_of(speaker) is not None) == honest
    assert learned == [OTHER] * honest
    assert [event.peer for event in events if isinstance(event, PeerDropped)] == [OTHER] * (not honest)
