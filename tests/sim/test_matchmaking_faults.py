"""Groups form although peers die, vanish, give up, lie or cannot read the directory; and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.averaging.matchmaking import Group
from shoal.base.peer import Address, PeerID
from shoal.errors import PeerError, PeerUnreachable, RoundFailed
from shoal.events import PeerDropped, PeerLost, Warned
from shoal.protocol.wire import (
    Begin,
    Contact,
    Join,
    JoinAccepted,
    JoinRedirected,
    JoinRefused,
    Leave,
    Member,
    Report,
)
from shoal.rpc import Endpoint, Stream
from shoal.sim import Crash, FaultPlan, Partition, Slow, Stall, Vanish, run, sleep
from tests.sim.matchmaking_kit import (
    KEY,
    NUMEL,
    Fleet,
    Mate,
    View,
    failure,
    groups_of,
    outcomes,
    released,
)
from tests.strategies import fault_plans


def names(count: int) -> list[str]:
    """Names of this many peers."""
    return [f"p{number}" for number in range(count)]


async def leader_of(mates: Sequence[Mate], *, followers: int) -> Mate:
    """Wait until one of them has this many followers."""
    while True:
        for mate in mates:
            search = mate.matchmaker._search
            if search is not None and len(search.machine.followers) == followers:
                return mate
        await sleep(0.001)


# ------------------------------------------------------------------------------------------------------ peers that die


@pytest.mark.parametrize("seed", range(4))
def test_followers_of_a_leader_that_crashes_go_on_at_once(seed: int) -> None:
    """The others form a group without it, within a second."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(4), target_group_size=4)
        loop = asyncio.get_running_loop()
        tasks = {mate.name: fleet.call(mate) for mate in mates[:3]}
        leader = await leader_of(mates, followers=2)
        fleet.swarm.crash(leader.name)
        crashed_at = loop.time()
        del tasks[leader.name]
        ends = await outcomes(tasks)
        assert groups_of(ends) == [set(tasks)]
        assert loop.time() - crashed_at < 1.5
        released(ends)
        await fleet.close()

    run(main(), seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_followers_of_a_leader_that_falls_silent_go_on_after_the_heartbeat(seed: int) -> None:
    """Nothing closes when a machine vanishes; its silence is noticed."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(4), target_group_size=4)
        loop = asyncio.get_running_loop()
        tasks = {mate.name: fleet.call(mate, window_s=20.0) for mate in mates[:3]}
        leader = await leader_of(mates, followers=2)
        fleet.swarm.vanish(leader.name)
        gone_at = loop.time()
        del tasks[leader.name]
        ends = await outcomes(tasks)
        assert groups_of(ends) == [set(tasks)]
        assert loop.time() - gone_at < 9.0
        released(ends)
        await fleet.close()

    run(main(), seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_follower_that_crashes_after_it_joined_is_left_out(seed: int) -> None:
    """The group of the others starts, and does not name it."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(4), target_group_size=4)
        tasks = {mate.name: fleet.call(mate) for mate in mates[:3]}
        leader = await leader_of(mates, followers=2)
        victim = next(mate for mate in mates[:3] if mate is not leader)
        fleet.swarm.crash(victim.name)
        del tasks[victim.name]
        ends = await outcomes(tasks)
        assert groups_of(ends) == [set(tasks)]
        for end in ends.values():
            assert isinstance(end, Group)
            assert victim.peer not in end.peers
        released(ends)
        await fleet.close()

    run(main(), seed=seed)


def test_declared_peer_that_is_gone_does_not_hold_up_the_group() -> None:
    """Its declaration stands in the directory, but it is found to be dead."""

    async def main(*, vanish: bool) -> float:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(4))
        ghost = fleet.call(mates[0], window_s=60.0)
        await sleep(0.1)
        (fleet.swarm.vanish if vanish else fleet.swarm.crash)("p0")
        ghost.cancel()
        loop = asyncio.get_running_loop()
        began = loop.time()
        ends = await outcomes({mate.name: fleet.call(mate, window_s=20.0) for mate in mates[1:]})
        assert groups_of(ends) == [{"p1", "p2", "p3"}]
        released(ends)
        await fleet.close()
        return loop.time() - began

    for seed in range(3):
        assert run(main(vanish=False), seed=seed) < 1.0
        # Nobody answers and nothing is refused: one request timeout, 3 s, before the next one is asked.
        assert run(main(vanish=True), seed=seed) < 6.0


def test_peer_that_is_connected_again_is_not_lost() -> None:
    """It has declared nothing since that we have read, and may be the leader that others send us to."""

    async def main() -> None:
        fleet = Fleet.launch()
        one, other = await fleet.add(*names(2))
        released(await outcomes({mate.name: fleet.call(mate) for mate in (one, other)}))
        fleet.swarm.partition([["p0"], ["p1"]])
        await sleep(30.0)
        assert list(one.matchmaker._memory.lost) == [other.peer]
        fleet.swarm.heal()
        one.endpoint.dial_ahead(other.peer, link=True)
        await sleep(0.2)
        assert not one.matchmaker._memory.lost
        assert not other.matchmaker._memory.lost
        await fleet.close()

    run(main(), seed=1)


def test_leader_that_dies_right_after_begin_leaves_broken_controls() -> None:
    """Begin is final with its first copy: who got it holds the group and sees that the coordinator is gone."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(3), target_group_size=3)
        tasks = {mate.name: fleet.call(mate) for mate in mates}
        ends: dict[str, Group | BaseException] = {}
        while not any(task.done() for task in tasks.values()):
            await sleep(0.0005)
        leader = next(name for name, task in tasks.items() if task.done())
        fleet.swarm.crash(leader)
        del tasks[leader]
        ends = await outcomes(tasks)
        for end in ends.values():
            if isinstance(end, Group):
                (control,) = end.controls.values()
                with pytest.raises(PeerError):
                    await control.recv()
        released(ends)
        await fleet.close()

    for seed in range(3):
        run(main(), seed=seed)


def test_member_that_dies_at_begin_is_a_dead_member() -> None:
    """The coordinator's stream to it breaks; the others have the same group."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(3), target_group_size=3)
        tasks = {mate.name: fleet.call(mate) for mate in mates}
        while not any(task.done() for task in tasks.values()):
            await sleep(0.0005)
        leader = next(name for name, task in tasks.items() if task.done())
        victim = next(name for name in tasks if name != leader)
        fleet.swarm.crash(victim)
        del tasks[victim]
        ends = await outcomes(tasks)
        group = ends[leader]
        assert isinstance(group, Group)
        assert len(group.members) == 3
        with pytest.raises(PeerError):
            await group.controls[fleet.mates[victim].peer].recv()
        released(ends)
        await fleet.close()

    run(main(), seed=1)


def test_idle_links_are_not_taken_for_dead_when_they_get_busy() -> None:
    """Peers that were silent with each other between two groups, as is usual, meet again without a loss."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(4), target_group_size=4)
        for pause_s in (8.0, 9.5, 29.0):
            ends = await outcomes({mate.name: fleet.call(mate, after_s=0.1 * i) for i, mate in enumerate(mates)})
            assert groups_of(ends) == [set(names(4))]
            await sleep(2.0)  # in the group: watched closely
            released(ends)
            await sleep(pause_s)
        assert not [event for mate in mates for event in mate.events if isinstance(event, PeerLost)]
        await fleet.close()

    run(main(), seed=2)


# -------------------------------------------------------------------------------------------------- peers that give up


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_cancelled_search_leaves_nothing_behind(who: str) -> None:
    """The others are told at once, the declaration is withdrawn, and no task stays."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(4), target_group_size=4)
        loop = asyncio.get_running_loop()
        tasks = {mate.name: fleet.call(mate) for mate in mates[:3]}
        leader = await leader_of(mates, followers=2)
        quitter = leader if who == "leader" else next(mate for mate in mates[:3] if mate is not leader)
        began = loop.time()
        tasks.pop(quitter.name).cancel()
        ends = await outcomes(tasks)
        assert groups_of(ends) == [set(tasks)]
        assert loop.time() - began < 1.5
        assert not quitter.matchmaker._tasks
        assert quitter.peer not in fleet.directory.entries[KEY]
        released(ends)
        await sleep(0.5)
        for mate in mates:
            assert not mate.matchmaker._tasks
            assert not mate.matchmaker._requests
            assert not [event for event in mate.events if isinstance(event, Warned)]
        await fleet.close()

    for seed in range(3):
        run(main(), seed=seed)


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.005, 0.012, 0.02, 0.03, 0.04])
def test_cancelled_at_any_moment_the_next_search_works(after_s: float) -> None:
    """A search may be cancelled while it declares, reads, asks, follows or begins."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(3), target_group_size=3)
        tasks = [fleet.call(mate) for mate in mates]
        await sleep(after_s)
        tasks[0].cancel()
        await sleep(0.2)
        tasks[1].cancel()
        tasks[2].cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is None:
                task.result().release()
        await sleep(1.0)
        ends = await outcomes({mate.name: fleet.call(mate) for mate in mates})
        assert groups_of(ends) == [set(names(3))]
        released(ends)
        await fleet.close()
        assert fleet.directory.entries[KEY] == {}

    for seed in range(3):
        run(main(), seed=seed)


def test_windows_go_on_until_the_deadline() -> None:
    """Alone, a peer declares anew window after window; whoever comes late still finds it."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(2))
        tasks = {
            "p0": fleet.call(mates[0], window_s=1.0, deadline_s=30.0),
            "p1": fleet.call(mates[1], after_s=7.3, window_s=1.0, deadline_s=30.0),
        }
        ends = await outcomes(tasks)
        assert groups_of(ends) == [{"p0", "p1"}]
        released(ends)
        await fleet.close()

    run(main(), seed=3)


def test_directory_that_does_not_answer_is_named() -> None:
    """Neither a hang nor a crash: `RoundFailed` after the window, and it works again when the directory does."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(2))
        fleet.directory.broken = True
        ends = await outcomes({mate.name: fleet.call(mate, window_s=1.0) for mate in mates})
        assert all("could not read who is looking" in str(failure(end)) for end in ends.values())
        fleet.directory.broken = False
        ends = await outcomes({mate.name: fleet.call(mate) for mate in mates})
        assert groups_of(ends) == [{"p0", "p1"}]
        released(ends)
        await fleet.close()

    run(main(), seed=4)


def test_directory_that_hangs_holds_nobody_up() -> None:
    """A declaration, a read or a withdrawal that never returns is given up after the request timeout."""

    async def main() -> None:
        fleet = Fleet.launch(latency_s=0.002)
        mates = await fleet.add(*names(2), request_timeout_s=0.5)
        fleet.directory.latency_s = 1000.0
        loop = asyncio.get_running_loop()
        began = loop.time()
        ends = await outcomes({mate.name: fleet.call(mate, window_s=2.0) for mate in mates})
        for end in ends.values():
            failure(end)
        assert loop.time() - began < 2.6
        await fleet.close()
        assert loop.time() - began < 6.0

    run(main(), seed=5)


@pytest.mark.parametrize(("failures", "told"), [(2, 0), (9, 1)])
def test_a_withdrawal_that_fails_at_first_is_no_warning(
    failures: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that was stopped finds its links broken: it warned of a declaration that it withdraws a moment later."""
    tries, withdraw = list[str](), View.withdraw

    async def withdraw_late(view: View, group_key: str) -> None:
        tries.append(group_key)
        if len(tries) <= failures:
            raise PeerUnreachable("no DHT node took the withdrawal")
        await withdraw(view, group_key)

    monkeypatch.setattr(View, "withdraw", withdraw_late)

    async def main() -> None:
        fleet = Fleet.launch()
        (mate,) = await fleet.add("mate")
        await outcomes({"mate": fleet.call(mate, window_s=1.0)})
        await sleep(10.0)
        assert len(tries) == 3
        warned = [event.message for event in mate.events if isinstance(event, Warned)]
        assert len(warned) == told
        assert all("others may ask this peer in vain" in text for text in warned)
        await fleet.close()

    run(main(), seed=5)


@pytest.mark.parametrize("where", ["plan", "expected"])
def test_failing_callback_surfaces_to_the_caller(where: str) -> None:
    """What the averager's own functions raise comes out of `form_group`; the others are not stuck."""

    class MineError(Exception):
        """Something of the caller's own."""

    def fail(*_: object) -> Any:
        raise MineError

    async def main() -> None:
        fleet = Fleet.launch()
        options: dict[str, Any] = {} if where == "expected" else {where: fail}
        (broken,) = await fleet.add("p0", **options)
        mates = await fleet.add("p1", "p2")
        more: dict[str, Any] = {"expected": fail} if where == "expected" else {}
        tasks = {"p0": fleet.call(broken, window_s=2.0, **more)}
        tasks |= {mate.name: fleet.call(mate, after_s=0.1, window_s=2.0) for mate in mates}
        ends = await outcomes(tasks)
        assert isinstance(ends["p0"], MineError)
        assert groups_of({name: end for name, end in ends.items() if name != "p0"}) == [{"p1", "p2"}]
        released(ends)
        await fleet.close()

    run(main(), seed=6)


# ------------------------------------------------------------------------------------------------------- peers that lie


def honest(mate: Endpoint, **changes: Any) -> Join:
    """A Join as a well-behaved peer would send it, and then changed."""
    member = Member(mate.contact, True, None, b"")
    return msgspec.structs.replace(Join(KEY, b"schema", {}, 1.8e9, member), **changes)


async def stranger(fleet: Fleet, name: str = "evil") -> Endpoint:
    """A peer without a matchmaker."""
    await fleet.add(name)
    mate = fleet.mates[name]
    await mate.matchmaker.close()
    return mate.endpoint


def lying_joins(evil: Endpoint, other: Contact) -> dict[str, Join]:
    """What a peer could claim when it asks."""
    address = Address("elsewhere", 1, other.peer)
    mine = evil.contact
    return {
        "another peer's name": honest(evil, member=Member(other, True, None, b"")),
        "another peer's address": honest(evil, member=Member(Contact(mine.peer, (address,)), True, None, b"")),
        "no time": honest(evil, expiration=float("nan")),
        "endless": honest(evil, expiration=float("inf")),
        "negative bandwidth": honest(evil, member=Member(mine, True, -1.0, b"")),
        "bandwidth nan": honest(evil, member=Member(mine, True, float("nan"), b"")),
        "reduces without bandwidth": honest(evil, member=Member(mine, True, 0.0, b"")),
        "reduces without address": honest(evil, member=Member(Contact(mine.peer), True, None, b"")),
        "neither contributes nor reduces": honest(evil, member=Member(mine, False, None, b"", contributes=False)),
        "no schema": honest(evil, schema=b""),
        "gathered too long": honest(evil, member=Member(mine, True, None, bytes(65537))),
    }


def test_lying_joins_cost_the_liar_its_place_only() -> None:
    """None of them is accepted, none disturbs the group, none is an internal error."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(3), target_group_size=3)
        evil = await stranger(fleet)
        tasks = {mate.name: fleet.call(mate) for mate in mates[:2]}
        leader = await leader_of(mates[:2], followers=1)
        answers: dict[str, object] = {}
        for what, join in lying_joins(evil, mates[2].endpoint.contact).items():
            stream = await evil.open(leader.endpoint.contact, join, timeout_s=1.0)
            try:
                answers[what] = await stream.recv()
            except PeerError:
                stream.abort()
        assert answers == {}
        assert len([event for event in leader.events if isinstance(event, PeerDropped)]) >= 9
        ends = await outcomes(tasks | {"p2": fleet.call(mates[2])})
        assert groups_of(ends) == [set(names(3))]
        assert not [event for mate in mates for event in mate.events if isinstance(event, Warned)]
        released(ends)
        await fleet.close()

    run(main(), seed=7)


@pytest.mark.parametrize("what", ["report", "payload", "end", "twice"])
def test_follower_out_of_turn_is_left_out(what: str) -> None:
    """What has no place before Begin ends the follower's place, quietly; asking twice counts once."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(3), target_group_size=3)
        evil = await stranger(fleet)
        tasks = {mate.name: fleet.call(mate, window_s=20.0) for mate in mates[:1]}
        await sleep(0.1)
        stream = await evil.open(mates[0].endpoint.contact, honest(evil), timeout_s=1.0)
        assert await stream.recv() == (JoinAccepted(), 0)
        if what == "report":
            await stream.send(Report())
        elif what == "payload":
            await stream.send(Leave(), b"surprise")
        elif what == "end":
            await stream.end()
        else:
            again = await evil.open(mates[0].endpoint.contact, honest(evil), timeout_s=1.0)
            assert await again.recv() == (JoinAccepted(), 0)
            await again.send(Leave())
        await sleep(0.05)
        assert mates[0].matchmaker._search is not None
        assert mates[0].matchmaker._search.machine.followers == ()
        ends = await outcomes(tasks | {mate.name: fleet.call(mate) for mate in mates[1:]})
        assert groups_of(ends) == [set(names(3))]
        assert not [event for mate in mates for event in mate.events if isinstance(event, Warned)]
        released(ends)
        await fleet.close()

    run(main(), seed=8)


def test_many_streams_of_one_peer_do_not_fill_the_group() -> None:
    """Each new stream replaces the last one."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(2), target_group_size=3)
        evil = await stranger(fleet)
        tasks = {"p0": fleet.call(mates[0], expected=lambda: frozenset({mates[1].peer}))}
        await sleep(0.1)
        for _ in range(200):
            stream = await evil.open(mates[0].endpoint.contact, honest(evil), timeout_s=1.0)
        await sleep(0.1)
        assert mates[0].matchmaker._search is not None
        assert len(mates[0].matchmaker._search.machine.followers) <= 1
        stream.abort()
        tasks["p1"] = fleet.call(mates[1])
        ends = await outcomes(tasks)
        released(ends)
        await fleet.close()

    run(main(), seed=8)


def test_gathered_values_never_exceed_one_message() -> None:
    """Members whose values do not fit into one `Begin` are refused, not begun and lost."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(20))
        ends = await outcomes({mate.name: fleet.call(mate, gathered=bytes(65536), window_s=3.0) for mate in mates})
        groups = groups_of(ends)
        assert max(map(len, groups)) == 15
        released(ends)
        await fleet.close()

    run(main(), seed=9)


Script = Callable[[Stream[Any, Any], Join], Coroutine[Any, Any, None]]


def bad_begins(leader: Contact, follower: Member) -> dict[str, Begin]:
    """Groups that a leader could claim to have formed."""
    mine = Member(leader, True, None, b"")
    good = Begin(bytes(16), [mine, follower], 0, [NUMEL, 0], 1000)
    change = msgspec.structs.replace
    stolen = Member(follower.contact, follower.reduces, follower.bandwidth, b"words in my mouth")
    return {
        "without us": change(good, members=[mine, Member(Contact(follower.contact.peer), False, None, b"")]),
        "with other words": change(good, members=[mine, stolen]),
        "a member twice": change(good, members=[mine, follower, follower], shares=[NUMEL, 0, 0]),
        "decided by us": change(good, coordinator=1),
        "decided by nobody": change(good, coordinator=7),
        "decided by the last": change(good, coordinator=-2),
        "shares missing": change(good, shares=[NUMEL]),
        "negative share": change(good, shares=[NUMEL + 1, -1]),
        "tiles of nothing": change(good, tile_bytes=0),
        "alone with us": change(good, members=[follower], coordinator=0, shares=[NUMEL]),
        "client reduces": change(
            good, members=[mine, follower, Member(Contact(bytes_peer(9)), True, None, b"")], shares=[NUMEL, 0, 0]
        ),
    }


def bytes_peer(number: int) -> PeerID:
    """Some peer id."""
    return PeerID(bytes([number]) * 32)


async def with_evil_leader(seed_name: str, script: Script) -> RoundFailed:
    """One honest peer, and one that is declared before it and answers by a script; how the search fails."""
    fleet = Fleet.launch()
    (mate,) = await fleet.add("p0", request_timeout_s=0.5)
    evil = await stranger(fleet, seed_name)
    evil.serve_stream(Join, script, scope="run")
    await View(fleet.directory, evil.peer_id).declare(KEY, mate.env.clock.time() + 1.0, evil.contact)
    end = (await outcomes({"p0": fleet.call(mate, window_s=2.0)}))["p0"]
    assert not [event for event in mate.events if isinstance(event, Warned)]
    await sleep(5.0)
    assert not mate.matchmaker._tasks
    await fleet.close()
    return failure(end)


@pytest.mark.parametrize(
    "what", sorted(bad_begins(Contact(bytes_peer(1)), Member(Contact(bytes_peer(2)), False, None, b"")))
)
def test_bad_begin_is_not_taken(what: str) -> None:
    """A leader that begins what cannot be is dropped, by name."""

    async def script(stream: Stream[Any, Any], join: Join) -> None:
        await stream.send(JoinAccepted())
        contact = Contact(evil_peer[0].peer_id, tuple(evil_peer[0].contact.addresses))
        await stream.send(bad_begins(contact, join.member)[what])
        await stream.recv()

    evil_peer: list[Endpoint] = []

    async def main() -> None:
        original = Endpoint.serve_stream

        def remember(self: Endpoint, *args: Any, **kwargs: Any) -> Any:
            evil_peer[:] = [self]
            return original(self, *args, **kwargs)

        Endpoint.serve_stream = remember  # type: ignore[method-assign]
        try:
            failed = await with_evil_leader("evil", script)
        finally:
            Endpoint.serve_stream = original  # type: ignore[method-assign]
        gone = "the peer that was to lead is gone: "
        assert any(f"{gone}{why}" in failed.reason for why in ("begins a group", "undecodable message")) or (
            "a member" in failed.reason and "gone" in failed.reason
        )
        assert failed.peers == (evil_peer[0].peer_id,)

    run(main(), seed=10)


async def silence(stream: Stream[Any, Any], join: Join) -> None:
    """Accept the stream and say nothing."""
    await sleep(100.0)


async def never_begins(stream: Stream[Any, Any], join: Join) -> None:
    """Accept and never begin."""
    await stream.send(JoinAccepted())
    await stream.recv()


async def begins_unasked(stream: Stream[Any, Any], join: Join) -> None:
    """Begin without accepting."""
    await stream.send(Begin(bytes(16), [join.member], 0, [NUMEL], 1))


async def sends_in_circles(stream: Stream[Any, Any], join: Join) -> None:
    """Redirect the asker to itself."""
    await stream.send(JoinRedirected(join.member.contact))


async def sends_to_nowhere(stream: Stream[Any, Any], join: Join) -> None:
    """Redirect to a peer that cannot be dialed."""
    await stream.send(JoinRedirected(Contact(bytes_peer(77))))


async def refuses_strangely(stream: Stream[Any, Any], join: Join) -> None:
    """A refusal with a code that nobody knows."""
    await stream.send(JoinRefused("because", "x" * 1000))


async def sends_payload(stream: Stream[Any, Any], join: Join) -> None:
    """A payload where none belongs."""
    await stream.send(JoinAccepted(), b"surprise")


async def ends_at_once(stream: Stream[Any, Any], join: Join) -> None:
    """Nothing at all, in order."""


async def accepts_for_ever(stream: Stream[Any, Any], join: Join) -> None:
    """Accept again and again."""
    for _ in range(100):
        await stream.send(JoinAccepted())
        await sleep(0.2)


@pytest.mark.parametrize(
    "script",
    [
        silence,
        never_begins,
        begins_unasked,
        sends_in_circles,
        sends_to_nowhere,
        refuses_strangely,
        sends_payload,
        ends_at_once,
        accepts_for_ever,
    ],
    ids=lambda script: script.__name__,
)
def test_leader_that_plays_games_ends_in_a_clear_failure(script: Script) -> None:
    """In bounded time, with the peer named, without an internal error."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        failed = await with_evil_leader("evil", script)
        assert failed.peers
        assert loop.time() - began < 5.0 + 2.0 + 7 * 0.5 + 5.0

    run(main(), seed=11)


# --------------------------------------------------------------------------------------------------- everything at once


async def rounds_under(plan: FaultPlan, *, target: int | None, rounds: int) -> None:
    """Six peers form groups again and again while the plan is played; then all that live form one."""
    fleet = Fleet.launch()
    loop = asyncio.get_running_loop()
    rng = random.Random(fleet.swarm.seed)
    members: dict[bytes, Any] = {}
    in_group: dict[str, bytes] = {}

    async def life(mate: Mate) -> None:
        for _ in range(rounds):
            await sleep(rng.uniform(0.0, 0.3))
            began = loop.time()
            try:
                group = await mate.form(window_s=2.0)
            except RoundFailed:
                group = None
            limit_s = 2.0 + 3.0 + 7 * 3.0 + 20.0  # a window, a grace, redirections; and a stall of the peer itself
            assert loop.time() - began <= limit_s
            if group is None:
                continue
            assert mate.name not in in_group
            in_group[mate.name] = group.round_id
            said = (group.members, group.shares, group.tile_bytes, group.coordinator)
            assert members.setdefault(group.round_id, said) == said
            assert group.peers[group.my_index] == mate.peer
            await sleep(rng.uniform(0.01, 0.1))
            del in_group[mate.name]
            group.release()

    mates = await fleet.add(*names(6), target_group_size=target)
    for mate in mates:
        mate.env.events.subscribe(check_no_internal_error)
    playing = asyncio.ensure_future(plan.play(fleet.swarm))
    living = [fleet.swarm.spawn(mate.name, life(mate)) for mate in mates]
    lives = {mate.name: task for mate, task in zip(mates, living, strict=True)}
    await playing
    left = [name for name in lives if fleet.swarm.is_alive(name)]
    if left:
        await asyncio.wait([lives[name] for name in left])
        for name in left:
            lives[name].result()
    await sleep(10.0)
    if len(left) >= 2:
        everybody = frozenset(fleet.mates[name].peer for name in left)
        ends = await outcomes({name: fleet.call(fleet.mates[name], expected=lambda: everybody) for name in left})
        if target is None:
            assert groups_of(ends) == [set(left)]
        released(ends)
    await fleet.close()


def check_no_internal_error(event: object) -> None:
    """`Warned` is for what should not happen."""
    assert not isinstance(event, Warned) or "withdraw" in event.message, event


given_faults = given(
    plan=fault_plans(names(6), 10.0, kinds=(Crash, Vanish, Stall, Slow, Partition)),
    seed=st.integers(0, 2**16),
    target=st.sampled_from([None, 3, 6]),
)


@given_faults
@settings(max_examples=12)
def test_any_faults_leave_groups_sound_and_the_rest_able(plan: FaultPlan, seed: int, target: int | None) -> None:
    """Same Begin for all members, nobody in two groups, bounded searches; afterwards the survivors form one group."""
    run(rounds_under(plan, target=target, rounds=6), seed=seed)


@pytest.mark.long(full=True)
@pytest.mark.timeout(3600)
@given_faults
@settings(max_examples=400)
def test_many_faults_leave_groups_sound_and_the_rest_able(plan: FaultPlan, seed: int, target: int | None) -> None:
    """The same of many more plans."""
    run(rounds_under(plan, target=target, rounds=6), seed=seed)
