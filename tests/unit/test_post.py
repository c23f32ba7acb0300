"""The fragments of a model call their peers together."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shoal.averaging import AveragerSettings
from shoal.averaging.core import PeerCore
from shoal.base.peer import Address, PeerID
from shoal.base.tasks import Changes
from shoal.errors import PeerError
from shoal.events import EventBus
from shoal.optim import RunSettings
from shoal.protocol.wire import (
    ChainsTold,
    Contact,
    Place,
    Progress,
    ProgressTold,
    Standing,
    TellChains,
    TellProgress,
)
from shoal.run.gossip import ProgressGossip
from shoal.run.post import Post
from shoal.run.settings import fragment_settings
from shoal.run.view.progress import SwarmProgress
from shoal.strategies import Decoupled

ME, OTHER, LIAR = (PeerID(bytes([number]) * 32) for number in range(3))
FRAGMENTS = 3
RUN = RunSettings(
    run_id="run",
    strategy=Decoupled(100, fragments=FRAGMENTS),
    averager=AveragerSettings(),
    fingerprint={"optimizer": "SGD"},
)


def progress(peer: PeerID, fragment: int, samples: int, time: float = 1.0) -> Progress:
    """Where this peer stands with a fragment."""
    settings = dict(fragment_settings(RUN, fragment, FRAGMENTS).fingerprint)
    contact = Contact(peer, (Address("10.0.0.9", 1, peer),))
    return Progress(contact, fragment, bytes([fragment]) * 32, 10 * fragment, samples, 1.0, time, settings)


class Peer:
    """`ME`, with a gossip for each fragment, and what it asks `OTHER`.

    Args:
        fragments: their number.
    """

    def __init__(self, fragments: int = FRAGMENTS) -> None:
        self.asked, self.served, self.answers_as = list[Any](), dict[type, Any](), OTHER
        self.begun, self.answers, self.timeouts = asyncio.Event(), asyncio.Event(), set[float]()
        env = SimpleNamespace(events=EventBus(), clock=SimpleNamespace(time=lambda: 1e9), rng=random.Random(0))
        endpoint: Any = SimpleNamespace(
            call=self._call,
            serve=self._serve,
            connected=lambda peer: True,
            reachable=lambda peer: True,
            dialable=lambda contact: contact,
            is_mute=lambda peer: False,
            learn=lambda contact: None,
        )
        self.post = Post(cast(PeerCore, SimpleNamespace(endpoint=endpoint, peer_id=ME, env=env)))
        self.known, self.gossips = list[SwarmProgress](), list[ProgressGossip]()
        for number in range(fragments):
            settings = fragment_settings(RUN, number, fragments)
            self.known.append(SwarmProgress(ME, settings.fingerprint, ttl_s=20.0))
            self.gossips.append(
                ProgressGossip(
                    self.post._core,
                    settings,
                    self.known[-1],
                    Changes(),
                    next_word=partial(self._next_word, number),
                    post=self.post,
                )
            )
        self.post.start("run")

    def _next_word(self, number: int) -> Progress:
        return progress(ME, number, 100 + number, self.post.next_time())

    def _serve(self, request: type, handler: Any, scope: str) -> Any:
        self.served[request] = handler
        return lambda: None

    async def _call(self, peer: PeerID, request: Any, timeout_s: float) -> Any:
        self.asked.append(request)
        self.timeouts.add(timeout_s)
        self.begun.set()
        await self.answers.wait()
        if isinstance(request, TellProgress):
            return ProgressTold(progress(peer, 0, 500))
        places = [msgspec.structs.replace(each, done=500 + each.fragment) for each in request.places]
        return ChainsTold(progress(self.answers_as, 0, 0), places)

    async def told(self) -> None:
        """All calls are answered."""
        self.answers.set()
        while self.post.telling:
            await asyncio.gather(*self.post.telling.values())


def test_what_several_fragments_have_to_tell_a_peer_goes_in_one_call() -> None:
    """Each called it: with 32 fragments 32 times, at each batch of the first way."""

    async def main() -> None:
        peer = Peer()
        for gossip in peer.gossips:
            gossip._call(OTHER)
        await peer.told()
        (asked,) = peer.asked
        assert [(place.fragment, place.epoch, place.done) for place in asked.places] == [
            (0, 0, 100),
            (1, 1, 101),
            (2, 2, 102),
        ]
        heard = [known.progress_of(OTHER) for known in peer.known]
        assert [said and (said.epoch, said.done) for said in heard] == [(0, 500), (1, 501), (2, 502)]

    asyncio.run(main())


def test_what_comes_due_during_a_call_goes_in_the_next_one_and_one_fragment_has_the_usual_message() -> None:
    """A run with one fragment sends what it sent."""

    async def main() -> None:
        peer = Peer()
        peer.gossips[0]._call(OTHER)
        await peer.begun.wait()
        for gossip in peer.gossips[1:]:
            gossip._call(OTHER)
        await peer.told()
        assert [type(each) for each in peer.asked] == [TellProgress, TellChains]
        assert peer.timeouts == {3.0}, "who answers none hears the next one soon"
        assert [place.fragment for place in peer.asked[1].places] == [1, 2]

    asyncio.run(main())


def test_nobody_tells_or_answers_in_anothers_name() -> None:
    """Of no fragment."""

    async def main() -> None:
        peer = Peer()
        peer.answers_as = LIAR
        for gossip in peer.gossips:
            gossip._call(OTHER)
        await peer.told()
        place = Place(1, 1, b"d" * 32, 10, 900)
        with pytest.raises(PeerError, match="another peer's name"):
            peer.served[TellChains](OTHER, TellChains("run", progress(LIAR, 0, 1), [place]))
        assert [known.peers for known in peer.known] == [()] * FRAGMENTS

    asyncio.run(main())


def test_a_peer_that_is_told_of_fragments_answers_of_those_that_it_has() -> None:
    """Others may name any number."""

    async def main() -> None:
        peer = Peer()
        places = [Place(number, 4, b"d" * 32, 40, 700) for number in (2, 63, 1, 2)]
        answer = peer.served[TellChains](OTHER, TellChains("run", progress(OTHER, 0, 1), places))
        assert [(place.fragment, place.done) for place in answer.places] == [(2, 102), (1, 101)]
        assert [bool(known.peers) for known in peer.known] == [False, True, True]
        assert len(peer.served[TellChains](OTHER, TellChains("run", progress(OTHER, 0, 1), [])).places) == FRAGMENTS

    asyncio.run(main())


def test_words_about_others_have_a_bound_for_all_fragments_together() -> None:
    """Each place had room for 4,096. 220 bytes had 262,144 of them looked at, and the answer fitted into no frame."""

    async def main() -> None:
        peer = Peer()
        others = [Standing(PeerID(number.to_bytes(32, "big")), 1, 1.0) for number in range(1024)]
        places = [Place(number, 4, b"d" * 32, 40, 700, others=others) for number in range(FRAGMENTS)]
        with pytest.raises(PeerError, match="more than 2048 words about others"):
            peer.served[TellChains](OTHER, TellChains("run", progress(OTHER, 0, 1), places))
        for number, (gossip, known) in enumerate(zip(peer.gossips, peer.known, strict=True)):
            gossip.enough = True
            for other in others:
                said = progress(other.peer, number, 5)
                known.heard(said, 1.0)
        answer = peer.served[TellChains](OTHER, TellChains("run", progress(OTHER, 0, 1), []))
        assert sum(len(place.others) for place in answer.places) == 2048 // FRAGMENTS * FRAGMENTS

    asyncio.run(main())


def test_a_fragment_that_is_left_says_so_for_itself_alone() -> None:
    """The others of the model may not be closed yet."""

    async def main() -> None:
        peer = Peer()
        place = Place(1, 1, b"d" * 32, 10, 900)
        said = progress(OTHER, 0, 1)
        peer.served[TellChains](OTHER, TellChains("run", said, [place, Place(2, 1, b"d" * 32, 10, 900)]))
        later = msgspec.structs.replace(said, time=2.0, left=True)
        peer.served[TellChains](
            OTHER,
            TellChains("run", later, [Place(1, 1, b"d" * 32, 10, 900, left=True), Place(2, 1, b"d" * 32, 10, 900)]),
        )
        assert [known.peers for known in peer.known] == [(), (), (OTHER,)]

    asyncio.run(main())
