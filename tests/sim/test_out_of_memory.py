"""A machine that has no memory once: what is optional is left out, a round fails, and the training goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.averaging.allreduce.vector import Vector
from shoal.errors import RoundFailed, is_out_of_memory
from shoal.events import Event, RoundAborted, Warned
from shoal.run import parameter_check, swarm_step
from shoal.run.gossip import ProgressGossip
from shoal.run.join import step_feed
from shoal.run.participant import Participant
from shoal.run.solitude import Solitude
from shoal.strategies import Decoupled, DiLoCo, LocalSGD, LocalUpdates, Strategy, StreamingDiLoCo, outer
from shoal.strategies.local_updates import LocalTrainingState
from shoal.strategies.outer import LocalSteps, OuterTrainingState
from shoal.train import optimizer_state, training_state
from shoal.train.gradient_sum import GradientSum
from shoal.train.training_state import TrainingState
from tests.sim.optimizer_kit import Run, Trainer

NAMES = ["p0", "p1", "p2"]
EPOCHS = 5

ERRORS: list[BaseException] = [
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
]


class Fails:
    """A function that has no memory the first time, once it is armed; the peers that it happened to are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
        self.armed, self.times, self._error = False, 0, error
        original: Callable[..., Any] = getattr(owner, name)

        @wraps(original)
        def wrapped(*args: Any, **options: Any) -> Any:
            if self.armed:
                self.armed, self.times = False, self.times + 1
                raise self._error
            return original(*args, **options)

        monkeypatch.setattr(owner, name, wrapped)


SITES: dict[str, tuple[Any, str, str]] = {
    "copy in": (Vector, "copy_in", "its values could not be copied"),
    "overwrite": (Vector, "overwrite", "agreed on, but not applied in full"),
    "sum": (Vector, "begin_sum", ""),
    "add": (Vector, "add", ""),
    "finish": (Vector, "finish", ""),
    "prepare": (TrainingState, "contribute", "its values could not be copied"),
    "check": (parameter_check, "check_of", "the check of this peer's parameters was left out"),
    "agree": (swarm_step, "agree", "a round or a step was left out"),
    "what is said": (optimizer_state, "options_of", "a round or a step was left out"),
    "the step that is told": (step_feed, "of_round", "a step for peers that catch up was left out"),
    "publish": (ProgressGossip, "_publish", "what it tells others, and hears from them, was left out"),
    "look": (ProgressGossip, "_look", "what it tells others, and hears from them, was left out"),
    "solitude": (Solitude, "_in_company", "a look for others was left out"),
    "the sum of gradients": (GradientSum, "_add", "a batch, and those that were summed with it, were left out"),
    "export": (TrainingState, "export", ""),
    "prepare a state": (TrainingState, "prepare", "what others have trained was left out"),
    "load a state": (TrainingState, "take_over", "what others have trained was left out"),
    "the gradient to step from": (training_state, "_as_gradient", "an average of the swarm was left out"),
    "the average of the states": (Vector, "apply", "an average of the swarm was left out"),
}


@pytest.mark.parametrize(("site", "number"), [(site, number % 3) for number, site in enumerate(SITES)])
def test_a_machine_without_memory_once_trains_on(site: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any error of the loop ended the trainer at its next step; after it, all hold the same bits."""
    owner, name, told = SITES[site]
    fails, said = Fails(monkeypatch, owner, name, ERRORS[number]), list[str]()

    def note(event: Event) -> None:
        if isinstance(event, Warned):
            said.append(event.message)
        elif isinstance(event, RoundAborted):
            said.append(event.reason)

    async def loop(run: Run, name: str) -> None:
        trainer = run.swarm.peer(name)
        trainer.participant.core.env.events.subscribe(note)
        while not trainer.participant.finished:
            await trainer.take_batch(4, duration_s=0.2 if site != "solitude" else 1.0)

    async def main() -> None:
        run = Run(target=24, average_state_every=2 if "states" in site else 0)
        for name in NAMES:
            await run.add(name, check_every=2)
        await sim.sleep(3.0)
        run.announce_end(EPOCHS)
        loops = [asyncio.ensure_future(run.swarm.run_on(name, loop, run, name)) for name in NAMES]
        await until(run, 2)
        late = await run.add("late", check_every=2)
        late.participant.announce_end(EPOCHS)
        fails.armed = True
        loops.append(asyncio.ensure_future(run.swarm.run_on("late", loop, run, "late")))
        await asyncio.gather(*loops)
        assert fails.times == 1
        assert [trainer.participant.course.failure for trainer in run.swarm.peers.values()] == [None] * 4
        assert run.agree([*NAMES, "late"])
        assert run.swarm.peer("p0").participant.epoch == EPOCHS
        assert any(told in each for each in said) or not told, said
        await run.close()

    sim.run(main, seed=1)


STRATEGIES: dict[str, Strategy] = {
    "Decoupled": Decoupled(4, fragments=2),
    "LocalUpdates": LocalUpdates(24),
    "DiLoCo": DiLoCo(3),
    "LocalSGD": LocalSGD(3),
    "StreamingDiLoCo": StreamingDiLoCo(4, fragments=2, overlap=1),
    "LocalUpdates that wait": LocalUpdates(24, waits=True),
}

LOCAL = {name for name in STRATEGIES if name.startswith("LocalUpdates")}
MERGING = set(STRATEGIES) - LOCAL

MERGES: dict[str, tuple[Any, str, set[str]]] = {
    "copy in": (Vector, "copy_in", MERGING | LOCAL),
    "overwrite": (Vector, "overwrite", MERGING | LOCAL),
    "apply": (Vector, "apply", LOCAL),
    "sum": (Vector, "begin_sum", MERGING | LOCAL),
    "finish": (Vector, "finish", MERGING | LOCAL),
    "contribute": (OuterTrainingState, "contribute", MERGING),
    "outer gradient": (OuterTrainingState, "_outer_gradient", {"Decoupled", "StreamingDiLoCo"}),
    "use average": (OuterTrainingState, "use_average", MERGING),
    "step from average": (OuterTrainingState, "_step_from_average", MERGING),
    "step to the average": (LocalTrainingState, "_step_from_average", LOCAL),
    "parameters that are finite": (outer, "not_finite", MERGING),
    "outer optimizer": (torch.optim.SGD, "step", MERGING),
    "after step": (OuterTrainingState, "_after_step", MERGING),
    "copies that move with the parameters": (LocalSteps, "moving", MERGING),
}


def _marks(strategy: str, site: str, number: int) -> Sequence[pytest.MarkDecorator]:
    reached_by = MERGES[site][2]
    if strategy == "LocalUpdates" or (strategy == "Decoupled" and not reached_by & LOCAL):
        return ()
    return [pytest.mark.long(full=number % 4 > 0)]


CASES = [
    pytest.param(strategy, site, marks=_marks(strategy, site, number + place))
    for number, strategy in enumerate(STRATEGIES)
    for place, site in enumerate(MERGES)
    if strategy in MERGES[site][2]
]
"""In each commit a site that strategies of both kinds reach once, and each other one; a quarter of the others in the
sample of the long tests."""


@pytest.mark.parametrize(("strategy", "site"), CASES)
def test_a_merge_that_finds_no_memory_is_not_taken(strategy: str, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was raised in the trainer's step, and blamed the optimizer's own; after it, all hold the same bits."""
    owner, name, _ = MERGES[site]
    fails = Fails(monkeypatch, owner, name, ERRORS[list(MERGES).index(site) % 3])

    async def loop(run: Run, name: str) -> None:
        trainer = run.swarm.peer(name)
        while not trainer.finished:
            await trainer.take_batch(4, duration_s=0.3)

    async def main() -> None:
        run = Run(target=1)
        said = list[str]()
        for name in NAMES:
            await run.add(name, strategy=STRATEGIES[strategy], check_every=2, events=partial(_note_warning, said))
        await sim.sleep(3.0)
        run.announce_end(EPOCHS)
        loops = [asyncio.ensure_future(run.swarm.run_on(name, loop, run, name)) for name in NAMES]
        await until(run, 2)
        fails.armed = True
        async with asyncio.timeout(400):
            await asyncio.gather(*loops)
        assert fails.times == 1
        assert run.agree(NAMES)
        assert run.swarm.peer("p0").participant.epoch == EPOCHS
        assert not [each for each in said if "own step" in each or "interrupted" in each]
        await run.close()

    sim.run(main, seed=1)


def _note_warning(said: list[str], event: Event) -> None:
    if isinstance(event, Warned):
        said.append(event.message)


async def until(run: Run, epoch: int) -> None:
    """All are there."""
    while run.swarm.peer("p0").participant.epoch < epoch:
        await sim.sleep(0.1)


def test_a_peer_alone_without_memory_once_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own mean is half made: what was accumulated is forgotten."""
    fails = Fails(monkeypatch, TrainingState, "use_own_mean", ERRORS[0])

    async def main() -> None:
        run = Run(target=8)
        trainer = await run.add("p0")
        fails.armed = True
        while trainer.participant.epoch < 3:
            await trainer.take_batch(4, duration_s=0.2)
        assert fails.times == 1
        await run.close()

    sim.run(main, seed=1)


def test_a_step_that_is_followed_raises_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that it leaves behind has a name of its own, and the next download mends it."""
    fails = Fails(monkeypatch, torch.optim.AdamW, "step", ERRORS[1])

    async def main() -> None:
        run = Run(target=24)
        for name in NAMES:
            await run.add(name)
        await sim.sleep(3.0)

        async def loop(name: str) -> None:
            trainer = run.swarm.peer(name)
            while trainer.participant.epoch < EPOCHS:
                await slow(trainer, name)

        async def slow(trainer: Trainer, name: str) -> None:
            try:
                await trainer.take_batch(4, duration_s=0.2)
            except torch.OutOfMemoryError:  # of the trainer's own step: it is told, and may go on
                assert fails.times == 1

        loops = [asyncio.ensure_future(run.swarm.run_on(name, loop, name)) for name in NAMES]
        await until(run, 3)
        fails.armed = True
        await asyncio.gather(*loops)
        assert fails.times == 1
        assert [run.swarm.peer(name).participant.course.failure for name in NAMES] == [None] * 3
        await run.close()

    sim.run(main, seed=1)


@pytest.mark.parametrize("error", ERRORS)
def test_errors_that_say_that_there_is_no_memory(error: BaseException) -> None:
    """Of the CPU, of a device, of Python; and none else."""
    assert is_out_of_memory(error)
    for other in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory"),
        RoundFailed("x"),
    ):
        assert not is_out_of_memory(other)


def test_other_errors_of_the_loop_still_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect is not to be hidden by what is done about memory."""
    fails = Fails(monkeypatch, swarm_step, "agree", RuntimeError("a defect"))

    async def main() -> None:
        run = Run(target=8)
        for name in NAMES[:2]:
            await run.add(name)
        await sim.sleep(3.0)
        fails.armed = True

        async def loop(name: str) -> None:
            trainer: Trainer = run.swarm.peer(name)
            while trainer.participant.epoch < 3:
                await trainer.take_batch(4, duration_s=0.2)

        with pytest.raises(RuntimeError, match="a defect"):
            await asyncio.gather(*(run.swarm.run_on(name, loop, name) for name in NAMES[:2]))
        assert isinstance(run.swarm.peer("p0").participant, Participant)
        await run.close()

    sim.run(main, seed=1)
