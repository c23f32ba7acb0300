"""Records of AES-256-GCM: what opens, and what does not."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.transport import sealed
from shoal.transport.connection import TcpConnection
from shoal.transport.layers import RECORD_BYTES, BrokenLayer, ReceiveBuffer, Scratch
from shoal.transport.sealed import PAUSE_BYTES, SealedLayer
from shoal.transport.uplink import Uplink

KEYS = bytes(32), b"\1" * 32
TAG_BYTES = 16


def pair() -> tuple[SealedLayer, SealedLayer]:
    """Two ends of a connection."""
    return SealedLayer(*KEYS, Scratch()), SealedLayer(KEYS[1], KEYS[0], Scratch())


def seal(layer: SealedLayer, *pieces: bytes) -> list[bytes]:
    """The records for these pieces."""
    return [b"".join(map(bytes, layer.protect([memoryview(piece)]))) for piece in pieces]


def feed(layer: SealedLayer, data: bytes | memoryview, target: memoryview) -> int:
    """As a socket would: `data` comes, as much at a time as there is room for."""
    filled = 0
    while data:
        room = layer.receive_buffer(target[filled:])
        count = min(len(room), len(data))
        room[:count] = data[:count]
        filled += layer.received(count, target[filled:])
        data = data[count:]
    return filled


@given(
    pieces=st.lists(st.integers(1, 3 * RECORD_BYTES // 2), min_size=1, max_size=6),
    reads=st.lists(st.integers(1, RECORD_BYTES), min_size=1, max_size=6),
    chunks=st.lists(st.integers(1, RECORD_BYTES), min_size=1, max_size=6),
    reader_first=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_what_was_sealed_opens_in_order_however_it_is_cut(
    pieces: list[int], reads: list[int], chunks: list[int], reader_first: bool, seed: int
) -> None:
    """Records, what the socket gives at a time and what the reader asks for need not match."""
    near, far = pair()
    rng = random.Random(seed)
    plain = [rng.randbytes(min(size, RECORD_BYTES)) for size in pieces]
    wire, sent = memoryview(b"".join(seal(near, *plain))), b"".join(plain)
    least = len(sent) >> 8  # single bytes only of what is short
    got, turn = bytearray(), 0
    while len(got) < len(sent):
        target = memoryview(bytearray(min(max(reads[turn % len(reads)], least), len(sent) - len(got))))
        filled = far.read(target) if reader_first or far.pending else 0
        while filled < len(target):
            count = max(chunks[turn % len(chunks)], least)
            filled += feed(far, wire[:count], target[filled:])
            wire, turn = wire[count:], turn + 1
        got += target
        turn += 1
    assert got == sent
    assert far.pending == 0
    assert len(wire) == 0


def flip(records: list[bytes]) -> list[bytes]:
    """One bit of the second record's ciphertext."""
    middle = len(records[1]) // 2
    return [records[0], records[1][:middle] + bytes([records[1][middle] ^ 4]) + records[1][middle + 1 :], records[2]]


def cut(records: list[bytes]) -> list[bytes]:
    """The second record is one byte shorter, and says so."""
    return [records[0], (len(records[1]) - 5).to_bytes(4, "big") + records[1][4:-1], records[2]]


@pytest.mark.parametrize(
    "meddle",
    [
        flip,
        cut,
        lambda records: [records[0], records[2]],
        lambda records: [records[0], records[0], records[1]],
        lambda records: [records[0], records[2], records[1]],
    ],
    ids=["changed", "shortened", "left out", "repeated", "swapped"],
)
def test_what_was_meddled_with_does_not_open(meddle: Callable[[list[bytes]], list[bytes]]) -> None:
    """The record before is good, and was given; of the other nothing is left in the reader's buffer."""
    near, far = pair()
    records = seal(near, b"a" * 100, b"b" * 100, b"c" * 100)
    target = memoryview(bytearray(b"." * 300))
    with pytest.raises(BrokenLayer):
        feed(far, b"".join(meddle(records)), target)
    assert target[:100] == b"a" * 100
    assert not set(b"bc") & set(target)


def test_a_record_does_not_open_in_the_other_direction() -> None:
    """Each direction has its own key: nobody can send a peer's words back to it."""
    near, _ = pair()
    with pytest.raises(BrokenLayer):
        feed(near, seal(near, b"mine")[0], memoryview(bytearray(4)))


@pytest.mark.parametrize("length", [0, TAG_BYTES, RECORD_BYTES + TAG_BYTES + 1, 2**32 - 1])
def test_an_impossible_length_is_refused_at_once(length: int) -> None:
    """Nothing is allocated or waited for."""
    _, far = pair()
    with pytest.raises(BrokenLayer, match=f"a record of {length} bytes"):
        feed(far, length.to_bytes(4, "big") + b"x", memoryview(bytearray(4)))


def test_keys_change_on_both_sides_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `REKEY_BYTES` the same bytes under the same number seal to something else, and still open."""
    monkeypatch.setattr(sealed, "REKEY_BYTES", 250)
    near, far = pair()
    pieces = [bytes([number]) * 100 for number in range(10)]
    records = seal(near, *pieces)
    target = memoryview(bytearray(1000))
    assert feed(far, b"".join(records), target) == 1000
    assert target == b"".join(pieces)
    monkeypatch.setattr(sealed, "REKEY_BYTES", 1 << 36)
    unchanged = seal(pair()[0], *pieces)
    assert records[:3] == unchanged[:3]
    assert not set(records[3:]) & set(unchanged[3:])


def test_a_part_of_the_usual_size_fits_into_the_memory_that_is_received_into() -> None:
    """Else half of it would be copied twice: what came of its last record, until the last few bytes of that come."""
    near, far = pair()
    header, part = b"header", memoryview(bytearray(1 << 20))
    wire = b"".join(map(bytes, near.protect([memoryview(header), part])))
    ahead = far.receive_buffer(memoryview(bytearray(len(header))))
    count = len(ahead)
    ahead[:] = wire[:count]
    assert far.received(count, memoryview(bytearray(len(header)))) == len(header)
    assert len(far.receive_buffer(part)) >= len(wire) - count


def test_unread_records_wait_sealed() -> None:
    """Without a reader nothing is opened; then all of it is there."""
    near, far = pair()
    records = seal(near, b"one", b"two")
    assert feed(far, b"".join(records), memoryview(b"")) == 0
    assert far.pending == sum(map(len, records))
    target = memoryview(bytearray(6))
    assert far.read(target) == 6
    assert bytes(target) == b"onetwo"


@given(
    came=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    taken=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    unit=st.sampled_from([1, 17_000, 40_000]),
    shared=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_what_waits_is_kept_in_order(came: list[int], taken: list[int], unit: int, shared: bool, seed: int) -> None:
    """Whatever comes and is taken, also while other connections use the shared memory."""
    scratch, rng = Scratch(), random.Random(seed)
    held = ReceiveBuffer(scratch, b"")
    wire = rng.randbytes(sum(came) * unit)
    sent, got = 0, b""
    for number, count in enumerate(came):
        if len(held) >= PAUSE_BYTES:
            break
        room = held.receive_buffer(unit * count)
        count = min(unit * count, len(room))
        room[:count] = wire[sent : sent + count]
        sent += count
        waiting = held.received(count)
        take = min(unit * taken[number % len(taken)], len(waiting))
        got += waiting[:take]
        held.keep(waiting[take:])
        if shared:
            scratch.receiving[:4096] = rng.randbytes(4096)
        assert len(held) == sent - len(got)
        assert wire[len(got) : sent] == held.view
    waiting = held.view
    got += waiting
    held.keep(waiting[len(waiting) :])
    assert got == wire[:sent]
    assert len(held) == 0


def is_large(held: ReceiveBuffer) -> bool:
    """Whether what waits lies in memory that was lent."""
    return memoryview(held.view.obj).nbytes > 1 << 20


def receive(held: ReceiveBuffer, data: bytes) -> memoryview:
    """Let some bytes come; returns all that waits."""
    held.receive_buffer(len(data))[: len(data)] = data
    return held.received(len(data))


def test_the_beginning_of_a_record_stays_where_it_came() -> None:
    """The rest comes right behind it; the memory is shared again afterwards. A few bytes are copied."""
    scratch = Scratch()
    held, other = ReceiveBuffer(scratch, b""), ReceiveBuffer(scratch, b"")
    before = scratch.receiving
    held.keep(receive(held, b"a" * 300_000)[100_000:])
    assert held.view.obj is before.obj
    assert scratch.receiving.obj is not before.obj
    other.keep(receive(other, b"b" * 1000))
    assert other.view.obj is not scratch.receiving.obj
    waiting = receive(held, b"c" * 200_000)
    assert waiting == b"a" * 200_000 + b"c" * 200_000
    held.keep(waiting[400_000:])
    assert len(held) == 0
    held.keep(receive(held, b"d" * 100_000))
    assert scratch.receiving.obj is before.obj


def test_memory_is_lent_to_one_at_a_time() -> None:
    """The others' bytes are copied; who is gone has none any more."""
    scratch = Scratch()
    many = [ReceiveBuffer(scratch, b"") for _ in range(2)]
    for number, held in enumerate(many):
        held.keep(receive(held, bytes([number]) * 100_000))
    assert [is_large(held) for held in many] == [True, False]
    assert all(held.view == bytes([number]) * 100_000 for number, held in enumerate(many))
    del many[0], held
    late = ReceiveBuffer(scratch, b"")
    late.keep(receive(late, b"x" * 100_000))
    assert is_large(late)


def test_a_record_that_comes_in_small_pieces_is_copied_a_few_times_at_most() -> None:
    """Where it began to come slowly it gets memory of its own, into which the rest is received."""
    scratch = Scratch()
    held = ReceiveBuffer(scratch, b"")
    piece, shared = 1000, 0
    for _ in range(RECORD_BYTES // piece):
        room = held.receive_buffer(0)
        shared += room.obj is scratch.receiving.obj
        held.keep(held.received(piece))
    assert len(held) == RECORD_BYTES // piece * piece
    assert shared <= 4


def test_what_trickles_in_counts_before_its_record_is_complete() -> None:
    """Else a peer on a slow line would count as silent for as long as a record takes."""

    async def scenario() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        connection = TcpConnection(context, dialed=False, scratch=Scratch(), uplink=Uplink(), alive=set())
        connection.seal(KEYS[1], KEYS[0])
        near, _ = pair()
        wire = seal(near, bytes(RECORD_BYTES))[0]
        seen = [connection.bytes_received]
        for start in range(0, len(wire), 50_000):
            piece = wire[start : start + 50_000]
            connection.get_buffer(-1)[: len(piece)] = piece
            connection.buffer_updated(len(piece))
            seen.append(connection.bytes_received)
        assert seen == [*range(0, len(wire), 50_000), len(wire)]
        await connection.readinto(bytearray(RECORD_BYTES))
        assert connection.bytes_received == RECORD_BYTES

    asyncio.run(scenario())
