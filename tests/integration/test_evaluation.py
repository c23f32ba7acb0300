"""`Evaluation`: one peer evaluates, all get the result."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.base.clock import get_dht_time
from shoal.errors import ConfigError
from shoal.events import Evaluated, Event
from shoal.integrations.evaluation import Evaluation
from shoal.integrations.metrics import JsonLines, Metrics


class Trainer:
    """A peer that trains, and evaluates when it is its turn."""

    def __init__(self, dht: shoal.DHT, every: int = 5) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.swarm = shoal.Optimizer(
            dht=dht,
            run_id="evaluated",
            target_batch_size=64,
            batch_size_per_step=4,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.01),
        )
        self.evaluated: list[int] = []
        self.results: list[Evaluated] = []
        self.evaluation = Evaluation(self.swarm, self.evaluate, every=every)

    def evaluate(self) -> dict[str, float]:
        """Note the epoch; a loss."""
        assert not torch.is_grad_enabled()
        self.evaluated.append(self.swarm.local_epoch)
        return {"loss": float(self.model(torch.ones(1, 2))), "epoch_then": self.swarm.local_epoch}

    def step(self) -> None:
        """One batch."""
        self.model(torch.ones(4, 2)).mean().backward()
        self.swarm.step()
        self.swarm.zero_grad()
        if (found := self.evaluation.after_step()) is not None:
            self.results.append(found)


@pytest.fixture
def dhts() -> Iterator[list[shoal.DHT]]:
    """Three peers that know each other."""
    with ExitStack() as opened:
        first = opened.enter_context(shoal.DHT(start=True))
        others = [opened.enter_context(shoal.DHT(first.get_visible_maddrs(), start=True)) for _ in range(2)]
        yield [first, *others]


def test_one_of_three_evaluates_and_all_get_the_result(dhts: list[shoal.DHT], tmp_path: Path) -> None:
    """Of one epoch once, with its own epoch; also as an event, and in the metrics."""
    trainers = [Trainer(dht) for dht in dhts]
    events: list[Event] = []
    dhts[0].events.subscribe(events.append)
    file = tmp_path / "metrics.jsonl"
    done = threading.Event()

    def train(trainer: Trainer) -> None:
        while not done.is_set():
            trainer.step()
            if all(len(each.results) >= 4 for each in trainers):
                done.set()

    with Metrics(trainers[0].swarm, JsonLines(str(file))):
        threads = [threading.Thread(target=train, args=(trainer,)) for trainer in trainers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert done.is_set()
    everything = sorted(epoch for trainer in trainers for epoch in trainer.evaluated)
    together = [epoch for epoch in everything if epoch > 10]  # before, they had not all met
    assert len(set(together)) == len(together), everything
    for trainer in trainers:
        epochs = [result.epoch for result in trainer.results]
        assert epochs == sorted(set(epochs))
        assert all(result.values["epoch_then"] == result.epoch for result in trainer.results)
    assert {result.peer for result in trainers[0].results} <= {dht.peer_id for dht in dhts}
    told = [event for event in events if isinstance(event, Evaluated)]
    assert told[: len(trainers[0].results)] == trainers[0].results
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert any(line.get("evaluated_epoch") in everything and "evaluated_loss" in line for line in lines)


def test_what_strangers_write_is_passed_over(dhts: list[shoal.DHT]) -> None:
    """Values of another form, of an epoch that is still to come, and of a state that lost against ours."""
    trainer = Trainer(dhts[0])
    trainer.evaluation._every = 2

    def store(dht: shoal.DHT, value: Any) -> None:
        assert dht.store("evaluated_evaluation", value, get_dht_time() + 60, dht.peer_id.to_bytes())

    def read() -> Evaluated | None:
        trainer.evaluation._read = trainer.swarm.dht.get("evaluated_evaluation", latest=True, return_future=True)
        trainer.evaluation._read.result(60)
        return trainer.evaluation._others(5)

    wrong = [4], [4, {"": 1.0}, 40], [4, {"loss": "low"}, 40], [-1, {"loss": 1.0}, 40], [4, {"loss": 1.0}, -1]
    for value in ("text", *wrong, [9, {"loss": 1.0}, 90], [6, {"loss": 1.0}, 0]):
        store(dhts[1], value)
        assert read() is None
    store(dhts[1], [4, {"loss": 1.0}, 40])
    assert (found := read()) is not None
    assert (found.epoch, found.values, found.peer) == (4, {"loss": 1.0}, dhts[1].peer_id)
    store(dhts[2], [4, {"loss": 2.0}, 39])
    assert read() is None
    store(dhts[2], [4, {"loss": 3.0}, 41])
    assert (found := read()) is not None
    assert (found.values, found.peer) == ({"loss": 3.0}, dhts[2].peer_id)


def test_wrong_arguments_are_named(dhts: list[shoal.DHT]) -> None:
    """Also what `evaluate` returns."""
    trainer = Trainer(dhts[0])
    for arguments, said in (
        ((None, float), "swarm must be a shoal.Optimizer"),
        ((trainer.swarm, 1.0), "evaluate must be a function"),
    ):
        with pytest.raises(ConfigError, match=said):
            Evaluation(*arguments)
    with pytest.raises(ConfigError, match="every must be a whole number"):
        Evaluation(trainer.swarm, float, every=0)
    for wrong in (None, "low", {"loss": None}, {1: 2.0}, {str(each): 0.0 for each in range(65)}):
        trainer.evaluation._evaluate = lambda wrong=wrong: wrong  # type: ignore[misc]
        with pytest.raises(ConfigError, match="evaluate must return a number"):
            trainer.evaluation._own(1)
