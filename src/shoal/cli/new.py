"""`shoal new`: writes a program to start from. The programs are the files in `templates`."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import packages_distributions
from importlib.resources import files
from pathlib import Path

import click

from shoal.errors import ConfigError

__all__ = ["KINDS", "new", "text_of"]

KINDS = {
    "plain": "a loop of its own",
    "trainer": "Hugging Face's Trainer, which needs shoal[transformers]",
    "lightning": "Lightning's Trainer, which needs shoal[lightning]",
}

_IMPORTED = {"lightning", "shoal", "torch", "transformers"}
"""By these programs, perhaps not installed yet. A file of such a name beside them would be imported instead."""


@click.command(short_help="Write a program to start from.")
@click.option(
    "--kind", type=click.Choice(list(KINDS)), default="plain", show_default=True, help="Of the training loop."
)
@click.argument("file", type=click.Path(path_type=Path))
def new(*, kind: str, file: Path) -> None:
    """Write a short program to FILE, such as train.py, that trains a small model at once.

    It needs no data and no download. Run it, and it prints the line with which another peer joins. Then put your own
    data and model in.
    """
    if file.stem in _IMPORTED or file.stem in sys.stdlib_module_names or file.stem in packages_distributions():
        raise ConfigError(f"{file} would hide the module {file.stem} from whatever imports it: give another name")
    text = text_of(kind)
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists, and stays as it is: give the path of a new file") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error
    click.echo(f"{file}: {KINDS[kind]}. It trains alone at once, and prints how another peer joins:")
    click.echo(f"  python {shlex.quote(str(file))}")


def text_of(kind: str) -> str:
    """The program of this kind."""
    return files("shoal.cli").joinpath("templates", f"{kind}.py.txt").read_text(encoding="utf-8")
