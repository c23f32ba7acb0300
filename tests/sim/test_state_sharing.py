"""What a peer that shares several states may send: one limit for all of them."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal import sim
from shoal.averager import Averager, TensorLock
from shoal.sim import SimHost, SimNetwork, Swarm
from tests.sim.averaging_kit import SETTINGS, start_core

MIB = 1 << 20
PREFIXES = ("one", "two")


@pytest.mark.parametrize("limit", [MIB, None])
def test_all_states_of_a_peer_share_its_upload_limit(limit: float | None) -> None:
    """Two states of 2 MiB at 1 MiB/s, taken by two peers at once, need 4 s; without a limit the line decides."""

    async def main() -> float:
        swarm: Swarm[list[Averager]] = Swarm(network=SimNetwork(1))
        first: list[SimHost] = []

        async def peer(host: SimHost) -> list[Averager]:
            first.append(host)
            core = await start_core(host, first[0], state_upload_limit=limit)
            return [
                Averager(core, [torch.full((MIB // 2,), float(i))], prefix, SETTINGS, lock=TensorLock())
                for i, prefix in enumerate(PREFIXES)
            ]

        donor = await swarm.start_peer("donor", peer)
        for name in PREFIXES:
            await swarm.start_peer(name, peer)
        for averager in donor:
            averager.sharing.enable()
            await swarm.run_on("donor", averager.sharing.declare)
        began = asyncio.get_running_loop().time()
        states = await asyncio.gather(
            *(swarm.run_on(name, swarm.peer(name)[i].sharing.load, timeout_s=60.0) for i, name in enumerate(PREFIXES))
        )
        assert [float(state.tensors[0].max()) for state in states] == [0.0, 1.0]
        took_s = asyncio.get_running_loop().time() - began
        for name, averagers in swarm.peers.items():
            for averager in averagers:
                await swarm.run_on(name, averager.close)
            await swarm.run_on(name, averagers[0].core.close)
        return took_s

    took_s = sim.run(main, seed=1)
    assert (3.5 < took_s < 6.0) if limit else took_s < 3.0
