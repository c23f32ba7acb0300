"""Clocks that are wrong by hours, or by a day: a warning, and nothing else."""

from __future__ import annotations

import asyncio
import math

import pytest

from shoal import sim
from shoal.base.clock import SharedClock, SystemClock
from shoal.events import EpochAdvanced, Event, SteppedAlone, Warned
from shoal.protocol.wire import Beat, BeatReply
from shoal.rpc.link import CallLink
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.rpc_kit import Say, SimNet, echo, on_sim

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


def set_forward(*told: tuple[str, str], by_s: float = 2 * HOUR_S) -> SharedClock:
    """A clock that was set forward after these peers had told their times, each at its host."""
    own = Jumping()
    shared = SharedClock(own, settled=True)
    for name, host in told:
        shared.told(name, host, 0.0)
    own.ahead_s = by_s
    assert shared.known_time() is None  # others are not told a time that may be false
    return shared


@pytest.mark.parametrize("keys", [1, 4])
@pytest.mark.parametrize("answers", [True, False], ids=["tell no time", "do not answer"])
def test_a_strangers_keys_kept_a_machine_whose_clock_was_set_in_doubt(
    keys: int, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They counted without end as peers that will still tell; meanwhile others were told the false time."""
    mute = list[SharedClock]()

    def answer(link: CallLink, beat: Beat) -> None:
        if link._links.clocks.ours not in mute:
            real(link, beat)
        elif answers:
            link.post(BeatReply(beat.time, None))

    real = CallLink._answer_beat
    monkeypatch.setattr(CallLink, "_answer_beat", answer)

    async def scenario(net: SimNet) -> None:
        machine, honest = await net.peer("p0"), await net.peer("p1")
        strangers = [await net.peer(f"h{number}.evil.org") for number in range(keys)]
        machine.endpoint.serve(Say, echo)
        others = (honest, *strangers)
        for each in others:
            await each.endpoint.call(machine.contact, Say("x"), timeout_s=5.0)
        clock = machine.endpoint.clock
        await sim.sleep(15.0)
        assert None not in [clock.offset_s(each.peer_id) for each in others]
        mute.extend(each.endpoint.clock for each in strangers)
        before_s = clock.time() - asyncio.get_running_loop().time()
        clock.own._offset_s += 2 * HOUR_S  # type: ignore[attr-defined]
        for _ in range(15):
            await sim.sleep(2.0)
            for each in others:  # all stay connected
                await each.endpoint.call(machine.contact, Say("x"), timeout_s=5.0)
        assert not clock.in_doubt
        assert clock.time() - asyncio.get_running_loop().time() == pytest.approx(before_s, abs=1.0)
        (warning,) = machine.seen(Warned)
        assert warning.message.startswith("the clock of this machine was set forward by 7200 s")
        assert not honest.seen(Warned)

    on_sim(scenario)


def test_free_keys_of_one_host_had_many_votes_on_a_clock_that_jumped() -> None:
    """Four keys that answered first were more than half, and decided; and what a host tells counts once."""
    shared = set_forward(("a", "host a"), ("b", "host b"), *((f"key {n}", "evil") for n in range(4)))
    for number in range(4):
        assert not shared.told(f"key {number}", "evil", 0.0)
        assert shared.in_doubt
    shared.told("a", "host a", -2 * HOUR_S)
    assert shared.in_doubt  # one to one: the third host decides
    shared.told("b", "host b", -2 * HOUR_S)
    assert shared.take_set_s() == pytest.approx(2 * HOUR_S, abs=1.0)


def test_fresh_hosts_hold_no_vote_up_beside_sixteen_older_ones() -> None:
    """However many strangers are connected and say nothing, the longest connected hosts decide, also after a jump."""
    hosts = [(f"{number}", f"host {number}") for number in range(SharedClock.VOTERS + 100)]
    shared = set_forward(*hosts)
    for name, host in (*hosts[SharedClock.VOTERS :], *hosts[: SharedClock.VOTERS // 2 + 1]):
        assert shared.in_doubt
        shared.told(name, host, 0.0 if int(name) >= SharedClock.VOTERS else -2 * HOUR_S)
    assert not shared.in_doubt
    assert shared.take_set_s() == pytest.approx(2 * HOUR_S, abs=1.0)


def test_only_those_whose_word_counts_are_waited_for_after_a_jump() -> None:
    """Three hosts of strangers that answer first decided which of the two it was."""
    shared = set_forward(("a", "host a"), *((f"{number}", f"host {number}") for number in range(3)))
    shared.heed(lambda: ["a"])
    for number in range(3):
        shared.told(f"{number}", f"host {number}", 0.0)
        assert shared.in_doubt
    shared.told("a", "host a", -2 * HOUR_S)
    assert shared.take_set_s() == pytest.approx(2 * HOUR_S, abs=1.0)


def test_a_peer_that_is_gone_or_knows_no_time_lets_the_others_decide_at_once() -> None:
    """The vote was counted only when the next one told its time, a minute later."""
    for leave in (SharedClock.forget, SharedClock.abstained):
        shared = set_forward(("a", "host a"), ("b", "host b"))
        shared.told("a", "host a", -2 * HOUR_S)
        assert shared.in_doubt
        leave(shared, "b")
        assert not shared.in_doubt
        assert shared.take_set_s() == pytest.approx(2 * HOUR_S, abs=1.0)


def test_two_machines_that_sleep_together_do_not_wait_for_each_other_for_ever() -> None:
    """Neither tells its time while it is in doubt. When each has heard that, both go by their clocks, and compare."""
    one, other = set_forward(("peer", "host")), set_forward(("peer", "host"))
    one.abstained("peer")
    other.abstained("peer")
    assert one.known_time() == pytest.approx(other.known_time(), abs=1.0)
    assert not one.told("peer", "host", 0.0)
    assert one.take_set_s() == one.ahead_s == 0.0


def test_a_second_jump_while_nobody_is_connected_counts() -> None:
    """Of two jumps only the first one was explained: the rest was taken for a wrong clock."""
    own = Jumping()
    shared = SharedClock(own, settled=True)
    shared.told("a", "host a", 0.0)
    for hours in (1, 2):
        own.ahead_s = hours * HOUR_S
        shared.time()
        shared.forget("a")
    shared.told("a", "host a", -2 * HOUR_S)
    assert shared.take_set_s() == pytest.approx(2 * HOUR_S, abs=1.0)


def test_a_right_peer_was_said_to_be_no_seconds_behind() -> None:
    """The difference was that to the machine's clock, not to the network's; and keys of one host agreed many times."""

    async def scenario(net: SimNet) -> None:
        peer, right = await net.peer("p0"), await net.peer("p1")
        strangers = [await net.peer(f"h{number}.evil.org") for number in range(3)]
        peer.endpoint.serve(Say, echo)
        for each in (peer, *strangers):
            each.endpoint.clock.ahead_s = 7200.0
        for each in (*strangers, right):
            await each.endpoint.call(peer.contact, Say("x"), timeout_s=5.0)
            await sim.sleep(1.0)
        (warning,) = peer.seen(Warned)
        said = f"the clock of {right.peer_id.short()} is 7200 s behind the network's: that one is wrong"
        assert warning.message == f"{said}, as 1 of 1 other hosts agree with us"
        assert peer.endpoint.clock_ahead_s == pytest.approx(-3600.0, abs=1.0)  # of two hosts, not of four keys
        right.endpoint.clock.known_time = lambda: None  # type: ignore[method-assign]
        await sim.sleep(90.0)
        assert peer.endpoint.clock_ahead_s == pytest.approx(-7200.0, abs=1.0)  # no time is not the same time

    on_sim(scenario)
