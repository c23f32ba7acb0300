"""Child processes of the supervisor: it starts them, reads their reports, sends them commands, and ends them.

These things hold for every child:

- it is a direct child in a session of its own, so that the terminal's Ctrl+C reaches the supervisor alone;
- its stdin is a pipe that only the supervisor holds: when the supervisor dies, however, the child reads the end of the
  pipe and exits (see `shoal.demo.lifeline`), so nothing outlives the demo;
- its end is seen by the end of its stdout or of the process, whichever comes first, and is reported once;
- its stderr goes to its log file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from shoal.demo.messages import Command, Report, decode_report, encode

__all__ = ["Child", "child_environment", "python_module"]

_LONGEST_LINE_BYTES = 1 << 20
_DRAIN_S = 5.0
_NEW_GROUP: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # the same for Windows


def python_module(module: str, argument: bytes) -> list[str]:
    """The command that runs `module` of this installation in this Python, with one argument."""
    return [sys.executable, "-P", "-m", module, argument.decode()]


def child_environment() -> dict[str, str]:
    """This process's environment, with this shoal first on the path and one thread per library."""
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


class Child:
    """One child process. Made by `Child.start`.

    Args:
        name: what people call it.
        process: the running process.
        log: file that its stderr goes to.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self._process, self._log = process, log
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        on_report: Callable[[str, Report], None],
        on_end: Callable[[str, int, str], None],
    ) -> Child:
        """Start `command` and listen to it.

        Args:
            name: what people call it.
            command: program and arguments.
            log: file for its stderr, replaced.
            on_report: called with the name and each report, in the running loop.
            on_end: called once with the name, the return code and the last words of the log when it is gone.
        """
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=child_environment(),
                limit=_LONGEST_LINE_BYTES,
                start_new_session=True,  # without effect on Windows
                creationflags=_NEW_GROUP,
            )
        child = cls(name, process, log)
        child._listener = asyncio.create_task(child._listen(on_report, on_end), name=f"listen to {name}")
        return child

    @property
    def running(self) -> bool:
        """Whether the process has not been seen to end."""
        return self._process.returncode is None

    @property
    def returncode(self) -> int | None:
        """As in subprocess; None while it runs."""
        return self._process.returncode

    def tell(self, command: Command) -> None:
        """Send a command; a child that is gone does not hear it."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(encode(command) + b"\n")

    def kill(self) -> None:
        """End the process at once (SIGKILL where there are signals). Safe on one that is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))

    async def gone(self, within_s: float) -> bool:
        """Wait until the process has ended and everything it said was handed over; False if that takes too long."""
        if self._listener is not None:
            await asyncio.wait({self._listener}, timeout=within_s)
            return self._listener.done()
        return not self.running

    async def _listen(self, on_report: Callable[[str, Report], None], on_end: Callable[[str, int, str], None]) -> None:
        reader = asyncio.create_task(self._read(on_report))
        waiter = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({reader, waiter}, return_when=asyncio.FIRST_COMPLETED)
            # One of them ended; the other must follow soon. A process that closed its stdout is no use any more.
            await asyncio.wait({reader, waiter}, timeout=_DRAIN_S)
            self.kill()
            returncode = await waiter
        finally:
            reader.cancel()
            waiter.cancel()
        if self._process.stdin is not None:
            self._process.stdin.close()
        on_end(self.name, returncode, self.last_words() if returncode > 0 else "")

    async def _read(self, on_report: Callable[[str, Report], None]) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        while True:
            try:
                line = await stdout.readline()
            except ValueError:  # longer than the limit: not one of our messages
                return
            if not line:
                return
            with contextlib.suppress(msgspec.MsgspecError):  # a library's print is no message
                on_report(self.name, decode_report(line))

    def last_words(self) -> str:
        """The last line of its stderr that says something, shortened."""
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
