"""One peer of a run is elected at each epoch; when it crashes, others are elected soon after."""

from __future__ import annotations

import collections

import pytest

from shoal import sim
from shoal.base.peer import PeerID
from shoal.events import EpochAdvanced, Event
from shoal.run.decide.election import elected
from tests.sim.optimizer_kit import Run

NAMES = [f"p{number}" for number in range(5)]


class Elections:
    """Trainers, and who held itself elected at which epoch."""

    def __init__(self) -> None:
        self.run = Run(target=40)
        self.of: dict[int, list[str]] = collections.defaultdict(list)
        self.reached: dict[int, set[str]] = collections.defaultdict(set)

    async def start(self, name: str) -> None:
        """Let a peer train until it crashes."""
        await self.run.add(name)
        swarm = self.run.swarm
        trainer = swarm.peer(name)

        def note(event: Event) -> None:
            if isinstance(event, EpochAdvanced):
                self.reached[event.epoch].add(name)
                if trainer.participant.is_elected():
                    self.of[event.epoch].append(name)

        swarm.host(name).env.events.subscribe(note)
        swarm.spawn(name, trainer.train(4, duration_s=0.2, until=lambda: False))

    @property
    def epoch(self) -> int:
        """The highest one."""
        return max(self.reached, default=0)

    async def until(self, epoch: int) -> None:
        """Wait for it."""
        while self.epoch < epoch:
            await sim.sleep(0.05)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long(full=True))])
def test_one_peer_is_elected_at_each_epoch_and_another_one_when_it_crashes(seed: int) -> None:
    """In calm exactly one, and the work goes round. Twice the elected crashes at once: others are elected next."""

    async def main() -> None:
        elections = Elections()
        for name in NAMES:
            await elections.start(name)
        await elections.until(5)
        begin = elections.epoch + 1
        await elections.until(begin + 10)
        calm = [elections.of[epoch] for epoch in range(begin, elections.epoch)]
        assert all(len(names) == 1 for names in calm), calm
        assert len({names[0] for names in calm}) > 2
        alive = set(NAMES)
        for _ in range(2):
            epoch = elections.epoch
            while not elections.of[epoch]:
                await elections.until(epoch + 1)
                epoch = elections.epoch
            (dead,) = elections.of[epoch]
            elections.run.swarm.crash(dead)
            alive.discard(dead)
            await elections.until(epoch + 7)
            after = [elections.of[each] for each in range(epoch + 1, epoch + 7)]
            # Those who died in a round may still have contributed to it, and be elected by it.
            assert all(names for names in after[2:]), after
            assert all(set(names) <= alive and len(names) == 1 for names in after[2:]), after

    sim.run(main(), seed=seed)


def test_each_candidate_is_elected_as_often() -> None:
    """By the hash, and whatever the order in which they are named."""
    peers = [PeerID(bytes([number]) * 32) for number in range(1, 5)]
    found = collections.Counter(elected("run", epoch, peers) for epoch in range(4000))
    assert all(900 < found[peer] < 1100 for peer in peers), found
    assert [elected("run", epoch, peers[::-1]) for epoch in range(50)] == [
        elected("run", epoch, peers) for epoch in range(50)
    ]
    assert [elected("other", epoch, peers) for epoch in range(50)] != [
        elected("run", epoch, peers) for epoch in range(50)
    ]
    without = [peer for peer in peers if peer != elected("run", 7, peers)]
    assert elected("run", 7, without) in without


def test_a_state_without_steps_elects_of_the_live_peers() -> None:
    """At the beginning, as after a state was loaded: all who know each other conclude the same."""

    async def main() -> None:
        run = Run(target=1000)
        trainers = [await run.add(name) for name in NAMES]
        await sim.sleep(5.0)
        assert [trainer.participant.is_elected() for trainer in trainers].count(True) == 1

    sim.run(main(), seed=0)
