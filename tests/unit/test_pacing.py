"""How bulk data makes room on a slow line: `Pacing` on a model of a line, and what the kernel tells of a connection."""

from __future__ import annotations

import math
import socket
import sys
from contextlib import closing

import pytest

from shoal.transport.pacing import LOOK_S, QUEUE_S, Flow, Pacing
from shoal.transport.sockets import flow, new_socket, pace

RATE = 1e6
STEP_S = 0.01
ROUND_TRIP_S = 0.1


class Line:
    """Connections that send at the pace they were told, and without one together twice what the line carries; fluid.

    Args:
        most: what each of them can carry behind the line, bytes per second.
    """

    def __init__(self, *most: float, rate: float = RATE) -> None:
        self.rate, self.now, self.queue_bytes = rate, 0.0, 0.0
        self.others_s = 0.0  # of the queue, whatever we do
        self.pacing = Pacing[int]()
        self.most = most
        self.paces: dict[int, float] = {}
        self.delivered = [0.0] * len(most)
        self.told = [Flow(True, 0, 0.0, ROUND_TRIP_S)] * len(most)  # of a round trip ago

    def run(self, seconds: float) -> tuple[float, float]:
        """Send for so long; returns the longest queue of this time, seconds, and what was carried, of what could be."""
        longest_s, before = 0.0, sum(self.delivered)
        for _ in range(round(seconds / LOOK_S)):
            for _ in range(round(LOOK_S / STEP_S)):
                self._step()
                longest_s = max(longest_s, self.queue_bytes / self.rate)
            self.paces |= self.pacing.look(self.now, dict(enumerate(self.told)))
            queue_s = self.queue_bytes / self.rate + self.others_s
            self.told = [Flow(True, int(each), queue_s, ROUND_TRIP_S + queue_s) for each in self.delivered]
        return longest_s, (sum(self.delivered) - before) / seconds / self.rate

    def _step(self) -> None:
        self.now += STEP_S
        unlimited = 2 * RATE / len(self.most)
        sent = [min(self.paces.get(key, unlimited), unlimited, most) * STEP_S for key, most in enumerate(self.most)]
        self.queue_bytes += sum(sent)
        carried = min(self.queue_bytes, self.rate * STEP_S)
        self.queue_bytes -= carried
        self.delivered = [each + carried * share / sum(sent) for each, share in zip(self.delivered, sent, strict=True)]


def test_a_full_line_keeps_a_short_queue_and_stays_full() -> None:
    """Six connections fill a line: its queue is short from then on, and the line carries nearly what it can."""
    line = Line(*[2 * RATE] * 6)
    line.run(5.0)
    longest_s, part = line.run(20.0)
    assert longest_s < 3 * QUEUE_S
    assert part > 0.97
    assert line.pacing.line_bytes_per_s == pytest.approx(RATE, rel=0.05)


def test_a_line_without_a_queue_has_no_limit() -> None:
    """What is limited elsewhere is not limited here, and nothing is known of the line."""
    line = Line(0.3 * RATE, 0.3 * RATE)
    line.run(5.0)
    assert line.paces == {}
    assert line.pacing.line_bytes_per_s is None


def test_a_slow_connection_leaves_its_share_to_the_others() -> None:
    """One of three connections carries a tenth of its share: the other two have the rest of the line."""
    line = Line(0.03 * RATE, 2 * RATE, 2 * RATE)
    line.run(5.0)
    _, part = line.run(10.0)
    assert part > 0.95
    assert line.paces[1] == pytest.approx(line.paces[2])


def test_a_line_that_gets_faster_is_used() -> None:
    """The line carries nearly twice as much from now on: five seconds later, so does the peer."""
    line = Line(RATE, RATE)
    line.run(5.0)
    line.rate = 1.9 * RATE
    line.run(5.0)
    assert line.run(5.0)[1] > 0.9


def test_what_a_line_has_carried_is_reached_again_at_once() -> None:
    """One connection to a slow host says little of the line: two seconds after it, the line is full again."""
    line = Line(2 * RATE, 2 * RATE, 2 * RATE)
    line.run(5.0)
    line.rate = RATE / 10  # a queue behind the line, which all of them share now
    line.run(5.0)
    line.rate = RATE
    line.run(2.0)
    assert line.run(3.0)[1] > 0.9


def test_the_queue_of_somebody_else_is_endured() -> None:
    """If sending less for five seconds makes the queue no shorter, the limit goes, and comes back ten seconds later."""
    line = Line(2 * RATE, 2 * RATE)
    line.run(5.0)
    line.others_s = 1.0
    limits = []
    for _ in range(30):
        line.run(1.0)
        limits.append(line.paces[0] < math.inf)
    assert limits[:4] == [True] * 4
    assert limits[8:14] == [False] * 6
    assert limits[18]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells this on Linux only")
def test_the_kernel_tells_of_a_connection_and_obeys() -> None:
    """Of a connection over loopback the kernel tells what was delivered and what waits, and takes a pace."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        with closing(new_socket(socket.AF_INET)) as sender:
            sender.setblocking(True)
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
            with closing(receiver):
                sender.sendall(bytes(1000))
                assert len(receiver.recv(1000, socket.MSG_WAITALL)) == 1000
                known = flow(sender)
                assert known is not None
                assert known.delivered_bytes >= 1000
                assert 0.0 < known.round_trip_s < 1.0
                assert not known.waits
                pace(sender, 12345.6)
                told = sender.getsockopt(socket.SOL_SOCKET, 47, 8)
                assert int.from_bytes(told, sys.byteorder) == 12345
        assert flow(sender) is None
