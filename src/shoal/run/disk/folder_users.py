"""The programs that save in one folder of checkpoints, and whether they train together.

Peers of one run may share a folder. Two programs that do not know each other train apart, though, and each goes on from
the best checkpoint of both when it is started again: so that is told. Each peer has a file in the folder, with its name
in it, and keeps it locked. The system takes the lock away with the process, however that ends, so a file that nobody
locks is of a program that is gone. A system without such locks tells nothing.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from shoal.base.clock import Executor
from shoal.base.peer import PeerID

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None  # type: ignore[assignment]

__all__ = ["FolderUsers", "User"]

_LOOK_S = 20.0
"""Others are looked for so often. One that is not known at two looks in a row is told: it may just be joining."""

_LEAVE_S = 1.0
"""The longest wait for our own file to be removed. Others see that nobody locks it."""

_CONTENT_BYTES = 4096


class User(msgspec.Struct, frozen=True):
    """A peer that saves in the folder.

    Attributes:
        run_id: of the run that it trains.
        peer: its id, as text.
        host: the machine's name.
        process: the id of its process there.
    """

    run_id: str
    peer: str
    host: str
    process: int

    @property
    def where(self) -> str:
        """The program, as the user knows it."""
        if self.host != socket.gethostname():
            return f"process {self.process} on {self.host}"
        return "this program itself" if self.process == os.getpid() else f"process {self.process}"


class FolderUsers:
    """This peer's file in a folder, and a look at those of the others.

    Args:
        folder: of the checkpoints.
        run_id: of the run that is trained here.
        peer: this one.
    """

    def __init__(self, folder: Path, run_id: str, peer: PeerID) -> None:
        self._folder, self._me = folder, User(run_id, str(peer), socket.gethostname(), os.getpid())
        self._path = folder / f".user-{secrets.token_hex(8)}.lock"
        self._file: IO[bytes] | None = None
        self._told = set[str]()

    async def watch(self, executor: Executor, knows: Callable[[str], bool], warn: Callable[[str], None]) -> None:
        """Look now and then, and tell of each other program that trains apart, once.

        Args:
            executor: the files are read there. It is used for nothing else, as a disk may hang.
            knows: whether a peer of this id is one of those that this peer trains with.
            warn: tells it.
        """
        try:
            await executor.run(self.enter)
            strange = set[str]()
            while self._file is not None:
                others = [each for each in await executor.run(self.others) if not self._trains_with(each, knows)]
                for each in others:
                    if each.peer in strange and each.peer not in self._told:
                        self._told.add(each.peer)
                        warn(self._of(each))
                strange = {each.peer for each in others}
                await asyncio.sleep(_LOOK_S)
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await executor.run(self.leave)

    def _trains_with(self, other: User, knows: Callable[[str], bool]) -> bool:
        return other.run_id == self._me.run_id and knows(other.peer)

    def _of(self, other: User) -> str:
        if other.run_id != self._me.run_id:
            return (
                f"run {other.run_id!r} is saved in {self._folder}, too, by {other.where}: give each run a folder of "
                "its own. A program that finds checkpoints of another run only does not start"
            )
        return (
            f"run {self._me.run_id!r} is saved in {self._folder} by {other.where}, too, with which this peer is not "
            "connected: they train apart, and each goes on from the better checkpoint of both when it is started "
            "again. Give one of them an invite of the other (initial_peers), or each a folder or a run_id of its own"
        )

    def enter(self) -> None:
        """Lock a file of our own, where that can be done."""
        if fcntl is None:
            return
        part = self._path.with_suffix(".part")
        with suppress(OSError):  # the folder cannot be written: each save says so
            file = part.open("wb")
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(msgspec.json.encode(self._me))
                file.flush()
                part.rename(self._path)  # it has its name only once it is locked
            except OSError:
                file.close()
                part.unlink(missing_ok=True)
                raise
            self._file = file

    def others(self) -> list[User]:
        """The living others. Files of those that are gone are removed."""
        found = []
        with suppress(OSError):
            for path in sorted(self._folder.glob(".user-*.lock")):
                if path != self._path:
                    with suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
                        try:
                            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        except BlockingIOError:
                            found.append(msgspec.json.decode(file.read(_CONTENT_BYTES), type=User))
                        else:
                            path.unlink()
        return found

    def leave(self) -> None:
        """Give the file up. Safe to call twice."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                self._path.unlink()
            file.close()
