"""Free keys that come to rounds and give nothing, and members that lead to harm: the others go on at their speed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from shoal import sim
from shoal.averager import Averager, TensorLock
from shoal.errors import ShoalError
from shoal.optim.participant import Participant
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.test_hostile_words import Liar, liar

BATCH, BATCH_S, BATCHES = 4, 0.5, 3


async def training(run: Run, count: int) -> list[Trainer]:
    """So many honest peers, which have trained together for 10 s."""
    names = [f"p{number}" for number in range(count)]
    trainers = [await run.add(name) for name in names]
    for name, trainer in zip(names, trainers, strict=True):
        run.swarm.spawn(name, trainer.train(BATCH, duration_s=BATCH_S, until=lambda: False))
    await sim.sleep(10.0)
    return trainers


async def speed(trainer: Trainer, seconds: float) -> float:
    """Epochs a second from now on."""
    before = trainer.participant.epoch
    await sim.sleep(seconds)
    return (trainer.participant.epoch - before) / seconds


class Stranger:
    """A fresh key, with the invite and settings of the run, that joins the groups of the others.

    Args:
        stranger: says where it stands.
        victims: the honest ones.
        leads: whether it declares itself so early that it leads.
    """

    def __init__(self, stranger: Liar, victims: Sequence[Participant], *, leads: bool = False) -> None:
        self.stranger, self.victims = stranger, victims
        averager: Any = victims[0]._averager
        tensors = [torch.zeros_like(each) for each in averager.tensors]
        settings = replace(averager.settings)
        self.averager = Averager(stranger.core, tensors, averager.prefix, settings, lock=TensorLock())
        self.begun = 0
        begin: Any = self.averager._begin_round

        async def begin_nothing(group: Any, *rest: Any) -> Any:
            async def run() -> Any:
                self.begun += 1
                await sim.sleep(30.0)

            round_ = await begin(group, *rest)
            round_.run = run
            return round_

        self.averager._begin_round = begin_nothing  # type: ignore[method-assign]

    async def harm(self, seconds: float) -> None:
        """Tell all that it is here with a batch, and come to their groups."""
        ends = asyncio.get_running_loop().time() + seconds
        telling = asyncio.get_running_loop().create_task(self._tell())
        try:
            async with asyncio.timeout_at(ends):
                while True:
                    self.averager.group_tag = self.victims[0].own.name.group_tag
                    try:
                        await self.averager.step(timeout_s=2.0, allow_retries=False)
                    except ShoalError:
                        await sim.sleep(0.05)
        except TimeoutError:
            pass
        finally:
            telling.cancel()
            await self.averager.close()

    async def _tell(self) -> None:
        while True:
            for victim in self.victims:
                await self.stranger.say(victim, samples=BATCH)
            await sim.sleep(0.2)


async def attack(run: Run, trainers: Sequence[Trainer], every_s: float, *, hosts: int = 1) -> None:
    """A fresh key comes so often, and stays for some rounds."""
    for number in range(10_000):
        for _ in range(1):
            stranger = await liar(run, f"key{number}")
            bad = Stranger(stranger, [each.participant for each in trainers])
            run.swarm.spawn(f"key{number}", bad.harm(20.0))
        await sim.sleep(every_s)


@pytest.mark.parametrize("every_s", [7.0, 1.0])
def test_free_keys_that_join_groups_and_send_nothing_slowed_all_for_good(every_s: float) -> None:
    """0.67 epochs a second became 0.15: patience was counted for each key."""

    async def main() -> None:
        run = Run(target=4 * BATCH * BATCHES)
        trainers = await training(run, 4)
        calm = await speed(trainers[0], 30.0)
        attacking = asyncio.get_running_loop().create_task(attack(run, trainers, every_s))
        hurt = await speed(trainers[0], 60.0)
        later = await speed(trainers[0], 60.0)
        print(calm, hurt, later)
        attacking.cancel()
        assert later >= 0.8 * calm, (calm, hurt, later)

    sim.run(main, seed=1)
