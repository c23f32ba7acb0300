"""What the network emulator of the benchmarks does to packets: pure functions of time, no network."""

from __future__ import annotations

import struct

import pytest

from benchmarks.emulator.star import Line, Shape, Star
from benchmarks.emulator.train import HEAD, HEAD_BYTES, cut, measure

RATE_MBIT = 12.0
"""A packet of 1,500 bytes takes a millisecond."""


def single(size: int = 1500) -> bytes:
    """A train of one packet."""
    return HEAD.pack(0, 0, 0, 0, 0, 0) + bytes([0x45]) + bytes(size - 1)


def tcp_train(payload: bytes, segment: int, *, sequence: int = 1000, flags: int = 0x18) -> bytes:
    """A train of TCP segments, with 12 bytes of options as Linux sends them."""
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 52 + len(payload), 7, 0, 64, 6, 0, b"\n\0\0\1", b"\n\0\0\2")
    tcp = struct.pack("!HHIIBBHHH", 1, 2, sequence, 0, 8 << 4, flags, 100, 0, 0) + bytes(12)
    return HEAD.pack(1, 1, 52, segment, 20, 16) + ip + tcp + payload


def sequence_of(train: bytes) -> int:
    """The sequence number in its TCP header."""
    return int.from_bytes(train[HEAD_BYTES + 24 : HEAD_BYTES + 28], "big")


def all_arrivals(star: Star) -> list[tuple[float, int, bytes]]:
    """Let everything arrive: (when, host, train)."""
    arrived = []
    while (now := star.next_at) is not None:
        arrived += [(now, host, train) for host, train in star.arrivals(now)]
    return arrived


def test_a_line_takes_its_rate_and_its_delay() -> None:
    """Packets that come at once leave one after another at the rate of the line, and arrive one delay later."""
    line = Line(Shape(rate_mbit=RATE_MBIT, delay_ms=10.0))
    arrivals = [line.offer(0.0, 1500) for _ in range(3)]
    assert [taken for _, taken in arrivals] == [1, 1, 1]
    assert [when for when, _ in arrivals] == pytest.approx([0.011, 0.012, 0.013])


def test_an_idle_line_saves_nothing_up() -> None:
    """What a line could have carried before a packet came does not make that packet faster."""
    line = Line(Shape(rate_mbit=RATE_MBIT, delay_ms=0.0))
    assert line.offer(5.0, 1500)[0] == pytest.approx(5.001)


def test_a_full_queue_drops_what_comes_last() -> None:
    """A packet that would wait longer than the queue is long is dropped; the next one, when there is room, is not."""
    line = Line(Shape(rate_mbit=RATE_MBIT, delay_ms=0.0, queue_ms=5.5))
    taken = [line.offer(0.0, 1500)[1] for _ in range(10)]
    assert taken == [1] * 6 + [0] * 4
    assert line.offer(0.003, 1500)[1] == 1
    assert (line.carried, line.dropped) == (7, 4)


def test_a_train_that_does_not_fit_is_carried_as_far_as_there_is_room() -> None:
    """Of a train of ten packets the first ones take the queue's room, as if they had come one by one."""
    line = Line(Shape(rate_mbit=RATE_MBIT, delay_ms=0.0, queue_ms=5.5))
    when, taken = line.offer(0.0, 15_000, 10)
    assert taken == 6
    assert when == pytest.approx(0.006)


def test_a_packet_crosses_a_line_up_and_a_line_down() -> None:
    """Between two hosts there are two rates and two delays; a round trip has four delays."""
    star = Star(3, Shape(rate_mbit=RATE_MBIT, delay_ms=10.0))
    star.send(0.0, 0, 2, single())
    ((when, host, train),) = all_arrivals(star)
    assert when == pytest.approx(0.022)
    assert (host, train) == (2, single())


def test_senders_to_one_host_share_its_line_down() -> None:
    """Two hosts that send to a third at their full rate arrive at its rate: the last packet after all of them."""
    star = Star(3, Shape(rate_mbit=RATE_MBIT, delay_ms=10.0, queue_ms=1000.0))
    for _ in range(50):
        star.send(0.0, 0, 2, single())
        star.send(0.0, 1, 2, single())
    arrived = all_arrivals(star)
    assert len(arrived) == 100
    assert arrived[-1][0] == pytest.approx(0.020 + 0.101)


def test_directions_do_not_share_a_line() -> None:
    """A host receives at its full rate while it sends at its full rate."""
    star = Star(2, Shape(rate_mbit=RATE_MBIT, delay_ms=0.0, queue_ms=1000.0))
    for _ in range(20):
        star.send(0.0, 0, 1, single())
        star.send(0.0, 1, 0, single())
    assert max(when for when, _, _ in all_arrivals(star)) == pytest.approx(0.021)


def test_nothing_arrives_before_its_time() -> None:
    """Asked early, the star gives nothing and says when to come back."""
    star = Star(2, Shape(rate_mbit=RATE_MBIT, delay_ms=10.0))
    star.send(0.0, 0, 1, single())
    assert list(star.arrivals(0.010)) == []
    assert star.next_at == pytest.approx(0.011)  # it reaches the switch


def test_loss_is_drawn_for_each_packet_from_the_seed() -> None:
    """One in a hundred is lost, the same ones with the same seed, and others with another."""

    def survivors(seed: int) -> list[int]:
        star = Star(2, Shape(rate_mbit=1e6, delay_ms=0.0, loss=0.01, queue_ms=1e6), seed)
        for number in range(20_000):
            star.send(0.0, 0, 1, single(100) + number.to_bytes(4, "big"))
        left = all_arrivals(star)
        assert star.lost + len(left) == 20_000
        return [int.from_bytes(train[-4:], "big") for _, _, train in left]

    first = survivors(1)
    assert 150 <= 20_000 - len(first) <= 250
    assert first == survivors(1)
    assert first != survivors(2)


def test_trains_lose_as_many_packets_as_single_packets_do() -> None:
    """Loss counts the packets that a train stands for; what is left of it keeps its bytes and sequence numbers."""
    star = Star(2, Shape(rate_mbit=1e6, delay_ms=0.0, loss=0.1, queue_ms=1e6), seed=3)
    payload = bytes(range(256)) * 40  # 10 segments of 1,024 bytes
    for _ in range(500):
        star.send(0.0, 0, 1, tcp_train(payload, 1024))
    arrived = [train for _, _, train in all_arrivals(star)]
    assert 400 <= star.lost <= 600
    assert sum(measure(train).packets for train in arrived) == 5000 - star.lost
    for train in arrived:
        offset, data = sequence_of(train) - 1000, train[HEAD_BYTES + 52 :]
        assert data == payload[offset : offset + len(data)]


def test_a_train_counts_the_headers_of_all_its_packets() -> None:
    """2,500 bytes in segments of 1,000 are three packets, each with 52 bytes of headers."""
    assert measure(tcp_train(bytes(2500), 1000)) == (3, 2500 + 3 * 52)
    assert measure(single(77)) == (1, 77)


def test_a_cut_train_is_a_valid_packet() -> None:
    """Length, checksum and sequence number are those of the piece; only the last packet has FIN and PSH."""
    train = tcp_train(bytes(2500), 1000, sequence=0xFFFFFF00, flags=0x19)
    first, last = cut(train, 0, 2), cut(train, 2, 3)
    assert (measure(first), measure(last)) == ((2, 2000 + 2 * 52), (1, 552))
    assert (sequence_of(first), sequence_of(last)) == (0xFFFFFF00, (0xFFFFFF00 + 2000) & 0xFFFFFFFF)
    assert first[HEAD_BYTES + 33] == 0x10
    assert last[HEAD_BYTES + 33] == 0x19
    for piece in (first, last):
        header = struct.unpack("!10H", piece[HEAD_BYTES : HEAD_BYTES + 20])
        assert header[1] == len(piece) - HEAD_BYTES
        assert sum(header) % 0xFFFF == 0  # RFC 1071
