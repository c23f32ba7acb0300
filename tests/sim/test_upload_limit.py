"""A peer with an upload limit: rounds, states, steps and the DHT together stay within it, and calls are not late."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
import torch

from shoal.averager import Averager, AveragerSettings, TensorLock
from shoal.core import PeerCore
from shoal.sim import SimHost, Swarm, run, sleep
from shoal.state import Donor, StateDonor, download_state
from shoal.transport.uplink import Uplink
from shoal.transport.upload_limit import UploadLimit
from shoal.wire import DhtPing
from tests.sim.state_kit import Box, random_tensors, same

LIMIT = 400_000
NAMES = ("a", "b", "c")


def test_all_that_a_peer_sends_stays_within_its_limit() -> None:
    """One of three peers may send 400 kB/s, in rounds, a download and calls: it does, not more, and answers at once."""

    async def main() -> None:
        swarm: Swarm[Averager] = Swarm()

        async def start(host: SimHost) -> Averager:
            if host.name == "a":
                host.transport.uplink = Uplink(limit=UploadLimit(LIMIT))
            known = [swarm.peer("a").core.endpoint.contact.addresses[0]] if host.name != "a" else []
            core = await PeerCore.start(host.identity, host.transport, host.env, known)
            settings = AveragerSettings(target_group_size=3, min_group_size=3)
            return Averager(core, [torch.ones(500_000)], "run", settings, lock=TensorLock())

        for name in NAMES:
            await swarm.start_peer(name, start)
        a, b, c = (swarm.peer(name) for name in NAMES)
        box = Box(random_tensors(1, 4.0))
        StateDonor(a.core.endpoint, a.core.env, "run", box.hold, box.version)
        loop, sent, waits = asyncio.get_running_loop(), [0], []

        async def watch() -> None:
            while True:
                began = loop.time()
                await c.core.endpoint.call(a.core.peer_id, DhtPing(), timeout_s=30.0)
                waits.append(loop.time() - began)
                await sleep(0.1 - (loop.time() - began) % 0.1)
                sent.append(a.core.endpoint.traffic[0])

        async def rounds() -> None:
            for _ in range(3):
                await asyncio.gather(*(swarm.run_on(name, swarm.peer(name).step, timeout_s=60.0) for name in NAMES))

        watching = swarm.network.spawn("c", watch())
        donor = Donor(a.core.endpoint.contact, 1.0)
        _, state = await asyncio.gather(
            rounds(), swarm.run_on("b", download_state, b.core.endpoint, b.core.env, "run", [donor], timeout_s=300.0)
        )
        watching.cancel()
        assert same(state.tensors, box.tensors)
        busy = sent[: sent.index(max(sent)) + 1]
        assert len(busy) > 200  # 4 MiB and three rounds of 2.7 MB take this peer more than 20 s
        assert max(after - before for before, after in zip(busy, busy[100:], strict=False)) <= 1.02 * 10 * LIMIT
        assert busy[-1] >= 0.9 * LIMIT * len(busy) / 10
        assert max(waits) < 0.1
        assert max(after - before for before, after in pairwise(busy)) < 0.2 * LIMIT
        for averager in (a, b, c):
            await averager.close()
            await averager.core.close()

    run(main)


def test_without_a_limit_nothing_waits() -> None:
    """The same call and bytes at once, and the line says that it knows of no rate; with a limit it names that."""

    async def main() -> None:
        free, limited = Uplink(), Uplink(limit=UploadLimit(LIMIT))
        assert (free.limited, free.bytes_per_s, free.piece_bytes(1 << 20)) == (False, None, 1 << 20)
        assert (limited.limited, limited.bytes_per_s, limited.piece_bytes(1 << 20)) == (True, LIMIT, LIMIT // 20)
        loop = asyncio.get_running_loop()
        for _ in range(100):
            await free.admit(1 << 20, bulk=True)
        assert loop.time() == 0.0
        for _ in range(100):
            await limited.admit(LIMIT // 20, bulk=True)
        assert loop.time() == pytest.approx(5.0, abs=0.11)

    run(main)
