"""`SwarmCallback`: the arguments of a Trainer that are refused, what becomes of the others, and checkpoints.

The Trainer is the real one; the swarm is one peer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from shoal.events import EpochAdvanced, Warned
from shoal.strategies import DiLoCo, Inner, Pace, SamplesPace, Strategy, Synchronous, Terms, TrainingState

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from shoal.integrations.transformers import SwarmCallback, latest_checkpoint  # noqa: E402
from tests.integration.trainer_peer import Interrupts, Sentences, tiny_model  # noqa: E402


@pytest.fixture(scope="module")
def dht() -> Iterator[shoal.DHT]:
    """A network of one."""
    with shoal.DHT(start=True) as started:
        yield started


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    """A function that makes arguments of a Trainer: 8 steps of the swarm, unless it is told otherwise."""

    def make(**changes: Any) -> Any:
        values = {"output_dir": str(tmp_path), "max_steps": 8, "use_cpu": True, "report_to": [], "save_strategy": "no"}
        quiet = {"disable_tqdm": True, "logging_strategy": "no", "dataloader_pin_memory": False}
        return transformers.TrainingArguments(**{**values, **quiet, **changes})

    return make


@pytest.fixture
def swarm_of(dht: shoal.DHT, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that makes a callback of a run of its own."""
    made: list[SwarmCallback] = []

    def make(model: torch.nn.Module, args: Any, **options: Any) -> SwarmCallback:
        values = {"dht": dht, "run_id": f"{request.node.name}-{len(made)}", "target_batch_size": 32}
        made.append(SwarmCallback(model, args, **{**values, **options}))
        return made[-1]

    yield make
    for each in made:
        each.optimizer.shutdown()


def trainer(swarm: SwarmCallback, model: Any, args: Any, **more: Any) -> Any:
    """As users write it, without what it prints."""
    given = {"train_dataset": Sentences(), "optimizers": swarm.optimizers, "callbacks": [swarm], **more}
    made = transformers.Trainer(model, args, **given)
    made.remove_callback(transformers.PrinterCallback)
    return made


# ----------------------------------------------------------------------------------------------------------- refusals


def test_the_schedule_is_as_long_as_a_run_that_merges(arguments: Any, swarm_of: Any) -> None:
    """The run ends with a merge: beyond the 8 steps of the schedule a cosine rose again."""
    args = arguments(lr_scheduler_type="cosine")
    swarm = swarm_of(tiny_model(), args, target_batch_size=None, strategy=DiLoCo(5))
    rates = [swarm.optimizers[1].lr_lambdas[0](batch) for batch in range(11)]
    assert rates == sorted(rates, reverse=True)
    assert rates[10] < 1e-12


@pytest.mark.parametrize(("every", "batches"), [(5, 10), ("0.1s", 0)])
def test_the_progress_bar_counts_batches(arguments: Any, swarm_of: Any, every: int | str, batches: int) -> None:
    """Where merges come at a time it took their number for one of batches: it was full after the first few."""
    seen: list[int] = []
    bar = transformers.TrainerCallback()
    bar.on_train_begin = lambda args, state, control, **_: seen.append(state.max_steps)
    model, args = tiny_model(), arguments(max_steps=6)
    swarm = swarm_of(model, args, target_batch_size=None, strategy=DiLoCo(every))
    trainer(swarm, model, args, callbacks=[swarm, bar]).train()
    assert seen == [batches]


def test_a_run_that_ends_between_two_events_is_saved(
    arguments: Any, swarm_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer stopped, and did not evaluate and save as at its own end."""
    model, args = tiny_model(), arguments(save_strategy="steps", save_steps=100)
    swarm, over = swarm_of(model, args), list[bool]()
    monkeypatch.setattr(type(swarm.optimizer), "finished", property(lambda _: bool(over)))
    ends = transformers.TrainerCallback()
    ends.on_step_end = lambda args, state, control, **_: over.extend([True] * (state.global_step == 2))
    trainer(swarm, model, args, callbacks=[ends, swarm]).train()
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_local_updates_are_clipped_by_the_trainer(arguments: Any, swarm_of: Any) -> None:
    """Its default of 1.0 was refused with them."""
    swarm_of(tiny_model(), args := arguments(), use_local_updates=True)
    assert args.max_grad_norm == 1.0


@dataclass(frozen=True)
class Plain:
    """A strategy of gradients that clips no average."""

    target_batch_size: int
    terms = Terms()

    def compared(self, training: TrainingState) -> dict[str, str]:
        """See `Strategy`."""
        return {}

    def training(self, inner: Inner) -> TrainingState:
        """See `Strategy`."""
        return TrainingState(inner.optimizer, inner.scheduler, inner.extra_tensors, unit=self.target_batch_size)

    def pace(self, fragment: int = 0, first: Pace | None = None) -> Pace:
        """See `Strategy`."""
        return SamplesPace(self.target_batch_size)


@pytest.mark.parametrize(
    ("strategy", "given", "of_average", "of_batch"),
    [
        (Plain(32), {}, None, 1.0),
        (Synchronous(32, max_grad_norm=0.5), {}, 0.5, 0.0),
        (Synchronous(32), {}, 1.0, 0.0),
        (Synchronous(32), {"max_grad_norm": torch.inf}, None, 0.0),  # which clips nothing
    ],
)
def test_the_trainers_norm_goes_where_the_strategy_clips(
    arguments: Any, swarm_of: Any, strategy: Strategy, given: Any, of_average: float | None, of_batch: float
) -> None:
    """Nobody gave the 1.0, and it was refused beside a strategy's own norm, and with a strategy that has none."""
    swarm = swarm_of(tiny_model(), args := arguments(**given), target_batch_size=None, strategy=strategy)
    assert getattr(swarm.optimizer.strategy, "max_grad_norm", None) == of_average
    assert args.max_grad_norm == of_batch


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_steps": -1}, "max_steps of the TrainingArguments is missing"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size .* give a per_device_train_batch_size that fits"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 5},
            "lr_scheduler_type='reduce_lr_on_plateau' .* use a schedule of steps",
        ),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "steps", "eval_steps": 5}, "lr_scheduler_type='greedy'"),
        ({"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise' .* within the backward pass"),
        ({"optim": "lomo"}, "optim='lomo' .* use another one"),
        ({"save_strategy": "steps", "save_steps": 0.1}, "save_steps=0.1 .* give a number of batches of this peer"),
        ({"logging_strategy": "steps", "logging_steps": 0.5}, "logging_steps=0.5"),
        ({"eval_strategy": "steps", "eval_steps": 0.5}, "eval_steps=0.5"),
    ],
)
def test_an_argument_that_breaks_the_agreement_of_peers_is_refused_with_advice(
    swarm_of: Any, arguments: Any, changes: dict[str, Any], words: str
) -> None:
    """By its name, before the run is joined."""
    args = arguments(**changes)
    before = args.to_dict()
    with pytest.raises(ConfigError, match=words):
        swarm_of(tiny_model(), args)
    assert args.to_dict() == before


@pytest.mark.parametrize(("every", "words"), [(5, "batches of each peer, in the mean"), ("5s", "number of merges")])
def test_a_missing_max_steps_is_asked_for_as_the_strategy_counts(
    swarm_of: Any, arguments: Any, every: int | str, words: str
) -> None:
    """It was explained by `target_batch_size`, which such a run does not have."""
    with pytest.raises(ConfigError, match=f"max_steps of the TrainingArguments is missing: .* {words}"):
        swarm_of(tiny_model(), arguments(max_steps=-1), target_batch_size=None, strategy=DiLoCo(every))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("fp16", True, "fp16 .* use bf16=True"),
        ("deepspeed", "config.json", "deepspeed .* start one process for each device"),
        ("fsdp", "full_shard", "fsdp .* start one process for each device"),
        ("_n_gpu", 2, "n_gpu=2 .*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_too(
    swarm_of: Any, arguments: Any, name: str, value: object, words: str
) -> None:
    """The arguments' own check would need devices and libraries that are not here."""
    args = arguments()
    _ = args.device  # counts the devices
    setattr(args, name, value)
    with pytest.raises(ConfigError, match=words):
        swarm_of(tiny_model(), args)


def test_plain_mistakes_are_named(swarm_of: Any, arguments: Any) -> None:
    """Something else in the place of an argument."""
    with pytest.raises(ConfigError, match="model must be the model"):
        swarm_of("bert", arguments())
    with pytest.raises(ConfigError, match="args must be the TrainingArguments"):
        swarm_of(tiny_model(), {"max_steps": 3})
    with pytest.raises(ConfigError, match="batch_size_per_step is not given here"):
        swarm_of(tiny_model(), arguments(), batch_size_per_step=8)


def test_half_of_it_is_refused(swarm_of: Any, arguments: Any) -> None:
    """The callback without the optimizer, the optimizer without the callback, another model, other arguments."""
    model, args = tiny_model(), arguments()
    swarm = swarm_of(model, args)
    with pytest.raises(ConfigError, match=r"optimizers=swarm\.optimizers is missing"):
        trainer(swarm, model, args, optimizers=(None, None))
    with pytest.raises(ConfigError, match="model of the Trainer must be the one"):
        trainer(swarm, tiny_model(), args)
    with pytest.raises(ConfigError, match="args of the Trainer must be the one"):
        trainer(swarm, model, arguments())
    with pytest.raises(ConfigError, match=r"callbacks=\[swarm\] is missing"):
        trainer(swarm, model, args, callbacks=[]).train()
    with pytest.raises(ConfigError, match="args belongs to another SwarmCallback"):
        swarm_of(tiny_model(), args)


# ---------------------------------------------------------------------------------------------------- what it trains


class InOrder(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """30 samples: in batches of 8 the last one has 6."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not index < 30:
            raise IndexError(index)
        return Sentences()[index]


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All in one."""
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("norm", [1.0, 0.05, 0.0])
def test_a_trainer_in_a_swarm_equals_a_plain_one_with_large_batches(swarm_of: Any, arguments: Any, norm: float) -> None:
    """Eight steps with warm-up, a falling rate, weight decay, clipping; batches of 8, 8, 8 and 6 against one of 30."""
    said: dict[str, Any] = {
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 0.25,
        "max_grad_norm": norm,
        "max_steps": 8,
    }
    said |= {"train_sampling_strategy": "sequential", "optim": "adamw_torch"}
    both = []
    for batch in (30, 8):
        model, args = tiny_model(), arguments(per_device_train_batch_size=batch, **said)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if batch == 30:
            transformers.Trainer(model, args, train_dataset=InOrder()).train()
        else:
            swarm = swarm_of(model, args, target_batch_size=30)
            trainer(swarm, model, args, train_dataset=InOrder()).train()
            assert swarm.optimizer.local_epoch == 8
        both.append(weights(model))
    assert (both[0] - weights(tiny_model())).abs().max() > 1e-2
    torch.testing.assert_close(both[1], both[0], rtol=0, atol=2e-5)


def test_each_batch_counts_with_the_samples_that_it_has(swarm_of: Any, arguments: Any, dht: shoal.DHT) -> None:
    """Passes of 8, 8, 8 and 6; accumulated by 3 they are 24 and 6."""
    for accumulated, expected in ((1, [24, 22]), (3, [24, 30])):
        model, args = tiny_model(), arguments(gradient_accumulation_steps=accumulated, per_device_train_batch_size=8)
        samples: list[int] = []

        def note(event: object, into: list[int] = samples) -> None:
            if isinstance(event, EpochAdvanced):
                into.append(event.samples)

        dht.events.subscribe(note)
        swarm = swarm_of(model, args, target_batch_size=20)
        trainer(swarm, model, args, train_dataset=InOrder()).train()
        assert samples[:2] == expected, samples


class Rollouts(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Looks at 1,000 rows before each batch, and gives the model two views of it."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        """A loss of both views."""
        model(**{name: each[:1].repeat(1000, 1) for name, each in inputs.items()})
        return model(**inputs).loss + model(**{name: each.clone() for name, each in inputs.items()}).loss


def test_passes_that_no_gradient_comes_from_do_not_count(swarm_of: Any, arguments: Any, dht: shoal.DHT) -> None:
    """A metric that was computed in train mode made a batch of 8 count 1,000. Or the user says what counts."""
    own: dict[str, Any] = {"batch_size": lambda inputs: 2 * len(inputs["input_ids"])}
    for options, expected in (({}, 24), (own, 32)):
        model, args = tiny_model(), arguments(per_device_train_batch_size=8, max_steps=2)
        samples: list[int] = []

        def note(event: object, into: list[int] = samples) -> None:
            if isinstance(event, EpochAdvanced):
                into.append(event.samples)

        dht.events.subscribe(note)
        swarm = swarm_of(model, args, target_batch_size=20, **options)
        Rollouts(model, args, train_dataset=InOrder(), optimizers=swarm.optimizers, callbacks=[swarm]).train()
        assert samples[0] == expected, samples


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """A stream of 20 samples, by the global random numbers; remembers the first one that it drew."""

    def __init__(self) -> None:
        self.first: list[int] = []

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(20):
            tokens = torch.randint(0, 50, (8,))
            self.first = self.first or tokens.tolist()
            yield {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_stream_that_ends_begins_anew(swarm_of: Any, arguments: Any, accumulated: int) -> None:
    """The Trainer would look for the rest of `max_steps` batches in it. Too few batches to accumulate are dropped."""
    model, args = tiny_model(), arguments(per_device_train_batch_size=8, gradient_accumulation_steps=accumulated)
    swarm = swarm_of(model, args)
    made = trainer(swarm, model, args, train_dataset=Stream())
    made.train()
    assert swarm.optimizer.local_epoch == 8
    assert made.state.epoch > 8


def test_a_stream_goes_on_after_a_checkpoint(swarm_of: Any, arguments: Any, tmp_path: Path) -> None:
    """In its third pass: the Trainer would skip more batches than the stream has, and look for them without end."""
    for resumed in (False, True):
        model = tiny_model()
        args = arguments(max_steps=8 + 4 * resumed, save_strategy="steps", save_steps=7, per_device_train_batch_size=8)
        swarm = swarm_of(model, args)
        checkpoint = latest_checkpoint(str(tmp_path))
        assert (checkpoint is not None) is resumed
        trainer(swarm, model, args, train_dataset=Stream()).train(resume_from_checkpoint=checkpoint)
        assert swarm.optimizer.local_epoch == args.max_steps


class Drawn(Sentences):
    """Remembers what was drawn."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.drawn.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("strategy", ["random", "group_by_length", "batch_rebalance"])
def test_peers_draw_other_data(swarm_of: Any, arguments: Any, dht: shoal.DHT, strategy: str) -> None:
    """With one seed for all: samplers differ, and so do streams that are made of random numbers."""
    orders, firsts = [], []
    with shoal.DHT(start=True) as other:
        for peer in (dht, other):
            model, args, data = tiny_model(), arguments(max_steps=7, train_sampling_strategy=strategy), Drawn()
            swarm = swarm_of(model, args, target_batch_size=8, dht=peer)
            trainer(swarm, model, args, train_dataset=data).train()
            orders.append(data.drawn[-24:])
            model, args, stream = tiny_model(), arguments(max_steps=1), Stream()
            swarm = swarm_of(model, args, target_batch_size=8, dht=peer)
            trainer(swarm, model, args, train_dataset=stream).train()
            firsts.append(stream.first)
    assert orders[0] != orders[1]
    assert firsts[0] != firsts[1]


def test_one_peer_evaluates_and_the_logs_have_the_result(swarm_of: Any, arguments: Any) -> None:
    """With the Trainer's own evaluation; the samples that it looks at do not count."""
    model, args = tiny_model(), arguments(logging_strategy="steps", logging_steps=1, max_steps=4)
    made: Any = None
    swarm = swarm_of(model, args, evaluate=lambda: {**made.evaluate(), "more": 1}, evaluate_every=2)
    made = trainer(swarm, model, args, eval_dataset=Sentences())
    made.train()
    logs = [each for each in made.state.log_history if "evaluated_epoch" in each]
    assert {each["evaluated_epoch"] for each in logs} == {2, 4}
    found = [each["eval_loss"] for each in made.state.log_history if "eval_loss" in each]
    assert logs[-1]["evaluated_eval_loss"] == pytest.approx(found[-1])
    assert len(found) == 2
    assert swarm.optimizer.local_epoch == 4
    with pytest.raises(ConfigError, match="evaluate must be a function"):
        swarm_of(model, arguments(), evaluate=0.5)


@pytest.mark.parametrize("tokens", ["no", "all"])
def test_a_log_that_looks_like_the_summary_ended_the_run(swarm_of: Any, arguments: Any, tokens: str) -> None:
    """It was taken for the Trainer's summary: this peer left the run, and its next step raised `ClosedError`.

    Users log a `train_loss` of their own; and with `include_num_input_tokens_seen` a speed stands in each log.
    """
    model, args = tiny_model(), arguments(include_num_input_tokens_seen=tokens, logging_steps=1)
    swarm = swarm_of(model, args)
    made = trainer(swarm, model, args)
    swarm.optimizer.register_step_post_hook(lambda *_: made.log({"train_loss": 1.0, "train_runtime": 1.0}))
    made.train()
    assert swarm.optimizer.local_epoch == 8


def test_the_arguments_are_as_before_when_the_training_is_over(swarm_of: Any, arguments: Any) -> None:
    """So is the model; and the same callback does not train once more."""
    model, args = tiny_model(), arguments(max_steps=2, max_grad_norm=0.7)
    swarm = swarm_of(model, args)
    made = trainer(swarm, model, args)
    assert model._forward_hooks
    made.train()
    assert not model._forward_hooks
    assert (args.max_steps, args.max_grad_norm, args.ignore_data_skip) == (2, 0.7, False)
    with pytest.raises(ConfigError, match="training is over"):
        made.train()


def test_after_an_interrupt_train_goes_on(swarm_of: Any, arguments: Any, dht: shoal.DHT) -> None:
    """As in a notebook: the peer stays in the run, and a batch that was not finished does not count."""
    samples: list[int] = []
    dht.events.subscribe(lambda event: samples.append(event.samples) if isinstance(event, EpochAdvanced) else None)
    model, args = tiny_model(), arguments(max_steps=6, gradient_accumulation_steps=2, per_device_train_batch_size=5)
    swarm = swarm_of(model, args, target_batch_size=20)
    interrupts = Interrupts()
    made = trainer(swarm, model, args, callbacks=[swarm, interrupts])
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert swarm.optimizer.local_epoch == 2
    made.remove_callback(Interrupts)
    made.train()
    assert swarm.optimizer.local_epoch == 6
    assert set(samples) <= {20, 25}, samples  # 45 samples in a pass: the last batch of one is not accumulated


def test_a_schedule_of_the_trainers_own_has_no_effect(swarm_of: Any, arguments: Any, dht: shoal.DHT) -> None:
    """`optimizers=(swarm.optimizer, None)`: the rates stay those over the swarm's steps, and a warning says so."""
    warned: list[str] = []
    dht.events.subscribe(lambda event: warned.append(event.message) if isinstance(event, Warned) else None)
    model, args = tiny_model(), arguments(max_steps=4, learning_rate=1e-3)
    swarm = swarm_of(model, args)
    trainer(swarm, model, args, optimizers=(swarm.optimizer, None)).train()
    assert swarm.optimizers[1].get_last_lr()[0] == swarm.optimizer.param_groups[0]["lr"] == 0.0
    assert any("made over this optimizer has no effect" in message for message in warned)


def test_an_own_optimizer_and_schedule_are_taken(swarm_of: Any, arguments: Any) -> None:
    """Counted by the swarm's steps."""
    model, args = tiny_model(), arguments(max_steps=3)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    swarm = swarm_of(
        model, args, optimizer=inner, scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)
    )
    trainer(swarm, model, args).train()
    assert inner.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_the_best_checkpoint_is_loaded_after_the_peer_has_left(
    swarm_of: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Its weights are not the state of the run: nobody may be given them."""
    when = {"save_strategy": strategy, "save_steps": 4, "eval_strategy": strategy, "eval_steps": 4}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "swarm_epoch", "greater_is_better": False}
    model, args = tiny_model(), arguments(max_steps=4, **when, **best)
    swarm = swarm_of(model, args)
    metrics: Any = lambda _: {"swarm_epoch": swarm.optimizer.local_epoch}  # noqa: E731
    made = trainer(swarm, model, args, eval_dataset=InOrder(), compute_metrics=metrics)
    left: list[bool] = []
    load = made._load_best_model

    def load_best() -> None:
        left.append(swarm.optimizer._left)
        load()

    monkeypatch.setattr(made, "_load_best_model", load_best)
    made.train()
    assert left == [True]
    assert made.state.best_global_step < made.state.global_step


def test_sequential_data_is_warned_of(swarm_of: Any, arguments: Any, dht: shoal.DHT) -> None:
    """All peers would draw the same."""
    warned: list[str] = []
    dht.events.subscribe(lambda event: warned.append(event.message) if isinstance(event, Warned) else None)
    model, args = tiny_model(), arguments(max_steps=2, train_sampling_strategy="sequential")
    swarm = swarm_of(model, args)
    trainer(swarm, model, args).train()
    assert any("in one order on all peers" in message for message in warned)


# -------------------------------------------------------------------------------------------------- small functions


def test_latest_checkpoint_passes_over_what_is_not_whole(tmp_path: Path) -> None:
    """A folder without the file that is written last, or with half of it."""
    assert latest_checkpoint(str(tmp_path)) is None
    assert latest_checkpoint(str(tmp_path / "none")) is None
    for name, text in (("9", "{}"), ("10", "{}"), ("11", '{"epo'), ("12", None), ("best", "{}")):
        (tmp_path / f"checkpoint-{name}").mkdir()
        if text is not None:
            (tmp_path / f"checkpoint-{name}" / "trainer_state.json").write_text(text, encoding="utf-8")
    assert latest_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


def test_a_checkpoint_of_a_plain_trainer_is_loaded(swarm_of: Any, arguments: Any, tmp_path: Path) -> None:
    """It has no epoch of a swarm: the run begins at epoch 0, with its weights and statistics."""
    model, plain = tiny_model(), arguments(max_steps=2, save_strategy="steps", save_steps=2, learning_rate=1e-3)
    transformers.Trainer(model, plain, train_dataset=InOrder()).train()
    model, args = tiny_model(), arguments(max_steps=3, learning_rate=1e-3)
    swarm = swarm_of(model, args)
    trainer(swarm, model, args).train(resume_from_checkpoint=latest_checkpoint(str(tmp_path)))
    assert swarm.optimizer.local_epoch == 3
    assert {float(each["step"]) for each in swarm.optimizer.state.values()} == {5.0}


def test_peers_that_clip_otherwise_are_refused(swarm_of: Any, arguments: Any, dht: shoal.DHT) -> None:
    """Their steps would differ."""
    swarm_of(tiny_model(), arguments(), run_id="clipped")
    with shoal.DHT([dht.invite()], start=True) as other:
        for norm in (0.0, 0.5):
            with pytest.raises(ConfigError, match="max_grad_norm"):
                swarm_of(tiny_model(), arguments(max_grad_norm=norm), run_id="clipped", dht=other)


class Stops(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Ends the training after three batches, as `EarlyStoppingCallback` does by an evaluation."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After an evaluation."""
        control.should_training_stop |= state.global_step >= 3


@pytest.mark.parametrize("stops", ["steps", "epoch", None])
def test_what_ends_one_peer_alone_is_told(swarm_of: Any, arguments: Any, dht: shoal.DHT, stops: str | None) -> None:
    """It left the run, or ended with weights of its own, without a word. The run's own end is no such thing."""
    warned: list[str] = []
    dht.events.subscribe(lambda event: warned.append(event.message) if isinstance(event, Warned) else None)
    more = {"eval_strategy": stops or "steps", "eval_steps": 2}
    if not stops:
        more |= {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2}
    model, args = tiny_model(), arguments(max_steps=3, **more)
    swarm = swarm_of(model, args, target_batch_size=64 if stops else 16)
    trainer(swarm, model, args, callbacks=[swarm, *([Stops()] if stops else [])], eval_dataset=Sentences()).train()
    found = [each[:45] for each in warned if "load_best" in each or "something else" in each]
    told = "something else ends the training of this peer", "load_best_model_at_end=True gives each peer t"
    assert found == [told[0] if stops else told[1]]


@pytest.mark.parametrize("when", ["steps", "epoch"])
def test_a_checkpoint_said_that_it_is_one_of_a_million_million_batches(
    swarm_of: Any, arguments: Any, tmp_path: Path, when: str
) -> None:
    """What keeps the Trainer's loop going was written. The progress bar's end is, and at last what was trained."""
    model, args = tiny_model(), arguments(max_steps=9, save_strategy=when, save_steps=2, per_device_train_batch_size=8)
    swarm = swarm_of(model, args, target_batch_size=16)
    done = trainer(swarm, model, args, callbacks=[swarm]).train()
    found = {
        json.loads(file.read_text(encoding="utf-8"))["global_step"]: json.loads(file.read_text(encoding="utf-8"))
        for file in tmp_path.glob("checkpoint-*/trainer_state.json")
    }
    batches = 18
    assert len(found) > 1
    for step, state in found.items():
        assert state["max_steps"] == (done.global_step if step == done.global_step else max(step, batches)), step
        assert state["num_train_epochs"] == 3  # passes of 6 batches
    speed = done.metrics["train_samples_per_second"] / done.metrics["train_steps_per_second"]
    assert speed == pytest.approx(8, rel=0.2)


def test_buffers_are_shared_wherever_the_trainer_moves_the_model(swarm_of: Any, arguments: Any) -> None:
    """`model.to` puts new buffers in their place: those that were listed before stood still."""
    model, args = tiny_model(), arguments(max_steps=2)
    model.register_buffer("moving", torch.zeros(3))
    swarm = swarm_of(model, args, extra_tensors=[model.get_buffer("moving")], average_state_every=1)
    (shared,) = swarm.optimizer.collaboration.training.extra_tensors
    assert shared is model.get_buffer("moving")
