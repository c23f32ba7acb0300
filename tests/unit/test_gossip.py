"""What peers tell each other of their progress, and in whose name."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shoal.core import PeerCore
from shoal.events import EventBus, PeerDropped
from shoal.optim.gossip import ProgressGossip
from shoal.optim.tellers import keepers, pace_s
from shoal.peer import Address, PeerID
from shoal.progress import SwarmProgress
from shoal.wire import Contact, Progress, ProgressTold, TellProgress

ME, OTHER, VICTIM = (PeerID(bytes([number]) * 32) for number in range(3))


def progress(peer: PeerID, time: float) -> Progress:
    """Where this peer stands at this time."""
    return Progress(Contact(peer, (Address("10.0.0.9", 1, peer),)), 5, b"d" * 32, 0, 7, 1.0, time, {})


def gossip_at(known: SwarmProgress, bus: EventBus, **endpoint: Any) -> ProgressGossip:
    """Of `ME`, on an endpoint that does this."""
    endpoint.setdefault("dialable", lambda contact: contact)
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

    async def call(peer: PeerID, request: object, timeout_s: float) -> ProgressTold:
        return ProgressTold(progress(speaker, 1e9))

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

    async def call(peer: PeerID, request: object, timeout_s: float) -> ProgressTold:
        connected.clear()
        gossip._peer_lost(OTHER, "gone")
        return ProgressTold(progress(OTHER, 2.0))

    gossip = gossip_at(known, EventBus(), connected=connected.__contains__, learn=lambda contact: None, call=call)
    asyncio.run(gossip._tell_one(OTHER))
    assert known.peers == ()


def test_what_changed_while_a_message_was_on_its_way_is_told_when_it_has_arrived() -> None:
    """The next regular message is a second away, and the end of an epoch does not wait for it."""
    known = SwarmProgress(ME, {}, ttl_s=20.0)
    known.heard(progress(OTHER, 1.0), 0.0)
    samples, heard = [0], list[int]()

    async def main() -> None:
        arrive, asked = asyncio.Event(), asyncio.Queue[int]()

        async def call(peer: PeerID, request: TellProgress, timeout_s: float) -> ProgressTold:
            heard.append(request.progress.samples)
            asked.put_nowait(len(heard))
            await arrive.wait()
            return ProgressTold(progress(OTHER, 2.0))

        gossip = gossip_at(
            known,
            EventBus(),
            connected=lambda peer: True,
            reachable=lambda peer: True,
            is_silent=lambda peer: False,
            learn=lambda contact: None,
            call=call,
        )
        gossip._mine = lambda: msgspec.structs.replace(progress(ME, 1.0), samples=samples[0])
        view = known.view(progress(ME, 1.0), 0.0)
        gossip.tell(view)
        await asked.get()
        samples[0] = 8
        gossip.tell(view, now=True)
        gossip.tell(view, now=True)
        assert heard == [0]
        arrive.set()
        await asked.get()
        await asyncio.gather(*gossip._telling.values())
        assert heard == [0, 8]

    asyncio.run(main())


def test_many_tell_two_who_count_and_these_tell_all_when_there_is_enough() -> None:
    """All told all, up to 32 of them: a waiting peer among 16 took 7% of a core, and above 32 nobody was told."""
    peers = [PeerID(bytes([number]) * 32) for number in range(20)]
    known, told = SwarmProgress(ME, {}, ttl_s=20.0), list[PeerID]()
    for peer in peers[1:]:
        known.heard(progress(peer, 1.0), 0.0)

    async def call(peer: PeerID, request: TellProgress, timeout_s: float) -> ProgressTold:
        told.append(peer)
        assert [other.peer for other in request.others] == (peers[1:] if gossip.enough else [])
        return ProgressTold(progress(peer, 2.0))

    contact = progress(ME, 1.0).contact
    gossip = gossip_at(
        known,
        EventBus(),
        contact=contact,
        connected=lambda peer: True,
        reachable=lambda peer: True,
        learn=lambda contact: None,
        call=call,
    )

    async def tell(digest: bytes, *, enough: bool) -> list[PeerID]:
        told.clear()
        gossip.enough, gossip._mine = enough, lambda: msgspec.structs.replace(progress(ME, 1.0), digest=digest)
        gossip.tell(known.view(gossip._mine(), 0.0), now=True)
        await asyncio.gather(*gossip._telling.values())
        return list(told)

    async def main() -> None:
        counting = [digest for digest in (bytes([n]) * 32 for n in range(200)) if ME in keepers(digest, peers)]
        assert sorted(await tell(b"d" * 32, enough=False)) == peers[1:]  # they do not know that we are here
        assert await tell(b"d" * 32, enough=False) == keepers(b"d" * 32, peers)
        assert ME not in keepers(b"d" * 32, peers)
        assert await tell(b"d" * 32, enough=True) == keepers(b"d" * 32, peers)
        assert len(await tell(counting[0], enough=False)) == 2  # nobody is there, and two of the others shall know
        for peer in peers[1:]:
            known.heard(msgspec.structs.replace(progress(peer, 3.0), digest=counting[1]), 0.0)
        assert sorted(await tell(counting[1], enough=True)) == peers[1:]
        assert len(await tell(counting[1], enough=True)) == 1

    asyncio.run(main())


def test_keepers_are_few_and_change_with_the_state() -> None:
    """Over many states everybody has its turn; whoever knows one peer more or less shares a keeper with the others."""
    peers = [PeerID(bytes([number]) * 32) for number in range(16)]
    states = [bytes([number, 1] * 16) for number in range(256)]
    turns = Counter(peer for state in states for peer in keepers(state, peers))
    assert sum(turns.values()) == 512
    assert turns.keys() == set(peers)
    assert max(turns.values()) < 3 * 512 / 16
    for state in states:
        assert set(keepers(state, peers)) & set(keepers(state, peers[1:]))


def test_nobody_is_told_more_often_than_it_can_bear() -> None:
    """A thousand peers tell each of their keepers once a second."""
    assert pace_s(0.05, 2) == pace_s(0.05, 5) == pace_s(0.05, 50) == 0.05
    assert pace_s(0.05, 1000) == 1.0
