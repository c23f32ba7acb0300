"""Every field of every message with extremes, from each role, to a real peer.

What is asked of the peer: its loop answers within a second, and no turn takes more lines than so many bytes may cost
(`tests.cost`); what it keeps is bounded; the round, or the run, goes on; and a sender whose message no honest peer can
have sent is dropped by name, or its call is answered `bad`. A peer that counts up to a number from the network does not
answer: then the test does not end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from shoal import sim
from shoal.averaging.allreduce.round import Round
from shoal.errors import PeerError, PeerProtocolError, PeerRefused
from shoal.events import Event, PeerDropped, Warned
from shoal.protocol import wire
from shoal.rpc.framing import Kind, Limits, pack
from shoal.rpc.serving import tag_of
from tests.cost import Turns, most_lines
from tests.property.test_wire import MESSAGES
from tests.sim.optimizer_kit import Run
from tests.sim.round_kit import OPTIONS, ROUND
from tests.sim.rpc_kit import ByHand, Net, Said, Say, SimNet, echo, ends, on_sim, on_tcp
from tests.sim.test_hostile_words import liar
from tests.sim.test_lying_members import members, named, played
from tests.wire_extremes import extremes, replaced

HELD = [wire.Held(tile, 0, b"\x07", 3.0, b"d" * 16) for tile in range(3)]
SHOWN = wire.Shown(2, wire.Report([HELD[2]], signature=b"s" * 64))
LED = [wire.Assign([0], 1, 1), wire.Gone(2), SHOWN, wire.Commit(ROUND, HELD, b"s" * 64), wire.Abort(ROUND, "no")]
TOLD = wire.CommitDigest(b"d" * 32, b"s" * 64)
REPORTED = [wire.Report([HELD[1]], [2], 100)]
SENT = [wire.PartData(0, 0, 1.0), wire.PartRequest(0, 0), TOLD]
GIVEN = [wire.PartAverage(HELD[2]), wire.PartAbsent(2, 0), TOLD]

OTHERS = 20_000
"""Lines of a turn that do not depend on the message: 5,000 are the most that was seen."""

Case = tuple[wire.Message, str, Any]


def cases(messages: Sequence[wire.Message]) -> list[Case]:
    """Each field of these with each extreme, as long as the message fits into a frame."""
    found = [(message, name, value) for message in messages for name, value in extremes(message)]
    return [case for case in found if len(replaced(*case)) < Limits().header_bytes - 1024]


def decodes(message: wire.Message, name: str, value: Any) -> bool:
    """Whether an honest peer could have sent it, as far as the type says."""
    try:
        wire.decode(replaced(message, name, value), type(message))
    except msgspec.MsgspecError:
        return False
    return True


def led(rounds: list[Round], data: msgspec.Raw) -> None:
    """The leader says it to the second member."""
    rounds[0]._control._to_say[1].put_nowait(data)  # type: ignore[arg-type]


def reported(rounds: list[Round], data: msgspec.Raw) -> None:
    """The second member reports it to the leader."""
    rounds[1].machine.report = lambda moved_bytes: data  # type: ignore[method-assign, assignment, return-value]
    rounds[1].machine.has_made = lambda report: False  # type: ignore[method-assign]


def sent(rounds: list[Round], data: msgspec.Raw) -> None:
    """The second member sends it to each reducer in place of its values."""
    contribution = rounds[1]._tiles.contribution

    def lying(number: int, attempt: int) -> Any:
        honest = contribution(number, attempt)
        return (data, honest[1]) if honest is not None else None

    rounds[1]._tiles.contribution = lying  # type: ignore[method-assign]


def given(rounds: list[Round], data: msgspec.Raw) -> None:
    """The third member gives it as the average of its tile."""
    average = rounds[2]._tiles.average

    async def lying(number: int) -> Any:
        honest = await average(number)
        return (data, honest[1]) if honest is not None else None

    rounds[2]._tiles.average = lying  # type: ignore[method-assign]


ROLES: dict[str, tuple[list[wire.Message], Callable[[list[Round], msgspec.Raw], None], int, list[int]]] = {
    "leader": ([*LED], led, 0, [1]),
    "follower": ([*REPORTED], reported, 1, [0]),
    "contributor": ([*SENT], sent, 1, [0, 2]),
    "reducer": ([*GIVEN], given, 2, [0, 1]),
}
"""What a member can say in this role, how, which member it is, and to whom it says it."""


async def play(net: SimNet, role: str, case: Case, number: int) -> None:
    """One round in which a member says this."""
    _, lie, liar_index, victims = ROLES[role]
    group = await members(net, names=[f"{number}-{index}" for index in range(3)])
    data = msgspec.Raw(replaced(*case))
    options = replace(OPTIONS, silence_s=0.5, report_s=0.2, timeout_s=10.0)
    began = asyncio.get_running_loop().time()
    with (turns := Turns()).counted():
        ends = await played(group, lambda rounds: lie(rounds, data), options=options)
    assert turns.most < most_lines(len(replaced(*case)), OTHERS), (role, case, turns.most)
    assert len(ends) == 3
    assert asyncio.get_running_loop().time() - began < 30.0
    accused = [named(group[victim]) for victim in victims]
    liar_id = group[liar_index].peer.peer_id
    if not decodes(*case):
        assert all(liar_id in names for names in accused), (role, case, ends)
    for each in group:
        assert not each.peer.seen(Warned), (role, case, each.peer.seen(Warned))
        await each.peer.endpoint.close()


def some(found: list[Case], count: int) -> Iterator[Case]:
    """So many of them; the same in each run."""
    yield from random.Random(7).sample(found, min(count, len(found)))


@pytest.mark.parametrize("role", ROLES)
def test_an_extreme_in_a_round_is_refused_by_name(role: str) -> None:
    """From each role: a sample of the fields and extremes."""

    async def scenario(net: SimNet) -> None:
        for number, case in enumerate(some(cases(ROLES[role][0]), 12)):
            await play(net, role, case, number)

    on_sim(scenario)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("role", ROLES)
def test_every_extreme_in_a_round_is_refused_by_name(role: str, soak: Callable[[int, int], int]) -> None:
    """All of them."""

    async def scenario(net: SimNet) -> None:
        for number, case in enumerate(some(cases(ROLES[role][0]), soak(24, 10_000))):
            await play(net, role, case, number)

    on_sim(scenario)


async def say_all(said: Sequence[Case], victim: Any, stranger: Any) -> None:
    """A stranger says each of these in each way in which a peer can speak, and looks whether the victim answers."""
    for message, name, value in said:
        body = replaced(message, name, value)
        with (turns := Turns()).counted():
            answered_s = await say(tag_of(type(message)), msgspec.Raw(body), victim, stranger)
        assert answered_s < 1.0, (message, name, value)
        assert turns.most < most_lines(len(body), OTHERS), (message, name, turns.most)


async def say(tag: str, body: msgspec.Raw, victim: Any, stranger: Any) -> float:
    """Say it in each way; returns how long it took until another call was answered, seconds."""
    endpoint, contact = stranger.core.endpoint, victim.participant.core.endpoint.contact
    for frame in (
        pack(Kind.CALL, body),
        pack(Kind.CALL, wire.Call(1, tag, 5.0, body)),
        pack(Kind.CALL, wire.Note(tag, body)),
    ):
        link = await endpoint._dialer.link(contact.peer, 5.0)
        link.tell(frame)
    link = await endpoint._dialer.link(contact.peer, 5.0)
    connection = await endpoint._dialer.stream_connection(contact.peer, 5.0, bulk=False)
    await connection.write(pack(Kind.OPEN, wire.OpenStream(tag, body)))
    began = asyncio.get_running_loop().time()
    try:
        await endpoint.call(contact, wire.DhtPing(), timeout_s=5.0)
    except PeerRefused:
        pass  # asked too often: it has answered
    except PeerError:
        await endpoint.call(contact, wire.DhtPing(), timeout_s=5.0)  # the link was lost, and is dialed anew
    connection.abort()
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize(
    "count", [80, pytest.param(10_000, marks=[pytest.mark.long(full=True), pytest.mark.timeout(3600)])]
)
def test_an_extreme_of_a_stranger_costs_the_run_nothing(count: int) -> None:
    """Every message, in every way in which it can be said, to a peer that trains with another."""
    seen = list[Event]()

    async def main() -> None:
        run = Run(target=8)
        for name in ("p0", "p1"):
            await run.add(name, events=seen.append)
        victim, stranger = run.trainers["p0"], await liar(run, "liar")
        tasks = [
            run.swarm.spawn(name, trainer.train(4, duration_s=0.5, until=lambda: False))
            for name, trainer in run.trainers.items()
        ]
        await sim.sleep(5.0)
        epoch = victim.participant.epoch
        await say_all(list(some(cases(MESSAGES), count)), victim, stranger)
        await sim.sleep(10.0)
        assert not any(task.done() for task in tasks)
        assert victim.participant.epoch >= epoch + 5
        assert not [event for event in seen if isinstance(event, Warned) and "internal" in event.message]
        assert not [event for event in seen if isinstance(event, Warned) and event.where.startswith(("call", "note"))]
        dropped = {event.peer for event in seen if isinstance(event, PeerDropped)}
        assert dropped == {stranger.core.peer_id}
        await stranger.core.endpoint.close()
        await sim.sleep(10.0)
        endpoint = victim.participant.core.endpoint
        assert stranger.core.peer_id not in endpoint._open.peers
        assert len(endpoint._open.connections) < 40

    sim.run(main, seed=5)


def test_an_extreme_in_a_reply_costs_the_answerer_its_link() -> None:
    """A DHT node, a donor, a keeper, a member that is asked for a verdict: what does not decode is named, at once."""
    asked: dict[type[wire.Message], wire.Request[Any]] = {
        wire.reply_type(type(message)): message for message in MESSAGES if isinstance(message, wire.Request)
    }
    asked[wire.ManifestReply] = wire.GetManifest("run")

    async def scenario(net: SimNet) -> None:
        victim, other = await net.peer("victim"), await net.peer("answerer")
        wrong = cases([message for message in MESSAGES if type(message) in asked])
        for case in some([case for case in wrong if not decodes(*case)], 60):
            request = asked[type(case[0])]
            data = msgspec.Raw(replaced(*case))
            stop = other.endpoint.serve(type(request), lambda *_, data=data: data, scope=request.scope)
            before = len(victim.seen(PeerDropped))
            with (turns := Turns()).counted(), pytest.raises(PeerProtocolError):
                await victim.endpoint.call(other.contact, request, timeout_s=1.0)
            assert turns.most < most_lines(len(replaced(*case)), OTHERS), (case, turns.most)
            assert len(victim.seen(PeerDropped)) == before + 1, case
            stop()
            await sim.sleep(0.1)  # the link ends
        assert {event.peer for event in victim.seen(PeerDropped)} == {other.peer_id}

    on_sim(scenario)


def test_an_extreme_over_real_sockets_costs_its_sender_its_link() -> None:
    """A sample of those on call links: what does not decode ends the link, by name; the peer answers others at once."""

    async def scenario(net: Net) -> None:
        victim, other = await net.peer("victim"), await net.peer("other")
        victim.endpoint.serve(Say, echo)
        hand = ByHand(net.transport("hand"), victim.contact)
        spoken = [
            message for message in MESSAGES if isinstance(message, wire.Call | wire.Beat | wire.BeatReply | wire.Hello)
        ]
        wrong = [case for case in cases(spoken) if not decodes(*case)]
        for case in some(wrong, 12):
            link = await hand.link()
            kind = Kind.HELLO if isinstance(case[0], wire.Hello) else Kind.CALL
            await link.write(pack(kind, msgspec.Raw(replaced(*case))))
            async with asyncio.timeout(10.0):
                assert await ends(link), case
            assert await other.endpoint.call(victim.contact, Say("x"), timeout_s=10.0) == Said("x")
        assert {event.peer for event in victim.seen(PeerDropped)} == {hand.transport.peer_id}
        assert not victim.seen(Warned)
        await hand.close()

    on_tcp(scenario)


def test_the_extremes_reach_every_field() -> None:
    """A message that is added is sent with extremes, too."""
    reached = {(type(message), name) for message, name, _ in cases(MESSAGES)}
    fields = {(type(message), name) for message in MESSAGES for name in type(message).__struct_fields__}
    assert reached == fields
