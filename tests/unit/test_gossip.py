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


def gossip_at(known: SwarmProgress, bus: EventBus, **endpoint: Any) -> ProgressGossip:
    """Of `ME`, on an endpoint that does this."""
    env = SimpleNamespace(events=bus, clock=SimpleNamespace(time=lambda: 1e9))
    core: Any = SimpleNamespace(endpoint=SimpleNamespace(**endpoint), peer_id=ME, env=env)
    return ProgressGossip(
        cast(PeerCore, core),
        "run",
        known,
        mine=lambda: progress(ME, 1.0),
        on_news=lambda: None,
        publish_period_s=2.0,
        tell_period_s=0.05,
        ttl_s=20.0,
    )


@pytest.mark.parametrize("speaker", [OTHER, VICTIM])
def test_nobody_answers_in_anothers_name(speaker: PeerID) -> None:
    """Else a peer could move another one elsewhere, and by a time in the future silence what it says itself."""
    known, learned, events = SwarmProgress(ME, {}, ttl_s=20.0), list[PeerID](), list[object]()
    bus = EventBus()
    bus.subscribe(events.append)

    async def call(peer: PeerID, request: object, timeout_s: float) -> Progress:
        return progress(speaker, 1e9)

    gossip = gossip_at(
        known, bus, connected=lambda peer: True, learn=lambda contact: learned.append(contact.peer), call=call
    )
    asyncio.run(gossip._tell_one(OTHER))
    honest = speaker == OTHER
    assert (known.progress_of(speaker) is not None) == honest
    assert learned == [OTHER] * honest
    assert [event.peer for event in events if isinstance(event, PeerDropped)] == [OTHER] * (not honest)


def test_an_answer_that_is_read_after_its_peer_was_lost_does_not_bring_it_back() -> None:
    """The answer and the end of the link are read in one go; the task that asked runs after both."""
    known = SwarmProgress(ME, {}, ttl_s=20.0)
    known.heard(progress(OTHER, 1.0), 0.0)
    connected = {OTHER}

    async def call(peer: PeerID, request: object, timeout_s: float) -> Progress:
        connected.clear()
        gossip._peer_lost(OTHER, "gone")
        return progress(OTHER, 2.0)

    gossip = gossip_at(known, EventBus(), connected=connected.__contains__, learn=lambda contact: None, call=call)
    asyncio.run(gossip._tell_one(OTHER))
    assert known.peers == ()
