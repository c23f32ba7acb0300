"""A case of the study trained by shoal itself: its optimizer's code on every step, on a simulated network.

Each peer is on a host of its own. A batch takes it a quarter of a second (twice as long at half the speed), which is
longer than a merge takes: so peers of equal speed are in lockstep, and the reference can be compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from torch import Tensor

from benchmarks.strategies.reference import Peer, Strategy, weighted_mean
from benchmarks.strategies.task import PEERS, Task
from shoal.averaging import AveragerSettings, TensorLock
from shoal.compression import ErrorFeedback, codec_by_name
from shoal.optim import RunSettings
from shoal.run.chains import participants_of
from shoal.sim import SimHost, SimNetwork, Swarm, run, sleep
from shoal.strategies import Inner, Merges, Merging
from tests.sim.averaging_kit import SETTINGS, start_core
from tests.sim.optimizer_kit import Trainer

__all__ = ["is_of_shoal", "train"]

BATCH_S = 0.25
_PART_BYTES = AveragerSettings().part_size_bytes


def is_of_shoal(strategy: Strategy) -> bool:
    """Whether shoal has this strategy of the reference."""
    return strategy.average_codec in (None, strategy.codec) and strategy.decay == 1 and not strategy.resets


class _Ours(Merges):
    """The strategy of the reference as one of shoal's."""

    def __init__(self, merging: Merging) -> None:
        self.merging = merging


def _strategy(strategy: Strategy) -> _Ours:
    assert is_of_shoal(strategy)
    merging = Merging(
        every=int(strategy.every),
        outer=lambda anchor: strategy.outer([*anchor]),
        fragments=strategy.fragments,
        overlap=strategy.overlap or (0 if strategy.quorum is None else None),
        mixing=strategy.mixing,
        quorum=strategy.quorum,
    )
    return _Ours(merging)


class Learner(Trainer):
    """A peer of the study."""

    peer: Peer
    prepare: Callable[[int], None]

    def compute(self, number: int, size: int) -> None:
        """See `Trainer`."""
        self.prepare(number)
        self.peer.inner.zero_grad()
        self.peer.learn()


def train(
    task: Task,
    strategy: Strategy,
    speeds: tuple[float, ...],
    prepare: Callable[[Peer, float], None],
) -> list[Tensor]:
    """Train until all peers together have trained the task's samples; returns the mean of their parameters.

    Args:
        task: what is trained.
        strategy: how peers merge.
        speeds: of the peers, as a part of the fastest one's.
        prepare: called before each batch with its peer, and the part of the samples that is trained by its end.
    """

    async def main() -> list[Tensor]:
        swarm: Swarm[Learner] = Swarm(task.seed, network=SimNetwork(task.seed))
        first: list[SimHost] = []
        steps = task.samples / task.rows / sum(speeds)  # of the fastest

        async def add(number: int) -> None:
            async def factory(host: SimHost) -> Learner:
                first.append(host)
                learner = await _learner(host, first[0], task, strategy, number)
                learner.prepare = lambda batch: prepare(learner.peer, (batch + 1) / speeds[number] / steps)
                return learner

            await swarm.start_peer(f"p{number}", factory)

        async def work(name: str, speed: float) -> None:
            for _ in range(int(steps * speed)):
                await swarm.peer(name).take_batch(task.rows, duration_s=BATCH_S / speed)

        for number in range(PEERS):
            await add(number)
        await sleep(3.0)
        names = [f"p{number}" for number in range(PEERS)]
        trains = (swarm.run_on(name, work, name, speed) for name, speed in zip(names, speeds, strict=True))
        await asyncio.gather(*trains)
        mean = weighted_mean([swarm.peer(name).peer.parameters for name in names], [1.0] * PEERS)
        for name in names:
            for fragment in swarm.peer(name).fragments:
                await swarm.run_on(name, fragment.close)
            await swarm.run_on(name, swarm.peer(name).participant.core.close)
        return [tensor.detach() for tensor in mean]

    return run(main, seed=task.seed, max_turns=10**8)


async def _learner(host: SimHost, first: SimHost, task: Task, strategy: Strategy, number: int) -> Learner:
    peer, ours = task.peer(number), _strategy(strategy)
    core = await start_core(host, first)
    training = ours.training(Inner(peer.inner))
    codec = None if strategy.codec == "none" else ErrorFeedback(codec_by_name(strategy.codec))
    averager = msgspec.structs.replace(SETTINGS, part_size_bytes=_PART_BYTES)
    settings = RunSettings(run_id="study", strategy=ours, averager=averager)
    fragments = await participants_of(core, training, settings, lock=TensorLock(), compression=codec)
    for participant in fragments:
        await participant.start()
    learner = Learner(number, peer.parameters, fragments[0], fragments[1:])
    learner.peer = peer
    return learner
