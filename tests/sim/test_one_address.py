"""A laboratory behind one address: what is bounded for each host must not hurt many honest peers that share one."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

from shoal import sim
from shoal.sim.loop import world_time
from shoal.transport.memory import MemoryConnection
from tests.sim.optimizer_kit import Run

PUBLIC, LATE = 4, 4


class Trained(NamedTuple):
    """What came of it.

    Attributes:
        epochs: that the run made in half a minute.
        least: of the epochs after the first ten seconds, how many the peer took part in that took part in fewest.
        late_s: how long those of the laboratory that came late took to train with the others, the slowest one.
    """

    epochs: int
    least: int
    late_s: float


def trained(monkeypatch: pytest.MonkeyPatch, size: int, *, one_address: bool) -> Trained:
    """Peers at addresses of their own, and a laboratory of clients that start at once; some of them come late."""

    def seen(connection: MemoryConnection) -> str:
        host: str = connection._hosts[1]
        return "router" if one_address and host.startswith("lab") else host

    monkeypatch.setattr(MemoryConnection, "remote_host", property(seen))

    async def main() -> Trained:
        run = Run(target=8 * (PUBLIC + size))
        loop = asyncio.get_running_loop()
        public, lab = [f"p{number}" for number in range(PUBLIC)], [f"lab{number:02}" for number in range(size)]
        for name in public:
            await run.add(name)
        await asyncio.gather(*(run.add(name, client_mode=True) for name in lab))

        def train(name: str) -> asyncio.Task[None]:
            trainer = run.swarm.peer(name)
            return run.swarm.spawn(name, trainer.train(4, duration_s=0.5, until=lambda: world_time(loop) > 30.0))

        tasks = [train(name) for name in public + lab]
        await sim.sleep(12.0 - world_time(loop))
        late = [f"lab-late{number}" for number in range(LATE)]
        await asyncio.gather(*(run.add(name, client_mode=True, seed=7) for name in late))
        tasks += [train(name) for name in late]
        await asyncio.wait(tasks)
        first = run.swarm.peer("p0").participant.epoch
        least = min(sum(at > 10.0 for at, *_ in run.swarm.peer(name).epochs) for name in lab)
        return Trained(first, least, max(run.swarm.peer(name).epochs[0][0] for name in late) - 12.0)

    return sim.run(main, seed=5)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(6, marks=pytest.mark.long),
        pytest.param(32, marks=[pytest.mark.long(full=True), pytest.mark.timeout(900)]),
    ],
)
def test_a_laboratory_behind_one_address_trains_as_one_with_many(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """So many start at once, 4 come late: calls, entries, downloads and rounds."""
    apart = trained(monkeypatch, size, one_address=False)
    monkeypatch.undo()
    together = trained(monkeypatch, size, one_address=True)
    assert together.epochs >= 0.95 * apart.epochs
    assert together.least >= 0.9 * apart.least
    assert together.late_s <= apart.late_s + 1.0
