"""Groups form in a crowd, with two leaders, with wrong clocks, and whenever a leader or a follower goes."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from shoal.averaging.matchmaking import Group
from shoal.averaging.matchmaking.events import SearchPhase
from shoal.base.peer import PeerID
from shoal.errors import RoundFailed
from shoal.protocol.wire import Contact
from shoal.sim import run, sleep
from tests.sim.matchmaking_kit import Fleet, Mate, SlowDirectory, View, groups_of, outcomes, released


def names(count: int) -> list[str]:
    """Names of this many peers."""
    return [f"p{number}" for number in range(count)]


def state_of(mate: Mate) -> tuple[SearchPhase, int] | None:
    """Where a peer's search stands, and how many follow it; None if it does not search."""
    search = mate.matchmaker._search
    return None if search is None else (search.machine.phase, len(search.machine.followers))


def leaders_of(fleet: Fleet) -> dict[str, int]:
    """The peers that are followed now, and by how many."""
    states = {name: state_of(mate) for name, mate in fleet.mates.items()}
    return {name: state[1] for name, state in states.items() if state is not None and state[1]}


def set_clocks(fleet: Fleet, skew_s: float) -> None:
    """Half of the clocks are ahead by this much, half of them behind."""
    for number, mate in enumerate(fleet.mates.values()):
        clock: Any = mate.env.clock
        clock._offset_s += skew_s if number % 2 else -skew_s


# -------------------------------------------------------------------------------------------------------------- crowds


@pytest.mark.parametrize(
    ("latency_s", "skew_s"),
    [(0.002, 2.0), *(pytest.param(each, 0.0, marks=pytest.mark.long(full=each < 0.02)) for each in (0.002, 0.02))],
)
def test_sixty_four_peers_on_one_key_in_groups_of_four(latency_s: float, skew_s: float) -> None:
    """An overcrowded key: all end in full groups, and not one after another, long before the window ends.

    A read of the directory takes 4 latencies and a write 6.
    """

    async def main() -> list[list[float]]:
        fleet = Fleet.launch(latency_s=latency_s)
        await fleet.add(*names(64), target_group_size=4, window_s=15.0)
        set_clocks(fleet, skew_s)
        loop, rng = asyncio.get_running_loop(), random.Random(fleet.swarm.seed)
        rounds = []
        for _ in range(2):
            began = loop.time()
            times: list[float] = []
            tasks = {}

            def done(_task: object, began: float = began, times: list[float] = times) -> None:
                times.append(loop.time() - began - 0.1)

            for mate in fleet.mates.values():
                tasks[mate.name] = fleet.call(mate, after_s=rng.uniform(0.0, 0.1), deadline_s=60.0)
                tasks[mate.name].add_done_callback(done)
            ends = await outcomes(tasks)
            assert Counter(len(group) for group in groups_of(ends)) == {4: 16}
            rounds.append(sorted(times))
            released(ends)
            await sleep(0.1)
        await fleet.close()
        return rounds

    for number, times in enumerate(run(main(), seed=3)):
        print(
            f"64 peers, {1e3 * latency_s:g} ms apart, clocks +-{skew_s:g} s, round {number}: after the last call half "
            f"of them had a group within {1e3 * statistics.median(times):.0f} ms, all within {1e3 * times[-1]:.0f} ms"
        )
        assert times[-1] < 0.5 + 200 * latency_s


@pytest.mark.parametrize("target", [4, 16, None])
def test_clocks_that_differ_by_four_seconds(target: int | None) -> None:
    """Half of the clocks 2 s ahead, half 2 s behind, windows of 5 s: all meet, and long before a window ends."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(16), target_group_size=target)
        set_clocks(fleet, 2.0)
        loop = asyncio.get_running_loop()
        for _ in range(5):
            began = loop.time()
            ends = await outcomes({mate.name: fleet.call(mate) for mate in mates})
            assert [len(group) for group in groups_of(ends)] == [target or 16] * (16 // (target or 16))
            assert loop.time() - began < 1.0
            released(ends)
            await sleep(0.05)
        await fleet.close()

    for seed in range(2):
        run(main(), seed=seed)


# --------------------------------------------------------------------------------------------------------- two leaders


class TwoSides(SlowDirectory):
    """Until it is opened, each half of the peers finds only its own entries."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.sides: dict[PeerID, int] = {}
        self.open = False

    def shown_to(self, peer: PeerID, found: list[tuple[Contact, float]]) -> list[tuple[Contact, float]]:
        """What this peer finds of it."""
        return [each for each in found if self.open or self.sides[each[0].peer] == self.sides[peer]]


class SideView(View):
    """One peer's view of it."""

    async def declare(self, group_key: str, expiration: float, contact: Contact) -> list[tuple[Contact, float]]:
        assert isinstance(self.directory, TwoSides)
        return self.directory.shown_to(self.peer, await super().declare(group_key, expiration, contact))

    async def read(self, group_key: str) -> list[tuple[Contact, float]]:
        assert isinstance(self.directory, TwoSides)
        return self.directory.shown_to(self.peer, await super().read(group_key))


async def two_sides(count: int, *, target: int) -> tuple[Fleet, TwoSides]:
    """Peers of which each half finds only itself."""
    fleet = Fleet.launch()
    directory = fleet.directory = TwoSides(fleet.swarm.seed)
    for number, mate in enumerate(await fleet.add(*names(count), target_group_size=target)):
        directory.sides[mate.peer] = number % 2
        mate.matchmaker._directory = SideView(directory, mate.peer)
    return fleet, directory


@pytest.mark.parametrize(("target", "sizes"), [(8, [8]), (6, [6, 2]), (5, [5, 3])])
def test_two_leaders_with_followers_become_one(target: int, sizes: list[int]) -> None:
    """Each leads half of the peers when they hear of each other; those for whom there is no room stay together."""

    async def main() -> None:
        fleet, directory = await two_sides(8, target=target)
        loop = asyncio.get_running_loop()
        tasks = {name: fleet.call(mate, window_s=20.0) for name, mate in fleet.mates.items()}
        while sorted(leaders_of(fleet).values()) != [3, 3]:
            assert not any(task.done() for task in tasks.values()), leaders_of(fleet)
            await sleep(0.001)
        directory.open, opened = True, loop.time()
        ends = await outcomes(tasks)
        assert sorted((len(group) for group in groups_of(ends)), reverse=True) == sizes
        assert loop.time() - opened < 2.5
        released(ends)
        await fleet.close()

    for seed in range(5):
        run(main(), seed=seed)


# -------------------------------------------------------------------------------------------------- who dies, and when


def check_survivors(fleet: Fleet, ends: Mapping[str, Group | BaseException], victim: str) -> str:
    """Each survivor is in one group with all the others, or was begun by the victim. Says which."""
    dead = fleet.mates[victim].peer
    led = {name for name, end in ends.items() if isinstance(end, Group) and end.peers[end.coordinator] == dead}
    others = {name: end for name, end in ends.items() if name not in led}
    if len(others) == 1:
        (last,) = others.values()  # alone, when the victim had begun with all others
        assert isinstance(last, RoundFailed | Group)
        if isinstance(last, RoundFailed):
            return "begun"
    assert groups_of(others) == ([set(others)] if others else []), (victim, ends)
    return "begun" if led else "not begun"


async def die_at(victim: str, at_s: float, *, visible_after_s: float) -> tuple[str, str, float]:
    """Five peers call, one crashes; in which phase it was, what came of it, and how long the others took then."""
    fleet = Fleet.launch(visible_after_s=visible_after_s)
    mates = await fleet.add(*names(5))
    loop = asyncio.get_running_loop()
    rng = random.Random(fleet.swarm.seed)
    tasks = {mate.name: fleet.call(mate, after_s=rng.uniform(0.0, 0.03), deadline_s=15.0) for mate in mates}
    await sleep(at_s)
    state = state_of(fleet.mates[victim])
    leads = state is not None and state[1] > 0
    phase = ("begun" if tasks[victim].done() else "idle") if state is None else state[0].name
    fleet.swarm.crash(victim)
    crashed = loop.time()
    del tasks[victim]
    ends = await outcomes(tasks)
    took_s = loop.time() - crashed
    result = check_survivors(fleet, ends, victim)
    released(ends)
    await fleet.close()
    return f"{phase}{' with followers' if leads else ''}", result, took_s


@pytest.mark.parametrize("victims", [1, pytest.param(5, marks=pytest.mark.long(full=True))])
@pytest.mark.parametrize("visible_after_s", [0.0, 0.1])
def test_any_peer_dies_at_any_moment(visible_after_s: float, victims: int) -> None:
    """Every 10 ms of a search, one or each of five peers: the others end in one group, soon, in whatever phase it was.

    With a late directory there are several leaders, which ask each other and send their followers on.
    """
    seen: Counter[tuple[str, str]] = Counter()
    longest: dict[str, float] = {}
    for step in range(42):
        for number in range(victims):
            victim = f"p{(step + number) % 5}"
            phase, result, took_s = run(die_at(victim, 0.01 * step, visible_after_s=visible_after_s), seed=step % 3)
            seen[phase, result] += 1
            longest[phase] = max(took_s, longest.get(phase, 0.0))
    for (phase, result), count in sorted(seen.items()):
        print(f"{phase}: {count} times, {result}; the others were done within {1e3 * longest[phase]:.0f} ms at most")
    assert {"LOOKING", "LOOKING with followers", "ASKING", "FOLLOWING", "begun"} <= set(longest)
    assert max(longest.values()) < 2.0


@pytest.mark.parametrize("who", ["asker", "asked"])
def test_one_of_two_leaders_dies_while_it_asks_the_other(who: str) -> None:
    """Both have followers, who are about to be sent on: all that are left end in one group, soon."""

    async def main() -> None:
        fleet, directory = await two_sides(6, target=6)
        mates = fleet.mates
        loop = asyncio.get_running_loop()
        tasks = {name: fleet.call(mate, window_s=20.0) for name, mate in mates.items()}
        while sorted(leaders_of(fleet).values()) != [2, 2]:
            await sleep(0.001)
        directory.open = True
        while not (asking := [n for n, mate in mates.items() if state_of(mate) == (SearchPhase.ASKING, 2)]):
            await sleep(0.0005)
        victim = asking[0] if who == "asker" else next(name for name in leaders_of(fleet) if name != asking[0])
        fleet.swarm.crash(victim)
        crashed = loop.time()
        del tasks[victim]
        ends = await outcomes(tasks)
        assert groups_of(ends) == [set(tasks)]
        assert loop.time() - crashed < 3.0
        released(ends)
        await fleet.close()

    for seed in range(5):
        run(main(), seed=seed)


@pytest.mark.parametrize("waits", [False, True])
def test_follower_that_joins_and_vanishes(waits: bool) -> None:
    """Silent, with nothing closed: a group that starts at once has it as a dead member.

    One that waits for somebody else who is expected finds out by the heartbeat, and is then one of the living.
    """

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(4))
        expected = frozenset(mate.peer for mate in mates) if waits else None
        loop = asyncio.get_running_loop()
        began = loop.time()
        tasks = {mate.name: fleet.call(mate, window_s=30.0, expected=lambda: expected) for mate in mates[:3]}
        while max(leaders_of(fleet).values(), default=0) < 2:
            await sleep(0.001)
        (leader,) = (name for name, count in leaders_of(fleet).items() if count == 2)
        victim = next(name for name in tasks if name != leader)
        fleet.swarm.vanish(victim)
        del tasks[victim]
        if waits:
            tasks["p3"] = fleet.call(mates[3], after_s=12.0, window_s=30.0)
        ends = await outcomes(tasks)
        (members,) = groups_of(ends)
        assert members == set(tasks)
        for end in ends.values():
            assert isinstance(end, Group)
            assert (fleet.mates[victim].peer in end.peers) == (not waits)
        assert loop.time() - began < (15.0 if waits else 1.0)
        released(ends)
        await fleet.close()

    for seed in range(4):
        run(main(), seed=seed)
