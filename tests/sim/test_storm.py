"""What silence costs a run: a peer that falls silent, a newcomer, and a peer that comes back."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest

from shoal import sim
from shoal.averaging import AveragerSettings
from shoal.base.peer import PeerID
from shoal.events import EpochAdvanced, Event, GroupFormed, RoundFinished
from shoal.protocol.wire import Standing
from shoal.rpc import Endpoint
from shoal.rpc.dialing import Dialer
from shoal.run.gossip import ProgressGossip
from shoal.sim import SimNetwork
from shoal.sim.loop import world_time
from shoal.transport.base import Connection
from tests.sim.optimizer_kit import Run

PEERS, BATCH, BATCH_S, BATCHES = 4, 4, 0.33, 3


class Storm:
    """Trainers at a fixed pace, with the limits that a user has; and who contributed to which epoch when."""

    def __init__(self, seed: int, peers: int) -> None:
        target = peers * BATCH * BATCHES
        network = SimNetwork(seed, latency_s=0.001, backs_off=True)
        self.run = Run(target=target, network=network, averager=AveragerSettings())
        self.names = [f"p{number}" for number in range(peers)]
        self.epochs: dict[bytes, tuple[float, frozenset[str]]] = {}

    async def start(self) -> None:
        """All of them; returns when they train together."""
        for name in self.names:
            await self.run.add(name)
        for name in self.names:
            self.train(name)
        await sim.sleep(9.0)

    def train(self, name: str) -> None:
        """Let it train until its process ends."""
        swarm, loop = self.run.swarm, asyncio.get_running_loop()
        trainer = swarm.peer(name)

        def note(event: Event) -> None:
            last = trainer.participant.swarm_step.last_round
            if isinstance(event, EpochAdvanced) and last is not None:
                names = {swarm.host(each).peer_id: each for each in self.names}
                by = frozenset(names[peer] for peer in last.outcome.contributors)
                self.epochs.setdefault(event.digest, (world_time(loop), by))  # the own clock of one that froze is late

        swarm.host(name).env.events.subscribe(note)
        swarm.spawn(name, trainer.train(BATCH, duration_s=BATCH_S, until=lambda: False))

    def one_that(self, *, leads: bool) -> str:
        """The first peer that led the last search; or that did not."""
        finders = {name: self.run.swarm.peer(name).participant._averager._finder for name in self.names}
        return next(name for name, finder in finders.items() if finder.matchmaker._memory.leaders.led == leads)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Times between epochs, sorted."""
        times = sorted(at for at, _ in self.epochs.values())
        return sorted(b - a for a, b in pairwise([begin, *(at for at in times if begin < at < end), end]))

    def first_by(self, name: str, after: float) -> float:
        """When it contributed first after this."""
        return min(at for at, by in self.epochs.values() if at > after and name in by) - after


def play(seed: int, scenario: Callable[[Storm], object], peers: int = PEERS) -> None:
    """A scenario on a swarm that trains."""

    async def main() -> None:
        storm = Storm(seed, peers)
        await storm.start()
        await scenario(storm)  # type: ignore[misc]

    sim.run(main, seed=seed)


def freeze(seed: int, role: str, phase_s: float) -> None:
    """One stands still for 10 s from this moment of an epoch on."""

    async def scenario(storm: Storm) -> None:
        loop, swarm = asyncio.get_running_loop(), storm.run.swarm
        frozen = storm.one_that(leads=role == "leader")
        calm = storm.gaps(4.0, loop.time())
        last = max(at for at, _ in storm.epochs.values())
        await sim.sleep(max(0.0, last + statistics.median(calm) + phase_s - loop.time()))
        began = loop.time()
        swarm.stall(frozen, 10.0)
        await sim.sleep(10.0)
        woke = loop.time()
        assert storm.gaps(began, woke)[-1] <= calm[-1] + 2.0
        await sim.sleep(5.0)
        assert storm.first_by(frozen, woke) <= 2.5 * statistics.median(calm)
        assert storm.gaps(woke, loop.time())[-1] <= calm[-1] + 2.0

    play(seed, scenario)


@pytest.mark.parametrize(("role", "phase_s"), [("leader", 0.05), pytest.param("member", 0.6, marks=pytest.mark.long)])
def test_a_frozen_peer_costs_the_others_two_seconds_at_most(role: str, phase_s: float) -> None:
    """Any peer, at any time in an epoch; it is back within two epochs and a half of when it wakes."""
    freeze(0, role, phase_s)


def test_a_peer_whose_line_was_cut_waits_until_tcp_tries_again() -> None:
    """It does not: it is back within two epochs and a half of when it is healed, and costs the others two seconds."""

    async def scenario(storm: Storm) -> None:
        loop, swarm = asyncio.get_running_loop(), storm.run.swarm
        calm = storm.gaps(4.0, loop.time())
        began = loop.time()
        swarm.partition([["p2"]])
        await sim.sleep(10.0)
        swarm.heal()
        healed = loop.time()
        await sim.sleep(8.0)
        assert storm.first_by("p2", healed) <= 2.5 * statistics.median(calm)
        assert storm.gaps(began, loop.time())[-1] <= calm[-1] + 2.0

    play(2, scenario)


def test_a_peer_that_missed_that_there_is_enough_keeps_the_others_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not: it is waited for, so it is told again soon. Notes get no answer, and may be lost with a link."""
    tell, missed = Endpoint.tell, list[float]()

    async def scenario(storm: Storm) -> None:
        loop, swarm = asyncio.get_running_loop(), storm.run.swarm
        calm = storm.gaps(4.0, loop.time())
        deaf = swarm.host("p2").peer_id

        def lose(self: Endpoint, peers: Iterable[PeerID], message: Any) -> list[PeerID]:
            peers, now = list(peers), loop.time()
            if deaf in peers and message.others and (not missed or now < missed[0] + 0.1):
                missed.append(now)
                return [*tell(self, [peer for peer in peers if peer != deaf], message), deaf]
            return tell(self, peers, message)

        monkeypatch.setattr(Endpoint, "tell", lose)
        await sim.sleep(5.0)
        assert missed
        assert storm.gaps(4.0, loop.time())[-1] <= calm[-1] + 0.5

    play(3, scenario, peers=6)


def test_two_that_fall_silent_at_once_are_waited_for_one_after_the_other() -> None:
    """They are not: while the others wait for their leader, they look at each other, too."""

    async def scenario(storm: Storm) -> None:
        loop, swarm = asyncio.get_running_loop(), storm.run.swarm
        leader, member = storm.one_that(leads=True), storm.one_that(leads=False)
        calm = storm.gaps(4.0, loop.time())
        last = max(at for at, _ in storm.epochs.values())
        await sim.sleep(last + statistics.median(calm) + 1.0 - loop.time())
        began = loop.time()
        swarm.stall(leader, 10.0)
        swarm.stall(member, 10.0)
        await sim.sleep(8.0)
        assert storm.gaps(began, loop.time())[-1] <= calm[-1] + 1.5

    play(5, scenario)


def test_members_that_lost_their_coordinator_wait_for_the_verdict_of_one_that_stands_still() -> None:
    """They do not: a member stands still within a round, and then the coordinator, before it has found that out."""

    async def scenario(storm: Storm) -> None:
        loop, swarm = asyncio.get_running_loop(), storm.run.swarm
        leader, member = storm.one_that(leads=True), storm.one_that(leads=False)
        calm = storm.gaps(4.0, loop.time())
        formed = asyncio.Event()

        def note(event: Event) -> None:
            if isinstance(event, GroupFormed):
                formed.set()

        swarm.host(member).env.events.subscribe(note)
        await formed.wait()
        began = loop.time()
        swarm.stall(member, 10.0)
        await sim.sleep(0.3)
        swarm.stall(leader, 10.0)
        await sim.sleep(8.0)
        assert storm.gaps(began, loop.time())[-1] <= calm[-1] + 1.8

    play(7, scenario)


def test_a_killed_peer_counts_again_by_what_it_wrote_to_the_dht_before() -> None:
    """It does not: each of the others read its record, and then waited for it until it was found to be silent."""

    async def scenario(storm: Storm) -> None:
        swarm, rest = storm.run.swarm, [name for name in storm.names if name != "p2"]
        killed = swarm.host("p2").peer_id
        swarm.crash("p2")
        await sim.sleep(0.1)
        for _ in range(50):
            await sim.sleep(0.1)
            assert not [name for name in rest if killed in swarm.peer(name).participant._known.peers]

    play(4, scenario)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_peer_that_freezes_at_any_moment_costs_the_others_two_seconds_at_most(
    soak: Callable[[int, int], int],
) -> None:
    """The same, drawn at random."""
    for seed in range(soak(1, 100)):
        rng = random.Random(seed)
        freeze(seed, rng.choice(["leader", "member"]), rng.uniform(0.0, 1.5))


def test_a_newcomer_waits_for_the_next_step_of_the_others_for_ever() -> None:
    """It does not: epochs are shorter than it waits for a step that it was told of, and it takes part in the second."""

    async def scenario(storm: Storm) -> None:
        loop, swarm = asyncio.get_running_loop(), storm.run.swarm
        epoch_s = statistics.median(storm.gaps(4.0, loop.time()))
        assert epoch_s < 2.0
        swarm.crash("p1")
        await sim.sleep(1.0)
        began = loop.time()
        await swarm.restart("p1")
        storm.train("p1")
        await sim.sleep(8.0)
        assert storm.first_by("p1", began) <= 2.5 * epoch_s

    play(1, scenario)


@pytest.mark.parametrize("why", [pytest.param("another state", marks=pytest.mark.long), "a stranger"])
def test_a_peer_that_woke_does_not_know_who_came_meanwhile(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that came while it stood still know it as little, and it waits for samples of which it hears nothing.

    So it reads the DHT within half a second when it takes over a state, or when a keeper tells of a peer unknown to it.
    """
    look, looks = ProgressGossip._look, list[float]()

    async def noted(self: ProgressGossip) -> dict[PeerID, float]:
        if self._core.peer_id == woken:
            looks.append(asyncio.get_running_loop().time())
        return await look(self)

    monkeypatch.setattr(ProgressGossip, "_look", noted)
    woken: PeerID | None = None

    async def scenario(storm: Storm) -> None:
        nonlocal woken
        loop, swarm = asyncio.get_running_loop(), storm.run.swarm
        woken = swarm.host("p2").peer_id
        await sim.sleep(20.0)
        assert max(b - a for a, b in pairwise(looks)) > 3.0
        while loop.time() < looks[-1] + 1.0:
            await sim.sleep(0.1)
        gossip = swarm.peer("p2").participant._gossip
        said = swarm.peer("p3").participant.progress()

        async def happens() -> None:
            if why == "another state":
                gossip.announce_state(swarm.peer("p2").participant.view(), expected=False)
            else:
                gossip.hear_directly(said, [Standing(swarm.identity("stranger").peer_id, 8, 1.0)])

        began = loop.time()
        await swarm.run_on("p2", happens)
        await sim.sleep(0.5)
        assert looks[-1] >= began

    play(1, scenario, peers=6)


def test_a_newcomer_and_the_others_connect_only_in_its_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do it while it computes its first batch: in the round one is missing, that of its values to the leader."""
    dial, dialed = Dialer._dial, list[float]()

    async def noted(self: Dialer, peer: PeerID) -> Connection:
        dialed.append(asyncio.get_running_loop().time())
        return await dial(self, peer)

    monkeypatch.setattr(Dialer, "_dial", noted)

    async def scenario(storm: Storm) -> None:
        swarm, rounds = storm.run.swarm, list[tuple[float, float, bool]]()
        swarm.crash("p1")
        await sim.sleep(5.0)
        await swarm.restart("p1")

        def note(event: Event) -> None:
            if isinstance(event, RoundFinished):
                now = asyncio.get_running_loop().time()
                rounds.append((now - event.duration_s, now, swarm.host("p1").peer_id in event.peers))

        for name in storm.names:
            swarm.host(name).env.events.subscribe(note)
        storm.train("p1")
        await sim.sleep(5.0)
        began, ended = next((began, ended) for began, ended, is_in in rounds if is_in)
        assert sum(began <= at < ended for at in dialed) <= 1

    play(1, scenario)
