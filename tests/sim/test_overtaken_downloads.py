"""A download that takes so long that the peer is further when it is here."""

from __future__ import annotations

import asyncio
from typing import Any

from shoal import sim
from shoal.sim import SimNetwork
from tests.sim.optimizer_kit import Run
from tests.sim.test_catch_up import ballast
from tests.situations import reaches

MIB = 1 << 20
PEERS = ["p0", "p1"]


def test_a_peer_that_came_further_while_it_downloaded_keeps_its_state_and_regains_no_patience() -> None:
    """It counted as a state that was taken over: whoever gives an old one slowly could stop the trainer for ever."""

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        network = SimNetwork(loop.seed, window_bytes=32 << 10)
        network.add_host("slow", up_bytes_s=MIB / 30)
        run = Run(network=network, target=16)
        for name in [*PEERS, "slow"]:
            await run.add(name, extra_tensors=ballast(0, MIB))
        await sim.sleep(3.0)
        network.partition([PEERS, ["slow"]])
        slow, *members = (run.swarm.peer(name) for name in ("slow", *PEERS))
        # It trains no more: so nobody follows its steps, and it does not go on to take those of the others.
        await run.swarm.run_on("slow", slow.train, 8, duration_s=0.1, until=lambda: slow.participant.epoch >= 6)
        stop = asyncio.Event()
        tasks = [run.swarm.spawn(n, run.swarm.peer(n).train(4, duration_s=0.5, until=stop.is_set)) for n in PEERS]
        await sim.sleep(4.0)
        assert all(member.participant.epoch < slow.participant.epoch for member in members)
        network.heal()
        while not any(member.participant.takeover._intake for member in members):
            await sim.sleep(0.1)
        began = loop.time()
        while any(member.participant.takeover._intake for member in members):
            await sim.sleep(0.1)
        assert loop.time() > began + 25.0
        stop.set()
        await asyncio.wait(tasks)
        assert run.agree(PEERS)
        assert members[0].participant.epoch > slow.participant.epoch
        assert not any(member.downloads or member.participant.takeover.downloads for member in members)
        left_s = [member.participant._fetching._patience[False].left_s(loop.time()) for member in members]
        assert min(left_s) < 5.0, left_s
        assert not run.warnings
        await run.close()

    with reaches("a peer comes further while it downloads a state"):
        sim.run(main)
