"""The `shoal` command, and how it ends: an expected error is one clear line on stderr, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from shoal.cli.debug import debug
from shoal.cli.demo import demo
from shoal.cli.dht import dht
from shoal.cli.doctor import doctor
from shoal.cli.key import key
from shoal.cli.plan import plan
from shoal.cli.status import status
from shoal.errors import ConfigError, ShoalError
from shoal.version import __version__

__all__ = ["main"]

EXIT_FAILED, EXIT_WRONG, EXIT_INTERRUPTED = 1, 2, 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="shoal")
def command() -> None:
    """Train one PyTorch model on machines that nobody controls: no server, no cluster, peers come and go."""


for _subcommand in (demo, dht, status, doctor, plan, key, debug):
    command.add_command(_subcommand)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        arguments: the arguments without the name of the program; None: those of the process.

    Raises:
        SystemExit: always; the codes are in `shoal.cli`.
    """
    try:
        code = command.main(arguments, prog_name="shoal", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except ShoalError as error:
        click.echo(f"shoal: {' '.join(str(error).split())}", err=True)
        code = EXIT_WRONG if isinstance(error, ConfigError) else EXIT_FAILED
    except (KeyboardInterrupt, click.Abort):
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone: nothing more can be written, nor flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILED
    sys.exit(code)
