"""The same rounds on `shoal.sim`'s network, for machines where namespaces cannot be made. Times are virtual."""

from __future__ import annotations

import asyncio

import torch

from benchmarks.contenders.shoal_peer import codec
from benchmarks.emulator.star import Shape
from shoal.averaging import Averager, AveragerSettings, TensorLock
from shoal.averaging.core import PeerCore
from shoal.events import Event, GroupFormed
from shoal.sim import SimHost, SimNetwork, Swarm, run

__all__ = ["simulate"]


def simulate(
    peers: int, shape: Shape, numel: int, compression: str, rounds: int, *, seed: int = 0
) -> list[tuple[float, float, float]]:
    """Average over a simulated network.

    Returns:
        For each round the seconds of all-reduce, matchmaking and the whole, as `benchmarks.allreduce.Round` has them.
    """

    async def main() -> list[tuple[float, float, float]]:
        rate = shape.rate_mbit * 1e6 / 8
        network = SimNetwork(seed, latency_s=2 * shape.delay_ms / 1e3, loss=shape.loss, bandwidth_bytes_s=rate)
        swarm: Swarm[Averager] = Swarm(network=network)
        loop, formed = asyncio.get_running_loop(), [0.0] * peers
        first: list[SimHost] = []
        settings = AveragerSettings(target_group_size=peers, min_group_size=peers)

        def note(rank: int, event: Event) -> None:
            if isinstance(event, GroupFormed):
                formed[rank] = loop.time()

        async def start(host: SimHost) -> Averager:
            rank = int(host.name[4:])
            host.env.events.subscribe(lambda event: note(rank, event))
            known = [each.address for each in first]
            first[:] = first or [host]
            core = await PeerCore.start(host.identity, host.transport, host.env, known)
            values = torch.arange(numel, dtype=torch.float32).remainder_(1021.0).mul_((rank + 1) / 1024)
            lock = TensorLock()
            return Averager(core, [values], "shaped", settings, lock=lock, compression=codec(compression))

        names = [f"host{rank}" for rank in range(peers)]
        for name in names:
            await swarm.start_peer(name, start)
        times = []
        for _ in range(rounds):
            called = loop.time()
            await asyncio.gather(*(swarm.run_on(name, swarm.peer(name).step, timeout_s=600.0) for name in names))
            done, known = loop.time(), max(formed)
            times.append((done - known, known - called, done - called))
            await asyncio.sleep(1.0)
        for name in names:
            await swarm.run_on(name, swarm.peer(name).close)
            await swarm.run_on(name, swarm.peer(name).core.close)
        return times

    return run(main, seed=seed)
