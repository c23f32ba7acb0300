"""What every transport must do: the rules in `shoal.transport.base`, one test each, run on every transport."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from shoal.base.peer import Address
from shoal.errors import ClosedError, LocalError, PeerRefused, PeerTimeout, PeerUnreachable
from shoal.transport.base import HIGH_WATER_BYTES, Connection
from tests.conformance.transports import FACTORIES, NOBODY, TransportFactory, TransportPair, gather

MIB = 1 << 20

QUEUE_BYTES = HIGH_WATER_BYTES + 20 * MIB
"""What a writer may be ahead of a reader that reads nothing: the high-water mark and the kernel's buffers (by default
at most 4 MiB to send and 6 MiB, doubled, to receive)."""

TURNS = 400
"""So many round trips give everything else that is ready thousands of turns of the loop."""


@pytest.fixture(params=FACTORIES, ids=lambda factory: factory.name)
def transport(request: pytest.FixtureRequest) -> TransportFactory:
    """Each transport in turn."""
    factory = request.param
    assert isinstance(factory, TransportFactory)
    return factory


async def read(connection: Connection, size: int) -> bytes:
    """The next `size` bytes."""
    buffer = bytearray(size)
    await connection.readinto(buffer)
    return bytes(buffer)


async def read_to_end(connection: Connection) -> bytes:
    """All that still comes, but for an incomplete piece of 1000 bytes at its end."""
    received = bytearray()
    try:
        while True:
            received += await read(connection, 1000)
    except PeerUnreachable:
        return bytes(received)


async def write_mib(connection: Connection, count: int) -> None:
    """Write so many MiB of zeros."""
    for _ in range(count):
        await connection.write(bytes(MIB))


async def round_trips(near: Connection, far: Connection, count: int) -> None:
    """Send a small message there and back, `count` times."""

    async def answer() -> None:
        for _ in range(count):
            await far.write(await read(far, 100))

    async def ask() -> None:
        for number in range(count):
            question = number.to_bytes(100, "big")
            await near.write(question)
            assert await read(near, 100) == question

    await gather(answer(), ask())


@contextlib.asynccontextmanager
async def running(work: asyncio.Task[None]) -> AsyncIterator[asyncio.Task[None]]:
    """A task that is cancelled at the end, if it is not done by then."""
    try:
        yield work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def start_writer(pair: TransportPair, near: Connection, mib: int) -> asyncio.Task[None]:
    """A task that writes to a connection nobody reads, and has come as far as it can."""
    work = asyncio.create_task(write_mib(near, mib))
    await round_trips(*await pair.connect(), TURNS)
    return work


def test_both_ends_know_who_is_on_the_other_side(transport: TransportFactory) -> None:
    """The identities, who dialed, and counters that start at zero."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        assert (near.peer_id, far.peer_id) == (pair.far.peer_id, pair.near.peer_id)
        assert (near.dialed, far.dialed) == (True, False)
        assert [near.bytes_sent, near.bytes_received, far.bytes_sent, far.bytes_received] == [0, 0, 0, 0]
        await near.write(b"abc", bytearray(b"de"), memoryview(b"f"))
        assert await read(far, 4) == b"abcd"
        assert await read(far, 2) == b"ef"
        assert [near.bytes_sent, near.bytes_received, far.bytes_sent, far.bytes_received] == [6, 0, 0, 6]
        assert not near.closed
        assert not far.closed

    transport.run(scenario)


def test_addresses_are_there_once_it_listens_and_name_the_peer(transport: TransportFactory) -> None:
    """What `addresses` gives can be handed to others; a peer that only dials has none, and can dial."""

    async def scenario(pair: TransportPair) -> None:
        assert [address.peer_id for address in pair.far.addresses] == [pair.far.peer_id]
        assert list(pair.client.addresses) == []
        near = await pair.client.dial(pair.far.peer_id, pair.far.addresses, timeout_s=20)
        far = await pair.accepted.get()
        assert far.peer_id == pair.client.peer_id
        await round_trips(near, far, 1)

    transport.run(scenario)


def test_bytes_come_in_order_however_they_are_cut(transport: TransportFactory) -> None:
    """Writes and reads of unrelated random sizes, both ways at once, give the bytes that were sent."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        rng = random.Random(7)
        sent = rng.randbytes(3 * MIB)

        def cuts() -> list[int]:
            sizes = [int(rng.expovariate(1 / (40 << 10))) for _ in range(200)]
            return [*sizes, 200_000, 0, 1, len(sent)]

        async def send(connection: Connection) -> None:
            view, sizes = memoryview(sent), cuts()
            while view:
                pieces = []
                for _ in range(rng.randint(1, 3)):
                    size = sizes.pop(0)
                    pieces.append(view[:size])
                    view = view[size:]
                await connection.write(*pieces)
                sizes = sizes or cuts()

        async def receive(connection: Connection) -> bytes:
            received = bytearray(len(sent))
            view = memoryview(received)
            for size in cuts():
                await connection.readinto(view[:size])
                view = view[size:]
            return bytes(received)

        _, _, at_far, at_near = await gather(send(near), send(far), receive(far), receive(near))
        assert at_far == sent
        assert at_near == sent

    transport.run(scenario)


def test_a_buffer_may_be_reused_when_write_returns(transport: TransportFactory) -> None:
    """What is written into the buffer afterwards is not what arrives, however full the queues are."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        pieces, size = 48, 300_000

        async def send() -> None:
            buffer = bytearray(size)
            for number in range(pieces):
                buffer[:] = bytes([number]) * size
                await near.write(buffer[:10], memoryview(buffer)[10:])
                buffer[:] = b"\xff" * size

        async with running(asyncio.create_task(send())) as sender:
            await round_trips(*await pair.connect(), TURNS)  # the queues are full now, if they ever are
            for number in range(pieces):
                assert await read(far, size) == bytes([number]) * size
            await sender

    transport.run(scenario)


def test_two_writes_at_once_never_mix(transport: TransportFactory) -> None:
    """Twenty tasks write messages of several buffers; each message arrives whole."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        writers, messages, size = 20, 5, 150_000

        async def send(number: int) -> None:
            for _ in range(messages):
                await near.write(bytes([number]), bytes([number]) * (size - 2), bytes([number]))

        async def receive() -> list[int]:
            got = []
            for _ in range(writers * messages):
                message = await read(far, size)
                assert message == message[:1] * size
                got.append(message[0])
            return got

        *_, got = await gather(*map(send, range(writers)), receive())
        assert sorted(got) == sorted(list(range(writers)) * messages)

    transport.run(scenario)


def test_a_writer_whose_reader_does_not_read_stops(transport: TransportFactory) -> None:
    """It waits with a bounded amount under way, and goes on when the reader does."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        async with running(await start_writer(pair, near, 64)) as writer:
            assert not writer.done()
            assert near.bytes_sent < QUEUE_BYTES
            for _ in range(64):
                assert await read(far, MIB) == bytes(MIB)
            await writer

    transport.run(scenario)


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells what TCP has acknowledged")
def test_what_the_other_machine_has_taken_is_told_read_there_or_not(transport: TransportFactory) -> None:
    """All that was answered, at least; of what nobody reads, as much as fits on its way."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        began = near.bytes_acked
        await round_trips(near, far, 10)
        assert near.bytes_acked >= began + 9 * 100
        full, unread = await pair.connect()
        async with running(await start_writer(pair, full, 64)):
            assert 0 < full.bytes_acked < QUEUE_BYTES
            assert unread.bytes_acked < 10_000
        full.abort()
        assert full.bytes_acked >= 0

    transport.run(scenario)


@pytest.mark.parametrize("size", [0, 1, 300_000, 3 * MIB])
def test_close_delivers_everything_and_then_the_end(transport: TransportFactory, size: int) -> None:
    """A reader that begins only after the other side has closed still reads it all, then gets `PeerUnreachable`."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        sent = random.Random(size).randbytes(size)
        await near.write(sent)
        closing = asyncio.create_task(near.close())
        await round_trips(*await pair.connect(), TURNS)
        assert near.closed
        assert await read(far, size) == sent
        with pytest.raises(PeerUnreachable):
            await read(far, 1)
        assert far.closed
        with pytest.raises(PeerUnreachable):
            await far.write(b"x")
        await closing
        await near.close()  # twice is fine
        for use in (near.write(b"x"), read(near, 1)):
            with pytest.raises(PeerUnreachable):
                await use

    transport.run(scenario)


def test_a_side_that_is_not_reading_notices_the_end_too(transport: TransportFactory) -> None:
    """Having read all that came, however much had piled up before: no read is needed to see `closed`."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        await near.write(bytes(900_000))
        await round_trips(*await pair.connect(), TURNS)
        await read(far, 900_000)
        await near.close()
        await round_trips(*await pair.connect(), TURNS)
        assert far.closed

    transport.run(scenario)


def test_close_in_the_middle_of_incoming_data_loses_nothing_of_ours(transport: TransportFactory) -> None:
    """A side that closes while the other still sends delivers its own bytes, also to a reader that comes late."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        async with running(asyncio.create_task(write_mib(far, 1 << 20))) as flood:
            await round_trips(*await pair.connect(), TURNS)
            sent = random.Random(5).randbytes(600_000)
            await near.write(sent)
            closing = asyncio.create_task(near.close())
            await round_trips(*await pair.connect(), TURNS // 4)  # well within what `close` waits for the other side
            assert await read(far, len(sent)) == sent
            with pytest.raises(PeerUnreachable):
                await flood
            await closing

    transport.run(scenario)


@pytest.mark.parametrize("who", ["near", "far"])
def test_abort_wakes_whoever_waits_on_either_side(transport: TransportFactory, who: str) -> None:
    """Readers and a writer that waits, here and there, all get `PeerUnreachable`."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        idle_near, idle_far = await pair.connect()
        writer = await start_writer(pair, near, 64)
        readers = [asyncio.create_task(read(each, 1)) for each in (near, idle_near, idle_far)]
        await round_trips(*await pair.connect(), 1)
        for connection in (near, idle_near) if who == "near" else (far, idle_far):
            connection.abort()
            connection.abort()  # twice is fine
            assert connection.closed
        for task in (writer, *readers):
            with pytest.raises(PeerUnreachable):
                await task
        await read_to_end(far)  # what had arrived may still be read

    transport.run(scenario)


def test_a_transport_that_closes_ends_its_connections_on_both_sides(transport: TransportFactory) -> None:
    """Its own readers and the others' notice; it can be closed twice and used no more."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        readers = [asyncio.create_task(read(each, 1)) for each in (near, far)]
        addresses = list(pair.far.addresses)
        await pair.far.close()
        await pair.far.close()
        for task in readers:
            with pytest.raises(PeerUnreachable):
                await task
        with pytest.raises(PeerUnreachable):
            await pair.dial(addresses)
        with pytest.raises(ClosedError):
            await pair.far.dial(pair.near.peer_id, pair.near.addresses, timeout_s=20)
        with pytest.raises(ClosedError):
            await pair.far.listen(pair.accepted.put_nowait)

    transport.run(scenario)


def test_dialing_a_silent_address_ends_at_the_deadline(transport: TransportFactory) -> None:
    """`PeerTimeout`, which is also a `TimeoutError`; and nothing is accepted anywhere."""

    async def scenario(pair: TransportPair) -> None:
        with pytest.raises(PeerTimeout) as caught:
            await pair.dial([pair.silent], timeout_s=0.1)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.peer_id == pair.far.peer_id
        assert pair.accepted.empty()

    transport.run(scenario)


def test_a_dial_can_be_cancelled(transport: TransportFactory) -> None:
    """Cancelling leaves nothing behind (the factory looks for tasks and sockets), and the next dial works."""

    async def scenario(pair: TransportPair) -> None:
        dial = asyncio.create_task(pair.dial([pair.silent]))
        await round_trips(*await pair.connect(), 10)
        dial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dial
        await pair.connect()

    transport.run(scenario)


def test_a_transport_that_closes_ends_a_dial(transport: TransportFactory) -> None:
    """A caller that waits in `dial` learns that the transport is closed, not at the deadline but now."""

    async def scenario(pair: TransportPair) -> None:
        dial = asyncio.create_task(pair.dial([pair.silent], timeout_s=1000))
        await round_trips(*await pair.connect(), 10)
        await pair.near.close()
        with pytest.raises(ClosedError):
            await dial

    transport.run(scenario)


def test_dialing_nobody_is_unreachable(transport: TransportFactory) -> None:
    """No listener, or no address at all."""

    async def scenario(pair: TransportPair) -> None:
        for addresses in ([pair.dead], []):
            with pytest.raises(PeerUnreachable):
                await pair.dial(addresses)

    transport.run(scenario)


def test_one_good_address_among_bad_ones_is_enough(transport: TransportFactory) -> None:
    """A silent and a dead address before the right one only cost time."""

    async def scenario(pair: TransportPair) -> None:
        near = await pair.dial([pair.silent, pair.dead, *pair.far.addresses], timeout_s=15)
        await round_trips(near, await pair.accepted.get(), 1)

    transport.run(scenario)


def test_only_a_dial_that_was_refused_everywhere_says_that_nobody_listens(transport: TransportFactory) -> None:
    """An address that is silent, or beside a refused one, may yet lead to the peer."""

    async def scenario(pair: TransportPair) -> None:
        for addresses, nobody_listens in (
            ([pair.dead], True),
            ([pair.dead, pair.dead], True),
            ([pair.dead, pair.silent], False),
            ([pair.silent, pair.dead], False),
            ([], False),
        ):
            with pytest.raises((PeerUnreachable, PeerTimeout)) as caught:
                await pair.dial(addresses, timeout_s=1.0)
            assert getattr(caught.value, "nobody_listens", False) == nobody_listens

    transport.run(scenario)


def test_the_wrong_peer_at_an_address_is_refused(transport: TransportFactory) -> None:
    """Dialing somebody at an address where somebody else listens gives `PeerRefused`; the listener hears nothing."""

    async def scenario(pair: TransportPair) -> None:
        where = [Address(address.host, address.port, NOBODY.peer_id) for address in pair.far.addresses]
        with pytest.raises(PeerRefused):
            await pair.near.dial(NOBODY.peer_id, where, timeout_s=20)
        assert pair.accepted.empty()

    transport.run(scenario)


@pytest.mark.parametrize("got", [0, 10])
def test_a_cancelled_read_ends_the_connection(transport: TransportFactory, got: int) -> None:
    """The next reader could not know where in a message it begins: so nobody reads or writes there any more."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        reader = asyncio.create_task(read(far, 20))
        await near.write(bytes(got))
        await round_trips(*await pair.connect(), 10)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert far.closed
        for use in (read(far, 1), far.write(b"x"), read(near, 1)):
            with pytest.raises(PeerUnreachable):
                await use

    transport.run(scenario)


def test_a_write_cancelled_half_way_ends_the_connection(transport: TransportFactory) -> None:
    """Half a message is never followed by another: what arrives is a beginning of it, then the end."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        message = random.Random(3).randbytes(48 * MIB)
        writer = asyncio.create_task(near.write(message))
        await round_trips(*await pair.connect(), TURNS)
        waiting = asyncio.create_task(near.write(b"next"))
        writer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writer
        assert near.closed
        with pytest.raises(PeerUnreachable):
            await waiting
        assert message.startswith(await read_to_end(far))

    transport.run(scenario)


def test_a_write_cancelled_before_it_began_leaves_no_trace(transport: TransportFactory) -> None:
    """A write that waits for another one can be cancelled; those before and after it arrive."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        first = asyncio.create_task(near.write(b"a" * (48 * MIB)))
        await round_trips(*await pair.connect(), 10)
        second = asyncio.create_task(near.write(b"b" * (2 * MIB)))
        third = asyncio.create_task(near.write(b"c" * MIB))
        await round_trips(*await pair.connect(), 10)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert await read(far, 48 * MIB) == b"a" * (48 * MIB)
        assert await read(far, MIB) == b"c" * MIB
        await gather(first, third)

    transport.run(scenario)


def test_a_second_reader_at_once_is_refused(transport: TransportFactory) -> None:
    """It is a mistake of the caller, and does not disturb the first."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        first = asyncio.create_task(read(far, 5))
        await round_trips(*await pair.connect(), 1)
        with pytest.raises(LocalError):
            await read(far, 1)
        await near.write(b"hello")
        assert await first == b"hello"

    transport.run(scenario)


def test_listening_twice_is_refused(transport: TransportFactory) -> None:
    """The second acceptor would never know which connections are its own."""

    async def scenario(pair: TransportPair) -> None:
        with pytest.raises(LocalError):
            await pair.far.listen(pair.accepted.put_nowait)

    transport.run(scenario)


def test_one_gib_passes_through_one_buffer(transport: TransportFactory) -> None:
    """A GiB from one 1 MiB buffer into another, every piece checked, with no memory piling up in between."""

    async def scenario(pair: TransportPair) -> None:
        near, far = await pair.connect()
        pattern = random.Random(11).randbytes(MIB - 8)
        source, sink = bytearray(8) + pattern, bytearray(MIB)
        ahead = 0

        async def send() -> None:
            for number in range(1024):
                source[:8] = number.to_bytes(8, "big")
                await near.write(source)

        async def receive() -> None:
            nonlocal ahead
            for number in range(1024):
                await far.readinto(sink)
                assert sink[:8] == number.to_bytes(8, "big")
                assert sink.endswith(pattern)
                ahead = max(ahead, near.bytes_sent - far.bytes_received)

        tracemalloc.start()
        try:
            await gather(send(), receive())
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert near.bytes_sent == far.bytes_received == 1 << 30
        assert ahead < QUEUE_BYTES
        assert peak < QUEUE_BYTES

    transport.run(scenario)


def test_64_streams_at_once_stay_apart(transport: TransportFactory) -> None:
    """Each connection gives back what was written to it, all of them under way together."""

    async def scenario(pair: TransportPair) -> None:
        pairs = [await pair.connect() for _ in range(64)]

        async def send(number: int, connection: Connection) -> None:
            rng = random.Random(number)
            for _ in range(10):
                await connection.write(rng.randbytes(rng.randint(1, 100_000)))

        async def receive(number: int, connection: Connection) -> None:
            rng = random.Random(number)
            for _ in range(10):
                expected = rng.randbytes(rng.randint(1, 100_000))
                assert await read(connection, len(expected)) == expected

        there = [(send(number, near), receive(number, far)) for number, (near, far) in enumerate(pairs)]
        back = [(send(number + 64, far), receive(number + 64, near)) for number, (near, far) in enumerate(pairs)]
        await gather(*(work for both in there + back for work in both))

    transport.run(scenario)


def test_small_round_trips_go_on_beside_a_bulk_stream(transport: TransportFactory) -> None:
    """They are neither stuck behind the bulk nor does the bulk starve: each gets its turn."""

    async def scenario(pair: TransportPair) -> None:
        bulk_near, bulk_far = await pair.connect()
        near, far = await pair.connect()

        async def drain() -> None:
            sink = bytearray(MIB)
            while True:
                await bulk_far.readinto(sink)

        with contextlib.suppress(PeerUnreachable):
            async with (
                running(asyncio.create_task(write_mib(bulk_near, 1 << 20))),
                running(asyncio.create_task(drain())),
            ):
                await round_trips(near, far, 100)
                moved = bulk_far.bytes_received
                await round_trips(near, far, 100)
                moved = bulk_far.bytes_received - moved
        assert 0 < moved < 100 * QUEUE_BYTES

    transport.run(scenario)
