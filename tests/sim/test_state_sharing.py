"""What a peer shares as the others find it: who is declared, and one upload limit for all of its states."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch

from shoal import sim
from shoal.averaging import Averager, TensorLock, find_donors
from shoal.averaging.core import PeerCore
from shoal.averaging.directory import declare_donor
from shoal.dht import DhtSettings, StorageLimits
from shoal.events import Warned
from shoal.sim import SimHost, SimNetwork, Swarm
from shoal.strategies import Decoupled
from tests.sim.averaging_kit import SETTINGS, start_core
from tests.sim.optimizer_kit import Run

MIB = 1 << 20
PREFIXES = ("one", "two")


def sharing(core: PeerCore, tensor: torch.Tensor, prefix: str = "state", **settings: Any) -> Averager:
    """An averager of one tensor."""
    changed = msgspec.structs.replace(SETTINGS, **settings)
    return Averager(core, [tensor], prefix, changed, lock=TensorLock())


@pytest.mark.parametrize("limit", [MIB, None])
def test_all_states_of_a_peer_share_its_upload_limit(limit: float | None) -> None:
    """Two states of 2 MiB at 1 MiB/s, taken by two peers at once, need 4 s; without a limit the line decides."""

    async def main() -> float:
        swarm: Swarm[list[Averager]] = Swarm(network=SimNetwork(1))
        first: list[SimHost] = []

        async def peer(host: SimHost) -> list[Averager]:
            first.append(host)
            core = await start_core(host, first[0], state_upload_limit=limit)
            tensors = [torch.full((MIB // 2,), float(i)) for i in range(2)]
            return [sharing(core, tensor, prefix) for tensor, prefix in zip(tensors, PREFIXES, strict=True)]

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
        assert [float(state.tensors[0].max()) for state in states if state is not None] == [0.0, 1.0]
        took_s = asyncio.get_running_loop().time() - began
        for name, averagers in swarm.peers.items():
            for averager in averagers:
                await swarm.run_on(name, averager.close)
            await swarm.run_on(name, averagers[0].core.close)
        return took_s

    took_s = sim.run(main, seed=1)
    assert (3.5 < took_s < 6.0) if limit else took_s < 3.0


@pytest.mark.parametrize("priority", [float("nan"), float("inf"), -float("inf")])
def test_a_priority_that_is_no_number_hides_its_donor_only(priority: float) -> None:
    """NaN compares with nothing: one such entry would decide in which order the others are asked."""

    async def main() -> None:
        swarm: Swarm[PeerCore] = Swarm(network=SimNetwork(1))
        hosts: list[SimHost] = []

        async def peer(host: SimHost) -> PeerCore:
            hosts.append(host)
            return await start_core(host, hosts[0])

        for name, declared in (("good", 1.0), ("odd", priority), ("better", 2.0), ("new", None)):
            core = await swarm.start_peer(name, peer)
            if declared is not None:
                expiration = core.env.clock.time() + 60
                await swarm.run_on(name, declare_donor, core.node, core.endpoint, "state", declared, expiration)
        found = await swarm.run_on("new", find_donors, swarm.peer("new").node, "state", timeout_s=10.0)
        expected = {swarm.peer("good").peer_id: 1.0, swarm.peer("better").peer_id: 2.0}
        assert {contact.peer: told for contact, told in found} == expected
        for name, core in swarm.peers.items():
            await swarm.run_on(name, core.close)

    sim.run(main, seed=2)


def test_the_longest_period_between_declarations_leaves_no_gap() -> None:
    """At every moment of two hours a newcomer finds the donor: a declaration holds until the one after the next."""

    async def main() -> None:
        swarm: Swarm[Averager] = Swarm(network=SimNetwork(1))
        hosts: list[SimHost] = []

        async def peer(host: SimHost) -> Averager:
            hosts.append(host)
            return sharing(await start_core(host, hosts[0]), torch.zeros(1), declare_state_period_s=1800.0)

        donor = await swarm.start_peer("donor", peer)
        new = await swarm.start_peer("new", peer)
        donor.sharing.enable()
        await sim.sleep(10.0)
        for _ in range(24):
            found = await swarm.run_on("new", find_donors, new.core.node, "state", timeout_s=10.0)
            assert [contact.peer for contact, _ in found] == [donor.core.peer_id]
            await sim.sleep(300.0)
        for name, averager in swarm.peers.items():
            await swarm.run_on(name, averager.close)
            await swarm.run_on(name, averager.core.close)

    sim.run(main, seed=3)


def test_a_donor_that_cannot_be_declared_says_so() -> None:
    """Whatever keeps it out of the DHT, its owner is told: here, records that end too soon."""

    async def main() -> None:
        swarm: Swarm[Averager] = Swarm(network=SimNetwork(1))
        warned: list[str] = []

        async def peer(host: SimHost) -> Averager:
            host.env.events.subscribe(lambda event: warned.append(event.message) if isinstance(event, Warned) else None)
            forgetful = DhtSettings(storage=StorageLimits(lifetime_s=10.0))
            return sharing(await start_core(host, None, dht_settings=forgetful), torch.zeros(1))

        donor = await swarm.start_peer("donor", peer)
        donor.sharing.enable()
        await sim.sleep(1.0)
        reason = "expiration_time is 60 s ahead, the most is 10 s: store again before it ends"
        assert warned == [f"newcomers may not find this donor: {reason}"]
        await swarm.run_on("donor", donor.close)
        await swarm.run_on("donor", donor.core.close)

    sim.run(main, seed=4)


def test_a_run_declares_no_donors() -> None:
    """Each fragment of the model did, twice a minute. Peers of a run ask those that say which state they have."""

    async def main() -> None:
        run = Run(target=1)
        for name in ("a", "b"):
            await run.add(name, strategy=Decoupled(4, fragments=2, quorum=2))
        await sim.sleep(60.0)
        node = run.trainers["b"].participant.core.node
        assert await run.swarm.run_on("b", node.get, "run_progress") is not None
        for name in ("run", "run/1"):
            assert await run.swarm.run_on("b", node.get, f"{name}_state.all_averagers") is None
        await run.close()

    sim.run(main, seed=5)
