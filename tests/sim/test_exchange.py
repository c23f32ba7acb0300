"""The data of a round, message by message: late, slow, repeated, absurd and hostile ones."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from msgspec.structs import replace

from shoal.averaging.allreduce.member import MemberMachine
from shoal.averaging.allreduce.round import Round, RoundOptions
from shoal.averaging.allreduce.streams import UpStream
from shoal.averaging.allreduce.vector import TileDigests
from shoal.averaging.group import Group
from shoal.base.peer import PeerID
from shoal.compression import Float16Compression
from shoal.errors import ConfigError, PeerRefused, PeerUnreachable, RoundFailed
from shoal.events import PeerDropped, Warned
from shoal.protocol.wire import (
    AskVerdict,
    Assign,
    Commit,
    Contact,
    Gone,
    Held,
    Leave,
    Member,
    Message,
    PartAbsent,
    PartAverage,
    PartData,
    PartRequest,
    Reduce,
    Report,
    decode,
)
from shoal.rpc import Stream
from shoal.rpc.framing import Kind, pack, read_frame
from shoal.sim import sleep
from tests.sim.round_kit import OPTIONS, ROUND, OpenControl, RoundPeer, gather_group, run_round, signed_by
from tests.sim.rpc_kit import ByHand, SimNet, on_sim, together

NUMEL = 1000
NO_WEIGHTS = (math.nan, math.inf, -5.0, 0.0, 1e300)
"""What the members that count in an average cannot weigh."""


async def three(net: SimNet, numel: int = NUMEL) -> list[RoundPeer]:
    """Members with the values 1, 2 and 3."""
    return [await RoundPeer.make(net, name, torch.full((numel,), i + 1.0)) for i, name in enumerate("abc")]


def values(member: RoundPeer) -> torch.Tensor:
    """What it has now."""
    return member.vector.tensors[0]


async def speak(member: RoundPeer, to: RoundPeer, round_id: bytes = ROUND) -> UpStream:
    """A member's data stream to a reducer, for the test to use in its place."""
    return await member.peer.endpoint.open(to.peer.contact, Reduce(round_id), timeout_s=5.0)


async def to_the_end(stream: UpStream) -> None:
    """Read until it ends, one way or the other."""
    while await stream.recv() is not None:
        pass


def encoded(value: float, numel: int) -> bytes:
    """A contribution."""
    return torch.full((numel,), value).numpy().tobytes()


# ---------------------------------------------------------------------------------------------------------- in order


def test_a_round_by_hand() -> None:
    """The kit itself: three members, shares of all sizes, weights; one average, bit by bit."""

    async def scenario(net: SimNet) -> None:
        group = await three(net)
        for shares in ([400, 350, 250], [1000, 0, 0], [0, 0, 1000]):
            for i, member in enumerate(group):
                values(member).fill_(i + 1.0)
            outcomes = await run_round(group, shares)
            assert all(torch.equal(values(member), torch.full((NUMEL,), 2.0)) for member in group)
            assert all(outcome.weight == 3.0 for outcome in outcomes)
            assert not any(outcome.left_out for outcome in outcomes)
        assert not any(member.peer.seen(Warned) for member in group)
        assert not any(member.peer.seen(PeerDropped) for member in group)

    on_sim(scenario)


def test_rounds_use_the_same_connections_again() -> None:
    """The first round dials; twenty more do not, whoever of the members is the last to end its streams."""

    async def scenario(net: SimNet) -> None:
        group = await three(net, 20_000)
        net.swarm.network.set_link("a", "c", latency_s=0.2)
        shares = [8_000, 7_000, 5_000]
        await run_round(group, shares, tile_bytes=4096)
        dials = [len(member.peer.transport.dials) for member in group]
        for _ in range(20):
            await run_round(group, shares, tile_bytes=4096)
        assert [len(member.peer.transport.dials) for member in group] == dials

    on_sim(scenario)


def test_a_member_that_trickles_is_not_silent() -> None:
    """A tile takes ten seconds to send, five times `silence_s`: bytes come all the time, and nobody is far ahead."""

    async def scenario(net: SimNet) -> None:
        for name in "bc":
            net.swarm.network.add_host(name, up_bytes_s=100_000.0)
        group = await three(net, 250_000)
        outcomes = await run_round(group, [250_000, 0, 0], tile_bytes=1 << 20)
        assert not outcomes[0].left_out
        assert torch.equal(values(group[0]), torch.full((250_000,), 2.0))

    on_sim(scenario)


# ------------------------------------------------------------------------------------------------------- out of order


async def _run_in_background(
    group: Sequence[RoundPeer], shares: list[int], options: RoundOptions = OPTIONS
) -> list[Round]:
    await gather_group(group)
    return [member.round(group, shares, options=options) for member in group]


def test_a_late_contribution_does_not_touch_a_newer_attempt() -> None:
    """What still comes for a reducer's old attempt is not added to the average that it received meanwhile.

    It was (wrongly) left out, and its tile averaged elsewhere; both lie in the same memory.
    """

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net, 200)
        await gather_group([a, b, c])
        # c is played by hand, and b decides nothing: only a is a real round, which owns tile 0 and waits for c.
        round_ = a.round([a, b, c], [200, 0, 0])
        running = asyncio.create_task(round_.run())
        others = [await speak(member, a) for member in (b, c)]
        await others[0].send(PartData(0, 0, 1.0), encoded(2.0, 200))
        await sleep(0.5)
        newer = Held(0, 1, b"\x06", 2.0, b"n" * 16)
        round_.machine.rules.expect(0, 1)  # as `RoundTiles.land` does when it receives another reducer's average
        landing = a.vector.landing(round_.tiling.tiles[0])
        assert landing is not None
        landing[:] = encoded(2.5, 200)
        assert round_.machine.rules.averaged(newer)
        await others[1].send(PartData(0, 0, 1.0), encoded(3.0, 200))
        await sleep(0.5)
        assert bytes(landing) == encoded(2.5, 200)
        assert round_.machine.rules.held[0] is newer
        running.cancel()
        await together(running)
        await round_.close(orderly=False)
        for stream in others:
            stream.abort()

    on_sim(scenario)


def test_an_old_round_does_not_touch_the_next_one() -> None:
    """A round that failed here may go on elsewhere: what still comes for it is not added to the next round's sums."""

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net, 200)
        await gather_group([a, b, c])
        old = a.round([a, b, c], [200, 0, 0])
        running = asyncio.create_task(old.run())
        stale = await speak(b, a)
        await stale.send(PartRequest(0, 0))
        await sleep(0.5)
        running.cancel()
        await together(running)
        await old.close(orderly=False)
        for member in (a, b, c):
            member.release()
        await gather_group([a, b, c])
        rounds = [each.round([a, b, c], [200, 0, 0], round_id=b"the next round!!") for each in (a, b, c)]
        works = [asyncio.create_task(rounds[0].run())]  # the reducer has begun its sum; the others are a little later
        await sleep(0.1)
        await together(stale.send(PartData(0, 0, 1.0), encoded(1e6, 200)))
        await sleep(0.1)
        works += [asyncio.create_task(round_.run()) for round_ in rounds[1:]]
        await asyncio.gather(*works)
        for each in (a, b, c):
            each.vector.overwrite()
            assert torch.equal(values(each), torch.full((200,), 2.0))
        await asyncio.gather(*(round_.close() for round_ in rounds))

    on_sim(scenario)


def test_closing_a_round_ends_whatever_waits_in_it() -> None:
    """Streams that wait for an attempt that never comes, or that their opener never ends: gone within seconds."""

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net, 200)
        await gather_group([a, b, c])
        round_ = a.round([a, b, c], [200, 0, 0])
        running = asyncio.create_task(round_.run())
        early, idle = await speak(b, a), await speak(c, a)
        await early.send(PartData(0, 2, 1.0), encoded(2.0, 200))  # of an attempt that nobody has assigned
        await sleep(1.0)
        running.cancel()
        await together(running)
        async with asyncio.timeout(5.0):
            await round_.close(orderly=False)
        for stream in (early, idle):
            with pytest.raises((PeerUnreachable, PeerRefused)):
                await stream.recv()
        for member in (a, b, c):
            member.release()
        await sleep(1.0)
        assert not a.peer.endpoint._open.matters(b.peer.peer_id)
        assert not a.peer.seen(Warned)
        again = await speak(b, a)
        with pytest.raises(PeerRefused, match="no such round"):
            await again.recv()

    on_sim(scenario)


def test_an_orderly_end_waits_for_those_who_still_read() -> None:
    """Streams end one after another; one that never ends holds nobody up for long."""

    async def scenario(net: SimNet) -> None:
        group = await three(net)
        rounds = await _run_in_background(group, [500, 500, 0])
        stuck = await speak(group[2], group[0])
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(round_.run() for round_ in rounds))
        await asyncio.gather(*(round_.close() for round_ in rounds))
        assert asyncio.get_running_loop().time() - began < 5.0
        with pytest.raises(PeerUnreachable):
            await to_the_end(stuck)

    on_sim(scenario)


# ------------------------------------------------------------------------------------------------------------ hostile


HELD = Held(0, 0, b"\x01", 1.0, b"d" * 16)


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (PartData(-1, 0, 1.0), b"x" * 4),
        (PartData(1, 0, 1.0), b"x" * 4),
        (PartData(1 << 60, 0, 1.0), b"x" * 4),
        (PartData(0, -1, 1.0), b"x" * 800),
        (PartData(0, 4, 1.0), b"x" * 800),
        (PartData(0, 1 << 60, 1.0), b"x" * 800),
        (PartData(0, 0, math.nan), encoded(1.0, 200)),
        (PartData(0, 0, math.inf), encoded(1.0, 200)),
        (PartData(0, 0, -1.0), encoded(1.0, 200)),
        (PartData(0, 0, 1e-300), encoded(1.0, 200)),
        (PartData(0, 0, 1e300), encoded(1.0, 200)),
        (PartData(0, 0, 1.0), b""),
        (PartData(0, 0, 1.0), encoded(1.0, 199)),
        (PartData(0, 0, 1.0), encoded(1.0, 201)),
        (PartData(0, 0, 1.0), encoded(1.0, 1_000_000)),
        (PartData(0, 0, 0.0), encoded(1.0, 200)),
        (PartData(0, 0, 1.0), encoded(math.nan, 200)),
        (PartData(0, 0, 1.0), encoded(-math.inf, 200)),
        (PartData(0, 0, 1.0), encoded(3e38, 200)),
        (PartRequest(-1, 0), b""),
        (PartRequest(1, 0), b""),
        (PartRequest(0, 1 << 40), b""),
        (PartRequest(0, 0), b"payload"),
        (PartAbsent(0, 0), b""),
        (PartAverage(HELD), encoded(1.0, 200)),
        (Leave(), b""),
    ],
)
def test_absurd_contributions_cost_their_sender_its_place(message: Message, payload: bytes) -> None:
    """Tiles, attempts, weights, sizes and values that cannot be: the sender is told, and left out; the rest go on."""

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net, 200)
        await gather_group([a, b, c])
        rounds = [member.round([a, b, c], [200, 0, 0]) for member in (a, b)]
        running = [asyncio.create_task(round_.run()) for round_ in rounds]
        stream = await speak(c, a)
        await stream.send(message, payload or None)  # type: ignore[arg-type]
        with pytest.raises((PeerRefused, PeerUnreachable)) as error:
            await to_the_end(stream)
        assert not isinstance(error.value, PeerRefused) or error.value.code == "bad"
        await c.controls[a.peer.peer_id].send(Report())
        c.controls[a.peer.peer_id].abort()  # nor does it report
        outcomes = await asyncio.gather(*running)
        assert [outcome.left_out for outcome in outcomes] == [(c.peer.peer_id,)] * 2
        for member in (a, b):
            member.vector.overwrite()
        assert torch.equal(values(a), torch.full((200,), 1.5))
        assert torch.equal(values(a), values(b))
        dropped = [event.peer for event in a.peer.seen(PeerDropped)]
        # Once for what it sent, and once more if the coordinator leaves it out.
        assert dropped.count(c.peer.peer_id) in (1, 2) or isinstance(message, PartAbsent | PartAverage | Leave)
        assert not a.peer.seen(Warned)
        await asyncio.gather(*(round_.close() for round_ in rounds))

    on_sim(scenario)


def test_contributions_of_an_unwanted_kind_are_counted_once() -> None:
    """Repeated, and after the tile is done: read and thrown away, whatever is in them."""

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net, 200)
        await gather_group([a, b, c])
        rounds = [member.round([a, b, c], [200, 0, 0]) for member in (a, b)]
        running = [asyncio.create_task(round_.run()) for round_ in rounds]
        stream = await speak(c, a)
        for value in (3.0, 1e30, math.nan):
            await stream.send(PartData(0, 0, 1.0), encoded(value, 200))
        received = await stream.recv()
        assert received is not None
        average, nbytes = received
        assert isinstance(average, PartAverage)
        data = bytearray(nbytes)
        await stream.readinto(data)
        assert bytes(data) == encoded(2.0, 200)
        await stream.send(PartData(0, 0, 1.0), encoded(7.0, 200))
        await c.controls[a.peer.peer_id].send(Report(held=[average.held]))
        outcomes = await asyncio.gather(*running)
        assert not outcomes[0].left_out
        a.vector.overwrite()
        assert torch.equal(values(a), torch.full((200,), 2.0))
        stream.abort()
        await asyncio.gather(*(round_.close() for round_ in rounds))

    on_sim(scenario)


def test_asking_a_million_times_is_remembered_once() -> None:
    """A member that asks and does not read: what is kept for it does not grow with its questions."""

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net, 200)
        await gather_group([a, b, c])
        rounds = [member.round([a, b, c], [100, 100, 0]) for member in (a, b)]
        running = [asyncio.create_task(round_.run()) for round_ in rounds]
        await c.peer.endpoint.close()
        hand = ByHand(net.transport("c"), a.peer.contact)
        stream = await hand.open(Reduce(ROUND))
        question = pack(Kind.DATA, PartRequest(0, 0)) + pack(Kind.DATA, PartRequest(1, 0))
        for _ in range(50):
            await stream.write(question * 1000)
        await sleep(0.2)
        inbound = rounds[0]._exchange._reducing[2]
        assert len(inbound._due) <= 2
        await hand.close()
        await asyncio.gather(*running)
        await asyncio.gather(*(round_.close() for round_ in rounds))

    on_sim(scenario)


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (PartAbsent(1 << 40, 0), b""),
        (PartAbsent(-1, 0), b""),
        (PartAbsent(0, 0), b"payload"),
        (PartAverage(Held(5, 0, b"\x01", 1.0, b"d" * 16)), encoded(1.0, 200)),
        (PartAverage(Held(-1, 0, b"\x01", 1.0, b"d" * 16)), encoded(1.0, 200)),
        (PartAverage(Held(0, 99, b"\x01", 1.0, b"d" * 16)), encoded(1.0, 200)),
        (PartAverage(Held(0, 0, b"\x01" * 9, 1.0, b"d" * 16)), encoded(1.0, 200)),
        *((PartAverage(Held(0, 0, b"\x01", weight, b"d" * 16)), encoded(1.0, 200)) for weight in NO_WEIGHTS),
        (PartAverage(Held(0, 0, b"\x0f", 1.0, b"d" * 16)), encoded(1.0, 200)),
        (PartAverage(HELD), encoded(1.0, 10)),
        (PartAverage(HELD), encoded(1.0, 1_000_000)),
        (PartAverage(HELD), encoded(math.nan, 200)),
        (PartData(0, 0, 1.0), encoded(1.0, 200)),
    ],
)
def test_absurd_averages_cost_their_reducer_its_place(message: Message, payload: bytes) -> None:
    """A reducer that gives nonsense is replaced, and the round goes on with the others: no internal error."""

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net, 200)
        await gather_group([a, b, c])
        served = asyncio.Event()

        async def nonsense(stream: Stream[Message, Message], opening: Reduce) -> None:
            await stream.send(message, payload or None)
            served.set()
            while (received := await stream.recv()) is not None:
                await stream.readinto(bytearray(received[1]))

        c.peer.endpoint.serve_stream(Reduce, nonsense)
        rounds = [member.round([a, b, c], [0, 0, 200]) for member in (a, b)]
        outcomes = await asyncio.gather(*(round_.run() for round_ in rounds))
        assert served.is_set()
        for member in (a, b):
            member.vector.overwrite()
            assert not member.peer.seen(Warned)
            assert {event.peer for event in member.peer.seen(PeerDropped)} == {c.peer.peer_id}
        assert torch.equal(values(a), torch.full((200,), 1.5))
        assert torch.equal(values(a), values(b))
        assert outcomes[0].left_out == (c.peer.peer_id,)
        await asyncio.gather(*(round_.close() for round_ in rounds))

    on_sim(scenario)


def test_strangers_and_unknown_rounds_are_refused() -> None:
    """A peer that is no member learns nothing of the round; the wait for an unknown round has an end."""

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net)
        stranger = await RoundPeer.make(net, "d", torch.zeros(NUMEL))
        await gather_group([a, b, c])
        rounds = [member.round([a, b, c], [1000, 0, 0]) for member in (a, b)]
        running = [asyncio.create_task(round_.run()) for round_ in rounds]
        await sleep(0.1)
        with pytest.raises(PeerRefused, match="not a member"):
            await (await speak(stranger, a)).recv()
        began = asyncio.get_running_loop().time()
        with pytest.raises(PeerRefused, match="no such round"):
            await (await speak(b, a, b"?" * 16)).recv()
        assert asyncio.get_running_loop().time() - began <= 11.0
        verdict = await stranger.peer.endpoint.call(a.peer.contact, AskVerdict(b"?" * 16), timeout_s=5.0)
        assert (verdict.commit, verdict.may_learn) == (None, False)
        await asyncio.gather(*running)
        await asyncio.gather(*(round_.close() for round_ in rounds))
        verdict = await stranger.peer.endpoint.call(a.peer.contact, AskVerdict(ROUND), timeout_s=5.0)
        assert verdict.commit is not None
        with pytest.raises(PeerRefused, match="over"):
            await (await speak(b, a)).recv()

    on_sim(scenario)


def test_early_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams for rounds that have not begun wait in limited number; afterwards a real member is early again."""
    monkeypatch.setattr("shoal.averaging.allreduce.table._MAX_EARLY_STREAMS", 512)

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net, 200)
        streams = []
        for number in range(12):
            other = ByHand(net.transport(f"h{number}"), a.peer.contact)
            streams += await together(*(other.open(Reduce(bytes([number, i]) * 8)) for i in range(60)))
        await sleep(0.5)
        assert a.table._early == 512
        await sleep(15.0)
        assert a.table._early == 0
        outcomes = await run_round([a, b, c], [200, 0, 0])
        assert not outcomes[0].left_out

    on_sim(scenario)


@pytest.mark.parametrize(
    "report",
    [
        Report(held=[Held(-1, 0, b"\x07", 3.0, b"d" * 16)]),
        Report(held=[Held(1 << 50, 0, b"\x07", 3.0, b"d" * 16)]),
        Report(held=[Held(0, -1, b"\x07", 3.0, b"d" * 16), Held(0, 1 << 50, b"\x07", 3.0, b"d" * 16)]),
        *(Report(held=[Held(0, 0, b"\x07", weight, b"d" * 16)]) for weight in NO_WEIGHTS),
        Report(lost=[-1, 7, 1 << 50, 2]),
        Report(moved_bytes=-(1 << 60)),
        Report(moved_bytes=1 << 60),
        Leave(),
    ],
)
def test_absurd_reports_do_not_stop_the_coordinator(report: Message) -> None:
    """What a member says of itself costs that member at most."""

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net, 200)
        await gather_group([a, b, c])
        rounds = [member.round([a, b, c], [200, 0, 0]) for member in (a, b)]
        running = [asyncio.create_task(round_.run()) for round_ in rounds]
        control = c.controls[a.peer.peer_id]
        for _ in range(3):
            await together(control.send(report))
        outcomes = await asyncio.gather(*running)
        assert outcomes[0].left_out == (c.peer.peer_id,)
        assert not a.peer.seen(Warned)
        await asyncio.gather(*(round_.close() for round_ in rounds))

    on_sim(scenario)


@pytest.mark.parametrize(
    "order",
    [
        Assign([-1, 5, 1 << 50], 1, 1),
        Assign([0], 1, 99),
        Assign([0], 1, -1),
        Gone(-1),
        Gone(1 << 62),
        Commit(b"another round!!!", []),
        Commit(ROUND, []),
        Commit(ROUND, [HELD] * 7),
        *(Commit(ROUND, [Held(0, 0, b"\x07", weight, b"d" * 16)]) for weight in NO_WEIGHTS),
        Commit(ROUND, [Held(1, 0, b"\x07", 3.0, b"d" * 16)]),
    ],
)
def test_absurd_orders_do_not_stop_a_member(order: Message) -> None:
    """A coordinator that talks nonsense is named, and counts as lost: the round fails at once, untouched."""

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net, 200)
        await gather_group([a, b, c])
        round_ = b.round([a, b, c], [0, 200, 0], options=RoundOptions(timeout_s=8.0))
        running = asyncio.create_task(round_.run())
        await a.controls[b.peer.peer_id].send(signed_by(a.table.identity, round_, order))
        with pytest.raises(RoundFailed, match="the coordinator was lost") as failure:
            async with asyncio.timeout(2.0):
                await running
        assert failure.value.peers == (a.peer.peer_id,)
        assert {event.peer for event in b.peer.seen(PeerDropped)} == {a.peer.peer_id}
        assert torch.equal(values(b), torch.full((200,), 2.0))
        assert not b.peer.seen(Warned)
        await round_.close(orderly=False)

    on_sim(scenario)


def test_a_weight_that_cannot_be_summed_is_refused_here() -> None:
    """Before anybody else has to refuse it."""

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net)
        for weight in (-1.0, math.nan, math.inf, 1e-300, 1e13):
            with pytest.raises(ConfigError, match="weight"):
                a.round([a, b, c], [1000, 0, 0], weight=weight)

    on_sim(scenario)


def test_what_is_read_on_a_stream_is_what_was_sent() -> None:
    """An average is encoded once: members with a lossy codec receive the same bytes, whose digest was named."""

    async def scenario(net: SimNet) -> None:
        codec = Float16Compression()
        group = [await RoundPeer.make(net, n, torch.linspace(i, i + 1, 700), codec) for i, n in enumerate("abc")]
        await run_round(group, [300, 200, 200])
        assert torch.equal(values(group[0]), values(group[1]))
        assert torch.equal(values(group[0]), values(group[2]))

    on_sim(scenario)


def test_frames_of_a_round_by_hand() -> None:
    """What a reducer answers, byte for byte: an average with its payload."""

    async def scenario(net: SimNet) -> None:
        a, b, c = await three(net, 200)
        await gather_group([a, b, c])
        rounds = [member.round([a, b, c], [200, 0, 0]) for member in (a, b)]
        running = [asyncio.create_task(round_.run()) for round_ in rounds]
        await c.peer.endpoint.close()
        hand = ByHand(net.transport("c"), a.peer.contact)
        stream = await hand.open(Reduce(ROUND))
        frame = await read_frame(stream, a.peer.endpoint.limits)
        average = decode(frame.header, PartAverage)
        assert (frame.kind, frame.payload_bytes) == (Kind.DATA, 800)
        assert (average.held.tile, average.held.attempt, average.held.contributors) == (0, 0, b"\x03")
        payload = bytearray(800)
        await stream.readinto(payload)
        assert bytes(payload) == encoded(1.5, 200)
        await asyncio.gather(*running)
        await hand.close()
        await asyncio.gather(*(round_.close() for round_ in rounds))

    on_sim(scenario)


def test_after_the_commit_only_who_was_asked_can_leave_a_member_without() -> None:
    """It was left out, and one of the others gives it the averages, slowly: that a third one goes costs nothing."""

    async def scenario(net: SimNet) -> None:
        loop = asyncio.get_running_loop()
        b = await RoundPeer.make(net, "b", torch.full((200,), 2.0))
        a, c = await net.peer("a"), await net.peer("c")
        said, payload = [Held(tile, 0, b"\x05", 2.0, b"") for tile in range(2)], encoded(1.5, 100)
        averages = [replace(held, digest=TileDigests(ROUND).of(held, payload)) for held in said]

        async def give_slowly(stream: Stream[Message, Message], opening: Reduce) -> None:
            while (received := await stream.recv()) is not None:
                message, nbytes = received
                await stream.readinto(bytearray(nbytes))
                if isinstance(message, PartRequest):
                    await sleep(3.0)
                    await stream.send(PartAverage(averages[message.tile]), payload)

        async def give_nothing(stream: Stream[Message, Message], opening: Reduce) -> None:
            while (received := await stream.recv()) is not None:
                await stream.readinto(bytearray(received[1]))
                # Of older attempts, or never asked for here: of no interest to anybody.
                await stream.send(PartAbsent(0, 1))

        async def wait(stream: Stream[Message, Message], opening: OpenControl) -> None:
            await sleep(60.0)

        a.endpoint.serve_stream(Reduce, give_slowly)
        c.endpoint.serve_stream(Reduce, give_nothing)
        a.endpoint.serve_stream(OpenControl, wait)
        b.controls[a.peer_id] = await b.peer.endpoint.open(a.contact, OpenControl(), timeout_s=5.0)
        b.vector.copy_in()
        group = Group(
            round_id=ROUND,
            members=tuple(Member(each.contact, True, None, b"\xc0") for each in (a, b.peer, c)),
            my_index=1,
            coordinator=0,
            shares=(100, 0, 100),
            tile_bytes=1024,
            controls=b.controls,
            on_release=lambda: None,
        )
        options = RoundOptions(silence_s=10.0, timeout_s=60.0)
        round_ = Round(b.table, group, b.vector, weight=1.0, options=options)
        running = asyncio.create_task(round_.run())
        await sleep(1.0)
        assert round_.obey(signed_by(net.swarm.identity("a"), round_, Commit(ROUND, averages)))
        await sleep(0.5)
        net.swarm.crash("c")
        outcome = await running
        assert outcome.left_out == (b.peer.peer_id,)
        assert 5.0 < loop.time() < 15.0
        b.vector.overwrite()
        assert values(b).tolist() == [1.5] * 200
        await round_.close(orderly=False)

    on_sim(scenario)


def test_reports_that_say_nothing_new_do_not_pile_up() -> None:
    """However often a reducer says that it has nothing, while the coordinator's line is slow. What is held is told."""
    members = [Member(Contact(PeerID(bytes([index]) * 32)), True, None, b"", True) for index in range(3)]
    machine = MemberMachine(ROUND, 2, 0, members, [1, 1], silence_s=5.0, now=0.0)
    machine.rules.averaged(HELD)
    for _ in range(1000):
        machine.source_lost(1, PartAbsent(1, 0))
    assert machine.report(0) == Report([HELD], [1], 0)
    assert machine.report(0) == Report()


def test_averages_that_come_close_together_are_told_together() -> None:
    """Twenty tiles within a second, one after another: one report for several. The last one waits for nothing."""

    async def scenario(net: SimNet) -> None:
        group = [await RoundPeer.make(net, name, torch.full((20_480,), i + 1.0)) for i, name in enumerate("ab")]
        net.swarm.network.set_link("a", "b", latency_s=0.001, bandwidth_bytes_s=40_000.0)
        await gather_group(group)
        rounds = [each.round(group, [10_240, 10_240], tile_bytes=4096) for each in group]
        reports: list[list[tuple[float, Report]]] = [[], []]
        for round_, said in zip(rounds, reports, strict=True):
            round_.machine.report = partial(_noted, round_.machine.report, said)  # type: ignore[method-assign]
        await asyncio.gather(*(round_.run() for round_ in rounds))
        ended_at = asyncio.get_running_loop().time()
        for said in reports:
            full = [(at, report.held) for at, report in said if report.held]
            assert len(full) < 16 < sum(len(held) for _, held in full) == 20
            assert ended_at - full[-1][0] < 0.04
        await asyncio.gather(*(round_.close() for round_ in rounds))

    on_sim(scenario)


def _noted(report: Callable[[int], Report], said: list[tuple[float, Report]], moved_bytes: int) -> Report:
    said.append((asyncio.get_running_loop().time(), made := report(moved_bytes)))
    return made


# ------------------------------------------------------------------------------------------ who led badly, who was late


async def judged(net: SimNet, weights: Sequence[float], lead: Callable[[Round], None]) -> list[Round]:
    """The rounds of three members, after the first one has led as `lead` makes it."""
    group = await three(net)
    await gather_group(group)
    rounds = [each.round(group, (400, 300, 300), weight=w) for each, w in zip(group, weights, strict=True)]
    lead(rounds[0])
    await asyncio.gather(*(round_.run() for round_ in rounds), return_exceptions=True)
    for round_ in rounds:
        await round_.close()
    return rounds


def test_a_coordinator_that_aborts_has_led_badly_for_those_that_gave() -> None:
    """Else it can lead each round, and abort it at once. Where all weights are 0, there was nothing else to do."""

    async def scenario(net: SimNet) -> None:
        def lead(round_: Round) -> None:
            asyncio.get_running_loop().call_later(0.001, round_.give_up, "no")

        rounds = await judged(net, [1.0, 1.0, 0.0], lead)
        assert [round_.seen().led_badly for round_ in rounds] == [False, True, False]

    on_sim(scenario)


@pytest.mark.parametrize("late", [False, True])
def test_a_coordinator_that_decides_far_too_late_has_led_badly(late: bool) -> None:
    """It could wait up to the end of the time of each round. The time for a member that stands still is allowed.

    After that the others give it up, and the round fails.
    """

    async def scenario(net: SimNet) -> None:
        def lead(round_: Round) -> None:
            loop, coordinator = asyncio.get_running_loop(), round_._coordinating
            assert coordinator is not None
            decide, until = coordinator._decide, loop.time() + OPTIONS.silence_s * (5.0 if late else 2.0)
            coordinator._decide = lambda: decide() if loop.time() >= until else []  # type: ignore[method-assign]

        rounds = await judged(net, [1.0, 1.0, 1.0], lead)
        assert [round_.machine.rules.succeeded for round_ in rounds[1:]] == [not late] * 2
        assert [round_.seen().led_badly for round_ in rounds] == [False, late, late]

    on_sim(scenario)
