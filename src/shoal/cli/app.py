"""The `shoal` command, and how it ends: an expected error is one clear line on stderr, never a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import click

from shoal.cli.debug import debug
from shoal.cli.demo import demo
from shoal.cli.dht import dht
from shoal.cli.doctor import doctor
from shoal.cli.key import key
from shoal.cli.new import new
from shoal.cli.plan import plan
from shoal.cli.run import run
from shoal.cli.status import status
from shoal.errors import ConfigError, ShoalError
from shoal.version import __version__

__all__ = ["main"]

EXIT_FAILED, EXIT_WRONG, EXIT_INTERRUPTED = 1, 2, 130

_OUTPUT_ERRORS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""The errors of a write to a pipe that nobody reads, or to a file whose disk is full or broken."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="shoal")
def command() -> None:
    """Train one PyTorch model on machines that nobody controls: no server, no cluster, peers come and go."""


for _subcommand in (demo, new, run, dht, status, doctor, plan, key, debug):
    command.add_command(_subcommand)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        arguments: the arguments without the name of the program; None: those of the process.

    Raises:
        SystemExit: always; the codes are in `shoal.cli`.
    """
    if sys.stdout is None:  # `>&-`; then the next socket would take the place of standard output
        click.echo("shoal: standard output is closed: send it to a file or to /dev/null", err=True)
        sys.exit(EXIT_FAILED)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        # What is still to be written goes nowhere: Python would fail again when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # whoever closed a pipe knows
            click.echo(f"shoal: cannot write the output: {error.strerror}", err=True)
        code = EXIT_FAILED
    if callable(code):  # the program of `shoal run`, whose errors are its own
        code()
        sys.exit()
    sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int | Callable[[], None] | None:
    """Run the command line; the exit code, or what is still to be run."""
    try:
        code: int | Callable[[], None] | None = command.main(arguments, prog_name="shoal", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ShoalError as error:
        click.echo(f"shoal: {' '.join(str(error).split())}", err=True)
        return EXIT_WRONG if isinstance(error, ConfigError) else EXIT_FAILED
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    return code
