"""Trainers that change the options of their optimizers: every step is taken with the same ones by all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from shoal import sim
from shoal.events import EpochAdvanced, Warned
from tests.sim.optimizer_kit import Run, Trainer
from tests.situations import reaches

NAMES = ["p0", "p1", "p2"]


async def train(
    change: Callable[[Trainer], None], names: list[str], epochs: int, steps: list[dict[str, Any]]
) -> list[str]:
    """Train with `change` after each local batch; notes the parameters after each epoch. Returns what was warned."""
    run = Run(target=24)
    told: list[str] = []

    def note(name: str, event: Any) -> None:
        trainer = run.swarm.peer(name)
        if isinstance(event, EpochAdvanced):
            entry = trainer.parameters[0].detach().clone(), event.digest
            while len(steps) < event.epoch:
                steps.append({})
            steps[event.epoch - 1][name] = entry
        elif isinstance(event, Warned):
            told.append(f"{name}: {event.message}")

    for name in names:
        trainer = await run.add(name)
        trainer.participant.training.schedule.scheduler = None
        trainer.participant.core.env.events.subscribe(partial(note, name))
    await sim.sleep(3.0)

    async def loop(name: str, duration_s: float) -> None:
        trainer = run.swarm.peer(name)
        while trainer.participant.epoch < epochs:
            await trainer.take_batch(4, duration_s=duration_s)
            change(trainer)

    await asyncio.gather(*(run.swarm.run_on(n, loop, n, 0.1 * (2 + i)) for i, n in enumerate(names)))
    assert not any(run.swarm.peer(name).downloads for name in names)
    await run.close()
    return told


def equal(steps: list[dict[str, Any]], names: list[str]) -> bool:
    """Whether all took every step, with the same parameters and name after it."""
    return all(
        set(step) == set(names)
        and all(torch.equal(step[n][0], step[names[0]][0]) and step[n][1] == step[names[0]][1] for n in names)
        for step in steps
    )


def by_local_steps(trainer: Trainer) -> None:
    """A schedule of the trainer's own, stepped after each batch, as HF's Trainer does it."""
    for group in trainer.participant.training.optimizer.param_groups:
        group["lr"] = 0.05 * min(1.0, trainer.batches_done / 40)


def by_hand(trainer: Trainer) -> None:
    """One peer's rate set to something else, once."""
    if trainer.index == 0 and trainer.batches_done == 7:
        trainer.participant.training.optimizer.param_groups[0]["lr"] = 0.2


def other_lambdas(trainer: Trainer) -> None:
    """Schedules of epochs, with other functions."""
    rate = (0.9 if trainer.index == 1 else 0.8) ** trainer.participant.epoch
    trainer.participant.training.optimizer.param_groups[0]["lr"] = 0.05 * rate


@pytest.mark.parametrize("change", [by_local_steps, by_hand, other_lambdas])
def test_learning_rates_that_differ_under_one_state_name(change: Callable[[Trainer], None]) -> None:
    """All take every step with the same options; who had others is told once, and nobody forks or downloads."""
    steps: list[dict[str, Any]] = []
    told = sim.run(lambda: train(change, NAMES, 15, steps), seed=3)
    assert equal(steps, NAMES)
    assert len(told) == len({each.split(":")[0] for each in told})
    assert 1 <= len(told) <= 3
    assert "lr of parameter group 0" in told[0]


def test_a_peer_in_its_first_batch_won_the_step_with_the_rate_from_before_the_warm_up() -> None:
    """Until its first `step` a schedule that was made over its optimizer is not found. Two such peers were the most."""

    async def main() -> None:
        run, rates = Run(target=8), list[float]()
        for name in NAMES:
            trainer = await run.add(name)
            trainer.participant.training.schedule.scheduler = None
        await sim.sleep(3.0)
        warmed = run.swarm.peer(NAMES[2])
        inner = warmed.participant.training.optimizer
        inner.param_groups[0]["lr"] = 1e-6
        inner.register_step_pre_hook(lambda *_: rates.append(inner.param_groups[0]["lr"]))
        first = [run.swarm.run_on(name, run.swarm.peer(name).take_batch, 4, duration_s=5.0) for name in NAMES[:2]]
        train = warmed.train(4, duration_s=0.2, until=lambda: warmed.participant.epoch >= 3)
        begun = asyncio.gather(*first)
        await run.swarm.run_on(NAMES[2], lambda: train)
        assert rates == [1e-6] * 3
        await begun
        await run.close()

    sim.run(main, seed=4)


def test_four_free_keys_with_few_samples_set_no_rate_and_no_parameters() -> None:
    """They were most heads: their rate of 1e4 made the loss inf, and their filled weights were downloaded."""

    async def main() -> None:
        run, rates = Run(target=24), list[float]()
        free = [f"free{number}" for number in range(4)]
        for name in NAMES:
            trainer = await run.add(name, check_every=2)
            inner = trainer.participant.training.optimizer
            trainer.participant.training.schedule.scheduler = None
            inner.register_step_pre_hook(lambda inner, *_: rates.append(inner.param_groups[0]["lr"]))
        honest = [run.swarm.peer(name) for name in NAMES]
        stop = asyncio.Event()
        tasks = [run.swarm.spawn(n, run.swarm.peer(n).train(4, duration_s=0.25, until=stop.is_set)) for n in NAMES]
        while honest[0].participant.epoch < 5:
            await sim.sleep(0.1)

        async def lies(trainer: Trainer) -> None:
            while not stop.is_set():
                trainer.participant.training.optimizer.param_groups[0]["lr"] = 1e4
                await trainer.take_batch(1, duration_s=0.4)
                with torch.no_grad():
                    trainer.parameters[0].fill_(7.0)

        for name in free:
            liar = await run.add(name, check_every=2)
            liar.participant.training.schedule.scheduler = None
            tasks.append(run.swarm.spawn(name, lies(liar)))
        while honest[0].participant.epoch < 20:
            await sim.sleep(0.5)
        stop.set()
        await asyncio.wait(tasks, timeout=60.0)
        took_part = set(honest[0].participant.own.committed.samples)
        assert took_part >= {run.swarm.peer(name).participant.core.peer_id for name in free}
        assert set(rates) == {0.05}
        assert not any(trainer.downloads for trainer in honest)
        await run.close()

    sim.run(main, seed=4)


def test_a_peer_that_cannot_set_the_options_of_the_swarm_does_not_step_and_says_so_once() -> None:
    """The others go on without it. It keeps its own parameters, and takes no state that it could not step from."""

    async def main() -> None:
        run, told = Run(target=24), list[str]()
        for name in NAMES:
            trainer = await run.add(name)
            trainer.participant.training.schedule.scheduler = None
        await sim.sleep(3.0)
        odd, others = run.swarm.peer("p2"), NAMES[:2]
        odd.participant.core.env.events.subscribe(
            lambda event: told.append(event.message) if isinstance(event, Warned) else None
        )
        odd.participant.training.optimizer.param_groups[0]["amsgrad"] = "no"  # a text, where the others have a switch
        before = [parameter.detach().clone() for parameter in odd.parameters]
        stop = asyncio.Event()
        tasks = [run.swarm.spawn(n, run.swarm.peer(n).train(4, duration_s=0.25, until=stop.is_set)) for n in NAMES]
        while min(run.swarm.peer(name).participant.epoch for name in others) < 6:
            await sim.sleep(0.1)
        stop.set()
        await asyncio.wait(tasks)
        await asyncio.gather(*(run.swarm.run_on(n, run.swarm.peer(n).finish_epoch, 6) for n in others))
        assert odd.participant.epoch == odd.downloads == 0
        assert all(map(torch.equal, odd.parameters, before))
        assert [each.split(":")[0] for each in told].count("the swarm's step is not taken here") == 1
        assert "amsgrad of False, which is 'no' here" in told[0]
        assert "option 'amsgrad' is a switch there and a text here" in told[1]
        assert len(told) == 2
        # The first step is one of all three; the others wait for nobody in the next ones.
        times = [time for time, *_ in run.swarm.peer("p0").epochs]
        assert times[5] - times[1] < 4 * 1.5 * 24 / (2 * 4 / 0.25)
        await run.close()

    with reaches("the options of the swarm's step cannot be set here"):
        sim.run(main, seed=4)


def test_an_option_of_another_kind_that_is_set_right_brings_a_peer_back_at_once() -> None:
    """It took 51 s: the states that it had refused for its own option were put aside for a minute, or for longer."""

    async def main() -> None:
        run, told = Run(target=24), list[str]()
        for name in NAMES:
            trainer = await run.add(name)
            trainer.participant.training.schedule.scheduler = None
            trainer.participant.training.optimizer.param_groups[0]["foo"] = 1.0
        odd, other = run.swarm.peer("p2"), run.swarm.peer("p0").participant
        odd.participant.core.env.events.subscribe(
            lambda event: told.append(event.message) if isinstance(event, Warned) else None
        )
        await sim.sleep(3.0)
        for name in NAMES:
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.25, until=lambda: False))
        await sim.sleep(5.0)
        options = odd.participant.training.optimizer.param_groups[0]
        options["foo"] = "one"
        await sim.sleep(10.0)
        assert other.epoch > odd.participant.epoch > 0
        assert "foo of 1.0, which is 'one' here" in told[0]
        options["foo"] = 1.0
        await sim.sleep(2.0)
        assert odd.participant.epoch == other.epoch
        assert odd.participant.core.peer_id in other.view().together
        count = len(odd.epochs)
        await sim.sleep(4.0)
        assert len(odd.epochs) >= count + 2
        assert odd.participant.state.digest == other.state.digest
        await run.close()

    with reaches("options that were set right let a state be taken"):
        sim.run(main, seed=3)


@pytest.mark.parametrize("rate", [100.0, "x"])
def test_in_a_run_of_two_one_peer_sets_no_rate_for_the_other(rate: Any) -> None:
    """The one with the lower id had 100 taken as the rate of most peers; with a text the other one lost its steps."""

    async def main() -> None:
        run, rates, told = Run(target=16), list[float](), list[str]()
        liar, honest = sorted(("p0", "p1"), key=lambda name: run.swarm.identity(name).peer_id)
        for name in (honest, liar):
            trainer = await run.add(name)
            trainer.participant.training.schedule.scheduler = None
        inner = run.swarm.peer(honest).participant.training.optimizer
        inner.register_step_pre_hook(lambda inner, *_: rates.append(inner.param_groups[0]["lr"]))
        run.swarm.peer(honest).participant.core.env.events.subscribe(
            lambda event: told.append(event.message) if isinstance(event, Warned) else None
        )
        await sim.sleep(3.0)
        tasks = [
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.25, until=lambda: False))
            for name in NAMES[:2]
        ]
        await sim.sleep(5.0)
        participant, before = run.swarm.peer(liar).participant, run.swarm.peer(honest).participant.epoch
        said = participant.swarm_step._said

        def lies(check: Any = None) -> Any:
            word = said(check)
            options = msgspec.structs.replace(word.options, values={**word.options.values, "lr": [rate]})
            return msgspec.structs.replace(word, options=options)

        participant.swarm_step._said = lies  # type: ignore[method-assign]
        await sim.sleep(20.0)
        assert set(rates) == {0.05}
        assert run.swarm.peer(honest).participant.epoch >= before + 9
        assert not [each for each in told if "not taken here" in each]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    sim.run(main, seed=3)
