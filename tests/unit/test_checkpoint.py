"""Checkpoints on disk: whole or not there, the best one taken, nobody else's removed."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.errors import ConfigError
from shoal.run.decide.committed import Committed
from shoal.run.decide.state_name import StateName
from shoal.run.disk import checkpoint
from shoal.run.disk.checkpoint import Content, Saved, copy_of, newest, write
from shoal.run.join.shared_state import share
from shoal.state.disk.folder import FORMAT, seal
from shoal.train.training_state import TrainingState
from tests.odd_torch import ODD
from tests.unit.optimizer_cases import optimizer_by_name, parameters, shapes_for, step, training_of


def name(epoch: int, samples: int = 0, digest: int = 0) -> StateName:
    """A state's."""
    return StateName(epoch, bytes([digest]) * 32, samples)


def content(epoch: int, run_id: str = "run", *, value: float = 0.0, digest: int = 0, settings: str = "") -> Content:
    """A small state."""
    parameter = torch.nn.Parameter(torch.full((3,), value + epoch))
    training = TrainingState(torch.optim.SGD([parameter], lr=0.1, momentum=0.9))
    own = name(epoch, digest=digest)
    state, model = share(training, own, Committed()), {"weight": parameter}
    return copy_of(run_id, state, own, {"tensors": settings}, training.tensors.all, model)


def no_warning(message: str) -> None:
    """Nothing is wrong."""
    raise AssertionError(message)


def epochs(folder: Path) -> list[int]:
    """Of all that lies there."""
    return sorted(int(path.name.split("-")[1]) for path in folder.iterdir())


def best(folder: Path, run_id: str = "run") -> Saved:
    """The checkpoint that a peer would take, without a warning."""
    found = newest(folder, run_id, no_warning)
    assert found is not None
    return found


def test_tensors_of_every_kind_come_back_to_the_bit(tmp_path: Path) -> None:
    """16 bits, 64 bits, single values, empty ones, views of one memory, and those that lie by columns."""
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = [
        torch.randn(4, dtype=torch.bfloat16),
        torch.randn(2, 3, dtype=torch.float64),
        torch.tensor(7.0),
        torch.empty(0, 5),
        whole[:, :2].t(),
        whole[1:, 2::2],
        whole.reshape(-1)[2:5],
        torch.ones(1).expand(4),
    ]
    extras = [torch.tensor([1, 2, 3]), torch.tensor([True, False]), torch.tensor([1.0, float("inf")])]
    parameters = [torch.nn.Parameter(each.clone() if each is tensors[-1] else each) for each in tensors]
    training = TrainingState(torch.optim.SGD(parameters, lr=0.1), extra_tensors=extras)
    state = share(training, name(1), Committed())
    model: dict[str, torch.Tensor] = {f"layer.{index}": each for index, each in enumerate(parameters[:5])}
    model |= {"tied": parameters[0], "buffer": torch.arange(3), "shared": whole}
    path, size = write(tmp_path, copy_of("run", state, name(1), {}, training.tensors.all, model), 1)
    assert size == sum(each.stat().st_size for each in path.iterdir())
    saved = best(tmp_path)
    assert saved.name == name(1)
    assert saved.values == json.loads(json.dumps(state.metadata["training"]))
    for ours, theirs in zip(saved.tensors, state.tensors, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous()
    assert load_file(path / "model.safetensors").keys() == {*(f"layer.{i}" for i in range(5)), "buffer", "shared"}


@pytest.mark.parametrize("odd", ["no memory by default", "float16 by default", "inference_mode"])
def test_a_checkpoint_comes_back_whatever_torch_does_by_default(tmp_path: Path, odd: str) -> None:
    """Safetensors makes tensors on the default device: those on "meta" had no values, and it passed for damaged."""
    write(tmp_path, content(3), 1)
    with ODD[odd]():
        saved = best(tmp_path)
    assert saved.tensors[0].tolist() == [3.0] * 3


@pytest.mark.parametrize(
    "kind",
    [
        *("torch.optim.AdamW", "torch.optim.Adafactor", "torch.optim.Muon", "torch.optim.ASGD", "torch.optim.Rprop"),
        *("pytorch_optimizer.Ranger21", "pytorch_optimizer.SOAP", "pytorch_optimizer.Shampoo", "pytorch_optimizer.SM3"),
        *("bitsandbytes.optim.AdamW8bit", "transformers.Adafactor"),
    ],
)
def test_an_optimizer_goes_on_from_a_checkpoint_as_without_a_break(tmp_path: Path, kind: str) -> None:
    """Matrices, lists, numbers in groups and in attributes, statistics in 8 bits."""
    make, shapes = optimizer_by_name(kind), shapes_for(kind)
    saved, resumed = (training_of(make, parameters(shapes=shapes)) for _ in range(2))
    for number in range(3):
        step(saved, number)
    state = share(saved, name(3), Committed())
    write(tmp_path, copy_of("run", state, name(3), {}, saved.tensors.all, {"first": saved.parameters[0]}), 1)
    found = best(tmp_path)
    resumed.load(found.values, found.tensors)
    for number in (3, 4):
        step(saved, number)
        step(resumed, number)
    assert all(map(torch.equal, saved.parameters, resumed.parameters))


def test_saving_removes_worse_states_beyond_keep_and_nothing_else(tmp_path: Path) -> None:
    """Checkpoints of a better state, of another run, of another model, and files of the user stay."""
    for epoch in (1, 2, 3, 9):
        write(tmp_path, content(epoch), None)
    write(tmp_path, content(1, "other"), None)
    write(tmp_path, content(2, settings="other tensors"), None)
    (tmp_path / "epoch-00000001-notes.txt").touch()
    write(tmp_path, content(4), 2)
    assert epochs(tmp_path) == [1, 1, 2, 3, 4, 9]
    write(tmp_path, content(5), 1)
    assert epochs(tmp_path) == [1, 1, 2, 5, 9]
    assert best(tmp_path).name.epoch == 9
    assert best(tmp_path, "other").name.epoch == 1


def test_one_of_several_states_is_looked_for_in_a_folder(tmp_path: Path) -> None:
    """The best one of these, though a better one is there."""
    for epoch in (1, 2, 3):
        write(tmp_path, content(epoch, digest=epoch), None)
    found = newest(tmp_path, "run", no_warning, [bytes([epoch]) * 32 for epoch in (1, 2)])
    assert found is not None
    assert found.name.epoch == 2
    assert newest(tmp_path, "run", no_warning, [b"another"]) is None


def test_two_peers_that_share_a_folder_keep_each_others_checkpoints(tmp_path: Path) -> None:
    """Equal content is written once. Of one state with other statistics of normalization both stay."""
    first, size = write(tmp_path, content(5), 1)
    assert size > 0
    assert write(tmp_path, content(5), 1) == (first, 0)
    other, _ = write(tmp_path, content(5, value=1.0), 1)
    worse, _ = write(tmp_path, content(4), 1)
    assert {first, other, worse} == set(tmp_path.iterdir())
    assert best(tmp_path).path == other  # the later one of the best state


def test_two_peers_that_write_at_the_same_time(tmp_path: Path) -> None:
    """All checkpoints are whole, and no part is left."""
    errors: list[BaseException] = []

    def save(peer: int) -> None:
        try:
            for epoch in range(20):
                write(tmp_path, content(epoch, value=float(peer % 2)), 2)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=save, args=(peer,)) for peer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert epochs(tmp_path) in ([18, 18, 19, 19], [19, 19], [18, 19, 19])
    assert best(tmp_path).name.epoch == 19


def swap(path: Path, *, file: bool) -> None:
    """A file where a folder was, or a folder where a file was."""
    if file:
        shutil.rmtree(path)
        path.touch()
    else:
        path.unlink()
        path.mkdir()


def drop(path: Path) -> None:
    """Nothing is there any more."""
    shutil.rmtree(path)
    path.symlink_to(path.with_name("nowhere"))


def flip(path: Path, place: int) -> None:
    """Flip a bit."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def reindex(path: Path, **changes: Any) -> None:
    """Another index, with a right digest."""
    index = json.loads((path / "checkpoint.json").read_text())
    index.pop("digest")
    (path / "checkpoint.json").write_text(seal({**index, **changes}))


def revalue(path: Path, **changes: Any) -> None:
    """Other values in the index, with a right digest."""
    values = json.loads((path / "checkpoint.json").read_text())["values"]
    reindex(path, values={**values, **changes})


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path / "model.safetensors", 90),
    "an empty file": lambda path: os.truncate(path / "model.safetensors", 0),
    "a flipped value": lambda path: flip(path / "model.safetensors", -1),
    "a flipped header": lambda path: flip(path / "model.safetensors", 12),
    "a flipped index": lambda path: flip(path / "checkpoint.json", 60),
    "an empty index": lambda path: os.truncate(path / "checkpoint.json", 0),
    "no index": lambda path: (path / "checkpoint.json").unlink(),
    "no model": lambda path: (path / "model.safetensors").unlink(),
    "a folder for a file": lambda path: swap(path / "model.safetensors", file=False),
    "a link to nowhere": drop,
    "a file for a folder": lambda path: swap(path, file=True),
    "no name": lambda path: revalue(path, state=[9, "00", 0]),
    "a tensor too many": lambda path: revalue(
        path, tensors=[["model.safetensors", "weight"], ["model.safetensors", ""]]
    ),
    "no checksum": lambda path: (path / "checkpoint.json").write_text('{"format": 1}'),
    "no end": lambda path: (path / "checkpoint.json").write_text("[" * 200_000),
    "a list": lambda path: (path / "checkpoint.json").write_text("[]"),
    "no text": lambda path: (path / "checkpoint.json").write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, how: str) -> None:
    """The one before is taken; and a new one of the same content takes its place."""
    write(tmp_path, content(1), None)
    path, _ = write(tmp_path, content(2), None)
    DAMAGES[how](path)
    told: list[str] = []
    found = newest(tmp_path, "run", told.append)
    assert found is not None
    assert found.name.epoch == 1
    (message,) = told
    assert message.startswith(f"the checkpoint {path} is damaged, and is passed over: ")
    assert write(tmp_path, content(2), 1)[1] > 0
    assert best(tmp_path).name.epoch == 2
    assert epochs(tmp_path) == [2]


def test_damage_of_a_checkpoint_that_was_named_is_an_error(tmp_path: Path) -> None:
    """It was asked for; the folder above it works."""
    write(tmp_path, content(1), None)
    path, _ = write(tmp_path, content(2), None)
    assert newest(tmp_path / path.name, "run", no_warning) is not None
    flip(path / "model.safetensors", -1)
    with pytest.raises(ConfigError, match=r"is damaged: weight in model.safetensors is not what was written"):
        newest(path, "run", no_warning)


def test_where_there_is_no_checkpoint_there_is_none(tmp_path: Path) -> None:
    """A folder that is empty, that is missing, or that holds only what a kill has left."""
    assert newest(tmp_path, "run", no_warning) is None
    assert newest(tmp_path / "nowhere", "run", no_warning) is None
    shutil.copytree(write(tmp_path / "..", content(1), None)[0], tmp_path / ".epoch-00000001-0000000000000000.00.part")
    assert newest(tmp_path, "run", no_warning) is None
    with pytest.raises(ConfigError, match="the folder of checkpoints cannot be read"):
        newest(Path(__file__), "run", no_warning)


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    """A folder with some of ours is fine."""
    path, _ = write(tmp_path, content(1, "other"), None)
    for each in (tmp_path, path):
        with pytest.raises(ConfigError, match="holds checkpoints of run 'other', and this is run 'run': give another"):
            newest(each, "run", no_warning)
    write(tmp_path, content(1), None)
    assert best(tmp_path).name.epoch == 1


def test_a_checkpoint_of_a_later_version_is_refused_and_kept(tmp_path: Path) -> None:
    """It is no damage: the user has to know, and another run's beside it is none to go on from."""
    path, _ = write(tmp_path, content(1), None)
    reindex(path, format=FORMAT + 1, shoal="9.8")
    write(tmp_path, content(1, "other"), None)
    for each in (tmp_path, path):
        with pytest.raises(ConfigError, match=rf"has format {FORMAT + 1}, of a later version of shoal \(9\.8\)"):
            newest(each, "run", no_warning)
    write(tmp_path, content(2), 1)
    assert path.exists()


def test_a_checkpoint_of_a_later_version_beside_a_good_one_is_passed_over_and_named(tmp_path: Path) -> None:
    """No peer of this version could begin from a folder that it shares with a later one."""
    good, _ = write(tmp_path, content(1), None)
    path, _ = write(tmp_path, content(2), None)
    reindex(path, format=FORMAT + 1, shoal="9.8")
    told: list[str] = []
    found = newest(tmp_path, "run", told.append)
    assert found is not None
    assert found.path == good
    (message,) = told
    assert message.startswith("a checkpoint is of a later version of shoal, and is passed over: ")
    assert f"{path} has format {FORMAT + 1}, of a later version of shoal (9.8)" in message
    flip(good / "model.safetensors", -1)
    told.clear()
    with pytest.raises(ConfigError, match="of a later version of shoal"):  # to begin anew is not what is wanted
        newest(tmp_path, "run", told.append)
    (message,) = told
    assert message.startswith(f"the checkpoint {good} is damaged, and is passed over: ")


def test_a_checkpoint_that_another_peer_removes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is damaged: the folder is looked at again."""
    write(tmp_path, content(1), None)
    read = checkpoint._read

    def read_late(found: Any) -> Saved:
        if found.values.name.epoch == 1:
            write(tmp_path, content(2), 1)
        return read(found)

    monkeypatch.setattr(checkpoint, "_read", read_late)
    assert best(tmp_path).name.epoch == 2


def test_what_a_kill_has_left_is_removed_when_nobody_writes_it_any_more(tmp_path: Path) -> None:
    """By the clock of the file system; what is being written stays."""
    old, fresh = (tmp_path / f".epoch-00000001-{each}.part" for each in ("old", "fresh"))
    for part in (old, fresh):
        part.mkdir()
        (part / "model.safetensors").touch()
    for each in (old, old / "model.safetensors", fresh):
        os.utime(each, (0, 0))
    write(tmp_path, content(1), 1)
    assert not old.exists()
    assert fresh.exists()


def test_a_linked_checkpoint_is_read_and_only_the_link_removed(tmp_path: Path) -> None:
    """The user has moved one to another disk."""
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "there")
    path, _ = write(tmp_path / "here", content(1), None)
    moved = path.rename(tmp_path / "moved")
    path.symlink_to(moved)
    assert best(tmp_path / "here").name.epoch == 1
    write(tmp_path / "here", content(2), 1)
    assert epochs(tmp_path / "there") == [2]
    assert (moved / "checkpoint.json").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_went_wrong_is_not_saved(tmp_path: Path, value: float) -> None:
    """Else it would take the place of the good ones."""
    write(tmp_path, content(1), 1)
    with pytest.raises(ConfigError, match=r"the state went wrong: tensor 0 of the state holds .*, and is not saved"):
        write(tmp_path, content(2, value=value), 1)
    assert epochs(tmp_path) == [1]


def test_the_memory_of_a_copy_is_used_again() -> None:
    """To touch new memory takes longer than the copy."""
    first, parameter = content(1), torch.nn.Parameter(torch.zeros(3))
    training = TrainingState(torch.optim.SGD([parameter], lr=0.1))
    state, model = share(training, name(2), Committed()), {"weight": parameter, "new": torch.ones(2)}
    second = copy_of("run", state, name(2), {}, training.tensors.all, model, first.files)
    assert second.files["model.safetensors"]["weight"] is first.files["model.safetensors"]["weight"]
    assert second.files["model.safetensors"]["weight"].tolist() == [0, 0, 0]
