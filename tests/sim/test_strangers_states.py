"""A state of somebody whose word counts nothing is not taken, whatever it claims; branches that meet go on as one."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec
import pytest

from shoal import sim
from shoal.base.peer import PeerID
from shoal.events import Warned
from shoal.run.decide.state_name import StateName
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.test_alone import until

NAMES = ["p0", "p1", "p2"]


class Swarm:
    """Some that train, and thieves: strangers that take the state, change the weights, and claim another name."""

    def __init__(self, names: list[str] = NAMES) -> None:
        self.run, self.names, self.told = Run(target=24), names, list[str]()

    async def begin(self, end_s: float) -> None:
        """All train until then."""
        for name in self.names:
            await self.run.add(
                name, events=lambda event: self.told.append(event.message) if isinstance(event, Warned) else None
            )
            self.train(name, end_s)

    def train(self, name: str, end_s: float, size: int = 4) -> None:
        """Let one train until then."""
        self.run.swarm.spawn(name, self.run.swarm.peer(name).train(size, duration_s=0.5, until=until(end_s)))

    async def thief(self, name: str = "thief") -> Trainer:
        """A fresh key that has the state of the run, and did nothing for it."""
        thief = await self.run.add(name, seed=99)
        while not thief.participant.epoch:
            await sim.sleep(0.2)
            await self.run.swarm.run_on(name, thief.take_turn)
        return thief

    async def steal(
        self, thief: Trainer, *, epochs: int = 1000, samples: int | None = 1 << 60, copies: bool = False
    ) -> PeerID:
        """It changes the weights, and names them so many epochs further than the others are, and so many samples."""
        first, thiefs = self.of(self.names[0]).participant.state, thief.participant
        digest = b"\0" + hashlib.sha256(b"stolen" + first.digest).digest()[1:]
        claimed = first.samples + 24 * epochs if samples is None else samples

        async def change() -> None:
            for parameter in thief.parameters:
                parameter.data.fill_(1e3)
            thiefs.own.name = first if copies else StateName(first.epoch + epochs, digest, claimed)
            thiefs._announce_other_state()

        await self.run.swarm.run_on(thief_name(self.run, thief), change)
        return thiefs.core.peer_id

    async def steals(self, thieves: list[Trainer], for_s: int, **claim: Any) -> None:
        """They do so every second."""
        for _ in range(for_s):
            for thief in thieves:
                await self.steal(thief, **claim)
            await sim.sleep(1.0)

    @property
    def is_stolen(self) -> bool:
        """Whether somebody has taken the thief's weights."""
        return any(float(each.detach().abs().max()) > 10.0 for name in self.names for each in self.of(name).parameters)

    def of(self, name: str) -> Trainer:
        """This one."""
        return self.run.swarm.peer(name)

    def warnings_of(self, peer: PeerID) -> list[str]:
        """Those that name this peer's state as one that is not taken."""
        return [each for each in self.told if peer.short() in each and "is not taken" in each]


def thief_name(run: Run, thief: Trainer) -> str:
    """The name of its host."""
    return next(name for name, trainer in run.swarm.peers.items() if trainer is thief)


CLAIMS: dict[str, dict[str, Any]] = {
    "1000 epochs and 2^60 samples": {},
    "the same epoch and more samples": {"epochs": 0, "samples": 1 << 40},
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS.keys())
def test_a_stranger_that_did_no_work_replaced_the_model(claim: dict[str, Any]) -> None:
    """All took its weights within 10 s, without a warning. Now each names it, once, and trains on."""

    async def main() -> None:
        swarm = Swarm()
        await swarm.begin(60.0)
        await sim.sleep(6.0)
        thief = await swarm.thief()
        before, began = swarm.of("p0").participant.epoch, asyncio.get_running_loop().time()
        await swarm.steals([thief], 10, **claim)
        assert not swarm.is_stolen
        took = swarm.of("p0").participant.epoch - before
        assert took > 0.6 * (asyncio.get_running_loop().time() - began), took
        assert len(swarm.warnings_of(thief.participant.core.peer_id)) == len(NAMES), swarm.told

    sim.run(main, seed=71)


def test_many_strangers_that_name_one_state_and_its_end_are_no_more() -> None:
    """Five keys on five hosts, more than train, say that the run has ended there; another one copies the true name."""

    async def main() -> None:
        swarm = Swarm()
        await swarm.begin(60.0)
        await sim.sleep(6.0)
        thieves = [await swarm.thief(f"thief{number}") for number in range(6)]
        before = swarm.of("p0").participant.epoch
        for _ in range(10):
            for thief in thieves[:5]:
                await swarm.steal(thief)
                thief.participant.announce_end(thief.participant.epoch)
            await swarm.steal(thieves[5], copies=True)
            await sim.sleep(1.0)
        assert not swarm.is_stolen
        assert not any(swarm.of(name).participant.at_end for name in NAMES)
        assert swarm.of("p0").participant.epoch > before + 3

    sim.run(main, seed=72)


def test_a_real_small_contribution_makes_nobody_the_owner_of_the_model() -> None:
    """It gives a tenth of the samples for ten steps. Then it claims to be far ahead, again and again."""

    async def main() -> None:
        swarm = Swarm()
        await swarm.begin(80.0)
        thief = await swarm.run.add("thief")
        swarm.train("thief", 20.0, 1)
        await sim.sleep(20.5)
        assert thief.participant.core.peer_id in swarm.of("p0").participant.own.committed.weights
        await swarm.steals([thief], 10)
        assert not swarm.is_stolen

    sim.run(main, seed=73)


def test_a_newcomer_takes_the_state_of_the_peer_that_invited_it() -> None:
    """Strangers name a better one: it is nobody's whose word counts."""

    async def main() -> None:
        swarm = Swarm()
        await swarm.begin(60.0)
        await sim.sleep(6.0)
        thief = await swarm.thief()
        await swarm.steal(thief)
        swarm.names = [*NAMES, "new"]
        await swarm.run.add("new", seed=5)
        swarm.train("new", 60.0)
        await swarm.steals([thief], 10)
        assert not swarm.is_stolen
        assert swarm.run.swarm.identity("new").peer_id in swarm.of("p0").participant.own.committed.samples

    sim.run(main, seed=74)


def test_a_peer_that_was_away_gets_the_state_from_those_whose_words_count() -> None:
    """A stranger names the true state, and gives others' weights under its name. It was asked like the others."""

    async def main() -> None:
        swarm = Swarm()
        await swarm.begin(80.0)
        await sim.sleep(6.0)
        thieves = [await swarm.thief(f"thief{number}") for number in range(3)]
        for _ in range(3):
            swarm.run.swarm.partition([["p2"], ["p0", "p1", "thief0", "thief1", "thief2"]])
            await sim.sleep(4.0)
            swarm.run.swarm.heal()
            await swarm.steals(thieves, 4, copies=True)
        assert not swarm.is_stolen
        await sim.sleep(3.0)
        assert abs(swarm.of("p2").participant.epoch - swarm.of("p0").participant.epoch) <= 1

    sim.run(main, seed=75)


@pytest.mark.parametrize("names", [["p0"], ["p0", "p1"]], ids=["alone", "one of two is cut off"])
def test_a_stranger_stands_there_the_longer_the_more_there_is_to_lose(names: list[str]) -> None:
    """One that trains alone takes a stranger's state only after a part of that time, and only a likely one."""

    async def main() -> None:
        swarm = Swarm(names)
        swarm.run.settings = msgspec.structs.replace(swarm.run.settings, state_patience_s=10.0)
        await swarm.begin(300.0)
        await sim.sleep(20.0)
        if len(names) > 1:
            swarm.run.swarm.crash("p1")
            swarm.names = ["p0"]
        await sim.sleep(80.0)
        thief = await swarm.thief()
        await swarm.steals([thief], 5, epochs=1, samples=None)
        assert not swarm.is_stolen
        await swarm.steals([thief], 60, epochs=100_000, samples=1 << 60)
        assert not swarm.is_stolen, "the run cannot have come so far"
        assert len(swarm.warnings_of(thief.participant.core.peer_id)) == 1

    sim.run(main, seed=76)


@pytest.mark.parametrize(
    "slower",
    [
        pytest.param(0, id="the first part is slower"),
        pytest.param(1, id="the second part is slower", marks=pytest.mark.long(full=True)),
    ],
)
def test_two_parts_of_a_swarm_that_meet_again_go_on_from_more_samples(slower: int) -> None:
    """Two peers each: they know each other from the steps before, though no step of the last ten has both."""

    async def main() -> None:
        swarm = Swarm(["p0", "p1", "p2", "p3"])
        parts = [["p0", "p1"], ["p2", "p3"]]
        await swarm.begin(10.0)
        await sim.sleep(12.0)
        swarm.run.swarm.partition(parts)
        for name in swarm.names:
            swarm.train(name, 100.0, 4 if name in parts[slower] else 8)
        await sim.sleep(26.0)
        first, second = (swarm.of(part[0]).participant for part in parts)
        assert not first.own.committed.samples.keys() & second.own.committed.samples.keys()
        most = max(first.state.samples, second.state.samples)
        swarm.run.swarm.heal()
        await sim.sleep(15.0)
        found = [swarm.of(name).participant for name in swarm.names]
        assert max(each.epoch for each in found) <= min(each.epoch for each in found) + 1
        assert all(each.state.samples > most for each in found)
        assert len(found[0].own.committed.weights) == 4
        assert not [each for each in swarm.told if "is not taken" in each]

    sim.run(main, seed=77)
