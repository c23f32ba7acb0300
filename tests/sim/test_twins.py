"""Two processes with one identity: both are told so, and nothing else. Only one of the two was, or neither."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.averaging import Averager, TensorLock
from shoal.averaging.core import PeerCore
from shoal.errors import ClosedError, PeerError, ShoalError
from shoal.events import Event, Warned
from shoal.protocol.wire import Trainers, WhoTrains
from shoal.sim import SimHost, SimNetwork, Swarm
from tests.sim.averaging_kit import SETTINGS, start_core
from tests.sim.optimizer_kit import Run

TWINS = ("a", "b")


def one_key(swarm: Swarm[Any]) -> None:
    """The hosts `a` and `b` have the same identity."""
    identity = swarm.identity
    swarm.identity = lambda name: identity("a" if name == "b" else name)  # type: ignore[method-assign]


def into(told: list[str]) -> Callable[[Event], None]:
    """A subscriber that keeps the warnings."""
    return lambda event: told.append(event.message) if isinstance(event, Warned) else None


def assert_said_once(told: dict[str, list[str]]) -> None:
    """To each of the two: the one thing that is wrong, and the cure."""
    for name in TWINS:
        assert len(told[name]) == 1, told
        assert "another process has this peer's identity" in told[name][0]
        assert "identity_path" in told[name][0]


@pytest.mark.parametrize("client_mode", [False, True])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("apart_s", [0.0, 45.0])
def test_two_dhts_or_averagers_with_one_identity_were_told_nothing(
    *, client_mode: bool, averages: bool, apart_s: float
) -> None:
    """A neighbour of both tells them, whether they come at once or one after the other."""
    told: dict[str, list[str]] = {"hub": [], "a": [], "b": []}

    async def main() -> None:
        swarm = Swarm[PeerCore](network=SimNetwork(1))
        one_key(swarm)

        async def factory(host: SimHost) -> PeerCore:
            host.env.events.subscribe(into(told[host.name]))
            first = None if host.name == "hub" else swarm.host("hub")
            return await start_core(host, first, client_mode=client_mode and host.name != "hub")

        async def average(name: str) -> None:
            averager = Averager(swarm.peer(name), [torch.ones(8)], "run", SETTINGS, lock=TensorLock())
            for _ in range(3):
                try:
                    await averager.step(timeout_s=6.0)
                except ShoalError:
                    await sim.sleep(1.0)
            await averager.close()

        for name in ("hub", *TWINS):
            await swarm.start_peer(name, factory, client_mode=client_mode and name != "hub")
            await sim.sleep(apart_s)
        if averages:
            await asyncio.gather(*(swarm.run_on(name, average, name) for name in ("hub", *TWINS)))
        await sim.sleep(5.0)
        for name in ("hub", *TWINS):
            await swarm.run_on(name, swarm.peer(name).close)

    sim.run(main, seed=1)
    assert_said_once(told)
    assert sum("two processes have the identity of" in message for message in told["hub"]) == 1


@pytest.mark.parametrize("way", ["crash", "vanish"])
def test_of_two_processes_with_one_key_one_ends_and_the_other_counts(way: str) -> None:
    """Meanwhile neither may call the hub nor be called. What the living one says is no sign of life of the other."""

    async def main() -> None:
        swarm = Swarm[PeerCore](network=SimNetwork(1))
        one_key(swarm)

        async def factory(host: SimHost) -> PeerCore:
            core = await start_core(host, None if host.name == "hub" else swarm.host("hub"))
            core.endpoint.serve(WhoTrains, lambda _, __: Trainers([]), scope="run")
            return core

        for name in ("hub", *TWINS):
            await swarm.start_peer(name, factory)
        await sim.sleep(2.0)
        hub, living = swarm.peer("hub").endpoint, swarm.peer("a").endpoint
        assert hub.is_mute(living.peer_id)
        assert not hub.connected(living.peer_id)
        assert not hub.reachable(living.peer_id)
        for caller, other in ((hub, living), (living, hub)):
            with pytest.raises(PeerError, match="two processes have one identity"):
                await caller.call(other.peer_id, WhoTrains("run"), timeout_s=3.0)
        getattr(swarm, way)("b")
        await sim.sleep(7.0)
        assert hub.connected(living.peer_id)
        await hub.call(living.peer_id, WhoTrains("run"), timeout_s=3.0)
        await living.call(hub.peer_id, WhoTrains("run"), timeout_s=3.0)
        for name in ("hub", "a"):
            await swarm.run_on(name, swarm.peer(name).close)

    sim.run(main, seed=1)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_a_third_peer_stood_still_beside_two_processes_with_one_key(seed: int) -> None:
    """It was blameless, lost half of its samples or stood still for a minute, and was told of other causes."""
    told: dict[str, list[str]] = {name: [] for name in ("z", *TWINS)}

    async def main() -> None:
        network, loop = SimNetwork(seed, latency_s=0.0005, jitter_s=0.002), asyncio.get_running_loop()
        run = Run(target=128, network=network)
        one_key(run.swarm)
        rng, training = random.Random(seed), []

        async def train(name: str) -> None:
            trainer, batch_s = run.swarm.peer(name), 0.02 * (1 + 0.3 * rng.random())
            with suppress(ClosedError):  # one of the two is killed
                await run.swarm.run_on(name, trainer.train, 8, duration_s=batch_s, until=lambda: loop.time() > 26.0)

        for name, pause_s in (("z", 3.0), ("a", 0.1), ("b", 3.0)):
            await run.add(name, events=into(told[name]))
            training.append(asyncio.ensure_future(train(name)))
            await sim.sleep(pause_s)
        z = run.trainers["z"].participant
        before = z.contribution.contributed
        await sim.sleep(10.0)
        assert z.contribution.contributed - before >= 0.8 * 10.0 * 8 / 0.026
        run.swarm.crash("b")
        alone = run.trainers["z"].alone
        await sim.sleep(5.0)
        steps = z.epoch
        await sim.sleep(4.0)
        assert z.epoch - steps > 10
        assert run.trainers["z"].alone - alone < 15, "the one that is left counts again within seconds"
        await asyncio.gather(*training)
        await run.close()

    sim.run(main, seed=seed)
    assert_said_once(told)
    assert len(told["z"]) == 1
    assert "two processes have the identity of" in told["z"][0]
    assert "identity_path" in told["z"][0]


@pytest.mark.parametrize("way", ["crash", "vanish"])
def test_a_process_that_was_started_again_has_no_twin(way: str) -> None:
    """Its neighbour may not have noticed yet that the one before is gone."""
    told: dict[str, list[str]] = {"hub": [], "a": []}

    async def main() -> None:
        swarm = Swarm[PeerCore](network=SimNetwork(1))

        async def factory(host: SimHost) -> PeerCore:
            host.env.events.subscribe(into(told[host.name]))
            return await start_core(host, None if host.name == "hub" else swarm.host("hub"))

        for name in ("hub", "a"):
            await swarm.start_peer(name, factory)
        for _ in range(3):
            await sim.sleep(2.0)
            getattr(swarm, way)("a")
            await sim.sleep(0.5)
            await swarm.restart("a")
        await sim.sleep(60.0)
        for name in ("hub", "a"):
            await swarm.run_on(name, swarm.peer(name).close)

    sim.run(main, seed=1)
    assert not [message for each in told.values() for message in each if "identity" in message], told


@pytest.mark.parametrize(
    ("batch_s", "apart_s", "skew_s", "client_mode"),
    [
        pytest.param(0.1, 10.0, 0.0, False, id="the one that came later read its own word only"),
        pytest.param(1.0, 10.0, -3.0, False, id="the clock of one of them is behind: neither was told"),
        pytest.param(0.1, 0.1, 3.0, False, id="the leader was called a bad one"),
        pytest.param(0.1, 10.0, 0.0, True, id="the others were called stragglers by a client"),
    ],
)
def test_two_trainers_with_one_identity_are_told_so_and_nothing_else(
    *, batch_s: float, apart_s: float, skew_s: float, client_mode: bool
) -> None:
    """One was told that its batches are too long, that others do not come, or that its leader is a bad one."""
    told: dict[str, list[str]] = {name: [] for name in TWINS}

    async def main() -> None:
        run, loop = Run(target=24), asyncio.get_running_loop()
        one_key(run.swarm)
        training = []
        for number, name in enumerate(("p", *TWINS)):
            is_client = client_mode and name == "b"
            note = into(told.get(name, []))
            trainer = await run.add(name, events=note, client_mode=is_client, skew_s=skew_s * (number == 2))
            work = run.swarm.run_on(name, trainer.train, 4, duration_s=batch_s, until=lambda: loop.time() > 26.0)
            training.append(asyncio.ensure_future(work))
            if number:
                await sim.sleep(apart_s)
        await asyncio.gather(*training)
        await run.close()

    sim.run(main, seed=1)
    assert_said_once(told)
