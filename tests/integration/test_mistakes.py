"""What users do by mistake or from habit with `shoal.Optimizer`: an error that says what to do, or it just works."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.errors import ClosedError, ConfigError, LocalError
from shoal.events import Warned
from shoal.strategies import Decoupled, LocalSGD


def swarm_of(dht: shoal.DHT, model: torch.nn.Module, /, **options: Any) -> shoal.Optimizer:
    """A run of its own that steps with each batch of 4."""
    chosen: dict[str, Any] = {
        "run_id": "run",
        "target_batch_size": 4,
        "batch_size_per_step": 4,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        **options,
    }
    return shoal.Optimizer(dht=dht, **chosen)


def backward(model: torch.nn.Module) -> None:
    """One batch."""
    model(torch.ones(4, 2)).sum().backward()


def test_an_argument_that_was_wrong_leaves_the_name_of_the_run_free() -> None:
    """In a notebook: the mended cell failed, too, as 'run_grad' was "in use", and nobody had it to shut it down."""
    model = torch.nn.Linear(2, 1)
    codec = shoal.compression.Float16Compression()
    with shoal.DHT(start=True) as dht:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shoal.run.participant.state_averager", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                swarm_of(dht, model, grad_compression=codec)
        with swarm_of(dht, model) as swarm:
            assert swarm.local_epoch == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"extra_tensors": None}, "extra_tensors must be a list of tensors, got None"),
        ({"extra_tensors": 3}, "extra_tensors must be a list of tensors, got 3"),
        ({"extra_tensors": [torch.zeros(2, device="meta")]}, r"extra_tensors\[0\] is sparse or on the meta device"),
        ({"extra_tensors": [torch.zeros(2).to_sparse()]}, r"extra_tensors\[0\] is sparse or on the meta device"),
        (
            {"extra_tensors": [torch.zeros(2, dtype=torch.complex64)]},
            r"extra_tensors\[0\]: tensors of torch.complex64 cannot",
        ),
        ({"load_state_timeout": "5"}, "load_state_timeout must be a number of seconds above 0"),
        ({"load_state_timeout": True}, "load_state_timeout must be a number of seconds above 0"),
        ({"batch_size_per_step": True}, "batch_size_per_step must be a whole number of at least 1"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 3)},
            "scheduler moves another optimizer",
        ),
    ],
)
def test_an_argument_that_cannot_be_is_named(options: dict[str, Any], says: str) -> None:
    """They were raw errors from within, named arguments that nobody had given, or had no effect."""
    with shoal.DHT(start=True) as dht, pytest.raises(ConfigError, match=says):
        swarm_of(dht, torch.nn.Linear(2, 1), **options)


def test_parameters_among_the_extra_tensors_are_named() -> None:
    """`extra_tensors=model.state_dict().values()`: "averaged_tensors[0]" is no argument of the optimizer."""
    model = torch.nn.Linear(2, 1)
    with (
        shoal.DHT(start=True) as dht,
        pytest.raises(ConfigError, match=r"parameter (\d) of the optimizer and extra_tensors\[\1\] share memory"),
    ):
        swarm_of(dht, model, extra_tensors=model.state_dict().values())


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (torch.nn.LazyLinear(1), "parameter 0 of the optimizer has no values yet"),
        (torch.nn.Linear(2, 1, device="meta"), "parameter 0 of the optimizer has no values yet"),
        (torch.nn.Linear(2, 1, dtype=torch.complex64), "parameter 0 of the optimizer has dtype torch.complex64"),
    ],
)
def test_parameters_that_cannot_be_trained_are_named(model: torch.nn.Module, says: str) -> None:
    """They were torch's errors from within."""
    with shoal.DHT(start=True) as dht, pytest.raises(ConfigError, match=says):
        swarm_of(dht, model)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    """`batch_size=mask.sum()` was "not a whole number, got np.int64(4)"."""
    model = torch.nn.Linear(2, 1)
    with (
        shoal.DHT(start=True) as dht,
        swarm_of(dht, model, target_batch_size=np.int64(4), batch_size_per_step=None) as swarm,
    ):
        backward(model)
        swarm.step(batch_size=np.int64(4))  # type: ignore[arg-type]
        swarm.announce_end(np.int32(9))  # type: ignore[arg-type]
        assert swarm.local_epoch == 1


def test_an_end_that_no_message_can_hold_is_refused() -> None:
    """The background work ended with a raw OverflowError, and others dropped a peer that named 10^9."""
    with (
        shoal.DHT(start=True) as dht,
        swarm_of(dht, torch.nn.Linear(2, 1)) as swarm,
        pytest.raises(ConfigError, match="epoch must be at most 20,000,000"),
    ):
        swarm.announce_end(10**9)


def test_a_batch_of_10_to_the_12_stops_nobody() -> None:
    """It was taken, and then every round of the swarm failed: a round takes weights up to 10^12."""
    model = torch.nn.Linear(2, 1)
    with shoal.DHT(start=True) as dht, swarm_of(dht, model) as swarm:
        backward(model)
        with pytest.raises(ConfigError, match="batch_size must be at most 68,719,476,736"):
            swarm.step(batch_size=10**12)


@pytest.mark.parametrize("timeout", ["5", 0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_named(timeout: Any) -> None:
    """It was "a better state is known, but did not arrive within nan s", though none was known."""
    with (
        shoal.DHT(start=True) as dht,
        swarm_of(dht, torch.nn.Linear(2, 1)) as swarm,
        pytest.raises(ConfigError, match="timeout must be a number of seconds above 0"),
    ):
        swarm.load_state_from_peers(timeout)


def test_a_batch_size_in_the_closures_place_is_told() -> None:
    """`step(16)`: 'int' object is not callable."""
    with (
        shoal.DHT(start=True) as dht,
        swarm_of(dht, torch.nn.Linear(2, 1)) as swarm,
        pytest.raises(ConfigError, match=r"closure must be a function, got 16: .* step\(batch_size=\.\.\.\)"),
    ):
        swarm.step(16)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_that_is_copied_or_pickled_says_what_to_do(make: Callable[[Any], Any]) -> None:
    """`torch.save(swarm, ...)` wrote a file, and what was read from it had no attribute of its own."""
    with (
        shoal.DHT(start=True) as dht,
        swarm_of(dht, torch.nn.Linear(2, 1)) as swarm,
        pytest.raises(LocalError, match=r"use its state_dict\(\)"),
    ):
        make(swarm)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_dht_or_an_averager_that_is_copied_or_pickled_says_what_to_do(make: Callable[[Any], Any]) -> None:
    """It was "cannot pickle '_thread.lock' object", or a copy without a thread."""
    with (
        shoal.DHT(start=True) as dht,
        shoal.DecentralizedAverager([torch.zeros(2)], dht, prefix="copied", start=True) as averager,
    ):
        with pytest.raises(LocalError, match=r"give the other process its invite\(\)"):
            make(dht)
        with pytest.raises(LocalError, match=r"copy the tensors within get_tensors\(\)"):
            make(averager)


def test_the_inner_optimizers_own_step_is_refused() -> None:
    """An `optimizer.step()` that was left in the loop: peers differed, and nothing was said until the next check."""
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.DHT(start=True) as dht:
        with swarm_of(dht, model, optimizer=inner) as swarm:
            backward(model)
            swarm.step()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            with pytest.raises(LocalError, match=r"call step\(\) of the shoal\.Optimizer only"):
                inner.step()
            assert all(map(torch.equal, before, model.parameters()))
            backward(model)
            swarm.step()
            assert swarm.local_epoch == 2
        inner.step()  # it is the user's again


def test_a_hook_of_the_inner_optimizer_is_told_that_it_comes_within_a_step() -> None:
    """`state_dict()` in it waited for the step that it was called in, for ever."""
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []
    with shoal.DHT(start=True) as dht, swarm_of(dht, model, optimizer=inner) as swarm:

        def hook(*_: object) -> None:
            for call in (swarm.state_dict, swarm.eval, swarm.train):
                with pytest.raises(LocalError) as raised:
                    call()
                said.append(str(raised.value))

        inner.register_step_post_hook(hook)
        backward(model)
        swarm.step()
        assert swarm.local_epoch == 1
    assert said == [
        f"{name}() is called within the inner optimizer's step: call it between two steps"
        for name in ("state_dict", "eval", "train")
    ]


def test_one_model_given_to_two_runs_is_refused() -> None:
    """Each run's step was undone by the other's; and one shoal.Optimizer was taken for the inner one of another."""
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.DHT(start=True) as dht:
        with swarm_of(dht, model, optimizer=inner) as swarm:
            for again in (inner, torch.optim.Adam(model.parameters())):
                with pytest.raises(ConfigError, match=r"another shoal\.Optimizer trains, of run 'run'"):
                    swarm_of(dht, model, optimizer=again, run_id="other")
            with pytest.raises(ConfigError, match=r"optimizer is a shoal\.Optimizer itself, of run 'run'"):
                swarm_of(dht, model, optimizer=swarm, run_id="other")
        with swarm_of(dht, model, optimizer=inner, run_id="other") as swarm:
            backward(model)
            swarm.step()
            assert swarm.local_epoch == 1


def test_two_optimizers_of_one_model_say_nothing_false_and_resume(tmp_path: Path) -> None:
    """A GAN: each told that what the other one trains "has changed", and neither resumed ("frozen tensors is ...")."""
    warnings = list[str]()

    def epochs_of(seed: int) -> list[int]:
        torch.manual_seed(seed)
        critic = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        model = torch.nn.ModuleDict({"critic": critic, "maker": torch.nn.Linear(2, 2)})
        extra = {"critic": [], "maker": list(critic[1].buffers())}
        with shoal.DHT(start=True) as dht:
            dht.events.subscribe(lambda event: warnings.append(event.line()) if isinstance(event, Warned) else None)
            swarms = {
                name: swarm_of(
                    dht,
                    model,
                    run_id=name,
                    model=model,
                    optimizer=torch.optim.Adam(model[name].parameters()),
                    extra_tensors=extra[name],
                    checkpoint=tmp_path / name,
                    save_every=1,
                )
                for name in ("critic", "maker")
            }
            for _ in range(3):
                swarms["critic"].zero_grad()
                made = model["maker"](torch.randn(4, 2))
                for batch in (torch.randn(4, 2), made.detach()):
                    critic(batch).square().sum().backward()
                swarms["critic"].step()
                swarms["maker"].zero_grad()
                critic(made).square().sum().backward()
                swarms["maker"].step()
            for swarm in swarms.values():
                swarm.save_last()
                swarm.shutdown()
            return [swarm.local_epoch for swarm in swarms.values()]

    assert [epochs_of(seed) for seed in (1, 2)] == [[3, 3], [6, 6]]
    assert not warnings


def test_parameters_that_nobody_trains_are_told() -> None:
    """A base that was not frozen is not compared, as another optimizer may train it."""
    warnings = list[str]()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    with shoal.DHT(start=True) as dht:
        dht.events.subscribe(lambda event: warnings.append(event.line()) if isinstance(event, Warned) else None)
        with swarm_of(dht, model, model=model, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1)) as swarm:
            for _ in range(2):
                backward(model)
                swarm.step()
                swarm.zero_grad()
    (warning,) = warnings
    assert "2 parameters of the model (0.weight, ...) require a gradient" in warning


def test_a_model_that_was_converted_is_not_saved(tmp_path: Path) -> None:
    """`save_last()` wrote weights of another dtype under the name of the run's state: the next start was refused."""
    model = torch.nn.Linear(2, 1)
    with shoal.DHT(start=True) as dht, swarm_of(dht, model, checkpoint=tmp_path, save_every=100) as swarm:
        backward(model)
        swarm.step()
        model.to(torch.bfloat16)
        with pytest.raises(ConfigError, match=r"is torch\.bfloat16 .* now, and was torch\.float32"):
            swarm.save_last()
        assert not [each for each in tmp_path.iterdir() if not each.name.startswith(".")]


def test_a_state_loaded_into_the_inner_optimizer_is_told() -> None:
    """No peer knew of it, and rates that a schedule set afterwards had no effect: torch had replaced the groups."""
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.DHT(start=True) as dht, swarm_of(dht, model, optimizer=inner) as swarm:
        saved = inner.state_dict()
        inner.load_state_dict(saved)
        backward(model)
        with pytest.raises(ConfigError, match="load_state_dict of the inner optimizer was called"):
            swarm.step()
        swarm.load_state_dict(saved)
        swarm.step()
        assert inner.param_groups is swarm.param_groups
        assert inner.state is swarm.state
        assert swarm.local_epoch == 1


def test_a_new_list_of_groups_is_refused() -> None:
    """The inner optimizer went on with the list that it has, and what the new one said had no effect."""
    model = torch.nn.Linear(2, 1)
    with shoal.DHT(start=True) as dht, swarm_of(dht, model) as swarm:
        groups = swarm.param_groups
        swarm.param_groups = [{**group, "lr": 0.0} for group in groups]
        backward(model)
        with pytest.raises(ConfigError, match="param_groups was assigned a new list"):
            swarm.step()
        swarm.param_groups = groups
        swarm.step()
        assert swarm.local_epoch == 1


def test_a_state_of_another_optimizer_is_refused() -> None:
    """That of Adam was loaded into SGD, whose next step then ended with a KeyError."""
    model = torch.nn.Linear(2, 1)
    other = torch.optim.Adam(model.parameters())
    with shoal.DHT(start=True) as dht, swarm_of(dht, model) as swarm:
        groups = copy.deepcopy(swarm.param_groups[0])
        for saved, why in (
            (other.state_dict(), "it is of another optimizer: parameter group 0 has no 'dampening'"),
            ({**other.state_dict(), "state": None}, "'NoneType' object has no attribute 'items'"),
            ({}, "it has no 'param_groups'"),
            (None, "state_dict must be what state_dict"),
        ):
            with pytest.raises(ConfigError, match=why):
                swarm.load_state_dict(saved)  # type: ignore[arg-type]
        assert swarm.param_groups[0].keys() == groups.keys()
        backward(model)
        swarm.step()
        assert swarm.local_epoch == 1


@pytest.mark.parametrize("strategy", [None, Decoupled(every=4, fragments=2)])
def test_a_state_of_its_own_that_was_loaded_back_unchanged_was_told_as_another(strategy: Any) -> None:
    """As `Accelerator.prepare` does. The rank of its beginning was decided meanwhile, and so its name."""
    warned: list[str] = []
    model = torch.nn.Linear(2, 1)
    with shoal.DHT(start=True) as dht:
        dht.events.subscribe(lambda event: warned.append(event.message) if isinstance(event, Warned) else None)
        sizes = {} if strategy is None else {"strategy": strategy, "target_batch_size": None}
        with swarm_of(dht, model, model=model, **sizes) as swarm:
            saved = swarm.state_dict()
            for each in swarm._chains.participants:
                dht.loop_thread.run(each.own.decide_rank(3), 5.0)
                each.own.is_shared()
            names = [each.own.name for each in swarm._chains.participants]
            swarm.load_state_dict(saved)
            assert [each.own.name for each in swarm._chains.participants] == names
            assert all(each.own.shared for each in swarm._chains.participants)
    assert not [each for each in warned if "load_state_dict()" in each]


def test_nothing_is_loaded_after_the_shutdown() -> None:
    """After `dht.shutdown()` it was loaded first, and refused then."""
    model = torch.nn.Linear(2, 1)
    with shoal.DHT(start=True) as dht:
        with swarm_of(dht, model) as swarm:
            saved = swarm.state_dict()
        with pytest.raises(ClosedError):
            swarm.load_state_dict(saved)


@pytest.mark.parametrize("strategy", [None, LocalSGD(every=1), Decoupled(every=1, fragments=2, quorum=1)])
def test_a_batch_that_was_under_way_when_the_run_ended_was_counted_nowhere(strategy: Any) -> None:
    """A run ends in the background. What comes then is dropped, and a call that comes again with it counts no more."""
    model = torch.nn.Linear(2, 1)
    target: dict[str, Any] = {} if strategy is None else {"strategy": strategy, "target_batch_size": None}
    with shoal.DHT(start=True) as dht, swarm_of(dht, model, **target) as swarm:
        swarm.announce_end(2)
        batches = 0
        while not swarm.finished or batches < 9:
            backward(model)
            swarm.step()
            swarm.zero_grad()
            batches += 1
            swarm.step()  # without a gradient it is no batch
        status = swarm.status()
    assert status.contributed + status.dropped == 4 * batches
    assert status.dropped >= 4


@pytest.mark.parametrize("hook", ["pre", "post"])
def test_a_batch_whose_inner_step_raised_was_counted_nowhere(hook: str) -> None:
    """If each batch is stepped from. It is dropped, or counts if the step was done; and it is stepped from once."""
    model, told, calls = torch.nn.Linear(2, 1), list[str](), list[int]()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def boom(*_: object) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise ZeroDivisionError(hook)

    getattr(inner, f"register_step_{hook}_hook")(boom)
    options: dict[str, Any] = {"strategy": LocalSGD(every=2), "target_batch_size": None, "optimizer": inner}
    with shoal.DHT(start=True) as dht:
        dht.events.subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
        with swarm_of(dht, model, **options) as swarm:
            swarm.announce_end(2)
            batches = 0
            while not swarm.finished:
                backward(model)
                batches += 1
                if batches == 2:
                    with pytest.raises(ZeroDivisionError, match=hook):
                        swarm.step()
                swarm.step()  # with the batch that raised it comes again, and counts no more
                swarm.zero_grad()
            status = swarm.status()
    assert (status.contributed, status.dropped) == ((16, 4) if hook == "pre" else (16, 0))
    assert batches == (5 if hook == "pre" else 4)
    became = "The batch is dropped" if hook == "pre" else "The parameters have moved, so the batch counts"
    assert sum(f"own step raised ZeroDivisionError: {hook}. {became}" in each for each in told) == 1


def test_a_loop_that_goes_on_after_the_end_is_told() -> None:
    """At the hundredth step: a program of two optimizers, as a GAN's, goes on until both runs have ended."""
    model, told = torch.nn.Linear(2, 1), list[str]()
    with shoal.DHT(start=True) as dht:
        dht.events.subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
        with swarm_of(dht, model) as swarm:
            swarm.announce_end(2)
            while not swarm.finished:
                backward(model)
                swarm.step()
                swarm.zero_grad()
            for calls in range(1, 150):
                backward(model)
                swarm.step()
                swarm.zero_grad()
                assert len(told) == (calls >= 100), calls
    assert "the run has ended at epoch 2: step() does nothing" in told[0]


def test_what_changes_tensors_under_inference_mode_is_refused(tmp_path: Path) -> None:
    """A later step failed within torch: tensors of that mode cannot be changed outside of it."""
    model = torch.nn.Linear(2, 1)
    with shoal.DHT(start=True) as dht:
        with torch.inference_mode(), pytest.raises(ConfigError, match=r"shoal\.Optimizer\(\) was made within"):
            swarm_of(dht, model)
        swarm = swarm_of(dht, model)
        saved = swarm.state_dict()
        backward(model)
        for call in (swarm.step, partial(swarm.load_state_dict, saved), partial(swarm.resume, tmp_path)):
            with torch.inference_mode(), pytest.raises(ConfigError, match=r"called within torch\.inference_mode"):
                call()
        swarm.step()
        assert swarm.local_epoch == 1
