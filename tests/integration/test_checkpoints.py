"""Checkpoints of `shoal.Optimizer`, as a user of machines that vanish has them."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model

import shoal
from shoal.errors import ConfigError
from shoal.events import CheckpointSaved, Event, Resumed, Warned
from shoal.run.disk import checkpoint, saving
from shoal.state.disk.tensor_file import Draft
from tests.integration.workers import Talk, until

TARGET = 4
KILLED_AT, MORE = 12, 6


@pytest.fixture
def dht() -> Iterator[shoal.DHT]:
    """A network of one."""
    with shoal.DHT(start=True) as started:
        yield started


def net(seed: int = 0, *, width: int = 6) -> torch.nn.Sequential:
    """A model with statistics of its own."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Of what is trained."""
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=0.1)


def begin(
    dht: shoal.DHT,
    trained: torch.nn.Module,
    make: Callable[..., torch.optim.Optimizer] = adamw,
    **options: Any,
) -> shoal.Optimizer:
    """A run with a schedule."""
    inner = make(trained.parameters())
    settings: dict[str, Any] = {"run_id": "run", "target_batch_size": TARGET, "batch_size_per_step": TARGET}
    settings["scheduler"] = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.9)
    return shoal.Optimizer(dht=dht, optimizer=inner, **{"model": trained, **settings, **options})


def train(swarm: shoal.Optimizer, model: torch.nn.Module, epoch: int) -> None:
    """Until there; the same batch each time."""
    while swarm.local_epoch < epoch:
        swarm.zero_grad()
        model(torch.arange(12.0).reshape(4, 3)).square().mean().backward()
        swarm.step()


def hear(dht: shoal.DHT, kind: type[Event]) -> list[Any]:
    """The events of this kind from now on."""
    heard: list[Any] = []
    dht.events.subscribe(lambda event: heard.append(event) if isinstance(event, kind) else None)
    return heard


def bits(swarm: shoal.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    """All that training depends on."""
    state = copy.deepcopy(swarm.state_dict())
    state.pop("shoal")
    return {"model": copy.deepcopy(model.state_dict()), **state}


def equal(one: Any, other: Any) -> bool:
    """Whether they are, to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


OPTIMIZERS = [
    pytest.param(partial(torch.optim.AdamW, lr=0.1), id="AdamW"),
    pytest.param(partial(torch.optim.SGD, lr=0.1, momentum=0.9), id="SGD"),
    pytest.param(partial(torch.optim.Adafactor, lr=0.1), id="Adafactor"),
    pytest.param("Ranger21", id="Ranger21"),
    pytest.param("StableSPAM", id="StableSPAM"),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_run_goes_on_from_its_checkpoint_as_without_a_break(dht: shoal.DHT, tmp_path: Path, make: Any) -> None:
    """Parameters, statistics (also in attributes), schedule, batch norm: to the bit."""
    if isinstance(make, str):
        options = {"num_iterations": 100} if make == "Ranger21" else {}
        make = partial(getattr(pytest.importorskip("pytorch_optimizer"), make), **options)
    model, resumed = net(), net(1)
    with begin(dht, model, make) as swarm:
        train(swarm, model, 3)
        path = swarm.save(tmp_path / "deep" / "folder", keep=1)
        name, before = swarm.collaboration.state, bits(swarm, model)
        train(swarm, model, 6)
        after = bits(swarm, model)
    with begin(dht, resumed, make) as swarm:
        assert swarm.resume(tmp_path / "deep" / "folder") == path
        assert (swarm.local_epoch, swarm.collaboration.state) == (3, name)
        assert equal(bits(swarm, resumed), before)
        train(swarm, resumed, 6)
        assert equal(bits(swarm, resumed), after)


def test_groups_frozen_parameters_16_bits_and_extra_tensors_come_back(dht: shoal.DHT, tmp_path: Path) -> None:
    """A parameter group that was added, a frozen parameter in the optimizer, statistics that all peers share."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        first, second, *rest = parameters
        inner = torch.optim.SGD([first], lr=0.1, momentum=0.9)
        inner.add_param_group({"params": [second, *rest], "lr": 0.01})
        return inner

    models = [net(seed).to(torch.bfloat16) for seed in (0, 1)]
    for model in models:
        model[2].bias.requires_grad = False
    extras: Any = [[model[1].running_mean, model[1].running_var] for model in models]
    with begin(dht, models[0], make, extra_tensors=extras[0], scheduler=None) as swarm:
        for _ in range(2):
            models[0](torch.ones(4, 3, dtype=torch.bfloat16)).square().mean().backward()
            swarm.step()
        path = swarm.save(tmp_path)
        before = bits(swarm, models[0])
    assert load_file(path / "model.safetensors").keys() == models[0].state_dict().keys()
    models[1].load_state_dict({"2.bias": models[0][2].bias}, strict=False)
    with begin(dht, models[1], make, extra_tensors=extras[1], scheduler=None, checkpoint=tmp_path) as swarm:
        assert swarm.local_epoch == 2
        assert equal(bits(swarm, models[1]), before)
        assert [group["lr"] for group in swarm.param_groups] == [0.1, 0.01]


def test_checkpoints_are_saved_beside_the_training(dht: shoal.DHT, tmp_path: Path) -> None:
    """Every two epochs, the last two stay, and the end of the run is one; a new process goes on from there."""
    folder, model, resumed = tmp_path / "new" / "folder", net(), net(1)
    said, saved = hear(dht, Resumed), hear(dht, CheckpointSaved)
    with begin(dht, model, checkpoint=folder, save_every=2, keep_checkpoints=2) as swarm:
        for epoch in range(1, 7):
            train(swarm, model, epoch)
            until(lambda epoch=epoch: len(saved) == epoch // 2)
        swarm.announce_end(7)
        while not swarm.finished:
            train(swarm, model, 7)
            swarm.step()
        until(lambda: [each.epoch for each in saved] == [2, 4, 6, 7])  # it is told in the loop
        end = bits(swarm, model)
    assert sorted(path.name[:14] for path in folder.iterdir()) == ["epoch-00000006", "epoch-00000007"]
    with begin(dht, resumed, checkpoint=str(folder), save_every=0) as swarm:
        assert swarm.local_epoch == 7
        assert equal(bits(swarm, resumed), end)
        train(swarm, resumed, 9)
    assert [each.epoch for each in saved] == [2, 4, 6, 7]
    assert [each.epoch for each in said] == [0, 7]
    assert said[0].line() == f"run 'run': no checkpoint in {folder}, so training starts anew"
    assert said[1].line() == f"run 'run': resumed at epoch 7 from {saved[-1].path}"


def test_training_goes_on_while_a_checkpoint_is_written_one_at_a_time(
    dht: shoal.DHT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs that come meanwhile are left out; `shutdown` says so if it cannot wait for the end."""
    goes_on, writing, warned, saved = threading.Event(), list[int](), hear(dht, Warned), hear(dht, CheckpointSaved)
    write = checkpoint.write

    def slow(folder: Path, content: Any, keep: int | None) -> Any:
        writing.append(content.name.epoch)
        goes_on.wait(60)
        return write(folder, content, keep)

    monkeypatch.setattr(saving, "write", slow)
    model = net()
    swarm = begin(dht, model, checkpoint=tmp_path, save_every=1, shutdown_timeout=0.1)
    train(swarm, model, 1)
    kept = copy.deepcopy(model.state_dict())
    train(swarm, model, 5)
    assert writing == [1]
    swarm.shutdown()
    until(lambda: any("still being written" in each.message for each in warned))
    (message,) = [each.message for each in warned if "still being written" in each.message]
    assert f"still being written to {tmp_path} after 0.1 s" in message
    goes_on.set()
    until(lambda: saved)
    (path,) = tmp_path.iterdir()
    assert equal(load_file(path / "model.safetensors"), dict(kept))


def test_shutdown_waits_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of the DHT, and at the end of the program."""
    begun, write, model = threading.Event(), checkpoint.write, net()

    def late(*arguments: Any) -> Any:
        begun.set()
        threading.Event().wait(0.3)
        return write(*arguments)

    monkeypatch.setattr(saving, "write", late)
    with shoal.DHT(start=True) as dht:
        swarm = begin(dht, model, checkpoint=tmp_path, save_every=1)
        train(swarm, model, 1)
        assert begun.wait(60)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_write_that_outlives_its_network_ends_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The program may live longer: then the checkpoint is whole, and nothing fails in the thread."""
    goes_on, ended = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        goes_on.wait(60)
        return checkpoint.write(*arguments)

    monkeypatch.setattr(saving, "write", slow)
    model = net()
    with shoal.DHT(start=True, shutdown_timeout=0.2) as dht:
        swarm = begin(dht, model, checkpoint=tmp_path, save_every=1)
        train(swarm, model, 1)
    assert swarm._saver._writing is not None
    swarm._saver._writing.add_done_callback(lambda _: ended.set())
    goes_on.set()
    assert ended.wait(60)
    assert [path.name[:14] for path in tmp_path.iterdir()] == ["epoch-00000001"]
    assert [record.message for record in caplog.records if "still being written to" in record.message]
    assert not [record for record in caplog.records if record.exc_info]


def test_an_optimizer_that_saves_is_freed_when_it_is_dropped(dht: shoal.DHT, tmp_path: Path) -> None:
    """Nobody holds it in a circle: others shall not wait for it."""
    model = net()
    swarm = begin(dht, model, checkpoint=tmp_path, save_every=1)
    train(swarm, model, 2)
    dropped, saver = weakref.ref(swarm), swarm._saver
    gc.collect()
    gc.disable()
    try:
        del swarm
        assert dropped() is None
    finally:
        gc.enable()
    until(lambda: saver._has_ended(0.0))


def test_an_interrupted_save_leaves_nothing_behind(
    dht: shoal.DHT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl+C in the middle of a file; the next save works."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    model = net()
    with begin(dht, model) as swarm:
        train(swarm, model, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Draft, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                swarm.save(tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert swarm.save(tmp_path).exists()


def test_a_compiled_model_has_its_names(dht: shoal.DHT, tmp_path: Path) -> None:
    """Other peers may do without `torch.compile`."""
    model, plain = net(), net(1)
    compiled: Any = torch.compile(model, backend="eager")
    with begin(dht, compiled) as swarm:
        train(swarm, model, 1)
        path = swarm.save(tmp_path)
    load_model(plain, path / "model.safetensors")
    assert equal(dict(plain.state_dict()), dict(model.state_dict()))
    with begin(dht, net(2), checkpoint=tmp_path) as swarm:
        assert swarm.local_epoch == 1


def test_a_save_that_fails_does_not_stop_the_training(dht: shoal.DHT, tmp_path: Path) -> None:
    """The folder vanished: one warning, and the next save after it is back. An explicit one makes it, or raises."""
    folder, model = tmp_path / "drive", net()
    warned, saved = hear(dht, Warned), hear(dht, CheckpointSaved)
    with begin(dht, model, checkpoint=folder, save_every=1) as swarm:
        folder.rename(tmp_path / "gone")  # it may have the file of this peer in it
        train(swarm, model, 1)
        until(lambda: [each for each in warned if "no checkpoint was saved" in each.message])
        train(swarm, model, 4)
        folder.mkdir()
        train(swarm, model, 5)
        until(lambda: swarm.step() or saved)
        messages = [each.message for each in warned if "no checkpoint was saved" in each.message]
        assert len(messages) == 1
        assert messages[0].startswith(f"no checkpoint was saved in {folder}: No such file or directory")
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"folder cannot be written: .*/file: \[Errno 17\]"):
            swarm.save(tmp_path / "file")


def test_no_memory_for_a_copy_does_not_stop_the_training(
    dht: shoal.DHT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An automatic save says so, an explicit one raises what was raised."""

    def none(*arguments: Any) -> Any:
        raise MemoryError("no memory")

    model, warned = net(), hear(dht, Warned)
    with begin(dht, model, checkpoint=tmp_path, save_every=1) as swarm:
        monkeypatch.setattr("shoal.optim.optimizer.copy_of", none)
        train(swarm, model, 2)
        until(lambda: [each for each in warned if "MemoryError: no memory" in each.message])
        with pytest.raises(MemoryError):
            swarm.save(tmp_path)


def test_a_state_that_went_wrong_takes_no_ones_place(dht: shoal.DHT, tmp_path: Path) -> None:
    """NaN among the weights: the good checkpoints stay."""
    model, warned = net(), hear(dht, Warned)
    with begin(dht, model, checkpoint=tmp_path, save_every=1, keep_checkpoints=1) as swarm:
        train(swarm, model, 1)
        swarm.save(tmp_path)
        with torch.no_grad():
            next(model.parameters())[0, 0] = float("nan")
        swarm.collaboration.training.weights.note()  # as if a step had done it
        with pytest.raises(ConfigError, match=r"the state went wrong: tensor 0\.weight of the state holds NaN"):
            swarm.save(tmp_path, keep=1)
    assert [path.name[:14] for path in tmp_path.iterdir()] == ["epoch-00000001"]
    assert not [each for each in warned if "damaged" in each.message]


def other_frozen(model: torch.nn.Sequential) -> torch.nn.Sequential:
    """Another base."""
    model.add_module("base", torch.nn.Linear(2, 2).requires_grad_(requires_grad=False))
    return model


def renamed(model: torch.nn.Sequential) -> torch.nn.Module:
    """The same tensors under other names."""
    return torch.nn.Sequential(model)


OTHERS: list[Any] = [
    pytest.param({"model": lambda: net(1, width=7)}, "tensors is .* there and .* here", id="shapes"),
    pytest.param({"model": lambda: renamed(net(1))}, "parameter names is .*there and .* here", id="names"),
    pytest.param(
        {"model": lambda: other_frozen(net(1))}, "frozen tensors is none there and 2 from base.weight", id="base"
    ),
    pytest.param({"make": partial(torch.optim.SGD, lr=0.1)}, "optimizer is AdamW there and SGD here", id="class"),
    pytest.param({"make": partial(torch.optim.AdamW, amsgrad=True)}, "option 'amsgrad' is False there", id="option"),
    pytest.param({"settings": {"tokens": "b"}}, "tokens is a there and b here", id="settings of the program"),
    pytest.param({"run_id": "other"}, "holds checkpoints of run 'run', and this is run 'other'", id="run"),
]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("options", "why"), OTHERS)
def test_a_checkpoint_of_something_else_is_refused(
    dht: shoal.DHT, tmp_path: Path, options: dict[str, Any], why: str, inside: bool
) -> None:
    """It is named, with what to do; nothing was changed, and the DHT is as good as before."""
    model = net()
    with begin(dht, model, settings={"tokens": "a"}) as swarm:
        train(swarm, model, 1)
        swarm.save(tmp_path)
    other = options.get("model", lambda: net(1))()
    options = {key: value for key, value in options.items() if key != "model"}
    before = copy.deepcopy(other.state_dict())
    if inside:
        with pytest.raises(ConfigError, match=f"(?s){why}.*another folder"):
            begin(dht, other, checkpoint=tmp_path, **options)
    else:
        with begin(dht, other, **options) as swarm:
            with pytest.raises(ConfigError, match=f"(?s){why}.*another folder"):
                swarm.resume(tmp_path)
            assert swarm.local_epoch == 0
    assert equal(dict(other.state_dict()), dict(before))
    with begin(dht, net(1), checkpoint=tmp_path) as swarm:
        assert swarm.local_epoch == 1


def test_settings_that_may_change_between_two_starts(dht: shoal.DHT, tmp_path: Path) -> None:
    """The batch size of the swarm, and the model's being given. The learning rate is that of the checkpoint."""
    model = net()
    with begin(dht, model) as swarm:
        train(swarm, model, 1)
        swarm.save(tmp_path)
    again = partial(torch.optim.AdamW, lr=0.5)
    with begin(dht, net(1), again, checkpoint=tmp_path, target_batch_size=8) as swarm:
        assert swarm.param_groups[0]["lr"] == pytest.approx(0.09)
    with begin(dht, net(1), again, model=None, checkpoint=tmp_path, scheduler=None) as swarm:
        assert swarm.local_epoch == 1


def test_resume_never_goes_back(dht: shoal.DHT, tmp_path: Path) -> None:
    """A better state of this peer stays; to go back, a new `Optimizer` is made."""
    model, said = net(), hear(dht, Resumed)
    with begin(dht, model) as swarm:
        train(swarm, model, 1)
        older = swarm.save(tmp_path)
        assert swarm.resume(tmp_path) is None
        train(swarm, model, 2)
        before = bits(swarm, model)
        assert swarm.resume(tmp_path) is None
        assert swarm.resume(tmp_path / "nowhere") is None
        assert equal(bits(swarm, model), before)
        swarm.save(tmp_path)
        until(lambda: len(said) == 3)
        assert "are no better than the state of epoch 2" in said[1].line()
    with begin(dht, net(1)) as swarm:
        assert swarm.resume(older) == older
        assert swarm.local_epoch == 1


@pytest.mark.parametrize("theirs", [1, 4])
def test_a_peer_that_resumes_meets_a_swarm_that_is_further_or_behind(
    dht: shoal.DHT, tmp_path: Path, theirs: int
) -> None:
    """The later epoch wins, whoever has it; both go on together."""
    models = [net(), net(1)]
    with begin(dht, models[0]) as swarm:
        train(swarm, models[0], 3)
        swarm.save(tmp_path)
        saved = swarm.collaboration.state
    with begin(dht, models[1], load_state_timeout=60) as swarm:
        train(swarm, models[1], theirs)
        state = swarm.collaboration.state
        with (
            shoal.DHT([dht.invite()], start=True) as there,
            begin(there, models[0], checkpoint=tmp_path, load_state_timeout=60) as resumed,
        ):
            assert resumed.collaboration.state == saved
            assert resumed.load_state_from_peers() is (theirs == 4)
            if theirs == 1:
                until(swarm.load_state_from_peers)
            assert {each.collaboration.state for each in (swarm, resumed)} == {max(state, saved)}
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_a_branch_that_was_given_up_is_kept(dht: shoal.DHT, tmp_path: Path) -> None:
    """Its checkpoint was overwritten, though the warning said to merge from it. Two of them stay."""
    models = [net(), net(1)]
    with begin(dht, models[1], load_state_timeout=60) as swarm:
        train(swarm, models[1], 8)
        for epoch in (3, 4, 5):
            with shoal.DHT(start=True) as apart, begin(apart, models[0], run_id="run") as alone:
                train(alone, models[0], epoch)
                checkpoint.write(tmp_path, alone._content(), None)
                before, branch = bits(alone, models[0]), alone.collaboration.state
            with shoal.DHT([dht.invite()], start=True) as there:
                warnings = hear(there, Warned)
                options: dict[str, Any] = {"checkpoint": tmp_path, "save_every": 1, "keep_checkpoints": 1}
                with begin(there, models[0], **options) as swarm_there:
                    assert swarm_there.load_state_from_peers()
                    swarm_there.save_last()
                (warning,) = [each.message for each in warnings if "gives up its own" in each.message]
            kept = checkpoint.given_up(tmp_path, branch)
            assert f"It is saved as {kept}, where" in warning
            for each in tmp_path.glob("epoch-*"):
                shutil.rmtree(each)
    kept_ones = sorted(int(path.name.split("-")[3]) for path in tmp_path.iterdir())
    assert kept_ones == [4, 5]
    with shoal.DHT(start=True) as apart, begin(apart, models[0]) as alone:
        assert alone.resume(tmp_path) is None
        assert alone.resume(kept) == kept
        assert equal(bits(alone, models[0]), before)


@pytest.mark.parametrize("by_checkpoint", [True, False])
def test_a_peer_that_was_killed_loses_nothing_that_others_have(
    dht: shoal.DHT, tmp_path: Path, by_checkpoint: bool
) -> None:
    """It was told that it had trained all samples of its checkpoint apart from the others, and that they are lost."""
    models = [net(), net()]
    with begin(dht, models[1], load_state_timeout=60) as swarm:
        train(swarm, models[1], 5)
        with shoal.DHT([dht.invite()], start=True) as there, begin(there, models[0]) as first:
            assert first.load_state_from_peers()
            saved, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(models[0].state_dict())
            first.save(tmp_path)
        train(swarm, models[1], 40)
        with shoal.DHT([dht.invite()], start=True) as there:
            warnings = hear(there, Warned)
            with begin(there, models[0], checkpoint=tmp_path if by_checkpoint else None) as again:
                if not by_checkpoint:
                    models[0].load_state_dict(weights)
                    again.load_state_dict(saved)
                assert again.local_epoch == 5
                assert again.load_state_from_peers()
                assert again.local_epoch == 40
    assert not [each.message for each in warnings if "gives up" in each.message]


def test_a_branch_that_cannot_be_kept_is_told(dht: shoal.DHT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, for example: training goes on."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "write_given_up", full)
    warnings, model = hear(dht, Warned), net()
    with begin(dht, model, checkpoint=tmp_path, save_every=0) as swarm:
        train(swarm, model, 1)
        assert swarm.keep_given_up() == checkpoint.given_up(tmp_path, swarm.collaboration.state)
    assert [each.message for each in warnings if "could not be saved" in each.message] == [
        f"the state that this peer gives up could not be saved in {tmp_path}, and is lost: No space left on device"
    ]


def test_weights_are_read_by_plain_safetensors(dht: shoal.DHT, tmp_path: Path) -> None:
    """A Hugging Face model with tied weights: they are written once, under its names."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    model, plain, resumed = (transformers.GPT2LMHeadModel(config) for _ in range(3))
    tokens = torch.arange(8).reshape(1, 8)
    with begin(dht, model) as swarm:
        while swarm.local_epoch < 2:
            model(input_ids=tokens, labels=tokens).loss.backward()
            swarm.step()
            swarm.zero_grad()
        path = swarm.save(tmp_path)
    weights = load_file(path / "model.safetensors")
    assert len(weights) == len(model.state_dict()) - 1
    load_model(plain, path / "model.safetensors")
    assert equal(dict(plain.state_dict()), dict(model.state_dict()))
    config.save_pretrained(path)
    again = transformers.GPT2LMHeadModel.from_pretrained(path)
    assert equal(dict(again.state_dict()), dict(model.state_dict()))
    with begin(dht, resumed, checkpoint=tmp_path):
        assert equal(dict(resumed.state_dict()), dict(model.state_dict()))


def test_frozen_weights_of_a_base_are_not_written(dht: shoal.DHT, tmp_path: Path) -> None:
    """They do not change: a LoRA's checkpoint is as small as the LoRA."""
    base = torch.nn.Linear(3, 3).requires_grad_(requires_grad=False)
    model = torch.nn.Sequential(base, torch.nn.Linear(3, 2))
    with begin(dht, model, lambda _: torch.optim.SGD(model[1].parameters(), lr=0.1)) as swarm:
        train(swarm, model, 1)
        path = swarm.save(tmp_path)
    assert load_file(path / "model.safetensors").keys() == {"1.weight", "1.bias"}


def test_the_weights_to_train_with_are_saved_while_others_stand_in_their_place(dht: shoal.DHT, tmp_path: Path) -> None:
    """Between `eval()` and `train()` of ScheduleFree."""
    kind = pytest.importorskip("pytorch_optimizer").ScheduleFreeAdamW
    model, resumed = net(), net(1)
    with begin(dht, model, kind, scheduler=None) as swarm:
        train(swarm, model, 3)
        before = [each.detach().clone() for each in model.parameters()]
        swarm.eval()
        swarm.save(tmp_path)
    with begin(dht, resumed, kind, scheduler=None) as swarm:
        swarm.eval()
        with pytest.raises(ConfigError, match="the optimizer is in eval mode: call train"):
            swarm.resume(tmp_path)
        swarm.train()
        swarm.resume(tmp_path)
        assert all(map(torch.equal, resumed.parameters(), before))


def test_a_checkpoint_is_saved_after_shutdown(tmp_path: Path) -> None:
    """As in the `finally:` of a program that SIGTERM ends."""
    model = net()
    with shoal.DHT(start=True) as dht:
        swarm = begin(dht, model)
        train(swarm, model, 2)
    path = swarm.save(tmp_path)
    swarm.shutdown()
    assert equal(load_file(path / "model.safetensors"), dict(model.state_dict()))
    with pytest.raises(shoal.errors.ClosedError):
        swarm.resume(tmp_path)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"save_every": 5}, "save_every needs checkpoint="),
        ({"keep_checkpoints": 5}, "keep_checkpoints needs checkpoint="),
        ({"checkpoint": ""}, "checkpoint must be the path"),
        ({"checkpoint": 3}, "checkpoint must be the path"),
        ({"checkpoint": "x", "save_every": -1}, "save_every must be a whole number of at least 0"),
        ({"checkpoint": "x", "keep_checkpoints": 0}, "keep_checkpoints must be a whole number of at least 1"),
        ({"checkpoint": __file__}, "is a file: give the path of a folder"),
    ],
)
def test_wrong_arguments_are_named(
    dht: shoal.DHT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], what: str
) -> None:
    """Before anything is done."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=what):
        begin(dht, net(), **options)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_when_the_optimizer_is_made(
    dht: shoal.DHT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To only go on from its checkpoints is fine."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="the folder cannot be written: change its rights"):
        begin(dht, net(), checkpoint=tmp_path)
    begin(dht, net(), checkpoint=tmp_path, save_every=0).shutdown()


# ----------------------------------------------------------------------------------------------------------- processes


def run(how: str) -> list[Any]:
    """What `checkpoint_kills` prints."""
    with tempfile.TemporaryDirectory(prefix="shoal-checkpoints-") as folder:
        Path(folder).chmod(0o755)
        command = [sys.executable, "-m", "tests.integration.checkpoint_kills", how, f"{folder}/ckpt"]
        with Talk(command) as talk:
            found: list[Any] = json.loads(talk.line())
        if how == "rights":
            Path(f"{folder}/ckpt").chmod(0o755)
    return found


def test_a_kill_at_any_moment_of_a_save_leaves_whole_checkpoints() -> None:
    """The one before up to some moment, the new one from then on; the next save clears up."""
    found = run("kills")
    assert len(found) > 30
    codes, epochs, whole, warned, left = zip(*found, strict=True)
    assert codes == (*[-9] * (len(found) - 1), 0)
    assert list(epochs) == sorted(epochs)
    assert {*epochs} == {2, 3}
    assert all(whole)
    assert not any(warned)
    assert {*left} == {1}


def test_a_full_disk_leaves_the_checkpoint_before() -> None:
    """The error says what is full; no part is left there."""
    found = run("full")
    for said, (epoch, left) in zip(found[::2], found[1::2], strict=True):
        failed = "File too large" in said
        assert failed or said == "done"
        assert (epoch, left) == ((1, ["epoch-00000001"]) if failed else (2, ["epoch-00000002"]))
    assert "File too large" in found[0]
    assert found[-2] == "done"


def test_a_folder_without_the_right_to_write() -> None:
    """It is an `OSError`, which names it."""
    (said,) = run("rights")
    assert "Permission denied" in said


class Crowd:
    """Peers with a folder each, or one for all."""

    def __init__(self, folder: Path, peers: int, *, shared: bool) -> None:
        self._folders = [folder / f"peer-{0 if shared else index}" for index in range(peers)]

    def start(self, end: int) -> list[Talk]:
        """Start all, the first one begins the network."""
        command = [sys.executable, "-m", "tests.integration.checkpoint_peer", str(end)]
        talks = [Talk([*command, str(folder)]) for folder in self._folders]
        talks[0].write("")
        invite = said(talks[0], "invite")
        for talk in talks[1:]:
            talk.write(invite)
            said(talk, "invite")
        return talks

    def saved(self) -> list[int]:
        """The newest epoch of each folder."""
        names = [[path.name for path in folder.glob("epoch-*")] for folder in self._folders]  # none that was given up
        return [max(int(name.split("-")[1]) for name in each) for each in names]


def said(talk: Talk, kind: str) -> Any:
    """What it says next of this kind."""
    while True:
        what, value = json.loads(talk.line())
        if what == kind:
            return value


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.long(full=True))])
def test_all_peers_are_killed_and_go_on_from_the_newest_checkpoint(tmp_path: Path, shared: bool) -> None:
    """One had no time to save the last ones: it downloads. All are at the newest state, and no epoch counts twice."""
    crowd = Crowd(tmp_path, 3, shared=shared)
    talks = crowd.start(1000)
    try:
        for talk in talks:
            talk.write("begin")
        before: list[list[str]] = [[] for _ in talks]
        for talk, lines in zip(talks, before, strict=True):
            while max(dict(epochs_of(lines)), default=0) < KILLED_AT:
                lines.append(talk.line())
    finally:
        for talk in talks:
            talk.process.kill()
        for talk, lines in zip(talks, before, strict=True):
            lines += talk.rest()
            talk.end()
    digests = {epoch: digest for lines in before for epoch, digest in epochs_of(lines)}
    if not shared:
        for path in sorted((tmp_path / "peer-0").glob("epoch-*"))[1:]:
            path.rename(tmp_path / path.name)
    newest = max(crowd.saved())  # not before: the first peer alone may have saved the last epoch
    assert shared or crowd.saved()[0] < newest

    talks = crowd.start(newest + MORE)
    try:
        resumed = [said(talk, "resumed") for talk in talks]
        assert resumed == [[epoch, digests[epoch]] for epoch in crowd.saved()]
        for talk in talks:
            talk.write("begin")
        after = [talk.rest() for talk in talks]
        assert [talk.wait() for talk in talks] == [0, 0, 0], [talk.errors() for talk in talks]
    finally:
        for talk in talks:
            talk.end()
    steps = [epochs_of(each) for each in after]
    taken = dict(step for each in steps for step in each)
    assert all(taken[epoch] == digest for each in steps for epoch, digest in each)
    assert sorted(taken) == list(range(newest + 1, newest + MORE + 1))
    assert all(len(dict(each)) == len(each) for each in steps)
    ends = [json.loads(each[-1])[1] for each in after]
    assert len({json.dumps(each) for each in ends}) == 1
    assert ends[0][0] == newest + MORE
    assert crowd.saved() == [newest + MORE] * 3


def epochs_of(lines: list[str]) -> list[tuple[int, str]]:
    """The steps that a peer has taken, each with a hash of what it held then."""
    said = [json.loads(line) for line in lines if line.endswith("\n")]  # a kill may tear the last one
    return [(value[0], value[1]) for kind, value in said if kind == "epoch"]


def test_the_last_state_is_saved_once(dht: shoal.DHT, tmp_path: Path) -> None:
    """By a program that ends early: not without a folder, without a step, or where it is saved; also after the end."""
    model = net()
    with begin(dht, model) as swarm:
        train(swarm, model, 1)
        assert swarm.save_last() is None
    model = net()
    swarm = begin(dht, model, run_id="other", checkpoint=tmp_path, save_every=2, keep_checkpoints=2)
    assert swarm.save_last() is None
    train(swarm, model, 2)
    assert swarm.save_last() is None
    assert [path.name.split("-")[1] for path in tmp_path.glob("epoch-*")] == ["00000002"]
    train(swarm, model, 3)
    swarm.shutdown()
    path = swarm.save_last()
    assert path is not None
    assert sorted(path.name.split("-")[1] for path in tmp_path.iterdir()) == ["00000002", "00000003"]
    assert swarm.save_last() is None
    resumed = begin(dht, net(), run_id="other", checkpoint=tmp_path)
    assert resumed.local_epoch == 3
    assert resumed.save_last() is None
