"""Hosts are cheap, too: all that one owner has (a /64 of IPv6, a domain) has one limit, and one vote."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from shoal import sim
from shoal.errors import PeerRefused
from shoal.protocol.wire import DialBack, FollowSteps, StepsFrom, encode
from shoal.run.join.step_feed import MAX_FOLLOWERS
from shoal.state.wire import ShareLimits
from shoal.strategies import DiLoCo
from shoal.transport.tcp import TcpTransport
from tests.sim.optimizer_kit import Run
from tests.sim.rpc_kit import QUICK, ByHand, Net, Say, identity_of, note_frame, on_sim
from tests.sim.state_kit import Box, donors_of, fetch, new_swarm, node, random_tensors
from tests.sim.test_hostile_words import liar
from tests.sim.test_reachability import Cores


def test_questions_of_many_hosts_of_one_site_were_not_limited() -> None:
    """32 in a burst, then one every two seconds, from all hosts of the site together."""

    async def main() -> None:
        cores = Cores()
        asked = await cores.add("p0")
        askers = [await cores.add(f"h{number}.evil.org") for number in range(4)]
        await sim.sleep(60.0)
        answers = 0
        for _ in range(15):
            for asker in askers:
                try:
                    await cores.ask(asker, asked, DialBack(4000))
                    answers += 1
                except PeerRefused as error:
                    assert error.code == "busy"  # noqa: PT017
        assert 32 <= answers <= 40

    sim.run(main)


def test_each_host_of_a_site_had_an_allowance() -> None:
    """Of 800 small messages from four hosts 40 come at once, the others at 10 a second."""

    async def scenario(net: Net) -> None:
        b = await net.peer("b", limits=msgspec.structs.replace(QUICK, calls_per_host_s=10.0))
        taken, loop = list[float](), asyncio.get_running_loop()
        b.endpoint.take_notes(Say, lambda peer, note: taken.append(loop.time()))
        hands = [ByHand(net.transport(f"h{number}.evil.org"), b.contact) for number in range(4)]
        links = [await hand.link() for hand in hands]
        for link in links:
            await link.write(note_frame("Say", encode(Say("x"))) * 200)
        await sim.sleep(30.0)
        assert len(taken) < 10.0 * 30.0 + 4 * 32 + 40
        for hand in hands:
            await hand.close()

    on_sim(scenario)


def test_hosts_of_one_site_kept_all_others_from_following() -> None:
    """As one host with many keys: a quarter of the places is for others."""

    async def main() -> None:
        run = Run(target=1)
        first = await run.add("p0", strategy=DiLoCo(4))
        strangers, other = [await liar(run, f"h{number}.evil.org") for number in range(2)], await liar(run, "other")
        contact, opening = first.participant.core.endpoint.contact, FollowSteps("run")
        for number in range(MAX_FOLLOWERS):
            await strangers[number % 2].core.endpoint.open(contact, opening, timeout_s=5.0)
        stream = await other.core.endpoint.open(contact, opening, timeout_s=5.0)
        received = await stream.recv()
        assert received is not None
        assert isinstance(received[0], StepsFrom)

    sim.run(main, seed=3)


def test_hosts_of_one_site_kept_all_others_from_a_donor() -> None:
    """They took all four places; now a fourth is for others."""

    async def main() -> None:
        swarm = new_swarm()
        box = Box(random_tensors(1, 16))
        giver = await swarm.start_peer("donor", node(box, limits=ShareLimits(max_receivers=4)))
        names = [f"h{number}.evil.org" for number in range(4)]
        for name in (*names, "other"):
            await swarm.start_peer(name, node())
        downloads = [asyncio.create_task(fetch(swarm, name, donors_of(giver))) for name in names]
        await sim.sleep(3.0)
        downloads.append(asyncio.create_task(fetch(swarm, "other", donors_of(giver))))
        await sim.sleep(3.0)
        assert giver.donor is not None
        assert giver.donor._readers.of_peer(swarm.peer("other").peer)
        await asyncio.gather(*downloads)

    sim.run(main)


@pytest.mark.parametrize("domain", [".evil.org", ""], ids=["site", "hosts"])
def test_five_hosts_that_lie_set_the_time_of_three_honest_peers(domain: str) -> None:
    """A site has one vote; and where times differ, only peers vote that were given, or contributed."""

    async def main() -> None:
        cores = Cores()
        honest = [await cores.add(f"p{number}") for number in range(3)]
        if not domain:  # the first was given nobody, and is in a run with the others
            honest[0].endpoint.trust.add_contributors(lambda: {core.peer_id for core in honest[1:]})
        liars = [await cores.add(f"h{number}{domain}") for number in range(5)]
        for core in liars:
            core.endpoint.clock.ahead_s = 36_000.0
            core.endpoint.clock.told = lambda *_, **__: False  # type: ignore[method-assign]
            for victim in honest:
                await cores.ask(core, victim, DialBack(4000))
        await sim.sleep(200.0)
        assert [core.endpoint.clock.ahead_s for core in honest] == [0.0] * 3

    sim.run(main)


class _Connection:
    """A connection of this host, which notes that it was closed."""

    def __init__(self, host: str) -> None:
        self.remote_host, self.closed, self.proved_peer_id = host, False, b"x"
        self.bytes_received = self.bytes_sent = self.opened_at = 0

    def abort(self, _: str) -> None:
        self.closed = True


def test_a_network_of_ipv6_pushed_single_hosts_out() -> None:
    """Each of its addresses had one connection, as many as any other host."""
    transport: Any = TcpTransport(identity_of("a"))
    single, *crowd = [_Connection(host) for host in ("203.0.113.7", "2001:db8::1", "2001:db8::2", "2001:db8::3")]
    transport._alive = [single, *crowd]
    transport._make_place()
    assert not single.closed
    assert sum(each.closed for each in crowd) == 1
