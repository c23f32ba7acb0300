"""Newcomers get in, however long their download takes: they follow the steps of the others meanwhile."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.sim import SimNetwork
from tests.sim.optimizer_kit import Run, Trainer

MEMBERS = ["p0", "p1", "p2"]
BALLAST = 1 << 18
"""Elements of an extra tensor: the state is large beside the gradients, and takes long to download."""


def ballast(seed: int) -> list[torch.Tensor]:
    """Part of the state that no gradient has."""
    return [torch.randn(BALLAST, generator=torch.Generator().manual_seed(seed))]


class Scene:
    """A swarm of three that goes on, and newcomers whose lines are slow.

    Args:
        line_bytes_s: of each newcomer, in the direction to it.
        run: options of the run.
    """

    def __init__(self, line_bytes_s: float, **run: Any) -> None:
        loop: Any = asyncio.get_running_loop()
        self.loop = loop
        self.network = SimNetwork(loop.seed, window_bytes=32 << 10)
        self.network.add_host("late", down_bytes_s=line_bytes_s)
        run.setdefault("target", 24)
        self.run = Run(network=self.network, **run)
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.until = float("inf")

    async def begin(self, members: list[str] = MEMBERS) -> None:
        """The members train: an epoch takes them about a second."""
        for name in members:
            await self.run.add(name, extra_tensors=ballast(0))
        await sim.sleep(3.0)
        for name in members:
            self.train(name)

    def train(self, name: str) -> None:
        """This one trains until the end."""
        trainer = self.run.swarm.peer(name)
        work = trainer.train(2, duration_s=0.25, until=lambda: self.loop.time() > self.until)
        self.tasks[name] = self.run.swarm.spawn(name, work)

    async def newcomer(self, name: str = "late", **changes: Any) -> Trainer:
        """One more comes, with another beginning."""
        late = await self.run.add(name, seed=99, extra_tensors=ballast(99), **changes)
        self.train(name)
        return late

    async def first_epoch(self, late: Trainer, within_s: float) -> float:
        """When it takes its first step together with the others."""
        until = self.loop.time() + within_s
        while not late.epochs:
            assert self.loop.time() < until, f"{late.downloads} downloads, and never in a round"
            await sim.sleep(0.1)
        return late.epochs[0][0]

    async def end(self, epochs: int) -> list[str]:
        """Announce the end of the run so many epochs from now, and wait for it; who is alive then."""
        first = next(iter(self.run.swarm.peers.values())).collaboration
        first.announce_end(first.epoch + epochs)
        names = [name for name in self.tasks if self.run.swarm.is_alive(name)]
        await asyncio.wait([self.tasks[name] for name in names])
        return names


def paces(trainer: Trainer, since: float, until: float) -> list[float]:
    """How long each epoch of a trainer lasted."""
    times = [time for time, *_ in trainer.epochs if since <= time <= until]
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize("epochs", [1, 5, 20])
def test_a_newcomer_whose_download_takes_longer_than_an_epoch_takes_part(epochs: int) -> None:
    """It takes part right after one download, with the bits of the others, who are not slower for it."""

    async def main() -> None:
        scene = Scene(4 * BALLAST / epochs)
        await scene.begin()
        await sim.sleep(10.0)
        came = scene.loop.time()
        late = await scene.newcomer()
        first = await scene.first_epoch(late, 2 * epochs + 20)
        names = await scene.end(3)
        assert late.downloads == 1
        assert scene.run.agree(names), {name: scene.run.swarm.peer(name).collaboration.state for name in names}
        member = scene.run.swarm.peer("p0")
        missed = sum(came < time < first for time, *_ in member.epochs)
        assert epochs <= missed <= 1.5 * epochs + 4, missed
        assert not scene.run.warnings, scene.run.warnings
        # The last one is that of the first round with the newcomer, which has to be dialed.
        alone, beside = paces(member, 0.0, came), paces(member, came, first)[:-1]
        assert sum(beside) / len(beside) <= 1.05 * sum(alone) / len(alone), (alone, beside)
        await scene.run.close()

    sim.run(main, seed=epochs)
