"""Members of a round stay together: unequal paces, averages that arrive unevenly, states that take long to move."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.run.decide.phases import RunPhase
from shoal.sim import SimNetwork
from tests.sim.optimizer_kit import Run, Trainer


def train_together(
    batches_s: Sequence[float],
    *,
    target: int,
    average_state_every: int,
    epochs: int = 20,
    extra: int = 0,
    bandwidth_bytes_s: float | None = None,
    jitter_s: float = 0.0,
    seed: int,
) -> list[tuple[int, int]]:
    """Each peer's steps without a download, of `epochs`, and its downloads. No peer ever steps alone.

    Args:
        batches_s: how long a batch of 4 samples takes each peer.
        target: samples of an epoch.
        average_state_every: epochs between two averagings of the states.
        epochs: how far the fastest peer trains.
        extra: numbers in each state beside the parameters.
        bandwidth_bytes_s: of each peer.
        jitter_s: of the network.
        seed: of the simulation.
    """

    async def main() -> list[tuple[int, int]]:
        network = SimNetwork(seed, bandwidth_bytes_s=bandwidth_bytes_s, jitter_s=jitter_s)
        run = Run(target=target, average_state_every=average_state_every, network=network)
        names = [f"p{peer}" for peer in range(len(batches_s))]
        for name in names:
            await run.add(name, extra_tensors=[torch.zeros(extra)] if extra else ())
        await sim.sleep(3.0)
        trainers = [run.swarm.peer(name) for name in names]
        await asyncio.gather(
            *(
                run.swarm.run_on(
                    name,
                    trainer.train,
                    4,
                    duration_s=batch_s,
                    until=lambda: max(trainer.participant.epoch for trainer in trainers) >= epochs,
                )
                for name, trainer, batch_s in zip(names, trainers, batches_s, strict=True)
            )
        )
        assert not run.warnings, run.warnings
        assert not any(trainer.alone for trainer in trainers)
        await run.close()
        return [(len(trainer.epochs), trainer.downloads) for trainer in trainers]

    return sim.run(main, seed=seed)


def assert_all_in(results: list[tuple[int, int]], epochs: int = 20) -> None:
    """Every peer took at least 95% of the steps, and downloaded nothing."""
    assert all(steps >= 0.95 * epochs and not downloads for steps, downloads in results), results


@pytest.mark.parametrize(("batches_s", "most"), [((0.02, 0.02), 4.0), ((0.02, 0.021), 3.2)])
def test_peers_with_short_epochs_waited_for_the_pause_between_two_words(
    batches_s: tuple[float, float], most: float
) -> None:
    """One batch of each is a step. They heard of it when a third one had begun: now a second one has, at most."""

    async def main() -> None:
        run = Run(target=2, network=SimNetwork(1, latency_s=0.0002))
        trainers = [await run.add(name) for name in ("a", "b")]
        await sim.sleep(3.0)

        async def train(epoch: int) -> int:
            """Train until this epoch; returns the number of batches until then."""
            works = [
                run.swarm.run_on(
                    name, each.train, 1, duration_s=batch_s, until=lambda: len(trainers[0].epochs) >= epoch
                )
                for name, each, batch_s in zip(("a", "b"), trainers, batches_s, strict=True)
            ]
            await asyncio.gather(*works)
            return sum(trainer.batches_done for trainer in trainers)

        first = await train(10)  # in which nobody knows yet what a step takes
        assert await train(50) - first <= 40 * most
        await run.close()

    sim.run(main, seed=1)


@pytest.mark.parametrize(
    ("target", "average_state_every"),
    [(160, 4), *(pytest.param(*each, marks=pytest.mark.long) for each in ((200, 1), (400, 4)))],
)
def test_averaging_states_does_not_expel_a_slow_trainer(target: int, average_state_every: int) -> None:
    """The first peer with the average saw itself as the whole swarm, and stepped without those still in a batch."""
    assert_all_in(train_together([0.02, 0.02, 0.5], target=target, average_state_every=average_state_every, seed=1))


@pytest.mark.long
@pytest.mark.parametrize("average_state_every", [pytest.param(1, marks=pytest.mark.long(full=True)), 4])
def test_averaging_large_states_expels_neither_of_two_equal_peers(average_state_every: int) -> None:
    """The average comes a moment earlier to one; it trained alone from then on, the other downloaded for ever."""
    results = train_together(
        [0.1, 0.1], target=80, average_state_every=average_state_every, extra=1_000_000, bandwidth_bytes_s=1e6, seed=0
    )
    assert_all_in(results)


@pytest.mark.long
def test_a_member_that_takes_long_to_take_the_step_is_not_left_alone(soak: Callable[[int, int], int]) -> None:
    """A busy machine and a large state: the other one had the samples of its next step at once, and went on alone."""

    async def main() -> None:
        run = Run(target=4, width=1024, network=SimNetwork(2, bandwidth_bytes_s=62e3))  # a round takes about a second
        names = ["p0", "p1"]
        for name in names:
            await run.add(name)
        await sim.sleep(3.0)
        trainers = [run.swarm.peer(name) for name in names]
        decide = trainers[1].participant.turn.decide

        async def decide_late(timeout_s: float) -> RunPhase:
            if (phase := await decide(timeout_s)) is RunPhase.STEPPING:
                await sim.sleep(0.8)
            return phase

        trainers[1].participant.turn.decide = decide_late  # type: ignore[method-assign]

        def over() -> bool:
            return trainers[0].participant.epoch >= soak(6, 40)

        work = (run.swarm.run_on(name, run.swarm.peer(name).train, 4, duration_s=0.02, until=over) for name in names)
        await asyncio.gather(*work)
        await run.close()
        assert [trainer.alone for trainer in trainers] == [0, 0]
        assert [trainer.downloads for trainer in trainers] == [0, 0]

    sim.run(main, seed=2)


def test_a_peer_with_long_batches_slows_the_others_down_for_good() -> None:
    """Its samples never count, and each epoch waited for it. 80 of them: 12.1 s without it, 49 s with it, now 18."""

    async def main() -> float:
        run = Run(target=64)
        for name in ("p0", "p1", "slow"):
            await run.add(name)
        await sim.sleep(3.0)
        began, fast = asyncio.get_running_loop().time(), run.swarm.peer("p0")

        def over() -> bool:
            return fast.participant.epoch >= 80

        await asyncio.gather(
            *(
                run.swarm.run_on(name, run.swarm.peer(name).train, 4, duration_s=batch_s, until=over)
                for name, batch_s in (("p0", 0.01), ("p1", 0.01), ("slow", 0.7))
            )
        )
        took_s = asyncio.get_running_loop().time() - began
        assert not fast.downloads
        await run.close()
        return took_s

    took_s = sim.run(main, seed=1)
    assert took_s < 20.0, took_s


PACE_S = 40.0
EPOCH_S = 1.25


@functools.cache
def pace(slow_s: float | None) -> tuple[int, list[bool]]:
    """Epochs of two peers with batches of 0.25 s in `PACE_S`, and for each batch of a slow one: if it downloaded."""

    async def main() -> tuple[int, list[bool]]:
        run, loop = Run(target=32), asyncio.get_running_loop()
        names, downloaded = ["p0", "p1"] if slow_s is None else ["p0", "p1", "slow"], list[bool]()
        for name in names:
            await run.add(name)
        await sim.sleep(3.0)
        end = loop.time() + PACE_S

        async def train_slowly(trainer: Trainer, batch_s: float) -> None:
            while loop.time() < end:
                before = len(trainer.participant.takeover.downloads)
                await trainer.take_batch(4, duration_s=batch_s)
                downloaded.append(len(trainer.participant.takeover.downloads) > before)

        def train(name: str) -> Coroutine[Any, Any, None]:
            trainer = run.swarm.peer(name)
            if slow_s is not None and name == "slow":
                return train_slowly(trainer, slow_s)
            return trainer.train(4, duration_s=0.25, until=lambda: loop.time() > end)

        await asyncio.gather(*(run.swarm.run_on(name, train, name) for name in names))
        epoch, downloads = run.swarm.peer("p0").participant.epoch, run.swarm.peer("p0").downloads
        await run.close()
        assert not downloads
        return epoch, downloaded

    return sim.run(main, seed=1)


@pytest.mark.parametrize(
    "epochs",
    [
        1.2,
        pytest.param(2.0, marks=pytest.mark.long),
        *(pytest.param(each, marks=pytest.mark.long(full=True)) for each in (1.5, 1.9, 2.5)),
    ],
)
def test_a_peer_that_came_just_in_time_and_gave_nothing_slowed_the_others_down_for_good(epochs: float) -> None:
    """Its batch was a little shorter than the epoch and the patience: 41 or 33 epochs a minute instead of 48."""
    alone, _ = pace(None)
    assert alone == pytest.approx(PACE_S / EPOCH_S, abs=1)
    beside, downloaded = pace(epochs * EPOCH_S)
    assert beside >= 0.9 * alone
    assert not any(a and b for a, b in itertools.pairwise(downloaded))


def check_grid(peers: int, epochs_to_move: float, average_state_every: int, epochs: int = 20) -> None:
    """Batches of 0.02 to 0.5 s, epochs of a second; a state takes a part of an epoch to move, or several."""
    extra, seed = 100_000, peers
    batches_s = [0.02 * 25 ** (peer / (peers - 1)) for peer in range(peers)]
    results = train_together(
        batches_s,
        target=round(sum(4 / batch_s for batch_s in batches_s)),
        average_state_every=average_state_every,
        epochs=epochs,
        extra=extra,
        bandwidth_bytes_s=4 * extra / epochs_to_move,
        jitter_s=0.02,
        seed=seed,
    )
    assert_all_in(results, epochs)


@pytest.mark.parametrize(("peers", "epochs_to_move"), [(2, 5.0), pytest.param(3, 1.0, marks=pytest.mark.long)])
def test_peers_of_unequal_paces_stay_together(peers: int, epochs_to_move: float) -> None:
    """A state takes as long to move as an epoch lasts, or five times as long."""
    check_grid(peers, epochs_to_move, 4)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("average_state_every", [0, 4])
def test_peers_of_unequal_paces_stay_together_on_a_grid(
    average_state_every: int, soak: Callable[[int, int], int]
) -> None:
    """2 to 8 peers; states that take 0.1 to 5 epochs to move."""
    grid = [*itertools.product([2, 3, 5, 8], [0.1, 1.0, 5.0])]
    for peers, epochs_to_move in grid[: soak(1, len(grid))]:
        check_grid(peers, epochs_to_move, average_state_every, soak(20, 40))
