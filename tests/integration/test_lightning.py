"""Lightning's Trainer as a peer: `SwarmCallback` and `SwarmStrategy`, with the real library."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.data import PeerSampler
from shoal.errors import ConfigError
from shoal.events import EpochAdvanced, Event, Warned
from shoal.strategies import LocalSGD, Synchronous
from tests.integration.workers import Talk

lightning = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import (  # noqa: E402
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
)

from shoal.integrations.lightning import SwarmCallback, SwarmStrategy  # noqa: E402
from tests.integration.lightning_peer import BATCH, Module, held  # noqa: E402

# Its advice (more workers, a progress bar) and its use of what torch deprecates are not ours to mend.
pytestmark = [pytest.mark.filterwarnings("ignore::Warning:lightning"), pytest.mark.filterwarnings("ignore:.*treespec")]


@pytest.fixture
def dht() -> Iterator[shoal.DHT]:
    """A peer."""
    with shoal.DHT(start=True) as started:
        yield started


def warnings_of(dht: shoal.DHT) -> list[str]:
    """The warnings of this peer, as they come."""
    warned: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Warned):
            warned.append(event.message)

    dht.events.subscribe(hear)
    return warned


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> Any:
    """A Trainer that says little."""
    callbacks = (*callbacks, *options.pop("callbacks", []))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(**{**quiet, "default_root_dir": folder, "callbacks": [*callbacks], **options})


class ClipsItself(Module):
    """A module that clips its gradients in its own way."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """As users write it."""
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


def test_with_a_strategy_that_merges_steps_are_batches(dht: shoal.DHT, tmp_path: Path) -> None:
    """Lightning may clip them, and a peer alone trains as without a swarm; the run ends with a merge."""
    swarm, warned = SwarmCallback(dht=dht, run_id="run", strategy=LocalSGD(3)), warnings_of(dht)
    module, plain = (Module(8, schedule={"interval": "step"}) for _ in range(2))  # one batch is a pass: in any order
    options: dict[str, Any] = {"max_steps": 11, "gradient_clip_val": 0.5, "enable_checkpointing": False}
    trainer_of(tmp_path, swarm, **options).fit(module)
    assert swarm.optimizer is not None
    assert swarm.optimizer.local_epoch == 4
    assert [each[:32] for each in warned] == ["max_steps=11 is no multiple of t"]
    trainer_of(tmp_path, **{**options, "max_steps": 12}).fit(plain)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("made", "options"), [(Module, {"gradient_clip_val": 0.5}), (ClipsItself, {})])
def test_local_updates_are_clipped_by_lightning(
    dht: shoal.DHT, tmp_path: Path, made: Any, options: dict[str, Any]
) -> None:
    """Each batch is stepped from; the advice for clipping was `max_grad_norm`, which local updates refuse."""
    swarm = SwarmCallback(dht=dht, run_id="run", target_batch_size=8, use_local_updates=True)
    module, plain = made(8), made(8)
    trainer = trainer_of(tmp_path, swarm, max_steps=4, enable_checkpointing=False, **options)
    trainer.fit(module)
    trainer_of(tmp_path, max_steps=trainer.global_step, enable_checkpointing=False, **options).fit(plain)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


class Unclipped(Synchronous):
    """A strategy of gradients whose `__init__` takes no norm."""

    def __init__(self) -> None:
        super().__init__(8)


def test_a_strategy_that_clips_no_average_leaves_clipping_to_lightning(dht: shoal.DHT, tmp_path: Path) -> None:
    """The advice for clipping was `max_grad_norm`, which such a strategy refuses."""
    swarm = SwarmCallback(dht=dht, run_id="run", strategy=Unclipped())
    module, plain = Module(8), Module(8)
    options: dict[str, Any] = {"max_steps": 4, "gradient_clip_val": 0.5, "enable_checkpointing": False}
    trainer_of(tmp_path, swarm, **options).fit(module)
    trainer_of(tmp_path, **options).fit(plain)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("samples", "options", "by_hand"),
    [
        (45, {}, False),  # the last batch has 5 samples
        (40, {"accumulate_grad_batches": 2}, False),  # the last batch stands alone
        (40, {"accumulate_grad_batches": 4}, False),
        (45, {}, True),
    ],
)
def test_equals_plain_training(
    dht: shoal.DHT, tmp_path: Path, samples: int, options: dict[str, Any], by_hand: bool
) -> None:
    """A pass of batches is one step of the swarm, on the mean over its samples; validation does not count."""
    swarm, warned = SwarmCallback(dht=dht, run_id="run", target_batch_size=samples), warnings_of(dht)
    module, plain = (Module(samples, by_hand=by_hand, schedule={"interval": "step"}) for _ in range(2))
    trainer = trainer_of(tmp_path, swarm, max_steps=4, enable_checkpointing=False, **options)
    trainer.fit(module)
    assert swarm.optimizer is not None
    assert swarm.optimizer.local_epoch == 4
    assert not swarm.optimizer.is_alive()
    assert trainer.max_steps == 4
    assert warned == []
    made = plain.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    (inputs,) = plain.dataset()[:]
    for _ in range(4):
        loss = (plain.layer(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert swarm.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 5)


class TimeFirst(lightning.LightningModule):  # type: ignore[name-defined,misc]
    """A recurrent network as torch makes it by default: batches of 7 steps of 4 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = torch.nn.LSTM(3, 5), torch.nn.Linear(5, 1)

    def train_dataloader(self) -> Any:
        samples = [(torch.ones(7, 3) * number, torch.tensor([float(number)])) for number in range(4)]
        return torch.utils.data.DataLoader(samples, batch_size=4, collate_fn=_time_first)  # type: ignore[arg-type]

    def training_step(self, batch: Any, _: int) -> Any:
        inputs, targets = batch
        return (self.head(self.layer(inputs)[0][-1]) - targets).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _time_first(samples: Any) -> Any:
    return torch.stack([inputs for inputs, _ in samples], dim=1), torch.stack([target for _, target in samples])


class TimeFirstAlone(TimeFirst):
    """Its batch has no other tensor, which would say the number of samples, too."""

    def training_step(self, batch: Any, number: int) -> Any:
        return super().training_step((batch, torch.ones(1)), number)

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        loader.collate_fn = lambda samples: _time_first(samples)[0]
        return loader


@pytest.mark.parametrize(("made", "accumulate"), [(TimeFirst, 1), (TimeFirstAlone, 1), (TimeFirstAlone, 3)])
def test_time_first_data_was_counted_by_its_steps(
    dht: shoal.DHT, tmp_path: Path, made: type[TimeFirst], accumulate: int
) -> None:
    """The layers say where the batch is, as for any other model: 4 samples, not 7. With targets it was refused."""
    swarm, samples = SwarmCallback(dht=dht, run_id="run", target_batch_size=12), list[int]()
    dht.events.subscribe(lambda event: samples.append(event.samples) if isinstance(event, EpochAdvanced) else None)
    trainer = trainer_of(
        tmp_path, swarm, max_steps=3, enable_checkpointing=False, accumulate_grad_batches=accumulate, max_epochs=9
    )
    trainer.fit(made())
    assert samples == [12, 12, 12]


class Skips(Module):
    """Leaves out every second of its batches, as users do whose loss is not finite."""

    def __init__(self, **options: Any) -> None:
        super().__init__(48, **options)
        self.losses: list[torch.Tensor] = []

    def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(self.dataset(), batch_size=BATCH)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        loss = (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        if batch_idx % 2:
            return None
        self.losses.append(loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=1e-2)


class SkipsByHand(Skips):
    """The same by hand: it steps from two batches together, whether Lightning or torch goes backward."""

    def __init__(self, *, raw: bool, steps_always: bool, keeps_zeros: bool = False) -> None:
        super().__init__(by_hand=True)
        self.raw, self.steps_always, self.keeps_zeros = raw, steps_always, keeps_zeros

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        optimizer = self.optimizers()
        if self.keeps_zeros:
            optimizer.zero_grad(set_to_none=False)
        loss = super().training_step(batch, batch_idx)
        if loss is not None:
            loss.backward() if self.raw else self.manual_backward(loss)
        if self.steps_always or batch_idx == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not self.keeps_zeros)
        return loss


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize(
    ("made", "accumulate"),
    [
        (Skips, 1),
        (Skips, 2),
        (Skips, 3),
        (lambda: SkipsByHand(raw=False, steps_always=True), 1),
        (lambda: SkipsByHand(raw=True, steps_always=True), 1),
        (lambda: SkipsByHand(raw=True, steps_always=False), 1),
        (lambda: SkipsByHand(raw=True, steps_always=True, keeps_zeros=True), 1),
    ],
)
def test_batches_whose_training_step_returned_none_were_counted(
    dht: shoal.DHT, tmp_path: Path, made: Any, accumulate: int, *, sized: bool
) -> None:
    """They have no gradient, so they are no samples: a pass of six batches has three that count."""
    options: dict[str, Any] = {"batch_size": lambda batch: len(batch[0])} if sized else {}
    swarm, samples = SwarmCallback(dht=dht, run_id="run", target_batch_size=8, **options), list[int]()
    dht.events.subscribe(lambda event: samples.append(event.samples) if isinstance(event, EpochAdvanced) else None)
    module: Skips = made()
    trainer = trainer_of(
        tmp_path,
        swarm,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    trainer.fit(module)
    assert swarm.optimizer is not None
    by_hand = not getattr(module, "steps_always", True)
    expected = [16, 24] if by_hand else {1: [8] * 6, 2: [8] * 6, 3: [16, 8] * 2}[accumulate]
    assert samples == expected
    assert swarm.optimizer.collaboration.contribution.contributed == sum(expected)
    assert 8 * len(module.losses) == 48


@pytest.mark.parametrize("accumulate", [2, 3])
def test_the_gradient_beside_batches_that_were_left_out_is_the_mean_of_the_others(
    dht: shoal.DHT, tmp_path: Path, accumulate: int
) -> None:
    """Lightning divides by the number of batches that are accumulated: the swarm's step was smaller by that."""
    swarm = SwarmCallback(dht=dht, run_id="run", target_batch_size=24)
    module, plain = Skips(), Skips()
    options: dict[str, Any] = {"enable_checkpointing": False, "limit_val_batches": 0}
    trainer_of(tmp_path, swarm, max_steps=1, accumulate_grad_batches=accumulate, **options).fit(module)
    optimizer = plain.configure_optimizers()
    (inputs,) = plain.dataset()[:]
    chosen = inputs.unflatten(0, (-1, BATCH))[::2].flatten(0, 1)
    (plain.layer(chosen) - chosen.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


class Habits(Module):
    """Notes how many samples are in the gradients of its steps.

    Args:
        habit: what it does with a batch by hand; None: as usual.
        every: the batches of which its `optimizer_step` steps from one; 0: it calls the closure before each step.
    """

    def __init__(self, habit: Any = None, every: int = 1) -> None:
        super().__init__(48, by_hand=habit is not None)
        self.habit, self.every, self.true = habit, every, 0

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        return self.habit(self, batch[0], batch_idx) if self.habit else self.loss(batch[0])

    def loss(self, inputs: torch.Tensor) -> Any:
        return (self.layer(inputs) - inputs.sum(1, keepdim=True)).square().mean()

    def steps(self, inputs: torch.Tensor) -> None:
        self.optimizers().step()
        self.true += len(inputs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.every and (batch_idx + 1) % self.every == 0:
            optimizer.step(closure=optimizer_closure)
            self.true += BATCH
            return
        optimizer_closure()
        if not self.every and batch_idx % 2 == 0:
            optimizer.step()
            self.true += BATCH


def clears_after(module: Habits, inputs: Any, number: int) -> None:
    """By `zero_grad`, in the place of a step on each third batch; sometimes to zeros."""
    module.manual_backward(module.loss(inputs))
    if number % 3:
        module.steps(inputs)
    module.optimizers().zero_grad(set_to_none=number < 3)


def clears_before(module: Habits, inputs: Any, number: int) -> None:
    """By `zero_grad` at the beginning of a batch; it does not step from each third one."""
    module.optimizers().zero_grad()
    module.manual_backward(module.loss(inputs))
    if number % 3:
        module.steps(inputs)


def sums(module: Habits, inputs: Any, number: int) -> None:
    """Two losses of each half of the batch, and one step."""
    module.optimizers().zero_grad()
    for part in inputs.split(4):
        module.manual_backward(module.loss(part) / 2)
        module.loss(part).backward()
    module.steps(inputs)


def steps_from_parts(passes: int, size: int) -> Any:
    """As PPO does."""

    def habit(module: Habits, inputs: Any, number: int) -> None:
        for part in inputs.repeat(passes, 1).split(size):
            module.optimizers().zero_grad()
            module.manual_backward(module.loss(part))
            module.steps(part)

    return habit


@pytest.mark.parametrize(
    ("options", "true"),
    [
        ({"every": 2}, 24),
        ({"every": 4}, 8),
        ({"every": 0}, 24),
        ({"habit": clears_after}, 32),
        ({"habit": clears_before}, 32),
        ({"habit": sums}, 48),
        ({"habit": steps_from_parts(1, 2)}, 48),
        ({"habit": steps_from_parts(4, 4)}, 192),
    ],
)
@pytest.mark.parametrize("sized", [False, True])
def test_samples_whose_gradients_were_thrown_away_were_counted(
    dht: shoal.DHT, tmp_path: Path, options: dict[str, Any], true: int, *, sized: bool
) -> None:
    """Those that are in the gradients of steps count. Whether a step has a part of a batch is asked for."""
    several = {48: 2, 192: 4}.get(true) if options.get("habit") is not sums else None
    given: dict[str, Any] = {"batch_size": lambda batch: several or len(batch[0])} if sized else {}
    swarm, module = SwarmCallback(dht=dht, run_id="run", target_batch_size=1, **given), Habits(**options)
    trainer = trainer_of(tmp_path, swarm, max_epochs=1, enable_checkpointing=False, limit_val_batches=0)
    if several and not sized:
        with pytest.raises(ConfigError, match=r"several steps .* batch_size=lambda batch: .* how many each step has"):
            trainer.fit(module)
        return
    trainer.fit(module)
    assert swarm.optimizer is not None
    assert (module.true, swarm.optimizer.collaboration.contribution.contributed) == (true, true)


def test_one_peer_evaluates_and_the_result_is_logged(dht: shoal.DHT, tmp_path: Path) -> None:
    """In the mode to evaluate, without gradients; afterwards each part of the module is in the mode that it had."""
    module, seen = Module(), list[tuple[bool, bool]]()
    module.layer.eval()

    def evaluate() -> float:
        seen.append((module.training, torch.is_grad_enabled()))
        return len(seen) / 2

    options: dict[str, Any] = {"evaluate": evaluate, "evaluate_every": 2}
    swarm = SwarmCallback(dht=dht, run_id="run", target_batch_size=45, **options)
    module.on_train_start = module.layer.eval
    trainer = trainer_of(tmp_path, swarm, max_steps=4, enable_checkpointing=False)
    trainer.fit(module)
    assert seen == [(False, False)] * 2
    assert (module.training, module.layer.training) == (True, False)
    assert trainer.logged_metrics["evaluated_epoch"] == 4
    assert trainer.logged_metrics["evaluated_loss"] == 1.0


def peer(kind: str, max_steps: str) -> Talk:
    """A process that trains."""
    return Talk([sys.executable, "-m", "tests.integration.lightning_peer", kind, max_steps], library="lightning")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_two_trainers_are_peers() -> None:
    """With strategy and with callback: the same bits at each epoch, one end, other samples in spite of one seed."""
    with peer("callback", "30") as first, peer("strategy", "30") as second:
        first.write("")
        second.write(json.loads(first.line())[1])
        second.line()
        for talk in (first, second):
            talk.write("begin")
        said = [[json.loads(line) for line in talk.rest() if line.startswith("[")] for talk in (first, second)]
        assert [talk.wait() for talk in (first, second)] == [0, 0], [talk.errors() for talk in (first, second)]
    values = [dict(each) for each in said]
    assert values[0]["end"] == values[1]["end"]
    assert values[0]["end"][0] == 30
    epochs = [{value[0]: value[1:] for kind, value in each if kind == "epoch"} for each in said]
    together = [epoch for epoch in epochs[0].keys() & epochs[1].keys() if epochs[0][epoch][1] == 2]
    assert len(together) > 10
    assert [epoch for epoch in together if epochs[0][epoch] != epochs[1][epoch]] == []
    assert values[0]["seen"] != values[1]["seen"]
    for each in values:
        assert each["metrics"].keys() >= {"swarm_epoch", "swarm_peers", "swarm_loss"}
    assert 2.0 in (each["metrics"]["swarm_peers"] for each in values)


@pytest.mark.long
def test_an_interrupted_trainer_leaves(tmp_path: Path) -> None:
    """Ctrl+C: the process ends with 1, as with any Trainer, and has left the run."""
    with peer("callback", "1000000") as talk:
        talk.write("")
        talk.line()
        talk.write("begin")
        while json.loads(talk.line())[0] != "epoch":
            pass
        talk.signal(signal.SIGINT)
        assert any(line.startswith('["end"') for line in talk.rest())
        assert talk.wait() == 1
        assert "Traceback" not in talk.errors()


def test_checkpoints_of_lightning(dht: shoal.DHT, tmp_path: Path) -> None:
    """A Trainer goes on from its checkpoint: the state keeps its name, and the schedule its place."""
    settings: dict[str, Any] = {"dht": dht, "run_id": "run", "target_batch_size": 16}
    swarm = SwarmCallback(**settings)
    saving = ModelCheckpoint(tmp_path, save_last=True)
    module = Module(schedule={"interval": "step"})
    trainer_of(tmp_path, swarm, saving, max_steps=5).fit(module)
    assert swarm.optimizer is not None
    name, bits = swarm.optimizer.collaboration.state, held(module, swarm.optimizer)

    class Look(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.name, self.bits = trainer.optimizers[0].collaboration.state, held(pl_module, trainer.optimizers[0])

    look = Look()
    strategy = SwarmStrategy(**settings)
    other = Module(schedule={"interval": "step"})
    trainer = trainer_of(tmp_path, look, strategy=strategy, max_steps=7, enable_checkpointing=False)
    trainer.fit(other, ckpt_path=str(tmp_path / "last.ckpt"))
    assert (look.name, look.bits) == (name, bits)
    assert strategy.swarm.optimizer is not None
    assert strategy.swarm.optimizer.local_epoch == 7
    assert strategy.swarm.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)


def test_fit_twice_goes_on(dht: shoal.DHT, tmp_path: Path) -> None:
    """A second `fit` of the module goes on where the first one ended: with its end reached not a batch is drawn."""
    swarm = SwarmCallback(dht=dht, run_id="run", target_batch_size=16)
    module = Module()
    trainer = trainer_of(tmp_path, swarm, max_steps=3, enable_checkpointing=False)
    trainer.fit(module)
    bits, batches = [each.detach().clone() for each in module.parameters()], len(module.seen)
    trainer.fit(module)
    assert len(module.seen) == batches
    assert all(torch.equal(*both) for both in zip(bits, module.parameters(), strict=True))
    trainer_of(tmp_path, swarm, max_steps=5, enable_checkpointing=False).fit(module)
    assert swarm.optimizer is not None
    assert swarm.optimizer.local_epoch == 5
    assert {float(each["step"]) for each in swarm.optimizer.state.values()} == {5.0}


def test_an_error_in_a_batch_leaves_the_run(dht: shoal.DHT, tmp_path: Path) -> None:
    """The error of the module comes out of `fit`; the peer has left, and the next `fit` works."""

    class Fails(Module):
        fails = True

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            if self.fails and batch_idx == 3:
                raise RuntimeError("no such thing")
            return super().training_step(batch, batch_idx)

    module, swarm = Fails(), SwarmCallback(dht=dht, run_id="run", target_batch_size=45)
    trainer = trainer_of(tmp_path, swarm, max_steps=2, enable_checkpointing=False)
    with pytest.raises(RuntimeError, match="no such thing"):
        trainer.fit(module)
    assert swarm.optimizer is not None
    assert not swarm.optimizer.is_alive()
    assert trainer.max_steps == 2
    module.fails = False
    trainer_of(tmp_path, swarm, max_steps=2, enable_checkpointing=False).fit(module)
    assert swarm.optimizer.local_epoch == 2


def test_without_max_steps_a_peer_leaves_after_its_passes(dht: shoal.DHT, tmp_path: Path) -> None:
    """`max_epochs` counts passes of this peer, and ends no run. `batch_size` says how large a batch is."""
    swarm = SwarmCallback(dht=dht, run_id="run", target_batch_size=45, batch_size=lambda batch: len(batch[0]))
    trainer_of(tmp_path, swarm, max_epochs=2, enable_checkpointing=False).fit(Module())
    assert swarm.optimizer is not None
    assert swarm.optimizer.local_epoch == 2
    assert not swarm.optimizer.finished


@pytest.mark.parametrize("stops", [True, False])
def test_early_stopping_left_the_run_without_a_word(dht: shoal.DHT, tmp_path: Path, stops: bool) -> None:
    """It is told, as with the Trainer of transformers. The end of the run itself is not."""

    class Stops(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop |= stops

    warned = warnings_of(dht)
    swarm = SwarmCallback(dht=dht, run_id="run", target_batch_size=16)
    trainer_of(tmp_path, swarm, max_steps=2, callbacks=[Stops()], enable_checkpointing=False).fit(Module())
    left = [each for each in warned if "something else ends the training of this peer at epoch" in each]
    assert len(left) == stops, warned


def test_a_peer_sampler_deals_the_samples(dht: shoal.DHT, tmp_path: Path) -> None:
    """`train_dataloader` finds the swarm's optimizer in the Trainer."""

    class Dealt(Module):
        def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
            dataset = self.dataset()
            sampler = PeerSampler(dataset, self.trainer.optimizers[0])  # type: ignore[arg-type]
            return torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=sampler)

    module, swarm = Dealt(48), SwarmCallback(dht=dht, run_id="run", target_batch_size=16)
    trainer_of(tmp_path, swarm, max_steps=6, enable_checkpointing=False).fit(module)
    assert len(module.seen) >= 12


def test_buffers_are_listed_when_the_module_was_moved(dht: shoal.DHT, tmp_path: Path) -> None:
    """Those that were listed before `fit` are not the module's any more where Lightning moves it."""
    module = Module(8)
    module.register_buffer("moving", torch.zeros(3))
    swarm = SwarmCallback(
        dht=dht, run_id="run", target_batch_size=8, extra_tensors=lambda each: [each.moving], average_state_every=1
    )
    trainer_of(tmp_path, swarm, max_steps=1, enable_checkpointing=False).fit(module)
    assert swarm.optimizer is not None
    (shared,) = swarm.optimizer.collaboration.training.extra_tensors
    assert shared is module.moving


class TwoOptimizers(Module):
    """A module with two optimizers, as for a GAN."""

    def __init__(self, *, wrapped: dict[str, Any] | None = None) -> None:
        super().__init__(by_hand=True)
        self.wrapped = wrapped

    def configure_optimizers(self) -> Any:
        parts = [self.layer.weight], [self.layer.bias]
        made = [torch.optim.AdamW(part, lr=1e-2) for part in parts]
        if self.wrapped is None:
            return made
        return [
            shoal.Optimizer(run_id=f"part {index}", optimizer=each, **self.wrapped) for index, each in enumerate(made)
        ]

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.manual_backward(loss)
        for each in self.optimizers():
            each.step()
            each.zero_grad()
        return loss


def test_two_optimizers_are_two_runs_without_the_callback(dht: shoal.DHT, tmp_path: Path) -> None:
    """The advice for two optimizers works: a module returns a `shoal.Optimizer` for each."""
    module = TwoOptimizers(wrapped={"dht": dht, "target_batch_size": 16, "batch_size_per_step": 8})
    trainer = trainer_of(tmp_path, max_epochs=1, enable_checkpointing=False)
    trainer.fit(module)
    assert [each.local_epoch for each in trainer.optimizers] == [3, 3]


class WithoutTensors(Module):
    """A module whose batches have no tensor."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([{"text": "a"}] * 8, batch_size=2)  # type: ignore[arg-type]

    def training_step(self, batch: Any, _: int) -> Any:
        return self.layer.weight.sum()


class ListOfImages(Module):
    """A module whose batches are lists of images, as detectors take them: 8 of them counted 3, for their channels."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([torch.ones(3, 4, 4)] * 16, batch_size=8, collate_fn=list)  # type: ignore[arg-type]

    def training_step(self, batch: Any, _: int) -> Any:
        return self.layer.weight.sum()


class Wrapped(Module):
    """A module that has made the swarm's optimizer itself."""

    def configure_optimizers(self) -> Any:
        dht = shoal.DHT(start=True)
        self.made = shoal.Optimizer(
            dht=dht, run_id="own", target_batch_size=8, optimizer=torch.optim.SGD(self.parameters(), lr=0.1)
        )
        return self.made


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "clipping": ({"gradient_clip_val": 1.0}, Module, "give the SwarmCallback max_grad_norm="),
    "own clipping": ({}, ClipsItself, "would clip each batch, .* give the SwarmCallback max_grad_norm="),
    "devices": ({"devices": 2, "strategy": "ddp"}, Module, "strategy=DDPStrategy of the Trainer .* give devices=1"),
    "fast_dev_run": ({"fast_dev_run": True}, Module, "would end the run for all peers"),
    "min_steps": ({"min_steps": 3}, Module, "min_steps=3"),
    "min_epochs": ({"min_epochs": 3}, Module, "min_epochs=3"),
    "trials": ({"callbacks": [LearningRateFinder()]}, Module, "LearningRateFinder of the Trainer does not work"),
    "unfreezing": (
        {"callbacks": [BackboneFinetuning()]},
        Module,
        "BackboneFinetuning of the Trainer .* unfreezes layers",
    ),
    "averages": ({"callbacks": [EMAWeightAveraging()]}, Module, "EMAWeightAveraging of the Trainer .* evaluate a copy"),
    "averages of each peer at the end": (
        {"callbacks": [EMAWeightAveraging()], "limit_val_batches": 0},
        Module,
        "EMAWeightAveraging of the Trainer .* evaluate a copy",
    ),
    "two": ({}, TwoOptimizers, "returned 2 optimizers, and a run trains with one"),
    "passes": ({}, lambda: Module(schedule={}), r"\{'scheduler': ..., 'interval': 'step'\}"),
    "frequency": ({}, lambda: Module(schedule={"interval": "step", "frequency": 2}), "'frequency': 2"),
    "wrapped": ({}, Wrapped, "returned a shoal.Optimizer"),
    "no tensors": ({"limit_val_batches": 0}, WithoutTensors, "batch_size=lambda batch"),
    "images": ({"limit_val_batches": 0}, ListOfImages, "may be one for each sample.* batch_size=lambda batch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(dht: shoal.DHT, tmp_path: Path, case: str) -> None:
    """`fit` says what to write instead, and leaves nothing behind."""
    options, module, text = REFUSED[case]
    made = module()
    swarm = SwarmCallback(dht=dht, run_id="run", target_batch_size=16)
    trainer = trainer_of(tmp_path, swarm, **{"max_steps": 3, "enable_checkpointing": False, **options})
    if case == "devices":  # where it would start processes
        with pytest.raises(ConfigError, match=text):
            swarm.setup(trainer, made, "fit")
        return
    with pytest.raises(ConfigError, match=text):
        trainer.fit(made)
    assert swarm.optimizer is None or not swarm.optimizer.is_alive()
    if case == "wrapped":
        made.made.shutdown()
        made.made.dht.shutdown()
    trainer_of(tmp_path, swarm, max_steps=1, enable_checkpointing=False).fit(Module())


def test_a_schedule_of_measurements_is_refused(dht: shoal.DHT, tmp_path: Path) -> None:
    """`ReduceLROnPlateau`, as `shoal.Optimizer` refuses it."""

    class Plateau(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            made = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "monitor": "loss"}}

    swarm = SwarmCallback(dht=dht, run_id="run", target_batch_size=16)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        trainer_of(tmp_path, swarm, max_steps=1, enable_checkpointing=False).fit(Plateau())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"dht": None}, "dht must be a shoal.DHT"),
        ({"run_id": ""}, "run_id"),
        ({"target_batch_size": 0}, "target_batch_size must be"),
        ({"batch_size": 8}, "batch_size must be a function"),
        ({"evaluate": 0.5}, "evaluate must be a function"),
        ({"evaluate": float, "evaluate_every": 0}, "evaluate_every must be"),
        ({"batch_size_per_step": 8}, "batch_size_per_step is not given here"),
        ({"scheduler": object()}, "'interval': 'step'"),
        ({"scheduler_fn": object()}, "scheduler_fn is not given here: return the schedule"),
        ({"initial_peers": []}, "initial_peers is not given here: give it to the DHT"),
        ({"offload_optimizer": True}, "offload_optimizer=True is not for a Trainer"),
        ({"auxiliary": True}, "auxiliary=True is not for a Trainer"),
    ],
)
@pytest.mark.parametrize("kind", [SwarmCallback, SwarmStrategy])
def test_a_wrong_argument_is_refused(dht: shoal.DHT, kind: Any, wrong: dict[str, Any], text: str) -> None:
    """When it is made."""
    with pytest.raises(ConfigError, match=text):
        kind(**{"dht": dht, "run_id": "run", "target_batch_size": 16, **wrong})


def test_a_missing_argument_is_named() -> None:
    """By the strategy, which hands its arguments on."""
    with pytest.raises(ConfigError, match="dht is missing"):
        SwarmStrategy(run_id="run")


def test_a_strategy_and_a_callback_are_one_too_many(dht: shoal.DHT, tmp_path: Path) -> None:
    """Two peers in one Trainer are refused."""
    settings: dict[str, Any] = {"dht": dht, "run_id": "run", "target_batch_size": 16}
    trainer = trainer_of(
        tmp_path, SwarmCallback(**settings), strategy=SwarmStrategy(**settings), max_steps=1, enable_checkpointing=False
    )
    with pytest.raises(ConfigError, match="2 SwarmCallbacks"):
        trainer.fit(Module())
