"""A peer that steps alone, a moment before the others: these keep what they train."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.strategies import DiLoCo, LocalSGD, LocalUpdates, Strategy, StreamingDiLoCo
from tests.sim.optimizer_kit import Run, Trainer
from tests.situations import reaches

BATCH, BATCH_S = 4, 0.5
HONEST = "p0", "p1", "p2"


@contextlib.contextmanager
def deaf(run: Run) -> Iterator[None]:
    """The last peer hears no word of the run, and steps alone with what it has trained."""
    heard: list[Any] = [fragment._known for fragment in run.trainers["last"].fragments]
    for known in heard:
        for peer in known.peers:
            known.lost(peer, asyncio.get_running_loop().time())
        known.heard = known.relayed = lambda *_, **__: False
    yield
    for known in heard:
        del known.heard, known.relayed


@contextlib.contextmanager
def far(run: Run) -> Iterator[None]:
    """All that the last peer sends and hears comes 0.9 s late."""
    for name in HONEST:
        run.swarm.network.set_link("last", name, latency_s=0.9)
    yield
    for name in HONEST:
        run.swarm.network.set_link("last", name, latency_s=0.01)


def contributed(run: Run) -> float:
    """The samples of the first peers in their states."""
    each = [fragment.contribution for name in HONEST for fragment in run.trainers[name].fragments]
    return sum(contribution.contributed for contribution in each)


Fault = Callable[[Run], AbstractContextManager[None]]


def play(fault: Fault, strategy: Strategy | None, seed: int, *, seconds: float, part: float = 1 / 3) -> None:
    """Three peers keep four fifths of their pace beside this one, and all four come together again.

    It does this part of what the three do together.
    """

    async def main() -> None:
        run = Run(target=4 * 3 * BATCH if strategy is None else 1)
        trainers: list[Trainer] = [await run.add(name, strategy=strategy) for name in (*HONEST, "last")]
        for name, trainer in run.trainers.items():
            batch_s = BATCH_S if name in HONEST else BATCH_S / (3 * part)
            run.swarm.spawn(name, trainer.train(BATCH, duration_s=batch_s, until=asyncio.Event().is_set))
        await sim.sleep(8.0)

        async def pace(seconds: float) -> float:
            before = contributed(run)
            await sim.sleep(seconds)
            return (contributed(run) - before) / seconds

        calm = await pace(8.0)
        with fault(run):
            assert await pace(seconds) >= 0.8 * calm
        await sim.sleep(8.0)
        assert await pace(8.0) >= 0.8 * calm

        def together() -> bool:
            each = zip(*(trainer.fragments for trainer in trainers), strict=True)
            return all(len({fragment.state.digest for fragment in fragments}) == 1 for fragments in each)

        async with asyncio.timeout(2.0):  # some may be about to take the step that others have taken
            while not together():
                await sim.sleep(0.01)
        if strategy is None:
            first, *others = (trainer.parameters for trainer in trainers)
            assert all(torch.equal(one, other) for each in others for one, other in zip(first, each, strict=True))

    sim.run(main, seed=seed)


def test_one_peer_that_merges_alone_took_what_all_others_had_trained() -> None:
    """Three peers gave up their 48 samples for its 16 at each merge, and contributed nothing for as long as it did."""
    with reaches("peers make their own step, though another one has gone ahead"):
        play(deaf, DiLoCo(4), 1, seconds=14.0)


@pytest.mark.parametrize("part", [0.7, pytest.param(0.9, marks=pytest.mark.long)])
def test_a_deaf_peer_that_is_nearly_as_fast_as_all_others_took_what_they_had_trained(part: float) -> None:
    """Its small steps were ahead for a moment before each large one: the three contributed nothing in a minute."""
    play(deaf, DiLoCo(4), 1, seconds=30.0, part=part)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", [None, pytest.param(LocalUpdates(48, waits=True), id="local updates that wait")])
@pytest.mark.parametrize("part", [1 / 3, 0.7])
def test_a_deaf_peer_that_rounds_wait_for_took_all_steps(strategy: Strategy | None, part: float) -> None:
    """Rounds waited for it until it had enough for a step alone: nearly as fast as all others, it took each step.

    No such round counted as one that it had missed, as it was not at the state any more when the group began.
    """
    play(deaf, strategy, 1, seconds=18.0, part=part)


STRATEGIES = [
    pytest.param(DiLoCo(4), id="diloco"),
    pytest.param(LocalSGD(4), id="localsgd"),
    pytest.param(StreamingDiLoCo(8, fragments=2, overlap=2), id="stream"),
    pytest.param(None, id="synchronous"),
    pytest.param(LocalUpdates(48), id="local updates"),
    pytest.param(LocalUpdates(48, waits=True), id="local updates that wait"),
]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", [deaf, far])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peers_keep_their_pace_beside_one_that_steps_alone(
    fault: Fault, strategy: Strategy | None, soak: Callable[[int, int], int]
) -> None:
    """Whatever the strategy, and however it comes that it steps alone."""
    for seed in range(2, 2 + soak(1, 8)):
        play(fault, strategy, seed, seconds=24.0)
