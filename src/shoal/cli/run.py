"""`shoal run`: an ordinary program as a peer, with what belongs to this machine given from outside.

The program runs in this process, as `python PROGRAM` would run it. Its arguments, exit code, tracebacks and standard
input are its own. `shoal.runtime.launch` gives its `shoal.DHT` and `shoal.Optimizer` the options. The rest is here:
SIGTERM leaves in order, and a program that is ended from outside, or fails, leaves a checkpoint of its last state.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import runpy
import socket
import sys
import threading
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shoal.base.extras import install_command
from shoal.base.warning_names import named
from shoal.cli.config_file import config_option
from shoal.cli.options import Real, WholePath, announced, maddr_of, upload_limit_option
from shoal.errors import ClosedError, ConfigError, ShoalError

if TYPE_CHECKING:
    from shoal.runtime.launch import Launch, Setting

__all__ = ["run"]

EXIT_TERMINATED = 143

_FILE, _FOLDER = WholePath(dir_okay=False), WholePath(file_okay=False)
_OF_CHECKPOINTS = ("save_every", "keep_checkpoints")

_NOT_THE_PROGRAMS = (__name__, "runpy", "importlib._bootstrap", "importlib._bootstrap_external")
"""Modules whose frames stand above those of the program."""

_logger = logging.getLogger("shoal.run")


@click.command(
    short_help="Run a program as a peer.", context_settings={"allow_interspersed_args": False}, no_args_is_help=True
)
@config_option
@click.option("--invite", metavar="INVITE", multiple=True, help="Join the peers of this invite or address; repeatable.")
@click.option("--identity", type=_FILE, help="Key file, so that the peer's id stays; made if missing.")
@click.option("--peers-file", type=_FILE, help="Keep the known peers here, and try them at the next start.")
@click.option("--host", help="Host to listen on; 0.0.0.0 lets other machines in. Default: see DHT.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on. Default: any free one.")
@click.option("--announce", metavar="HOST[:PORT]", help="Address that others dial, if it is another one.")
@upload_limit_option
@click.option("--checkpoint", type=_FOLDER, help="Go on from the best checkpoint in this folder, and save there.")
@click.option("--save-every", type=click.IntRange(min=0), help="Epochs between two checkpoints. Default: 10.")
@click.option("--keep-checkpoints", type=click.IntRange(min=1), help="States whose checkpoints stay. Default: 3.")
@click.option("--metrics", type=_FILE, help="Append the metrics of each epoch to this file, as JSON lines.")
@click.option("--tensorboard", type=_FOLDER, help="Write them for TensorBoard.")
@click.option("--prometheus", type=click.IntRange(1, 65535), metavar="PORT", help="Serve them for Prometheus.")
@click.option("--grace", type=Real(0, 3600), default=30.0, show_default=True, help="Seconds for a round after SIGTERM.")
@click.option("--verbose", is_flag=True, help="Tell on stderr who joins and leaves, and each epoch.")
@click.option("-m", "module", is_flag=True, help="PROGRAM is the name of a module, as for `python -m`.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, /, *, program: str, arguments: tuple[str, ...], module: bool, **options: Any) -> Any:
    """Run PROGRAM, a Python file that makes a shoal.DHT and a shoal.Optimizer, with ARGUMENTS of its own.

    \b
    shoal run train.py                                  the first peer
    shoal run --invite shoal:... train.py --lr 0.1      another one; --lr is train.py's
    shoal run --config shoal.toml train.py

    The options are for what the program leaves out. An argument that the program gives itself stays, and a warning
    says so. `initial_peers=[]`, and `host_maddrs="/ip4/0.0.0.0/tcp/0"`, count as left out.

    \b
    shoal.toml has the same names:
        invite = "shoal:..."
        identity = "peer.key"          # paths are relative to the file
        checkpoint = "checkpoints"

    SIGTERM lets a round in progress end, saves a checkpoint if there is a folder for them, tells the other peers, and
    ends the program with code 143. Ctrl+C and errors are the program's own; they save and tell, too. In all else the
    program runs as with `python PROGRAM ARGUMENTS`.
    """  # noqa: D301 (click's mark for text that is not to be filled)
    start = functools.partial(_run_module, program) if module else _read_program(program)
    settings = _settings(context, options)
    sinks = _sinks(options)
    # Handed out of click, whose way with errors and interrupts is not the program's.
    return functools.partial(_start, start, [program, *arguments], settings, sinks, options)


# --------------------------------------------------------------------------------------------------------- the settings


def _settings(context: click.Context, options: dict[str, Any]) -> list[Setting]:
    """The options for the constructors, once they are checked as far as they can be before the program runs."""
    from shoal.runtime.launch import Setting

    def origin(*names: str) -> str:
        name = next(name for name in names if options[name] not in (None, ()))
        told = name.replace("_", "-")
        is_default = context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
        return f"{told} in {options['config']}" if is_default else f"--{told}"

    _check(options, origin)
    host, port, announce = options["host"], options["port"], options["announce"]
    place = None if host is port is None else maddr_of(host, port or 0)
    given = [
        ("DHT", "initial_peers", list(options["invite"]) or None, ("invite",)),
        ("DHT", "identity_path", options["identity"], ("identity",)),
        ("DHT", "peers_file", options["peers_file"], ("peers_file",)),
        ("DHT", "host_maddrs", place, ("host", "port")),
        ("DHT", "upload_limit", options["upload_limit"], ("upload_limit",)),
        ("DHT", "announce_maddrs", None if announce is None else announced(announce), ("announce",)),
        *(("Optimizer", name, options[name], (name,)) for name in ("checkpoint", *_OF_CHECKPOINTS)),
    ]
    return [
        Setting(owner, name, value, origin(*names), needs="checkpoint" if name in _OF_CHECKPOINTS else "")
        for owner, name, value, names in given
        if value is not None
    ]


def _check(options: dict[str, Any], origin: Callable[[str], str]) -> None:
    """Raise `ConfigError` for what the constructors would refuse, and make the key and the folder."""
    from shoal.base.peer import parse_peers
    from shoal.protocol.identity import Identity
    from shoal.runtime.peers_file import PeersFile

    if options["invite"]:
        parse_peers(options["invite"], name=origin("invite"))
    if options["identity"] is not None:
        Identity.load_or_create(options["identity"])
    if options["peers_file"] is not None:
        PeersFile(options["peers_file"])
    if options["checkpoint"] is not None:
        _try("checkpoint", lambda: options["checkpoint"].mkdir(parents=True, exist_ok=True))


def _try(name: str, make: Callable[[], object]) -> None:
    """Raise `ConfigError` that names the option if this file or folder cannot be made."""
    try:
        make()
    except OSError as error:
        raise ConfigError(f"--{name} {error.filename}: {error.strerror or error}") from error


def _sinks(options: dict[str, Any]) -> list[Callable[[], Any]]:
    """What makes the sinks of the metrics: later, as torch is imported for it, and the program may set it up before.

    What they need is looked at now, before the program runs and its peer joins. Raises `ConfigError` if it is missing.
    """
    found: list[Callable[[], Any]] = []
    for name, kind in (("metrics", "JsonLines"), ("tensorboard", "TensorBoard"), ("prometheus", "Prometheus")):
        if (value := options[name]) is not None:
            if name == "metrics":
                _try(name, lambda: (value.parent.mkdir(parents=True, exist_ok=True), value.open("a").close()))
            elif name == "tensorboard":
                _check_package(name, "tensorboard")
            else:
                _check_package(name, "prometheus_client")
                _check_port(name, value)
            found.append(functools.partial(_sink, kind, value))
    return found


def _check_package(name: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"--{name} needs {package}, which is not installed: {install_command('metrics')}")


def _check_port(name: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(f"--{name} {port}: {error.strerror or error}; choose another port") from error


def _sink(kind: str, value: object) -> Any:
    from shoal.integrations import metrics

    return getattr(metrics, kind)(value)


# ---------------------------------------------------------------------------------------------------------- the program


def _read_program(program: str) -> Callable[[], None]:
    """Read a program's file, so that one that is missing is found at once; returns what runs it."""
    loader = SourceFileLoader("__main__", os.path.abspath(program))  # noqa: PTH100 (as Python itself has it)
    try:
        source = loader.get_data(loader.path)
    except OSError as error:
        raise ConfigError(f"the program {program} cannot be read: {error.strerror or error}") from error

    def start() -> None:
        main = sys.modules["__main__"]
        main.__file__, main.__loader__ = loader.path, loader
        _put_first(os.path.dirname(os.path.realpath(loader.path)))  # noqa: PTH120 (as Python itself has it)
        exec(loader.source_to_code(source, loader.path), main.__dict__)  # noqa: S102 (the user's program)

    return start


def _run_module(name: str) -> None:
    _put_first(os.getcwd())  # noqa: PTH109 (a text)
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # noqa: SLF001 (what `python -m` itself calls)


def _put_first(folder: str) -> None:
    """Import from there what the program imports, and not from beside the command `shoal`."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _start(
    program: Callable[[], None],
    arguments: list[str],
    settings: list[Setting],
    sinks: list[Callable[[], Any]],
    options: dict[str, Any],
) -> None:
    """Run the program to its end, and end in order."""
    from shoal.events import print_log
    from shoal.runtime.launch import launch
    from shoal.runtime.leave import Leaving

    sys.argv[:] = arguments
    sys.modules["__main__"] = ModuleType("__main__")  # it stays, for what still runs when the main thread is through
    if options["verbose"]:
        print_log()
    current = launch(settings)
    metrics = _follow(current, sinks)
    try:
        with Leaving(current.made["DHT"], options["grace"], EXIT_TERMINATED) as leaving:
            try:
                program()
            except SystemExit:
                raise
            except BaseException as error:
                if current.is_here and not (leaving.requested and isinstance(error, ClosedError)):
                    _show(error)
                raise
            finally:
                if current.is_here and not leaving.requested:
                    _wait_for_threads()
    except BaseException:
        # The error holds on to the program's variables, and so to an optimizer in them.
        if current.is_here:
            _end(current, metrics)
        raise
    if current.is_here:
        _end(current, metrics)
        # Of a torchrun group only rank 0 is a peer.
        if os.environ.get("RANK", "0") == "0" and (unused := current.unused()):
            told = ", ".join(each.origin for each in unused)
            _logger.warning(named("the program has made no shoal.%s: %s had no effect"), unused[0].owner, told)


def _show(error: BaseException) -> None:
    """Print a traceback as Python would, and at once: what is still to be done may take seconds."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _NOT_THE_PROGRAMS:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.excepthook = lambda *_: None  # it goes on to the top, where it decides how the process ends


def _follow(current: Launch, sinks: list[Callable[[], Any]]) -> list[Any]:
    """Hand on the metrics of the program's first optimizer; what is to be closed at the end."""
    following: list[Any] = []

    def begin(owner: str, new: Any) -> None:
        if sinks and owner == "Optimizer" and not following:
            from shoal.integrations.metrics import Metrics

            following.append(Metrics(new, *(make() for make in sinks)))

    current.when_made(begin)
    return following


def _wait_for_threads() -> None:
    """As Python waits for them at its end. They may still train."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _end(current: Launch, metrics: list[Any]) -> None:
    """The program is through: leave the network, and save what was not saved."""
    for dht in list(current.made["DHT"]):
        dht.shutdown()
    for optimizer in list(current.made["Optimizer"]):
        try:
            optimizer.save_last()
        except ShoalError as error:
            _logger.warning(named("the last state was not saved: %s"), error)
    for each in metrics:
        each.close()
