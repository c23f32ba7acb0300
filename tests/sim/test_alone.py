"""Nobody steps alone before it has looked for the others, and nobody does so in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal import sim
from shoal.events import Event, SteppedAlone, Warned
from tests.sim.optimizer_kit import Run, Trainer


def notes(trainer: Trainer) -> tuple[list[int], list[str]]:
    """The epochs that it makes alone, and what it warns of that, from now on."""
    alone, warned = list[int](), list[str]()

    def note(event: Event) -> None:
        if isinstance(event, SteppedAlone):
            alone.append(event.epoch)
        elif isinstance(event, Warned) and "by this peer alone" in event.message:
            warned.append(event.message)

    trainer.collaboration.core.env.events.subscribe(note)
    return alone, warned


def until(time_s: float) -> Callable[[], bool]:
    """Whether it is so late."""
    loop = asyncio.get_running_loop()
    return lambda: loop.time() > time_s


def test_a_newcomer_whose_entry_dies_says_that_it_is_alone_and_goes_on_looking() -> None:
    """Its only entry was killed 0.3 s after it had joined; it trained alone to the end, without a word."""

    async def main() -> None:
        run = Run(target=16)
        await run.add("entry")
        newcomer = await run.add("newcomer")
        alone, warned = notes(newcomer)
        await sim.sleep(0.3)
        run.swarm.crash("entry")
        training = run.swarm.spawn("newcomer", newcomer.train(4, duration_s=1.0, until=until(90.0)))
        await sim.sleep(20.0)
        assert alone[:3] == [1, 2, 3]
        assert len(warned) == 1
        assert "'run'" in warned[0]
        assert "no other peer of it is known" in warned[0]
        again = await run.swarm.restart("entry")
        back = run.swarm.spawn("entry", again.train(4, duration_s=1.0, until=until(90.0)))
        await asyncio.wait([training, back])
        assert again.collaboration.epoch > alone[-1] + 5
        assert len(warned) == 1
        await run.close()

    sim.run(main, seed=31)


def test_a_peer_that_wakes_looks_for_the_others_before_it_steps() -> None:
    """It slept for longer than what it had heard counts, and would find itself alone with its samples."""

    async def main() -> None:
        run = Run(target=24)
        names = ["p0", "p1", "p2"]
        for name in names:
            await run.add(name)
        sleeper = run.swarm.peer("p2")
        alone, warned = notes(sleeper)
        tasks = [run.swarm.spawn(n, run.swarm.peer(n).train(4, duration_s=1.0, until=until(130.0))) for n in names]
        await sim.sleep(10.0)
        run.swarm.stall("p2", 70.0)
        await asyncio.wait(tasks)
        assert not alone
        assert not warned
        assert sleeper.collaboration.epoch > 20
        await run.close()

    sim.run(main, seed=32)


def test_a_peer_that_lost_its_links_looks_for_the_others_before_it_steps() -> None:
    """Its line was down for a minute, and its first batch after that would be a step of its own."""

    async def main() -> None:
        run = Run(target=24)
        names = ["p0", "p1", "p2"]
        for name in names:
            await run.add(name)
        back = run.swarm.peer("p2")
        alone, _ = notes(back)
        tasks = [run.swarm.spawn(n, run.swarm.peer(n).train(4, duration_s=1.0, until=until(90.0))) for n in names[:2]]
        await run.swarm.run_on("p2", back.train, 4, duration_s=1.0, until=until(10.0))
        run.swarm.partition([["p0", "p1"], ["p2"]])
        await sim.sleep(60.0)
        assert len(back.collaboration.view().peers) == 1
        run.swarm.heal()
        await run.swarm.run_on("p2", back.take_batch, 24)
        assert not alone
        await sim.sleep(2.0)
        await run.swarm.run_on("p2", back.train, 4, duration_s=1.0, until=until(90.0))
        await asyncio.wait(tasks)
        assert not alone
        assert back.collaboration.epoch >= run.swarm.peer("p0").collaboration.epoch - 1
        await run.close()

    sim.run(main, seed=33)


def test_a_line_that_is_down_is_told_once() -> None:
    """The peer is alone meanwhile, and with the others again when it can."""

    async def main() -> None:
        run = Run(target=24)
        names = ["p0", "p1", "p2"]
        for name in names:
            await run.add(name)
        alone, warned = notes(run.swarm.peer("p2"))
        tasks = [run.swarm.spawn(n, run.swarm.peer(n).train(4, duration_s=1.0, until=until(150.0))) for n in names]
        await sim.sleep(10.0)
        run.swarm.partition([["p0", "p1"], ["p2"]])
        await sim.sleep(60.0)
        assert len(warned) == 1
        run.swarm.heal()
        await sim.sleep(60.0)
        last = alone[-1]
        await asyncio.wait(tasks)
        assert alone[-1] == last
        assert len(warned) == 1
        await run.close()

    sim.run(main, seed=33)


def test_who_was_given_nobody_trains_alone_without_a_warning() -> None:
    """The first peer of a network: it is an event, and all as it should be."""

    async def main() -> None:
        run = Run(target=8)
        trainer = await run.add("p0")
        alone, warned = notes(trainer)
        for number in range(6):
            await run.swarm.run_on("p0", trainer.take_batch, 4, number=number)
        assert alone == [1, 2, 3]
        assert not warned
        await run.close()

    sim.run(main, seed=34)
