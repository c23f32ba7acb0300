"""The metrics of a run, to each of the places that they can go to."""

from __future__ import annotations

import json
import math
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from shoal.events import Warned
from shoal.integrations.metrics import JsonLines, Metrics, Prometheus, SharedMean, TensorBoard, WandB, _mean
from tests.integration.workers import until


class Trainer:
    """A peer that takes every step alone: four samples each."""

    def __init__(self, dht: shoal.DHT) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.swarm = shoal.Optimizer(
            dht=dht,
            run_id="metrics",
            target_batch_size=4,
            batch_size_per_step=4,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.01),
        )

    def train(self, epochs: int) -> None:
        """So many epochs more."""
        last = self.swarm.local_epoch + epochs
        while self.swarm.local_epoch < last:
            self.swarm.zero_grad()
            self.model(torch.ones(4, 2)).mean().backward()
            self.swarm.step()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """One without a swarm."""
    with shoal.DHT(start=True) as dht:
        made = Trainer(dht)
        with made.swarm:
            yield made


def test_each_epoch_is_a_line(trainer: Trainer, tmp_path: Path) -> None:
    """With the numbers of the run; the file's folder is made, and a file that is there is gone on with."""
    file = tmp_path / "new" / "metrics.jsonl"
    for _ in range(2):
        with Metrics(trainer.swarm, JsonLines(str(file))) as metrics:
            for _ in range(3):
                before = len(file.read_text().splitlines())
                metrics.loss(2.0, 4)
                metrics.loss(math.inf if before == 1 else 5.0, 8)
                trainer.train(1)
                until(lambda before=before: len(file.read_text().splitlines()) > before)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["samples"] for line in lines] == [4] * 6
    assert [line["loss"] for line in lines] == [4.0, None, 4.0, 4.0, 4.0, 4.0]
    assert [line["contributed"] for line in lines] == [4, 8, 12, 16, 20, 24]
    assert all(line["peers"] == 1 and line["dropped"] == 0 and line["epoch_s"] > 0 for line in lines)
    assert all("members" not in line for line in lines), "steps that were taken alone"
    assert lines[-1]["swarm_loss"] == 4.0


def test_epochs_that_come_faster_than_they_are_taken_are_left_out(trainer: Trainer) -> None:
    """Not the last one. Training waits for no sink."""
    seen, go = list[int](), threading.Event()

    def slow(epoch: int, _: Mapping[str, float]) -> None:
        seen.append(epoch)
        assert go.wait(60)

    metrics = Metrics(trainer.swarm, slow)
    trainer.train(20)
    until(lambda: len(seen) == 1)
    go.set()
    metrics.close()
    metrics.close()
    trainer.train(1)
    assert len(seen) == 2
    assert seen[1] == 20


def test_every_so_many_epochs(trainer: Trainer) -> None:
    """Counted as the swarm counts them, and not from where this peer begins."""
    seen = list[int]()
    trainer.train(1)
    with Metrics(trainer.swarm, lambda epoch, _: seen.append(epoch), every=3):
        for _ in range(9):
            trainer.train(1)
            due = trainer.swarm.local_epoch // 3 * 3
            until(lambda due=due: not due or seen[-1:] == [due])
    assert seen == [3, 6, 9]


def test_a_sink_that_fails_is_told_of_once(trainer: Trainer) -> None:
    """The others get their metrics."""
    told, seen = list[str](), list[int]()
    trainer.swarm.dht.events.subscribe(lambda each: told.append(each.message) if isinstance(each, Warned) else None)

    def full(_epoch: int, _: Mapping[str, float]) -> None:
        raise OSError("no space left")

    with Metrics(trainer.swarm, full, lambda epoch, _: seen.append(epoch)):
        for epoch in (1, 2, 3):
            trainer.train(1)
            until(lambda epoch=epoch: epoch in seen)
    until(lambda: told != [])
    assert len(told) == 1
    assert told[0].startswith("metrics were not taken by full: OSError: no space left. Training and other sinks go on")


def test_tensorboard_and_wandb(trainer: Trainer, tmp_path: Path) -> None:
    """As `swarm/NAME`, over the epochs."""
    logged = list[dict[str, float]]()
    with Metrics(trainer.swarm, TensorBoard(str(tmp_path)), WandB(SimpleNamespace(log=logged.append))):
        for epoch in (1, 2):
            trainer.train(1)
            until(lambda epoch=epoch: len(logged) == epoch)
    assert [each["swarm/epoch"] for each in logged] == [1, 2]
    assert [each["swarm/contributed"] for each in logged] == [4, 8]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("swarm/contributed")] == [(1, 4.0), (2, 8.0)]


def test_prometheus_reads_the_last_metrics(trainer: Trainer) -> None:
    """And nobody listens afterwards. A port in use is an error that names it."""
    sink = Prometheus(0)

    def page() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics") as answer:
            return str(answer.read().decode())

    with pytest.raises(ConfigError, match=f"port {sink.port} of 127.0.0.1 cannot be listened at"):
        Prometheus(sink.port)
    with Metrics(trainer.swarm, sink) as metrics:
        metrics.loss(0.5, 4)
        trainer.train(1)
        until(lambda: "shoal_epoch 1.0" in page())
        assert "shoal_loss 0.5" in page()
        trainer.train(1)
        until(lambda: "shoal_epoch 2.0" in page())
        assert "shoal_loss NaN" in page(), "no loss was told since"
    with pytest.raises(OSError, match="refused"):
        page()


def test_the_mean_of_the_swarm_is_weighted() -> None:
    """Over all peers, by samples, as it was read since the call before."""
    with shoal.DHT(start=True) as first, shoal.DHT([first.invite()], start=True) as second:
        means = [SharedMean(dht, "loss") for dht in (first, second)]
        assert means[0].exchange(1.0, 10) is None
        means[1].exchange(4.0, 30)
        until(lambda: means[0].exchange(1.0, 10) == 3.25)
        until(lambda: means[1].exchange(None, 0) == 3.25)
        until(lambda: means[0].exchange(2.0, 10) == 3.5)


def test_the_mean_forgets_peers_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed peer's last loss, far above the others' of later, counted for ten minutes. A newer one always counts."""
    times, expires = [1000.0, 1020.0, 1050.0, 1051.0, 9000.0], list[float]()
    monkeypatch.setattr("shoal.integrations.metrics.get_dht_time", iter(times).__next__)
    with shoal.DHT(start=True) as dht:
        monkeypatch.setattr(dht, "store", lambda _key, _value, expires_at, *_, **__: expires.append(expires_at))
        mean = SharedMean(dht, "loss")
        for _ in times:
            mean.exchange(1.0, 8)
    assert expires == [1060.0, 1100.0, 1170.0, 1170.001, 9600.0]


@pytest.mark.parametrize(
    "said",
    [None, 3, {}, {b"a": 3}, {b"a": SimpleNamespace(value=[math.nan, 3])}, {b"a": SimpleNamespace(value=[1, 2])}],
)
def test_what_is_no_mean_counts_for_nothing(said: object) -> None:
    """Other peers may say anything."""
    assert _mean(said) is None


def test_wrong_arguments_are_named(trainer: Trainer, tmp_path: Path) -> None:
    """With what to give instead."""
    for make, message in (
        (lambda: Metrics(trainer.model), "swarm must be a shoal.Optimizer, got Linear"),  # type: ignore[arg-type]
        (lambda: Metrics(trainer.swarm, "file"), "each sink must be callable, such as JsonLines"),  # type: ignore[arg-type]
        (lambda: Metrics(trainer.swarm, every=0), "every must be a whole number of at least 1, got 0"),
        (lambda: JsonLines(str(tmp_path)), "cannot be written"),
        (lambda: WandB(None), r"run must be what wandb.init\(\) gave, got NoneType"),
        (lambda: Prometheus(-1), "port must be a whole number of at least 0, got -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
