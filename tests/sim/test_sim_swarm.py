"""Swarms of peers from a factory: environments, ownership, restarts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal import sim
from shoal.errors import ClosedError, ConfigError, LocalError, PeerTimeout, PeerUnreachable
from shoal.sim import SimHost, SimNetwork, Swarm, current_owner
from shoal.transport.base import Connection


async def read(connection: Connection, nbytes: int) -> bytes:
    """The next bytes."""
    buffer = bytearray(nbytes)
    await connection.readinto(buffer)
    return bytes(buffer)


class EchoPeer:
    """Answers each byte with itself, and counts its own seconds."""

    def __init__(self, host: SimHost) -> None:
        self.host = host
        self.seconds = 0
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, host: SimHost) -> EchoPeer:
        """The factory."""
        peer = cls(host)
        await host.transport.listen(peer._accept)
        peer._tasks.append(asyncio.create_task(peer._count()))
        return peer

    def _accept(self, connection: Connection) -> None:
        self._tasks.append(asyncio.create_task(self._serve(connection)))

    async def _serve(self, connection: Connection) -> None:
        try:
            while True:
                await connection.write(await read(connection, 1))
        except PeerUnreachable:
            connection.abort()

    async def _count(self) -> None:
        while True:
            await sim.sleep(1)
            self.seconds += 1

    async def ask(self, other: SimHost, timeout_s: float = 5) -> bytes:
        """Send a byte to another peer and return its answer."""
        connection = await self.host.transport.dial(other.peer_id, [other.address], timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await connection.write(b"?")
                return await read(connection, 1)
        finally:
            connection.abort()


async def echo_swarm(*names: str, **options: Any) -> Swarm[EchoPeer]:
    """A swarm of echo peers."""
    swarm = Swarm[EchoPeer](**options)
    await swarm.start_peers(names, EchoPeer.start)
    return swarm


def test_every_host_has_its_own_environment_from_the_seed() -> None:
    """Identity, address and chance follow from seed and name; the clock from virtual time."""

    def hosts(seed: int) -> list[SimHost]:
        async def main() -> list[SimHost]:
            swarm = await echo_swarm("a", "b", epoch_s=1000.0, clock_skew_s=2.0)
            await sim.sleep(50)
            return [swarm.host(name) for name in "ab"]

        return sim.run(main, seed=seed)

    (a, b), (same, _), (other, _) = hosts(1), hosts(1), hosts(2)
    assert a.peer_id == same.peer_id
    assert len({a.peer_id, b.peer_id, other.peer_id}) == 3
    draws = [host.env.rng.random() for host in (a, same, b, other)]
    assert draws[0] == draws[1]
    assert len(set(draws)) == 3
    assert str(a.address) == f"/dns/a/tcp/4000/p2p/{a.peer_id}"
    assert a.env.clock.monotonic() == 50.0
    skews = [host.env.clock.time() - 1050.0 for host in (a, b)]
    assert all(0 < abs(skew) <= 2.0 for skew in skews)
    assert skews[0] != skews[1]


def test_peers_talk_and_belong_to_their_hosts() -> None:
    """What the factory and its acceptor start is the host's."""

    async def main() -> None:
        swarm = await echo_swarm("a", "b")
        assert await swarm.run_on("a", swarm.peer("a").ask, swarm.host("b")) == b"?"
        assert list(swarm.peers) == ["a", "b"]
        assert current_owner() is None
        b = swarm.network.owner("b")
        assert len([task for task in b.tasks if not task.done()]) >= 1
        assert all(task.owner is b for task in b.tasks)

    sim.run(main)


def test_a_crashed_peer_stops_and_others_notice() -> None:
    """Its seconds are over; its name is free for a restart only."""

    async def main() -> None:
        swarm = await echo_swarm("a", "b")
        peer = swarm.peer("b")
        await sim.sleep(3.5)
        swarm.crash("b")
        swarm.crash("b")
        await sim.sleep(10)
        assert peer.seconds == 3
        assert list(swarm.peers) == ["a"]
        assert not swarm.is_alive("b")
        with pytest.raises(PeerUnreachable):
            await swarm.run_on("a", swarm.peer("a").ask, swarm.host("b"))
        with pytest.raises(ClosedError, match="no peer runs on host 'b'"):
            swarm.peer("b")
        with pytest.raises(ClosedError, match="restart it first"):
            await swarm.run_on("b", peer.ask, swarm.host("a"))
        with pytest.raises(ConfigError, match="runs a peer already"):
            await swarm.start_peer("b", EchoPeer.start)

    sim.run(main)


@pytest.mark.parametrize("fault", ["crash", "vanish"])
def test_a_restart_keeps_name_identity_and_address_only(fault: str) -> None:
    """A new life: new environment, new peer, nothing of the old one."""

    async def main() -> None:
        swarm = await echo_swarm("a", "b")
        old, old_peer = swarm.host("b"), swarm.peer("b")
        with pytest.raises(LocalError, match="is alive"):
            await swarm.restart("b")
        getattr(swarm, fault)("b")
        peer = await swarm.restart("b")
        new = swarm.host("b")
        assert peer is swarm.peer("b") is not old_peer
        assert (new.life, new.peer_id, new.address) == (1, old.peer_id, old.address)
        assert new.env is not old.env
        assert new.env.rng.random() != old.env.rng.random()
        assert await swarm.run_on("a", swarm.peer("a").ask, new) == b"?"

    sim.run(main)


def test_run_on_ends_when_its_host_does() -> None:
    """The caller is told; it neither hangs nor looks cancelled. Also if the call ignores its cancellation."""

    async def main() -> None:
        swarm = await echo_swarm("a")

        async def stubborn() -> None:
            while True:
                try:
                    await sim.sleep(5)
                except asyncio.CancelledError:
                    continue

        for function in (asyncio.get_running_loop().create_future, stubborn):

            async def wait(function: Any = function) -> None:
                await function()

            call = asyncio.ensure_future(swarm.run_on("a", wait))
            await sim.sleep(1)
            swarm.crash("a")
            with pytest.raises(ClosedError, match="'a' went down"):
                await call
            await swarm.restart("a")

    sim.run(main)


def test_run_on_hands_on_results_errors_and_cancellation() -> None:
    """As if it were called here."""

    async def main() -> None:
        swarm = await echo_swarm("a")

        async def divide(a: int, b: int) -> float:
            return a / b

        assert await swarm.run_on("a", divide, 1, b=2) == 0.5
        with pytest.raises(ZeroDivisionError):
            await swarm.run_on("a", divide, 1, 0)
        cancelled: list[bool] = []

        async def wait() -> None:
            try:
                await sim.sleep(100)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(swarm.run_on("a", wait), 1)
        await sim.sleep(0)
        assert cancelled == [True]

    sim.run(main)


def test_a_factory_that_fails_fails_its_start() -> None:
    """The error is the caller's; nothing counts as a peer."""

    async def main() -> None:
        swarm = Swarm[None]()

        async def fail(host: SimHost) -> None:
            raise ValueError(host.name)

        with pytest.raises(ValueError, match="a"):
            await swarm.start_peer("a", fail)
        assert swarm.peers == {}

    sim.run(main)


def test_a_crash_in_a_peers_background_task_fails_the_simulation() -> None:
    """A swarm that goes on while one of its peers has died of a bug must not pass."""

    async def main() -> None:
        swarm = await echo_swarm("a")

        async def fail() -> None:
            raise ValueError("bug")

        swarm.spawn("a", fail())
        await sim.sleep(1)

    with pytest.raises(ValueError, match="bug"):
        sim.run(main)


def test_a_stalled_peer_stands_still_and_a_partition_silences() -> None:
    """The swarm hands faults on to its network."""

    async def main() -> None:
        swarm = await echo_swarm("a", "b")
        a, b = swarm.peer("a"), swarm.host("b")
        swarm.stall("b")
        with pytest.raises(PeerTimeout):
            await swarm.run_on("a", a.ask, b)
        assert swarm.peer("b").seconds == 0
        swarm.unstall("b")
        assert await swarm.run_on("a", a.ask, b) == b"?"
        swarm.partition([["a"]])
        with pytest.raises(PeerTimeout):
            await swarm.run_on("a", a.ask, b)
        swarm.heal()
        assert await swarm.run_on("a", a.ask, b) == b"?"
        start = asyncio.get_running_loop().time()
        swarm.slow("b", 10)
        await swarm.run_on("a", a.ask, b)
        assert asyncio.get_running_loop().time() - start == pytest.approx(0.6)

    sim.run(main)


def test_a_client_peer_dials_and_cannot_be_dialed() -> None:
    """Behind a router that lets nothing in."""

    async def main() -> None:
        swarm = await echo_swarm("a")
        client = await swarm.start_peer("c", EchoPeer.start, client_mode=True)
        assert await swarm.run_on("c", client.ask, swarm.host("a")) == b"?"
        with pytest.raises(PeerUnreachable):
            await swarm.run_on("a", swarm.peer("a").ask, swarm.host("c"))

    sim.run(main)


def test_a_swarm_needs_virtual_time_and_known_hosts() -> None:
    """Misuse is told."""

    async def real() -> None:
        with pytest.raises(LocalError, match=r"inside of shoal\.sim\.run"):
            Swarm[None]()

    asyncio.run(real())

    async def main() -> None:
        swarm = await echo_swarm("a", network=SimNetwork(latency_s=0.5))
        with pytest.raises(ConfigError, match="no host 'b' in the swarm: it has a"):
            swarm.crash("b")

    sim.run(main)
