"""`Uplink`: it looks at connections while bulk data waits to be sent, and not otherwise; and counts their packets."""

from __future__ import annotations

import asyncio

import pytest

from shoal.sim import run, sleep
from shoal.transport.pacing import LOOK_S, QUEUE_S, Flow
from shoal.transport.uplink import Uplink
from shoal.transport.upload_limit import UploadLimit


class Connection:
    """One on a line that carries a megabyte a second, and has a queue that is too long.

    Attributes:
        looks: how often it was asked.
        sent_bytes: in packets.
        paces: what it was told.
    """

    def __init__(self, *, bulk: bool) -> None:
        self.bulk, self.waits, self.looks, self.sent_bytes = bulk, True, 0, 0
        self.paces: list[float] = []

    def flow(self) -> Flow | None:
        self.looks += 1
        return Flow(self.waits, round(self.looks * LOOK_S * 1e6), 2 * QUEUE_S, 0.1)

    def pace(self, bytes_per_s: float) -> None:
        self.paces.append(bytes_per_s)

    def packet_bytes(self) -> int:
        return self.sent_bytes


def test_bulk_data_is_paced_while_it_waits() -> None:
    """Looks begin with the first bulk data, end a second after the last, and begin again; calls are not paced."""

    async def main() -> None:
        bulk, calls = Connection(bulk=True), Connection(bulk=False)
        uplink = Uplink([bulk, calls])
        await sleep(10.0)
        assert bulk.looks == 0
        assert uplink.bytes_per_s is None
        await uplink.admit(1, bulk=False)
        await uplink.admit(1, bulk=True)
        await sleep(2.0)
        assert 0.3e6 <= bulk.paces[-1] < 1e6
        assert uplink.bytes_per_s is not None
        assert calls.looks == 0
        bulk.waits = False
        await sleep(10.0)
        looks = bulk.looks
        await sleep(10.0)
        assert bulk.looks == looks < 45
        await uplink.admit(1, bulk=True)
        await uplink.admit(1, bulk=True)
        await sleep(LOOK_S * 1.5)
        assert bulk.looks == looks + 1
        uplink.close()
        await sleep(10.0)
        assert bulk.looks == looks + 1

    run(main)


def test_what_packets_take_more_is_within_the_limit() -> None:
    """Headers, handshakes and repeated packets of a tenth: a tenth less is admitted."""

    async def main() -> None:
        connection = Connection(bulk=True)
        uplink, loop = Uplink([connection], UploadLimit(1e6)), asyncio.get_running_loop()
        while loop.time() < 20.0:
            await uplink.admit(10_000, bulk=True)
            connection.sent_bytes += 11_000
        uplink.close()
        assert connection.sent_bytes == pytest.approx(20e6, rel=0.01)

    run(main)
