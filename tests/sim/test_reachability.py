"""Peers that nobody can dial: they find out and become clients, and whoever does not costs the others one round."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.averaging.core import PeerCore
from shoal.base.peer import Address
from shoal.errors import PeerError, PeerRefused
from shoal.events import Event, Warned
from shoal.protocol.wire import Contact, DialBack, DialedBack, FollowSteps, NoWayIn, Whereabouts
from shoal.sim import SimHost, SimNetwork, Swarm
from tests.sim.averaging_kit import SETTINGS, Trial
from tests.sim.optimizer_kit import Run

HIDDEN = "hidden"


class Cores:
    """A swarm of cores, which notes what each one warns of."""

    def __init__(self, network: SimNetwork | None = None) -> None:
        self.swarm: Swarm[PeerCore] = Swarm(network=network or SimNetwork(1))
        self.warned: dict[str, list[str]] = {}
        self.first: Address | None = None

    async def add(self, name: str, *, client_mode: bool | None = None) -> PeerCore:
        """Start one; the first begins the network."""

        async def factory(host: SimHost) -> PeerCore:
            host.env.events.subscribe(lambda event: self._note(name, event))
            initial = [self.first] if self.first is not None else []
            core = await PeerCore.start(host.identity, host.transport, host.env, initial, client_mode=client_mode)
            self.first = self.first or host.address
            return core

        return await self.swarm.start_peer(name, factory)

    def _note(self, name: str, event: Event) -> None:
        if isinstance(event, Warned):
            self.warned.setdefault(name, []).append(f"{event.where}: {event.message}")

    async def ask(self, asker: PeerCore, asked: PeerCore, request: Any) -> Any:
        """A call from one to the other."""
        name = next(name for name, peer in self.swarm.peers.items() if peer is asker)
        return await self.swarm.run_on(name, asker.endpoint.call, asked.endpoint.peer_id, request, timeout_s=10.0)


async def dial_ahead(core: PeerCore, other: PeerCore) -> None:
    """Begin to make a connection for the next stream."""
    core.endpoint.dial_ahead(other.peer_id)


@pytest.mark.parametrize("refuses", [False, True])
def test_who_cannot_be_reached_becomes_a_client_and_says_so(refuses: bool) -> None:
    """Behind a wall, silent or not: no address is announced, and the warning says what to do. Others are as before."""

    async def main() -> None:
        cores = Cores()
        open_ones = [await cores.add(f"p{number}") for number in range(3)]
        cores.swarm.network.wall(HIDDEN, refuses=refuses)
        hidden = await cores.add(HIDDEN)
        assert [core.client_mode for core in open_ones] == [False] * 3
        assert hidden.client_mode
        assert all(not core.endpoint.contact_of(hidden.peer_id).addresses for core in open_ones)
        assert all(hidden.peer_id not in core.node._neighbours.table for core in open_ones)
        (warning,) = cores.warned.pop(HIDDEN)
        assert "goes on as a client" in warning
        assert "announce_maddrs" in warning
        assert not cores.warned

    sim.run(main)


def test_who_can_be_reached_is_known_to_all_whom_it_met() -> None:
    """Its address comes with the answer, not before: in tables, and with the peers that it is connected with."""

    async def main() -> None:
        cores = Cores()
        first, second, third = [await cores.add(f"p{number}") for number in range(3)]
        assert not third.client_mode
        verdict = third.reachability.verdict
        assert verdict is not None
        assert len(verdict.reached) == 2
        for core in (first, second):
            assert core.endpoint.contact_of(third.peer_id) == third.endpoint.contact
            assert third.peer_id in core.node._neighbours.table

    sim.run(main)


@pytest.mark.parametrize("after_s", [0.12, 0.2])
def test_a_newcomer_waits_for_a_peer_that_froze_just_now(after_s: float) -> None:
    """It waits no longer than for any silent peer, whether it asks that one or tells it where it listens."""

    async def main() -> None:
        cores = Cores()
        for number in range(5):
            await cores.add(f"p{number}")
        loop = asyncio.get_running_loop()
        began = loop.time()
        loop.call_later(after_s, cores.swarm.stall, "p2", 20.0)
        newcomer = await cores.add("new")
        assert loop.time() - began < 2.0
        assert not newcomer.client_mode

    sim.run(main)


def test_nobody_is_made_to_dial_anybody_else() -> None:
    """The question names a port of the asker's own machine: at others, and at its own port, nothing is dialed."""

    async def main() -> None:
        cores = Cores()
        asked, asker, third = [await cores.add(f"p{number}") for number in range(3)]
        network = cores.swarm.network
        cores.swarm.network.wall("p2")
        before = network.traffic("p2")
        assert (await cores.ask(asker, asked, DialBack(4000))) == DialedBack(True, "p1")
        assert (await cores.ask(asker, asked, DialBack(22))) == DialedBack(False, "p1")
        moved = Address("p2", 4000, asker.peer_id)
        await cores.ask(asker, asked, Whereabouts(Contact(asker.peer_id, (moved,))))
        assert (await cores.ask(asker, asked, DialBack(4000))) == DialedBack(True, "p1")
        assert network.traffic("p2") == before
        with pytest.raises(PeerError):
            await cores.ask(asker, asked, Whereabouts(third.endpoint.contact))

    sim.run(main)


def test_questions_of_one_host_are_limited_whatever_its_keys() -> None:
    """32 in a burst, then one every two seconds."""

    async def main() -> None:
        cores = Cores()
        asked, asker = [await cores.add(f"p{number}") for number in range(2)]
        await sim.sleep(60.0)
        answers = 0
        for _ in range(60):
            try:
                await cores.ask(asker, asked, DialBack(4000))
                answers += 1
            except PeerRefused as error:
                assert error.code == "busy"  # noqa: PT017
        assert 32 <= answers <= 36

    sim.run(main)


def test_what_one_peer_says_of_the_way_in_makes_nobody_a_client() -> None:
    """A lie costs its victim a question to peers of its own choice."""

    async def main() -> None:
        cores = Cores()
        liar, victim, _third = [await cores.add(f"p{number}") for number in range(3)]
        announced = victim.endpoint.contact
        await cores.ask(liar, victim, NoWayIn(announced.addresses))
        await sim.sleep(10.0)
        assert victim.endpoint.contact == announced
        assert not cores.warned

    sim.run(main)


def test_the_word_of_who_is_shut_out_is_kept_for_advice() -> None:
    """Of an address that is announced, for half an hour, and of the last 16 peers that said so."""

    async def main() -> None:
        cores = Cores()
        victim = await cores.add("victim")
        others = [await cores.add(f"p{number}") for number in range(17)]
        announced = victim.endpoint.contact.addresses
        await cores.ask(others[0], victim, NoWayIn((Address("elsewhere", 4000, victim.peer_id),)))
        assert victim.reachability.shut_out == []
        for other in others:
            await cores.ask(other, victim, NoWayIn(announced))
        assert victim.reachability.shut_out == [other.peer_id for other in others[1:]]
        for number in range(2, 17):
            cores.swarm.crash(f"p{number}")  # half an hour of fewer peers costs less
        await sim.sleep(1700.0)
        assert victim.reachability.shut_out == [other.peer_id for other in others[1:]]
        await sim.sleep(200.0)
        assert victim.reachability.shut_out == []

    sim.run(main)


def test_a_wall_that_comes_later_makes_a_client_of_who_announced() -> None:
    """Also with client_mode=False: who dials it in vain tells it so, and it asks others before it believes it."""

    async def main() -> None:
        cores = Cores()
        for number in range(2):
            await cores.add(f"p{number}")
        hidden = await cores.add(HIDDEN, client_mode=False)
        cores.swarm.network.wall(HIDDEN)
        first = cores.swarm.peer("p0")
        assert first.endpoint.connected(hidden.peer_id)
        await cores.swarm.spawn("p0", dial_ahead(first, hidden))
        await sim.sleep(20.0)
        assert hidden.client_mode
        assert not first.endpoint.contact_of(hidden.peer_id).addresses

    sim.run(main)


def test_a_frozen_peer_is_not_taken_for_one_that_nobody_can_reach() -> None:
    """Nothing was heard of it while it was dialed: that says nothing of the way to it."""

    async def main() -> None:
        cores = Cores()
        first, second = [await cores.add(f"p{number}") for number in range(2)]
        cores.swarm.stall("p1", 12.0)
        await cores.swarm.spawn("p0", dial_ahead(first, second))
        await sim.sleep(14.0)
        assert first.endpoint.contact_of(second.peer_id).addresses
        assert not first.endpoint.route_shut(second.peer_id)

    sim.run(main)


def test_a_peer_that_wakes_while_it_is_dialed_is_not_taken_for_one_that_nobody_can_reach() -> None:
    """It was frozen when the second dial began, and answers on its link a moment before that is given up."""

    async def main() -> None:
        cores = Cores()
        a, b = await cores.add("a"), await cores.add("b")
        began = asyncio.get_running_loop().time()
        cores.swarm.stall("b")
        await cores.swarm.run_on("a", dial_ahead, a, b)
        await sim.sleep(began + 1.5 + 0.5 + 5.0 - 0.015 - asyncio.get_running_loop().time())
        cores.swarm.network.unstall("b")
        await sim.sleep(3.0)
        assert not a.endpoint.route_shut(b.peer_id)
        assert a.endpoint.contact_of(b.peer_id).addresses

    sim.run(main)


def test_a_peer_that_was_dialed_while_it_was_cut_off_can_be_dialed_once_it_is_back() -> None:
    """It comes back with a new link. All streams to it failed until the second dial, so a round waited for seconds."""

    async def main() -> None:
        cores = Cores(SimNetwork(1, backs_off=True))
        a, b = await cores.add("a"), await cores.add("b")
        await sim.sleep(5.0)
        link = a.endpoint._open.link(b.peer_id)
        assert link is not None
        cores.swarm.network.partition([["b"]])

        async def look() -> None:
            while True:
                b.endpoint.is_silent(a.peer_id)
                await sim.sleep(0.25)

        cores.swarm.spawn("b", look())
        await sim.sleep(0.5)
        await cores.swarm.run_on("a", dial_ahead, a, b)
        await sim.sleep(1.6)
        assert not a.endpoint.contact_of(b.peer_id).addresses  # there is doubt
        cores.swarm.network.heal()
        while a.endpoint._open.link(b.peer_id) is link:
            await sim.sleep(0.01)
        assert a.endpoint.contact_of(b.peer_id).addresses

    sim.run(main)


def test_a_client_for_want_of_reachability_stays_one_until_it_is_started_again() -> None:
    """Its router is mended after a quarter of an hour: it finds out by itself, and all know where it listens."""

    async def main() -> None:
        cores = Cores()
        open_ones = [await cores.add(f"p{number}") for number in range(3)]
        network = cores.swarm.network
        network.wall(HIDDEN)
        hidden = await cores.add(HIDDEN)
        await sim.sleep(900.0)
        assert hidden.client_mode
        assert len(cores.warned[HIDDEN]) == 1
        network.open_wall(HIDDEN)
        await sim.sleep(1800.0)
        assert not hidden.client_mode
        for core in open_ones:
            assert core.endpoint.contact_of(hidden.peer_id) == hidden.endpoint.contact
            assert hidden.peer_id in core.node._neighbours.table
        assert len(cores.warned[HIDDEN]) == 1

    sim.run(main)


def test_a_client_asks_ever_more_rarely() -> None:
    """Ten times in five hours; and silence is no answer: nobody is there to ask at the end."""

    async def main() -> None:
        cores = Cores()
        for number in range(2):
            await cores.add(f"p{number}")
        cores.swarm.network.wall(HIDDEN)
        hidden = await cores.add(HIDDEN)
        asked = 0
        ask = hidden.reachability._ask

        async def counted(peer: Any, rank: Any) -> Any:
            nonlocal asked
            asked += 1
            return await ask(peer, rank)

        hidden.reachability._ask = counted  # type: ignore[method-assign]
        await sim.sleep(5 * 3600.0)
        assert 16 <= asked <= 22  # two each time
        for number in range(2):
            cores.swarm.crash(f"p{number}")
        await sim.sleep(2 * 3600.0)
        assert hidden.client_mode

    sim.run(main)


async def open_stream(core: PeerCore, other: PeerCore) -> None:
    """Open a stream to a peer that serves no such stream: it says so on the stream."""
    stream = await core.endpoint.open(other.endpoint.contact, FollowSteps("run"), timeout_s=6.0)
    with pytest.raises(PeerRefused):
        await stream.recv()


@pytest.mark.parametrize("refuses", [False, True])
def test_a_live_peer_whose_way_was_shut_gave_no_state_for_a_minute(refuses: bool) -> None:
    """It has a link with who needs it, and can dial that one: it is asked to, as a peer that only dials is."""

    async def main() -> None:
        cores = Cores()
        donor = await cores.add("donor")
        newcomer = await cores.add("newcomer")
        cores.swarm.network.wall("donor", refuses=refuses)
        await cores.swarm.run_on("newcomer", dial_ahead, newcomer, donor)
        await sim.sleep(10.0)
        assert newcomer.endpoint.route_shut(donor.peer_id)
        await cores.swarm.run_on("newcomer", open_stream, newcomer, donor)

    sim.run(main)


def test_a_newcomer_that_can_no_longer_dial_the_only_peer_takes_its_state_all_the_same() -> None:
    """It has joined when the load begins: no dial to the other one succeeds any more, and that one can dial it."""

    async def main() -> None:
        run = Run(target=16)
        first = await run.add("p0")
        run.swarm.spawn("p0", first.train(4, duration_s=1.0, until=lambda: False))
        await sim.sleep(30.0)
        newcomer = await run.add("p1", seed=99)
        run.swarm.network.wall("p0")
        run.swarm.spawn("p1", newcomer.train(4, duration_s=1.0, until=lambda: False))
        await sim.sleep(30.0)
        assert newcomer.participant.core.endpoint.route_shut(first.participant.core.peer_id)
        assert newcomer.participant.epoch >= first.participant.epoch - 1 > 10
        assert newcomer.epochs[-1][0] > asyncio.get_running_loop().time() - 5.0

    sim.run(main, seed=5)


@pytest.mark.parametrize("seed", range(4))
def test_a_newcomer_was_cut_off_from_the_only_peer_by_dials_that_load_made_slow(seed: int) -> None:
    """Of all dials a third take 2 to 4 s and one of 20 fails, for five minutes: streams come all the time."""

    async def main() -> None:
        cores, rng, loop = Cores(), random.Random(seed), asyncio.get_running_loop()
        donor, newcomer = await cores.add("donor"), await cores.add("newcomer")
        for core in (donor, newcomer):
            transport: Any = core.endpoint._transport

            async def dial(*arguments: Any, timeout_s: float, quick: Any = transport.dial) -> Any:
                late_s = rng.choices([0.0, rng.uniform(2.0, 4.0), 8.0], [62, 33, 5])[0]
                await sim.sleep(min(late_s, timeout_s))
                return await quick(*arguments, timeout_s=max(timeout_s - late_s, 0.0))

            transport.dial = dial
        came = [began := loop.time()]
        while loop.time() < began + 300.0:
            with suppress(PeerError):
                await cores.swarm.run_on("newcomer", open_stream, newcomer, donor)
                came.append(loop.time())
            newcomer.endpoint.drop_idle(donor.peer_id)
            await sim.sleep(0.5)
        longest_s = max(later - earlier for earlier, later in pairwise([*came, loop.time()]))
        print(seed, len(came), f"{longest_s:.1f}")
        assert longest_s < 12.5  # a dial that fails takes 5 s, and here two may fail one after another

    sim.run(main, seed=seed)


@pytest.mark.parametrize("refuses", [False, True])
def test_an_address_that_nobody_reaches_costs_one_slow_round(refuses: bool) -> None:
    """Four averagers, one of them announces where nobody gets in: from the second round on they are quick again."""

    async def main() -> None:
        trial = Trial(settings=SETTINGS)
        names = ["a", "b", "c", HIDDEN]
        for number, name in enumerate(names):
            await trial.add(name, [torch.full((40_000,), float(number))])
        trial.swarm.network.wall(HIDDEN, refuses=refuses)
        loop, took, sizes = asyncio.get_running_loop(), [], []
        for _ in range(8):
            began = loop.time()
            results = await asyncio.gather(*(trial.step(name, timeout_s=30.0) for name in names))
            took.append(loop.time() - began)
            sizes.append({len(result.outcome.members) for result in results})
        assert sizes == [{4}] * 8
        print(refuses, [f"{each:.2f}" for each in took])
        assert sum(each > 1.0 for each in took) <= 1
        await trial.close()

    sim.run(main)
