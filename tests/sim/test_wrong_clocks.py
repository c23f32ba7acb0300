"""Clocks that are wrong by hours, or by a day: a warning, and nothing else."""

from __future__ import annotations

import asyncio
import math

import pytest

from shoal import sim
from shoal.base.clock import SharedClock, SystemClock
from shoal.events import EpochAdvanced, Event, SteppedAlone, Warned
from tests.sim.optimizer_kit import Run, Trainer

HOUR_S, DAY_S = 3600.0, 86_400.0


class Swarm:
    """Trainers with clocks of their own."""

    def __init__(self, skews_s: list[float]) -> None:
        self.skews_s = skews_s
        self.run = Run(target=8 * len(skews_s))
        self.warned: dict[str, list[str]] = {}
        self.alone: list[str] = []
        self.peers: dict[str, list[int]] = {}

    async def start(self) -> None:
        """Start them one after another."""
        for number, skew_s in enumerate(self.skews_s):
            await self.add(f"p{number}", skew_s)

    async def add(self, name: str, skew_s: float) -> None:
        """Start one more."""
        warned = self.warned.setdefault(name, [])
        peers = self.peers.setdefault(name, [])

        def note(event: Event) -> None:
            if isinstance(event, Warned):
                warned.append(f"{event.where}: {event.message}")
            elif isinstance(event, SteppedAlone):
                self.alone.append(name)
            elif isinstance(event, EpochAdvanced):
                peers.append(event.peers)

        await self.run.add(name, skew_s=skew_s, events=note)

    async def train(self, epochs: int) -> None:
        """All train so far."""

        async def work(trainer: Trainer) -> None:
            await trainer.train(4, duration_s=0.5, until=lambda: trainer.participant.epoch >= epochs)

        swarm = self.run.swarm
        await asyncio.gather(*(swarm.spawn(name, work(trainer)) for name, trainer in swarm.peers.items()))


@pytest.mark.parametrize(
    "skews_s",
    [
        [0.0, 2 * HOUR_S, 0.0],
        [-2 * HOUR_S, 0.0, 0.0],
        [DAY_S, 0.0, 0.0],
        [DAY_S, -DAY_S, 0.0],
        [0.0, -DAY_S],
        [0.0, 5 * HOUR_S, 0.0, -DAY_S, 0.0, 0.0, DAY_S, -3 * HOUR_S],
        pytest.param(
            [-DAY_S, DAY_S, 2 * HOUR_S, -7 * HOUR_S, 40.0, DAY_S / 2, -100.0, 9 * HOUR_S],
            marks=pytest.mark.long(full=True),
        ),
    ],
    ids=lambda skews: "/".join(f"{skew / HOUR_S:+.2g}h" for skew in skews),
)
def test_a_clock_that_is_hours_wrong_makes_no_silent_private_run(skews_s: list[float]) -> None:
    """All train together from the first epoch, whoever is wrong; who joins with another clock is told by how much."""

    async def main() -> None:
        swarm = Swarm(skews_s)
        await swarm.start()
        began = asyncio.get_running_loop().time()
        await swarm.train(6)
        assert asyncio.get_running_loop().time() - began < 15.0
        assert not swarm.alone
        # The last one may be told of the others at its second epoch only.
        for name, peers in swarm.peers.items():
            assert peers.count(len(skews_s)) >= 5, (name, peers)
        for number, skew_s in enumerate(skews_s):
            off_s = skew_s - skews_s[0]
            found = swarm.warned[f"p{number}"]
            assert all(warning.startswith("clock: ") for warning in found), found
            if abs(off_s) < 10.0:
                assert not [warning for warning in found if "of this machine" in warning], found
            else:
                side = "ahead of" if off_s > 0 else "behind"
                assert any(f"the clock of this machine is {abs(off_s):.0f} s {side}" in each for each in found), found
        await swarm.run.close()

    sim.run(main, seed=41)


@pytest.mark.parametrize("right", [2, 3])
def test_two_clocks_that_are_days_wrong_shut_nobody_out(right: int) -> None:
    """The two saw each other alone in the directory, and averaged nothing with the others, for ever."""

    async def main() -> None:
        swarm = Swarm([0.0] * right + [60 * HOUR_S] * 2)
        await swarm.start()
        await swarm.train(8)
        assert not swarm.alone
        for name, peers in swarm.peers.items():
            assert peers.count(right + 2) >= 6, (name, peers)
        await swarm.run.close()

    sim.run(main, seed=44)


def test_a_newcomer_with_another_clock_finds_a_run_that_goes_on() -> None:
    """It downloads the state, and takes part."""

    async def main() -> None:
        swarm = Swarm([0.0, 0.0])
        await swarm.start()
        await swarm.train(4)
        await swarm.add("late", -5 * HOUR_S)
        await swarm.train(9)
        assert swarm.run.swarm.peer("late").downloads == 1
        assert swarm.peers["late"].count(3) >= 3
        assert not swarm.alone
        await swarm.run.close()

    sim.run(main, seed=42)


def test_who_follows_whose_time() -> None:
    """A newcomer the first that it hears, an old peer the median; a few liars move nobody, no absurd time counts."""
    newcomer = SharedClock(SystemClock(), settled=False)
    assert newcomer.told("a", "host a", DAY_S)
    assert newcomer.ahead_s == DAY_S
    assert not newcomer.told("b", "host b", DAY_S + 0.5)
    assert not newcomer.told("liar", "host c", 0.0)
    assert newcomer.ahead_s == DAY_S
    for absurd in (math.inf, -1e300, math.nan, 51 * HOUR_S):
        assert not newcomer.told("absurd", "host d", absurd)
    old = SharedClock(SystemClock(), settled=True)
    for number in range(SharedClock.VOTERS):
        old.told(number, f"old host {number}", 0.01)
    for number in range(1000):
        assert not old.told(f"fresh {number}", f"host {number}", -DAY_S)
    assert old.ahead_s == 0.0
    for number in range(SharedClock.VOTERS):
        old.forget(number)
    assert old.told("fresh 1", "host 1", -DAY_S)  # all that it knew are gone: it is with those


def test_free_keys_of_one_host_move_the_clock_of_an_old_peer() -> None:
    """The votes were of keys: in a network of few peers one host with a dozen keys set everybody's time."""
    old = SharedClock(SystemClock(), settled=True)
    for number in range(2):
        old.told(number, f"old host {number}", 0.01)
    for number in range(30):
        assert not old.told(f"fresh {number}", "liar", -DAY_S)
    assert old.ahead_s == 0.0
    assert not old.told("liar's neighbour", "liar", 0.0)


def test_two_that_differ_and_are_alone_agree_on_the_earlier_time() -> None:
    """Each follows the same rule, so they do not change places."""
    one, other = (SharedClock(SystemClock(), settled=True) for _ in range(2))
    assert not one.told("other", "host", 100.0)
    assert other.told("one", "host", -100.0)
    assert (one.ahead_s, other.ahead_s) == (0.0, -100.0)


@pytest.mark.parametrize("peers", [2, 3])
def test_a_clock_that_is_set_back_by_two_hours_costs_nothing(peers: int) -> None:
    """Two had one round in 75 s until it had caught up, and the peer with the right clock was told to set it."""

    async def main() -> None:
        swarm = Swarm([0.0] * peers)
        await swarm.start()
        await swarm.train(4)
        clock = swarm.run.trainers["p1"].participant.core.env.clock
        assert isinstance(clock, SharedClock)
        before = clock.time()
        clock.own._offset_s -= 2 * HOUR_S  # type: ignore[attr-defined]
        assert clock.time() == pytest.approx(before, abs=0.1)
        began = asyncio.get_running_loop().time()
        await swarm.train(14)
        assert asyncio.get_running_loop().time() - began < 20.0
        assert not swarm.alone
        assert [name for name, said in swarm.warned.items() if said] == ["p1"]
        (warning,) = swarm.warned["p1"]
        assert warning.startswith("clock: the clock of this machine was set back by 7200 s. Shoal goes on by")
        await swarm.run.close()

    sim.run(main, seed=43)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("by_s", [HOUR_S, 3 * DAY_S, -3 * DAY_S], ids=["hour", "3 days", "3 days back"])
@pytest.mark.parametrize(("peers", "which"), [(2, "p0"), (2, "p1"), (3, "p0"), (3, "p1")])
def test_a_machine_whose_clock_jumps_says_so_and_accuses_nobody(peers: int, which: str, by_s: float) -> None:
    """What was measured before the jump counted as agreement: it accused the first peer that told its time."""

    async def main() -> None:
        swarm = Swarm([0.0] * peers)
        await swarm.start()
        await swarm.train(4)
        clock = swarm.run.trainers[which].participant.core.env.clock
        assert isinstance(clock, SharedClock)
        before = clock.time()
        clock.own._offset_s += by_s  # type: ignore[attr-defined]
        await sim.sleep(5.0)
        assert clock.time() == pytest.approx(before + 5.0, abs=1.0)
        began = asyncio.get_running_loop().time()
        await swarm.train(14)
        assert asyncio.get_running_loop().time() - began < 20.0
        assert not swarm.alone
        how = "forward" if by_s > 0 else "back"
        (warning,) = swarm.warned[which]
        assert warning.startswith(f"clock: the clock of this machine was set {how} by {abs(by_s):.0f} s. Shoal goes on")
        wrong = f"clock: the clock of {swarm.run.swarm.identity(which).peer_id.short()} is "
        for name, said in swarm.warned.items():
            assert name == which or all(each.startswith(wrong) for each in said), said
        await swarm.run.close()

    sim.run(main, seed=44)


class Jumping(SystemClock):
    """A clock that jumps by `ahead_s`."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def test_a_machine_that_has_slept_keeps_its_time() -> None:
    """Its wall clock jumps as it does if it is set: the others tell which of the two it was, more than half of them."""
    own = Jumping()
    shared = SharedClock(own, settled=True)
    for name in "abc":
        shared.told(name, f"host {name}", 0.0)
    own.ahead_s = 8 * HOUR_S
    assert shared.time() == pytest.approx(own.time(), abs=1.0)
    assert shared.in_doubt
    assert shared.offset_s("a") is None
    assert not shared.told("a", "host a", -8 * HOUR_S)  # a liar: it alone decides nothing
    assert shared.in_doubt
    for name in "bc":
        assert not shared.told(name, f"host {name}", 0.0)
    assert not shared.in_doubt
    assert shared.time() == pytest.approx(own.time(), abs=1.0)
    assert shared.take_set_s() == 0.0


def test_times_count_after_a_jump_of_more_than_fifty_hours() -> None:
    """The limit was counted from what the clock shows: after such a jump no peer was heard any more."""
    for by_s in (3 * DAY_S, -3 * DAY_S):
        own = Jumping()
        shared = SharedClock(own, settled=True)
        shared.told("a", "host a", 0.0)
        own.ahead_s = by_s
        shared.told("a", "host a", -by_s)
        assert shared.ahead_s == pytest.approx(-by_s, abs=1.0)
        assert shared.told("a", "host a", -by_s - 60.0)
        assert not shared.told("a", "host a", -by_s - 3 * DAY_S)


def test_a_founder_that_is_alone_takes_its_clock_as_it_is_set() -> None:
    """Nobody else can tell."""
    own = Jumping()
    shared = SharedClock(own, settled=True)
    own.ahead_s = HOUR_S
    assert shared.time() == pytest.approx(own.time(), abs=1.0)
    assert not shared.in_doubt


def test_a_clock_that_is_set_forward_follows_the_others() -> None:
    """It looks like sleep, after which the clock is right: the links say that it is not."""
    own = Jumping()
    shared = SharedClock(own, settled=True)
    shared.told("a", "host a", 0.0)
    own.ahead_s = 2 * HOUR_S
    assert shared.time() == pytest.approx(own.time(), abs=1.0)
    assert not shared.told("a", "host a", -2 * HOUR_S)  # the network's time goes on as before
    assert shared.time() == pytest.approx(own.time() - 2 * HOUR_S, abs=1.0)
    own.ahead_s = HOUR_S
    assert shared.time() == pytest.approx(own.time() - HOUR_S, abs=1.0)
    assert shared.take_set_s() == pytest.approx(HOUR_S, abs=1.0)  # forward by two, back by one
    assert shared.take_set_s() == 0.0
