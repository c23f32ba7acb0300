"""Runs whose gradients are averaged as factors of low rank."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.sim import SimNetwork
from shoal.strategies.low_rank import LowRank
from tests.sim.optimizer_kit import Run, backward, gradient, make_optimizer, model

EPOCHS, BATCH = 8, 4


def one_process(peers: int, rank: int) -> list[torch.Tensor]:
    """One process that makes factors of the mean of all peers' gradients, and keeps what they lose."""
    parameters = model()
    optimizer, scheduler = make_optimizer(parameters)
    low = LowRank(parameters, rank=rank, min_compression_ratio=0.5)
    for epoch in range(EPOCHS):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for peer in range(peers):
            backward(parameters, peer, epoch, BATCH)
            for total, parameter in zip(sums, parameters, strict=True):
                total += gradient(parameter) / peers
        low.shrink(sums)
        low.expand(sums, epoch)
        low.counted()
        low.advance()
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total.detach()
        optimizer.step()
        scheduler.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", [{}, {"late": True}, {"offload": True}], ids=str)
@pytest.mark.parametrize("peers", [1, 2, 3])
def test_a_run_equals_one_process(peers: int, mode: dict[str, Any]) -> None:
    """To rounding; a newcomer downloads the bases, and the next step is the same on it."""

    async def main() -> list[torch.Tensor]:
        run = Run(target=peers * BATCH)
        names = [f"p{peer}" for peer in range(peers)]
        for name in names:
            await run.add(name, rank=1, **mode)
        await sim.sleep(3.0)

        async def train(name: str, first: int, last: int) -> None:
            trainer = run.swarm.peer(name)
            for epoch in range(first, last):
                await trainer.take_batch(BATCH, number=epoch, duration_s=0.1)
                await trainer.finish_epoch(epoch + 1)

        await asyncio.gather(*(run.swarm.run_on(name, train, name, 0, EPOCHS - 2) for name in names))
        late = await run.add("late", seed=7, rank=1, **mode)
        await sim.sleep(3.0)
        await run.swarm.run_on("late", late.take_turn)
        assert late.downloads == 1
        late.participant.turn.accumulated()
        await asyncio.gather(
            *(run.swarm.run_on(name, train, name, EPOCHS - 2, EPOCHS) for name in names),
            run.swarm.run_on("late", late.finish_epoch, EPOCHS),
        )
        assert run.agree([*names, "late"])
        assert not run.warnings, run.warnings
        await run.close()
        return [parameter.detach() for parameter in late.parameters]

    for got, want in zip(sim.run(main, seed=peers), one_process(peers, 1), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.long(full=True)) for each in (1, 2))])
def test_peers_agree_in_all_weathers(seed: int) -> None:
    """Six peers join, leave, crash and catch up; those of one state hold the same parameters and bases."""
    rng = random.Random(seed)

    async def main() -> None:
        run = Run(target=18 * BATCH, network=SimNetwork(seed, latency_s=0.01))
        born = 0

        async def add() -> None:
            nonlocal born
            name, born = f"p{born}", born + 1
            trainer = await run.add(name, rank=1, offload=born % 2 == 0, late=born % 3 == 0)
            pace_s = rng.uniform(0.1, 0.4)
            run.swarm.spawn(name, trainer.train(BATCH, duration_s=pace_s, until=lambda: False))

        def epoch() -> int:
            return max((each.participant.epoch for each in run.swarm.peers.values()), default=0)

        for _ in range(6):
            await add()
        compared = 0
        while epoch() < 25:
            await sim.sleep(rng.uniform(0.5, 4.0))
            held: dict[bytes, list[bytes]] = {}
            for trainer in run.swarm.peers.values():
                participant = trainer.participant
                held.setdefault(participant.state.digest, []).append(participant.training.fingerprint())
            for same in held.values():
                assert len(set(same)) == 1
                compared += len(same) > 1
            how: Callable[[str], object] = rng.choice([run.swarm.crash, run.swarm.vanish, lambda _: None])
            if len(run.swarm.peers) > 3:
                how(rng.choice(sorted(run.swarm.peers)))
            while len(run.swarm.peers) < 6:
                await add()
        assert compared > 5
        differ = [each for each in run.warnings if "ours differ" in each or "held other parameters" in each]
        assert not differ, differ

    sim.run(main, seed=seed)


def test_an_auxiliary_peer_takes_the_same_steps() -> None:
    """It gives no gradients, and has the bases all the same."""

    async def main() -> None:
        run = Run(target=2 * BATCH)
        for name in ("p0", "p1"):
            await run.add(name, rank=1)
        helper = await run.add("helper", rank=1, seed=5, auxiliary=True)
        await sim.sleep(3.0)
        for name in ("p0", "p1"):
            run.swarm.spawn(name, run.trainers[name].train(BATCH, duration_s=0.3, until=lambda: False))
        await run.swarm.run_on("helper", helper.finish_epoch, 5)
        first = run.trainers["p0"].participant
        while first.state != helper.participant.state:
            await sim.sleep(0.01)
        assert helper.participant.training.fingerprint() == first.training.fingerprint()
        await run.close()

    sim.run(main, seed=4)
