"""State download with real threads for copying, hashing and checking, on an ordinary event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from shoal.base.clock import Env, ThreadExecutor
from shoal.compression import Float16Compression, NoCompression
from shoal.protocol.identity import Identity
from shoal.rpc import Endpoint
from shoal.sim import SimNetwork
from shoal.state.wire import Donor, StateDonor, download_state
from shoal.transport.memory import MemoryTransport
from tests.sim.state_kit import PREFIX, Box, random_tensors, same


def test_chunks_that_are_checked_in_threads_while_others_arrive_are_right() -> None:
    """Two receivers at once from one donor, all sharing a pool of three threads."""

    async def main(pool: ThreadPoolExecutor) -> None:
        network = SimNetwork(latency_s=0.0)
        env = Env(executor=ThreadExecutor(pool))
        tensors = random_tensors(1, 0.3, 9.7, 2.2, 6.5)
        box = Box(tensors, codecs=[NoCompression()] * 3 + [Float16Compression()], epoch=1)
        giver, *takers = [
            Endpoint(MemoryTransport(Identity.ephemeral(), network, host=host), env) for host in ("donor", "a", "b")
        ]
        await giver.start()
        donor = StateDonor(giver, env, PREFIX, box.hold, box.version)
        states = await asyncio.gather(
            *(download_state(taker, env, PREFIX, [Donor(giver.contact)], timeout_s=60.0) for taker in takers)
        )
        for state in states:
            assert same(state.tensors[:3], tensors[:3])
            assert same(state.tensors[3:], [tensors[3].half().float()])
        assert box.holds == 1
        donor.stop()
        for endpoint in (giver, *takers):
            await endpoint.close()

    with ThreadPoolExecutor(3) as pool:
        asyncio.run(main(pool))
