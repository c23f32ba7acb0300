"""What the steps of a swarm deal to its peers, and the samples that `PeerSampler` gives them by it."""

from __future__ import annotations

import asyncio

from shoal import sim
from shoal.base.peer import PeerID
from shoal.data import PeerSampler
from shoal.run.decide.agreement import Deal
from tests.sim.optimizer_kit import Run, Trainer

BATCH, TARGET, SIZE = 4, 48, 3000


class Sampled:
    """A trainer with a sampler: the swarm as the sampler sees it, all deals so far, and what was drawn."""

    run_id = "run"

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.deals: dict[int, Deal] = {}
        self.drawn: list[int] = []
        self.samples = iter(PeerSampler(range(SIZE), self, endless=True))  # type: ignore[arg-type]

    @property
    def dht(self) -> Sampled:
        """Has the id of the peer."""
        return self

    @property
    def peer_id(self) -> PeerID:
        """Of the trainer."""
        return self.trainer.participant.core.peer_id

    @property
    def dealt(self) -> tuple[Deal, ...]:
        """As `shoal.Optimizer.dealt`."""
        self.deals |= {deal.number: deal for deal in self.trainer.participant.own.dealt}
        return self.trainer.participant.own.dealt

    async def train(self, until: int, duration_s: float) -> None:
        """Draw batches and train on them, up to an epoch."""
        while self.trainer.participant.epoch < until:
            self.drawn += [next(self.samples) for _ in range(BATCH)]
            await self.trainer.take_batch(BATCH, duration_s=duration_s)
        assert self.dealt


def test_steps_deal_each_number_once_whoever_comes_and_goes() -> None:
    """Peers of unequal speed; one joins, one dies. No number is left out, and what was dealt is drawn once."""

    async def main() -> None:
        run = Run(target=TARGET)
        sampled: dict[str, Sampled] = {}
        seconds = {"p0": 0.1, "p1": 0.15, "p2": 0.25, "p3": 0.1}

        async def train(names: list[str], until: int) -> None:
            for name in names:
                if name not in sampled:
                    sampled[name] = Sampled(await run.add(name))
            await sim.sleep(3.0)
            trains = (run.swarm.run_on(name, sampled[name].train, until, seconds[name]) for name in names)
            await asyncio.gather(*trains)

        await train(["p0", "p1", "p2"], 10)
        await train(["p0", "p1", "p2", "p3"], 20)
        run.swarm.crash("p1")
        await train(["p0", "p2", "p3"], 24)
        assert not run.warnings, run.warnings
        numbers = [n for each in sampled.values() for deal in each.deals.values() for n in range(deal.start, deal.stop)]
        assert sorted(numbers) == list(range(sampled["p0"].trainer.participant.state.samples))
        drawn = [sample for each in sampled.values() for sample in each.drawn]
        assert len(numbers) < len(drawn) < SIZE, "more than one pass"
        beside = len(drawn) - len(numbers)
        assert len(drawn) - len(set(drawn)) <= beside + 2 * TARGET, "what p1 was dealt last was not drawn"
        assert beside < len(drawn) / 4
        await run.close()

    sim.run(main, seed=7)
