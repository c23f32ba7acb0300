"""hivemind's own tests of its optimizer, in all their modes, and its quickstart, with other imports."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

import shoal
from tests.integration.workers import LONG_S, until

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
    if peers == 1:  # hivemind allows 1.2 times as many
        assert done[0][1] == target_batch_size * total_epochs
    first.shutdown()


def test_a_client_counts_as_one_whatever_its_dht_does() -> None:
    """`client_mode` of the optimizer, on a DHT that listens."""
    with (
        shoal.DHT(start=True) as dht,
        shoal.Optimizer(
            dht=dht,
            run_id="client",
            target_batch_size=8,
            optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1),
            client_mode=True,
        ) as swarm,
    ):
        assert swarm.local_progress.client_mode
        assert swarm.tracker.global_progress.num_clients == 1


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


@pytest.mark.parametrize(
    ("offload_optimizer", "reuse_tensors", "sync_epoch_when_averaging"),
    [(False, False, False), (True, True, False), (True, False, False), (False, True, True), (True, False, True)],
)
def test_state_averager(*, offload_optimizer: bool, reuse_tensors: bool, sync_epoch_when_averaging: bool) -> None:
    """Two peers train towards opposite targets, average once in the middle, and at the end."""
    with shoal.DHT(start=True) as one, shoal.DHT(initial_peers=one.get_visible_maddrs(), start=True) as two:
        torch.manual_seed(1337)
        models = [torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)]
        extras = [(torch.randn(2, 2), -torch.rand(1)), (-torch.randn(2, 2), torch.rand(1))]
        averagers = [
            shoal.TrainingStateAverager(
                dht=dht,
                params=model.parameters(),
                extra_tensors=extra,
                start=True,
                optimizer=partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.9)),
                scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: 1.0 / max(1, t)),
                sync_epoch_when_averaging=sync_epoch_when_averaging,
                average_opt_statistics=("exp_avg_sq",),
                offload_optimizer=offload_optimizer,
                reuse_tensors=reuse_tensors,
                target_group_size=2,
                prefix="my_exp",
            )
            for dht, model, extra in zip((one, two), models, extras, strict=True)
        ]
        x = torch.ones(2)
        for step in range(20):
            for sign, model, averager in zip((1, -1), models, averagers, strict=True):
                functional.mse_loss(model(x), sign * torch.ones(3)).mul(2).backward()  # type: ignore[no-untyped-call]
                averager.step(
                    optimizer_step=True,
                    zero_grad=True,
                    set_to_none=False,
                    averaging_round=(step == 10),
                    delay_averaging=sign == 1,
                )
        for model in models:
            assert model.weight.grad is not None
            assert not model.weight.grad.any()
        # A step or two count for nothing: those that the first one takes before it sets its parameters to the average.
        assert models[0](x).mean() > models[1](x).mean() + 0.5
        for mine, theirs in zip(*extras, strict=True):
            torch.testing.assert_close(mine, theirs)
        statistics = [each.optimizer.state_dict()["state"][0]["exp_avg_sq"].clone() for each in averagers]
        assert not torch.allclose(*statistics)
        averagers[0].step(increment_epoch=True)
        for averager in averagers:
            averager.step(increment_epoch=True, averaging_round=True, delay_averaging=True)
        for averager in averagers:
            averager.step(wait_for_delayed_updates=True)
        torch.testing.assert_close(models[0](x), models[1](x))
        for averager in averagers:
            found = averager.optimizer.state_dict()["state"][0]["exp_avg_sq"]
            torch.testing.assert_close(found, sum(statistics) / 2)
        assert averagers[0].local_epoch == 2
        assert averagers[1].local_epoch == (2 if sync_epoch_when_averaging else 1)


def test_load_state_from_peers() -> None:
    """Epoch, parameters and rate of a peer that others may download from."""
    common: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "scheduler": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: 1.0 / max(1, t)),
        "target_group_size": 2,
        "prefix": "my_exp",
        "start": True,
    }
    with shoal.DHT(start=True) as one, shoal.DHT(initial_peers=one.get_visible_maddrs(), start=True) as two:
        first, second = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
        mine = shoal.TrainingStateAverager(dht=one, params=first.parameters(), allow_state_sharing=False, **common)
        theirs = shoal.TrainingStateAverager(dht=two, params=second.parameters(), **common)
        theirs.local_epoch = 1337
        second.weight.data[...] = 42
        until(lambda: mine.load_state_from_peers(timeout=LONG_S))
        assert mine.local_epoch == 1337
        assert bool((first.weight == 42).all())
        assert mine.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 1337)


def test_grad_averager() -> None:
    """Batches of 2 and 3 samples; one of the peers leaves its gradients where torch has added them up.

    That of PowerSGD has the whole gradient after the first steps only: `test_power_sgd` has its numbers.
    """
    shape = (5, 5)
    with shoal.DHT(start=True) as one, shoal.DHT(initial_peers=one.get_visible_maddrs(), start=True) as two:
        weights = [torch.nn.Parameter(torch.zeros(shape)), torch.nn.Parameter(torch.zeros(shape))]
        averagers = [
            shoal.GradientAverager(
                [weight], dht=dht, prefix="test", target_group_size=2, reuse_grad_buffers=reuse, start=True
            )
            for weight, dht, reuse in zip(weights, (one, two), (False, True), strict=True)
        ]
        controls = [averager.schedule_step(shoal.get_dht_time() + 2) for averager in averagers]
        for i in range(10):
            which = 0 if i % 3 == 0 else 1
            loss = functional.mse_loss(weights[which], (1 - 2 * which) * torch.ones(shape))
            loss.backward()  # type: ignore[no-untyped-call]
            averagers[which].accumulate_grads_(batch_size=2 + which)
            if which == 0:
                weights[0].grad = None
        samples, times = (8, 18), (4, 6)
        assert [each.local_samples_accumulated for each in averagers] == list(samples)
        assert [each.local_times_accumulated for each in averagers] == list(times)
        for averager, control in zip(averagers, controls, strict=True):
            averager.step(control=control, wait=False)
        for control in controls:
            control.result()
        expected = torch.full(shape, (8 * -2 / 25 + 18 * 2 / 25) / 26)
        for weight, averager in zip(weights, averagers, strict=True):
            with averager.use_averaged_gradients():
                torch.testing.assert_close(weight.grad, expected)
            assert weight.grad is None or not torch.allclose(weight.grad, expected)


@pytest.mark.parametrize("factory", [shoal.GradientAverager, partial(shoal.PowerSGDGradientAverager, averager_rank=1)])
def test_grad_averager_wrong_shape(factory: Any) -> None:
    """A `ValueError` when it is made."""
    with shoal.DHT(start=True) as dht, pytest.raises(ValueError, match="averaged_grads"):
        factory(
            [torch.nn.Parameter(torch.zeros(5, 5))],
            dht=dht,
            prefix="test_fail",
            target_group_size=2,
            reuse_grad_buffers=False,
            start=True,
            averaged_grads=[torch.zeros(5, 5, 1)],
        )
