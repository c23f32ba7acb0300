"""Strangers lie about whether others can dial a peer, and where: honest peers stay reachable, where they listen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from shoal import sim
from shoal.averaging.core import PeerCore
from shoal.base.peer import Address, PeerID
from shoal.errors import PeerError, PeerRefused
from shoal.protocol.identity import Identity
from shoal.protocol.wire import (
    Contact,
    DhtFind,
    DhtFindReply,
    DhtFound,
    DialBack,
    DialedBack,
    FollowSteps,
    LendConnection,
    NoWayIn,
)
from shoal.rpc import Endpoint
from shoal.transport.memory import MemoryTransport
from tests.sim.optimizer_kit import Run
from tests.sim.test_hostile_words import NAMES, Liar, liar, lied_to
from tests.sim.test_reachability import HIDDEN, Cores, dial_ahead

VICTIM = "third"
"""A host that has nothing to do with the network."""

Answer = Callable[[Endpoint, PeerID, DialBack], Any]


def says_no(endpoint: Endpoint, peer: PeerID, _: DialBack) -> DialedBack:
    """Nobody gets in, at another host."""
    return DialedBack(False, VICTIM)


def says_yes(endpoint: Endpoint, peer: PeerID, _: DialBack) -> DialedBack:
    """It got in, at another host, and has not even dialed."""
    return DialedBack(True, VICTIM)


async def names_another(endpoint: Endpoint, peer: PeerID, request: DialBack) -> DialedBack:
    """It got in, and names another host."""
    host = endpoint.hosts_of(peer)[1]
    return DialedBack(await endpoint.dials.gets_in(Address(host, request.port, peer), timeout_s=3.0), VICTIM)


@dataclass
class Liars:
    """So many keys, on a host each or all on one."""

    cores: Cores
    count: int
    one_host: bool
    answer: Answer

    def __post_init__(self) -> None:
        self.found: list[tuple[str, PeerCore]] = []

    async def join(self) -> None:
        """Join the network, and get to know everybody."""
        for number in range(self.count):
            host = "liar" if self.one_host else f"liar{number}"
            if number and self.one_host:
                core: PeerCore = await self.cores.swarm.run_on(host, self._beside, host, number)
            else:
                core = await self.cores.add(host)
            core.endpoint.serve(DialBack, partial(self.answer, core.endpoint))
            self.found.append((host, core))

    async def _beside(self, host: str, number: int) -> PeerCore:
        """One more key on the same host."""
        sim_host, identity = self.cores.swarm.host(host), Identity.from_seed(bytes([number]) * 32)
        transport = MemoryTransport(identity, sim_host.network, host=host)
        first = self.cores.first
        assert first is not None
        return await PeerCore.start(identity, transport, sim_host.env, [first], client_mode=False)

    async def tell(self, *victims: PeerCore) -> None:
        """Say to each that nobody gets in where it listens."""
        for host, core in self.found:
            for victim in victims:
                request, to = NoWayIn(victim.endpoint.listens_at), victim.endpoint.contact
                await self.cores.swarm.run_on(host, core.endpoint.call, to, request, timeout_s=10.0)


WHERE = pytest.mark.parametrize("one_host", [False, True], ids=["hosts", "one"])
FULL = pytest.mark.long(full=True)
MANY = pytest.mark.parametrize("count", [pytest.param(1, marks=FULL), 3, pytest.param(10, marks=FULL)])
FIRST = pytest.mark.parametrize("first", [False, True], ids=["after", "before"])


@WHERE
@FIRST
@MANY
@pytest.mark.parametrize("answer", [says_no, says_yes, names_another])
def test_three_hosts_that_say_no_make_honest_peers_clients(
    answer: Answer, count: int, first: bool, one_host: bool
) -> None:
    """Whoever came first, and whatever they say: all announce where they listen, and no other host."""

    async def main() -> None:
        cores = Cores()
        honest, liars = [await cores.add("p0")], Liars(cores, count, one_host, answer)
        if first:
            await liars.join()
        honest += [await cores.add(f"p{number}") for number in range(1, 4)]
        if not first:
            await liars.join()
        for _ in range(2):
            await liars.tell(*honest)
            await sim.sleep(65.0)
            for core in honest:
                assert core.endpoint.contact.addresses == core.endpoint.listens_at
        assert not cores.warned
        assert VICTIM not in cores.swarm.network.hosts

    sim.run(main)


@WHERE
@FIRST
@MANY
def test_strangers_that_say_yes_leave_a_hidden_peer_a_client(count: int, first: bool, one_host: bool) -> None:
    """A yes is the dial itself: nothing came, so nobody gets in."""

    async def main() -> None:
        cores = Cores()
        await cores.add("p0")
        liars = Liars(cores, count, one_host, says_yes)
        if first:
            await liars.join()
        cores.swarm.network.wall(HIDDEN)
        hidden = await cores.add(HIDDEN)
        if not first:
            await liars.join()
        assert hidden.client_mode
        await sim.sleep(300.0)
        assert hidden.client_mode
        assert len(cores.warned[HIDDEN]) == 1

    sim.run(main)


def test_a_client_by_error_is_a_peer_again_within_two_minutes() -> None:
    """All that it was given lie; once it knows an honest one, that one dials it."""

    async def main() -> None:
        cores = Cores()
        liars = Liars(cores, 1, False, says_no)
        await liars.join()
        honest = await cores.add("p0")
        assert honest.client_mode
        await cores.add("p1", client_mode=False)
        await sim.sleep(120.0)
        assert not honest.client_mode

    sim.run(main)


def test_a_connection_to_a_peer_outweighs_all_that_say_no() -> None:
    """Those that contributed all lie, and are asked first; somebody has dialed this peer a moment ago."""

    async def main() -> None:
        cores = Cores()
        first = await cores.add("p0")
        liars = Liars(cores, 5, False, says_no)
        await liars.join()
        first.endpoint.trust.add_contributors(lambda: {core.peer_id for _, core in liars.found})
        await cores.add("p1")  # it dials the first
        await liars.tell(first)
        await sim.sleep(10.0)
        assert not first.client_mode

    sim.run(main)


@pytest.mark.parametrize("given", [True, False], ids=["given", "stranger"])
def test_only_a_peer_that_was_given_names_the_host_of_a_router(given: bool) -> None:
    """It has got in at the router's address. A stranger may have got in elsewhere, and name anybody."""

    async def main() -> None:
        cores = Cores()
        for number in range(2):
            core = await cores.add(f"p{number}")
            if given is (number == 0):
                core.endpoint.serve(DialBack, partial(names_another, core.endpoint))
        behind = await cores.add("behind")
        announced = [address.host for address in behind.endpoint.contact.addresses]
        assert announced == ([VICTIM, "behind"] if given else ["behind"])

    sim.run(main)


def test_a_question_that_comes_early_does_not_hide_a_later_one() -> None:
    """A liar has the peer ask; a moment later the way is shut, and who tells it so tells it once."""

    async def main() -> None:
        cores = Cores()
        first = await cores.add("p0")
        hidden = await cores.add(HIDDEN)
        liars = Liars(cores, 1, False, says_no)
        await liars.join()
        await liars.tell(hidden)
        await sim.sleep(5.0)
        cores.swarm.network.wall(HIDDEN)
        await cores.ask(first, hidden, NoWayIn(hidden.endpoint.listens_at))
        await sim.sleep(150.0)
        assert hidden.client_mode

    sim.run(main)


def test_who_asks_to_be_dialed_back_takes_its_place_among_all_dials() -> None:
    """As many as may be under way at a site are: it is told that nobody could try, not that nobody gets in."""

    async def main() -> None:
        cores = Cores()
        asked, asker = await cores.add("p0"), await cores.add("p1")
        limits = asked.endpoint._dialer.dials._limits
        while limits.begin(["p1"]):
            pass
        answer = await asyncio.gather(cores.ask(asker, asked, DialBack(4000)), return_exceptions=True)
        assert getattr(answer[0], "code", None) == "busy", answer

    sim.run(main)


def test_an_address_that_others_name_for_a_client_cuts_no_stream_to_it() -> None:
    """It has said itself that it only dials: it is asked for a connection, and nobody dials what a stranger names."""

    async def main() -> None:
        cores = Cores()
        first = await cores.add("p0")
        client = await cores.add("client", client_mode=True)
        await cores.add("p1")
        named = Contact(client.peer_id, (Address(VICTIM, 4000, client.peer_id),))
        for _ in range(3):
            first.endpoint.learn(named)
            stream = await cores.swarm.run_on("p0", first.endpoint.open, named, FollowSteps("run"), timeout_s=5.0)
            with pytest.raises(PeerRefused):
                await cores.swarm.run_on("p0", stream.recv)
            await sim.sleep(5.0)
        assert not first.endpoint.contact_of(client.peer_id).addresses
        assert client.peer_id not in first.node._neighbours.table

    sim.run(main)


def test_a_full_line_of_dials_shut_the_way_to_a_live_peer() -> None:
    """Somebody has this peer dial many strangers: a dial that cannot be made says nothing about the one it was for."""

    async def main() -> None:
        cores = Cores()
        first, second = await cores.add("p0"), await cores.add("p1")
        limits = first.endpoint._dialer.dials._limits
        while limits.begin(["p1"]):
            pass
        for _ in range(3):
            await cores.swarm.run_on("p0", dial_ahead, first, second)
            await sim.sleep(8.0)
        assert not first.endpoint.route_shut(second.peer_id)
        assert first.endpoint.contact_of(second.peer_id).addresses
        assert second.reachability.shut_out == []

    sim.run(main)


def test_a_peer_that_asks_for_connections_had_another_dial_it_hundreds_of_times_a_second() -> None:
    """A dial is a handshake with signatures: it costs as much as 20 small calls, of which a site has 500 a second."""

    async def main() -> None:
        cores, came = Cores(), list[float]()
        victim, liar = await cores.add("p0"), await cores.add("liar")
        accept = liar.endpoint.arrivals.accept

        def count(connection: Any) -> None:
            came.append(0.0)
            accept(connection)

        liar.endpoint._transport._acceptor = count  # type: ignore[attr-defined]

        async def ask() -> None:
            while True:
                with suppress(PeerError):
                    await liar.endpoint.call(victim.peer_id, LendConnection(), timeout_s=1.0)

        asking = [cores.swarm.spawn("liar", ask()) for _ in range(40)]
        await sim.sleep(10.0)
        for each in asking:
            each.cancel()
        assert 0 < len(came) < (4 + 10) * 500 / 20 + 40

    sim.run(main)


def test_peers_of_an_earlier_life_do_not_outvote_those_that_the_user_gave() -> None:
    """Two of the file of peers name another host; the one that was given knows better."""

    async def main() -> None:
        cores = Cores()
        await cores.add("p0")
        liars = Liars(cores, 2, False, names_another)
        await liars.join()
        victim = await cores.add("victim")
        victim.endpoint.trust.remember(core.peer_id for _, core in liars.found)
        await cores.swarm.run_on("victim", victim.reachability.find_out)
        assert victim.endpoint.contact.addresses == victim.endpoint.listens_at

    sim.run(main)


def test_three_hosts_that_say_no_stopped_a_run() -> None:
    """They say it unasked, and when they are asked: all three peers became clients, so nobody led a round."""

    async def main() -> None:
        run, liars = Run(target=24), list[Liar]()

        async def lie() -> None:
            while len(liars) < 3:
                liars.append(await liar(run, f"liar{len(liars)}"))
                liars[-1].core.endpoint.serve(DialBack, lambda peer, request: DialedBack(False, VICTIM))
            for each in liars:
                for name in NAMES:
                    victim = run.swarm.peer(name).participant.core.endpoint
                    request = NoWayIn(victim.listens_at)
                    await each.core.endpoint.call(Contact(victim.peer_id, victim.listens_at), request, timeout_s=5.0)
            await sim.sleep(5.0)

        calm, lied = await lied_to(run, lie, 30.0)
        assert lied > 0.75 * calm, (calm, lied)

    sim.run(main, seed=3)


def test_an_address_that_a_node_named_for_a_client_went_into_the_table() -> None:
    """The client answers on its own link: that proves nothing of what a stranger names."""

    async def main() -> None:
        cores = Cores()
        first = await cores.add("p0")
        client = await cores.add("client", client_mode=True)
        stranger = await cores.add("liar")
        named = Contact(client.peer_id, (Address(VICTIM, 4000, client.peer_id),))

        def answer(_: PeerID, request: DhtFind) -> DhtFindReply:
            return DhtFindReply([DhtFound([], [named]) for _ in request.keys])

        stranger.endpoint.serve(DhtFind, answer)
        await cores.swarm.run_on("p0", first.node.nearest, "key")
        assert client.peer_id not in first.node._neighbours.table

    sim.run(main)


def test_where_a_peer_was_reached_counts_more_than_where_others_say_that_it_is() -> None:
    """It was dialed, so it has not said itself where it listens; the last word of a stranger replaced its address."""

    async def main() -> None:
        cores = Cores()
        first = await cores.add("p0")
        second = await cores.add("p1", client_mode=False)
        second.endpoint.learn(Contact(first.peer_id, (Address(VICTIM, 4000, first.peer_id),)))
        assert second.endpoint.contact_of(first.peer_id).addresses[0] == first.endpoint.listens_at[0]

    sim.run(main)
