"""Processes for tests that need several: each runs scripts of `tests.integration.scripts`, one after another.

A worker imports torch once and is used again by the next test, unless somebody killed it. Both sides speak JSON lines;
what a script says is a pair (kind, value), and a test waits for the kind it needs, with a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

from shoal.base.peer import Address
from shoal.protocol.identity import Identity
from tests.integration.forks import Forked, fork

LONG_S = 90.0
"""No wait is longer; on a machine that is not busy with something else all of them end within a second or two."""


def environment(**changes: str) -> dict[str, str]:
    """The variables for a child that imports what we import."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}


class Talk:
    """The lines that a process writes, as they come, and what it writes to stderr.

    Args:
        command: what is run. This Python is forked with torch imported (`tests.integration.forks`),
        fresh: except where a test is about its start.
        cwd: the folder that it starts in.
        network: the file of a network namespace that a fork enters.
        library: what a fork has imported, too (`tests.integration.forks.LIBRARIES`).
        variables: changes to the environment.
    """

    def __init__(
        self,
        command: list[str],
        *,
        fresh: bool = False,
        cwd: Path | None = None,
        network: str | None = None,
        library: str | None = None,
        **variables: str,
    ) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        self.process: subprocess.Popen[bytes] | Forked
        if command[0] == sys.executable and not fresh:
            self.process = fork(
                command[1:],
                environment(**variables),
                self._errors.fileno(),
                cwd=cwd,
                network=network,
                library=library,
            )
        else:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=cwd,
                env=environment(**variables),
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.decode())
        self._lines.put(None)

    def line(self, timeout_s: float = LONG_S) -> str:
        """The next line of stdout. Raises `EOFError` at its end, with what stands on stderr."""
        line = self._lines.get(timeout=timeout_s)
        if line is None:
            self._lines.put(None)
            raise EOFError(f"the process ended with {self.process.wait(LONG_S)}:\n{self.errors()}")
        return line

    def rest(self, timeout_s: float = LONG_S) -> list[str]:
        """All lines that are still to come, once the process has closed its stdout; so long between two of them."""
        lines = []
        with contextlib.suppress(EOFError):
            while True:
                lines.append(self.line(timeout_s))
        return lines

    def write(self, text: str) -> None:
        """Write a line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def errors(self) -> str:
        """What stands on stderr so far."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size, 0).decode()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code, once it has ended."""
        return self.process.wait(LONG_S)

    def end(self) -> None:
        """Kill it if it lives, and free everything."""
        self.process.kill()
        self.process.wait(LONG_S)
        self._reader.join(LONG_S)
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Worker(Talk):
    """A process that runs the scripts of a module."""

    def __init__(self, module: str = "tests.integration.scripts") -> None:
        super().__init__([sys.executable, "-m", module])
        self.busy = False

    def start(self, script: str, /, **arguments: Any) -> None:
        """Run a script, with these arguments."""
        self.busy = True
        self.write(json.dumps([script, arguments]))

    def tell(self, value: Any) -> None:
        """Answer a script that asks (`hear`)."""
        self.write(json.dumps(value))

    def expect(self, kind: str, timeout_s: float = LONG_S) -> Any:
        """Wait until the script says something of this kind; passes over everything else."""
        while True:
            said, value = json.loads(self.line(timeout_s))
            if said == "ended":
                self.busy = False
            if said == kind:
                return value
            if said == "failed":
                raise AssertionError(f"the script failed:\n{value}")
            if said == "ended":
                raise AssertionError(f"the script ended before it said {kind!r}")

    def latest(self, kind: str) -> Any:
        """The last value of this kind that it has said; waits for a first one. Takes all lines that are there."""
        value = self.expect(kind)
        while not self._lines.empty():
            said, other = json.loads(self.line())
            assert said not in ("failed", "ended"), other
            value = other if said == kind else value
        return value

    def finish(self) -> None:
        """Wait until the script has ended."""
        self.expect("ended")

    @property
    def usable(self) -> bool:
        """Whether it lives and has nothing to do."""
        return not self.busy and self.process.poll() is None


class Workers:
    """Makes workers when they are needed."""

    def __init__(self, module: str = "tests.integration.scripts") -> None:
        self._module = module
        self._all: list[Worker] = []

    def take(self, count: int) -> list[Worker]:
        """So many workers that have nothing to do."""
        for worker in self._all:
            if not worker.usable:
                worker.end()
        self._all = [worker for worker in self._all if worker.usable]
        while len(self._all) < count:
            self._all.append(Worker(self._module))
        return self._all[:count]

    def end(self) -> None:
        """Kill all of them."""
        for worker in self._all:
            worker.end()


@contextlib.contextmanager
def open_workers(module: str = "tests.integration.scripts") -> Iterator[Workers]:
    """Workers, for as long as the block lasts."""
    workers = Workers(module)
    try:
        yield workers
    finally:
        workers.end()


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run some lines of Python in a new interpreter in development mode, to the end.

    What asyncio then says about steps of the loop that took long is left out: a busy machine is slow.
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env=environment(**variables),
        check=False,
    )
    done.stderr = re.sub(r"^Executing .* took \d+\.\d+ seconds\n", "", done.stderr, flags=re.MULTILINE)
    return done


def nobody() -> Address:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return Address("127.0.0.1", port, Identity.ephemeral().peer_id)


def lives(pid: int) -> bool:
    """Whether the process runs (a dead one that nobody has waited for yet does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return False


def until(condition: Any, timeout_s: float = LONG_S) -> Any:
    """What `condition()` returns, as soon as it is true."""
    pause = threading.Event()
    steps = int(timeout_s / 0.01)
    for _ in range(steps):
        if found := condition():
            return found
        pause.wait(0.01)
    raise TimeoutError("it did not happen")


def same(values: Mapping[Any, Any]) -> bool:
    """Whether all values are equal."""
    return len({json.dumps(value, sort_keys=True) for value in values.values()}) <= 1
