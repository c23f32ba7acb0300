"""What all peers have contributed is what is in the state that won, however the run has forked.

The weights count the samples: a batch moves the values of its peer by one for each of its samples. So the weights of a
state say how many samples of each peer are in it, in each part of the model.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.events import Event, GroupFormed
from tests.sim.optimizer_kit import Run, Trainer

PEERS = 4


class Tally(torch.optim.Optimizer):
    """Adds the mean gradient of a step, times the samples in it."""

    samples = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See above."""
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=self.samples)


def make(parameters: list[torch.Tensor], lr: float) -> tuple[torch.optim.Optimizer, Any]:
    """Nothing is counted yet."""
    for parameter in parameters:
        parameter.data.zero_()
    return Tally(parameters, {"lr": lr}), None


class Teller(Trainer):
    """Each of its samples moves every fourth value by one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        own: Any = self.participant.own
        take = own.step

        def step() -> None:
            if own.update is not None and own.update.is_step:
                own.training.optimizer.samples = own.update.samples
            take()

        own.step = step

    def compute(self, number: int, size: int) -> None:
        """See `Trainer`."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.view(-1)[self.index :: PEERS] = -1.0

    def in_weights(self, index: int) -> tuple[float, float]:
        """The fewest and the most samples of this peer that are in a part of the model."""
        values = torch.cat([parameter.detach().view(-1) for parameter in self.parameters])[index::PEERS]
        return float(values.min()), float(values.max())


class Forks:
    """A run that is split while a round goes on."""

    def __init__(self) -> None:
        self.formed = asyncio.Event()
        self.run = Run(target=12, make=make, trainer=Teller, width=10)
        self.names = [f"p{number}" for number in range(PEERS)]

    def _note(self, event: Event) -> None:
        if isinstance(event, GroupFormed):
            self.formed.set()

    async def begin(self, rng: random.Random) -> None:
        """All train."""
        for name in self.names:
            await self.run.add(name, events=self._note)
        for name in self.names:
            batches = self.of(name).train(
                rng.choice((1, 2, 3, 4)), duration_s=rng.choice((0.4, 0.5, 0.7)), until=lambda: False
            )
            self.run.swarm.spawn(name, batches)
        await sim.sleep(5.0)

    async def split(self, part: list[str], after_s: float, for_s: float) -> None:
        """These are cut off from the others, so long after a group was formed."""
        self.formed.clear()
        await self.formed.wait()
        await sim.sleep(after_s)
        self.run.swarm.partition([part, [name for name in self.names if name not in part]])
        await sim.sleep(for_s)
        self.run.swarm.heal()
        await sim.sleep(10.0)

    async def end(self) -> None:
        """The run ends, and all are at one state."""
        self.run.announce_end(max(self.of(name).participant.epoch for name in self.names) + 4)
        await sim.sleep(20.0)
        assert len({self.of(name).participant.state for name in self.names}) == 1

    def of(self, name: str) -> Any:
        """This trainer."""
        return self.run.swarm.peer(name)

    def check(self) -> None:
        """Each peer has contributed what is in the weights."""
        trainers = [self.of(name) for name in self.names]
        counted = [trainer.participant.status().contributed for trainer in trainers]
        spans = [trainers[0].in_weights(trainer.index) for trainer in trainers]
        samples, told = trainers[0].participant.state.samples, (counted, spans)
        in_part = any(most - least > 1e-6 for least, most in spans)
        assert all(least - 1 < count < most + 1 for count, (least, most) in zip(counted, spans, strict=True)), told
        if in_part:  # a round counts a peer in some of its parts, and its share is rounded
            assert abs(sum(counted) - samples) < PEERS, (samples, *told)
        else:
            assert counted == [round(least) for least, _ in spans], told
            assert sum(counted) == samples, (samples, *told)


def play(seed: int) -> None:
    """Two forks, short or long."""
    rng = random.Random(f"forks/{seed}")

    async def main() -> None:
        forks = Forks()
        await forks.begin(rng)
        for _ in range(2):
            part = rng.sample(forks.names, rng.randint(1, 3))
            await forks.split(part, rng.uniform(0.0, 0.08), rng.uniform(0.8, 1.2) * rng.choice((5, 20, 35)))
        await forks.end()
        forks.check()

    sim.run(main, seed=seed)


def test_what_a_peer_gave_before_a_fork_of_more_than_ten_epochs_was_counted_nowhere() -> None:
    """It had missed the verdict of the round in which the fork began, and the record of that step was gone."""

    async def main() -> None:
        forks, rng = Forks(), random.Random(1)
        await forks.begin(rng)
        await forks.split(["p3"], 0.04, 15.0)
        await forks.end()
        forks.check()

    sim.run(main, seed=1)


def test_a_batch_that_ended_after_its_peer_had_left_was_in_no_status() -> None:
    """The last status has it among the samples dropped, as it has those that were held when the peer left."""

    async def main() -> None:
        run = Run(target=1000)
        trainer = await run.add("p0")
        await trainer.take_batch(4)
        await trainer.participant.close()
        assert (trainer.participant.status().contributed, trainer.participant.status().dropped) == (0, 4)
        assert trainer.participant.training.accumulate(3)
        trainer.participant.speed.count(3)
        assert (trainer.participant.status().contributed, trainer.participant.status().dropped) == (0, 7)
        await run.close()

    sim.run(main, seed=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_contributed_is_what_is_in_the_weights(soak: Callable[[int, int], int]) -> None:
    """Of each peer, and of all peers together, whatever rounds the forks broke off."""
    for seed in range(soak(2, 200)):
        play(seed)
