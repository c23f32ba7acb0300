"""What peers tell each other of their progress, and in whose name."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shoal import sim
from shoal.averaging import AveragerSettings
from shoal.averaging.core import PeerCore
from shoal.base.peer import Address, PeerID
from shoal.base.tasks import Changes
from shoal.errors import ClosedError, PeerTimeout
from shoal.events import EventBus, PeerDropped, Warned
from shoal.optim import RunSettings
from shoal.protocol.wire import Contact, Progress, ProgressTold, TellProgress, decode
from shoal.run.gossip import ProgressGossip
from shoal.run.settings import fragment_settings
from shoal.run.view.progress import RELAYED_S, StateKey, SwarmProgress
from shoal.run.view.tellers import Countdown, Order, silence_s
from shoal.strategies import Decoupled, Synchronous

ME, OTHER, VICTIM = (PeerID(bytes([number]) * 32) for number in range(3))


def keepers(digest: bytes, peers: list[PeerID]) -> list[PeerID]:
    """Of these peers, all of whom can be one; the first peer is among them."""
    return Order(digest, peers).keepers(lambda peer: True)[0]


def parts(digest: bytes, peers: list[PeerID]) -> list[list[PeerID]]:
    """The first part is that of the first peer."""
    return Order(digest, peers).parts


def progress(peer: PeerID, time: float) -> Progress:
    """Where this peer stands at this time."""
    return Progress(Contact(peer, (Address("10.0.0.9", 1, peer),)), 5, b"d" * 32, 0, 7, 1.0, time, {})


SETTINGS = RunSettings(run_id="run", strategy=Synchronous(100), averager=AveragerSettings())


def gossip_at(
    known: SwarmProgress, bus: EventBus, *, settings: RunSettings = SETTINGS, **endpoint: Any
) -> ProgressGossip:
    """Of `ME`, on an endpoint that does this."""
    endpoint.setdefault("dialable", lambda contact: contact)
    endpoint.setdefault("is_mute", lambda peer: False)
    endpoint.setdefault("contact", progress(ME, 1.0).contact)
    env = SimpleNamespace(events=bus, clock=SimpleNamespace(time=lambda: 1e9), rng=random.Random(0))
    core: Any = SimpleNamespace(endpoint=SimpleNamespace(**endpoint), peer_id=ME, env=env)
    made = ProgressGossip(
        cast(PeerCore, core),
        settings,
        known,
        Changes(),
        next_word=lambda: progress(ME, 1.0),
    )
    made.target = 100
    return made


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
    asyncio.run(gossip._post.tell(OTHER, 0))
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
    asyncio.run(gossip._post.tell(OTHER, 0))
    assert known.peers == ()


def test_what_changed_while_a_message_was_on_its_way_is_told_when_it_has_arrived() -> None:
    """The next regular message is a second away, and the end of an epoch does not wait for it."""
    known = SwarmProgress(ME, {}, ttl_s=20.0)
    known.heard(progress(OTHER, 1.0), 0.0)
    samples, heard = [0], list[int]()

    async def main() -> None:
        arrive, asked = asyncio.Event(), asyncio.Queue[int]()

        async def call(peer: PeerID, request: TellProgress, timeout_s: float) -> ProgressTold:
            heard.append(request.progress.done)
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
        gossip._next_word = lambda: msgspec.structs.replace(progress(ME, 1.0), done=samples[0])
        view = known.view(progress(ME, 1.0), 0.0)
        gossip.tell(view)
        await asked.get()
        samples[0] = 8
        view = known.view(gossip._next_word(), 0.0)
        gossip.tell(view, now=True)
        gossip.tell(view, now=True)
        assert heard == [0]
        arrive.set()
        await asked.get()
        await asyncio.gather(*gossip._post.telling.values())
        assert heard == [0, 8]

    asyncio.run(main())


def test_a_count_that_others_wait_for_waited_for_a_pause() -> None:
    """Two peers with batches of 20 ms each began a third one before they heard that the first ones were enough."""

    async def main() -> None:
        swarm = Swarm(peers=2)
        swarm.gossip.target = 4

        async def calls(**mine: Any) -> int:
            swarm.called.clear()
            await swarm.tell(after_s=0.02, **mine)
            return len(swarm.called)

        await calls(done=2)
        # The new state waits for a pause; its counts do not, up to what was given to the last step.
        told = [await calls(done=samples, digest=b"e" * 32) for samples in (0, 0, 0, 1, 2, 3, 4)]
        assert told == [0, 0, 1, 1, 1, 0, 0]

    asyncio.run(main())


def test_peers_that_merge_tell_how_far_they_are_near_the_merge_only() -> None:
    """Each of four peers told the others of each batch, in each part of the model: four times what the values took."""
    known = SwarmProgress(ME, {}, ttl_s=20.0)
    heard = list[int]()

    async def main() -> None:
        async def call(peer: PeerID, request: TellProgress, timeout_s: float) -> ProgressTold:
            heard.append(request.progress.done)
            return ProgressTold(progress(OTHER, 2.0))

        gossip = gossip_at(
            known,
            EventBus(),
            settings=fragment_settings(msgspec.structs.replace(SETTINGS, strategy=Decoupled(100, fragments=16)), 1, 16),
            connected=lambda peer: True,
            reachable=lambda peer: True,
            is_silent=lambda peer: False,
            learn=lambda contact: None,
            call=call,
        )
        gossip.saw(enough=False, target=2000, rate=0.0)
        for number, digest in enumerate([b"d" * 32, b"e" * 32]):  # the first way as any other
            for batch in range(101):
                mine = msgspec.structs.replace(progress(ME, 1.0), done=10 * batch, digest=digest)
                told = progress(OTHER, 1.0 + 101 * number + batch)
                known.heard(msgspec.structs.replace(told, done=10 * batch, digest=digest), 0.0)
                gossip._next_word = partial(msgspec.structs.replace, mine)
                gossip.tell(known.view(mine, 0.0), now=True)
                await asyncio.gather(*gossip._post.telling.values())
            assert heard == [0, 900, 960, 980, 990, 1000]
            heard.clear()

    asyncio.run(main())


class Swarm:
    """Nineteen others and `ME`, and what `ME` tells them: who is called, and the notes."""

    def __init__(self, peers: int = 20) -> None:
        self.peers = [PeerID(bytes([number % 256, number // 256] * 16)) for number in range(peers)]
        self.known, self.now = SwarmProgress(self.peers[0], {}, ttl_s=20.0), 0.0
        self.called, self.notes = list[PeerID](), list[tuple[PeerID, TellProgress]]()
        self.linked, self.said, self.times = set(self.peers), dict[PeerID, Progress](), itertools.count(1.0)
        for peer in self.peers[1:]:
            self.say(peer)
        self.gossip = gossip_at(
            self.known,
            EventBus(),
            connected=self.linked.__contains__,
            reachable=lambda peer: True,
            is_silent=lambda peer: False,
            learn=lambda contact: None,
            call=self._call,
            tell=self._tell,
        )

    def say(self, peer: PeerID, **changes: Any) -> None:
        """A peer says where it stands."""
        self.said[peer] = msgspec.structs.replace(progress(peer, next(self.times)), **changes)
        self.known.heard(self.said[peer], self.now)

    async def _call(self, peer: PeerID, request: TellProgress, timeout_s: float) -> ProgressTold:
        self.called.append(peer)
        return ProgressTold(self.said[peer])

    def _tell(self, peers: list[PeerID], note: TellProgress) -> list[PeerID]:
        told = [peer for peer in peers if peer in self.linked]
        self.notes += [(peer, note) for peer in told]
        return told

    async def tell(self, *, after_s: float = 0.06, enough: bool = False, **mine: Any) -> list[PeerID]:
        """The peers that `ME` tells by notes, when it stands here after so many seconds."""
        self.now += after_s
        asyncio.get_running_loop().time = lambda: self.now  # type: ignore[method-assign]
        self.notes.clear()
        gossip, place = self.gossip, msgspec.structs.replace(progress(self.peers[0], 1.0 + self.now), **mine)
        gossip.saw(enough=enough, target=gossip.target, rate=gossip.rate)
        gossip._next_word = lambda: place
        gossip.tell(self.known.view(place, self.now))
        while gossip._post.telling:
            await asyncio.gather(*gossip._post.telling.values())
        return sorted(peer for peer, _ in self.notes)


def test_many_tell_two_who_count_and_these_tell_all_when_there_is_enough() -> None:
    """All told all, up to 32 of them: a waiting peer among 16 took 7% of a core, and above 32 nobody was told."""

    async def main() -> None:
        swarm = Swarm()
        me, others = swarm.peers[0], swarm.peers[1:]
        counted = [bytes([n]) * 32 for n in range(200) if me in keepers(bytes([n]) * 32, swarm.peers)]
        count = sorted(keepers(b"d" * 32, swarm.peers))
        assert me not in count
        assert await swarm.tell(done=1) == count
        assert sorted(swarm.called) == others  # once: they do not know that we are here
        assert await swarm.tell(done=2) == count
        assert await swarm.tell(done=2) == []
        assert await swarm.tell(done=3) == count
        for peer in others:
            swarm.say(peer, digest=counted[0])
        assert len(await swarm.tell(done=2, digest=counted[0], after_s=2.0)) == 1  # the other keeper
        assert await swarm.tell(done=3, digest=counted[0], enough=True) == others
        assert [len(note.others) for _, note in swarm.notes[-19:]] == [19] * 19
        assert await swarm.tell(done=3, digest=counted[0], enough=True) == []
        await swarm.tell(done=3, digest=counted[0])  # somebody left, with the samples
        assert await swarm.tell(done=4, digest=counted[0], enough=True) == others
        assert sorted(swarm.called) == others

    asyncio.run(main())


@pytest.mark.parametrize("peers", [3, 20])
def test_a_peer_that_was_cut_off_counts_without_those_that_it_found_silent(peers: int) -> None:
    """For a second or two after it had downloaded the state: nobody had a reason to say anything to it."""

    async def main() -> None:
        swarm = Swarm(peers)
        await swarm.tell(done=1)
        swarm.called.clear()
        mine, silent = swarm.gossip._next_word(), frozenset(swarm.peers[1:3])
        swarm.gossip.announce_state(swarm.known.view(mine, swarm.now, silent=silent), expected=False)
        await asyncio.gather(*swarm.gossip._post.telling.values())
        assert silent <= set(swarm.called)

    asyncio.run(main())


def test_a_small_swarm_writes_to_the_dht_at_each_of_its_short_epochs() -> None:
    """A signature and a call to each node, 300 times a second. The last state is written all the same."""

    async def main() -> None:
        epoch, written = 0, list[int]()

        async def store(key: str, value: bytes, expiration: float, subkey: bytes) -> None:
            written.append(decode(value, Progress).epoch)

        known = SwarmProgress(ME, {}, ttl_s=20.0)
        gossip = gossip_at(known, EventBus(), tell=lambda peers, message: [])
        gossip._core.node = cast(Any, SimpleNamespace(store=store))
        gossip._next_word = lambda: msgspec.structs.replace(progress(ME, 1.0), epoch=epoch)
        writing = asyncio.get_running_loop().create_task(gossip._publish_loop())
        for epoch in range(1, 301):  # noqa: B007 (read by `_next_word`)
            gossip.announce_state(known.view(gossip._next_word(), 0.0), expected=True)
            await sim.sleep(1 / 300)
        await sim.sleep(0.1)
        writing.cancel()
        assert len(written) <= 25
        assert written[-1] == 300

    sim.run(main, seed=0)


def test_a_peer_that_came_just_after_the_round_began_is_told_of_the_step_by_the_keepers() -> None:
    """It was told nothing, as the others expect each other to step: it waited for a round that was over."""

    async def main() -> None:
        swarm = Swarm()
        me, late, away = swarm.peers[0], swarm.peers[5], swarm.peers[6]
        await swarm.tell(done=1)
        view = swarm.known.view(swarm.gossip._next_word(), swarm.now)
        swarm.gossip.announce_state(view, expected=True)  # names where we stand
        before = StateKey.of_peer(swarm.gossip._next_word())
        swarm.say(away, digest=b"w" * 32)  # at a worse state
        members = frozenset(swarm.peers) - {me, late, away}
        for digest in (bytes([number]) * 32 for number in range(200)):
            await swarm.tell(done=0, epoch=before.epoch + 1, digest=digest)
            swarm.notes.clear()
            swarm.gossip._at = before
            view = swarm.known.view(swarm.gossip._next_word(), swarm.now, awaited=members, before=before)
            swarm.gossip.announce_state(view, expected=True)
            told = [peer for peer, note in swarm.notes if note.progress.digest == digest]
            assert told == ([late] if me in keepers(digest, sorted({me, *members})) else [])

    asyncio.run(main())


def test_a_count_is_told_when_it_may_be_the_last_one() -> None:
    """Each batch was told to both keepers. Now it is near the end of an epoch, by what was given to the last one."""

    async def main() -> None:
        swarm = Swarm()
        for samples in range(1, 11):
            assert len(await swarm.tell(done=samples)) == 2  # nothing is known of how long an epoch is
        told = [len(await swarm.tell(done=samples, digest=b"e" * 32)) for samples in range(11)]
        assert told == [0] * 9 + [2] * 2

    asyncio.run(main())


def test_counts_beyond_enough_are_not_told() -> None:
    """A keeper among 64 heard of each peer twice in an epoch of a second: also of batches while the round was made."""

    async def main() -> None:
        swarm = Swarm()
        assert len(await swarm.tell(done=1)) == 2
        assert await swarm.tell(done=2, enough=True) == []
        assert len(await swarm.tell(done=2, enough=True, after_s=2.0)) == 2  # after a silence all is told
        assert len(await swarm.tell(done=3)) == 2  # somebody left, with the samples

    asyncio.run(main())


def test_a_long_epoch_has_a_few_counts_near_its_end() -> None:
    """Of 1,000 batches the last hundred were told, and a keeper hears of all peers."""
    known, countdown, told = SwarmProgress(ME, {}, ttl_s=20.0), Countdown(), list[int]()
    for epoch, samples in [(1, 1024), *((2, samples) for samples in range(1, 1025))]:
        mine = msgspec.structs.replace(progress(ME, 0.0), done=samples, epoch=epoch, digest=bytes([epoch]) * 32)
        if countdown.observe(mine, view := known.view(mine, 0.0), 10**6, view.rate, 0.0) and countdown.matters:
            countdown.told()
            told += [samples] * (epoch == 2)
    assert told == [922, 973, 999, 1012, 1018, 1021, 1023, 1024]


def test_a_peer_without_a_link_is_called() -> None:
    """A note reaches whom there is a link with; a keeper that has none is dialed."""

    async def main() -> None:
        swarm = Swarm()
        count = keepers(b"d" * 32, swarm.peers)
        await swarm.tell(done=1)
        swarm.called.clear()
        swarm.linked.discard(count[0])
        assert await swarm.tell(done=2) == [count[1]]
        assert swarm.called == [count[0]]

    asyncio.run(main())


def test_a_peer_that_does_not_know_of_a_step_is_told() -> None:
    """A call was answered by where the other stands. Of notes the ones that come late from a worse state are."""

    async def main() -> None:
        swarm = Swarm()
        await swarm.tell(done=1)
        await swarm.tell(done=0, epoch=6, digest=b"e" * 32)
        swarm.gossip.announce_state(swarm.known.view(swarm.gossip._next_word(), swarm.now), expected=True)
        await swarm.tell(done=0, epoch=7, digest=b"f" * 32)
        swarm.gossip.announce_state(swarm.known.view(swarm.gossip._next_word(), swarm.now), expected=True)

        def late(after_s: float, **changes: Any) -> list[PeerID]:
            swarm.now += after_s
            swarm.notes.clear()
            note = TellProgress("run", msgspec.structs.replace(progress(swarm.peers[1], 9.0 + swarm.now), **changes))
            swarm.gossip._noted(swarm.peers[1], note)
            return [peer for peer, _ in swarm.notes]

        assert late(0.1, epoch=6, digest=b"e" * 32) == []  # it has crossed the step
        assert late(0.1, epoch=5) == [swarm.peers[1]]  # this one has not
        assert late(0.1, epoch=5) == []  # it was told
        swarm.gossip._corrected.clear()
        assert late(0.5, epoch=6, digest=b"e" * 32) == [swarm.peers[1]]
        assert late(0.1, epoch=8) == []

    asyncio.run(main())


def kept_by_me() -> tuple[Swarm, bytes, list[PeerID], list[PeerID]]:
    """A swarm of two parts, a state in which its first peer is a keeper, that peer's part, and the other one."""
    swarm = Swarm(200)
    digests = (bytes([n]) * 32 for n in range(256))
    digest = next(each for each in digests if swarm.peers[0] in keepers(each, parts(each, swarm.peers)[0]))
    own, other = parts(digest, swarm.peers)
    return swarm, digest, own, other


def test_a_large_state_is_divided_among_keepers_who_tell_each_other() -> None:
    """A keeper of a thousand would be told a thousand counts, and tell as many peers."""
    digest, peers = b"d" * 32, Swarm(1000).peers
    divided = parts(digest, peers)
    assert [len(parts(digest, peers[:n])) for n in (5, 100, 191, 192, 384)] == [1, 1, 1, 2, 4]
    assert sorted(peer for part in divided for peer in part) == sorted(peers)
    assert len(divided) == 8
    assert peers[0] in divided[0]
    assert max(map(len, divided)) < 1.5 * min(map(len, divided))
    for peer in peers[:20]:  # all divide alike
        mine = parts(digest, [peer, *(other for other in peers if other != peer)])
        assert {frozenset(part) for part in mine} == {frozenset(part) for part in divided}

    async def main() -> None:
        swarm, digest, own, other = kept_by_me()
        colleagues = keepers(digest, other)
        for peer in swarm.peers[1:]:
            swarm.say(peer, digest=digest, done=0)
        await swarm.tell(digest=digest, done=1, after_s=2.0)
        swarm.say(own[1], digest=digest, done=5)
        swarm.now += 1.0
        told = await swarm.tell(digest=digest, done=1)
        assert told == sorted(colleagues)
        assert own[1] in {standing.peer for standing in swarm.notes[0][1].others}
        told = await swarm.tell(digest=digest, done=1, enough=True, after_s=0.2)
        assert told == sorted({*own, *colleagues} - {swarm.peers[0]})

    asyncio.run(main())


def test_keepers_of_parts_tell_each_other_sooner_the_nearer_the_end_is() -> None:
    """They went by the samples that they knew of, and did not hurry: with 400 peers epochs of 5 s ended 0.4 s late."""

    async def main() -> None:
        swarm, digest, own, other = kept_by_me()
        await swarm.tell(done=10)
        for peer in swarm.peers[1:]:
            swarm.say(peer, digest=digest, done=0)
        await swarm.tell(done=0, digest=digest)
        swarm.say(own[1], digest=digest, done=5)
        await swarm.tell(done=9, digest=digest, after_s=0.5)  # 200 peers make 100 samples in half a second
        swarm.say(own[2], digest=digest, done=5)
        assert await swarm.tell(done=9, digest=digest, after_s=0.05) == sorted(keepers(digest, other))

    asyncio.run(main())


def test_keepers_of_parts_tell_each_other_what_is_new_and_all_of_it_now_and_then() -> None:
    """They told all of it each time: more than a peer reads from another, so what they knew of each other grew old."""

    async def main() -> None:
        swarm, digest, own, _ = kept_by_me()
        for peer in swarm.peers[1:]:
            swarm.say(peer, digest=digest, done=0)
        counts = []
        for number, after_s in enumerate((2.0, 1.0, 0.2, 0.2, RELAYED_S / 2)):
            swarm.say(own[1 + number], digest=digest, done=5)
            assert await swarm.tell(done=1, digest=digest, after_s=after_s)
            counts.append(len(swarm.notes[-1][1].others))
        assert counts == [199, 1, 1, 1, 199]

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
    """Where nothing else makes them speak, keepers of a thousand hear of each once a minute."""
    assert silence_s(2) == silence_s(16) == 1.0
    assert silence_s(960) == 60.0


def test_a_slow_epoch_ends_late_and_those_who_count_may_be_silent() -> None:
    """They are looked at when the epoch should be over since half a second; of a merge's long way, since a tenth."""
    known, countdown, merges = SwarmProgress(ME, {}, ttl_s=20.0), Countdown(), Countdown(merges=True)

    def near(samples: int, now: float, digest: bytes = b"e" * 32) -> bool:
        mine = msgspec.structs.replace(progress(ME, now), done=samples, digest=digest)
        way = msgspec.structs.replace(mine, done=200 * samples)
        merges.observe(way, known.view(way, 10 * now), 10_000, 0.0, 10 * now)
        return countdown.observe(mine, view := known.view(mine, now), 100, view.rate, now)

    assert near(5, 0.0, b"d" * 32)
    assert [near(samples, samples / 10) for samples in range(6)] == [False] * 4 + [True] * 2
    assert not countdown.is_late(0.9)
    assert countdown.is_late(1.0)
    assert not merges.is_late(5.4)
    assert merges.is_late(5.5)
    assert not near(0, 2.0, b"f" * 32)
    assert not countdown.is_late(3.0)


class NoDht:
    """Its stores and reads fail, as long as `error` is set."""

    def __init__(self) -> None:
        self.error: Exception | None = PeerTimeout("no answer")
        self.found: Any = None

    async def store(self, *_: object) -> bool:
        """As the node does."""
        if self.error is not None:
            raise self.error
        return True

    async def get(self, *_: object, **__: object) -> Any:
        """As the node does."""
        if self.error is not None:
            raise self.error
        return self.found


def test_an_error_of_gossip_is_a_warning_once() -> None:
    """Writing and reading of progress failed without a word, and an unreadable record too."""
    events = list[object]()
    bus = EventBus()
    bus.subscribe(events.append)
    gossip = gossip_at(SwarmProgress(ME, {}, ttl_s=20.0), bus)
    node: Any = NoDht()
    gossip._core.node = node

    async def both() -> None:
        await gossip._publish()
        await gossip._look()

    for _ in range(2):
        asyncio.run(both())
    told = [event.message for event in events if isinstance(event, Warned)]
    assert len(told) == 2
    assert "its progress could not be written to the DHT" in told[0]
    assert "the progress of the others could not be read from the DHT (PeerTimeout" in told[1]
    node.error = None
    node.found = SimpleNamespace(value={OTHER.to_bytes(): SimpleNamespace(value=b"?")})
    for _ in range(2):
        asyncio.run(both())
    (dropped,) = [event for event in events if isinstance(event, PeerDropped)]
    assert dropped.peer == OTHER
    assert "its progress in the DHT cannot be read" in dropped.reason
    node.error = PeerTimeout("no answer")
    asyncio.run(both())
    assert len([event for event in events if isinstance(event, Warned)]) == 4
    node.error = ClosedError("this peer leaves")
    asyncio.run(both())
    assert len([event for event in events if isinstance(event, Warned)]) == 4


@pytest.mark.parametrize(("peers", "most"), [(8, 60), (1000, 6)])
def test_a_large_swarm_in_which_somebody_comes_all_the_time_is_read_rarely(peers: int, most: int) -> None:
    """Each of a thousand read all thousand words each second, for as long as each look found a newcomer."""
    known, looks = SwarmProgress(ME, {}, ttl_s=1e9), []
    for number in range(peers):
        known.heard(progress(PeerID(number.to_bytes(32, "big")), 1.0), 0.0, direct=False)
    gossip = gossip_at(known, EventBus())
    gossip.looked.set()

    async def look() -> dict[PeerID, float]:
        gossip._found_at = asyncio.get_running_loop().time()
        looks.append(gossip._found_at)
        return {}

    async def nothing(_: object) -> None:
        """Nobody is to be asked."""

    async def main() -> None:
        for name, instead in (("_look", look), ("_ask_who_lives", nothing), ("_find_hidden", nothing)):
            setattr(gossip, name, instead)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60.0):
                await gossip._look_loop()

    sim.run(main(), seed=1)
    assert most / 2 < len(looks) <= most


def test_the_only_contributor_keeps_the_count_of_those_that_came_after_it() -> None:
    """Nobody believes what a stranger passes on: newcomers knew nothing of the one that had made the last merges."""

    async def main() -> None:
        swarm = Swarm()
        digests = [bytes([n]) * 32 for n in range(200)]
        for lone in swarm.peers[1:4]:
            swarm.known.contributed(frozenset({lone}))
            digest = next(each for each in digests if lone not in keepers(each, swarm.peers))
            for peer in swarm.peers[1:]:
                swarm.say(peer, digest=digest)
            told = await swarm.tell(done=1, digest=digest, after_s=2.0)
            assert lone in told
            assert len(told) == (1 if swarm.peers[0] == keepers(digest, swarm.peers)[0] else 2)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("of_own", "of_other", "keeps", "colleagues"),
    [
        pytest.param(0, 0, (0, 1), (0, 1), id="nobody contributed"),
        pytest.param(1, 0, (0, 1), (0, 1), id="one"),
        pytest.param(3, 0, (0, 1), (), id="peers of one part"),
        pytest.param(0, 3, (), (0, 1), id="peers of the other part"),
        pytest.param(80, 80, (0, 1), (0, 1), id="most peers"),
    ],
)
def test_each_part_of_a_large_state_has_keepers_of_its_own(
    of_own: int, of_other: int, keeps: tuple[int, ...], colleagues: tuple[int, ...]
) -> None:
    """The first contributors of the whole state kept the count of each part: two peers were told by a thousand."""

    async def main() -> None:
        swarm, digest, own, other = kept_by_me()
        for peer in swarm.peers[1:]:
            swarm.say(peer, digest=digest, done=0)
        swarm.known.contributed(frozenset([*own[:of_own], *other[:of_other]]))
        await swarm.tell(done=1, digest=digest, after_s=2.0)
        duty = swarm.gossip._duty
        assert duty.order.parts == [own, other]
        # A part without contributors has those of the other one.
        assert duty.keepers == ([own[number] for number in keeps] or other[:2])
        assert duty.colleagues == [other[number] for number in colleagues]

    asyncio.run(main())
