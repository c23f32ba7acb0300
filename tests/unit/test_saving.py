"""The saves beside a training: what fails is told, and tried again at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.events import Event, Warned
from shoal.run.decide.committed import Committed
from shoal.run.decide.state_name import StateName
from shoal.run.disk.checkpoint import Content, Files, copy_of
from shoal.run.disk.saving import Saver
from shoal.run.join.shared_state import share
from shoal.train.training_state import TrainingState


class Saves:
    """A saver in a folder that is not there, and what it tells."""

    def __init__(self, folder: Path) -> None:
        self.told: list[Event] = []
        self.folder = folder
        self.saver = Saver(self.told.append, "run", folder, every=1, keep=3, given=(), timeout_s=10.0)
        self.copies = 0

    def step(self, epoch: int, *, finished: bool = False) -> list[str]:
        """Save the state of this epoch; the warnings that came of it."""
        name, before = StateName(epoch, bytes(32), epoch), len(self.told)

        def copy(_memory: Files | None) -> Content:
            self.copies += 1
            parameter = torch.nn.Parameter(torch.zeros(3))
            training = TrainingState(torch.optim.SGD([parameter], lr=0.1))
            state = share(training, name, Committed())
            return copy_of("run", state, name, {}, training.tensors.all, {"weight": parameter})

        self.saver.at_step(name, copy, finished=finished)
        assert self.saver._has_ended(10.0)
        return [each.message for each in self.told[before:] if isinstance(each, Warned)]


@pytest.mark.parametrize("said_before", [1, 2])
def test_a_full_disk_is_told_again_when_the_save_at_the_end_fails(tmp_path: Path, said_before: int) -> None:
    """It was told once, and a run of hours ended without a word: nothing of it was saved."""
    saves = Saves(tmp_path / "gone")
    for epoch in range(1, said_before + 1):
        assert len(saves.step(epoch)) == (epoch == 1)
    (message,) = saves.step(said_before + 1, finished=True)
    assert message.startswith(f"no checkpoint was saved in {saves.folder}: No such file or directory, ")
    assert "The run has ended, and its last weights are in this program alone" in message
    assert "next one will be tried" not in message


def test_the_last_state_is_tried_again_at_the_end_and_only_once(tmp_path: Path) -> None:
    """It was tried as one of those in between; `step` may be called any number of times after the end."""
    saves = Saves(tmp_path / "gone")
    assert len(saves.step(1)) == 1
    assert saves.step(1) == []
    assert len(saves.step(1, finished=True)) == 1
    assert saves.copies == 2
    assert saves.step(1, finished=True) == []
    assert saves.copies == 2


def test_the_last_state_is_saved_at_the_end_where_there_is_room_again(tmp_path: Path) -> None:
    """The same state failed before."""
    saves = Saves(tmp_path / "mended")
    saves.step(1)
    saves.folder.mkdir()
    assert saves.step(1, finished=True) == []
    assert [each.name.split("-")[1].lstrip("0") for each in saves.folder.iterdir()] == ["1"]
    assert saves.saver.has_saved(StateName(1, bytes(32), 1))
    assert saves.step(1, finished=True) == []
    assert saves.copies == 2


def test_a_full_disk_is_told_the_first_the_tenth_and_the_hundredth_time(tmp_path: Path) -> None:
    """Each with its count; another reason, or a save in between, begins anew."""
    saves = Saves(tmp_path / "gone")
    said = {epoch: found for epoch in range(1, 121) if (found := saves.step(epoch))}
    assert list(said) == [1, 10, 100]
    assert ", 10 times in a row. Training goes on" in said[10][0]
    saves.folder.mkdir()
    assert saves.step(121) == []
    saves.folder.rename(tmp_path / "away")
    assert len(saves.step(122)) == 1
