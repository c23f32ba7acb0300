"""Programs that save in one folder of checkpoints: who is alive, and who trains apart."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from shoal import sim
from shoal.base.clock import InlineExecutor
from shoal.base.peer import PeerID
from shoal.base.tasks import stopped
from shoal.protocol.identity import Identity
from shoal.run.disk.folder_users import FolderUsers

pytest.importorskip("fcntl")

PROCESS = 4_242

LOCKS = """
import fcntl, sys
file = open(sys.argv[1], "rb")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def peer_id(number: int) -> PeerID:
    """One peer."""
    return Identity.from_seed(bytes([number]) * 32).peer_id


@contextmanager
def other_program(folder: Path, run_id: str = "run") -> Iterator[FolderUsers]:
    """One that saves there."""
    users = FolderUsers(folder, run_id, peer_id(9))
    users._me = msgspec.structs.replace(users._me, process=PROCESS)
    users.enter()
    yield users
    users.leave()


def told_of(folder: Path, *, known: bool = False, seconds: float = 100.0) -> list[str]:
    """All that a peer of run "run" is told within so long."""
    told = list[str]()

    async def main() -> None:
        users = FolderUsers(folder, "run", peer_id(1))
        watching = asyncio.create_task(users.watch(InlineExecutor(), lambda _: known, told.append))
        await sim.sleep(seconds)
        await stopped(watching)

    sim.run(main)
    return told


def test_two_programs_with_one_folder_and_no_invite_trained_apart_in_silence(tmp_path: Path) -> None:
    """Each is told once, with the process of the other one and what to do; not before two looks."""
    with other_program(tmp_path):
        assert not told_of(tmp_path, seconds=19.0)
        (message,) = told_of(tmp_path)
        assert f"run 'run' is saved in {tmp_path} by process {PROCESS}, too" in message
        assert "(initial_peers)" in message
        assert not told_of(tmp_path, known=True)
    assert not told_of(tmp_path)
    assert not list(tmp_path.iterdir())


def test_two_runs_in_one_folder_are_told(tmp_path: Path) -> None:
    """Also where the peers know each other, by another run."""
    with other_program(tmp_path, "other"):
        (message,) = told_of(tmp_path, known=True)
    assert message.startswith(f"run 'other' is saved in {tmp_path}, too, by process {PROCESS}: give each run a folder")


def test_a_program_that_was_killed_with_kill_9_uses_the_folder_no_more(tmp_path: Path) -> None:
    """Its lock went with it; its file is removed by the next one that looks."""
    with other_program(tmp_path) as users:
        (path,) = tmp_path.iterdir()
        content = path.read_bytes()
        assert not users.others()
    path.write_bytes(content)
    me = FolderUsers(tmp_path, "run", peer_id(1))
    command = [sys.executable, "-c", LOCKS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        (other,) = me.others()
        assert (other.peer, other.where) == (str(peer_id(9)), f"process {PROCESS}")
        process.kill()  # SIGKILL
        process.wait(60.0)
    assert not me.others()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_told_by_the_saver(tmp_path: Path) -> None:
    """A look costs nothing, and says nothing."""
    assert not told_of(tmp_path / "missing")
