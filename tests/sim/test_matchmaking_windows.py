"""Windows that end with too few peers, words that overtake each other, and a `Begin` that not all get in time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from shoal.averaging.matchmaking.events import SearchPhase
from shoal.averaging.matchmaking.machine import GroupMachine
from shoal.errors import PeerError
from shoal.sim import run, sleep
from shoal.transport.uplink import Uplink
from shoal.transport.upload_limit import UploadLimit
from tests.sim.matchmaking_kit import LATENCY_S, Fleet, Mate, groups_of, outcomes, released
from tests.situations import reaches

WINDOW_S = 2.0
LATE_S = 1.0
"""What is sent in a moment that is held up comes so much later than what is sent after it."""


def machine_of(mate: Mate) -> GroupMachine:
    """The machine of the search that goes on."""
    assert mate.matchmaker._search is not None
    return mate.matchmaker._search.machine


async def joined(mates: Sequence[Mate]) -> tuple[Mate, Mate]:
    """Of two peers the leader and its follower, once one has joined the other and knows it."""
    while True:
        for leader, follower in (mates, mates[::-1]):
            search = follower.matchmaker._search
            if search is not None and search.machine.phase is SearchPhase.FOLLOWING:
                return leader, follower
        await sleep(0.001)


async def hold_up(fleet: Fleet, pair: Sequence[Mate], at: float) -> None:
    """What the two send each other at this moment (loop time) takes `LATE_S`; other connections overtake it."""
    await sleep(at - 0.0005 - asyncio.get_running_loop().time())
    fleet.swarm.network.set_link(pair[0].name, pair[1].name, latency_s=LATE_S)
    await sleep(0.001)
    fleet.swarm.network.set_link(pair[0].name, pair[1].name, latency_s=LATENCY_S)


@pytest.mark.parametrize("seed", range(3))
def test_peers_that_waited_for_a_third_one_beyond_a_window_take_it_at_once(seed: int) -> None:
    """Each window ended with too few. They held that against their leader, and found no group at all.

    Two said "you lead me" to each other, of which one had followed the other before.
    """

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add("p0", "p1", "p2", min_group_size=3, window_s=WINDOW_S)
        tasks = {mate.name: fleet.call(mate, deadline_s=30.0) for mate in mates[:2]}
        await sleep(2.5 * WINDOW_S)
        came_at = asyncio.get_running_loop().time()
        tasks["p2"] = fleet.call(mates[2], deadline_s=30.0)
        ends = await outcomes(tasks)
        assert groups_of(ends) == [{"p0", "p1", "p2"}]
        assert asyncio.get_running_loop().time() - came_at < WINDOW_S
        assert [mate.matchmaker.take_failures() for mate in mates] == [([], set())] * 3
        released(ends)
        await fleet.close()

    with reaches("a window ends with too few peers"):
        run(main(), seed=seed)


def test_a_leader_asks_its_follower_that_has_not_heard_yet_that_it_was_dismissed() -> None:
    """The follower leads it from then on, and takes no notice of the late refusal."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add("p0", "p1", "p2", min_group_size=3, window_s=WINDOW_S)
        tasks = {mate.name: fleet.call(mate, deadline_s=30.0) for mate in mates[:2]}
        leader, follower = await joined(mates[:2])
        # The later key leads next: the follower's window ends after its leader's, by less than the two need to talk.
        machine_of(follower)._window.ends_at += 0.5
        machine_of(follower)._window.expiration += 0.5
        await hold_up(fleet, (leader, follower), machine_of(leader)._window.ends_at)
        await sleep(LATE_S / 4)
        assert machine_of(leader).leader == follower.peer
        assert machine_of(follower).followers == (leader.peer,)
        await sleep(LATE_S)  # the refusal has come
        tasks["p2"] = fleet.call(mates[2], deadline_s=30.0)
        ends = await outcomes(tasks)
        assert groups_of(ends) == [{"p0", "p1", "p2"}]
        released(ends)
        await fleet.close()

    with reaches("a peer is asked to lead by its own leader"):
        run(main())


def test_a_peer_that_accepts_us_and_asks_us_is_our_follower_though_its_second_word_comes_first() -> None:
    """When its first word came, it was taken for lost, as if it had died. It leads us no more, whatever it said."""

    async def main(answers_at: float | None) -> float:
        fleet = Fleet.launch()
        first, second, third = await fleet.add("p0", "p1", "p2", min_group_size=3, window_s=WINDOW_S)
        loop, tasks = asyncio.get_running_loop(), {"p0": fleet.call(first, deadline_s=30.0)}
        tasks["p1"] = fleet.call(second, deadline_s=30.0, after_s=WINDOW_S - 0.1)
        if answers_at is not None:
            await hold_up(fleet, (first, second), answers_at)
        while first.matchmaker._search is None or not machine_of(first).followers:
            await sleep(0.0005)
        if answers_at is None:
            return loop.time()
        assert loop.time() < machine_of(first)._window.ends_at < loop.time() + LATE_S / 4
        await sleep(LATE_S / 2)
        assert machine_of(second).followers == (first.peer,)
        assert machine_of(first).leader == second.peer
        await sleep(LATE_S)  # all late words have come
        assert machine_of(second).followers == (first.peer,)
        assert not second.matchmaker._memory.lost
        tasks["p2"] = fleet.call(third, deadline_s=30.0)
        ends = await outcomes(tasks)
        assert groups_of(ends) == [{"p0", "p1", "p2"}]
        released(ends)
        await fleet.close()
        return 0.0

    run(main(run(main(None), seed=1)), seed=1)


def test_followers_that_cannot_be_told_in_time_that_their_group_begins_are_dead_members_and_look_on() -> None:
    """The line of their leader is slow. It knows at once that they are gone, and they find each other."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add("p0", "p1", "p2", target_group_size=3, window_s=4.0, request_timeout_s=1.0)
        fleet.swarm.host("p0").transport.uplink = Uplink(limit=UploadLimit(100_000))
        tasks = {
            mate.name: fleet.call(mate, gathered=bytes(60_000), deadline_s=10.0, after_s=0.1 * number)
            for number, mate in enumerate(mates)
        }
        await asyncio.wait({tasks["p0"]})
        group = tasks["p0"].result()
        assert set(group.peers) == {mate.peer for mate in mates}
        for control in group.controls.values():
            with pytest.raises(PeerError):
                await control.recv()
        await sleep(0.01)
        assert all(machine_of(mate).phase is not SearchPhase.FOLLOWING for mate in mates[1:])
        ends = await outcomes(tasks)
        assert groups_of(ends) == [{"p0"}, {"p1", "p2"}]
        released(ends)
        await fleet.close()

    with reaches("a follower cannot be told that its group begins"):
        run(main())


def test_a_long_join_on_a_line_of_8_kb_a_second_was_given_up_after_3_seconds() -> None:
    """What its member gathers takes 8 s: the options of many parameter groups, for example. It came all the time."""

    async def main() -> None:
        fleet = Fleet.launch()
        fleet.swarm.network.add_host("slow", up_bytes_s=8_000.0)
        mates = await fleet.add("fast", "slow", target_group_size=2, window_s=20.0)
        tasks = {
            mate.name: fleet.call(mate, gathered=bytes(60_000), deadline_s=60.0, after_s=1.0 * number)
            for number, mate in enumerate(mates)
        }
        ends = await outcomes(tasks)
        assert groups_of(ends) == [{"fast", "slow"}]
        assert asyncio.get_running_loop().time() < 10.0  # it was 35 s, in the next window
        released(ends)
        await fleet.close()

    run(main())
