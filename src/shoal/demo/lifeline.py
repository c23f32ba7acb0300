"""The first step of every child process: hold on to the supervisor by one pipe, and report through another.

`Lifeline` needs nothing but the standard library and msgspec, so it stands before torch is imported. Its thread reads
commands from stdin; when the pipe ends (the supervisor is gone, however it went) it ends this process at once, whatever
the rest of it is doing. So `kill -9` of the supervisor leaves nothing behind, without anything specific to one
operating system. If the kernel can do the same (Linux), it is asked to as well: while torch loads, no Python thread
runs for up to two seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import BinaryIO

import msgspec

from shoal.demo.messages import Command, Leave, Report, Stop, decode_command, encode

__all__ = ["Lifeline"]

_ORPHANED = 3
_PR_SET_PDEATHSIG = 1


class Lifeline:
    """The child's end of the two pipes.

    Args:
        stdin: where commands come from.
        stdout: where reports go.
    """

    def __init__(self, stdin: Iterable[bytes], stdout: BinaryIO) -> None:
        self._stdin, self._stdout = stdin, stdout
        self._lock = threading.Lock()
        self._commands: deque[Command] = deque()
        self._leave = threading.Event()

    @classmethod
    def hold(cls) -> Lifeline:
        """Take this process's stdin and stdout, leave Ctrl+C to the supervisor, and start to listen.

        From here on `print` goes to stderr: stdout carries reports only.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _die_with_parent()
        # Unbuffered: a thread that waits in a buffered read cannot be left behind when Python ends.
        stdin = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
        line = cls(stdin, os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
        sys.stdout = sys.stderr
        threading.Thread(target=line.listen, name="lifeline", daemon=True).start()
        return line

    def listen(self) -> None:
        """Read commands until the pipe ends, then end the process."""
        for text in self._stdin:
            try:
                command = decode_command(text)
            except msgspec.MsgspecError:
                continue
            if isinstance(command, Leave):
                self._leave.set()
            self._commands.append(command)
        os._exit(_ORPHANED)

    def say(self, report: Report) -> None:
        """Send a report; from any thread. Ends the process if nobody listens any more."""
        try:
            with self._lock:
                self._stdout.write(encode(report) + b"\n")
                self._stdout.flush()
        except OSError:
            os._exit(_ORPHANED)

    def stop_epoch(self) -> int | None:
        """The epoch of the newest `Stop` that has come since the last call; None if none has."""
        newest = None
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Stop):
                newest = command.epoch
        return newest

    @property
    def told_to_leave(self) -> bool:
        """Whether `Leave` has come."""
        return self._leave.is_set()

    def wait_for_leave(self, within_s: float) -> bool:
        """Wait until `Leave` comes; False if it does not come in time."""
        return self._leave.wait(within_s)


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies. A help, not a promise: the pipe is what counts."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
