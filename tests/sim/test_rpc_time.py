"""Calls and streams when time is the matter: deadlines, heartbeats, idle links, partitions, slow lines."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from shoal.base.peer import Address, PeerID
from shoal.errors import ClosedError, PeerRefused, PeerTimeout, PeerUnreachable
from shoal.events import PeerConnected, PeerDropped, PeerLost, PeerSilent, Warned
from shoal.protocol import wire
from shoal.protocol.wire import Beat, BeatReply, Call, Contact, Reply, encode
from shoal.rpc import LOOK_S, Limits
from shoal.rpc.framing import Kind, pack
from shoal.sim import sleep
from tests.sim.rpc_kit import (
    QUICK,
    ByHand,
    Down,
    OpenPipe,
    Peer,
    PipeDown,
    PipeUp,
    Said,
    Say,
    SimNet,
    Up,
    call_frame,
    echo,
    ends,
    on_sim,
    receive,
    together,
)


def now() -> float:
    """Virtual time."""
    return asyncio.get_running_loop().time()


async def hold(stream: PipeDown, opening: OpenPipe) -> None:
    """A handler that waits for the end of the stream."""
    while await stream.recv() is not None:
        pass


async def opening_slowly(net: SimNet) -> tuple[Peer, Peer, asyncio.Task[PipeUp]]:
    """Two peers with a link between them; the first is dialing for a stream to the other, half a second away."""
    a, b = await net.peer("a"), await net.peer("b")
    b.endpoint.serve(Say, echo)
    b.endpoint.serve_stream(OpenPipe, hold)
    await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)
    net.swarm.network.set_link("a", "b", latency_s=0.5)
    return a, b, asyncio.create_task(a.endpoint.open(b.contact, OpenPipe(), timeout_s=20.0))


# ------------------------------------------------------------------------------------------------------------ deadlines


def test_a_slow_answer_is_a_timeout_and_the_handler_is_stopped() -> None:
    """The caller gets `PeerTimeout` when it said it would; the handler does not go on for longer than that."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        ended: list[float] = []

        async def slow(peer: PeerID, request: Say) -> Said:
            try:
                await sleep(100.0)
            finally:
                ended.append(now())
            return Said("too late")

        b.endpoint.serve(Say, slow)
        await together(a.endpoint.call(b.contact, Say("x"), timeout_s=1.0))  # makes the link
        began = now()
        with pytest.raises(PeerTimeout, match=r"no reply to Say within 2\.5 s") as error:
            await a.endpoint.call(b.contact, Say("x"), timeout_s=2.5)
        assert error.value.peer_id == b.peer_id
        assert now() - began == pytest.approx(2.5)
        await sleep(1.0)
        assert ended[-1] - began == pytest.approx(2.5, abs=0.02)
        assert a.endpoint.connected(b.peer_id)
        assert not b.seen(Warned)

    on_sim(scenario)


def test_the_time_to_dial_counts() -> None:
    """A host that does not answer: the call and the stream end when they should, with a timeout."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        net.swarm.vanish("b")
        for timeout_s in (1.0, 7.0):
            began = now()
            with pytest.raises(PeerTimeout):
                await a.endpoint.call(b.contact, Say("x"), timeout_s=timeout_s)
            assert now() - began == pytest.approx(min(timeout_s, QUICK.dial_timeout_s))
            began = now()
            with pytest.raises(PeerTimeout):
                await a.endpoint.open(b.contact, OpenPipe(), timeout_s=timeout_s)
            assert now() - began <= min(timeout_s, QUICK.dial_timeout_s) + 0.01
            await sleep(10.0)
        assert not a.endpoint.peers
        assert not a.endpoint._open.peers  # nothing is remembered of who could not be reached

    on_sim(scenario)


def test_a_call_may_ask_for_no_time_or_for_no_number_of_it() -> None:
    """Zero and very long: never a stuck handler or timer. Negative, no number, without end: the link is lost."""

    async def scenario(net: SimNet) -> None:
        b = await net.peer("b")
        inside = 0

        async def never(peer: PeerID, request: Say) -> Said:
            nonlocal inside
            inside += 1
            try:
                await asyncio.Event().wait()
            finally:
                inside -= 1
            raise AssertionError

        b.endpoint.serve(Say, never)
        hand = ByHand(net.transport("h"), b.contact)
        link = await hand.link()
        for number, timeout_s in enumerate([0.0, 601.0, wire.MAX_DURATION_S]):
            await link.write(call_frame(number, "Say", encode(Say("x")), timeout_s=timeout_s))
        await sleep(1.0)
        assert inside == 2
        link.abort()
        for timeout_s in (-1.0, math.nan, -math.inf, math.inf, 1e300):
            wrong = await hand.link()
            await wrong.write(call_frame(1, "Say", encode(Say("x")), timeout_s=timeout_s))
            await sleep(0.1)
            assert wrong.closed
            assert inside == 2
        assert len(b.seen(PeerDropped)) == 5
        await sleep(601.0)
        assert inside == 0
        assert not b.seen(Warned)
        await hand.close()

    on_sim(scenario)


def test_an_address_that_worked_is_not_forgotten_for_one_that_others_name() -> None:
    """An IPv4-only peer had dialed one that announces an IPv6 address, and could never dial it again."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve(Say, echo)
        assert await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0) == Said("x")
        elsewhere = Contact(b.peer_id, (Address("10.99.99.99", 4000, b.peer_id),))
        a.endpoint.learn(elsewhere)
        a.endpoint._dialer.learn(elsewhere, by_itself=True)
        a.endpoint._open.link(b.peer_id).abort()  # type: ignore[union-attr]
        assert await a.endpoint.call(b.peer_id, Say("y"), timeout_s=5.0) == Said("y")

    on_sim(scenario)


def test_closing_while_others_wait_for_a_dial() -> None:
    """A caller that waits for a connection is told that the endpoint was closed: it was not cancelled itself."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        net.swarm.vanish("b")
        works = [
            asyncio.create_task(a.endpoint.call(b.contact, Say("x"), timeout_s=60.0)),
            asyncio.create_task(a.endpoint.open(b.contact, OpenPipe(), timeout_s=60.0)),
        ]
        cancelled = asyncio.create_task(a.endpoint.call(b.contact, Say("x"), timeout_s=60.0))
        await sleep(1.0)
        cancelled.cancel()
        await a.endpoint.close()
        assert [type(each) for each in await together(*works)] == [ClosedError] * 2
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    on_sim(scenario)


def test_a_connection_that_says_nothing_is_dropped() -> None:
    """Authenticated, and then silent: ten seconds, then it goes; half a first frame is no more."""

    async def scenario(net: SimNet) -> None:
        b = await net.peer("b")
        hand = ByHand(net.transport("h"), b.contact)
        silent, half = await hand.dial(), await hand.dial()
        await half.write(pack(Kind.HELLO, Contact(hand.transport.peer_id))[:7])
        began = now()
        await together(ends(silent), ends(half))
        assert now() - began == pytest.approx(10.0, abs=0.1)
        assert not b.endpoint._open.peers
        assert not b.endpoint._open.connections
        await hand.close()

    on_sim(scenario)


def test_giving_up_a_stream_that_nobody_reads_does_not_wait_for_ever() -> None:
    """The other side neither reads nor goes: FAULT does not get through, and the handler's stream ends all the same."""

    async def scenario(net: SimNet) -> None:
        b = await net.peer("b")
        over: list[float] = []

        async def flood(stream: PipeDown, opening: OpenPipe) -> None:
            sending = asyncio.create_task(_flood(stream))
            await sleep(1.0)
            try:
                await stream.fail("refused", "enough")
            finally:
                over.append(now())
                await together(sending)

        b.endpoint.serve_stream(OpenPipe, flood)
        hand = ByHand(net.transport("h"), b.contact)
        await hand.open(OpenPipe())
        began = now()
        await sleep(30.0)
        assert over
        assert over[0] - began < 10.0
        assert not b.endpoint._open.connections
        await hand.close()

    on_sim(scenario)


async def _flood(stream: PipeDown) -> None:
    while True:
        await stream.send(Down(1), bytes(1 << 20))


# ----------------------------------------------------------------------------------------------------------- heartbeat


@pytest.mark.parametrize("fault", ["partition", "stall", "vanish"])
@pytest.mark.parametrize("side", ["opener", "acceptor"])
@pytest.mark.parametrize("offset_s", [0.0, 0.3, 0.95])
def test_silence_is_noticed_soon_while_there_are_streams(fault: str, side: str, offset_s: float) -> None:
    """On either side of a stream: after `silence_s`, and a heartbeat at most; then its streams and calls fail."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        for peer in (a, b):
            peer.endpoint.serve(Say, echo)
            peer.endpoint.serve_stream(OpenPipe, hold)
        near, far = (a, b) if side == "opener" else (b, a)
        await net.swarm.run_on("a" if near is a else "b", near.endpoint.call, far.contact, Say("x"), timeout_s=5.0)
        await sleep(20.0)  # the link is idle: nobody asks
        stream: PipeUp = await net.swarm.run_on("a", a.endpoint.open, b.contact, OpenPipe(), timeout_s=5.0)
        await sleep(7.0 + offset_s)
        if fault == "partition":
            net.swarm.partition([["a"], ["b"]])
        elif fault == "stall":
            net.swarm.stall("b" if near is a else "a")
        else:
            net.swarm.vanish("b" if near is a else "a")
        began = now()
        if near is a:
            with pytest.raises(PeerUnreachable):
                await stream.recv()
        lost = await near.event(PeerLost)
        assert lost.peer == far.peer_id
        assert "silent" in lost.reason
        assert QUICK.silence_s - QUICK.beat_s <= now() - began <= QUICK.silence_s + QUICK.beat_s
        await sleep(0.1)
        assert not near.endpoint._open.connections
        assert not near.endpoint._open.peers

    on_sim(scenario)


def test_who_sends_is_not_silent_though_its_answers_are_late() -> None:
    """On a full line the answer to a heartbeat waits behind the data: whoever's bytes come is there, until they end."""

    async def scenario(net: SimNet) -> None:
        a = await net.peer("a")

        async def take(stream: PipeDown, opening: OpenPipe) -> None:
            await stream.recv()
            await stream.readinto(bytearray(100))

        a.endpoint.serve_stream(OpenPipe, take)
        hand = ByHand(net.transport("h"), a.contact)
        link = await hand.link()
        stream = await hand.open(OpenPipe())
        frame = pack(Kind.DATA, Up(1), 100) + bytes(100)
        for place in range(3 * round(QUICK.silence_s / QUICK.beat_s)):
            await sleep(QUICK.beat_s)
            await stream.write(frame[place : place + 1])
        assert not a.seen(PeerLost)
        began = now()
        lost = await a.event(PeerLost)
        assert "silent" in lost.reason
        assert now() - began <= QUICK.silence_s + 2 * QUICK.beat_s
        assert await ends(link)
        await hand.close()

    on_sim(scenario)


def test_silence_is_noticed_late_without_streams() -> None:
    """A link without streams is watched at leisure: lost after three idle periods, and one at most."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve(Say, echo)
        await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)
        await sleep(33.0)
        net.swarm.partition([["a"], ["b"]])
        began = now()
        await a.event(PeerLost)
        assert 2 * QUICK.idle_beat_s <= now() - began <= 4 * QUICK.idle_beat_s
        await b.event(PeerLost)
        assert now() - began <= 4 * QUICK.idle_beat_s
        net.swarm.heal()
        assert await a.endpoint.call(b.contact, Say("again"), timeout_s=5.0) == Said("again")

    on_sim(scenario)


def test_a_short_silence_costs_nothing() -> None:
    """A stall or partition shorter than the limit: nobody is lost, and the stream goes on."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve_stream(OpenPipe, hold)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        for _ in range(5):
            net.swarm.stall("b", 3.0)
            await sleep(5.0)
            net.swarm.partition([["a"], ["b"]])
            await sleep(3.0)
            net.swarm.heal()
            await sleep(2.0)
        await stream.finish()
        assert not a.seen(PeerLost)
        assert not b.seen(PeerLost)

    on_sim(scenario)


def test_who_was_stopped_itself_accuses_nobody() -> None:
    """A process that was frozen for a minute (and finds its timers long over) first asks before it gives others up."""

    async def scenario(net: SimNet) -> None:
        limits = Limits(silence_s=100.0)
        a, b = await net.peer("a"), await net.peer("b", limits=limits)
        b.endpoint.serve_stream(OpenPipe, hold)
        stream: PipeUp = await net.swarm.run_on("a", a.endpoint.open, b.contact, OpenPipe(), timeout_s=5.0)
        await sleep(3.0)
        net.swarm.stall("a", 60.0)
        await sleep(70.0)
        assert not a.seen(PeerLost)
        await net.swarm.run_on("a", stream.finish)

    on_sim(scenario)


async def look_at(a: Peer, b: Peer, until_s: float) -> float | None:
    """Wait for a peer until this time; returns since when it is heard again, if it was silent."""
    was_silent, heard_at = False, None
    while now() < until_s:
        silent = a.endpoint.is_silent(b.peer_id)
        heard_at = now() if was_silent and not silent else heard_at
        was_silent = silent
        await sleep(LOOK_S)
    return heard_at


@pytest.mark.parametrize("cut_s", [7.0, 10.0, 20.0])
def test_after_a_cut_a_silent_peer_is_heard_by_a_new_link(cut_s: float) -> None:
    """TCP tries the old one seconds later. What waited for an answer there fails at once, and nobody is lost."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve(Say, echo)
        await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)
        net.swarm.partition([["a"]])
        began = now()
        call = asyncio.create_task(a.endpoint.call(b.peer_id, Say("y"), timeout_s=60.0))
        await look_at(a, b, began + cut_s)
        net.swarm.heal()
        heard_at = await look_at(a, b, began + cut_s + 3.0)
        assert heard_at is not None
        assert heard_at <= began + cut_s + 1.0
        with pytest.raises(PeerUnreachable):
            await call
        await a.endpoint.call(b.peer_id, Say("z"), timeout_s=1.0)
        assert now() < began + cut_s + 3.5
        for each in (a, b):
            assert not each.seen(PeerLost)
        assert len(a.transport.dials) <= 1 + cut_s / QUICK.dial_timeout_s + 1

    on_sim(scenario, backs_off=True)


def test_whose_process_stands_still_is_not_dialed_anew() -> None:
    """Its machine takes what we ask: the line is there, and another link would be as silent."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve(Say, echo)
        await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)
        net.swarm.stall("b")
        await look_at(a, b, now() + 10.0)
        assert a.seen(PeerSilent)
        assert len(a.transport.dials) == 1

    on_sim(scenario)


def test_a_peer_that_is_idle_and_gets_busy_is_not_lost() -> None:
    """Nobody was asked while the link was idle: what counts is the time since the first question."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve(Say, echo)
        b.endpoint.serve_stream(OpenPipe, hold)
        await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)
        for gap_s in (5.5, 8.0, 9.9, 10.1, 19.0, 25.0):
            await sleep(gap_s)
            stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
            await sleep(2.5)
            await stream.finish()
        assert not a.seen(PeerLost)
        assert not b.seen(PeerLost)

    on_sim(scenario)


def test_a_crash_is_noticed_at_once() -> None:
    """The other process died: its machine says so, no heartbeat is needed."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve_stream(OpenPipe, hold)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        await sleep(1.0)
        began = now()
        net.swarm.crash("b")
        with pytest.raises(PeerUnreachable):
            await stream.recv()
        await a.event(PeerLost)
        assert now() - began < 0.1
        with pytest.raises(PeerUnreachable):
            await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)

    on_sim(scenario)


def test_the_other_clock_is_estimated() -> None:
    """From a heartbeat and its answer; one that does not know the time changes nothing, a wrong one costs the link."""

    async def scenario(net: SimNet) -> None:
        a = await net.peer("a")
        hand = ByHand(net.transport("h"), a.contact)
        link = await hand.link()
        peer = hand.transport.peer_id
        assert a.endpoint.clock.offset_s(peer) is None
        beat = await receive(link, Beat)
        await link.write(pack(Kind.CALL, BeatReply(beat.time, beat.time + 100.0)))
        await sleep(0.1)
        assert a.endpoint.clock.offset_s(peer) == pytest.approx(100.0, abs=0.1)
        await link.write(pack(Kind.CALL, BeatReply(beat.time, None)))
        await sleep(0.1)
        assert a.endpoint.clock.offset_s(peer) == pytest.approx(100.0, abs=0.1)
        for asked, time in ((math.nan, 1.0), (1.0, math.inf), (1.0, math.nan)):
            wrong = await hand.link()
            await wrong.write(pack(Kind.CALL, BeatReply(asked, time)))
            await sleep(0.1)
            assert wrong.closed
        assert a.endpoint.clock.offset_s(peer) == pytest.approx(100.0, abs=0.1)
        await hand.close()

    on_sim(scenario)


def test_calls_to_a_peer_that_does_not_read_fail_before_memory_does() -> None:
    """What waits for a stalled peer is bounded; beyond that, calls to it fail at once."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a", limits=Limits(outbox_bytes=1 << 20)), await net.peer("b")
        b.endpoint.serve(Say, echo)
        await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)
        net.swarm.stall("b")
        text = "x" * 100_000
        calls = [asyncio.create_task(a.endpoint.call(b.contact, Say(text), timeout_s=2.0)) for _ in range(300)]
        outcomes = [type(each) for each in await together(*calls)]
        waited = outcomes.count(PeerTimeout)
        assert 10 <= waited < 200
        assert outcomes.count(PeerUnreachable) == 300 - waited
        net.swarm.unstall("b")

    on_sim(scenario)


def test_strangers_that_do_not_read_share_the_memory_for_what_waits() -> None:
    """Each of many keys had 8 MiB, and as much again that was being sent; honest peers are answered beside them."""

    async def scenario(net: SimNet) -> None:
        b = await net.peer("b", limits=Limits(outboxes_bytes=4 << 20))
        b.endpoint.serve(Say, lambda peer, request: Said("x" * 50_000))
        hands = [ByHand(net.transport(f"h{number}"), b.contact) for number in range(12)]
        asked = b"".join(call_frame(number, "Say", encode(Say("x"))) for number in range(100))
        for hand in hands:
            await (await hand.link()).write(asked)
        await sleep(10.0)
        waiting = b.endpoint._open.outbox_bytes
        assert 3 << 20 < waiting < (4 << 20) + 12 * (256 << 10)
        a = await net.peer("a")
        reply = await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)
        assert len(reply.text) == 50_000
        for hand in hands:
            await hand.close()

    on_sim(scenario, window_bytes=64 << 10)


# ----------------------------------------------------------------------------------------------------------- idle links


def test_idle_links_close_without_a_loss() -> None:
    """After `idle_close_s` without calls the link says Bye: no `PeerLost`; the next call makes a new one."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        lost: list[PeerID] = []
        for peer in (a, b):
            peer.endpoint.serve(Say, echo)
            peer.endpoint.serve_stream(OpenPipe, hold)
            peer.endpoint.on_lost(lambda peer, reason: lost.append(peer))
        await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        await stream.finish()
        await sleep(QUICK.idle_close_s - 15.0)
        assert a.endpoint.connected(b.peer_id)
        await sleep(30.0)
        assert not a.endpoint.connected(b.peer_id)
        assert not b.endpoint.connected(a.peer_id)
        for peer in (a, b):
            assert not peer.endpoint._open.connections  # the pool went with the link
            assert not peer.endpoint._open.peers
            assert not peer.seen(PeerLost)
        assert await a.endpoint.call(b.contact, Say("again"), timeout_s=5.0) == Said("again")
        assert len(a.transport.dials) == 3
        assert len(a.seen(PeerConnected)) == 2
        assert not lost

    on_sim(scenario)


def test_links_in_use_stay() -> None:
    """Calls now and then, one that takes long, or streams alone: each keeps the link."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")

        async def slow(peer: PeerID, request: Say) -> Said:
            await sleep(300.0)
            return Said("at last")

        b.endpoint.serve(Say, slow)
        b.endpoint.serve(Say, echo, scope="quick")
        b.endpoint.serve_stream(OpenPipe, hold)
        assert await a.endpoint.call(b.contact, Say("x"), timeout_s=500.0) == Said("at last")
        for _ in range(5):
            await sleep(100.0)
            await a.endpoint.call(b.contact, Say("x", where="quick"), timeout_s=5.0)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        await sleep(300.0)
        await stream.finish()
        for _ in range(5):
            await sleep(100.0)
            await (await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)).finish()
        assert a.transport.dials == [b.peer_id, b.peer_id]  # the link and one stream
        assert not a.seen(PeerLost)

    on_sim(scenario)


def test_a_call_that_crosses_an_idle_bye_is_made_again() -> None:
    """The other side says Bye while our call is on its way: it was not served, and is sent on a new link."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a", limits=Limits(idle_close_s=1000.0)), await net.peer("b")
        served: list[str] = []

        async def note(peer: PeerID, request: Say) -> Said:
            served.append(request.text)
            return Said(request.text)

        b.endpoint.serve(Say, note)
        await a.endpoint.call(b.contact, Say("first"), timeout_s=20.0)
        net.swarm.network.set_link("a", "b", latency_s=0.5)
        [link] = b.endpoint._open.peers[a.peer_id].links
        call = asyncio.create_task(a.endpoint.call(b.contact, Say("second"), timeout_s=20.0))
        await sleep(0.25)
        await link.close(leaving=False)
        assert await call == Said("second")
        assert served == ["first", "second"]
        assert len(a.transport.dials) == 2
        assert not a.seen(PeerLost)

    on_sim(scenario)


def test_a_stream_that_crosses_an_idle_bye_lives_on() -> None:
    """The other side closes the idle link while we open a stream beside it: a new link takes over its heartbeat."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a", limits=Limits(idle_close_s=1000.0)), await net.peer("b")
        b.endpoint.serve(Say, echo)
        b.endpoint.serve_stream(OpenPipe, hold)
        await a.endpoint.call(b.contact, Say("x"), timeout_s=20.0)
        [link] = b.endpoint._open.peers[a.peer_id].links
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=20.0)
        await sleep(1.0)
        await link.close(leaving=False)  # as if it had not seen the stream yet
        await sleep(1.0)
        assert a.endpoint.connected(b.peer_id)
        assert b.endpoint.connected(a.peer_id)
        await sleep(10.0)
        assert not stream.closed
        net.swarm.partition([["a"], ["b"]])
        began = now()
        with pytest.raises(PeerUnreachable):
            await stream.recv()
        assert now() - began <= QUICK.silence_s + QUICK.beat_s
        net.swarm.heal()

    on_sim(scenario)


def test_no_stream_is_without_a_link() -> None:
    """If the link is lost while a stream's connection is being made, there is a new one before the stream begins."""

    async def scenario(net: SimNet) -> None:
        a, b, opening = await opening_slowly(net)
        await sleep(1.0)
        [link] = a.endpoint._open.peers[b.peer_id].links
        link.connection.abort()
        stream = await opening
        assert a.endpoint.connected(b.peer_id)
        await stream.finish()

    on_sim(scenario)


def test_what_was_dialed_for_a_stream_serves_the_next_one() -> None:
    """A caller that is cancelled while it dials for a stream leaves the connection to the next stream."""

    async def scenario(net: SimNet) -> None:
        a, b, opening = await opening_slowly(net)
        await sleep(0.1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        with pytest.raises(PeerTimeout):
            await a.endpoint.open(b.contact, OpenPipe(), timeout_s=0.1)
        await sleep(60.0)
        assert len(a.transport.dials) == 3  # the link, and both that were not waited for
        began = now()
        streams = [await a.endpoint.open(b.contact, OpenPipe(), timeout_s=20.0) for _ in range(2)]
        assert now() == began
        assert len(a.transport.dials) == 3
        await together(*(stream.finish() for stream in streams))

    on_sim(scenario)


@pytest.mark.parametrize("waited_for", [True, False])
def test_a_stream_that_is_being_dialed_ends_with_its_endpoint(waited_for: bool) -> None:
    """Whether or not somebody still waits for its connection, `close` leaves nothing behind."""

    async def scenario(net: SimNet) -> None:
        a, _, opening = await opening_slowly(net)
        await sleep(0.1)
        if not waited_for:
            opening.cancel()
            await together(opening)
        await a.endpoint.close()
        with pytest.raises(ClosedError if waited_for else asyncio.CancelledError):
            await opening
        assert not a.endpoint._open.connections
        assert not a.seen(Warned)

    on_sim(scenario)


def test_a_dial_that_nobody_waits_for_and_that_fails_is_not_heard_of() -> None:
    """The peer is gone before its connection is made: nothing is kept, nothing is told but its loss."""

    async def scenario(net: SimNet) -> None:
        a, _, opening = await opening_slowly(net)
        await sleep(0.1)
        opening.cancel()
        await together(opening)
        net.swarm.crash("b")
        await sleep(60.0)
        assert not a.endpoint._open.peers
        assert not a.seen(Warned)

    on_sim(scenario)


def test_a_silent_peer_leaves_no_connection_behind() -> None:
    """It is lost without a word: what it has open for its next streams is closed, too, and so is what was never used.

    A peer that serves for weeks would else run out of connections, as others lose their power or their line.
    """

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve_stream(OpenPipe, hold)
        await (await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)).finish()
        unused = await a.transport.dial(b.peer_id, b.transport.addresses, timeout_s=5.0)
        await sleep(1.0)
        assert len(b.endpoint._open.connections) == 3
        net.swarm.partition([["a"], ["b"]])
        await sleep(60.0)
        assert len(b.seen(PeerLost)) == 1
        assert not b.endpoint._open.connections
        assert not b.endpoint._open.peers
        net.swarm.heal()
        assert await ends(unused)

    on_sim(scenario)


def test_cross_dialing_gives_two_links_and_one_peer() -> None:
    """Both dial at the same moment: both links work, and the peer is lost when the last one is."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        for peer in (a, b):
            peer.endpoint.serve(Say, echo)
        replies = await together(
            a.endpoint.call(b.contact, Say("a"), timeout_s=5.0), b.endpoint.call(a.contact, Say("b"), timeout_s=5.0)
        )
        assert replies == [Said("a"), Said("b")]
        links = list(a.endpoint._open.peers[b.peer_id].links)
        assert len(links) == 2
        assert a.endpoint.peers == (b.peer_id,)
        assert len(a.seen(PeerConnected)) == len(b.seen(PeerConnected)) == 1
        links[0].connection.abort()
        await sleep(1.0)
        assert not a.seen(PeerLost)
        assert await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0) == Said("x")
        assert await b.endpoint.call(a.contact, Say("x"), timeout_s=5.0) == Said("x")
        links[1].connection.abort()
        await sleep(1.0)
        assert len(a.seen(PeerLost)) == len(b.seen(PeerLost)) == 1
        assert a.transport.dials == [b.peer_id]

    on_sim(scenario)


def test_two_links_that_are_idle_close_without_a_loss() -> None:
    """Also after cross dialing, an idle Bye on each of the links is no loss."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        for peer in (a, b):
            peer.endpoint.serve(Say, echo)
        await together(
            a.endpoint.call(b.contact, Say("a"), timeout_s=5.0), b.endpoint.call(a.contact, Say("b"), timeout_s=5.0)
        )
        await sleep(200.0)
        assert not a.endpoint.peers
        assert not a.seen(PeerLost)
        assert not b.seen(PeerLost)

    on_sim(scenario)


# --------------------------------------------------------------------------------------------------------------- bytes


def test_received_bytes_grow_while_a_payload_trickles_in() -> None:
    """A slow payload of 1 MiB is seen to move: whoever watches it can tell slow from dead."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        seen: list[int] = []
        payload = bytes(range(256)) * 4096

        async def take(stream: PipeDown, opening: OpenPipe) -> None:
            received = await stream.recv()
            assert received == (Up(1), len(payload))
            buffer = bytearray(len(payload))
            reading = asyncio.create_task(stream.readinto(buffer))
            while not reading.done():
                seen.append(stream.bytes_received)
                await asyncio.wait((reading,), timeout=1.0)
            seen.append(stream.bytes_received)
            assert buffer == payload

        b.endpoint.serve_stream(OpenPipe, take)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        await stream.send(Up(1), payload)
        await stream.finish()
        assert len(seen) >= 8
        assert all(later > earlier for earlier, later in pairwise(seen[1:]))
        assert seen[-1] - seen[0] == len(payload)
        assert not b.seen(Warned)

    on_sim(scenario, bandwidth_bytes_s=100_000.0)


def test_a_stream_can_be_watched_and_handed_over() -> None:
    """`ready` takes nothing and may be cancelled: what came first is still there for whoever reads."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")

        async def late(stream: PipeDown, opening: OpenPipe) -> None:
            await sleep(5.0)
            await stream.send(Down(1), b"abc")
            await stream.send(Down(2))

        b.endpoint.serve_stream(OpenPipe, late)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await stream.ready()
        await stream.ready()
        await stream.ready()
        assert await stream.recv() == (Down(1), 3)
        await stream.ready()  # a payload is there to be read
        await stream.readinto(bytearray(3))
        assert await stream.recv() == (Down(2), 0)
        await stream.finish()
        await stream.ready()

    on_sim(scenario)


def test_a_slow_reader_holds_up_its_own_stream_only() -> None:
    """Nobody reads 32 MiB on one stream: its sender waits, while calls and other streams to the same peer go on."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        gate = asyncio.Event()
        b.endpoint.serve(Say, echo)

        async def lazy(stream: PipeDown, opening: OpenPipe) -> None:
            if opening.name == "lazy":
                await gate.wait()
            while (received := await stream.recv()) is not None:
                await stream.readinto(bytearray(received[1]))

        async def pour(stream: PipeUp) -> None:
            for number in range(32):
                await stream.send(Up(number), bytes(1 << 20))
            await stream.finish()

        b.endpoint.serve_stream(OpenPipe, lazy)
        stuck = asyncio.create_task(pour(await a.endpoint.open(b.contact, OpenPipe("lazy"), timeout_s=5.0)))
        await pour(await a.endpoint.open(b.contact, OpenPipe("quick"), timeout_s=5.0))
        began = now()
        assert await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0) == Said("x")
        assert now() - began < 0.1
        await sleep(60.0)
        assert not stuck.done()
        gate.set()
        await stuck
        assert not a.seen(PeerLost)

    on_sim(scenario)


# ------------------------------------------------------------------------------------------------------- a hostile peer


def test_byes_and_replies_out_of_place_do_no_harm() -> None:
    """Answers to nothing, answers twice, answers to calls that are over: ignored."""

    async def scenario(net: SimNet) -> None:
        a = await net.peer("a")
        a.endpoint.serve(Say, echo)
        hand = ByHand(net.transport("h"), a.contact)
        link = await hand.link()
        await sleep(0.1)
        for number in (0, 99, 2**62):
            await link.write(pack(Kind.CALL, Reply(number, b"\xc0")))  # type: ignore[arg-type]
            await link.write(pack(Kind.CALL, BeatReply(0.0, 0.0)))
        await sleep(0.1)
        call = asyncio.create_task(a.endpoint.call(hand.transport.peer_id, Say("x"), timeout_s=1.0))
        with pytest.raises(PeerTimeout):
            await call
        await link.write(call_frame(1, "Say", encode(Say("y"))))
        await receive(link, Call)  # our call, that it never answered
        assert (await receive(link, Reply)).id == 1
        assert not a.seen(PeerDropped)
        await hand.close()

    on_sim(scenario)


def test_nothing_is_remembered_of_peers_that_are_gone() -> None:
    """A thousand strangers who ask for what is not served leave no trace."""

    async def scenario(net: SimNet) -> None:
        a = await net.peer("a")
        for i in range(200):
            hand = ByHand(net.transport(f"h{i}"), a.contact)
            stream = await hand.open(OpenPipe())
            assert await ends(stream)
            await hand.close()
        await sleep(1.0)
        assert not a.endpoint._open.peers
        assert not a.endpoint._open.connections
        assert not a.endpoint._tasks

    on_sim(scenario)


def test_contacts_are_bounded() -> None:
    """However many peers are told of, the oldest are forgotten."""

    async def scenario(net: SimNet) -> None:
        a = await net.peer("a")
        dialer = a.endpoint._dialer
        for i in range(9000):
            peer = PeerID(i.to_bytes(32, "big"))
            for by_itself in (False, True):
                dialer.learn(Contact(peer, (Address("127.0.0.1", 4000, peer),)), by_itself=by_itself)
        assert len(dialer._told) == len(dialer._heard) == 8192
        assert not a.endpoint.reachable(PeerID(bytes(32)))
        with pytest.raises(PeerUnreachable):
            await a.endpoint.call(PeerID(bytes(32)), Say("x"), timeout_s=1.0)

    on_sim(scenario)


class Accepted(NamedTuple):
    """A connection of which nothing is read."""

    peer_id: PeerID
    local_host: str = "a"
    remote_host: str = "b"


def test_memory_of_who_has_dialed_us_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are free."""

    async def nothing(*_: object) -> None: ...

    async def scenario(net: SimNet) -> None:
        a = await net.peer("a")
        monkeypatch.setattr(a.endpoint.arrivals, "_serve", nothing)
        for i in range(2000):
            accepted: Any = Accepted(PeerID(i.to_bytes(32, "big")))
            a.endpoint.arrivals.accept(accepted)
        a.endpoint._open.connections.clear()
        assert len(a.endpoint.arrivals.since(0.0)) == 1024

    on_sim(scenario)


def test_a_refusal_by_code_is_not_a_loss() -> None:
    """Refusals leave link and peer as they are, however many there are."""

    async def scenario(net: SimNet) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        for _ in range(100):
            with pytest.raises(PeerRefused):
                await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)
        assert len(a.transport.dials) == 1
        assert not a.seen(PeerLost)

    on_sim(scenario)
