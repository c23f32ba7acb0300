"""Calls and streams between endpoints: over simulated hosts and over real sockets, unless time is the matter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from shoal.base.peer import Address, PeerID
from shoal.errors import (
    ClosedError,
    ConfigError,
    LocalError,
    PeerProtocolError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
)
from shoal.events import PeerConnected, PeerDropped, PeerLost, Warned
from shoal.protocol.wire import Beat, Bye, Contact, Failure, Hello, Reply, encode
from shoal.rpc import Limits
from shoal.rpc.framing import Kind, pack
from tests.sim.rpc_kit import (
    QUICK,
    ByHand,
    Down,
    Net,
    OpenBulk,
    OpenOther,
    OpenPipe,
    PipeDown,
    PipeUp,
    Said,
    Say,
    Scenario,
    Shout,
    Up,
    call_frame,
    echo,
    ends,
    identity_of,
    note_frame,
    on_sim,
    on_tcp,
    open_frame,
    receive,
    together,
)

everywhere = pytest.mark.parametrize("run", [on_sim, on_tcp])
Run = Callable[[Scenario], None]


# ---------------------------------------------------------------------------------------------------------------- calls


@everywhere
def test_calls_are_answered_over_one_link(run: Run) -> None:
    """Many calls at once, either way: each gets its own reply, and one connection carries them all."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        a.endpoint.serve(Say, echo)
        b.endpoint.serve(Say, echo)
        first = await a.endpoint.call(b.contact, Say("hello"), timeout_s=5.0)
        assert first == Said("hello")
        calls = (a.endpoint.call(b.peer_id, Say(f"{i}"), timeout_s=5.0) for i in range(50))
        back = (b.endpoint.call(a.peer_id, Say(f"-{i}"), timeout_s=5.0) for i in range(50))
        replies = await together(*calls, *back)
        assert [reply.text for reply in replies] == [f"{i}" for i in range(50)] + [f"-{i}" for i in range(50)]
        assert (a.transport.dials, b.transport.dials) == ([b.peer_id], [])
        assert a.endpoint.peers == (b.peer_id,)
        assert a.endpoint.connected(b.peer_id)
        assert [event.peer for event in a.seen(PeerConnected)] == [b.peer_id]
        assert [event.peer for event in b.seen(PeerConnected)] == [a.peer_id]

    run(scenario)


@everywhere
def test_a_handler_may_answer_at_once_or_in_a_task(run: Run) -> None:
    """A plain function's reply, or what it raises, is told as a coroutine's is; one handler may do either."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")

        def answer(peer: PeerID, request: Say) -> Said | Coroutine[Any, Any, Said]:
            if request.text == "refuse":
                raise PeerRefused("not today", peer)
            if request.text == "later":
                return echo(peer, request)
            return Said(request.text)

        b.endpoint.serve(Say, answer)
        texts = [f"{i}" for i in range(100)] + ["later"]
        replies = await together(*(a.endpoint.call(b.contact, Say(text), timeout_s=5.0) for text in texts))
        assert [reply.text for reply in replies] == texts
        with pytest.raises(PeerRefused, match="not today"):
            await a.endpoint.call(b.contact, Say("refuse"), timeout_s=5.0)

    run(scenario)


@everywhere
def test_first_calls_at_once_share_one_dial(run: Run) -> None:
    """A caller that needs a link while it is being dialed waits for that one."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve(Say, echo)
        replies = await together(*(a.endpoint.call(b.contact, Say(f"{i}"), timeout_s=5.0) for i in range(20)))
        assert [reply.text for reply in replies] == [f"{i}" for i in range(20)]
        assert len(a.transport.dials) == 1

    run(scenario)


@everywhere
def test_refusals_carry_their_code(run: Run) -> None:
    """Unknown, bad, refused, busy, internal: the caller reads which, and the link lives on."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")

        async def moody(peer: PeerID, request: Say) -> Said:
            match request.text:
                case "refuse":
                    raise PeerRefused("not today", peer)
                case "busy":
                    raise PeerRefused("too many", peer, code="busy")
                case "sly":
                    raise PeerRefused("no such thing", peer, code="unknown")
                case "bad":
                    raise PeerProtocolError("nonsense", peer)
                case "elsewhere":
                    raise PeerUnreachable("somebody else is gone")
                case "closed":
                    raise ClosedError("going")
                case "late":
                    raise TimeoutError
            raise ValueError(request.text)

        b.endpoint.serve(Say, moody)
        expected = {
            "refuse": ("refused", "not today"),
            "busy": ("busy", "too many"),
            "sly": ("refused", "no such thing"),
            "bad": ("bad", "nonsense"),
            "elsewhere": ("refused", "somebody else is gone"),
            "closed": ("refused", "shutting down"),
            "late": ("internal", "TimeoutError"),
            "other": ("internal", "ValueError"),
        }
        for text, (code, message) in expected.items():
            with pytest.raises(PeerRefused) as refusal:
                await a.endpoint.call(b.contact, Say(text), timeout_s=5.0)
            assert (refusal.value.code, refusal.value.message) == (code, message)
            assert refusal.value.peer_id == b.peer_id
        with pytest.raises(PeerRefused) as refusal:
            await a.endpoint.call(b.contact, Shout(), timeout_s=5.0)
        assert refusal.value.code == "unknown"
        with pytest.raises(PeerRefused) as refusal:
            await a.endpoint.call(b.contact, Say("x", where="nowhere"), timeout_s=5.0)
        assert refusal.value.code == "unknown"
        assert len(a.transport.dials) == 1
        assert {event.where for event in b.seen(Warned)} == {"call Say"}
        assert len(b.seen(Warned)) == 2

    run(scenario)


@everywhere
def test_an_undecodable_request_is_answered_bad(run: Run) -> None:
    """The body of a call is not such a request: the caller is told, and may go on."""

    async def scenario(net: Net) -> None:
        b = await net.peer("b")
        b.endpoint.serve(Say, echo)
        hand = ByHand(net.transport("h"), b.contact)
        link = await hand.link()
        for number, body in enumerate([b"\xc0", encode(Shout()), b"\x92\xa3Say\x01", b"\x92\xa3Say\xa2\xff\xfe"]):
            await link.write(call_frame(number, "Say", body))
            failure = await receive(link, Failure)
            assert (failure.id, failure.code) == (number, "bad")
        await link.write(call_frame(7, "Say", encode(Say("still there"))))
        assert (await receive(link, Reply)).id == 7
        assert not b.seen(Warned)
        await hand.close()

    run(scenario)


@everywhere
def test_an_undecodable_reply_costs_the_peer_its_link(run: Run) -> None:
    """A reply of another type: the caller gets a protocol error, the peer is dropped by name."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")

        async def liar(peer: PeerID, request: Say) -> Said:
            return Up(5)  # type: ignore[return-value]

        b.endpoint.serve(Say, liar)
        with pytest.raises(PeerProtocolError, match="undecodable reply"):
            await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)
        assert [(event.peer, event.where) for event in a.seen(PeerDropped)] == [(b.peer_id, "Say")]
        assert (await a.event(PeerLost)).peer == b.peer_id
        assert not a.endpoint.connected(b.peer_id)

    run(scenario)


@everywhere
def test_only_so_many_calls_of_one_peer_are_served(run: Run) -> None:
    """Beyond `calls_per_peer` a call is answered busy; another peer's calls are not."""

    async def scenario(net: Net) -> None:
        limits = Limits(calls_per_peer=3)
        a, b, c = await net.peer("a"), await net.peer("b", limits=limits), await net.peer("c")
        gate, three = asyncio.Event(), asyncio.Event()
        inside = 0

        async def wait(peer: PeerID, request: Say) -> Said:
            nonlocal inside
            inside += 1
            if inside == 3:
                three.set()
            if peer == a.peer_id:
                await gate.wait()
            return Said(request.text)

        b.endpoint.serve(Say, wait)
        calls = [asyncio.create_task(a.endpoint.call(b.contact, Say("a"), timeout_s=30.0)) for _ in range(3)]
        await three.wait()
        with pytest.raises(PeerRefused) as refusal:
            await a.endpoint.call(b.contact, Say("one too many"), timeout_s=5.0)
        assert refusal.value.code == "busy"
        assert (await c.endpoint.call(b.contact, Say("c"), timeout_s=5.0)).text == "c"
        gate.set()
        assert [reply.text for reply in await together(*calls)] == ["a"] * 3
        assert (await a.endpoint.call(b.contact, Say("again"), timeout_s=5.0)).text == "again"

    run(scenario)


@everywhere
def test_handlers_have_scopes_and_can_be_taken_back(run: Run) -> None:
    """Several handlers of one type, told apart by the message's scope; each can be ended by itself."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")

        def says(word: str) -> Callable[..., object]:
            async def handler(peer: PeerID, request: Say) -> Said:
                return Said(f"{word} {request.text}")

            return handler

        def sends(number: int) -> Callable[..., object]:
            async def handler(stream: PipeDown, opening: OpenPipe) -> None:
                await stream.send(Down(number))

            return handler

        end_one = b.endpoint.serve(Say, says("one"), scope="1")  # type: ignore[arg-type]
        b.endpoint.serve(Say, says("two"), scope="2")  # type: ignore[arg-type]
        b.endpoint.serve_stream(OpenPipe, sends(1), scope="1")  # type: ignore[arg-type]
        b.endpoint.serve_stream(OpenPipe, sends(2), scope="2")  # type: ignore[arg-type]
        replies = [await a.endpoint.call(b.contact, Say("x", where=w), timeout_s=5.0) for w in ("1", "2")]
        assert [reply.text for reply in replies] == ["one x", "two x"]
        for where in ("1", "2"):
            stream = await a.endpoint.open(b.contact, OpenPipe(where=where), timeout_s=5.0)
            assert await stream.recv() == (Down(int(where)), 0)
            await stream.finish()
        with pytest.raises(ConfigError, match="'1' is in use on this DHT already"):
            b.endpoint.serve(Say, says("three"), scope="1")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="in use"):
            b.endpoint.serve_stream(OpenPipe, sends(3), scope="1")  # type: ignore[arg-type]
        end_one()
        with pytest.raises(PeerRefused, match="not served"):
            await a.endpoint.call(b.contact, Say("x", where="1"), timeout_s=5.0)
        assert (await a.endpoint.call(b.contact, Say("x", where="2"), timeout_s=5.0)).text == "two x"
        end_two = b.endpoint.serve(Say, echo, scope="1")
        end_one()  # a second time: it must not end its successor
        assert (await a.endpoint.call(b.contact, Say("x", where="1"), timeout_s=5.0)).text == "x"
        end_two()

    run(scenario)


@everywhere
def test_notes_arrive_in_order_and_get_no_answer(run: Run) -> None:
    """They reach whom there is a link with, in one write to each; nobody is dialed for a note."""

    async def scenario(net: Net) -> None:
        a, b, c = await net.peer("a"), await net.peer("b"), await net.peer("c")
        heard, last = list[tuple[PeerID, str]](), asyncio.Event()

        def take(peer: PeerID, note: Say) -> None:
            heard.append((peer, note.text))
            if note.text == "last":
                last.set()

        end = b.endpoint.take_notes(Say, take, scope="1")
        b.endpoint.serve(Say, echo)
        a.endpoint.learn(b.contact)
        assert a.endpoint.tell([b.peer_id, c.peer_id], Say("too early", where="1")) == []
        await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)
        for text in ("one", "two"):
            assert a.endpoint.tell([b.peer_id, c.peer_id], Say(text, where="1")) == [b.peer_id]
        assert a.endpoint.tell([b.peer_id], Say("to nobody", where="2")) == [b.peer_id]
        assert a.endpoint.tell([b.peer_id], Shout()) == [b.peer_id]
        a.endpoint.tell([b.peer_id], Say("last", where="1"))
        await last.wait()
        assert heard == [(a.peer_id, text) for text in ("one", "two", "last")]
        end()
        a.endpoint.tell([b.peer_id], Say("late", where="1"))
        assert (await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)).text == "x"
        assert len(heard) == 3
        assert not b.seen(PeerDropped)

    run(scenario)


@everywhere
def test_a_bad_note_costs_the_peer_its_link(run: Run) -> None:
    """It cannot be told what was wrong, as with a call. A fault of the handler itself costs nobody anything."""

    async def scenario(net: Net) -> None:
        b = await net.peer("b")

        def take(peer: PeerID, note: Say) -> None:
            if note.text == "fault":
                raise RuntimeError("a fault of ours")
            raise PeerRefused("nobody says that", peer)

        b.endpoint.take_notes(Say, take)
        b.endpoint.serve(Say, echo)
        hand = ByHand(net.transport("h"), b.contact)
        bad = [b"\xc0", encode(Shout()), encode(Up(1)), encode(Say("refused"))]
        for body in bad:
            link = await hand.link()
            await link.write(note_frame("Say", body))
            assert await ends(link)
        assert [(event.peer, event.where) for event in b.seen(PeerDropped)] == [(hand.transport.peer_id, "rpc")] * 4
        assert not b.seen(Warned)
        link = await hand.link()
        await link.write(note_frame("Say", encode(Say("fault"))) + call_frame(1, "Say", encode(Say("x"))))
        assert (await receive(link, Reply)).id == 1
        assert [event.where for event in b.seen(Warned)] == ["note Say"]
        await hand.close()

    run(scenario)


def test_a_host_that_sends_too_many_notes_is_not_read_for_a_while() -> None:
    """Notes fall under the same allowance as calls."""

    async def scenario(net: Net) -> None:
        b = await net.peer("b", limits=msgspec.structs.replace(QUICK, calls_per_host_s=10.0))
        taken, loop = list[float](), asyncio.get_running_loop()
        b.endpoint.take_notes(Say, lambda peer, note: taken.append(loop.time()))
        b.endpoint.serve(Say, echo)
        hand = ByHand(net.transport("h"), b.contact)
        link = await hand.link()
        await link.write(note_frame("Say", encode(Say("x"))) * 200 + call_frame(1, "Say", encode(Say("x"))))
        await receive(link, Reply)
        assert len(taken) == 200
        assert 10.0 < taken[-1] - taken[0] < 20.0
        await hand.close()

    on_sim(scenario)


def test_streams_that_are_opened_again_and_again_cost_their_host_its_allowance() -> None:
    """One key could open a stream on each connection, and then the next one, as fast as it liked: nothing counted."""

    async def scenario(net: Net) -> None:
        b = await net.peer("b", limits=msgspec.structs.replace(QUICK, calls_per_host_s=10.0))
        a, honest, loop = await net.peer("a"), await net.peer("honest"), asyncio.get_running_loop()
        b.endpoint.serve_stream(OpenPipe, _mirror)
        began = loop.time()
        for _ in range(200):
            await _talk(await a.endpoint.open(b.contact, OpenPipe("x" * 1000), timeout_s=30.0), [])
        assert 15.0 < loop.time() - began < 60.0
        began = loop.time()
        await _talk(await honest.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0), [])
        assert loop.time() - began < 1.0

    on_sim(scenario)


@pytest.mark.parametrize("talkers", [1, 10])
def test_a_host_is_held_to_its_share_only_while_all_together_ask_for_too_much(talkers: int) -> None:
    """In a swarm of hundreds a few say much of the others: their words came seconds late, though most said nothing."""

    async def scenario(net: Net) -> None:
        limits = msgspec.structs.replace(QUICK, calls_per_host_s=50.0, calls_s=100.0)
        b = await net.peer("b", limits=limits)
        taken, loop = list[float](), asyncio.get_running_loop()
        b.endpoint.take_notes(Say, lambda peer, note: taken.append(loop.time()))
        b.endpoint.serve(Say, echo)
        hands = [ByHand(net.transport(f"h{number}"), b.contact) for number in range(20)]
        links = [await hand.link() for hand in hands]
        for link in links[:talkers]:
            await link.write(note_frame("Say", encode(Say("x"))) * 600 + call_frame(1, "Say", encode(Say("x"))))
        for link in links[:talkers]:
            await receive(link, Reply)
        assert len(taken) == 600 * talkers
        least_s = (600 - 200) / 50 if talkers == 1 else (600 - 200) * talkers / 100
        assert least_s * 0.8 < taken[-1] - taken[0] < least_s * 1.5
        for hand in hands:
            await hand.close()

    on_sim(scenario)


@pytest.mark.parametrize("waits", [False, True])
def test_short_calls_with_long_replies_are_free(waits: bool) -> None:
    """A reply counts beyond 64 KiB: 20 replies with 25 kB more take 1 s each after the first, at 10 calls a second."""

    async def scenario(net: Net) -> None:
        b = await net.peer("b", limits=msgspec.structs.replace(QUICK, calls_per_host_s=10.0))
        asked, loop = list[float](), asyncio.get_running_loop()

        def at_once(peer: PeerID, request: Say) -> Said:
            asked.append(loop.time())
            return Said("x" * ((64 << 10) + 25_600))

        async def later(peer: PeerID, request: Say) -> Said:
            return at_once(peer, request)

        b.endpoint.serve(Say, later if waits else at_once)
        hand = ByHand(net.transport("h"), b.contact)
        link = await hand.link()
        await link.write(b"".join(call_frame(number, "Say", encode(Say("x"))) for number in range(20)))
        for _ in range(20):
            await receive(link, Reply)
        assert 15.0 < asked[-1] - asked[0] < 20.0
        await hand.close()

    on_sim(scenario)


@everywhere
def test_what_a_lost_peer_has_sent_before_uses_up_its_hosts_allowance(run: Run) -> None:
    """A stranger's notes were taken one by one for 24 s after it was gone; peers of the same host waited for that."""

    async def scenario(net: Net) -> None:
        b = await net.peer("b", limits=msgspec.structs.replace(QUICK, calls_per_host_s=200.0))
        taken, reading = list[Say](), asyncio.get_running_loop().create_future()

        def take(peer: PeerID, note: Say) -> None:
            taken.append(note)
            if not reading.done():
                link = b.endpoint._open.peers[peer].links[0]
                asyncio.get_running_loop().call_soon(link._lose, PeerUnreachable("line cut", peer))
                reading.set_result(asyncio.current_task())

        b.endpoint.take_notes(Say, take)
        hand = ByHand(net.transport("h"), b.contact)
        link = await hand.link()
        await link.write(note_frame("Say", encode(Say("x"))) * 3000)
        await asyncio.wait([await reading])
        assert len(taken) < 300
        await hand.close()

    run(scenario)


@everywhere
def test_a_flood_ends_with_its_connection(run: Run) -> None:
    """What it had sent lay in memory, and used up its host's allowance, for minutes after the sender was gone.

    600 KiB for each connection: peers of the same host had no rounds meanwhile.
    """

    async def scenario(net: Net) -> None:
        b = await net.peer("b", limits=msgspec.structs.replace(QUICK, calls_per_host_s=200.0))
        taken, begun, lost = list[Say](), asyncio.Event(), asyncio.Event()

        def take(peer: PeerID, note: Say) -> None:
            taken.append(note)
            begun.set()

        b.endpoint.take_notes(Say, take)
        b.endpoint.on_lost(lambda peer, reason: lost.set())
        hand = ByHand(net.transport("h"), b.contact)
        link = await hand.link()
        await link.write(note_frame("Say", encode(Say("x"))) * 3000)
        await begun.wait()
        await link.close()
        await lost.wait()
        assert 0 < len(taken) < 1500
        await hand.close()

    run(scenario)


@everywhere
def test_a_message_that_is_too_long_is_refused_here(run: Run) -> None:
    """Requests, replies, openings and stream messages beyond the limit never leave: the other side would drop us."""

    async def scenario(net: Net) -> None:
        limits = Limits(header_bytes=1000)
        a, b = await net.peer("a", limits=limits), await net.peer("b", limits=limits)

        async def grow(peer: PeerID, request: Say) -> Said:
            return Said("x" * 2000)

        async def quiet(stream: PipeDown, opening: OpenPipe) -> None:
            await stream.recv()

        b.endpoint.serve(Say, grow)
        b.endpoint.serve_stream(OpenPipe, quiet)
        with pytest.raises(LocalError, match="the most is 1000"):
            await a.endpoint.call(b.contact, Say("x" * 2000), timeout_s=5.0)
        with pytest.raises(LocalError, match="the most is 1000"):
            await a.endpoint.open(b.contact, OpenPipe("x" * 2000), timeout_s=5.0)
        with pytest.raises(PeerRefused) as refusal:
            await a.endpoint.call(b.contact, Say("short"), timeout_s=5.0)
        assert refusal.value.code == "internal"
        assert b.seen(Warned)
        assert a.endpoint.connected(b.peer_id)
        assert not a.seen(PeerDropped)
        assert not b.seen(PeerDropped)

    run(scenario)


# --------------------------------------------------------------------------------------------------- who calls whom


@everywhere
def test_a_peer_that_only_dials_is_called_over_its_own_link(run: Run) -> None:
    """Client mode: nobody can dial it, but who was called by it can call back; a stranger cannot."""

    async def scenario(net: Net) -> None:
        a, c = await net.peer("a"), await net.peer("c", client_mode=True)
        a.endpoint.serve(Say, echo)
        c.endpoint.serve(Say, echo)
        assert c.contact == Contact(c.peer_id)
        assert not a.endpoint.reachable(c.peer_id)
        with pytest.raises(PeerUnreachable, match="no address"):
            await a.endpoint.call(c.contact, Say("x"), timeout_s=5.0)
        await c.endpoint.call(a.contact, Say("hello"), timeout_s=5.0)
        assert a.endpoint.reachable(c.peer_id)
        assert await a.endpoint.call(c.peer_id, Say("back"), timeout_s=5.0) == Said("back")
        assert a.transport.dials == []

    run(scenario)


@everywhere
def test_who_calls_is_known_afterwards(run: Run) -> None:
    """The first frame says where the dialer listens: once its link is gone it can be dialed."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        a.endpoint.serve(Say, echo)
        await together(b.endpoint.call(a.contact, Say("x"), timeout_s=5.0))
        assert a.endpoint.contact_of(b.peer_id) == b.contact

    run(scenario)


@everywhere
def test_what_a_peer_says_of_itself_goes_before_hearsay(run: Run) -> None:
    """Wrong addresses from others do not displace the right one; newer ones are tried where its own do not answer."""

    async def scenario(net: Net) -> None:
        a, b, liar = await net.peer("a"), await net.peer("b"), await net.peer("liar")
        for peer in (a, b):
            peer.endpoint.serve(Say, echo)
        wrong = tuple(Address(each.host, each.port, b.peer_id) for each in liar.contact.addresses)
        await b.endpoint.call(a.contact, Say("x"), timeout_s=5.0)
        [link] = a.endpoint._open.peers[b.peer_id].links
        link.abort()
        assert (await a.endpoint.call(Contact(b.peer_id, wrong), Say("x"), timeout_s=5.0)).text == "x"
        assert a.endpoint.contact_of(b.peer_id) == b.contact
        other = await net.peer("other")
        await together(other.endpoint.call(Contact(b.peer_id, wrong), Say("x"), timeout_s=5.0))
        assert (await other.endpoint.call(b.contact, Say("x"), timeout_s=5.0)).text == "x"
        a.endpoint._dialer.learn(Contact(liar.peer_id, moved(liar.contact)), by_itself=True)
        liar.endpoint.serve(Say, echo)
        assert (await a.endpoint.call(liar.contact, Say("x"), timeout_s=5.0)).text == "x"

    run(scenario)


def moved(contact: Contact) -> tuple[Address, ...]:
    """Where the peer was before, and nobody listens now."""
    return tuple(Address(each.host, 1, contact.peer) for each in contact.addresses)


@everywhere
def test_a_peer_has_few_links(run: Run) -> None:
    """Each holds what waits to be sent: the oldest goes when there are more than honest peers can need."""

    async def scenario(net: Net) -> None:
        a = await net.peer("a")
        hand = ByHand(net.transport("h"), a.contact)
        links = [await hand.link() for _ in range(6)]
        assert all(await together(ends(links[0]), ends(links[1])))
        for number, link in enumerate(links[2:], 1):
            await link.write(call_frame(number, "Nothing", encode(Say("x"))))
            assert (await receive(link, Failure)).id == number
        assert len(a.endpoint._open.peers[hand.transport.peer_id].links) == 4
        assert not a.seen(PeerLost)
        await hand.close()

    run(scenario)


@everywhere
def test_foreign_addresses_teach_nothing(run: Run) -> None:
    """A contact counts only with addresses of the peer that it names, and a hello only in its sender's own name."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        victim = identity_of("victim").peer_id
        a.endpoint.learn(Contact(victim, b.contact.addresses))
        assert not a.endpoint.reachable(victim)
        own = Address("127.0.0.1", 4000, victim)
        a.endpoint.learn(Contact(victim, (*b.contact.addresses, own)))
        assert a.endpoint.contact_of(victim) == Contact(victim, (own,))
        a.endpoint.learn(Contact(victim))
        assert a.endpoint.contact_of(victim).addresses == (own,)
        a.endpoint.learn(Contact(a.peer_id, (Address("127.0.0.1", 1, a.peer_id),)))
        assert not a.endpoint.reachable(a.peer_id)
        hand = ByHand(net.transport("h"), a.contact)
        link = await hand.link(Contact(b.peer_id, (Address("127.0.0.1", 9, b.peer_id),)))
        await link.write(call_frame(1, "Say", encode(Say("x"))))
        await receive(link, Failure)  # by now the hello was read
        assert not a.endpoint.reachable(b.peer_id)
        assert a.endpoint.connected(hand.transport.peer_id)
        await hand.close()

    run(scenario)


@everywhere
def test_a_peer_does_not_call_itself(run: Run) -> None:
    """That is the caller's mistake."""

    async def scenario(net: Net) -> None:
        a = await net.peer("a")
        with pytest.raises(LocalError):
            await a.endpoint.call(a.contact, Say("x"), timeout_s=5.0)
        with pytest.raises(LocalError):
            await a.endpoint.open(a.peer_id, OpenPipe(), timeout_s=5.0)

    run(scenario)


# -------------------------------------------------------------------------------------------------------------- streams


async def _mirror(stream: PipeDown, opening: OpenPipe) -> None:
    """Sends back what comes, payloads too."""
    while (received := await stream.recv()) is not None:
        message, nbytes = received
        payload = bytearray(nbytes)
        await stream.readinto(payload)
        await stream.send(Down(message.number), payload if nbytes else None)


async def _talk(stream: PipeUp, sizes: list[int]) -> None:
    """Sends payloads of these sizes, and checks what comes back."""
    for number, size in enumerate(sizes):
        payload = bytes([number]) * size
        await stream.send(Up(number), payload if size else None)
        message, nbytes = await stream.recv() or (None, 0)
        assert (message, nbytes) == (Down(number), size)
        back = bytearray(nbytes)
        half = memoryview(back)[: nbytes // 2]
        await stream.readinto(half)  # all at once or piece by piece
        await stream.readinto(memoryview(back)[nbytes // 2 :])
        assert back == payload
    await stream.finish()


@everywhere
def test_streams_carry_messages_and_payloads_both_ways(run: Run) -> None:
    """In order, with and without payload, until both have said END."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve_stream(OpenPipe, _mirror)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        assert stream.peer_id == b.peer_id
        await _talk(stream, [0, 1, 1000, 300_000, 0])
        assert await stream.recv() is None
        assert stream.closed
        assert stream.bytes_sent > 301_000
        stream.abort()  # nothing to do any more
        await stream.fail("refused", "too late")

    run(scenario)


@everywhere
def test_connections_of_finished_streams_are_used_again(run: Run) -> None:
    """Twenty streams one after another take one link and one connection; of six at once, four are kept."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve_stream(OpenPipe, _mirror)

        async def once() -> None:
            await _talk(await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0), [10])

        for _ in range(20):
            await once()
        assert len(a.transport.dials) == 2
        assert not [each for each in await together(*(once() for _ in range(6))) if each is not None]
        assert len(a.transport.dials) == 2 + 5
        assert not [each for each in await together(*(once() for _ in range(6))) if each is not None]
        assert len(a.transport.dials) == 2 + 5 + 2

    run(scenario)


@everywhere
def test_a_peer_that_only_dials_lends_connections_for_streams(run: Run) -> None:
    """To peers that it has dialed, when they ask for them; several at once, and each of use again."""

    async def scenario(net: Net) -> None:
        a, c = await net.peer("a"), await net.peer("c", client_mode=True)
        a.endpoint.serve(Say, echo)
        c.endpoint.serve_stream(OpenPipe, _mirror)
        with pytest.raises(PeerUnreachable, match="no address"):
            await a.endpoint.open(c.peer_id, OpenPipe(), timeout_s=5.0)
        await c.endpoint.call(a.contact, Say("hello"), timeout_s=5.0)

        async def once() -> None:
            await _talk(await a.endpoint.open(c.peer_id, OpenPipe(), timeout_s=5.0), [0, 10, 300_000])

        for _ in range(5):
            await once()
        assert len(c.transport.dials) == 2
        assert not [each for each in await together(*(once() for _ in range(4))) if each is not None]
        assert len(c.transport.dials) == 5
        assert a.transport.dials == []

    run(scenario)


@everywhere
def test_a_connection_that_nobody_asked_for_is_not_borrowed(run: Run) -> None:
    """It is closed; and a peer that has been asked and lends none fails the stream in time."""

    async def scenario(net: Net) -> None:
        a = await net.peer("a", limits=msgspec.structs.replace(QUICK, dial_timeout_s=1.0))
        hand = ByHand(net.transport("h"), a.contact)
        lent = await hand.dial()
        await lent.write(pack(Kind.HELLO, Hello(Contact(hand.transport.peer_id), lends=True)))
        assert await ends(lent)
        await hand.link()
        await a.event(PeerConnected)
        with pytest.raises(PeerTimeout):
            await a.endpoint.open(hand.transport.peer_id, OpenPipe(), timeout_s=5.0)
        assert not a.seen(Warned)
        await hand.close()

    run(scenario)


@everywhere
def test_bulk_data_goes_on_the_connection_that_has_carried_it_before(run: Run) -> None:
    """Whichever stream came first or ended last; else on another one that waits. Both transports know which is bulk."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        used: dict[type, list[object]] = {OpenBulk: [], OpenPipe: []}

        async def serve(stream: PipeDown, opening: OpenBulk | OpenPipe) -> None:
            used[type(opening)].append(stream._connection)
            assert stream._connection.bulk == opening.bulk
            await _mirror(stream, OpenPipe())

        async def use(*openings: OpenBulk | OpenPipe) -> None:
            streams = [await a.endpoint.open(b.contact, opening, timeout_s=5.0) for opening in openings]
            assert [stream._connection.bulk for stream in streams] == [opening.bulk for opening in openings]
            for stream in reversed(streams):
                await _talk(stream, [1000])

        b.endpoint.serve_stream(OpenBulk, serve)
        b.endpoint.serve_stream(OpenPipe, serve)
        await use(OpenPipe())
        await use(OpenBulk())  # nothing else waits: it takes what there is, which is for bulk data from now on
        assert len(a.transport.dials) == 1 + 1
        for order in ((OpenPipe(), OpenBulk()), (OpenBulk(), OpenPipe())) * 3:
            await use(*order)
        assert len(a.transport.dials) == 1 + 2
        assert len(set(used[OpenBulk])) == 1
        assert set(used[OpenBulk]).isdisjoint(used[OpenPipe][1:])

    run(scenario)


@everywhere
def test_a_small_stream_takes_the_connection_that_was_dialed_ahead_for_it(run: Run) -> None:
    """Also one that is still being dialed. Nothing is dialed twice, nor for a peer that we have no link with."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve_stream(OpenPipe, _mirror)
        b.endpoint.serve_stream(OpenBulk, _mirror)
        b.endpoint.serve(Say, echo)

        async def use(opening: OpenBulk | OpenPipe) -> None:
            await _talk(await a.endpoint.open(b.contact, opening, timeout_s=5.0), [10])

        a.endpoint.dial_ahead(b.peer_id)
        assert a.transport.dials == []
        await a.endpoint.call(b.contact, Say("x"), timeout_s=5.0)
        a.endpoint.dial_ahead(b.peer_id)
        a.endpoint.dial_ahead(b.peer_id)
        await use(OpenPipe())
        assert len(a.transport.dials) == 1 + 1
        a.endpoint.dial_ahead(b.peer_id)  # one waits already
        await use(OpenBulk())
        assert len(a.transport.dials) == 2
        a.endpoint.dial_ahead(b.peer_id)  # that one is for bulk data now
        ahead = a.endpoint._open.peers[b.peer_id].ahead
        assert ahead is not None
        await asyncio.wait([ahead])
        assert len(a.transport.dials) == 3
        await use(OpenPipe())
        assert len(a.transport.dials) == 3

    run(scenario)


@everywhere
def test_a_dial_ahead_that_fails_costs_nothing(run: Run) -> None:
    """It is no error here, the next stream dials again; and one that comes after the link was lost is dropped."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        a.endpoint.serve(Say, echo)
        b.endpoint.serve_stream(OpenPipe, _mirror)
        await b.endpoint.call(a.contact, Say("x"), timeout_s=5.0)

        async def dialed_ahead(addresses: tuple[Address, ...]) -> BaseException | None:
            a.endpoint._dialer.learn(Contact(b.peer_id, addresses), by_itself=True)
            a.endpoint.dial_ahead(b.peer_id)
            ahead = a.endpoint._open.peers[b.peer_id].ahead
            assert ahead is not None
            await asyncio.wait([ahead])
            return ahead.exception()

        assert isinstance(await dialed_ahead(moved(b.contact)), PeerUnreachable)
        assert await dialed_ahead(b.contact.addresses) is None
        await _talk(await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0), [10])
        assert len(a.transport.dials) == 2
        state = a.endpoint._open.peers[b.peer_id]
        state.idle.clear()
        a.endpoint.dial_ahead(b.peer_id)
        [link] = state.links
        link.abort()
        assert state.ahead is not None
        await asyncio.wait([state.ahead])
        assert b.peer_id not in a.endpoint._open.peers

    run(scenario)


@everywhere
def test_a_stream_that_did_not_end_in_order_takes_its_connection_with_it(run: Run) -> None:
    """After an abort of either side the next stream gets a new connection, and works."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        outcomes: asyncio.Queue[str] = asyncio.Queue()

        async def serve(stream: PipeDown, opening: OpenPipe) -> None:
            if opening.name == "abort":
                stream.abort()
                return
            try:
                await stream.recv()
                outcomes.put_nowait("end")
            except PeerUnreachable:
                outcomes.put_nowait("lost")
                raise

        b.endpoint.serve_stream(OpenPipe, serve)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        stream.abort()
        assert await outcomes.get() == "lost"
        with pytest.raises(PeerUnreachable):
            await stream.recv()
        other = await a.endpoint.open(b.contact, OpenPipe("abort"), timeout_s=5.0)
        with pytest.raises(PeerUnreachable):
            await other.recv()
        assert other.closed
        third = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        await third.finish()
        assert await outcomes.get() == "end"
        assert len(a.transport.dials) == 4
        assert a.endpoint.connected(b.peer_id)

    run(scenario)


@everywhere
def test_a_handler_that_gives_a_stream_up_says_why(run: Run) -> None:
    """Refused, busy, bad, internal, unknown: the opener reads it at its next `recv`."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")

        async def serve(stream: PipeDown, opening: OpenPipe) -> None:
            match opening.name:
                case "refuse":
                    raise PeerRefused("not today")
                case "busy":
                    raise PeerRefused("full", code="busy")
                case "bad":
                    raise PeerProtocolError("nonsense")
                case "closed":
                    raise ClosedError("going")
                case "unread":
                    await stream.recv()
                    return
            raise ValueError(opening.name)

        b.endpoint.serve_stream(OpenPipe, serve)
        expected = {
            OpenPipe("refuse"): ("refused", "not today"),
            OpenPipe("busy"): ("busy", "full"),
            OpenPipe("bad"): ("bad", "nonsense"),
            OpenPipe("closed"): ("refused", "shutting down"),
            OpenPipe("unread"): ("internal", "LocalError"),
            OpenPipe("other"): ("internal", "ValueError"),
            OpenPipe(where="nowhere"): ("unknown", "no stream OpenPipe nowhere is served here"),
            OpenOther(): ("unknown", "no stream OpenOther is served here"),
        }
        for opening, (code, text) in expected.items():
            stream: PipeUp = await a.endpoint.open(b.contact, opening, timeout_s=5.0)
            if code == "internal":
                await stream.send(Up(1), b"payload that nobody reads")
            with pytest.raises(PeerRefused) as refusal:
                await stream.recv()
            assert (refusal.value.code, refusal.value.message) == (code, text)
            assert stream.closed
        assert {event.where for event in b.seen(Warned)} == {"stream OpenPipe"}

    run(scenario)


@everywhere
def test_an_opener_that_gives_a_stream_up_says_why(run: Run) -> None:
    """`fail` reaches the handler as a refusal with its code."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        heard: asyncio.Future[PeerRefused] = asyncio.get_running_loop().create_future()

        async def serve(stream: PipeDown, opening: OpenPipe) -> None:
            try:
                while await stream.recv() is not None:
                    pass
            except PeerRefused as refusal:
                heard.set_result(refusal)
                raise

        b.endpoint.serve_stream(OpenPipe, serve)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        await stream.send(Up(1))
        await stream.fail("busy", "changed my mind")
        refusal = await heard
        assert (refusal.code, refusal.message, refusal.peer_id) == ("busy", "changed my mind", a.peer_id)
        assert stream.closed

    run(scenario)


@everywhere
def test_misuse_of_a_stream_is_the_users_error(run: Run) -> None:
    """Unread payloads, too large buffers, sending after END, payloads beyond a frame."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a", limits=Limits(payload_bytes=1000)), await net.peer("b")
        b.endpoint.serve_stream(OpenPipe, _mirror)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        with pytest.raises(LocalError, match="1001 bytes"):
            await stream.send(Up(1), bytes(1001))
        await stream.send(Up(1), bytes(1000))
        assert await stream.recv() == (Down(1), 1000)
        with pytest.raises(LocalError, match="payload of 1000"):
            await stream.recv()
        with pytest.raises(LocalError, match="only 1000"):
            await stream.readinto(bytearray(1001))
        await stream.readinto(bytearray(999))
        with pytest.raises(LocalError, match="payload of 1 bytes"):
            await stream.recv()
        await stream.readinto(bytearray(1))
        await stream.readinto(bytearray(0))
        await stream.end()
        await stream.end()
        with pytest.raises(LocalError, match="END"):
            await stream.send(Up(2))
        await stream.finish()
        await stream.readinto(bytearray(0))  # its connection is somebody else's by now

    run(scenario)


@everywhere
def test_more_than_is_allowed_ends_a_stream(run: Run) -> None:
    """A payload or a message over the receiver's limit, or of another type: the sender is dropped, and told."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b", limits=Limits(payload_bytes=1000, header_bytes=200))
        b.endpoint.serve_stream(OpenPipe, _mirror)

        for send in ("payload", "header", "type", "after"):
            stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
            match send:
                case "payload":
                    await stream.send(Up(1), bytes(1001))
                case "header":
                    await stream.send(Said("x" * 300))  # type: ignore[arg-type]
                case "type":
                    await stream.send(Down(1))  # type: ignore[arg-type]
                case "after":
                    await stream._connection.write(pack(Kind.HELLO))
            with pytest.raises(PeerUnreachable):
                await stream.recv()
            assert stream.closed
        assert a.endpoint.connected(b.peer_id)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        await _talk(stream, [1000])

    run(scenario)


@everywhere
def test_a_message_after_the_end_was_due_breaks_the_protocol(run: Run) -> None:
    """`finish` expects END: something else is the other side's fault."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")

        async def chatty(stream: PipeDown, opening: OpenPipe) -> None:
            await stream.recv()
            await stream.send(Down(1))

        b.endpoint.serve_stream(OpenPipe, chatty)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        with pytest.raises(PeerProtocolError, match="should have ended"):
            await stream.finish()
        assert stream.closed

    run(scenario)


@everywhere
def test_only_so_many_streams_of_one_peer_are_served(run: Run) -> None:
    """Beyond `streams_per_peer` a stream is refused as busy, until one has ended."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b", limits=Limits(streams_per_peer=2))
        b.endpoint.serve_stream(OpenPipe, _mirror)
        streams = []
        for _ in range(2):
            stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
            await stream.send(Up(1))
            assert await stream.recv() == (Down(1), 0)
            streams.append(stream)
        third = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        with pytest.raises(PeerRefused) as refusal:
            await third.recv()
        assert refusal.value.code == "busy"
        await streams[0].finish()
        await _talk(await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0), [5])
        await streams[1].finish()

    run(scenario)


@everywhere
def test_what_is_no_call_and_no_stream_costs_the_connection(run: Run) -> None:
    """Wrong first frames, wrong frames on a link, undecodable headers: dropped by name; the endpoint serves on."""

    async def scenario(net: Net) -> None:
        b, good = await net.peer("b"), await net.peer("good")
        b.endpoint.serve(Say, echo)
        b.endpoint.serve_stream(OpenPipe, _mirror)
        hand = ByHand(net.transport("h"), b.contact)
        first_frames = [
            b"\xff" * 9,
            pack(Kind.CALL, Bye(leaving=False)),
            pack(Kind.DATA, Up(1)),
            pack(Kind.HELLO, Up(1)),
            pack(Kind.OPEN, Up(1)),
            open_frame("OpenPipe", b"\xc0"),
            open_frame("OpenPipe", encode(Up(1))),
            b"\x01\xff\xff\xff\xff\x00\x00\x00\x00",
            b"\x01\x00\x00\x00\x01\x00\x00\x00\x01\xc0",
        ]
        for frame in first_frames:
            connection = await hand.dial()
            await connection.write(frame)
            assert await ends(connection)
        for frame in (pack(Kind.END), pack(Kind.DATA, Up(1)), pack(Kind.CALL, Up(1)), pack(Kind.CALL, b"")):
            link = await hand.link()
            await link.write(frame)
            assert await ends(link)
        dropped = b.seen(PeerDropped)
        assert len(dropped) == len(first_frames) + 4
        assert {event.peer for event in dropped} == {hand.transport.peer_id}
        assert await good.endpoint.call(b.contact, Say("x"), timeout_s=5.0) == Said("x")
        assert not b.seen(Warned)
        await hand.close()

    run(scenario)


@everywhere
def test_an_undecodable_opening_is_told_bad(run: Run) -> None:
    """The stream's first message is not one: FAULT says so before the connection goes."""

    async def scenario(net: Net) -> None:
        b = await net.peer("b")
        b.endpoint.serve_stream(OpenPipe, _mirror)
        hand = ByHand(net.transport("h"), b.contact)
        connection = await hand.dial()
        await connection.write(open_frame("OpenPipe", encode(Up(1))))
        assert (await receive(connection, Failure)).code == "bad"
        assert await ends(connection)
        assert len(b.seen(PeerDropped)) == 1
        await hand.close()

    run(scenario)


@everywhere
def test_traffic_counts_the_bytes_of_all_connections(run: Run) -> None:
    """Links and streams, open and closed: what one side sent is what the other received."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        b.endpoint.serve(Say, echo)
        b.endpoint.serve_stream(OpenPipe, _mirror)
        assert a.endpoint.traffic == (0, 0)
        await a.endpoint.call(b.contact, Say("x" * 1000), timeout_s=5.0)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        await _talk(stream, [50_000])
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        await stream.send(Up(1), bytes(20_000))
        _, nbytes = await stream.recv() or (None, 0)
        await stream.readinto(bytearray(nbytes))
        before = a.endpoint.traffic
        stream.abort()
        sent, received = a.endpoint.traffic
        assert (sent, received) == before  # a connection that is gone still counts
        assert 71_000 < sent < 72_000
        assert 71_000 < received < 72_000
        assert b.endpoint.traffic == (received, sent)

    run(scenario)


# ----------------------------------------------------------------------------------------------------------- the end


@everywhere
def test_a_peer_that_leaves_says_so(run: Run) -> None:
    """Bye: the others know at once, and why; calls that still wait fail."""

    async def scenario(net: Net) -> None:
        a, b = await net.peer("a"), await net.peer("b")
        started = asyncio.Event()
        linked: list[PeerID] = []
        forget_links = a.endpoint.on_linked(linked.append)
        lost: list[tuple[PeerID, str]] = []

        async def never(peer: PeerID, request: Say) -> Said:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError

        b.endpoint.serve(Say, never)
        unsubscribe = a.endpoint.on_lost(lambda peer, reason: lost.append((peer, reason)))
        call = asyncio.create_task(a.endpoint.call(b.contact, Say("x"), timeout_s=60.0))
        await started.wait()
        await b.endpoint.close()
        with pytest.raises(PeerUnreachable, match="the peer left"):
            await call
        assert (await a.event(PeerLost)).reason == "the peer left"
        assert linked == [b.peer_id]
        assert lost == [(b.peer_id, "the peer left")]
        assert not b.seen(PeerLost)
        for forget in (forget_links, unsubscribe):
            forget()
            forget()

    run(scenario)


@everywhere
def test_a_bye_counts_when_a_write_fails_before_it_is_read(run: Run) -> None:
    """A peer says much and leaves. A call that finds its connection closed, before its Bye is read, is told why."""

    async def scenario(net: Net) -> None:
        b = await net.peer("b")
        hand = ByHand(net.transport("h"), b.contact)
        link = await hand.link()
        shouts = [note_frame("Shout", encode(Shout()))] * 1500
        await link.write(b"".join([*shouts, pack(Kind.CALL, Bye(leaving=True))]))
        await link.close()
        await b.event(PeerConnected)
        with pytest.raises(PeerUnreachable, match="the peer left"):
            await b.endpoint.call(hand.transport.peer_id, Say("x"), timeout_s=60.0)
        assert (await b.event(PeerLost)).reason == "the peer left"
        await hand.close()

    run(scenario)


@everywhere
@pytest.mark.parametrize("again", [False, True])
def test_a_peer_with_two_links_that_left_was_lost_for_the_end_of_the_second(run: Run, again: bool) -> None:
    """It has said so on one of them. A link that it makes afterwards is of a peer that is here again."""

    async def scenario(net: Net) -> None:
        b = await net.peer("b")
        hand = ByHand(net.transport("h"), b.contact)
        links = [await hand.link(), await hand.link()]
        for link in links:
            await receive(link, Beat)
        await links[0].write(pack(Kind.CALL, Bye(leaving=True)))
        assert await ends(links[0])
        if again:
            links.append(await hand.link())
            await receive(links[2], Beat)
        for link in links[1:]:
            await link.close()
        reason = (await b.event(PeerLost)).reason
        assert (reason == "the peer left") is not again, reason
        await hand.close()

    run(scenario)


@everywhere
def test_close_ends_everything_and_all_waiting(run: Run) -> None:
    """Waiting calls and streams fail, later ones raise `ClosedError`, and no task of the endpoint is left."""

    async def scenario(net: Net) -> None:
        before = asyncio.all_tasks()
        a, b = await net.peer("a"), await net.peer("b")
        started = asyncio.Event()

        async def never(peer: PeerID, request: Say) -> Said:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError

        b.endpoint.serve(Say, never)
        b.endpoint.serve_stream(OpenPipe, _mirror)
        stream = await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)
        works = [
            asyncio.create_task(a.endpoint.call(b.contact, Say("x"), timeout_s=60.0)),
            asyncio.create_task(stream.recv()),
        ]
        watching = asyncio.create_task((await a.endpoint.open(b.contact, OpenPipe(), timeout_s=5.0)).ready())
        await started.wait()
        await a.endpoint.close()
        await a.endpoint.close()
        assert a.endpoint.closed
        assert all(isinstance(each, PeerUnreachable) for each in await together(*works))
        await watching
        for name in ("call", "open"):
            with pytest.raises(ClosedError):
                await getattr(a.endpoint, name)(b.contact, Say("x"), timeout_s=5.0)
        await b.event(PeerLost)
        await b.endpoint.close()
        left = asyncio.all_tasks() - before - {asyncio.current_task()}
        assert not left

    run(scenario)
