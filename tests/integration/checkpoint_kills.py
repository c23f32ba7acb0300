"""Writes checkpoints where it is killed, or where there is no room, in forks of this process; prints JSON.

Run as `python -m tests.integration.checkpoint_kills HOW FOLDER`. `kills`: the points at which a process that saved was
killed, and what was left. `full`: what a save says where a file may not grow, and what is left. `rights`: what a save
says without the right to write.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from shoal.run.decide.committed import Committed
from shoal.run.decide.state_name import StateName
from shoal.run.disk.checkpoint import Content, copy_of, newest, write
from shoal.run.join.shared_state import share
from shoal.state.disk import folder as state_folder
from shoal.state.disk import tensor_file
from shoal.train.training_state import TrainingState

NOBODY = 65534
AUDITED, REMOVES = ("open", "os.", "shutil."), ("os.remove", "os.rmdir")


def content(epoch: int) -> Content:
    """A state with some tensors."""
    parameters = [torch.nn.Parameter(torch.full((100,), float(epoch))) for _ in range(3)]
    training = TrainingState(torch.optim.SGD(parameters, lr=0.1))
    name = StateName(epoch, bytes(32), epoch)
    model = {f"weights.{index}": each for index, each in enumerate(parameters[:2])}
    return copy_of("run", share(training, name, Committed()), name, {}, training.tensors.all, model)


def in_fork(function: Callable[[], object]) -> int:
    """Call it in a fork; returns how the fork ended: 0, or the negative number of a signal."""
    if (pid := os.fork()) == 0:
        try:
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die() -> NoReturn:
    """As if the power went."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Points:
    """Counts the moments at which the folder changes, and dies at one of them.

    Args:
        folder: of the checkpoints.
        last: the moment at which it dies.
    """

    def __init__(self, folder: Path, last: int) -> None:
        self._folder, self._last, self._count = str(folder), last, 0
        sys.addaudithook(self.heard)
        self._flush = tensor_file.flush
        for module in (tensor_file, state_folder):
            vars(module)["flush"] = self.flush
        points, written = self, tensor_file.Draft.write

        def write(self: tensor_file.Draft, path: Path) -> None:
            """Write a file of tensors: not at all, half of it, or all of it."""
            points.point()
            written(self, path)
            points.point(lambda: os.truncate(path, path.stat().st_size // 2))
            points.point()

        tensor_file.Draft.write = write  # type: ignore[method-assign]

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python is about to open, make, rename or remove something."""
        if event in REMOVES or (event.startswith(AUDITED) and self._folder in f"{arguments}"):
            self.point()

    def point(self, spoil: Callable[[], None] = lambda: None) -> None:
        """Die here, if this is it; `spoil` is done before."""
        self._count += 1
        if self._count == self._last:
            spoil()
            die()

    def flush(self, path: Path) -> None:
        """Bring it to the disk, or die behind that."""
        self._flush(path)
        self.point()


def kills(folder: Path) -> list[Any]:
    """At each point: what is left; and after another save, with `keep=1`, how many folders."""
    found = []
    for point in range(1, 200):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write(folder, content(1), None)
        write(folder, content(2), None)

        def save(point: int = point) -> None:
            Points(folder, point)
            write(folder, content(3), 1)

        code = in_fork(save)
        warned: list[str] = []
        left = newest(folder, "run", warned.append)
        whole = left is not None and all(bool((each == left.name.epoch).all()) for each in left.tensors)
        write(folder, content(3), 1)
        listed = [path for path in folder.iterdir() if not path.name.endswith(".part")]
        found.append([code, left.name.epoch if left is not None else None, whole, warned, len(listed)])
        if code == 0:
            return found
    raise AssertionError


def full(folder: Path) -> list[Any]:
    """Files of so many bytes at most."""
    found: list[Any] = []
    for room in (0, 100, 700, 1000, 1500):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write(folder, content(1), None)

        def save(room: int = room) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            report(lambda: write(folder, content(2), 1))

        found.append(hear(save))
        left = newest(folder, "run", found.append)
        found.append([left and left.name.epoch, [path.name[:14] for path in folder.iterdir()]])
    return found


def rights(folder: Path) -> list[Any]:
    """Nobody may write there."""
    folder.mkdir(parents=True)
    write(folder, content(1), None)
    folder.chmod(0o555)

    def save() -> None:
        if os.geteuid() == 0:
            os.setuid(NOBODY)
        report(lambda: write(folder, content(2), 1))

    return [hear(save)]


_pipe = os.pipe()


def report(function: Callable[[], object]) -> None:
    """Tell the parent what it raised."""
    try:
        function()
    except OSError as error:
        os.write(_pipe[1], f"{error}".encode())
    else:
        os.write(_pipe[1], b"done")


def hear(function: Callable[[], None]) -> str:
    """Call it in a fork; returns what it reports."""
    in_fork(function)
    return os.read(_pipe[0], 1 << 16).decode()


def main() -> None:
    """See above."""
    torch.set_num_threads(1)
    how: dict[str, Callable[[Path], list[Any]]] = {"kills": kills, "full": full, "rights": rights}
    print(json.dumps(how[sys.argv[1]](Path(sys.argv[2]))))


if __name__ == "__main__":
    main()
