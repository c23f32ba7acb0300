"""Tensors in files, and optimizers that step some of their parameters at a time."""

from __future__ import annotations

import copy
import gc
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from safetensors.torch import load_file

from shoal.errors import ConfigError
from shoal.state.disk.tensor_file import Draft
from shoal.zero.memory import offload
from shoal.zero.memory.mapped import Extent, fetch, let_go, write_back
from shoal.zero.memory.offload import Offload, in_windows, problem_of
from shoal.zero.probe import tried_in_windows
from tests.limits import files_up_to

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are mapped on Linux only")

CPU = torch.device("cpu")
KINDS = ("SGD", "Adam", "NAdam", "RAdam", "Adagrad", "Rprop")
OTHERS = ("madgrad", "schedulefreeadamw", "adanorm", "ademamix", "adan", "laprop")


def mapped_files() -> int:
    """How many files without a name this process has mapped."""
    return Path("/proc/self/maps").read_text().count("(deleted)")


def test_values_outlast_their_memory_and_files_their_folder_but_not_their_tensors(tmp_path: Path) -> None:
    """Nothing has a name; what is let go comes back from the disk; the last tensor frees the file."""
    before, folder = mapped_files(), tmp_path / "folder"
    folder.mkdir()
    extent = Extent(folder, 1 << 20)
    assert list(folder.iterdir()) == []
    folder.rmdir()
    some, more = extent.take(torch.empty(3, 50_000)), extent.take(torch.empty(7, dtype=torch.float64))
    assert some is not None
    assert more is not None
    assert extent.take(torch.empty(1 << 20)) is None
    some.copy_(torch.arange(150_000.0).view(3, -1))
    more.fill_(2)
    write_back([some, more])
    let_go([some])
    fetch([some, more])
    assert torch.equal(some, torch.arange(150_000.0).view(3, -1))
    assert more.sum() == 14
    assert mapped_files() > before
    del extent, some, more
    gc.collect()
    assert mapped_files() == before


def test_one_tensor_is_saved_alone(tmp_path: Path) -> None:
    """`torch.save` writes the storage of a tensor, and that is not the whole file."""
    found = Extent(tmp_path, 1 << 20).take(torch.empty(10))
    written = io.BytesIO()
    torch.save(found, written)
    assert written.tell() < 10_000


def test_a_full_disk_is_an_error_before_memory_is_touched(tmp_path: Path) -> None:
    """By the limit of a file's size, which counts when it is allocated."""
    with files_up_to(1 << 16), pytest.raises(OSError, match="too large"):
        Extent(tmp_path, 1 << 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [3, "", b"", True, object()])
def test_what_is_no_folder_is_refused(wrong: object) -> None:
    """An empty path, too."""
    assert "offload must be" in (problem_of(wrong) or "")


def test_a_folder_must_exist(tmp_path: Path) -> None:
    """It may be given in any way that paths are."""
    assert problem_of(None) is problem_of("cpu") is problem_of(tmp_path) is problem_of(str(tmp_path)) is None
    assert "make it" in (problem_of(tmp_path / "none") or "")


class Two(torch.nn.Module):
    """Some tensors in two groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def groups(self) -> list[dict[str, Any]]:
        """Weights and biases."""
        return [
            {"params": [each.weight for each in self.layers], "weight_decay": 0.1},
            {"params": [each.bias for each in self.layers]},
        ]


def of_kind(name: str) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """A factory."""
    if name in KINDS:
        kind: Any = getattr(torch.optim, name)
        return lambda groups: kind(groups, lr=0.1, momentum=0.9) if name == "SGD" else kind(groups, lr=0.1)
    other: Any = pytorch_optimizer.load_optimizer(name)
    return lambda groups: other(groups, lr=0.1)


@torch.no_grad()
def step(kept: Offload, inner: torch.optim.Optimizer) -> int:
    """In windows; returns how many."""
    return sum(inner.step() is None for _ in kept.windows(inner))


@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_windows_change_no_bit_and_files_hold_the_state(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Steps in windows of a tensor or two; what counts steps for all counts each once; copies of state fit back in."""
    monkeypatch.setattr(offload, "WINDOW_NUMEL", 70)
    (model, plain), kept = (Two(), Two()), Offload(tmp_path, CPU)
    inner, alone = of_kind(name)(model.groups()), of_kind(name)(plain.groups())
    kept.prepare(inner, model, 1, None, 1)
    saved: Any = None
    for number in range(5):
        made = torch.Generator().manual_seed(number)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=made)
            other.grad = mine.grad.clone()
        alone.step()
        groups = [list(group["params"]) for group in inner.param_groups]
        parts = step(kept, inner)
        assert [list(group["params"]) for group in inner.param_groups] == groups
        assert parts > 2
        if number == 2:
            saved = copy.deepcopy(inner.state_dict())
            inner.load_state_dict(saved)
            kept.settle(inner)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
    state = [each for entry in inner.state.values() if isinstance(entry, dict) for each in entry.values()]
    large = [each for each in state if isinstance(each, torch.Tensor) and each.numel() > 1]
    assert large
    assert all(map(kept.holds, large))
    for here, there in zip(inner.param_groups, alone.param_groups, strict=True):
        for key in here.keys() - {"params"}:
            assert here[key] == there[key], key


@pytest.mark.parametrize("name", ["prodigy", "dadaptadam"])
def test_what_looks_at_all_parameters_cannot_be_stepped_in_windows(name: str, tmp_path: Path) -> None:
    """It is found by trying, and the model's own optimizer has not moved."""
    model = Two()
    inner = of_kind(name)(model.groups())
    with pytest.raises(ConfigError, match="cannot be offloaded to a folder"):
        Offload(tmp_path, CPU).prepare(inner, model, 1, None, 1)
    assert not any(isinstance(key, torch.Tensor) for key in inner.state)


def test_bytes_that_are_kept_for_each_value_are_found_by_trying() -> None:
    """AdamW keeps two float32 values, SGD without momentum none."""
    model = Two()
    kinds = (torch.optim.AdamW, torch.optim.SGD)
    found = [tried_in_windows(kind(model.parameters()), model, in_windows) for kind in kinds]
    assert found == [(None, 8.0), (None, 0.0)]


def test_a_disk_that_is_full_too_late_keeps_new_state_in_memory(tmp_path: Path, monkeypatch: Any) -> None:
    """The step is taken, an error says so, and the next step finds room again."""
    monkeypatch.setattr(offload, "WINDOW_NUMEL", 70)
    model, kept = Two(), Offload(tmp_path, CPU)
    inner, before = torch.optim.AdamW(model.groups()), [each.clone() for each in model.parameters()]
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    with files_up_to(1 << 10), pytest.raises(ConfigError, match="cannot be allocated"):
        step(kept, inner)
    for now, then in zip(model.parameters(), before, strict=True):
        assert (now != then).all()
    assert not any(kept.holds(entry["exp_avg"]) for entry in inner.state.values())
    step(kept, inner)
    assert all(kept.holds(entry["exp_avg"]) and entry["step"] == 2 for entry in inner.state.values())


def test_an_optimizer_that_raises_has_all_its_parameters_again(tmp_path: Path) -> None:
    """In the middle of its windows."""
    model = Two()
    inner = torch.optim.SGD(model.groups())
    windows = Offload(tmp_path, CPU).windows(inner)
    assert len(next(windows)) == 6
    inner.param_groups[0]["params"] = []
    windows.close()
    assert [len(group["params"]) for group in inner.param_groups] == [3, 3]


def test_tensors_are_written_one_after_another_as_safetensors_reads_them(tmp_path: Path) -> None:
    """All dtypes that it knows, empty ones, scalars, and views of common memory."""
    memory = torch.arange(24.0)
    tensors = {
        "view": memory[3:9],
        "transposed": memory.view(4, 6).T,
        "narrow": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5),
        "flags": torch.tensor([True, False, True]),
    }
    order: list[str] = []
    Draft(tensors, order.append).write(tmp_path / "file")
    assert sorted(order) == sorted([*tensors, *tensors])
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, each in tensors.items():
        assert found[name].dtype == each.dtype
        assert torch.equal(found[name], each)
    with files_up_to(200), pytest.raises(OSError, match="too large"):
        Draft(tensors).write(tmp_path / "short")
