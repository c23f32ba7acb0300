"""A peer with an upload limit: rounds, states, steps and the DHT together stay within it, and calls are not late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest
import torch

from shoal.averaging import Averager, AveragerSettings, TensorLock
from shoal.averaging.core import PeerCore
from shoal.protocol.wire import DhtPing
from shoal.sim import SimHost, Swarm, run, sleep
from shoal.state.wire import Donor, StateDonor, download_state
from shoal.transport.uplink import Uplink
from shoal.transport.upload_limit import UploadLimit
from tests.sim.state_kit import Box, random_tensors, same

LIMIT = 400_000
NAMES = ("a", "b", "c")


def averager(swarm: Swarm[Averager], limits: dict[str, float]) -> Callable[[SimHost], Coroutine[Any, Any, Averager]]:
    """What starts a peer that averages 2 MB with two others, with the limit that is given for its host."""

    async def start(host: SimHost) -> Averager:
        if host.name in limits:
            host.transport.uplink = Uplink(limit=UploadLimit(limits[host.name]))
        known = [swarm.peer("a").core.endpoint.contact.addresses[0]] if host.name != "a" else []
        core = await PeerCore.start(host.identity, host.transport, host.env, known)
        settings = AveragerSettings(target_group_size=3, min_group_size=3)
        return Averager(core, [torch.ones(500_000)], "run", settings, lock=TensorLock())

    return start


async def stop(*averagers: Averager) -> None:
    """Close them, and their peers."""
    for each in averagers:
        await each.close()
        await each.core.close()


def test_all_that_a_peer_sends_stays_within_its_limit() -> None:
    """One of three peers may send 400 kB/s, in rounds, a download and calls: it does, not more, and answers at once."""

    async def main() -> None:
        swarm: Swarm[Averager] = Swarm()
        for name in NAMES:
            await swarm.start_peer(name, averager(swarm, {"a": LIMIT}))
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
        await stop(a, b, c)

    run(main)


def test_a_peer_with_a_low_limit_reduces_less() -> None:
    """It says what it can send, so it reduces nothing where its values alone take it longest: it sends them once."""

    async def main() -> None:
        swarm: Swarm[Averager] = Swarm()
        for name in NAMES:
            await swarm.start_peer(name, averager(swarm, {"a": 500e3, "b": 1e6}))
        averagers = [swarm.peer(name) for name in NAMES]
        await asyncio.gather(*(swarm.run_on(name, swarm.peer(name).step, timeout_s=60.0) for name in NAMES))
        slow, fast, unlimited = (each.core.endpoint.traffic[0] / 2e6 for each in averagers)
        assert slow == pytest.approx(1.0, rel=0.05)
        assert (fast, unlimited) == pytest.approx((1.5, 1.5), rel=0.05)  # who knows no limit counts as the fastest
        await stop(*averagers)

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
