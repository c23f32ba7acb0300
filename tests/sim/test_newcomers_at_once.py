"""Several newcomers come at once to a run whose state takes longer than the patience with claims."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal import sim
from shoal.base.sometimes import reached
from shoal.sim import SimNetwork
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.test_catch_up import MIB, ballast
from tests.sim.test_hostile_words import claims_and_is_busy

EPOCH_S = 0.5


class Crowd:
    """Donors that go on, and newcomers that know of each other before they ask for the state.

    Args:
        newcomers: how many.
        download_s: how long each one's line takes for the state.
        donors: how many.
        state_bytes: size of what no gradient has of the state.
        up_bytes_s: what each donor's line carries; None for no limit.
        epoch_s: how long an epoch of the donors takes.
    """

    def __init__(
        self,
        newcomers: int,
        download_s: float,
        *,
        donors: int = 1,
        state_bytes: int = 2 * MIB,
        up_bytes_s: float | None = None,
        epoch_s: float = EPOCH_S,
    ) -> None:
        self.epoch_s = epoch_s
        loop: Any = asyncio.get_running_loop()
        self.loop, self.state_bytes = loop, state_bytes
        network = SimNetwork(loop.seed, window_bytes=32 << 10)
        self.donors = [f"donor{number}" for number in range(donors)]
        self.newcomers = [f"new{number}" for number in range(newcomers)]
        for name in self.donors:
            network.add_host(name, up_bytes_s=up_bytes_s)
        for name in self.newcomers:
            network.add_host(name, down_bytes_s=state_bytes / download_s)
        self.run = Run(network=network, target=8 * max(1, donors))
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.came, self.ahead, self.over = 0.0, 0, False

    def peer(self, name: str) -> Trainer:
        """The trainer of this name."""
        return self.run.swarm.peer(name)

    def _train(self, name: str) -> None:
        duration_s = min(self.epoch_s / 2, 5.0) if name in self.newcomers else self.epoch_s / 2
        work = self.peer(name).train(4, duration_s=duration_s, until=lambda: self.over)
        self.tasks[name] = self.run.swarm.spawn(name, work)

    async def _come(self, name: str, **changes: Any) -> None:
        await self.run.add(name, seed=99, extra_tensors=ballast(99, self.state_bytes), **changes)

    async def begin(self, *, apart_s: float = 0.0, **changes: Any) -> None:
        """The donors are some epochs ahead, and the newcomers begin to train, one after the other."""
        for name in self.donors:
            await self.run.add(name, extra_tensors=ballast(0, self.state_bytes))
        await sim.sleep(3.0)
        for name in self.donors:
            self._train(name)
        await sim.sleep(max(5.0, 3 * self.epoch_s))
        await asyncio.gather(*(self._come(name, **changes) for name in self.newcomers))
        await sim.sleep(2.0)
        self.came = self.loop.time()
        self.ahead = max((self.peer(name).participant.epoch for name in self.donors), default=0)
        for name in self.newcomers:
            self._train(name)
            await sim.sleep(apart_s)

    async def end(self) -> None:
        """Whoever lives trains no more, and leaves."""
        self.over = True
        await asyncio.wait([task for name, task in self.tasks.items() if self.run.swarm.is_alive(name)])
        await self.run.close()

    async def all_take_part(self, within_s: float) -> None:
        """Nobody begins at epoch 0, and each newcomer is in after two downloads at most."""
        new = [self.peer(name) for name in self.newcomers]
        until = self.loop.time() + within_s
        while not all(trainer.epochs for trainer in new):
            assert self.loop.time() < until, [
                (len(each.participant.takeover.downloads), each.epochs[:1]) for each in new
            ]
            assert all(trainer.epochs[0][1] > 1 for trainer in new if trainer.epochs), "one began at epoch 0"
            await sim.sleep(0.1)
        assert min(trainer.epochs[0][1] for trainer in new) > self.ahead, [trainer.epochs[0] for trainer in new]
        self.run.announce_end(self.peer(self.donors[0]).participant.epoch + 10)
        await asyncio.wait(list(self.tasks.values()))
        assert self.run.agree([*self.donors, *self.newcomers])
        downloads = [len(trainer.participant.takeover.downloads) for trainer in new]
        assert max(downloads) <= 2, downloads
        assert [trainer.alone for trainer in new] == [0] * len(new)
        assert not self.run.warnings, self.run.warnings
        await self.end()


CROWDS = [
    pytest.param(newcomers, download_s, marks=pytest.mark.long(full=(newcomers, download_s) != (8, 25.0)))
    for newcomers in (3, 8)
    for download_s in (25.0, 60.0)
]


def test_three_newcomers_at_once_begin_at_epoch_0_beside_a_donor_on_a_slow_line() -> None:
    """They took its patience for claims, 20 s, though it gave its state all the time; then they never came in."""

    async def main() -> None:
        crowd = Crowd(3, 25.0)
        await crowd.begin()
        await crowd.all_take_part(60.0)

    sim.run(main, seed=1)


@pytest.mark.parametrize(("newcomers", "download_s"), CROWDS)
def test_newcomers_get_in_beside_one_donor(newcomers: int, download_s: float, soak: Callable[[int, int], int]) -> None:
    """However many they are, and however long their downloads take."""
    for seed in range(soak(1, 10)):

        async def main() -> None:
            crowd = Crowd(newcomers, download_s)
            await crowd.begin()
            await crowd.all_take_part(3 * download_s + 30.0)

        sim.run(main, seed=seed)


@pytest.mark.long
def test_newcomers_in_different_epochs_begin_at_epoch_0_beside_a_donor_that_is_busy_with_the_first() -> None:
    """They cannot share its copy, and it has no second one: but they follow its steps, which no claim would give."""

    async def main() -> None:
        crowd = Crowd(3, 25.0)
        await crowd.begin(apart_s=1.5)
        await crowd.all_take_part(90.0)

    sim.run(main, seed=1)


@pytest.mark.long
def test_newcomers_begin_at_epoch_0_beside_a_busy_donor_whose_epochs_last_longer_than_20_s() -> None:
    """It had no step to give them in that time. It gives its last one at once, and that is proof."""

    async def main() -> None:
        crowd = Crowd(3, 90.0, epoch_s=45.0, state_bytes=3 * MIB)
        await crowd.begin(apart_s=22.0)  # the last one comes in the second epoch
        last = crowd.peer(crowd.newcomers[-1])
        while not last.participant.takeover.catch_up.giving:
            assert crowd.loop.time() < crowd.came + 3 * 22.0, "no step came"
            await sim.sleep(1.0)
        await crowd.all_take_part(250.0)

    sim.run(main, seed=1)


def test_newcomers_in_adjacent_epochs_download_one_after_the_other() -> None:
    """The later one had no use for the copy of the epoch before, from which no step led on. It shares it now."""

    async def main() -> None:
        crowd = Crowd(2, 60.0, epoch_s=45.0)
        await crowd.begin(apart_s=45.0)
        late = crowd.peer(crowd.newcomers[-1])
        while not late.participant.takeover.downloads:
            assert crowd.loop.time() < crowd.came + 45.0 + 60.0 + 22.0, "it waited until the other one had the state"
            await sim.sleep(0.5)
        await crowd.end()

    sim.run(main, seed=1)


async def wait_for_a_dead_donor(newcomers: int, download_s: float, dies_after_s: float) -> None:
    """The only donor dies while it gives its state: all wait for `load_state_timeout`, and then begin together."""
    crowd = Crowd(newcomers, download_s)
    await crowd.begin(state_patience_s=120.0)
    await sim.sleep(dies_after_s)
    crowd.run.swarm.crash("donor0")
    new = [crowd.peer(name) for name in crowd.newcomers]
    while crowd.loop.time() < crowd.came + 110.0:
        assert [trainer.epochs for trainer in new] == [[]] * newcomers
        await sim.sleep(0.5)
    await sim.sleep(30.0)
    assert min(trainer.participant.epoch for trainer in new) > 5
    assert [trainer.alone for trainer in new] == [0] * newcomers
    await crowd.end()


@pytest.mark.long
def test_newcomers_whose_only_donor_dies_begin_at_epoch_0_at_once_if_they_are_three() -> None:
    """One newcomer waited; three, of whom each saw two others at its own state, did not."""

    async def main() -> None:
        await wait_for_a_dead_donor(3, 25.0, 3.5)

    sim.run(main, seed=1)


@pytest.mark.long(full=True)  # the sample has three newcomers, above
@pytest.mark.parametrize(("newcomers", "download_s"), CROWDS)
def test_newcomers_wait_for_a_donor_that_died(
    newcomers: int, download_s: float, soak: Callable[[int, int], int]
) -> None:
    """In the middle of the download."""
    for seed in range(soak(1, 10)):

        async def main() -> None:
            await wait_for_a_dead_donor(newcomers, download_s, download_s / 2)

        sim.run(main, seed=seed)


def test_a_donor_leaves_a_receiver_whose_slow_line_still_carries_what_was_sent() -> None:
    """It took the time of 30 s for two chunks that its queues held for a receiver that asks for nothing."""

    async def main() -> None:
        crowd = Crowd(3, 60.0)
        await crowd.begin()
        await crowd.all_take_part(120.0)

    sim.run(main, seed=2)


@pytest.mark.long
def test_four_newcomers_get_in_beside_three_donors(soak: Callable[[int, int], int]) -> None:
    """Each with one download, which may take twice as long: of three chunks two come from two donors."""
    for seed in range(soak(1, 10)):

        async def main() -> None:
            crowd = Crowd(4, 25.0, donors=3)
            await crowd.begin()
            await crowd.all_take_part(75.0)

        sim.run(main, seed=seed)


async def first_epochs(crowd: Crowd) -> list[float]:
    """After how many seconds of training the newcomers take their first step."""
    new = [crowd.peer(name) for name in crowd.newcomers]
    while not all(trainer.epochs for trainer in new):
        assert crowd.loop.time() < crowd.came + 60.0, [trainer.epochs[:1] for trainer in new]
        await sim.sleep(0.1)
    return [trainer.epochs[0][0] - crowd.came for trainer in new]


def beside_a_hopeless_donor(bytes_s: float, seed: int, apart_s: float = 0.0) -> None:
    """At its pace the state would take an hour, or half of one: newcomers who start together wait for 20 s.

    One whose wait ends a second after theirs misses their first step. It takes their state, of 10 s. Each comes
    `apart_s` after the one before.
    """

    async def main() -> None:
        crowd = Crowd(3, 10.0, up_bytes_s=bytes_s, state_bytes=16 * MIB)
        await crowd.begin(apart_s=apart_s)
        *together, last = sorted(await first_epochs(crowd))
        assert together[-1] < 24.0 + 4 * apart_s
        assert last < 50.0
        await crowd.end()

    sim.run(main, seed=seed)


@pytest.mark.parametrize("bytes_s", [1500.0, 15_000.0])
def test_who_gives_its_state_too_slowly_is_waited_for_as_long_as_a_claim(bytes_s: float) -> None:
    """On a line that carries next to nothing, and on one that steps and words alone nearly fill."""
    beside_a_hopeless_donor(bytes_s, 1)


def test_the_description_of_a_state_waits_for_minutes_behind_the_short_messages_of_its_pipe() -> None:
    """Each of them took a turn of its own on the full line. So steps came, and no state: that is waited for."""
    beside_a_hopeless_donor(15_000.0, 3)


def test_a_newcomer_that_missed_the_first_step_of_the_others_waits_for_minutes_beside_a_slow_donor() -> None:
    """Its download went on from the slow donor, although the others had a state to give meanwhile."""
    leaves = "a download that comes too slowly makes way for the state of others"
    before = reached[leaves]
    beside_a_hopeless_donor(15_000.0, 5, apart_s=1.0)
    assert reached[leaves] > before


def test_a_donor_whose_state_came_too_slowly_is_waited_for_minutes_once_it_is_busy() -> None:
    """It gave steps, and the state to another newcomer. That its state would not come in time was forgotten."""
    beside_a_hopeless_donor(15_000.0, 11)


@pytest.mark.long
def test_who_gives_its_state_too_slowly_is_waited_for_as_long_as_a_claim_in_all_seeds(
    soak: Callable[[int, int], int],
) -> None:
    """None of them is a lucky one."""
    for seed in range(soak(2, 100)):
        beside_a_hopeless_donor(15_000.0, seed)


def test_newcomers_that_start_together_wait_20_seconds_for_one_that_is_always_busy() -> None:
    """It says that it is a thousand epochs ahead."""

    async def main() -> None:
        crowd = Crowd(3, 1.0, donors=0)
        claim = asyncio.get_running_loop().create_task(claim_to(crowd))
        await crowd.begin()
        await claim
        firsts = await first_epochs(crowd)
        assert 18.0 < min(firsts) <= max(firsts) < 24.0, firsts
        crowd.run.swarm.crash("liar")
        await crowd.end()

    sim.run(main, seed=4)


async def claim_to(crowd: Crowd) -> None:
    """Once the newcomers are there, and before they train."""
    while len(crowd.run.trainers) < len(crowd.newcomers):
        await sim.sleep(0.1)
    await claims_and_is_busy(crowd.run, "liar")
