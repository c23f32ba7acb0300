"""Checkpoints that earlier versions wrote, as files in `tests/data/states`: read as those of today."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shoal.zero
from shoal.errors import ConfigError
from shoal.run.disk.checkpoint import Saved, newest
from shoal.train.training_state import TrainingState

STATES = Path(__file__).parents[1] / "data" / "states"
RUNS = ("run-1", "run-2")
ZEROS = ("zero-adamw", "zero-adafactor")


def run_of(form: str) -> Saved:
    """The checkpoint of a run in a format, read without a warning."""
    warned: list[str] = []
    found = newest(STATES / form, "old", warned.append)
    assert warned == []
    assert found is not None
    return found


def values_of(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each parameter what was saved: itself, and its statistics in AdamW."""
    found = {}
    for place, (name, each) in enumerate(model.named_parameters()):
        values = torch.arange(each.numel(), dtype=torch.float32).reshape(each.shape) + 10 * place
        found[name] = values, values * 2, values * 3 + 1
    return found


def model_of_run() -> torch.nn.Sequential:
    """The model that was trained."""
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def assert_is_of_run(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """They hold the weights, the statistics and the rates that were saved."""
    parameters = dict(model.named_parameters())
    for name, (values, first, second) in values_of(model).items():
        state = optimizer.state[parameters[name]]
        assert torch.equal(parameters[name], values)
        assert torch.equal(state["exp_avg"], first)
        assert torch.equal(state["exp_avg_sq"], second)
        assert state["step"] == 3
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


@pytest.mark.parametrize("form", RUNS)
def test_a_run_goes_on_from_a_checkpoint_of_an_earlier_version(form: str) -> None:
    """The name of the state, weights, statistics and rates: format 1 names each statistic, format 2 their forms."""
    saved, model = run_of(form), model_of_run()
    assert (saved.name.epoch, saved.name.digest, saved.name.samples) == (7, bytes(range(32)), 70)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    training = TrainingState(optimizer)
    training.load(saved.values, saved.tensors)
    assert_is_of_run(model, optimizer)
    assert saved.model.keys() == model.state_dict().keys()


@pytest.mark.parametrize("form", RUNS)
def test_a_damaged_checkpoint_of_an_earlier_version_is_named(tmp_path: Path, form: str) -> None:
    """Its checksums are CRC-32."""
    (path,) = shutil.copytree(STATES / form, tmp_path / form).iterdir()
    file = path / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    warned: list[str] = []
    assert newest(path.parent, "old", warned.append) is None
    (message,) = warned
    assert "in state.safetensors is not what was written" in message


@pytest.mark.parametrize("form", RUNS)
def test_a_checkpoint_of_a_run_is_read_as_one_of_plain_torch(form: str) -> None:
    """Weights, buffers, statistics and options by the names of the model: whatever wrote it."""
    (path,) = (STATES / form).iterdir()
    found, model = shoal.zero.consolidate(path), model_of_run()
    assert found["model"].keys() == model.state_dict().keys()
    model.load_state_dict(found["model"])
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    optimizer.load_state_dict(found["optimizer"])
    assert_is_of_run(model, optimizer)


def same(first: Any, second: Any) -> bool:
    """Equal, tensors to the bit."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.mark.parametrize("form", ZEROS)
def test_a_checkpoint_of_zero_of_an_earlier_version_is_read(form: str) -> None:
    """Tied weights, channels last, moving averages, what was given as extra, statistics of other shapes."""
    wanted = torch.load(STATES / f"{form}.expected.pt", weights_only=True)
    assert same(shoal.zero.consolidate(STATES / form), wanted)


@pytest.mark.parametrize("form", ZEROS)
def test_a_damaged_checkpoint_of_zero_of_an_earlier_version_is_named(tmp_path: Path, form: str) -> None:
    """A bit of a value, and one of a name."""
    for place in (-1, 200):
        path = shutil.copytree(STATES / form, tmp_path / f"{form}{place}")
        file = min(path.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=f"{path} is damaged: .*{file.name}"):
            shoal.zero.consolidate(path)


def test_a_checkpoint_from_before_checksums_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a warning: nothing in it can be checked."""
    path = shutil.copytree(STATES / "zero-adamw", tmp_path / "copy")
    index = json.loads((path / "index.json").read_text())
    index.pop("checksum")
    for name, entry in index["files"].items():
        save_file(load_file(path / name), path / name)
        entry["bytes"] = (path / name).stat().st_size
    (path / "index.json").write_text(json.dumps(index))
    assert same(shoal.zero.consolidate(path), shoal.zero.consolidate(STATES / "zero-adamw"))
    (told,) = [each.getMessage() for each in caplog.records]
    assert told.startswith(f"{path} was saved without checksums: damaged values in it would not be noticed (docs:")


def test_no_run_goes_on_from_a_checkpoint_of_zero(tmp_path: Path) -> None:
    """It has no name of a state: what can be done with it is said."""
    for form in ZEROS:
        with pytest.raises(ConfigError, match=r"is a checkpoint of shoal\.zero, and no run goes on from it"):
            newest(STATES / form, "run", lambda _: None)
    assert newest(tmp_path, "run", lambda _: None) is None


class Model(torch.nn.Module):
    """The model that ZeRO has trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 2)
        self.layer, self.tied, self.frozen = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        self.tied.weight = self.layer.weight
        self.frozen.requires_grad_(requires_grad=False)
        self.norm = torch.nn.BatchNorm1d(4)


@pytest.mark.parametrize("form", ZEROS)
def test_a_run_begins_with_what_zero_has_saved(form: str) -> None:
    """Weights for the model, and a state dictionary for its optimizer, which is looked at and tried first."""
    found, model = shoal.zero.consolidate(STATES / form), Model()
    model.load_state_dict(found["model"])
    make = torch.optim.AdamW if form == "zero-adamw" else torch.optim.Adafactor
    optimizer = make([each for each in model.parameters() if each.requires_grad])
    training = TrainingState(optimizer)
    training.kept.switch(training.kept.prepare_loaded(found["optimizer"]))
    assert same(optimizer.state_dict()["state"], found["optimizer"]["state"])
    assert same(model.state_dict(), found["model"])
