"""`shoal.Optimizer` in loops of Accelerate, as its users write them, with its default settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from tests.integration.workers import Talk

accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def dht() -> Iterator[shoal.DHT]:
    """A peer."""
    with shoal.DHT(start=True) as started:
        yield started


def make() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    """A model in float64 and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1, dtype=torch.float64)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """A mean over the samples."""
    loss: torch.Tensor = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    return loss


def data_of(samples: int) -> torch.Tensor:
    """So many samples."""
    return torch.randn(samples, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def one_pass(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
    """A loop as the documentation of Accelerate has it."""
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, inputs))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("samples", "steps"),
    [(45, 1), (48, 2), (96, 4)],  # with 45 the last batch has 5 samples
)
def test_equals_plain_training(dht: shoal.DHT, samples: int, steps: int) -> None:
    """A pass of batches is one step of the swarm, on the mean over its samples. Their number is counted."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, inner = make()
    data = torch.utils.data.TensorDataset(data_of(samples))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    swarm = shoal.Optimizer(dht=dht, run_id="run", target_batch_size=samples, optimizer=inner, model=model)
    before = swarm.collaboration.state
    trained, optimizer, loader = accelerator.prepare(model, swarm, loader)
    assert swarm.collaboration.state == before  # Accelerate loads the optimizer's own state into it
    plain, reference = make()
    for epoch in range(1, 4):
        one_pass(accelerator, trained, optimizer, loader)
        assert swarm.local_epoch == epoch
        torch.autograd.backward([loss_of(plain, data_of(samples))])
        reference.step()
        reference.zero_grad()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    swarm.shutdown()


def test_save_state_and_load_state(dht: shoal.DHT, tmp_path: Path) -> None:
    """A state that is saved and loaded by Accelerate keeps its name; the schedule and the optimizer go on from it."""
    settings: dict[str, Any] = {"dht": dht, "target_batch_size": 16}
    outcomes = []
    for run in ("first", "second"):
        accelerator = accelerate.Accelerator(cpu=True)
        model, inner = make()
        swarm = shoal.Optimizer(run_id=run, optimizer=inner, model=model, **settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(swarm, lambda epoch: 1 / (1 + epoch))
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data_of(48)), batch_size=8)
        trained, optimizer, loader, _ = accelerator.prepare(model, swarm, loader, schedule)
        if run == "first":
            one_pass(accelerator, trained, optimizer, loader)
            assert swarm.local_epoch == 3
            accelerator.save_state(str(tmp_path))
            saved = swarm.collaboration.state
            one_pass(accelerator, trained, optimizer, loader)
            assert swarm.collaboration.state != saved
        accelerator.load_state(str(tmp_path))
        assert swarm.collaboration.state == saved
        one_pass(accelerator, trained, optimizer, loader)
        outcomes.append([swarm.local_epoch, schedule.get_last_lr(), [each.tolist() for each in model.parameters()]])
        swarm.shutdown()
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][:2] == [6, [pytest.approx(1e-2 / 7)]]


def test_a_scaler_that_leaves_a_step_out(dht: shoal.DHT) -> None:
    """`step_was_skipped` says so, and the samples of that batch do not count: neither then nor later."""
    accelerate.Accelerator(cpu=True)
    model, inner = make()
    swarm = shoal.Optimizer(dht=dht, run_id="run", target_batch_size=100, optimizer=inner, model=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(swarm, scaler=scaler)
    counts = []
    for factor in (1.0, float("inf"), 1.0):
        torch.autograd.backward([scaler.scale(loss_of(model, data_of(8)) * factor)])
        optimizer.step()
        optimizer.zero_grad()
        counts.append([optimizer.step_was_skipped, swarm.status().samples])
    assert counts == [[False, 8], [True, 8], [False, 16]]
    swarm.shutdown()


def test_a_step_that_is_refused_takes_no_count_away(dht: shoal.DHT) -> None:
    """The samples of the batch were forgotten with it: the next call asked for them."""
    model, inner = make()
    swarm = shoal.Optimizer(dht=dht, run_id="run", target_batch_size=100, optimizer=inner, model=model)
    torch.autograd.backward([loss_of(model, data_of(8))])
    with pytest.raises(ConfigError, match="batch_size must be a whole number of at least 1, got 0"):
        swarm.step(batch_size=0)
    swarm.step()
    assert swarm.status().samples == 8
    swarm.shutdown()


def test_without_a_batch_the_size_is_asked_for(dht: shoal.DHT) -> None:
    """Gradients that the model was not asked for have no known number of samples."""
    model, inner = make()
    swarm = shoal.Optimizer(dht=dht, run_id="run", target_batch_size=100, optimizer=inner, model=model)
    swarm.step()  # there is no gradient, so there is nothing to count
    torch.autograd.backward([torch.nn.functional.linear(data_of(8), model.weight).sum()])
    with pytest.raises(ConfigError, match=r"batch_size is missing: .* another method than forward"):
        swarm.step()
    swarm.step(batch_size=8)
    assert swarm.status().samples == 8
    swarm.shutdown()


@pytest.mark.long
@pytest.mark.parametrize(
    ("steps", "precision"), [(2, "bf16"), pytest.param(1, "no", marks=pytest.mark.long(full=True))]
)
def test_two_peers(steps: int, precision: str) -> None:
    """Two processes of Accelerate train together: the same bits at each epoch, and one end."""
    command = [sys.executable, "-m", "tests.integration.accelerate_peer", str(steps), precision]
    with Talk(command, library="transformers") as first, Talk(command, library="transformers") as second:
        first.write("")
        second.write(json.loads(first.line())[1])
        second.line()
        for talk in (first, second):
            talk.write("begin")
        said = [[json.loads(line) for line in talk.rest() if line.startswith("[")] for talk in (first, second)]
        assert [talk.wait() for talk in (first, second)] == [0, 0], [talk.errors() for talk in (first, second)]
    assert said[0][-1] == said[1][-1]
    assert said[0][-1][1][:2] == [20, [pytest.approx(1e-3)]]
    epochs = [{value[0]: value[1:] for kind, value in each if kind == "epoch"} for each in said]
    together = [epoch for epoch in epochs[0].keys() & epochs[1].keys() if epochs[0][epoch][1] == 2]
    assert len(together) > 5
    assert [epoch for epoch in together if epochs[0][epoch] != epochs[1][epoch]] == []
