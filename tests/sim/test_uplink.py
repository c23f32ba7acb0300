"""`Uplink`: it looks at connections while bulk data waits to be sent, and not otherwise."""

from __future__ import annotations

from shoal.sim import run, sleep
from shoal.transport.pacing import LOOK_S, QUEUE_S, Flow
from shoal.transport.uplink import Uplink


class Connection:
    """One on a line that carries a megabyte a second, and has a queue that is too long.

    Attributes:
        looks: how often it was asked.
        paces: what it was told.
    """

    def __init__(self, *, bulk: bool) -> None:
        self.bulk, self.waits, self.looks = bulk, True, 0
        self.paces: list[float] = []

    def flow(self) -> Flow | None:
        self.looks += 1
        return Flow(self.waits, round(self.looks * LOOK_S * 1e6), 2 * QUEUE_S, 0.1)

    def pace(self, bytes_per_s: float) -> None:
        self.paces.append(bytes_per_s)


def test_bulk_data_is_paced_while_it_waits() -> None:
    """Looks begin with the first bulk data, end a second after the last, and begin again; calls are not paced."""

    async def main() -> None:
        bulk, calls = Connection(bulk=True), Connection(bulk=False)
        uplink = Uplink([bulk, calls])
        await sleep(10.0)
        assert bulk.looks == 0
        assert uplink.bytes_per_s is None
        uplink.bulk_begins()
        await sleep(2.0)
        assert 0.3e6 <= bulk.paces[-1] < 1e6
        assert uplink.bytes_per_s is not None
        assert calls.looks == 0
        bulk.waits = False
        await sleep(10.0)
        looks = bulk.looks
        await sleep(10.0)
        assert bulk.looks == looks < 45
        uplink.bulk_begins()
        uplink.bulk_begins()
        await sleep(LOOK_S * 1.5)
        assert bulk.looks == looks + 1
        uplink.close()
        await sleep(10.0)
        assert bulk.looks == looks + 1

    run(main)
