"""hivemind's own test of its `Optimizer`, in its eight modes, and its quickstart: its programs with other imports."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

import shoal

MODES = {
    "synchronous": {},
    "delayed state averaging": {"delay_state_averaging": True},
    "delayed": {"delay_state_averaging": True, "delay_optimizer_step": True, "delay_grad_averaging": True},
    "reused gradients": {"reuse_grad_buffers": True},
    "reused gradients, delayed": {
        "delay_state_averaging": True,
        "delay_optimizer_step": True,
        "delay_grad_averaging": True,
        "reuse_grad_buffers": True,
    },
    "reused gradients, delayed step": {
        "delay_state_averaging": True,
        "delay_optimizer_step": True,
        "reuse_grad_buffers": True,
    },
    "local updates": {"use_local_updates": True},
    "local updates, delayed": {"use_local_updates": True, "delay_state_averaging": True},
}
NONE: dict[str, Any] = {
    "use_local_updates": False,
    "delay_state_averaging": False,
    "delay_optimizer_step": False,
    "delay_grad_averaging": False,
    "reuse_grad_buffers": False,
}


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("peers", "clients"), [(1, 0), (3, 1)])
def test_every_mode_trains(mode: str, peers: int, clients: int) -> None:
    """Each peer reaches the last epoch, and no more samples are computed than the epochs need, and a few in vain."""
    target_batch_size, total_epochs = 32, 3
    options = {**NONE, **MODES[mode]}
    first = shoal.DHT(start=True)
    features = torch.randn(100, 5)
    targets = features @ torch.randn(5, 1)
    together = threading.Barrier(peers)
    done: dict[int, tuple[shoal.Optimizer, int]] = {}
    failed: list[BaseException] = []

    def run_trainer(index: int, batch_size: int, *, client_mode: bool) -> None:
        model = torch.nn.Linear(5, 1)
        optimizer = shoal.Optimizer(
            run_id="test_run",
            target_batch_size=target_batch_size,
            batch_size_per_step=batch_size,
            params=model.parameters(),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            scheduler=partial(torch.optim.lr_scheduler.StepLR, gamma=0.5, step_size=1),
            dht=shoal.DHT(initial_peers=first.get_visible_maddrs(), client_mode=client_mode, start=True),
            tracker_opts={"max_refresh_period": 1.0},
            averager_opts={"request_timeout": 0.5},
            matchmaking_time=1.0,
            averaging_timeout=5.0,
            average_state_every=1,
            client_mode=client_mode,
            verbose=False,
            **options,
        )
        together.wait()
        optimizer.load_state_from_peers()
        together.wait()  # a batch takes no time here: one of them would be through before another begins
        samples = 0
        while optimizer.local_epoch < total_epochs:
            batch = torch.randint(0, len(features), (batch_size,))
            functional.mse_loss(model(features[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            samples += batch_size
            if not options["reuse_grad_buffers"]:
                optimizer.zero_grad()
        optimizer.shutdown()
        done[index] = optimizer, samples

    def trainer(*args: Any, **named: Any) -> None:
        try:
            run_trainer(*args, **named)
        except BaseException as error:  # noqa: BLE001 (the test's thread raises it)
            failed.append(error)
            together.abort()

    threads = [
        threading.Thread(
            target=trainer,
            args=(index, 4 + index),
            kwargs={"client_mode": index >= peers - clients},
        )
        for index in range(peers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    for index in range(peers):
        optimizer, _ = done[index]
        assert optimizer.local_epoch == optimizer.tracker.global_epoch == total_epochs
        assert optimizer.tracker.performance_ema.samples_per_second >= 0
        assert not optimizer.state_averager.is_alive()
        assert not optimizer.tracker.is_alive()
        assert (optimizer.grad_averager is None) == options["use_local_updates"]
        assert optimizer.grad_averager is None or not optimizer.grad_averager.is_alive()
        assert optimizer.scheduled_grads is None
        assert optimizer.local_progress.epoch == total_epochs
        assert optimizer.state_averager.scheduler._step_count == total_epochs + 1
        optimizer.dht.shutdown()
    if peers == 1:
        expected = target_batch_size * total_epochs
        assert expected <= done[0][1] <= 1.2 * expected + 4
    first.shutdown()


def test_the_quickstart_trains() -> None:
    """Local updates, as hivemind's documentation begins: two peers, the second one downloads the state of the first."""

    def begin(dht: shoal.DHT) -> tuple[torch.nn.Module, shoal.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        opt = shoal.Optimizer(
            dht=dht,
            run_id="my_cifar_run",
            batch_size_per_step=32,
            target_batch_size=128,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            use_local_updates=True,
            matchmaking_time=3.0,
            averaging_timeout=10.0,
            verbose=False,
        )
        return model, opt

    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    losses: dict[str, list[float]] = {"first": [], "second": []}
    with shoal.DHT(start=True) as one, shoal.DHT(initial_peers=one.get_visible_maddrs(), start=True) as two:
        first, second = begin(one), begin(two)
        second[1].load_state_from_peers()

        def train(name: str, model: torch.nn.Module, opt: shoal.Optimizer) -> None:
            generator = torch.Generator().manual_seed(len(name))
            opt.announce_end(60)
            while not opt.finished:
                batch = torch.randint(len(inputs), (32,), generator=generator)
                opt.zero_grad()
                loss = functional.cross_entropy(model(inputs[batch]), labels[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                opt.step()
                losses[name].append(float(loss.detach()))

        threads = [
            threading.Thread(target=train, args=(name, *each))
            for name, each in zip(losses, (first, second), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert first[1].use_local_updates
        for mine, theirs in zip(first[0].parameters(), second[0].parameters(), strict=True):
            assert torch.equal(mine, theirs)
        for each in losses.values():
            assert sum(each[-20:]) < 0.6 * sum(each[:20])
