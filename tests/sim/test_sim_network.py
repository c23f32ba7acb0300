"""The simulated network: exact times, order, backpressure, and every fault as the host and the others see it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from shoal import sim
from shoal.base.peer import Address, PeerID
from shoal.errors import ClosedError, ConfigError, LocalError, PeerTimeout, PeerUnreachable
from shoal.sim import SimNetwork
from shoal.transport.base import Connection
from shoal.transport.memory import MemoryTransport

MB = 1_000_000


def now() -> float:
    """Virtual time."""
    return asyncio.get_running_loop().time()


def peer_id(name: str) -> PeerID:
    """An id for a host's peer."""
    return PeerID(name.encode().ljust(32, b"."))


async def read(connection: Connection, nbytes: int) -> bytes:
    """The next bytes."""
    buffer = bytearray(nbytes)
    await connection.readinto(buffer)
    return bytes(buffer)


@dataclass
class Net:
    """A network whose hosts all listen at port 4000."""

    network: SimNetwork
    transports: dict[str, MemoryTransport]
    accepted: dict[str, asyncio.Queue[Connection]]

    async def listen(self, *names: str) -> None:
        """Start to listen on these hosts."""
        for name in names:
            self.transports[name] = transport = MemoryTransport(peer_id(name), self.network, host=name, port=4000)
            self.accepted[name] = asyncio.Queue()
            await transport.listen(self.accepted[name].put_nowait)

    async def dial(self, source: str, target: str, timeout_s: float = 60) -> Connection:
        """A connection from one to the other."""
        address = Address(target, 4000, peer_id(target))
        return await self.transports[source].dial(peer_id(target), [address], timeout_s=timeout_s)

    async def pipe(self, source: str, target: str) -> tuple[Connection, Connection]:
        """Both ends of a new connection."""
        dialed = await self.dial(source, target)
        return dialed, await self.accepted[target].get()


async def make_net(*names: str, **options: Any) -> Net:
    """Hosts that listen; options are those of `SimNetwork`."""
    net = Net(SimNetwork(**options), {}, {})
    await net.listen(*names)
    return net


def simulate(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test."""
    sim.run(main, max_time_s=10_000)


# -------------------------------------------------------------------------------------------------- latency, bandwidth


def test_a_connection_takes_its_round_trips_and_a_message_one_latency() -> None:
    """Two round trips to open; the acceptor has it half a round trip earlier; then one latency each way."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1)
        dialing = asyncio.ensure_future(net.dial("a", "b"))
        accepted = await net.accepted["b"].get()
        assert now() == pytest.approx(0.3)
        dialed = await dialing
        assert now() == pytest.approx(0.4)
        await dialed.write(b"ping")
        assert now() == pytest.approx(0.4)
        await read(accepted, 4)
        assert now() == pytest.approx(0.5)
        await accepted.write(b"pong")
        await read(dialed, 4)
        assert now() == pytest.approx(0.6)

    simulate(main)


def test_round_trips_of_a_dial_can_be_chosen() -> None:
    """One, as for plain TCP."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1, dial_round_trips=1)
        await net.dial("a", "b")
        assert now() == pytest.approx(0.2)

    simulate(main)


@pytest.mark.parametrize(("up", "down"), [(MB, None), (None, MB), (MB, MB), (MB, 2 * MB), (3 * MB, MB)])
def test_a_megabyte_takes_a_second_at_a_megabyte_per_second(up: float | None, down: float | None) -> None:
    """The slower of the two lines decides, and the latency comes on top, once."""

    async def main() -> None:
        net = await make_net(latency_s=0.25)
        net.network.add_host("a", up_bytes_s=up)
        net.network.add_host("b", down_bytes_s=down)
        await net.listen("a", "b")
        dialed, accepted = await net.pipe("a", "b")
        start = now()
        writer = asyncio.ensure_future(dialed.write(bytes(MB)))
        await read(accepted, MB)
        assert now() - start == pytest.approx(1.25, abs=1e-6)
        await writer

    simulate(main)


def test_pipes_share_an_uplink_fairly() -> None:
    """Three transfers of 1 MB begun at the same time end together after 3 s; small messages go between them."""

    async def main() -> None:
        net = await make_net("a", "b", "c", "d", latency_s=0.0, bandwidth_bytes_s=MB)
        pipes = [await net.pipe("a", name) for name in "bcd"]
        calls = await net.pipe("a", "b")
        start, ends = now(), list[float]()

        async def take(connection: Connection) -> None:
            await read(connection, MB)
            ends.append(now() - start)

        writers = [asyncio.ensure_future(dialed.write(bytes(MB))) for dialed, _ in pipes]
        readers = [asyncio.ensure_future(take(accepted)) for _, accepted in pipes]
        await sim.sleep(1)
        await calls[0].write(b"!" * 100)
        await read(calls[1], 100)
        assert now() - start == pytest.approx(1.0, abs=0.001)
        await asyncio.gather(*writers, *readers)
        assert ends == pytest.approx([3.0, 3.0, 3.0], abs=0.2)
        assert max(ends) == pytest.approx(3.0001, abs=1e-6)

    simulate(main)


def test_short_messages_of_a_pipe_take_a_turn_each_on_a_full_uplink() -> None:
    """Those that wait behind one that is not short travel together: else a pipe carries one in each second."""

    async def main() -> None:
        net = await make_net("a", "b", "c", latency_s=0.0, bandwidth_bytes_s=15_000.0)
        (bulk, taken), (calls, answers) = await net.pipe("a", "b"), await net.pipe("a", "c")
        writer = asyncio.ensure_future(bulk.write(bytes(600_000)))
        reader = asyncio.ensure_future(read(taken, 600_000))
        await sim.sleep(0.5)
        start = now()
        for nbytes in [3000, *[30] * 50]:
            await calls.write(bytes(nbytes))
        await read(answers, 3000 + 50 * 30)
        assert now() - start < 2.5
        await asyncio.gather(writer, reader)

    simulate(main)


def test_pipes_share_a_downlink() -> None:
    """Three hosts send 1 MB each to one whose line takes 1 MB/s: all is there after 3 s, and not before."""

    async def main() -> None:
        net = await make_net("a", "b", "c", "d", latency_s=0.0, bandwidth_bytes_s=MB)
        pipes = [await net.pipe(name, "d") for name in "abc"]
        start = now()
        writers = [asyncio.ensure_future(dialed.write(bytes(MB))) for dialed, _ in pipes]
        await asyncio.gather(*(read(accepted, MB) for _, accepted in pipes))
        assert now() - start == pytest.approx(3.0, abs=1e-6)
        await asyncio.gather(*writers)

    simulate(main)


def test_the_window_limits_a_pipe_to_one_window_per_round_trip() -> None:
    """As in TCP: 100 kB per 0.2 s, however fast the line."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1, window_bytes=100_000)
        dialed, accepted = await net.pipe("a", "b")
        start = now()
        writer = asyncio.ensure_future(dialed.write(bytes(10 * MB)))
        await read(accepted, 10 * MB)
        # A pipe may exceed its window by one segment (64 KiB): between 100 kB and 166 kB per round trip.
        assert 0.2 * 10 * MB / 166_000 < now() - start < 0.2 * 10 * MB / 100_000 + 0.1
        await writer

    simulate(main)


def test_jitter_delays_and_never_reorders() -> None:
    """Each message between latency and latency + jitter, or when the one before it comes."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1, jitter_s=0.5, seed=3)
        dialed, accepted = await net.pipe("a", "b")
        delays = []
        for number in range(50):
            start = now()
            await dialed.write(bytes([number]))
            assert await read(accepted, 1) == bytes([number])
            delays.append(now() - start)
        assert min(delays) >= 0.1
        assert max(delays) <= 0.6
        assert len(set(delays)) == 50
        for number in range(200):
            await dialed.write(bytes([number]))
        assert await read(accepted, 200) == bytes(range(200))

    simulate(main)


def test_loss_costs_time_and_loses_nothing() -> None:
    """With 5% loss all bytes come, in order, later than without."""

    async def transfer(loss: float) -> float:
        net = await make_net("a", "b", latency_s=0.05, loss=loss, window_bytes=200_000)
        dialed, accepted = await net.pipe("a", "b")
        start, data = now(), bytes(range(250)) * 8000
        writer = asyncio.ensure_future(dialed.write(data))
        assert await read(accepted, len(data)) == data
        await writer
        return now() - start

    async def main() -> None:
        assert await transfer(0.05) > 2 * await transfer(0.0)

    simulate(main)


def test_a_link_can_differ_from_the_others() -> None:
    """For open pipes too; what is not named stays."""

    async def main() -> None:
        net = await make_net("a", "b", "c", latency_s=0.1)
        dialed, accepted = await net.pipe("a", "b")
        other, taken = await net.pipe("a", "c")
        net.network.set_link("b", "a", latency_s=2.0)
        start = now()
        await dialed.write(b"!")
        await other.write(b"!")
        await read(taken, 1)
        assert now() - start == pytest.approx(0.1)
        await read(accepted, 1)
        assert now() - start == pytest.approx(2.0)

    simulate(main)


def test_a_slow_host_is_slower_both_ways_and_recovers() -> None:
    """Rates and latencies by the factor."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1, bandwidth_bytes_s=MB)
        dialed, accepted = await net.pipe("a", "b")
        for factor in (4, 1):
            net.network.slow("b", factor)
            start = now()
            writer = asyncio.ensure_future(dialed.write(bytes(MB)))
            await read(accepted, MB)
            assert now() - start == pytest.approx(1.1 * factor)
            await writer

    simulate(main)


@pytest.mark.parametrize("which", ["a", "b"])
def test_what_is_under_way_gets_slower_and_faster_too(which: str) -> None:
    """A short slowness costs what it says and no more, on the sender's side and on the receiver's."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1, bandwidth_bytes_s=MB)
        dialed, accepted = await net.pipe("a", "b")
        start = now()
        writer = asyncio.ensure_future(dialed.write(bytes(3 * MB)))
        reader = asyncio.ensure_future(read(accepted, 3 * MB))
        await sim.sleep(1)
        net.network.slow(which, 100)
        await sim.sleep(2)
        assert net.network.delivered_bytes < 1.1 * MB
        net.network.slow(which, 1)
        await reader
        assert now() - start == pytest.approx(3.1 + 2, abs=0.03)
        await writer

    simulate(main)


def test_a_host_talks_to_itself_without_delay() -> None:
    """Loopback knows neither latency nor bandwidth."""

    async def main() -> None:
        net = await make_net("a", latency_s=1.0, bandwidth_bytes_s=10)
        dialed, accepted = await net.pipe("a", "a")
        await dialed.write(bytes(100_000))
        await read(accepted, 100_000)
        assert now() == 0.0

    simulate(main)


# ------------------------------------------------------------------------------------------------------- backpressure


def test_a_writer_waits_for_the_line_and_for_the_reader() -> None:
    """`write` returns as the queue sinks; without a reader it stops at window and high-water mark."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1, bandwidth_bytes_s=MB, window_bytes=MB)
        dialed, accepted = await net.pipe("a", "b")
        writer = asyncio.ensure_future(dialed.write(bytes(20 * MB)))
        await sim.sleep(1000)
        assert not writer.done()
        assert net.network.delivered_bytes == pytest.approx(MB, abs=65536)
        await read(accepted, 10 * MB)
        await sim.sleep(1000)
        assert net.network.delivered_bytes == pytest.approx(11 * MB, abs=65536)
        await read(accepted, 10 * MB)
        await writer

    simulate(main)


# ---------------------------------------------------------------------------------------------------------- partition


def test_a_partition_is_silence_and_heals_without_loss() -> None:
    """What was in flight, what was written and what was asked for waits, and comes in order, one latency later."""

    async def main() -> None:
        net = await make_net("a", "b", "c", latency_s=0.1)
        dialed, accepted = await net.pipe("a", "b")
        other, taken = await net.pipe("a", "c")
        await dialed.write(b"in flight,")
        net.network.partition([["a"], ["b"]])
        await dialed.write(b"queued")
        await accepted.write(b"back")
        with pytest.raises(PeerTimeout):
            await net.dial("a", "b", timeout_s=5)
        await taken.write(b"!")  # c is a group of its own
        reader = asyncio.ensure_future(read(other, 1))
        late = asyncio.ensure_future(net.dial("b", "a", timeout_s=2000))
        await sim.sleep(1000)
        assert not dialed.closed
        assert not late.done()
        assert not reader.done()
        net.network.heal()
        start = now()
        assert await read(accepted, 16) == b"in flight,queued"
        assert await read(dialed, 4) == b"back"
        assert now() - start == pytest.approx(0.1)
        await late
        await reader

    simulate(main)


def test_what_was_held_comes_one_latency_after_the_heal_with_all_that_follows() -> None:
    """Bytes that are due between heal and arrival wait behind those that were held."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1)
        dialed, accepted = await net.pipe("a", "b")
        start = now()
        await dialed.write(b"1")
        await sim.sleep(0.05)
        await dialed.write(b"2")
        net.network.partition([["a"]])
        await sim.sleep(0.07)
        net.network.heal()
        assert await read(accepted, 1) == b"1"
        assert now() - start == pytest.approx(0.22)
        assert await read(accepted, 1) == b"2"
        assert now() - start == pytest.approx(0.22)

    simulate(main)


def test_within_a_group_life_goes_on() -> None:
    """Named together, or not named at all."""

    async def main() -> None:
        net = await make_net("a", "b", "c", "d")
        named, unnamed = await net.pipe("a", "b"), await net.pipe("c", "d")
        net.network.partition([["a", "b"]])
        for dialed, accepted in (named, unnamed):
            await dialed.write(b"!")
            await read(accepted, 1)
        with pytest.raises(PeerTimeout):
            await net.dial("a", "c", timeout_s=5)
        with pytest.raises(ConfigError, match="'a' is in two groups"):
            net.network.partition([["a", "b"], ["a"]])

    simulate(main)


@pytest.mark.parametrize(("lasts_s", "late_s"), [(1.0, 0.4), (10.0, 2.6)])
def test_after_a_partition_tcp_tries_again_ever_more_rarely(lasts_s: float, late_s: float) -> None:
    """0.2, 0.6, 1.4, 3, 6.2 and 12.6 s after the first byte was lost; what is said since waits behind it."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.01, backs_off=True)
        here, there = await net.pipe("a", "b")
        net.network.partition([["a"]])
        began = now()
        await here.write(b"lost")
        await sim.sleep(lasts_s)
        net.network.heal()
        await here.write(b"said")
        assert await read(there, 8) == b"lostsaid"
        assert now() - began == pytest.approx(lasts_s + late_s + 0.02, abs=0.02)
        anew, _ = await net.pipe("a", "b")
        assert not anew.closed

    simulate(main)


def test_a_large_transfer_survives_partitions() -> None:
    """Queues, credit and the uplink all start again."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1, bandwidth_bytes_s=MB, window_bytes=300_000, jitter_s=0.01)
        dialed, accepted = await net.pipe("a", "b")
        data = bytes(range(250)) * 40_000
        writer = asyncio.ensure_future(dialed.write(data))
        reader = asyncio.ensure_future(read(accepted, len(data)))
        for _ in range(5):
            await sim.sleep(0.7)
            net.network.partition([["a"]])
            arrived = net.network.delivered_bytes
            await sim.sleep(50)
            assert net.network.delivered_bytes == arrived
            net.network.heal()
        assert await reader == data
        await writer

    simulate(main)


def test_a_close_during_a_partition_arrives_after_it() -> None:
    """The other side reads everything, then sees the end."""

    async def main() -> None:
        net = await make_net("a", "b")
        dialed, accepted = await net.pipe("a", "b")
        net.network.partition([["a"]])
        await dialed.write(b"bye")
        closing = asyncio.ensure_future(dialed.close())
        await sim.sleep(3)
        net.network.heal()
        assert await read(accepted, 3) == b"bye"
        with pytest.raises(PeerUnreachable):
            await read(accepted, 1)
        await closing

    simulate(main)


# -------------------------------------------------------------------------------------------------------------- stall


def test_a_stalled_host_neither_sends_nor_receives_nor_computes() -> None:
    """Others see silence without an end; its own clock stands; then all comes at once."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1)
        dialed, accepted = await net.pipe("a", "b")
        ticks: list[float] = []

        async def serve() -> None:
            while True:
                await sim.sleep(1)
                ticks.append(round(now(), 6))
                await accepted.write(await read(accepted, 1))

        net.network.spawn("b", serve())
        await dialed.write(b"123")
        await read(dialed, 1)
        start = now()
        net.network.stall("b", 100.5)
        with pytest.raises(PeerTimeout):
            await net.dial("a", "b", timeout_s=5)
        late = asyncio.ensure_future(net.dial("a", "b", timeout_s=500))
        await read(dialed, 2)
        # Of the stall half a second counts for b, whose next ticks are 0.9 and 1.9 s after the start by its clock.
        assert now() == pytest.approx(start + 102.0)
        assert ticks == pytest.approx([1.4, 2.4, 3.4])
        assert net.network.is_alive("b")
        await late

    simulate(main)


def test_the_machine_of_a_process_that_stands_still_acknowledges_what_comes() -> None:
    """Up to its window, and one latency later; not across a partition, nor when the machine is gone."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1, window_bytes=5_000)
        here, _ = await net.pipe("a", "b")
        net.network.stall("b")
        for _ in range(10):
            await here.write(bytes(1_000))
        assert here.bytes_acked == 0
        await sim.sleep(0.15)
        assert here.bytes_acked == 0
        await sim.sleep(0.1)
        assert here.bytes_acked == 5_000
        net.network.unstall("b")
        await sim.sleep(0.15)
        assert here.bytes_acked == 5_000
        for vanishes in (False, True):
            there, _ = await net.pipe("a", "b")
            if vanishes:
                net.network.vanish("b")
            else:
                net.network.partition([["a"]])
            await there.write(bytes(1_000))
            await sim.sleep(1.0)
            assert there.bytes_acked == 0
            net.network.heal()

    simulate(main)


def test_on_a_line_with_one_queue_small_messages_wait_behind_bulk() -> None:
    """With fair queueing they go ahead of it."""

    async def main(*, fair: bool) -> float:
        net = await make_net("a", "b", bandwidth_bytes_s=100_000.0, latency_s=0.01, fair=fair)
        bulk, _ = await net.pipe("a", "b")
        here, there = await net.pipe("a", "b")
        await bulk.write(bytes(60_000))
        await sim.sleep(0.1)
        began = now()
        await here.write(bytes(100))
        await read(there, 100)
        return now() - began

    assert sim.run(lambda: main(fair=True)) < 0.05
    assert sim.run(lambda: main(fair=False)) > 0.4


def test_bulk_came_too_early_beside_small_messages_and_the_line_stood_idle_for_that_later() -> None:
    """Bytes came twice as fast as the line carries them. The next bulk then waited while nothing was under way."""

    async def main() -> None:
        rate = 10_000.0
        net = await make_net("a", "b", "c", latency_s=0.0)
        net.network.add_host("slow", down_bytes_s=rate)
        await net.listen("slow")
        (bulk, taken), (calls, answers) = await net.pipe("a", "slow"), await net.pipe("b", "slow")
        other, others = await net.pipe("c", "slow")
        start = now()
        await bulk.write(bytes(20_000))
        for _ in range(20):  # half of the line
            await calls.write(bytes(500))
            await read(answers, 500)
            await sim.sleep(0.05)
        assert now() - start == pytest.approx(2.0)
        assert net.network.traffic("slow")[1] <= 2.0 * rate + 1e-3
        await read(taken, 20_000)
        assert now() - start == pytest.approx(3.0), "the line carries 10 kB each second"
        await other.write(bytes(5_000))
        await read(others, 5_000)
        assert now() - start == pytest.approx(3.5), "nothing else is under way"

    simulate(main)


def test_a_stall_ends_by_unstall_and_a_longer_one_wins() -> None:
    """Overlapping stalls end with the last."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.0)
        dialed, accepted = await net.pipe("a", "b")
        net.network.stall("b", 10)
        net.network.stall("b", 5)
        await dialed.write(b"1")
        await read(accepted, 1)
        assert now() == 10.0
        net.network.stall("b")
        await dialed.write(b"2")
        await sim.sleep(1000)
        net.network.unstall("b")
        await read(accepted, 1)
        assert now() == 1010.0

    simulate(main)


# ---------------------------------------------------------------------------------------------- crash, vanish, restart


def test_a_crash_breaks_connections_at_the_others_after_one_latency() -> None:
    """What had arrived or was in flight can be read; readers, writers and dialers then see the end."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1)
        dialed, accepted = await net.pipe("a", "b")
        await accepted.write(b"last")
        blocked = asyncio.ensure_future(dialed.write(bytes(20 * MB)))
        await sim.sleep(0.05)
        net.network.crash("b")
        start = now()
        assert await read(dialed, 4) == b"last"
        with pytest.raises(PeerUnreachable, match="died"):
            await read(dialed, 1)
        assert now() - start == pytest.approx(0.1)
        with pytest.raises(PeerUnreachable):
            await blocked
        start = now()
        with pytest.raises(PeerUnreachable, match="nobody listens"):
            await net.dial("a", "b")
        assert now() - start == pytest.approx(0.4)
        assert not net.network.is_alive("b")

    simulate(main)


def test_nothing_leaks_out_of_a_crashed_host() -> None:
    """Its tasks are cancelled, and whatever they still try, in `finally` or in a callback, reaches nobody."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1)
        dialed, accepted = await net.pipe("a", "b")
        spare = await net.pipe("a", "b")
        attempts: list[str] = []

        async def attempt(name: str, action: Awaitable[object]) -> None:
            attempts.append(name)
            with pytest.raises(PeerUnreachable):
                await action

        async def serve() -> None:
            asyncio.get_running_loop().call_later(5, attempts.append, "timer")
            try:
                while True:
                    await sim.sleep(1)
                    await accepted.write(b".")
            finally:
                await attempt("write", accepted.write(b"leak"))
                await attempt("dial", net.dial("b", "a"))
                await attempt("task", asyncio.create_task(net.dial("b", "a")))
                await spare[1].close()
                with pytest.raises(PeerUnreachable):
                    await net.listen("b")
                attempts.append("all")

        task = net.network.spawn("b", serve())
        await sim.sleep(2.5)
        trace = net.network.trace_digest()
        net.network.crash("b")
        net.network.restart("b")  # at the same instant: the old life must not act in the name of the new one
        await sim.sleep(1000)
        assert attempts == ["write", "dial", "task", "all"]
        assert task.cancelled()
        assert net.network.trace_digest() == trace
        assert await read(dialed, 2) == b".."
        with pytest.raises(PeerUnreachable):
            await read(dialed, 1)
        assert net.accepted["a"].empty()

    simulate(main)


def test_what_had_not_left_a_crashed_host_is_lost() -> None:
    """The queue of a slow uplink dies with the process."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1, bandwidth_bytes_s=MB)
        dialed, accepted = await net.pipe("a", "b")
        await dialed.write(bytes(3 * MB))
        await sim.sleep(1.5)
        net.network.crash("a")
        await sim.sleep(100)
        assert accepted.closed
        assert net.network.delivered_bytes == pytest.approx(1.5 * MB, abs=2 * 65536)

    simulate(main)


def test_a_vanished_machine_is_silent_until_it_is_started_again() -> None:
    """No end, no answer; after the restart old connections break and new ones can be made."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1)
        dialed, _ = await net.pipe("a", "b")
        net.network.vanish("b")
        await dialed.write(b"anybody?")
        with pytest.raises(PeerTimeout):
            await net.dial("a", "b", timeout_s=7)
        reader = asyncio.ensure_future(read(dialed, 1))
        await sim.sleep(1000)
        assert not reader.done()
        assert not dialed.closed
        net.network.restart("b")
        with pytest.raises(PeerUnreachable, match="started again"):
            await reader
        await net.listen("b")
        dialed, accepted = await net.pipe("a", "b")
        await accepted.write(b"back")
        assert await read(dialed, 4) == b"back"

    simulate(main)


def test_a_dial_that_waits_for_a_vanished_machine_ends_when_it_is_back() -> None:
    """Attempts go on: it answers as soon as it listens, and refuses before."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=0.1)
        net.network.vanish("b")
        dial = asyncio.ensure_future(net.dial("a", "b"))
        await sim.sleep(20)
        net.network.restart("b")
        await net.listen("b")
        await dial
        assert now() == pytest.approx(20.2)

    simulate(main)


def test_a_crash_during_a_partition_is_noticed_after_it() -> None:
    """The news waits like everything else."""

    async def main() -> None:
        net = await make_net("a", "b")
        dialed, _ = await net.pipe("a", "b")
        net.network.partition([["a"], ["b"]])
        net.network.crash("b")
        await sim.sleep(100)
        assert not dialed.closed
        net.network.heal()
        with pytest.raises(PeerUnreachable):
            await read(dialed, 1)

    simulate(main)


def test_a_stalled_host_can_crash_and_a_crashed_one_vanish() -> None:
    """Faults combine."""

    async def main() -> None:
        net = await make_net("a", "b")
        dialed, _ = await net.pipe("a", "b")
        net.network.stall("b", 50)
        net.network.crash("b")
        with pytest.raises(PeerUnreachable):
            await read(dialed, 1)
        assert now() < 1
        net.network.vanish("b")
        with pytest.raises(PeerTimeout):
            await net.dial("a", "b", timeout_s=5)
        net.network.crash("b")
        with pytest.raises(PeerTimeout):
            await net.dial("a", "b", timeout_s=5)
        net.network.restart("b")
        await sim.sleep(100)
        await net.listen("b")
        await net.dial("a", "b")

    simulate(main)


def test_a_dialer_that_gives_up_leaves_nothing_behind() -> None:
    """The other side sees the end of what it had accepted."""

    async def main() -> None:
        net = await make_net("a", "b", latency_s=1.0)
        with pytest.raises(PeerTimeout):
            await net.dial("a", "b", timeout_s=3.5)
        accepted = await net.accepted["b"].get()
        with pytest.raises(PeerUnreachable):
            await read(accepted, 1)

    simulate(main)


def test_the_dead_can_neither_dial_nor_start_tasks() -> None:
    """Objects of a host that is down are useless to their holders."""

    async def main() -> None:
        net = await make_net("a", "b")
        dialed, _ = await net.pipe("b", "a")
        net.network.crash("b")
        with pytest.raises(PeerUnreachable, match="went down"):
            await dialed.write(b"!")
        with pytest.raises(PeerUnreachable, match="'b' is down"):
            await net.dial("b", "a")
        with pytest.raises(ClosedError, match="restart it first"):
            net.network.spawn("b", sim.sleep(1))
        net.network.restart("b")
        with pytest.raises(LocalError, match="is alive"):
            net.network.restart("b")

    simulate(main)


# -------------------------------------------------------------------------------------------------------------- trace


async def chatter(seed: int) -> str:
    """Random traffic with faults; returns the digest of the trace."""
    net = await make_net(*"abcdef", seed=seed, latency_s=0.01, jitter_s=0.02, loss=0.01, bandwidth_bytes_s=MB)

    async def talk(dialed: Connection, accepted: Connection) -> None:
        try:
            for number in range(30):
                await dialed.write(bytes([number]) * 5000)
                await accepted.readinto(bytearray(5000))
        except PeerUnreachable:
            pass

    pipes = [await net.pipe(a, b) for a in "abcdef" for b in "abcdef" if a != b]
    tasks = [asyncio.ensure_future(talk(*pipe)) for pipe in pipes]
    await sim.sleep(0.2)
    net.network.stall("c", 0.2)
    net.network.crash("d")
    net.network.partition(["ab", "cdef"])
    await sim.sleep(0.5)
    net.network.heal()
    await asyncio.gather(*tasks)
    return net.network.trace_digest()


def test_same_seed_same_trace() -> None:
    """And another seed, another trace."""
    first = sim.run(chatter(1))
    assert sim.run(chatter(1)) == first
    assert sim.run(chatter(2)) != first


def test_the_trace_does_not_depend_on_the_process() -> None:
    """The kit itself never iterates over a set of strings: any PYTHONHASHSEED gives the same."""
    code = "from tests.sim.test_sim_network import *; print(sim.run(chatter(1)))"
    digests = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    assert digests == {sim.run(chatter(1)) + "\n"}


def test_the_trace_sees_content_and_can_be_kept() -> None:
    """One changed byte changes the digest; `keep_trace` shows each delivery."""

    async def send(data: bytes) -> tuple[str, list[tuple[Any, ...]], tuple[int, int], tuple[int, int]]:
        net = await make_net("a", "b", latency_s=0.5, keep_trace=True)
        dialed, accepted = await net.pipe("a", "b")
        await dialed.write(data)
        await read(accepted, len(data))
        trace = [(line.time_s, line.source, line.target, line.nbytes) for line in net.network.trace]
        return net.network.trace_digest(), trace, net.network.traffic("a"), net.network.traffic("b")

    digest, trace, sent, received = sim.run(send(b"abc"))
    assert trace == [(2.5, "a", "b", 3)]
    assert (sent, received) == ((3, 0), (0, 3))
    assert sim.run(send(b"abd"))[0] != digest


def test_bad_settings_are_refused() -> None:
    """Each names what is wrong."""

    async def main() -> None:
        for options, message in (
            ({"latency_s": -1}, "latency_s must be 0 or more"),
            ({"jitter_s": float("nan")}, "jitter_s must be 0 or more"),
            ({"loss": 1.0}, "loss must be"),
            ({"bandwidth_bytes_s": 0}, "bandwidth_bytes_s must be above 0"),
            ({"window_bytes": 0}, "window_bytes must be at least 1"),
            ({"dial_round_trips": 0}, "dial_round_trips must be at least 1"),
        ):
            with pytest.raises(ConfigError, match=message):
                SimNetwork(**options)
        network = SimNetwork()
        network.add_host("a")
        with pytest.raises(ConfigError, match="'a' already"):
            network.add_host("a")
        with pytest.raises(ConfigError, match="factor must be above 0"):
            network.slow("a", 0)

    simulate(main)
    with pytest.raises(LocalError, match="inside of the event loop"):
        SimNetwork()
