"""Whims of hosts and network: what each of them does, and that a run with them follows from its seed."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

import pytest

from shoal import sim
from shoal.errors import SimulationError
from shoal.sim import SimHost, SimNetwork, Swarm, Whims
from shoal.transport.base import Pipe


class Reader:
    """One end of a pipe, which takes what comes, and remembers when it came."""

    def __init__(self) -> None:
        self.came: list[tuple[float, bytes]] = []
        self.lost: str | None = None
        self.pipe: Pipe | None = None

    def pipe_opened(self, pipe: Pipe, greeting: bytes) -> None:
        """See `PipeUser`."""
        self.pipe = pipe

    def data_received(self, data: bytes) -> None:
        """See `PipeUser`."""
        self.came.append((asyncio.get_running_loop().time(), data))

    def pipe_lost(self, reason: str) -> None:
        """See `PipeUser`."""
        self.lost = reason

    def resume_writing(self) -> None:
        """See `PipeUser`."""


class Sent(NamedTuple):
    """What became of messages of 100 bytes, sent 10 ms apart over a latency of 10 ms."""

    receiver: Reader
    sender: Reader


def send(whims: Whims | None, messages: int = 200, *, seed: int = 1) -> Sent:
    """One host sends so many messages to another one."""
    both = Sent(Reader(), Reader())

    async def main() -> None:
        network = SimNetwork(latency_s=0.01)
        network.add_host("a")
        network.add_host("b")
        network.listen("b", 1, lambda greeting: both.receiver, greeting=b"")
        await network.open("a", "b", 1, greeting=b"", user=both.sender)
        for number in range(messages):
            assert both.sender.pipe is not None
            both.sender.pipe.send(bytes([number % 256]) * 100)
            await sim.sleep(0.01)
        await sim.sleep(5.0)

    sim.run(main, seed=seed, whims=whims)
    return both


def test_reads_are_short() -> None:
    """The bytes of a delivery come in up to four pieces, in order, and all of them."""
    receiver, _ = send(Whims(short_reads=1.0))
    assert len(receiver.came) > 300
    assert max(len(data) for _, data in receiver.came) <= 100
    assert b"".join(data for _, data in receiver.came) == b"".join(bytes([n]) * 100 for n in range(200))


def test_bytes_come_late() -> None:
    """Some come later than the others, and none before an earlier one."""
    plain, late = (send(whims).receiver.came for whims in (None, Whims(late_bytes=0.1, late_bytes_s=0.5)))
    delays = [after - before for (before, _), (after, _) in zip(plain, late, strict=True)]
    assert min(delays) == pytest.approx(0.0, abs=1e-6)
    assert 0.1 < max(delays) <= 0.5
    assert [data for _, data in late] == [data for _, data in plain]


def test_a_connection_breaks() -> None:
    """Both sides learn of it, and what was under way is lost."""
    receiver, sender = send(Whims(resets=0.05))
    assert receiver.lost == "the connection broke"
    assert sender.lost == "the connection was reset by the other side"
    assert 0 < len(receiver.came) < 200


def test_timers_fire_late() -> None:
    """By up to as much as was asked for, never early; so two of one instant may change places."""
    fired: list[tuple[int, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_at(1.0, fire, number)
        await sim.sleep(3.0)

    def fire(number: int) -> None:
        fired.append((number, asyncio.get_running_loop().time()))

    sim.run(main, whims=Whims(late_timers_s=0.2))
    assert all(1.0 <= at <= 1.2 for _, at in fired)
    assert sorted(number for number, _ in fired) == list(range(50))
    assert [number for number, _ in fired] != list(range(50))


async def turns(said: list[str], host: SimHost) -> None:
    """Say who has a turn, ten times, at the same instants as all others."""
    for number in range(10):
        said.append(f"{host.name}{number}")
        await sim.sleep(0.1)


def test_hosts_take_turns_in_another_order() -> None:
    """Each host does what it does in its own order."""

    async def main() -> None:
        swarm = Swarm[None]()
        await swarm.start_peers("abc", lambda host: turns(said, host))

    orders = []
    for whims in (None, Whims(other_order=True)):
        said: list[str] = []
        sim.run(main, seed=3, whims=whims)
        orders.append(said)
    plain, other = orders
    assert plain == [f"{name}{number}" for number in range(10) for name in "abc"]
    assert other != plain
    assert sorted(other, key=lambda each: each[0]) == sorted(plain, key=lambda each: each[0])


def test_work_takes_time() -> None:
    """A function given to the executor returns what it returns, some time later."""

    async def work(host: SimHost) -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        return await host.env.executor.run(sum, [1, 2, 3]), loop.time() - began

    async def main() -> None:
        swarm = Swarm[tuple[int, float]]()
        result, took_s = await swarm.start_peer("a", work)
        assert result == 6
        assert 0 < took_s <= 0.4

    sim.run(main, seed=2, whims=Whims(slow_work=1.0, slow_work_s=0.2))


def test_whims_end_when_the_test_says_so() -> None:
    """After `calm` a simulation is as exact as any other."""

    async def main() -> None:
        sim.calm()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await sim.sleep(1.0)
        assert loop.time() == began + 1.0

    sim.run(main, whims=Whims(late_timers_s=0.2))
    sim.run(main)  # without whims there are none to end


def test_calm_is_for_simulations_only() -> None:
    """Elsewhere there are no whims to end."""

    async def main() -> None:
        sim.calm()

    with pytest.raises(SimulationError, match="for simulations only"):
        asyncio.run(main())


def test_the_same_seed_gives_the_same_whims() -> None:
    """A run with all of them is played again from its seed."""
    whims = Whims(short_reads=0.5, late_bytes=0.1, late_bytes_s=0.3, late_timers_s=0.02, other_order=True)
    assert send(whims).receiver.came == send(whims).receiver.came
    assert send(whims).receiver.came != send(whims, seed=2).receiver.came


def test_a_failure_names_the_seed_and_the_whims() -> None:
    """With these two anybody can play it again."""

    async def main() -> None:
        raise RuntimeError("a defect")

    whims = Whims.drawn(random.Random(5))
    with pytest.raises(RuntimeError) as raised:
        sim.run(main, seed=7, whims=whims)
    assert raised.value.__notes__ == [f"simulation seed: 7; {whims}"]


def test_each_whim_is_drawn_in_some_runs_and_not_in_others() -> None:
    """So that a failure may need few of them."""
    drawn = [Whims.drawn(random.Random(number)) for number in range(50)]
    for name in ("short_reads", "late_bytes", "resets", "late_timers_s", "other_order", "slow_work"):
        values = {getattr(whims, name) for whims in drawn}
        assert 0 in values, name
        assert len(values) > 1, name
