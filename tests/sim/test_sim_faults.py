"""Fault plans: as values, as they are played, and what the network promises under any of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import sim
from shoal.errors import ConfigError, PeerError, PeerUnreachable
from shoal.sim import (
    Crash,
    Fault,
    FaultPlan,
    HostFault,
    Partition,
    Restart,
    SimHost,
    SimNetwork,
    Slow,
    SlowLink,
    Stall,
    Swarm,
    Throttle,
    Vanish,
)
from shoal.sim.faults import _Player
from shoal.transport.base import Connection, Pipe
from tests.strategies import fault_plans

HOSTS = ("a", "b", "c")


def now() -> float:
    """Virtual time."""
    return asyncio.get_running_loop().time()


class Recorder:
    """Stands in for a swarm: writes down what is done to it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.down: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        def record(*arguments: Any) -> None:
            self.calls.append((now(), name, *arguments))

        return record

    def host(self, name: str) -> None:
        """Any host exists."""

    def is_alive(self, name: str) -> bool:
        """Whether it was not crashed."""
        return name not in self.down

    def crash(self, name: str) -> None:
        """Note it."""
        self.down.add(name)
        self.calls.append((now(), "crash", name))

    async def restart(self, name: str) -> None:
        """Note it."""
        self.down.discard(name)
        self.calls.append((now(), "restart", name))


def played(*events: Fault) -> list[tuple[Any, ...]]:
    """What a plan does, with the times."""

    async def main() -> list[tuple[Any, ...]]:
        await sim.sleep(100)
        recorder = Recorder()
        await FaultPlan(events).play(recorder)  # type: ignore[arg-type]
        return [(round(call[0] - 100, 6), *call[1:]) for call in recorder.calls]

    return sim.run(main)


def test_a_plan_is_played_in_the_order_of_its_times() -> None:
    """Relative to when it begins; what lasts is ended."""
    assert played(
        Slow(at_s=2, host="b", factor=3, duration_s=4),
        Crash(at_s=1, host="a"),
        Restart(at_s=5, host="a"),
        Partition(at_s=3, groups=(("a",), ("b", "c")), duration_s=0.5),
        Stall(at_s=1, host="c", duration_s=9),
        Vanish(at_s=7, host="b"),
    ) == [
        (1, "crash", "a"),
        (1, "stall", "c", 9),
        (2, "slow", "b", 3),
        (3, "partition", (("a",), ("b", "c"))),
        (3.5, "heal"),
        (5, "restart", "a"),
        (6, "slow", "b", 1.0),
        (7, "vanish", "b"),
    ]


def test_of_overlapping_faults_the_later_one_holds_to_its_own_end() -> None:
    """The end of the first must not end the second."""
    first = Partition(at_s=0, groups=(("a",),), duration_s=2)
    second = Partition(at_s=1, groups=(("b",),), duration_s=4)
    assert [call[:2] for call in played(first, second)] == [(0, "partition"), (1, "partition"), (5, "heal")]
    slow = Slow(at_s=0, host="a", factor=2, duration_s=3), Slow(at_s=1, host="a", factor=5, duration_s=1)
    assert played(*slow) == [(0, "slow", "a", 2), (1, "slow", "a", 5), (2, "slow", "a", 1.0)]


def test_what_is_impossible_is_passed_over() -> None:
    """A restart of a host that is alive."""
    assert played(Restart(at_s=1, host="a"), Crash(at_s=2, host="a"), Restart(at_s=3, host="a")) == [
        (2, "crash", "a"),
        (3, "restart", "a"),
    ]


def test_a_plan_is_a_value() -> None:
    """Its repr makes it again; it knows its hosts and its end."""
    plan = FaultPlan((Partition(at_s=1, groups=(("a",), ("b",)), duration_s=2.5), Crash(at_s=2, host="c")))
    assert eval(repr(plan)) == plan
    assert plan.hosts == ("a", "b", "c")
    assert plan.end_s == 3.5
    assert FaultPlan().end_s == 0.0


def test_bad_faults_are_refused() -> None:
    """Times, durations and factors; hosts when the plan is played."""
    with pytest.raises(ConfigError, match="at_s of Crash"):
        Crash(at_s=-1, host="a")
    with pytest.raises(ConfigError, match="duration_s of Stall"):
        Stall(at_s=1, host="a", duration_s=float("inf"))
    with pytest.raises(ConfigError, match="factor of Slow"):
        Slow(at_s=1, host="a", factor=0, duration_s=1)

    async def main() -> None:
        with pytest.raises(ConfigError, match="no host 'z'"):
            await FaultPlan((Crash(at_s=0, host="z"),)).play(Swarm[None]())

    sim.run(main)


def test_restarts_that_other_peers_prevent_are_returned() -> None:
    """And those that a crash cuts short are not an error at all."""

    async def main() -> None:
        swarm = Swarm[None]()

        async def start(host: SimHost) -> None:
            if host.life == 1:
                raise PeerUnreachable("nobody there")
            if host.life == 2:
                await sim.sleep(1000)

        await swarm.start_peer("a", start)
        restart = Restart(at_s=2, host="a")
        plan = FaultPlan((Crash(at_s=1, host="a"), restart))
        failed = await plan.play(swarm)
        assert [(event, str(error)) for event, error in failed] == [(restart, "nobody there")]
        again = FaultPlan((*plan.events, Crash(at_s=5, host="a")))
        assert await again.play(swarm) == []

    sim.run(main)


# ------------------------------------------------------------------------------------------- under any plan of faults


class Stream:
    """Bytes 0, 1, 2, … from one host to another, in pieces of various sizes; notes how far both sides came."""

    SIZE = 120_000
    DATA = bytes(number % 251 for number in range(SIZE))

    def __init__(self) -> None:
        self.sent = self.received = 0
        self.ended: dict[str, str] = {}

    async def send(self, connection: Connection, pause_s: float) -> None:
        """Write everything, wait for the answer that it came, close (which would not wait for long)."""
        try:
            while self.sent < self.SIZE:
                await sim.sleep(pause_s)
                piece = self.DATA[self.sent : self.sent + 1 + self.sent % 7001]
                await connection.write(piece)
                self.sent += len(piece)
            await connection.readinto(bytearray(1))
            await connection.close()
            self.ended["sender"] = "closed"
        except PeerError as error:
            self.ended["sender"] = str(error)

    async def receive(self, connection: Connection) -> None:
        """Read everything, answer, and read until the end; every byte must be the next one."""
        try:
            while self.received < self.SIZE:
                buffer = bytearray(min(1000, self.SIZE - self.received))
                await connection.readinto(buffer)
                assert buffer == self.DATA[self.received : self.received + len(buffer)]
                self.received += len(buffer)
            await connection.write(b"!")
            await connection.readinto(bytearray(1))
        except PeerError as error:
            self.ended["receiver"] = str(error)


async def stream_under(plan: FaultPlan, network: SimNetwork) -> tuple[Stream, str]:
    """A stream from a to b while the plan is played, and for a long time after."""
    stream, swarm = Stream(), Swarm[None](network=network)

    async def start(host: SimHost) -> None:
        if host.name == "b":
            await host.transport.listen(
                lambda connection: receivers.append(swarm.spawn("b", stream.receive(connection)))
            )

    async def begin() -> None:
        a, b = swarm.host("a"), swarm.host("b")
        senders.append(swarm.spawn("a", stream.send(await a.transport.dial(b.peer_id, [b.address], timeout_s=9), 0.05)))

    receivers: list[asyncio.Task[None]] = []
    senders: list[asyncio.Task[None]] = []
    await swarm.start_peers(HOSTS, start)
    await swarm.run_on("a", begin)
    await plan.play(swarm)
    await sim.sleep(1000)
    return stream, network.trace_digest()


SETTINGS: dict[str, Any] = {
    "latency_s": 0.03,
    "jitter_s": 0.02,
    "loss": 0.01,
    "bandwidth_bytes_s": 40_000,
    "window_bytes": 20_000,
}


@settings(max_examples=60)
@given(plan=fault_plans(HOSTS, 10.0, kinds=(Stall, Slow, Partition)), seed=st.integers(0, 3))
def test_faults_that_pass_lose_nothing(plan: FaultPlan, seed: int) -> None:
    """Stalls, slowness and partitions only delay: all bytes come in order, then the end. Twice the same."""

    def once() -> str:
        async def main() -> str:
            stream, digest = await stream_under(plan, SimNetwork(seed, **SETTINGS))
            assert stream.received == stream.sent == Stream.SIZE
            assert stream.ended["receiver"].startswith("the connection has ended: the connection was closed by")
            return digest

        return sim.run(main, seed=seed)

    assert once() == once()


@settings(max_examples=100)
@given(plan=fault_plans(HOSTS, 10.0), seed=st.integers(0, 3))
def test_whatever_happens_what_arrives_is_a_beginning_of_what_was_sent(plan: FaultPlan, seed: int) -> None:
    """No gap, no repetition; who lives learns of a crash or a return; and the same seed gives the same again."""

    def once() -> str:
        async def main() -> str:
            stream, digest = await stream_under(plan, SimNetwork(seed, **SETTINGS))
            fates = {
                host: [type(e) for e in plan.events if isinstance(e, Crash | Vanish) and e.host == host]
                for host in "ab"
            }
            if not fates["a"] and Crash in fates["b"][:1]:
                assert "sender" in stream.ended
            if not fates["b"] and Crash in fates["a"][:1]:
                assert "receiver" in stream.ended
            if not fates["a"] and not fates["b"]:
                assert stream.received == Stream.SIZE
            return digest

        return sim.run(main, seed=seed)

    assert once() == once()


def test_a_slow_link_carries_little_and_is_as_before_when_it_is_over() -> None:
    """Only between the two: latency times the factor, and at most so many bytes per second for each pipe."""

    async def main() -> None:
        swarm = Swarm[object](network=SimNetwork(1, latency_s=0.01))
        network = swarm.network
        for name in HOSTS:
            network.add_host(name)

        fault = SlowLink(at_s=1.0, between=("a", "b"), factor=100.0, bandwidth_bytes_s=1000.0, duration_s=2.0)
        playing = asyncio.ensure_future(_Player(swarm).play(FaultPlan((fault,))))
        await sim.sleep(1.5)
        assert (network.link("a", "b").latency_s, network.link("b", "a").bandwidth_bytes_s) == (1.0, 1000.0)
        assert network.link("a", "c").latency_s == 0.01
        await playing
        assert network.link("a", "b").latency_s == 0.01
        assert now() == 3.0

    sim.run(main)


def test_a_narrow_link_takes_its_time_for_bytes() -> None:
    """5,000 bytes at 1,000 bytes per second; without the limit they are there after one latency."""

    async def main() -> list[float]:
        network = SimNetwork(1, latency_s=0.01)
        taken: list[float] = []
        for rate in (None, 1000.0):
            if rate is not None:
                network.set_link("a", "b", bandwidth_bytes_s=rate)
            got = asyncio.Event()
            network.listen("b", 7 + len(taken), lambda greeting, got=got: _Sink(5000, got), greeting=b"")  # type: ignore[misc]
            user = _Sink(1, asyncio.Event())
            await network.open("a", "b", 7 + len(taken), greeting=b"", user=user)
            began = now()
            user.pipe.send(bytes(5000))
            await got.wait()
            taken.append(now() - began)
        return taken

    free_s, narrow_s = sim.run(main)
    assert free_s == pytest.approx(0.01)
    assert narrow_s == pytest.approx(5.01)


class _Sink:
    """Takes bytes, and says when there are enough."""

    def __init__(self, enough: int, got: asyncio.Event) -> None:
        self.enough, self.got = enough, got
        self.pipe: Pipe

    def pipe_opened(self, pipe: Pipe, greeting: bytes) -> None:
        self.pipe = pipe

    def data_received(self, data: bytes) -> None:
        self.enough -= len(data)
        self.pipe.consumed(len(data))
        if self.enough <= 0:
            self.got.set()

    def resume_writing(self) -> None:
        pass

    def pipe_lost(self, reason: str) -> None:
        pass


def test_throttle_and_own_kinds_are_played() -> None:
    """A throttled host stands still most of each period; a kind of a program's own does what it says."""

    class Shout(HostFault, frozen=True, kw_only=True):
        def actions(self, swarm: Swarm[Any]) -> list[tuple[float, Any]]:
            return [(self.at_s, lambda: swarm.shout(self.host))]  # type: ignore[attr-defined]

    async def main() -> list[tuple[Any, ...]]:
        recorder = Recorder()
        plan = FaultPlan((Throttle(at_s=1.0, host="a", duration_s=2.5), Shout(at_s=2.2, host="b")))
        await plan.play(recorder)  # type: ignore[arg-type]
        return recorder.calls

    calls = sim.run(main)
    stalls = [(1.0, "stall", "a", 0.99), (2.0, "stall", "a", 0.99), (3.0, "stall", "a", 0.99)]
    assert calls == [*stalls[:2], (2.2, "shout", "b"), stalls[2]]


def test_a_kind_that_does_nothing_is_refused() -> None:
    """Base classes are no faults."""

    async def main() -> None:
        with pytest.raises(ConfigError, match="actions"):
            await FaultPlan((HostFault(at_s=0.0, host="a"),)).play(Recorder())  # type: ignore[arg-type]

    sim.run(main)
