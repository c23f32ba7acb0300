"""The end of a run whose peers do not say the same about it: all of them end, with equal weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import pytest

from shoal import sim
from shoal.events import Warned
from shoal.sim import SimNetwork
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.test_catch_up import ballast
from tests.sim.test_local_updates import WAITS
from tests.situations import reaches

NAMES = ["p0", "p1"]


async def train(run: Run, names: list[str], size: int = 4, *, to: int | None = None) -> None:
    """Batches of 0.2 s until the run ends, or this epoch."""

    def over(trainer: Trainer) -> bool:
        return to is not None and trainer.participant.epoch >= to

    async def work(name: str) -> None:
        trainer = run.swarm.peer(name)
        await trainer.train(size, duration_s=0.2, until=lambda: over(trainer))

    async with asyncio.timeout(120.0):
        await asyncio.gather(*(run.swarm.run_on(name, work, name) for name in names))


async def ended_at_three() -> Run:
    """A run of two, whose end both have announced and reached."""
    run = Run(target=16)
    for name in NAMES:
        await run.add(name)
    await sim.sleep(3.0)
    run.announce_end(3)
    await train(run, NAMES)
    return run


@pytest.mark.parametrize(
    "further",
    [
        {"p0": 4, "p1": 6},
        *(pytest.param(each, marks=pytest.mark.long) for each in ({"p0": 6, "p1": 4}, {"p0": 1, "p1": 5})),
    ],
)
def test_a_peer_that_downloads_waits_for_ever_at_the_end(further: Mapping[str, int]) -> None:
    """Two peers announce different ends. One has made most steps, the other came late: they ended at other epochs.

    Then the first one was gone from the rounds, and the second one waited for it in each.
    """

    async def main() -> None:
        run = Run(target=16)
        first = await run.add("p0")
        await run.swarm.run_on("p0", first.train, 4, duration_s=0.2, until=lambda: first.participant.epoch >= 8)
        await run.add("p1", seed=1)
        both = asyncio.get_running_loop().create_task(train(run, NAMES))
        await sim.sleep(3.0)
        for name, epochs in further.items():
            trainer = run.swarm.peer(name).participant
            trainer.announce_end(trainer.epoch + epochs)
        await both
        assert run.agree(NAMES)
        assert run.swarm.peer("p1").alone == 0
        await run.close()

    sim.run(main, seed=5)


def test_a_second_run_of_one_name_ended_at_once_without_a_word() -> None:
    """A peer of the first one was still there. Who comes is told what it has, and what to do."""

    async def main() -> None:
        run, told = Run(target=8), list[str]()
        await run.add("first")
        run.announce_end(3)
        first = run.swarm.peer("first")
        await run.swarm.run_on("first", partial(first.train, 4, duration_s=0.2, until=lambda: False))
        second = await run.add(
            "second", seed=5, events=lambda event: told.append(event.message) if isinstance(event, Warned) else None
        )
        run.announce_end(3)
        await run.swarm.run_on("second", partial(second.train, 4, duration_s=0.2, until=lambda: False))
        assert second.participant.state == first.participant.state
        (said,) = (each for each in told if "the run ends here" in each)
        assert "this peer has made no step of it" in said
        assert "give another run_id" in said
        await run.close()

    sim.run(main, seed=6)


def test_a_run_goes_on_after_its_end() -> None:
    """A later end is announced by one peer after the other: the first one does not wait for those that are through."""

    async def main() -> None:
        run = await ended_at_three()
        assert run.agree(NAMES)
        first, second = (run.swarm.peer(name).participant for name in NAMES)
        assert first.epoch == second.epoch == 3
        first.announce_end(8)
        await train(run, ["p0"], to=5)
        assert (first.epoch, second.epoch, second.finished) == (5, 3, True)
        second.announce_end(8)
        await train(run, NAMES)
        assert run.agree(NAMES)
        assert first.epoch == 8
        await run.close()

    sim.run(main, seed=6)


def test_a_peer_at_its_end_follows_nobody_beyond() -> None:
    """Others go on: what they have is no better end, and it may leave."""

    async def main() -> None:
        run = await ended_at_three()
        first, second = (run.swarm.peer(name).participant for name in NAMES)
        first.announce_end(None)
        await train(run, ["p0"], to=6)
        assert second.finished
        assert run.swarm.peer("p1").downloads == 0
        await run.close()

    sim.run(main, seed=7)


def test_a_run_that_goes_on_beyond_the_end_that_a_peer_announced_says_nothing() -> None:
    """It does, once: an end that most peers do not share is passed, and a late peer may name one that is over."""

    async def main() -> None:
        run, said = Run(target=16), list[str]()
        for name in NAMES:
            await run.add(name)
        second = run.swarm.peer("p1").participant
        second.core.env.events.subscribe(
            lambda event: said.append(event.message) if isinstance(event, Warned) else None
        )
        await sim.sleep(3.0)
        second.announce_end(3)
        await train(run, NAMES, to=6)
        assert sum("goes on, though this peer announced its end for epoch 3" in each for each in said) == 1
        await run.close()

    sim.run(main, seed=7)


def test_a_peer_that_is_left_without_the_others_of_its_last_step_gives_its_own_last_state() -> None:
    """Its last average has nobody else in it. A peer that comes too late for that step ends with the same bits."""

    async def main() -> None:
        network = SimNetwork(1, window_bytes=32 << 10)
        network.add_host("late", down_bytes_s=40_000)  # it downloads until the others are at the end
        run, state_bytes = Run(target=16, network=network), 256 << 10
        for name in NAMES:
            await run.add(name, extra_tensors=ballast(0, state_bytes), **WAITS)
        await sim.sleep(3.0)
        tasks = {
            name: run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.25, until=bool)) for name in NAMES
        }
        first = run.swarm.peer("p0")
        while first.participant.epoch < 3:
            await sim.sleep(0.01)
        late = await run.add("late", seed=99, extra_tensors=ballast(99, state_bytes), **WAITS)
        tasks["late"] = run.swarm.spawn("late", late.train(4, duration_s=0.25, until=bool))
        await sim.sleep(3.0)
        end = first.participant.epoch + 2
        run.announce_end(end)
        while first.participant.epoch < end:
            await sim.sleep(0.0005)
        stepped_to = first.participant.state
        run.swarm.crash("p1")
        await asyncio.wait([tasks["p0"], tasks["late"]], timeout=60.0)
        assert tasks["p0"].done()
        assert tasks["late"].done()
        assert first.participant.state.epoch == end
        assert first.participant.state != stepped_to
        assert run.agree(["p0", "late"])
        assert not run.warnings
        await run.close()

    with reaches("nobody is left for the last average of the states"):
        sim.run(main, seed=1)
