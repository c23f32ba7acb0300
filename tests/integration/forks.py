"""Processes of Python that begin with torch imported: they are forked from one that has it.

An import of torch, of what torch imports for the first optimizer (`torch._dynamo`) and of shoal takes six seconds of a
processor; a fork takes next to nothing. What it runs is the main module, as in an interpreter of its own. At its end it
waits for its threads, runs what `atexit` was given, and has its exit code. Only its modules are not taken apart: with
torch that takes more than a second.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "shoal.optim", "shoal.zero", "shoal.data")
"""What everything that is forked has imported (tests/integration/ranks.py)."""

LIBRARIES = {
    "lightning": ("lightning",),
    "transformers": ("transformers.trainer", "transformers.models.bert.modeling_bert", "accelerate"),
}
"""What else forks have imported that say so."""

_AT_IMPORT = ("ATEN_", "MKL_", "OMP_", "PYTHONHASHSEED")
_REQUEST_BYTES = 1 << 17
_NUMBER = 8  # bytes of a number of a process, and of an exit code, in the pipe of that process
_CLONE_NEWNET = 0x40000000


class Forked:
    """A process that was forked; what tests use of `subprocess.Popen`.

    Attributes:
        pid: its number.
        stdin: a pipe to it.
        stdout: a pipe from it.
        returncode: as of `subprocess.Popen`.
    """

    def __init__(self, pid: int, ended: int, stdin: int, stdout: int) -> None:
        self.pid, self._ended = pid, ended
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it lives."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(os.read(self._ended, _NUMBER))
            os.close(self._ended)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class _Server:
    """A process that others are forked from, seen from here.

    Args:
        library: one of `LIBRARIES` that it has imported, too.
    """

    def __init__(self, library: str | None) -> None:
        self._control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.forks", *PRELOADED, *LIBRARIES.get(library or "", ())],
                stdin=there.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self._control.close()
        self._process.wait()

    def start(self, request: Mapping[str, object], stderr: int) -> Forked:
        """Have a process forked."""
        read_in, write_in = os.pipe()
        read_out, write_out = os.pipe()
        read_end, write_end = os.pipe()
        socket.send_fds(self._control, [json.dumps(request).encode()], (read_in, write_out, stderr, write_end))
        for each in (read_in, write_out, write_end):
            os.close(each)
        return Forked(int(os.read(read_end, _NUMBER)), read_end, write_in, read_out)


_server = functools.cache(_Server)


def fork(
    arguments: Sequence[str],
    env: Mapping[str, str],
    stderr: int,
    *,
    cwd: Path | None = None,
    network: str | None = None,
    library: str | None = None,
) -> Forked:
    """Run what `python` runs if it is given these arguments.

    Args:
        arguments: `-m MODULE`, `-c CODE` or a program, with its arguments; before it may come `-W ACTION`.
        env: its environment.
        stderr: where its errors go.
        cwd: the folder that it starts in.
        network: the file of a network namespace that it enters.
        library: one of `LIBRARIES` that it has imported from the beginning.
    """
    late = [name for name in env if name.startswith(_AT_IMPORT) and env[name] != os.environ.get(name)]
    assert not late, f"{late} count when torch is imported: start this process with fresh=True"
    request = {"arguments": list(arguments), "env": dict(env), "cwd": str(cwd or Path.cwd()), "network": network}
    return _server(library).start(request, stderr)


# ------------------------------------------------------------------------------------------------- in the other process


def _serve(control: socket.socket) -> list[str]:
    """Fork what is asked for until nobody is there to ask. Returns in a fork, with its arguments."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    ends: dict[int, int] = {}
    asks = control.fileno()
    while True:
        ready, _, _ = select.select([asks, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_ends(ends)
        if asks not in ready:
            continue
        asked, given, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 4)
        if not asked:
            for pid in ends:  # nobody is left who could end them
                os.kill(pid, signal.SIGKILL)
            sys.exit()
        *streams, end = given
        if pid := os.fork():
            ends[pid] = end
            for each in streams:
                os.close(each)
            _tell(end, pid)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        for target, each in enumerate(streams):
            os.dup2(each, target)
        for each in (*streams, end, *ends.values(), woken, waker):
            os.close(each)
        return _enter(json.loads(asked))


def _tell_ends(ends: dict[int, int]) -> None:
    """Tell those who started them of all processes that have ended."""
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        end = ends.pop(pid)
        _tell(end, os.waitstatus_to_exitcode(status))
        os.close(end)


def _tell(end: int, number: int) -> None:
    with suppress(BrokenPipeError):  # whoever asked for this process has gone
        os.write(end, f"{number:{_NUMBER}}".encode())


def _enter(request: dict[str, object]) -> list[str]:
    """Make this fork what was asked for; returns its arguments."""
    env, network, arguments = request["env"], request["network"], request["arguments"]
    assert isinstance(env, dict)
    assert isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(str(request["cwd"]))
    if network is not None:
        with Path(str(network)).open("rb") as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) == 0, ctypes.get_errno()
    sys.modules["numpy"].random.seed()  # torch's own numbers begin as in any process
    return arguments


def _run(arguments: list[str], filters: Sequence[object]) -> None:
    """Run the program, as the interpreter does."""
    if arguments[0] == "-W":
        # Where it is for an interpreter with this option: after what libraries say of their own warnings.
        own = warnings.filters[: len(warnings.filters) - len(filters)]
        warnings.filters[:] = [*own, (arguments[1], None, Warning, None, 0), *filters]  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        arguments = arguments[2:]
    main = sys.modules["__main__"] = ModuleType("__main__")  # it stays, for threads that outlive the main one
    kind, *rest = arguments
    if kind == "-m":
        sys.path[0], sys.argv[:] = str(Path.cwd()), rest
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]  # what `python -m` itself calls
    elif kind == "-c":
        sys.path[0], sys.argv[:] = "", ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        loader = SourceFileLoader("__main__", str(Path(kind).absolute()))
        main.__file__, main.__loader__ = loader.path, loader
        sys.path[0], sys.argv[:] = str(Path(kind).resolve().parent), arguments
        exec(loader.source_to_code(loader.get_data(loader.path), loader.path), main.__dict__)


def _main() -> None:
    filters = list(warnings.filters)
    atexit.register(lambda: _leave(code))  # the first one: so it is called last
    code: int | None = 0
    for name in sys.argv[1:]:
        importlib.import_module(name)
    assert threading.active_count() == 1
    gc.freeze()  # a fork does not look through all that again
    try:
        _run(_serve(socket.socket(fileno=os.dup(0))), filters)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except KeyboardInterrupt:
        code = None
        raise
    except BaseException:
        code = 1
        raise


def _leave(code: int | None) -> None:
    """End this process as the interpreter would, with this exit code; None: by the signal of Ctrl+C."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    else:
        os._exit(code & 0xFF)


if __name__ == "__main__":
    _main()
