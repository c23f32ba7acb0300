"""Every kind of model is trained, given, taken, saved and resumed, whatever the strategy. Right, or a named error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.compression import CompressionBase, Uniform8BitQuantization
from shoal.errors import ConfigError
from shoal.run.disk.checkpoint import copy_of, newest, write
from shoal.run.join.shared_state import share
from shoal.strategies import Decoupled, DiLoCo, LocalSGD, StreamingDiLoCo
from shoal.train.training_state import TrainingState
from tests.sim.averaging_kit import Trial
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.unusual_kit import MODELS, Unusual, UnusualTrainer, made, optimizer_of


def outer_with_an_empty_group(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Such as one without decay, of a model without biases."""
    groups: list[dict[str, Any]] = [{"params": [*parameters]}, {"params": []}]
    return torch.optim.SGD(groups, lr=0.7, momentum=0.9, nesterov=True)


STRATEGIES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "delayed": {"late": True, "delay_grad_averaging": True},
    "offloaded": {"offload": True},
    "low rank": {"rank": 1},
    "local updates": {"use_local_updates": True, "statistics": ("exp_avg",)},
    "LocalSGD": {"strategy": LocalSGD(2)},
    "DiLoCo": {"strategy": DiLoCo(2, outer_with_an_empty_group)},
    "StreamingDiLoCo": {"strategy": StreamingDiLoCo(4, fragments=2, overlap=1)},
    "Decoupled": {"strategy": Decoupled(4, fragments=2, quorum=2)},
}
LARGE = "3000 small"
SAMPLE = ("empty group", "empty tensor", "channels_last", "partial statistics")
"""Models that every commit trains in every other strategy. Of the others it trains each in one, and the sample of the
long tests in a third of them."""


def marks(model: str, *, sample: bool = True, full: bool = False) -> list[pytest.MarkDecorator]:
    """Of a test of this model."""
    if model == LARGE:
        return [pytest.mark.long(full=full), pytest.mark.timeout(900)]
    return [] if sample else [pytest.mark.long(full=full)]


CASES = [
    pytest.param(
        model,
        strategy,
        marks=marks(
            model,
            sample=strategy == "synchronous" or (model in SAMPLE and (place + number) % 2 == 0),
            full=(place + number) % (6 if model == LARGE else 3) > 0,
        ),
    )
    for place, model in enumerate((*MODELS, LARGE))
    for number, strategy in enumerate(STRATEGIES)
]


async def add(run: Run, name: str, seed: int, model: str, **options: Any) -> UnusualTrainer:
    """A peer with this model."""
    unusual = made(model, seed)
    run._make = lambda parameters, lr: (optimizer_of(unusual), None)
    trainer = await run.add(name, **options)
    assert isinstance(trainer, UnusualTrainer)
    trainer.model, trainer.name = unusual, name
    return trainer


def states_of(trainer: Trainer) -> list[tuple[Any, list[torch.Tensor]]]:
    """The names and the values of all fragments' states; numbers that differ by design are not among them."""
    return [(each.state, [*each.training.export()[1]]) for each in trainer.fragments]


def assert_equal(one: Trainer, other: Trainer, *, whole: bool, same_names: bool) -> None:
    """All tensors of the state to the bit, or the parameters alone.

    `Decoupled` may end at several states, where a quorum is there on either side.
    """
    for (name, ours), (other_name, theirs) in zip(states_of(one), states_of(other), strict=True):
        if name != other_name and not same_names:
            continue
        assert name == other_name
        count = len(ours) if whole else len(one.participant.training.tensors.all)
        assert len(ours) == len(theirs) or not whole
        assert all(map(torch.equal, ours[:count], theirs[:count]))


def refused(model: str, strategy: str) -> str | None:
    """The error of a combination that cannot be trained."""
    if strategy == "low rank" and model in {
        "empty tensor alone",
        "no dimensions",
        "one element",
        "interleaved",
        "small",
        LARGE,
    }:
        return "saves too little on every parameter"
    trained = sum(each.requires_grad and each.numel() > 0 for group in made(model, 0).groups for each in group)
    if strategy in {"StreamingDiLoCo", "Decoupled"} and trained < 2:
        return "the number of trained tensors that are not empty, got 2 for 1"
    return None


@pytest.mark.parametrize(("model", "strategy"), CASES)
def test_a_newcomer_takes_part_in_every_strategy(model: str, strategy: str, tmp_path: Path) -> None:
    """It downloads the state, both train on, and end with equal bits; and so does what a checkpoint gives back."""
    options = STRATEGIES[strategy]

    async def play() -> None:
        run = Run(target=8, trainer=UnusualTrainer)
        if (why := refused(model, strategy)) is not None:
            with pytest.raises(ConfigError, match=why):
                await add(run, "first", 0, model, **options)
            return
        peers = [await add(run, "first", 0, model, **options)]
        if strategy == "Decoupled":  # its quorum
            peers.append(await add(run, "second", 0, model, **options))
        first = peers[0]
        for trainer in peers:
            run.swarm.spawn(trainer.name, trainer.train(4, duration_s=0.25, until=lambda: False))
        while first.participant.epoch < 2:
            await sim.sleep(0.5)
        late = await add(run, "late", 1, model, **options)
        peers.append(late)
        training = run.swarm.spawn("late", late.train(4, duration_s=0.25, until=lambda: False))
        while late.participant.epoch < 4:
            await sim.sleep(0.5)
        assert late.downloads, late.failed_downloads
        run.announce_end(max(each.participant.epoch for each in peers) + 3)
        await training
        while not all(each.finished for each in peers):
            await sim.sleep(0.5)
        assert late.participant.contribution.contributed > 0
        assert_equal(first, late, whole=strategy != "local updates", same_names=strategy != "Decoupled")
        assert not run.warnings, run.warnings
        check_checkpoint(first, made(model, 2), tmp_path)
        await run.close()

    sim.run(play, seed=3)


def check_checkpoint(trainer: Trainer, other: Unusual, folder: Path) -> None:
    """What is saved of this peer is what another one has that goes on from it."""
    for number, participant in enumerate(trainer.fragments):
        training, place = participant.training, folder / str(number)
        place.mkdir()
        state = share(training, participant.state, participant.own.committed)
        write(place, copy_of("run", state, participant.state, {}, training.tensors.all, {}), None)
        saved = newest(place, "run", print)
        assert saved is not None
        assert saved.name == participant.state
        assert all(map(torch.equal, saved.tensors, training.export()[1]))
        if len(trainer.fragments) == 1 and type(training) is TrainingState:
            resumed = TrainingState(optimizer_of(other))
            resumed.load(saved.values, saved.tensors)
            assert all(map(torch.equal, resumed.export()[1], training.export()[1]))
            assert resumed.export()[0] == training.export()[0]


@pytest.mark.parametrize("codec", [None, Uniform8BitQuantization()], ids=["none", "uniform8bit"])
@pytest.mark.parametrize("model", [pytest.param(model, marks=marks(model)) for model in (*MODELS, LARGE)])
def test_an_averager_sets_each_tensor_to_the_mean(model: str, codec: CompressionBase | None) -> None:
    """Of any shape and memory format; a codec changes no more than it says."""
    ours, theirs = ([each.detach() for group in made(model, seed).groups for each in group] for seed in (0, 1))
    means = [(a + b) / 2 for a, b in zip(ours, theirs, strict=True)]

    async def main() -> None:
        trial = Trial(compression=codec)
        for name, tensors in (("one", ours), ("two", theirs)):
            await trial.add(name, tensors, target_group_size=2)
        await asyncio.gather(trial.begin("one"), trial.begin("two"))
        assert not trial.warnings
        await trial.close()

    sim.run(main, seed=1)
    for mine, other, mean in zip(ours, theirs, means, strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, mean, rtol=0, atol=1e-12 if codec is None else 0.05)
