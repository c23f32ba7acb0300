"""Two peers of one process that merge over sockets, each with its own thread: what they trained, one process trains."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

import shoal
from shoal.strategies import DiLoCo, LocalSGD, Merges, StreamingDiLoCo
from shoal.strategies.outer import LocalSteps
from tests.integration.workers import until
from tests.replay import Recorder, Replay
from tests.sim.optimizer_kit import backward, model

BATCH, MERGES = 4, 12


def made() -> tuple[list[torch.Tensor], torch.optim.Optimizer, None]:
    """Parameters, and an optimizer at a high rate: a gradient of other weights would show at once."""
    parameters = model()
    return parameters, torch.optim.SGD(parameters, lr=0.4), None


def train(peer: int, swarm: shoal.Optimizer, parameters: list[torch.Tensor], recorder: Recorder) -> None:
    """Until the run is over."""
    number = 0
    while not swarm.finished:
        recorder.number = number
        for _ in range(60 + 60 * peer):  # so that a merge takes less time than a batch, and one peer is faster
            backward(parameters, peer, number, BATCH)
        swarm.step()
        number += 1


@pytest.mark.parametrize(
    "strategy",
    [LocalSGD(1), DiLoCo(5), StreamingDiLoCo(4, fragments=1, overlap=2)],
    ids=lambda each: type(each).__name__,
)
def test_what_two_peers_train_over_sockets_one_process_trains(strategy: Merges) -> None:
    """Bit for bit: after a merge both go on from the anchor, whatever batch was under way when it began."""
    with ExitStack() as stack:
        first = stack.enter_context(shoal.DHT(start=True))
        dhts = [first, stack.enter_context(shoal.DHT(initial_peers=[first.invite("run")], start=True))]
        models = [made() for _ in dhts]
        swarms = [
            stack.enter_context(
                shoal.Optimizer(dht=dht, run_id="run", strategy=strategy, batch_size_per_step=BATCH, optimizer=inner)
            )
            for dht, (_, inner, _) in zip(dhts, models, strict=True)
        ]
        recorders = []
        for swarm in swarms:
            assert isinstance(swarm._training, LocalSteps)
            recorders.append(Recorder(swarm._training, swarm.collaboration.contribution))
            swarm.announce_end(MERGES)
        until(lambda: all(len(swarm.status().peers) == 2 for swarm in swarms))
        with ThreadPoolExecutor(len(swarms)) as pool:
            work = [
                pool.submit(train, peer, swarm, parameters, recorder)
                for peer, (swarm, (parameters, *_), recorder) in enumerate(zip(swarms, models, recorders, strict=True))
            ]
            for each in work:
                each.result(timeout=100.0)
        assert all(map(torch.equal, models[0][0], models[1][0]))

    def gradient(parameters: list[torch.Tensor], peer: int, number: int) -> None:
        backward(parameters, peer, number, BATCH)

    events = [recorder.events for recorder in recorders]
    assert Replay(strategy.merging, made, gradient, [[0, 1]], BATCH).check(events) == MERGES
