"""`MemoryTransport` over a network without latency: the same on a real asyncio loop and on a virtual one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal import sim
from shoal.base.peer import Address, PeerID
from shoal.errors import ClosedError, ConfigError, LocalError, PeerRefused, PeerTimeout, PeerUnreachable
from shoal.sim import SimNetwork
from shoal.transport.base import HIGH_WATER_BYTES, Connection, Transport
from shoal.transport.memory import MemoryTransport

Main = Callable[[], Coroutine[Any, Any, None]]
Run = Callable[[Main], None]

A, B, C = (PeerID(bytes([letter]) * 32) for letter in b"abc")


@pytest.fixture(params=["real", "virtual"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs `main` on a real loop, or on a virtual one."""

    def run_real(main: Main) -> None:
        asyncio.run(main())

    def run_virtual(main: Main) -> None:
        sim.run(main)

    return run_real if request.param == "real" else run_virtual


@dataclass
class Pair:
    """Two transports, and a connection from `a` to `b`."""

    network: SimNetwork
    a: MemoryTransport
    b: MemoryTransport
    dialed: Connection
    accepted: Connection
    incoming: asyncio.Queue[Connection] = field(repr=False)


async def make_pair(*, window_bytes: int = 4 << 20) -> Pair:
    """Hosts `a` and `b` without latency, connected."""
    network = SimNetwork(latency_s=0.0, window_bytes=window_bytes)
    a, b = MemoryTransport(A, network, host="a"), MemoryTransport(B, network, host="b")
    incoming: asyncio.Queue[Connection] = asyncio.Queue()
    await b.listen(incoming.put_nowait)
    dialed = await a.dial(B, b.addresses, timeout_s=5)
    return Pair(network, a, b, dialed, await incoming.get(), incoming)


async def read(connection: Connection, nbytes: int) -> bytes:
    """The next bytes."""
    buffer = bytearray(nbytes)
    await connection.readinto(buffer)
    return bytes(buffer)


async def settle() -> None:
    """Let everything run that can, without a timer."""
    for _ in range(50):
        await asyncio.wait_for(asyncio.ensure_future(_nothing()), None)


async def _nothing() -> None:
    pass


def test_it_is_a_transport() -> None:
    """For the type checker: it satisfies the Protocols."""

    async def main() -> None:
        pair = await make_pair()
        transport: Transport = pair.a
        assert transport.peer_id == A
        assert pair.a.addresses == ()
        assert pair.b.addresses == (Address("b", 4000, B),)
        assert str(pair.b.addresses[0]).startswith("/dns/b/tcp/4000/p2p/")

    sim.run(main)


def test_both_sides_know_who_the_other_is(run: Run) -> None:
    """Identity and direction."""

    async def main() -> None:
        pair = await make_pair()
        assert (pair.dialed.peer_id, pair.dialed.dialed) == (B, True)
        assert (pair.accepted.peer_id, pair.accepted.dialed) == (A, False)

    run(main)


def test_bytes_come_in_order_however_they_are_cut(run: Run) -> None:
    """Writes and reads of different sizes, several buffers of several kinds in one write."""

    async def main() -> None:
        pair = await make_pair()
        await pair.dialed.write(b"abc", bytearray(b"defg"), memoryview(b"hi")[1:], b"")
        await pair.dialed.write()
        await pair.dialed.write(b"j" * 200_000)
        assert await read(pair.accepted, 2) == b"ab"
        assert await read(pair.accepted, 0) == b""
        assert await read(pair.accepted, 6) == b"cdefgi"
        assert await read(pair.accepted, 150_000) == b"j" * 150_000
        assert await read(pair.accepted, 50_000) == b"j" * 50_000
        assert pair.dialed.bytes_sent == pair.accepted.bytes_received == 200_008
        await pair.accepted.write(b"back")
        assert await read(pair.dialed, 4) == b"back"

    run(main)


def test_elements_wider_than_a_byte_are_counted_in_bytes(run: Run) -> None:
    """Tensors come as memoryviews of floats."""

    async def main() -> None:
        pair = await make_pair()
        sent = memoryview(bytearray(range(32))).cast("d")
        target = bytearray(32)
        await pair.dialed.write(sent)  # type: ignore[arg-type]
        await pair.accepted.readinto(memoryview(target).cast("d"))  # type: ignore[arg-type]
        assert target == bytes(range(32))
        assert pair.dialed.bytes_sent == pair.accepted.bytes_received == 32

    run(main)


def test_buffers_may_be_reused_after_write(run: Run) -> None:
    """What arrives is what was in them at the time."""

    async def main() -> None:
        pair = await make_pair()
        buffer = bytearray(b"x" * 300_000)
        await pair.dialed.write(buffer)
        buffer[:] = b"y" * 300_000
        assert await read(pair.accepted, 300_000) == b"x" * 300_000

    run(main)


def test_two_writes_at_once_do_not_mix(run: Run) -> None:
    """Each write's bytes lie together, in the order in which the writes were begun."""

    async def main() -> None:
        pair = await make_pair(window_bytes=1 << 20)
        size = 3 << 20
        writes = [asyncio.ensure_future(pair.dialed.write(bytes([number]) * size)) for number in range(5)]
        for number in range(5):
            assert await read(pair.accepted, size) == bytes([number]) * size
        await asyncio.gather(*writes)

    run(main)


def test_a_writer_waits_while_nobody_reads(run: Run) -> None:
    """What is held is bounded by window and high-water mark; reading lets the writer go on."""

    async def main() -> None:
        pair = await make_pair(window_bytes=1 << 20)
        piece, count = b"z" * (1 << 20), 16

        async def write_all() -> None:
            for _ in range(count):
                await pair.dialed.write(piece)

        writer = asyncio.ensure_future(write_all())
        await settle()
        assert not writer.done()
        held = pair.dialed.bytes_sent
        assert HIGH_WATER_BYTES <= held <= HIGH_WATER_BYTES + (1 << 20) + 2 * (64 << 10)
        for _ in range(count):
            assert await read(pair.accepted, 1 << 20) == piece
        await writer

    run(main)


def test_one_write_larger_than_all_buffers_is_cut(run: Run) -> None:
    """It is not copied as a whole first."""

    async def main() -> None:
        pair = await make_pair(window_bytes=1 << 20)
        size = 40 << 20
        writer = asyncio.ensure_future(pair.dialed.write(memoryview(bytearray(size))))
        await settle()
        assert pair.dialed.bytes_sent < 6 << 20
        await pair.accepted.readinto(bytearray(size))
        await writer
        assert pair.dialed.bytes_sent == size

    run(main)


def test_close_delivers_then_ends_both_sides(run: Run) -> None:
    """The other side reads it all, then learns of the end; whoever closed can neither read nor write."""

    async def main() -> None:
        pair = await make_pair()
        await pair.accepted.write(b"never read")
        await pair.dialed.write(b"last words")
        await pair.dialed.close()
        await pair.dialed.close()
        assert pair.dialed.closed
        with pytest.raises(PeerUnreachable, match="closed on this side"):
            await pair.dialed.write(b"more")
        with pytest.raises(PeerUnreachable):
            await read(pair.dialed, 1)
        assert await read(pair.accepted, 10) == b"last words"
        with pytest.raises(PeerUnreachable, match="closed by the other side") as caught:
            await read(pair.accepted, 1)
        assert caught.value.peer_id == A
        assert pair.accepted.closed
        with pytest.raises(PeerUnreachable):
            await pair.accepted.write(b"more")

    run(main)


def test_close_waits_until_what_is_queued_has_left(run: Run) -> None:
    """A close right after a large write loses nothing, once the other side reads."""

    async def main() -> None:
        pair = await make_pair(window_bytes=1 << 20)
        await pair.dialed.write(b"q" * (4 << 20))
        closing = asyncio.ensure_future(pair.dialed.close())
        await settle()
        assert not closing.done()
        assert pair.dialed.closed
        assert await read(pair.accepted, 4 << 20) == b"q" * (4 << 20)
        await closing
        with pytest.raises(PeerUnreachable):
            await read(pair.accepted, 1)

    run(main)


def test_close_gives_up_after_a_while() -> None:
    """If the other side never reads, close ends the pipe all the same."""

    async def main() -> None:
        pair = await make_pair(window_bytes=1 << 20)
        await pair.dialed.write(b"q" * (4 << 20))
        before = asyncio.get_running_loop().time()
        await pair.dialed.close()
        assert asyncio.get_running_loop().time() - before == 5.0
        await settle()
        assert pair.accepted.closed

    sim.run(main)


@pytest.mark.parametrize("who", ["dialed", "accepted"])
def test_abort_wakes_readers_and_writers_on_both_sides(run: Run, who: str) -> None:
    """Nobody keeps waiting on a pipe that is gone."""

    async def main() -> None:
        pair = await make_pair(window_bytes=1 << 20)
        waiting = [asyncio.ensure_future(read(pair.dialed, 1)), asyncio.ensure_future(read(pair.accepted, 40 << 20))]
        other = await make_pair(window_bytes=1 << 20)
        waiting += [
            asyncio.ensure_future(end.write(bytes(20 << 20)))  # type: ignore[arg-type]
            for end in (other.dialed, other.accepted)
        ]
        await settle()
        assert not any(task.done() for task in waiting)
        for connection in (getattr(pair, who), getattr(other, who)):
            connection.abort()
            connection.abort()
            assert connection.closed
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [PeerUnreachable] * 4

    run(main)


def test_a_write_cancelled_half_way_breaks_the_connection(run: Run) -> None:
    """A torn message must not be followed by another."""

    async def main() -> None:
        pair = await make_pair(window_bytes=1 << 20)
        writer = asyncio.ensure_future(pair.dialed.write(bytes(20 << 20)))
        await settle()
        writer.cancel()
        await asyncio.wait([writer])
        assert pair.dialed.closed
        with pytest.raises(PeerUnreachable):
            await read(pair.accepted, 20 << 20)

    run(main)


@pytest.mark.parametrize("came", [b"", b"1234"])
def test_a_cancelled_read_breaks_the_connection(run: Run, came: bytes) -> None:
    """Nobody could tell where in a message the next bytes belong."""

    async def main() -> None:
        pair = await make_pair()
        await pair.dialed.write(came)
        reader = asyncio.ensure_future(read(pair.accepted, 8))
        await settle()
        reader.cancel()
        await asyncio.wait([reader])
        assert pair.accepted.closed
        with pytest.raises(PeerUnreachable):
            await read(pair.dialed, 1)

    run(main)


def test_a_second_reader_is_refused(run: Run) -> None:
    """One reader at a time."""

    async def main() -> None:
        pair = await make_pair()
        first = asyncio.ensure_future(read(pair.accepted, 1))
        await settle()
        with pytest.raises(LocalError, match="one reader at a time"):
            await read(pair.accepted, 1)
        await pair.dialed.write(b"!")
        assert await first == b"!"

    run(main)


def test_dialing_the_wrong_peer_is_refused_and_not_accepted(run: Run) -> None:
    """Somebody answers at the address, but not who we want."""

    async def main() -> None:
        pair = await make_pair()
        with pytest.raises(PeerRefused, match=r"b:4000") as caught:
            await pair.a.dial(C, pair.b.addresses, timeout_s=5)
        assert caught.value.peer_id == C
        await settle()
        assert pair.incoming.empty()

    run(main)


def test_dialing_where_nobody_listens_fails_at_once(run: Run) -> None:
    """A port without a listener, a host that does not exist, no address at all."""

    async def main() -> None:
        pair = await make_pair()
        for addresses in ([Address("b", 4001, B)], [Address("nowhere", 4000, B)], []):
            with pytest.raises(PeerUnreachable) as caught:
                await pair.a.dial(B, addresses, timeout_s=5)
            assert caught.value.peer_id == B

    run(main)


def test_the_first_address_that_answers_is_taken(run: Run) -> None:
    """Dead addresses before it do not matter."""

    async def main() -> None:
        pair = await make_pair()
        addresses = [Address("nowhere", 1, B), Address("b", 4001, B), *pair.b.addresses]
        connection = await pair.a.dial(B, addresses, timeout_s=5)
        await connection.write(b"hello")
        assert await read(await pair.incoming.get(), 5) == b"hello"

    run(main)


def test_a_silent_address_uses_only_its_share_of_the_time() -> None:
    """Half of it, of two; and if all are silent the dial times out, on time."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        pair = await make_pair()
        silent = Address("gone", 4000, B)
        pair.network.vanish("gone")
        start = loop.time()
        await pair.a.dial(B, [silent, *pair.b.addresses], timeout_s=4)
        assert loop.time() - start == 2.0
        start = loop.time()
        with pytest.raises(PeerTimeout):
            await pair.a.dial(B, [silent, silent], timeout_s=4)
        assert loop.time() - start == 4.0

    sim.run(main)


def test_a_client_cannot_be_dialed(run: Run) -> None:
    """It has no addresses, and nobody listens on its host."""

    async def main() -> None:
        pair = await make_pair()
        client = MemoryTransport(C, pair.network, host="c", client_mode=True)
        await client.listen(pair.incoming.put_nowait)
        assert client.addresses == ()
        with pytest.raises(PeerUnreachable):
            await pair.a.dial(C, [Address("c", 4000, C)], timeout_s=5)
        connection = await client.dial(B, pair.b.addresses, timeout_s=5)
        assert connection.peer_id == B

    run(main)


def test_a_used_port_is_an_error_that_names_it(run: Run) -> None:
    """And listening twice is misuse."""

    async def main() -> None:
        pair = await make_pair()
        with pytest.raises(ConfigError, match="port 4000 of host 'b' is taken"):
            await MemoryTransport(C, pair.network, host="b", port=4000).listen(pair.incoming.put_nowait)
        with pytest.raises(LocalError, match="listens already"):
            await pair.b.listen(pair.incoming.put_nowait)
        other = MemoryTransport(C, pair.network, host="b")
        await other.listen(pair.incoming.put_nowait)
        assert other.addresses[0].port == 4001

    run(main)


def test_closing_a_transport_ends_its_connections_and_frees_its_port(run: Run) -> None:
    """Nothing is left; using it afterwards is an error."""

    async def main() -> None:
        pair = await make_pair()
        address = pair.b.addresses[0]
        await pair.b.close()
        await pair.b.close()
        assert pair.b.addresses == ()
        assert pair.accepted.closed
        with pytest.raises(PeerUnreachable):
            await read(pair.dialed, 1)
        with pytest.raises(PeerUnreachable):
            await pair.a.dial(B, [address], timeout_s=5)
        with pytest.raises(ClosedError):
            await pair.b.dial(A, [address], timeout_s=5)
        with pytest.raises(ClosedError):
            await pair.b.listen(pair.incoming.put_nowait)
        again = MemoryTransport(B, pair.network, host="b", port=address.port)
        await again.listen(pair.incoming.put_nowait)

    run(main)


def test_a_transport_closed_while_it_dials_keeps_no_connection() -> None:
    """The dial fails at once, and the other side sees the end."""

    async def main() -> None:
        pair = await make_pair()
        pair.network.set_link("a", "b", latency_s=1.0)
        dial = asyncio.ensure_future(pair.a.dial(B, pair.b.addresses, timeout_s=50))
        accepted = await pair.incoming.get()
        before = asyncio.get_running_loop().time()
        await pair.a.close()
        with pytest.raises(ClosedError):
            await dial
        assert asyncio.get_running_loop().time() == before
        with pytest.raises(PeerUnreachable):
            await read(accepted, 1)

    sim.run(main)


def test_a_peer_can_dial_itself(run: Run) -> None:
    """One host, both ends."""

    async def main() -> None:
        pair = await make_pair()
        mine = await pair.b.dial(B, pair.b.addresses, timeout_s=5)
        theirs = await pair.incoming.get()
        await mine.write(b"me")
        assert await read(theirs, 2) == b"me"

    run(main)


def test_much_passes_through_bounded_buffers(run: Run) -> None:
    """128 MiB, in 1 MiB writes, with a reader that takes 3 MiB at a time (a GiB: see the conformance suite)."""

    async def main() -> None:
        pair = await make_pair()
        total, piece, target = 128 << 20, bytes(range(256)) * 4096, bytearray(3 << 20)

        async def write_all() -> None:
            for _ in range(total // len(piece)):
                await pair.dialed.write(piece)
            await pair.dialed.close()

        writer = asyncio.ensure_future(write_all())
        left = total
        while left:
            view = memoryview(target)[: min(left, len(target))]
            await pair.accepted.readinto(view)
            left -= len(view)
            assert pair.dialed.bytes_sent - pair.accepted.bytes_received < 10 << 20
        await writer
        with pytest.raises(PeerUnreachable):
            await read(pair.accepted, 1)

    run(main)
